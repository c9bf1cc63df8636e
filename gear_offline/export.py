"""Write columns of steps as one HDF5 file in D4RL's layout, for programs that read that.

Shape legend: N steps, E episodes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import h5py
import numpy as np

import gear_offline
from gear_offline.core.closing import Closing
from gear_offline.core.files import new_file, writing
from gear_offline.core.progress import Progress, say
from gear_offline.core.text import count_text
from gear_offline.core.types import Array, BoolArray, Int64Array
from gear_offline.dataset.dataset import Columns, Dataset
from gear_offline.errors import InputError
from gear_offline.sources import open_source
from gear_offline.sources.base import Source
from gear_offline.sources.combine import dataset_source

PIECE_BYTES = 32 << 20  # read and written at a time
CHUNK_ROWS = 4096  # and rows that are held before they are written
CHUNK_BYTES = 1 << 20  # fewer rows where they are wide, such as frames
HELD_BYTES = 64 << 20  # the same for what is held
GZIP_LEVEL = 1  # higher levels cost time and gain 2 %; shuffling gains 13 %
TERMINALS, TIMEOUTS, REWARDS = "terminals", "timeouts", "rewards"


def export_hdf5(
    source: Dataset | Source | str | Path,
    path: str | Path,
    *,
    columns: Sequence[str] | None = None,
    overwrite: bool = False,
    quiet: bool = False,
) -> Path:
    """Write all episodes of a dataset to an HDF5 file in D4RL's layout.

    Columns keep names, dtypes and bytes, but for the two flags, which are there in any case and
    never both: ``terminals`` marks the last step of each episode that terminated, ``timeouts``
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
        Show no progress, no warning.

    Returns
    -------
    Path
        `path`.

    Raises
    ------
    InputError
        ``OUTPUT_EXISTS``, ``OUTPUT_WRITE``, ``COLUMN``, and what reading raises.
    GearError
        ``OUTPUT_WRITE``.

    Examples
    --------
    `tiny` is what the example of `gear_offline.convert.convert` makes.

    >>> import h5py
    >>> import gear_offline as go
    >>> path = go.export_hdf5("tiny", "tiny.hdf5", quiet=True)
    >>> with h5py.File(path) as file:
    ...     print(sorted(file), file["observations"].shape)
    ['actions', 'observations', 'rewards', 'terminals', 'timeouts'] (12, 3)
    """
    path = Path(path)
    with ExitStack() as stack:
        if isinstance(source, Dataset):
            opened: Source = dataset_source(source)
        elif isinstance(source, (str, Path)):
            opened = stack.enter_context(open_source(source))
        else:
            opened = source
        kept = _kept(opened, columns)
        _check_names(kept, path)
        writer = stack.enter_context(Hdf5Writer(path, overwrite=overwrite))
        step_bytes = sum(opened.spec[name].step_bytes for name in kept)
        total = step_bytes * opened.spec.steps
        shown = Progress(f"export {path.name}", total=total, unit="bytes", quiet=quiet)
        progress = stack.enter_context(shown)
        rows = max(1, PIECE_BYTES // step_bytes)
        inside = _terminals_inside(opened, rows)
        for start in range(0, opened.spec.steps, rows):
            stop = min(start + rows, opened.spec.steps)
            part = {name: opened.read(name, start, stop) for name in kept}
            _set_flags(part, opened, start, stop, every=inside > 0)
            writer.hold(part, stop - start)
            progress.advance(step_bytes * (stop - start))
        info = opened.info
        attributes = {
            "exported_from": f"{info.uri} ({info.format}; rule {info.rule})",
            "gear_offline": gear_offline.__version__,
        }
        if info.environment_id:
            attributes["env_id"] = info.environment_id
        writer.publish(attributes)
    if inside:
        note = f"terminals marks {count_text(inside, 'step')} inside episodes"
        say(f"warning: {note}: a reader that splits there finds other episodes", quiet=quiet)
    return path


def _kept(source: Source, columns: Sequence[str] | None) -> list[str]:
    if columns is None:
        return [c.name for c in source.spec]
    wanted = {REWARDS, *(source.spec[name].name for name in columns)}
    wanted |= {name for name in (TERMINALS, TIMEOUTS) if name in source.spec}
    return [c.name for c in source.spec if c.name in wanted]


def _check_names(names: Sequence[str], path: Path) -> None:
    """Refuse a column whose name is that of a group too, which holds other columns."""
    for name in names:
        below = next((other for other in names if other.startswith(f"{name}/")), None)
        if below is not None:
            what = f"an HDF5 file cannot hold both {name} and {below}"
            remedy = "name the columns to keep, without one of them: columns=[...]"
            raise InputError("COLUMN", what, where=str(path), remedy=remedy)


def _ends(source: Source, start: int, stop: int) -> tuple[Int64Array, BoolArray]:
    """Return which of the steps ``[start, stop)`` end an episode, and which of those terminated."""
    offsets = source.episodes.offsets
    first = int(np.searchsorted(offsets[1:], start, side="right"))
    last = int(np.searchsorted(offsets[1:], stop, side="right"))
    return offsets[first + 1 : last + 1] - 1 - start, source.terminated[first:last]


def _terminals_inside(source: Source, rows: int) -> int:
    """Return how many terminals mark a step inside an episode, reading `rows` at a time."""
    inside = 0
    for start in range(0, source.spec.steps if TERMINALS in source.spec else 0, rows):
        stop = min(start + rows, source.spec.steps)
        flags = source.read(TERMINALS, start, stop).reshape(-1) != 0
        inside += int(flags.sum()) - int(flags[_ends(source, start, stop)[0]].sum())
    return inside


def _set_flags(part: Columns, source: Source, start: int, stop: int, *, every: bool) -> None:
    """Set the flags of steps ``[start, stop)``; with `every`, all ends are timeouts."""
    ends, terminated = _ends(source, start, stop)
    timeouts = np.zeros(stop - start, np.bool_)
    timeouts[ends] = True if every else ~terminated
    part[TIMEOUTS] = timeouts
    terminals = part.get(TERMINALS, np.zeros(stop - start, np.bool_))
    flat = terminals.reshape(-1)
    wrong = ends[(flat[ends] != 0) != terminated]  # of a source that told truncation by terminals
    flat[wrong] = flat[wrong] == 0
    part[TERMINALS] = flat.reshape(terminals.shape)


class _Output:
    """The file as HDF5 sees it: never an error, which HDF5 answers with a crash of the process.

    The first error is kept for `check`; what comes after it is dropped.
    """

    def __init__(self, path: Path) -> None:
        self._handle, self._place = os.open(path, os.O_RDWR | os.O_CLOEXEC), 0
        self._error: BaseException | None = None

    def check(self) -> None:
        """Raise the error that was met, if one was."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Make the file durable and close it."""
        try:
            os.fsync(self._handle)
        finally:
            os.close(self._handle)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        bases = {os.SEEK_SET: 0, os.SEEK_CUR: self._place}
        base = bases.get(whence)
        self._place = offset + (os.fstat(self._handle).st_size if base is None else base)
        return self._place

    def tell(self) -> int:
        return self._place

    def readinto(self, buffer: memoryview) -> int:
        content = os.pread(self._handle, len(buffer), self._place)
        buffer[:] = content.ljust(len(buffer), b"\0")  # dropped bytes read as zeros
        self._place += len(buffer)
        return len(buffer)

    def read(self, size: int = -1) -> bytes:
        raise NotImplementedError("HDF5 uses readinto; h5py only looks for the name")

    def write(self, content: memoryview) -> int:
        done = 0
        try:
            while self._error is None and done < len(content):
                done += os.pwrite(self._handle, content[done:], self._place + done)
        except BaseException as error:  # Ctrl-C as well
            self._error = error
        self._place += len(content)
        return len(content)

    def truncate(self, size: int) -> int:
        try:
            if self._error is None:
                os.truncate(self._handle, size)
        except BaseException as error:  # Ctrl-C as well
            self._error = error
        return size

    def flush(self) -> None:
        """Nothing is held back."""


class Hdf5Writer(Closing):
    """Writes rows of columns, part after part; leaving it without `publish` removes everything."""

    def __init__(self, path: Path, *, overwrite: bool = False) -> None:
        self._path, self._new = path, new_file(path, overwrite=overwrite)
        part, self._is_open = self._new.__enter__(), True
        try:
            with writing(path):
                self._output = _Output(part)
            # HDF5's own lock would conflict with ours.
            self._file = h5py.File(self._output, "w", locking=False)
        except BaseException as error:
            self._new.__exit__(type(error), error, None)
            raise
        self.held: dict[str, list[Array]] = {}
        self._held_rows = self._held_bytes = 0

    def hold(self, part: Mapping[str, Array], steps: int) -> None:
        """Add `steps` rows of every column; they are written when there are enough."""
        for name, column in part.items():
            self.held.setdefault(name, []).append(column)
            self._held_bytes += column.nbytes
        self._held_rows += steps
        if self._held_rows >= CHUNK_ROWS or self._held_bytes >= HELD_BYTES:
            with writing(self._path):
                self._flush()

    def _flush(self) -> None:
        for name, parts in self.held.items():
            if not parts:
                continue
            rows = np.concatenate(parts)
            if name not in self._file:
                row_bytes = math.prod(rows.shape[1:]) * rows.dtype.itemsize
                chunk = max(min(CHUNK_ROWS, CHUNK_BYTES // row_bytes), 1)
                self._file.create_dataset(
                    name,
                    shape=(0, *rows.shape[1:]),
                    maxshape=(None, *rows.shape[1:]),
                    chunks=(chunk, *rows.shape[1:]),
                    dtype=rows.dtype,
                    compression="gzip",
                    compression_opts=GZIP_LEVEL,
                    shuffle=True,
                )
            dataset = self._file[name]
            start = dataset.shape[0]
            dataset.resize(start + len(rows), axis=0)
            dataset[start:] = rows
            parts.clear()
        self._held_rows = self._held_bytes = 0
        self._output.check()

    def publish(
        self,
        attributes: Mapping[str, Any],
        details: Mapping[str, Array | str | bytes] | None = None,
    ) -> None:
        """Write what is held, attributes and further datasets, and give the file its name.

        Mappings and lists among the attributes are stored as JSON, text as bytes, as D4RL does.
        """
        with writing(self._path):
            self._flush()
            for key, value in attributes.items():
                structured = isinstance(value, (Mapping, list, tuple))
                self._file.attrs[key] = json.dumps(value) if structured else value
            for name, content in (details or {}).items():
                stored = np.bytes_(content.encode()) if isinstance(content, str) else content
                self._file.create_dataset(name, data=stored)
            self._file.close()
            self._output.check()
            self._is_open = False
            self._output.close()
        self._new.__exit__(None, None, None)

    def close(self) -> None:
        """Remove what is not published; may be called again."""
        if self._is_open:
            self._is_open = False
            self._file.close()
            with suppress(OSError):
                self._output.close()
        unpublished = RuntimeError("not published")
        self._new.__exit__(RuntimeError, unpublished, None)
