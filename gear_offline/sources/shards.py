"""A dataset of GEAR shards as a source: to choose among its episodes and columns, or to join it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gear_offline.core.closing import Closing
from gear_offline.dataset.dataset import Dataset, open_dataset
from gear_offline.dataset.manifest import MANIFEST_NAME, shard_name
from gear_offline.errors import InputError
from gear_offline.sources.base import SourceInfo, source_text
from gear_offline.sources.folder import hdf5_files

READ_BYTES = 32 << 20  # blocks of 16 MiB are compared whole: shorter reads would repeat that


class DatasetSource(Closing):
    """A `Source` over an opened dataset; see `gear_offline.sources.base.Source`.

    Parameters
    ----------
    dataset
        Opened with ``verify="on_use"`` or ``True``, so that no damaged byte is copied.
    """

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset
        self._run: tuple[str, int, npt.NDArray[Any]] = ("", 0, np.empty(0))  # read last, whole
        self.spec = dataset.spec
        self.episodes = dataset.episodes
        self.terminated = dataset.terminated
        self.truncated = dataset.truncated
        before, scores = dataset.manifest.source, dataset.manifest.reference_scores
        attributes = {k: v for k, v in before.attributes.items() if k not in ("left_out", "picked")}
        self.info = SourceInfo(
            uri=dataset.path.name,
            format="gear",
            rule=before.rule,
            environment_id=dataset.environment_id,
            reference_name=None if scores is None else str(scores["name"]),
            files=(dataset.path / MANIFEST_NAME,),  # it bears the digests of all the others
            attributes={
                **attributes,
                "converted_from": f"{before.uri} ({before.format}), digest {before.digest}",
            },
            locator=str(dataset.path.absolute()),
        )

    def __repr__(self) -> str:
        return source_text(self)

    def read(self, column: str, start: int, stop: int) -> npt.NDArray[Any]:
        """Return rows ``[start, stop)`` of `column`, (stop - start, *shape), native dtype.

        Short reads that follow each other, such as those of chosen episodes, are parts of a long
        one, which is kept.
        """
        rows = self.preferred_rows(column)
        if stop - start >= rows or start == stop:
            return self.dataset.read(column, start, stop)
        found = np.empty((stop - start, *self.spec[column].shape), self.spec[column].dtype)
        at = start
        while at < stop:
            number = at // rows
            if self._run[:2] != (column, number):
                end = min((number + 1) * rows, self.spec.steps)
                run = self.dataset.read(column, number * rows, end)
                self._run = (column, number, run)
            part = self._run[2][at - number * rows : stop - number * rows]
            found[at - start : at - start + len(part)] = part
            at += len(part)
        return found

    def preferred_rows(self, column: str) -> int:
        """Rows per read that suit the storage; at least 1."""
        return max(1, READ_BYTES // self.spec[column].step_bytes)

    def close(self) -> None:
        """Drop the rows that are kept; nothing is held open."""
        self._run = ("", 0, np.empty(0))


def is_dataset(path: Path) -> bool:
    """Whether the directory looks like GEAR shards.

    A folder of HDF5 files may have a manifest.json of its own.
    """
    if not (path / MANIFEST_NAME).is_file():
        return False
    return (path / shard_name(0)).exists() or not hdf5_files(path)


def open_shards(path: Path, *, rule: str | None) -> DatasetSource:
    """Open the dataset directory at `path`; each block is compared when it is read.

    Raises
    ------
    InputError
        ``RULE_UNKNOWN`` for a boundary rule: episodes are stored; those of `open_dataset`.
    """
    if rule is not None:
        raise InputError(
            "RULE_UNKNOWN",
            f"boundary rule {rule!r} does not apply to GEAR shards, which store their episodes",
            where=str(path),
            remedy="leave the rule out, or convert the first source again",
        )
    return DatasetSource(open_dataset(path, verify="on_use"))
