"""Open a dataset of GEAR shards: verify it, know its episodes, read rows across shards.

Shape legend: N steps, E episodes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt

from gear_offline.core.text import count_text
from gear_offline.dataset.dataset_episodes import HasEpisodeArrays
from gear_offline.dataset.dataset_facts import ManifestFacts
from gear_offline.dataset.episode_tensors import check_episodes, read_episodes
from gear_offline.dataset.manifest import Manifest, ShardRecord
from gear_offline.dataset.schema import BoolArray, EpisodeIndex, Int64Array
from gear_offline.dataset.shard_reader import ShardReader
from gear_offline.dataset.shards import (
    EPISODE_COLUMNS,
    TensorLayout,
    byte_view,
    file_stamp,
    open_directory,
    read_into,
    stored_form,
)
from gear_offline.dataset.statistics import Float64Array
from gear_offline.dataset.verification import VerificationReport as VerificationReport
from gear_offline.dataset.verification import (
    read_checked,
    read_header,
    shard_file,
    thread_count,
    verify_shards,
)
from gear_offline.dataset.verification import verify_dataset as verify_dataset
from gear_offline.errors import InputError, given_path

PARALLEL_BYTES = 8 << 20  # smaller reads are not worth waking threads

STREAM_BYTES = 8 << 20  # of a column that are read at a time

MAPPED_BYTES = 1 << 20  # of a column that is compared before it is mapped, at a time

Verify = bool | Literal["on_use"]


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Dataset(ManifestFacts, HasEpisodeArrays):
    """A dataset on disk.  Holds no open file: it can be sent to other processes.

    ``dataset[3]`` is an episode, column name to (T, *shape); ``len(dataset)`` counts episodes, and
    a loop goes over them.  See also what it inherits.

    Attributes
    ----------
    path
        Dataset directory.
    manifest
        What it says about itself; parts of it are `spec` (columns, steps, episodes), `statistics`
        (of each column), `environment_id` and `reference_scores`.
    episodes
        Episode index over all steps.
    terminated, truncated
        (E,) bool, how each episode ended.
    returns
        (E,) float64, undiscounted sum of `rewards` of each episode.
    verified
        Whether every block of every shard matched its digest when the dataset was opened.
    on_use
        Whether each block is compared with its digest before anything of it is handed out.
    stamps
        Size and times of each shard's file, from before both.
    """

    path: Path
    manifest: Manifest
    episodes: EpisodeIndex
    terminated: BoolArray
    truncated: BoolArray
    returns: Float64Array
    verified: bool
    stamps: tuple[tuple[int, ...], ...] = field(repr=False)
    _identity: tuple[int, int] = field(repr=False)
    on_use: bool = False

    def __repr__(self) -> str:
        return (
            f"Dataset({str(self.path)!r}: "
            f"{count_text(self.spec.episodes, 'episode')}, "
            f"{count_text(self.spec.steps, 'step')}, "
            f"columns {', '.join(c.name for c in self.spec)})"
        )

    @property
    def checked(self) -> bool:
        """Whether digests are compared when whole columns are read."""
        return self.verified or self.on_use

    def verify(self, *, threads: int | None = None) -> Dataset:
        """Return the dataset with every block of every shard compared with its digest.

        For what reads parts of blocks, which it cannot compare.  Does nothing if that was done.

        Parameters
        ----------
        threads
            As `open_dataset`.

        Raises
        ------
        InputError
            ``SHARD_DIGEST``, ``SHARD_HEADER``, ``FILE_*``, ``DATASET_CHANGED``.
        """
        if self.verified:
            return self
        with self.opened() as directory:
            verify_shards(directory, self.manifest, self.path, threads=threads)
        return replace(self, verified=True, on_use=False)

    @cached_property
    def first_steps(self) -> Int64Array:
        """(shards + 1,) int64: first global step of each shard, and N at the end."""
        found = np.cumsum([0, *(s.steps for s in self.manifest.shards)], dtype=np.int64)
        found.setflags(write=False)
        return found

    def read(self, column: str, start: int, stop: int, *, check: bool = False) -> npt.NDArray[Any]:
        """Return rows ``[start, stop)`` of `column` in memory of their own.

        Parameters
        ----------
        column
            A column of the source.
        start, stop
            Global steps, ``0 <= start <= stop <= N``.
        check
            Read whole blocks and compare their digests: bytes that changed since the dataset was
            opened are refused.  Costs reading up to a block more on either side.  Always done
            if the dataset was opened with ``verify="on_use"``.

        Returns
        -------
        ndarray
            (stop - start, *shape), the column's dtype.

        Raises
        ------
        InputError
            ``COLUMN_MISSING``, ``STEP_RANGE``, ``DATASET_CHANGED``, ``SHARD_DIGEST``,
            ``FILE_MISSING``, ``FILE_KIND``, ``FILE_SIZE``, ``DATASET_READ``.
        """
        spec = self.spec[column]
        if not 0 <= start <= stop <= self.spec.steps:
            raise InputError(
                "STEP_RANGE",
                f"steps [{start}, {stop}) are not in [0, {self.spec.steps})",
                where=f"column {column}",
            )
        check = check or self.on_use
        dtype, shape = stored_form(spec)
        found = np.empty((stop - start, *shape), dtype)
        firsts = self.first_steps
        first = int(np.searchsorted(firsts, start, side="right")) - 1
        parts: list[tuple[int, int, npt.NDArray[Any]]] = []
        with self.opened() as directory:
            for index in range(max(first, 0), len(self.manifest.shards)):
                low, high = max(start, int(firsts[index])), min(stop, int(firsts[index + 1]))
                if low >= high:
                    break
                target = found[low - start : high - start]
                parts.append((index, low - int(firsts[index]), target))
            if found.nbytes < PARALLEL_BYTES:
                for part in parts:
                    self._read_rows(directory, part, column, check)
            else:
                # Reading and digesting release the interpreter lock; shards are independent.
                with ThreadPoolExecutor(max_workers=thread_count(None)) as pool:
                    jobs = [
                        pool.submit(self._read_rows, directory, part, column, check)
                        for part in parts
                    ]
                for job in jobs:
                    job.result()
        return found.view(spec.dtype).reshape(stop - start, *spec.shape)

    @overload
    def column(self, name: str, *, mode: Literal["read"] = "read") -> npt.NDArray[Any]: ...
    @overload
    def column(self, name: str, *, mode: Literal["mmap"]) -> list[npt.NDArray[Any]]: ...

    def column(
        self, name: str, *, mode: Literal["read", "mmap"] = "read"
    ) -> npt.NDArray[Any] | list[npt.NDArray[Any]]:
        """Return a whole column.

        Parameters
        ----------
        name
            As in the specification, e.g. ``"observations"``.
        mode
            ``"read"``: one array (N, *shape) in memory of its own.  Digests are compared on the way
            unless the dataset was opened with ``verify=False``, so that a file that changed since
            is refused.  ``"mmap"``: one read-only memory map per shard, (steps, *shape); memory
            is used as pages are touched.  A file that another process cuts short while it is
            mapped ends this process with SIGBUS: map only files that nothing writes to.  With
            ``verify="on_use"`` the column is read and compared first.
        """
        if mode == "read":
            return self.read(name, 0, self.spec.steps, check=self.checked)
        if self.on_use:
            self._compare(name)
        spec = self.spec[name]
        found = []
        with self.opened() as directory:
            for index, shard in enumerate(self.manifest.shards):
                tensor = self._tensor(index, name)
                with (
                    shard_file(directory, shard, self.path) as handle,
                    os.fdopen(os.dup(handle), "rb") as file,
                ):
                    flat = np.memmap(
                        file,
                        dtype=np.uint8,
                        mode="r",
                        offset=shard.header_bytes + tensor.start,
                        shape=(tensor.bytes,),
                    )
                found.append(flat.view(spec.dtype).reshape(shard.steps, *spec.shape))
        return found

    @contextmanager
    def reader(self, index: int, columns: Iterable[str], *, check: bool) -> Iterator[ShardReader]:
        """Open shard `index` to read columns of it from their first row to their last.

        Parameters
        ----------
        index
            Number of the shard.
        columns
            Names of those that will be read.
        check
            Compare the header's digest, and that of each block once its last row was read.

        Raises
        ------
        InputError
            As `read`.
        """
        shard = self.manifest.shards[index]
        with self.opened() as directory, shard_file(directory, shard, self.path) as handle:
            if check:
                # Opening has compared what it says: now only whether it is still the same.
                read_header(handle, shard, self.path)
            yield ShardReader(handle, self.manifest, shard, self.path, columns=columns, check=check)

    def stream(
        self, shard: int, column: str, *, chunk_bytes: int = STREAM_BYTES
    ) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """Iterate over the rows of one column in one shard, in order, and compare its digests.

        Parameters
        ----------
        shard
            ``0 <= shard < len(manifest.shards)``.  A shard holds whole episodes.
        column
            A column of the source.
        chunk_bytes
            Rows read at once, in bytes; at least one row.

        Yields
        ------
        step, rows
            First step of the chunk in the whole dataset, and (n, *shape) of the column's dtype.
            The memory of `rows` is used again for the next chunk.  What was made of them counts
            only once the iteration has ended without an error.

        Raises
        ------
        InputError
            ``DATASET_DAMAGED`` once a block does not match its digest.
        """
        spec, record = self.spec[column], self.manifest.shards[shard]
        dtype, shape = stored_form(spec)
        rows = min(max(1, chunk_bytes // spec.step_bytes), record.steps)
        buffer = np.empty((rows, *shape), dtype)
        first = int(self.first_steps[shard])
        with self.reader(shard, [column], check=True) as reader:
            for begin in range(0, record.steps, rows):
                part = buffer[: record.steps - begin]
                try:
                    reader.read(column, part)
                except InputError as error:
                    raise InputError(
                        "DATASET_DAMAGED", error.what, where=error.where, remedy=error.remedy
                    ) from error
                yield first + begin, part.view(spec.dtype).reshape(len(part), *spec.shape)

    def _compare(self, name: str) -> None:
        """Read a column once, a piece at a time, and compare its digests."""
        for index, shard in enumerate(self.manifest.shards):
            nbytes = self._tensor(index, name).bytes
            rows = max(MAPPED_BYTES * shard.steps // max(nbytes, 1), 1)
            dtype, shape = stored_form(self.spec[name])
            buffer = np.empty((min(rows, shard.steps), *shape), dtype)
            with self.reader(index, [name], check=True) as reader:
                for begin in range(0, shard.steps, len(buffer)):
                    reader.read(name, buffer[: shard.steps - begin])

    def _tensor(self, index: int, name: str) -> TensorLayout:
        tensors = self.manifest.tensors(self.manifest.shards[index])
        return next(t for t in tensors if t.name == name)

    @contextmanager
    def opened(self) -> Iterator[int]:
        """Give a descriptor of the dataset directory.

        Raises
        ------
        InputError
            ``DATASET_CHANGED`` if another directory is there now.
        """
        directory = open_directory(self.path)
        try:
            if _identity(directory) != self._identity:
                raise InputError(
                    "DATASET_CHANGED",
                    "the dataset was replaced since it was opened",
                    where=str(self.path),
                    remedy="open it again",
                )
            yield directory
        finally:
            os.close(directory)

    def _read_rows(
        self, directory: int, part: tuple[int, int, npt.NDArray[Any]], column: str, check: bool
    ) -> None:
        """Fill an array from a shard's tensor; `part` is (shard, first row in it, array)."""
        index, row, target = part
        shard = self.manifest.shards[index]
        tensor = self._tensor(index, column)
        data = byte_view(target)
        start = tensor.start + row * (len(data) // len(target))
        with shard_file(directory, shard, self.path) as handle:
            if check:
                block_bytes = self.manifest.block_bytes
                read_checked(handle, shard, tensor, block_bytes, self.path, start, data)
            else:
                where = str(self.path / shard.name)
                read_into(handle, data, shard.header_bytes + start, where=where)


def _identity(directory: int) -> tuple[int, int]:
    found = os.fstat(directory)
    return found.st_dev, found.st_ino


def open_dataset(path: str | Path, *, verify: Verify = True, threads: int | None = None) -> Dataset:
    """Open the dataset directory at `path`.

    Parameters
    ----------
    path
        Directory that `gear_offline.convert.convert` made.
    verify
        ``True``: compare every block of every shard with its digest now.  ``"on_use"``: compare
        each block when it is read, before anything of it is handed out; what is loaded whole is
        then read once and not twice.  ``False``: never.  The manifest, the sizes and headers of
        the shards and the per-episode tensors are checked in any case.
    threads
        Shards checked at once, default one per core up to 8.

    Raises
    ------
    InputError
        ``DATASET_*``; ``MANIFEST_*``, ``FORMAT_VERSION``, ``FILE_*``, ``SHARD_HEADER``,
        ``SHARD_DIGEST`` (names file, tensor and block) at the first damage; ``DATASET_CONTENT``
        when per-episode tensors contradict the manifest.

    Examples
    --------
    `tiny` is what the example of `gear_offline.convert.convert` makes.

    >>> import gear_offline as go
    >>> dataset = go.open_dataset("tiny")
    >>> len(dataset), dataset.episodes.lengths.tolist(), dataset.returns.tolist()
    (2, [7, 5], [7.0, 5.0])
    >>> dataset[1]["observations"].shape
    (5, 3)
    >>> dataset.column("rewards").dtype, dataset.statistics["observations"].mean.tolist()
    (dtype('float32'), [6.5, -4.5, 1.0])
    """
    if verify not in (True, False, "on_use"):
        raise InputError(
            "DATASET_OPTION",
            f"verify={verify!r} is not usable",
            remedy="use True, False or 'on_use'",
        )
    path = given_path(path, "DATASET_KIND", where="path")
    directory = open_directory(path)
    try:
        manifest = Manifest.read_from(directory, path)
        stamps = tuple(_stamp(directory, shard, path) for shard in manifest.shards)
        if verify is True:
            verify_shards(directory, manifest, path, threads=threads)
        parts: dict[str, list[npt.NDArray[Any]]] = {c.name: [] for c in EPISODE_COLUMNS}
        for shard in manifest.shards:
            for name, part in read_episodes(directory, manifest, shard, path).items():
                parts[name].append(part)
        identity = _identity(directory)
    finally:
        os.close(directory)
    values = {name: np.concatenate(found) for name, found in parts.items()}
    for array in values.values():
        array.setflags(write=False)
    check_episodes(manifest, values, path)
    return Dataset(
        path=path,
        manifest=manifest,
        episodes=EpisodeIndex(lengths=values["episode_lengths"]),
        terminated=values["episode_terminated"],
        truncated=values["episode_truncated"],
        returns=values["episode_returns"],
        verified=verify is True,
        stamps=stamps,
        _identity=identity,
        on_use=verify == "on_use",
    )


def _stamp(directory: int, shard: ShardRecord, path: Path) -> tuple[int, ...]:
    with shard_file(directory, shard, path) as handle:
        return file_stamp(handle)
