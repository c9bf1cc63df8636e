"""Write shards from a source; several are written by processes that open the source themselves.

Shape legend: N steps, E episodes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from io import FileIO
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gear_offline.core.files import writing
from gear_offline.core.types import Array, Float64Array
from gear_offline.core.workers import Caller, RayPool, WorkerPool
from gear_offline.data.convert.edits import Edits
from gear_offline.data.dataset.manifest import ShardRecord, shard_name
from gear_offline.data.dataset.schema import (
    REWARDS,
    ColumnSpec,
    EpisodeIndex,
    TableSpec,
    fold_episodes,
)
from gear_offline.data.dataset.shard import (
    EPISODE_COLUMNS,
    BlockDigests,
    byte_view,
    digest,
    encode_header,
    plan_tensors,
    stored_form,
)
from gear_offline.data.dataset.statistics import Moments
from gear_offline.data.sources.base import Source
from gear_offline.data.sources.input_files import changed_error
from gear_offline.data.sources.reader import YIELDED
from gear_offline.errors import InputError

PIECE_BYTES = 4 << 20  # a piece has about this many bytes, or one storage chunk if that is more

Advance = Callable[[int], None]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The shards to write: shard i gets the episodes ``[bounds[i], bounds[i + 1])``."""

    spec: TableSpec  # of the source
    content: str | None  # digest of what a reader of the user's yielded
    folders: tuple[str, ...]  # names of its files' folders: each manifest of a server has its own
    columns: tuple[ColumnSpec, ...]  # as they are written
    bounds: list[int]
    block_bytes: int
    allow_nonfinite: bool
    folder: Path

    @property
    def shards(self) -> int:
        return len(self.bounds) - 1


class Written(NamedTuple):
    """A shard that is on the disk, and what its columns and episodes add up to."""

    record: ShardRecord
    moments: dict[str, Moments]
    returns: Float64Array


def shard_bounds(
    episodes: EpisodeIndex, columns: Sequence[ColumnSpec], *, shard_bytes: int
) -> list[int]:
    """Give each shard as many whole episodes as fit `shard_bytes`, at least one."""
    # Episodes [a, b) take ends[b] - ends[a] bytes.
    ends = episodes.offsets * sum(c.step_bytes for c in columns)
    ends = ends + np.arange(ends.size) * sum(c.step_bytes for c in EPISODE_COLUMNS)
    bounds = [0]
    while bounds[-1] < episodes.episodes:
        last = int(np.searchsorted(ends, ends[bounds[-1]] + shard_bytes, side="right")) - 1
        bounds.append(max(last, bounds[-1] + 1))
    return bounds


def write_shards(
    source: Source, shards: Iterable[int], plan: Plan, advance: Advance
) -> list[Written]:
    """Write shards one after the other.

    While a piece is counted and stored, the next one is read.  While a shard is made durable, the
    next one is written.  Two pieces are in memory, whatever the size of source or shard.
    """
    results, durable = list[Written](), list[Future[None]]()
    with ThreadPoolExecutor(max_workers=1) as syncing:
        for number in shards:
            path = plan.folder / shard_name(number)
            # The threads end before their file is closed.
            with open(path, "wb", buffering=0) as file, ThreadPoolExecutor(max_workers=2) as pool:
                shard = Shard(source, plan, number, file)
                under_way: list[Future[None]] = []
                for column, start, stop in _pieces(source, plan, number):
                    rows = _read_rows(source, column, start, stop)
                    _wait(under_way)
                    jobs = (shard.count, column, rows, start), (shard.append, column.name, rows)
                    under_way = [pool.submit(*job) for job in jobs]
                    advance((stop - start) * column.step_bytes)
                _wait([*under_way, *durable[-1:]])
                results.append(shard.finish())
            durable.append(syncing.submit(_sync, path))
        _wait(durable)
    return results


def _sync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _wait(futures: Iterable[Future[None]]) -> None:
    for future in futures:
        future.result()


class Shard:
    """A shard being written and digested: each tensor from beginning to end, several at once."""

    def __init__(self, source: Source, plan: Plan, number: int, file: FileIO) -> None:
        self._name, self._file = shard_name(number), file
        first, last = plan.bounds[number : number + 2]
        self._first_episode, self._allow_nonfinite = first, plan.allow_nonfinite
        self._offsets = source.episodes.offsets[first : last + 1]
        self._lengths = source.episodes.lengths[first:last]
        self._flags = source.terminated[first:last], source.truncated[first:last]
        self._moments = {c.name: Moments(stored_form(c)[1]) for c in plan.columns}
        unknown = 0.0 if REWARDS in self._moments else np.nan
        self._returns: Float64Array = np.full(last - first, unknown)
        self._steps = int(self._lengths.sum())
        tensors = plan_tensors(plan.columns, steps=self._steps, episodes=last - first)
        self._header = encode_header(tensors)
        self._bytes = len(self._header) + tensors[-1].stop
        # where the next bytes of each tensor go
        self._places = {t.name: len(self._header) + t.start for t in tensors}
        self._digests = {t.name: BlockDigests(plan.block_bytes) for t in tensors}

    def count(self, column: ColumnSpec, rows: Array, start: int) -> None:
        """Add `rows`, the first of which is step `start` of the source, to the statistics."""
        moments = self._moments[column.name]
        bad = moments.update(rows)
        if bad is not None and not self._allow_nonfinite:
            step = start + bad
            episode = int(np.searchsorted(self._offsets, step, side="right")) - 1
            inside, number = step - int(self._offsets[episode]), self._first_episode + episode
            where = f"column {column.name}, step {step}: step {inside} of episode {number}"
            remedy = "repair the source, or accept such values (--allow-nonfinite)"
            raise InputError("COLUMN", "NaN or infinity in the data", where, remedy)
        if column.dtype == np.bool_ and moments.high.max() > 1:
            problem = "a bool column holds bytes other than 0 and 1"
            where = f"column {column.name}, steps {start} to {start + len(rows) - 1}"
            raise InputError("COLUMN", problem, where, "store the column as uint8")
        if column.name == REWARDS:
            rewards = rows.reshape(-1).astype(np.float64)
            with np.errstate(all="ignore"):
                fold_episodes(np.add, self._returns, self._offsets, rewards, start)

    def append(self, name: str, rows: Array) -> None:
        """Write the next `rows` of tensor `name`, C-contiguous and in stored form."""
        data, offset = byte_view(rows), self._places[name]
        self._write(data, offset)
        if hasattr(os, "posix_fadvise"):
            # Linux starts writing these pages to the disk now, so that fsync finds little to do.
            os.posix_fadvise(self._file.fileno(), offset, len(data), os.POSIX_FADV_DONTNEED)
        self._digests[name].update(data)
        self._places[name] += len(data)

    def _write(self, data: memoryview, offset: int) -> None:
        while len(data):
            count = os.pwrite(self._file.fileno(), data, offset)
            data, offset = data[count:], offset + count

    def finish(self) -> Written:
        """Write the per-episode tensors and the header."""
        episode_values = (self._lengths, self._returns, *self._flags)
        for column, values in zip(EPISODE_COLUMNS, episode_values, strict=True):
            self.append(column.name, np.ascontiguousarray(values))
        self._write(memoryview(self._header), 0)
        record = ShardRecord(
            name=self._name,
            episodes=self._lengths.size,
            steps=self._steps,
            bytes=self._bytes,
            header_bytes=len(self._header),
            header_digest=digest(self._header),
            digests={name: blocks.finish() for name, blocks in self._digests.items()},
        )
        return Written(record, self._moments, self._returns)


def _pieces(source: Source, plan: Plan, number: int) -> Iterator[tuple[ColumnSpec, int, int]]:
    """Cut each column of a shard at multiples of whole chunks: none is read twice."""
    first, last = source.episodes.offsets[plan.bounds[number : number + 2]].tolist()
    breaks = source.breaks[(source.breaks > first) & (source.breaks < last)]
    for begin, end in pairwise([first, *breaks.tolist(), last]):
        for column in plan.columns:
            chunk = source.preferred_rows(column.name)
            rows = chunk * max(1, PIECE_BYTES // (chunk * source.spec[column.name].step_bytes))
            cuts = range((begin // rows + 1) * rows, end, rows)
            for start, stop in pairwise([begin, *cuts, end]):
                yield column, start, stop


def _read_rows(source: Source, stored: ColumnSpec, start: int, stop: int) -> Array:
    """Read rows in stored form, (stop - start, *stored shape), C order."""
    rows = source.read(stored.name, start, stop)
    if stored.dtype != rows.dtype:
        with np.errstate(invalid="ignore"):
            numbers = rows.astype(stored.dtype)
        if not np.array_equal(numbers, rows):
            problem = "a column named as discrete holds other than whole numbers"
            where = f"column {stored.name}, steps {start} to {stop - 1}"
            raise InputError("COLUMN", problem, where, f"leave {stored.name} out of --discrete")
        rows = numbers
    dtype, step_shape = stored_form(stored)
    return np.ascontiguousarray(rows).view(dtype).reshape(stop - start, *step_shape)


def write_in_processes(
    path: str | os.PathLike[str],
    edits: Edits,
    plan: Plan,
    workers: int,
    ray: str | None,
    advance: Advance,
) -> list[Written]:
    """Write several shards at once, each in a process that opens the source itself."""
    jobs = [(str(path), edits, number, plan) for number in range(plan.shards)]
    with WorkerPool(workers) if ray is None else RayPool(ray, workers) as pool:
        if isinstance(pool, RayPool):
            pool.check(plan.folder)
        return list(pool.run(f"{__name__}:write_shard", jobs, on_message=advance))


def folder_names(source: Source) -> tuple[str, ...]:
    return tuple(file.path.parent.name for file in source.info.files)


def write_shard(caller: Caller, path: str, edits: Edits, number: int, plan: Plan) -> Written:
    """Write one shard in a worker."""
    source = _open_edited(path, edits)
    if source.info.attributes.get(YIELDED) != plan.content:
        problem = "the reader yielded other episodes when a worker called it"
        remedy = "let it yield the same at each call (seed what it draws), or use one worker"
        raise InputError("USAGE", problem, path, remedy)
    if source.spec != plan.spec or folder_names(source) != plan.folders:
        raise changed_error(path)
    with writing(plan.folder):
        return write_shards(source, [number], plan, caller.send)[0]


@lru_cache(maxsize=1)
def _open_edited(path: str, edits: Edits) -> Source:
    return edits.edit_episodes(edits.shift_rows(edits.open(path)))
