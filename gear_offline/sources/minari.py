"""Minari datasets, read from disk without the minari package.

An episode of T steps has T + 1 observations: ``observations`` are the first T of them and
``next_observations`` the last T.  Dict and Tuple spaces become columns named by their path, e.g.
``observations/achieved_goal`` or ``actions/0``.

Shape legend: N steps, E episodes, T steps of one episode.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gear_offline.core.closing import Closing
from gear_offline.dataset.schema import BoolArray, ColumnSpec, EpisodeIndex, TableSpec
from gear_offline.dataset.scores import reference_scores
from gear_offline.errors import InputError
from gear_offline.sources.base import SourceInfo, source_text
from gear_offline.sources.minari_metadata import MinariMetadata, data_directory, read_metadata

RULE = "episodes"
READ_BYTES = 8 << 20


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """A column as Minari stores it.

    Attributes
    ----------
    spec
        Column of the table.
    path
        Where it lies below an episode, e.g. ``("observations", "achieved_goal")``.
    offset
        Stored row of an episode's step 0: 1 for ``next_observations``, else 0.
    """

    spec: ColumnSpec
    path: tuple[str, ...]
    offset: int = 0


class Storage(Protocol):
    """One of Minari's data formats.

    Attributes
    ----------
    leaves
        Columns, in the order of the table.
    lengths
        (E,) int64, T of each episode.
    terminated
        (E,) bool, the termination flag of each episode's last step.
    files
        Files to digest.
    left_out
        What is stored and not a column, and why.
    warnings
        What the user should know.
    """

    leaves: list[Leaf]
    lengths: npt.NDArray[np.int64]
    terminated: BoolArray
    files: tuple[Path, ...]
    left_out: dict[str, str]
    warnings: list[str]

    def read(self, leaf: Leaf, episode: int, start: int, stop: int) -> npt.NDArray[Any]:
        """Return steps ``[start, stop)`` of an episode, (stop - start, *shape)."""
        ...

    def close(self) -> None: ...


class MinariSource(Closing):
    """A `Source` over a Minari dataset; see `gear_offline.sources.base.Source`.

    Parameters
    ----------
    metadata
        The dataset's metadata.
    storage
        Its data; owned by the source from here on.
    uri, locator
        As in `SourceInfo`.
    """

    def __init__(
        self, metadata: MinariMetadata, storage: Storage, *, uri: str, locator: str
    ) -> None:
        self._storage = storage
        self._leaves = {leaf.spec.name: leaf for leaf in storage.leaves}
        self.episodes = EpisodeIndex(storage.lengths)
        self.terminated = storage.terminated
        self.truncated: BoolArray = ~storage.terminated
        self.spec = TableSpec(
            columns=tuple(leaf.spec for leaf in storage.leaves),
            steps=self.episodes.steps,
            episodes=self.episodes.episodes,
        )
        environment = metadata.environment_id
        known = environment is not None and reference_scores(environment) is not None
        self.info = SourceInfo(
            uri=uri,
            format="minari",
            rule=RULE,
            environment_id=environment,
            reference_name=environment if known else None,
            files=storage.files,
            locator=locator,
            attributes={
                "metadata": metadata.attributes,
                "left_out": storage.left_out,
                "unfinished_tail_steps": 0,
                "warnings": storage.warnings,
            },
        )

    def __repr__(self) -> str:
        return source_text(self)

    def read(self, column: str, start: int, stop: int) -> npt.NDArray[Any]:
        """Return rows ``[start, stop)`` of `column`, (stop - start, *shape), native dtype."""
        if not 0 <= start <= stop <= self.episodes.steps:
            raise IndexError(f"rows [{start}, {stop}) of {self.episodes.steps}")
        spec = self.spec[column]
        leaf = self._leaves[column]
        rows = np.empty((stop - start, *spec.shape), dtype=spec.dtype)
        offsets = self.episodes.offsets
        row = start
        episode = int(self.episodes.episode_of(start)) if start < stop else 0
        while row < stop:
            begin, end = int(offsets[episode]), min(int(offsets[episode + 1]), stop)
            rows[row - start : end - start] = self._storage.read(
                leaf, episode, row - begin, end - begin
            )
            row, episode = end, episode + 1
        return rows

    def preferred_rows(self, column: str) -> int:
        """Rows per read that suit the storage; at least 1."""
        return max(1, READ_BYTES // self.spec[column].step_bytes)

    def close(self) -> None:
        """Release the files; reading afterwards raises ValueError."""
        self._storage.close()


def open_minari(path: Path, *, uri: str | None, rule: str | None) -> MinariSource:
    """Open a Minari dataset's directory.

    Parameters
    ----------
    path
        The dataset's directory or the ``data`` directory in it.
    uri
        What the user asked for; ``None`` stands for the dataset's own id.
    rule
        Must be ``None`` or ``"episodes"``: Minari stores episodes apart.

    Raises
    ------
    InputError
        ``MINARI_*``, ``RULE_UNKNOWN``, and ``HDF5_*`` for HDF5 storage.
    UnavailableError
        ``PYARROW_MISSING`` for arrow and parquet storage without pyarrow.
    """
    data_path = data_directory(path.absolute())
    if data_path is None:
        raise InputError("MINARI_METADATA", "no Minari dataset here", where=str(path))
    if rule not in (None, RULE):
        raise InputError(
            "RULE_UNKNOWN",
            f"boundary rule {rule!r} does not apply to Minari, which stores episodes apart",
            where=str(path),
            remedy="leave the rule out",
        )
    metadata = read_metadata(data_path)
    storage: Storage
    if metadata.data_format == "hdf5":
        from gear_offline.sources.minari_hdf5 import Hdf5Storage

        storage = Hdf5Storage(metadata)
    else:
        from gear_offline.sources.minari_arrow import ArrowStorage

        storage = ArrowStorage(metadata)
    try:
        _check_totals(metadata, storage)
        name = f"minari:{metadata.dataset_id}" if metadata.dataset_id else path.name
        return MinariSource(metadata, storage, uri=uri or name, locator=str(path.absolute()))
    except BaseException:
        storage.close()
        raise


def jpeg_error(metadata: MinariMetadata, column: str) -> InputError:
    """Return the error ``MINARI_JPEG`` for images that are not stored as arrays."""
    return InputError(
        "MINARI_JPEG",
        f"{column} is stored as lossy JPEG files",
        where=str(metadata.data_path),
        remedy="create the dataset with jpeg_encoding=False",
    )


def layout_error(metadata: MinariMetadata, what: str, *, where: str = "") -> InputError:
    """Return the error for data that do not agree with the metadata or among episodes."""
    return InputError(
        "MINARI_LAYOUT",
        what,
        where=": ".join(p for p in (str(metadata.data_path), where) if p),
        remedy="the dataset is damaged or was written by something else: download it again",
    )


def _check_totals(metadata: MinariMetadata, storage: Storage) -> None:
    episodes, steps = storage.lengths.size, int(storage.lengths.sum())
    if not episodes:
        raise layout_error(metadata, "the dataset has no steps")
    for what, said, found in (
        ("episodes", metadata.episodes, episodes),
        ("steps", metadata.steps, steps),
    ):
        if said is not None and said != found:
            raise layout_error(metadata, f"metadata.json says {said} {what}, the data hold {found}")
