"""Write shards from a source; several are written by processes that open the source themselves.

Shape legend: N steps, E episodes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gear_offline.core.closing import Closing
from gear_offline.core.files import writing
from gear_offline.core.types import Array, Float64Array
from gear_offline.dataset.manifest import ShardRecord, shard_name
from gear_offline.dataset.schema import ColumnSpec, EpisodeIndex, TableSpec, fold_episodes
from gear_offline.dataset.shard import (
    EPISODE_COLUMNS,
    BlockDigests,
    byte_view,
    digest,
    encode_header,
    plan_tensors,
    stored_form,
)
from gear_offline.dataset.statistics import Moments
from gear_offline.errors import InputError
from gear_offline.sources import open_source
from gear_offline.sources.base import Source, changed_error
from gear_offline.sources.edit import edit_source, find_function
from gear_offline.workers import Caller, RayPool, WorkerPool

PIECE_BYTES = 4 << 20  # a piece has about this many bytes, or one storage chunk if that is more
REWARDS = "rewards"

Advance = Callable[[int], None]


@dataclass(frozen=True)
class ShardJob:
    """Which episodes go into which shard: ``[first_episode, last_episode)`` into `index`."""

    index: int
    first_episode: int
    last_episode: int


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is the same for all shards; `columns` as they are written."""

    spec: TableSpec  # of the source
    columns: tuple[ColumnSpec, ...]
    block_bytes: int
    allow_nonfinite: bool


class Written(NamedTuple):
    """A shard that is on the disk, and what its columns and episodes add up to."""

    record: ShardRecord
    moments: dict[str, Moments]
    returns: Float64Array


def plan_shards(
    episodes: EpisodeIndex, columns: Sequence[ColumnSpec], *, shard_bytes: int
) -> list[ShardJob]:
    """Give each shard as many whole episodes as fit `shard_bytes`, at least one."""
    # Episodes [a, b) take ends[b] - ends[a] bytes.
    ends = episodes.offsets * sum(c.step_bytes for c in columns)
    ends = ends + np.arange(ends.size) * sum(c.step_bytes for c in EPISODE_COLUMNS)
    jobs: list[ShardJob] = []
    first = 0
    while first < episodes.episodes:
        last = int(np.searchsorted(ends, ends[first] + shard_bytes, side="right")) - 1
        jobs.append(ShardJob(len(jobs), first, max(last, first + 1)))
        first = jobs[-1].last_episode
    return jobs


def write_shards(
    source: Source, jobs: Sequence[ShardJob], settings: Settings, folder: Path, advance: Advance
) -> list[Written]:
    """Write shards one after the other.

    While a piece is counted and stored, the next one is read, and while a shard is made durable,
    the next one is written: two pieces are in memory, whatever the size of source or shard.
    """
    shards: list[Future[Written]] = []
    with ExitStack() as writers, ThreadPoolExecutor(max_workers=3) as pool:
        for job in jobs:
            shard = writers.enter_context(ShardWriter(source, job, settings, folder))
            first, last = source.episodes.offsets[[job.first_episode, job.last_episode]].tolist()
            under_way: list[Future[None]] = []
            for column, start, stop in _pieces(source, settings.columns, first, last):
                rows = _read_rows(source, column, start, stop)
                _wait(under_way)
                under_way = [
                    pool.submit(shard.count, column, rows, start),
                    pool.submit(shard.append, column.name, rows),
                ]
                advance((stop - start) * column.step_bytes)
            _wait([*under_way, *shards[-1:]])
            shards.append(pool.submit(shard.finish))
        return _wait(shards)


def _wait(futures: Sequence[Future[Any]]) -> list[Any]:
    return [future.result() for future in futures]


class ShardWriter(Closing):
    """A shard being written and digested: each tensor from beginning to end, several at once."""

    def __init__(self, source: Source, job: ShardJob, settings: Settings, folder: Path) -> None:
        episodes = slice(job.first_episode, job.last_episode)
        self._first_episode, self._allow_nonfinite = job.first_episode, settings.allow_nonfinite
        self._offsets = source.episodes.offsets[job.first_episode : job.last_episode + 1]
        self._lengths = source.episodes.lengths[episodes]
        self._flags = source.terminated[episodes], source.truncated[episodes]
        self._moments = {c.name: Moments(stored_form(c)[1]) for c in settings.columns}
        unknown = 0.0 if REWARDS in self._moments else np.nan
        self._returns: Float64Array = np.full(self._lengths.size, unknown)
        self._steps = int(self._lengths.sum())
        tensors = plan_tensors(settings.columns, steps=self._steps, episodes=self._lengths.size)
        self._header = encode_header(tensors)
        self._bytes = len(self._header) + tensors[-1].stop
        # where the next bytes of each tensor go
        self._places = {t.name: len(self._header) + t.start for t in tensors}
        self._digests = {t.name: BlockDigests(settings.block_bytes) for t in tensors}
        self._name = shard_name(job.index)
        self._file = open(folder / self._name, "wb", buffering=0)  # noqa: SIM115 - closed by `close`

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
            what = "a bool column holds bytes other than 0 and 1"
            where = f"column {column.name}, steps {start} to {start + len(rows) - 1}"
            raise InputError("COLUMN", what, where, "store the column as uint8")
        if column.name == REWARDS:
            rewards = rows.reshape(-1).astype(np.float64)
            with np.errstate(all="ignore"):
                fold_episodes(np.add, self._returns, self._offsets, rewards, start)

    def append(self, name: str, rows: Array) -> None:
        """Write the next `rows` of tensor `name`, C-contiguous and in stored form."""
        data, place = byte_view(rows), self._places[name]
        self._write(data, place)
        if hasattr(os, "posix_fadvise"):
            # Linux starts writing these pages to the disk now, so that fsync finds little to do.
            os.posix_fadvise(self._file.fileno(), place, len(data), os.POSIX_FADV_DONTNEED)
        self._digests[name].update(data)
        self._places[name] += len(data)

    def _write(self, data: memoryview, place: int) -> None:
        while len(data):
            count = os.pwrite(self._file.fileno(), data, place)
            data, place = data[count:], place + count

    def finish(self) -> Written:
        """Write the per-episode tensors and the header, make the file durable and close it."""
        parts = (self._lengths, self._returns, *self._flags)
        for column, values in zip(EPISODE_COLUMNS, parts, strict=True):
            self.append(column.name, np.ascontiguousarray(values))
        self._write(memoryview(self._header), 0)
        os.fsync(self._file.fileno())
        self.close()
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

    def close(self) -> None:
        self._file.close()


def _pieces(
    source: Source, columns: Sequence[ColumnSpec], first: int, last: int
) -> Iterator[tuple[ColumnSpec, int, int]]:
    """Cut ``[first, last)`` of each column at multiples of whole chunks: none is read twice."""
    breaks = source.breaks[(source.breaks > first) & (source.breaks < last)]
    for begin, end in pairwise([first, *breaks.tolist(), last]):
        for column in columns:
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
            what = "a column named as discrete holds other than whole numbers"
            where = f"column {stored.name}, steps {start} to {stop - 1}"
            remedy = f"leave {stored.name} out of --discrete"
            raise InputError("COLUMN", what, where=where, remedy=remedy)
        rows = numbers
    dtype, step_shape = stored_form(stored)
    return np.ascontiguousarray(rows).view(dtype).reshape(stop - start, *step_shape)


@dataclass(frozen=True)
class Opening:
    """How a source is opened, here and in workers: what the user gave, and which episodes stay."""

    uri: str | Path
    rule: str | None
    names: tuple[tuple[str, str], ...]
    map: str | None
    kept: bytes | None  # a bool of each episode


def write_in_processes(
    opening: Opening,
    jobs: Sequence[ShardJob],
    settings: Settings,
    folder: Path,
    workers: int,
    ray: str | None,
    advance: Advance,
) -> list[Written]:
    """Write several shards at once, each in a process that opens the source itself."""
    arguments = [(opening, job, settings, folder) for job in jobs]
    with WorkerPool(workers) if ray is None else RayPool(ray, workers) as pool:
        if isinstance(pool, RayPool):
            pool.check(folder)
        return list(pool.run(f"{__name__}:write_shard", arguments, on_message=advance))


def write_shard(
    caller: Caller, opening: Opening, job: ShardJob, settings: Settings, folder: Path
) -> Written:
    """Write one shard in a worker."""
    source = _opened(opening)
    if source.spec != settings.spec:
        raise changed_error(str(opening.uri))
    with writing(folder):
        return write_shards(source, [job], settings, folder, caller.send)[0]


@lru_cache(maxsize=1)
def _opened(opening: Opening) -> Source:
    source = open_source(opening.uri, rule=opening.rule, names=dict(opening.names))
    function = find_function(opening.map)[0] if opening.map else None
    kept = None if opening.kept is None else np.frombuffer(opening.kept, np.bool_)
    return edit_source(source, function, kept)
