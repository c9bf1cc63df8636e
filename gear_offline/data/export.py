"""Write columns of steps as one HDF5 file in D4RL's layout, for programs that read that.

Shape legend: N steps, E episodes.
"""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np

import gear_offline
from gear_offline.config.arguments import check_arguments
from gear_offline.core.files import new_file, write_all, writing
from gear_offline.core.progress import Progress
from gear_offline.core.text import count_text, say
from gear_offline.core.types import Array
from gear_offline.data.dataset.dataset import Dataset
from gear_offline.data.dataset.scores import find_scores
from gear_offline.data.sources import open_source
from gear_offline.data.sources.base import Source
from gear_offline.data.sources.combine import dataset_source
from gear_offline.data.sources.d4rl import EXPORTED
from gear_offline.data.sources.flat import EDITS
from gear_offline.data.sources.hdf5 import SUFFIXES
from gear_offline.errors import InputError, given_path

PIECE_BYTES = 32 << 20  # read and written at a time
CHUNK_ROWS = 4096
CHUNK_BYTES = 1 << 20  # fewer rows where they are wide, such as frames
CACHE_BYTES = 4 << 20  # HDF5 keeps the last chunk of a column until it is full
# Higher levels cost time and gain 2 %; shuffling gains 13 %.
GZIP = {"compression": "gzip", "compression_opts": 1, "shuffle": True}
TERMINALS, TIMEOUTS, REWARDS = "terminals", "timeouts", "rewards"


@check_arguments()
def export_hdf5(
    source: Dataset | Source | str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    columns: Sequence[str] | None = None,
    overwrite: bool = False,
    quiet: bool = False,
) -> Path:
    """Write all episodes of a dataset to an HDF5 file in D4RL's layout.

    Columns keep names, dtypes and bytes, but for the two flags, which are always there and never
    both true.  ``terminals`` marks the last step of each episode that terminated, ``timeouts``
    that of each other one.  Where ``terminals`` marks steps inside episodes too, it keeps those,
    and a timeout marks the last step of every episode.

    Parameters
    ----------
    source
        An opened dataset, its directory, or an open source (left open), such as `pick_episodes`
        makes.
    path
        File to make.  It appears when it is complete.
    columns
        Columns to keep, default all; `rewards` and the two flags are always there.
    overwrite
        Replace a file that exists.
    quiet
        Show no progress.

    Returns
    -------
    Path
        `path`.

    Raises
    ------
    GearError
        ``OUTPUT_EXISTS``, ``OUTPUT_WRITE``, ``COLUMN``, and what reading raises.

    Examples
    --------
    `tiny` is what the example of `gear_offline.convert` makes.

    >>> import h5py
    >>> import gear_offline as go
    >>> path = go.export_hdf5("tiny", "tiny.hdf5", quiet=True)
    >>> with h5py.File(path) as file:
    ...     print(sorted(file), file["observations"].shape)
    ['actions', 'observations', 'rewards', 'terminals', 'timeouts'] (12, 3)
    """
    path = given_path(path, "OUTPUT_WRITE", where="path")
    with ExitStack() as stack:
        if isinstance(source, Dataset):
            source = dataset_source(source)
        elif not isinstance(source, Source):
            source = stack.enter_context(open_source(source))
        names = _pick_names(source, columns, path)
        flags, inside = _flags(source)
        writer = stack.enter_context(new_hdf5(path, overwrite=overwrite))
        step_bytes, steps = sum(source.spec[name].step_bytes for name in names), source.spec.steps
        total = step_bytes * steps
        progress = Progress(f"export {path.name}", total=total, unit="bytes", quiet=quiet)
        stack.enter_context(progress)
        rows = max(1, PIECE_BYTES // step_bytes)
        for start in range(0, steps, rows):
            stop = min(start + rows, steps)
            block = {name: source.read(name, start, stop) for name in names if name not in flags}
            writer.write(block | {k: v[start:stop] for k, v in flags.items()})
            progress.advance(step_bytes * (stop - start))
        info = source.info
        attributes: dict[str, str | float] = {
            "exported_from": f"{info.uri} ({info.format}; rule {info.rule})",
            EXPORTED: gear_offline.__version__,
            "rule": "timeouts" if inside else "terminals|timeouts",
        }
        if info.environment_id:
            attributes["env_id"] = info.environment_id
        if info.environment_options:
            attributes["env_options"] = json.dumps(info.environment_options)
        if edits := {n: info.attributes[n] for n in EDITS if info.attributes.get(n)}:
            attributes["edits"] = json.dumps(edits)
        if info.scores is not None and find_scores(info.scores.name) is None:
            attributes["ref_min_score"] = info.scores.minimum
            attributes["ref_max_score"] = info.scores.maximum
        writer.describe(attributes)
    if inside:
        note = f"terminals marks {count_text(inside, 'step')} inside episodes"
        say(f"warning: {note}: a reader that splits there finds other episodes")
    return path


def _pick_names(source: Source, columns: Sequence[str] | None, path: Path) -> list[str]:
    """Return the names to write; refuse one that is also that of a group of others."""
    stored = {REWARDS, *(source.spec[name].name for name in columns or ())}
    names = [c.name for c in source.spec if columns is None or c.name in stored]
    groups = {name[:at]: name for name in names for at, sign in enumerate(name) if sign == "/"}
    for name in names:
        if below := groups.get(name):
            problem = f"an HDF5 file cannot hold both {name} and {below}"
            remedy = "name the columns to keep, without one of them: columns=[...]"
            raise InputError("COLUMN", problem, where=str(path), remedy=remedy)
    return names


def _flags(source: Source) -> tuple[dict[str, Array], int]:
    """Return terminals and timeouts, (N, ...), and how many terminals are inside episodes."""
    steps, ends = source.spec.steps, source.episodes.offsets[1:] - 1
    terminals: Array = np.zeros(steps, np.bool_)
    if TERMINALS in source.spec:
        terminals = np.array(source.read(TERMINALS, 0, steps))
    flat = terminals.reshape(-1)
    inside = int(np.count_nonzero(flat)) - int(np.count_nonzero(flat[ends]))
    wrong = ends[(flat[ends] != 0) != source.terminated]  # terminals may have told truncation
    flat[wrong] = flat[wrong] == 0
    timeouts = np.zeros(steps, np.bool_)
    timeouts[ends] = True if inside else ~source.terminated
    return {TERMINALS: terminals, TIMEOUTS: timeouts}, inside


class _Output(io.FileIO):
    """The file as HDF5 sees it: never an error, which HDF5 answers with a crash of the process.

    The first error is kept in `error`; what comes after it is dropped.
    """

    error: BaseException | None = None

    def readinto(self, buffer: Any) -> int:
        count = super().readinto(buffer)
        buffer[count:] = bytes(len(buffer) - count)  # dropped bytes read as zeros
        return len(buffer)

    def write(self, content: Any) -> int:
        self._do(write_all, self.fileno(), content)
        return len(content)

    def truncate(self, size: int | None = None) -> int:
        self._do(super().truncate, size)
        return size or 0

    def _do(self, call: Callable[..., object], *arguments: Any) -> None:
        try:
            if self.error is None:
                call(*arguments)
        except BaseException as error:  # Ctrl-C as well
            self.error = error


@contextmanager
def new_hdf5(path: Path, *, overwrite: bool = False) -> Iterator[Hdf5Writer]:
    """Give the writer of a file that appears when the body ends, and not at all after an error."""
    if path.suffix not in ("", *SUFFIXES):
        problem, remedy = "the file is HDF5", f"let its name end with {' or '.join(SUFFIXES)}"
        raise InputError("USAGE", problem, where=str(path), remedy=remedy)
    with new_file(path, overwrite=overwrite) as temporary, _Output(temporary, "r+") as output:
        # HDF5's own lock would conflict with ours.
        with h5py.File(output, "w", locking=False, rdcc_nbytes=CACHE_BYTES) as file:
            writer = Hdf5Writer(path, file, output)
            yield writer
        writer.check()


class Hdf5Writer:
    """Writes rows of columns, block after block."""

    def __init__(self, path: Path, file: h5py.File, output: _Output) -> None:
        self._path, self._file, self._output = path, file, output
        # Closing a dataset would empty its cache: a chunk would be compressed at every block.
        self._datasets: dict[str, h5py.Dataset] = {}

    def write(self, block: Mapping[str, Array]) -> None:
        """Append rows to every column of `block`; the first block makes the columns."""
        for name, rows in block.items():
            dataset = self._datasets.get(name)
            if dataset is None:
                row, row_bytes = rows.shape[1:], math.prod(rows.shape[1:]) * rows.dtype.itemsize
                chunk = max(min(CHUNK_ROWS, CHUNK_BYTES // row_bytes), 1)
                shapes = {"shape": (0, *row), "maxshape": (None, *row), "chunks": (chunk, *row)}
                dataset = self._file.create_dataset(name, dtype=rows.dtype, **shapes, **GZIP)
                self._datasets[name] = dataset
            start = dataset.shape[0]
            dataset.resize(start + len(rows), axis=0)
            dataset[start:] = rows
        self.check()

    def check(self) -> None:
        """Raise the error of a write that failed (``OUTPUT_WRITE``)."""
        with writing(self._path):
            if self._output.error is not None:
                raise self._output.error

    def describe(
        self,
        attributes: Mapping[str, Any],
        details: Mapping[str, Array | str | bytes] | None = None,
    ) -> None:
        """Write attributes and further datasets.

        Mappings and lists among the attributes are stored as JSON, text as bytes, as D4RL does.
        """
        for key, value in attributes.items():
            structured = isinstance(value, (Mapping, list, tuple))
            self._file.attrs[key] = json.dumps(value) if structured else value
        for name, content in (details or {}).items():
            stored = np.bytes_(content.encode()) if isinstance(content, str) else content
            self._file.create_dataset(name, data=stored)
