"""Write shards from a source: read, digest and write, count, each in its own thread.

At most `PIECES` pieces are on their way, whatever the size of source or shard.  Several shards are
written by processes that open the source themselves.

Shape legend: N steps, E episodes.
"""

from __future__ import annotations

import math
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gear_offline.core.processes import die_with_parent, interrupts_kept_from_children
from gear_offline.core.types import Array, Float64Array
from gear_offline.dataset.manifest import ShardRecord, shard_name
from gear_offline.dataset.schema import ColumnSpec, EpisodeIndex, TableSpec
from gear_offline.dataset.shard import (
    EPISODE_COLUMNS,
    ShardWriter,
    digest,
    plan_tensors,
    stored_form,
)
from gear_offline.dataset.statistics import Moments
from gear_offline.errors import GearError, InputError
from gear_offline.sources import open_source
from gear_offline.sources.base import Source, changed_error

PIECE_BYTES = 4 << 20  # a piece has about this many bytes, or one storage chunk if that is more
PIECES = 3  # read and not yet written or counted
REWARDS, ACTIONS = "rewards", "actions"
MOST_CHOICES = 1000  # whole numbers below this in a float column look like numbers of choices

Advance = Callable[[int], None]


@dataclass(frozen=True, kw_only=True)
class ShardJob:
    """Which episodes go into which shard: ``[first_episode, last_episode)`` into `index`."""

    index: int
    first_episode: int
    last_episode: int


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is the same for all shards; `stored` are the `columns` of the source as written."""

    columns: tuple[ColumnSpec, ...]
    stored: tuple[ColumnSpec, ...]
    block_bytes: int
    allow_nonfinite: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class Shard:
    """A written shard, its columns' moments, its episodes' returns, (E,) float64.

    `choices`: whether its actions are small whole numbers in a float dtype.
    """

    record: ShardRecord
    moments: Mapping[str, Moments]
    returns: Float64Array
    choices: bool


def plan_shards(
    episodes: EpisodeIndex, columns: Sequence[ColumnSpec], *, shard_bytes: int
) -> tuple[ShardJob, ...]:
    """Give each shard as many whole episodes as fit `shard_bytes`, at least one."""
    # Episodes [a, b) take ends[b] - ends[a] bytes.
    ends = episodes.offsets * sum(c.step_bytes for c in columns)
    ends = ends + np.arange(ends.size) * sum(c.step_bytes for c in EPISODE_COLUMNS)
    jobs: list[ShardJob] = []
    first = 0
    while first < episodes.episodes:
        last = int(np.searchsorted(ends, ends[first] + shard_bytes, side="right")) - 1
        last = max(last, first + 1)
        jobs.append(ShardJob(index=len(jobs), first_episode=first, last_episode=last))
        first = last
    return tuple(jobs)


def write_shards(
    source: Source, jobs: Sequence[ShardJob], settings: Settings, folder: Path, advance: Advance
) -> list[Shard]:
    """Write shards one after the other; the disk may be one shard behind the reading."""
    shards: list[Future[Shard]] = []
    writers: list[ShardWriter] = []
    pending: deque[Future[Any]] = deque()
    with (
        ThreadPoolExecutor(max_workers=1) as writing,
        ThreadPoolExecutor(max_workers=1) as counting,
    ):
        try:
            for job in jobs:
                first = int(source.episodes.offsets[job.first_episode])
                last = int(source.episodes.offsets[job.last_episode])
                episodes = job.last_episode - job.first_episode
                tensors = plan_tensors(settings.stored, steps=last - first, episodes=episodes)
                path = folder / shard_name(job.index)
                writer = ShardWriter(path, tensors, settings.block_bytes)
                writers.append(writer)
                counter = _Counter(source, job, settings)
                for column, stored in zip(settings.columns, settings.stored, strict=True):
                    for start, stop in _pieces(source, column, first, last):
                        rows = _read_rows(source, column, stored, start, stop)
                        pending.append(counting.submit(counter.add, stored, rows, start))
                        pending.append(writing.submit(writer.append, stored.name, rows))
                        del rows
                        advance((stop - start) * stored.step_bytes)
                        while len(pending) > 2 * PIECES:
                            pending.popleft().result()
                counted = counting.submit(lambda: None)
                shards.append(writing.submit(_finish, source, job, writer, counter, counted))
                if len(shards) > 1:
                    shards[-2].result()
            for future in pending:
                future.result()
            return [shard.result() for shard in shards]
        except BaseException:
            for pool in (writing, counting):
                pool.shutdown(cancel_futures=True)
            raise
        finally:
            for writer in writers:
                writer.close()


def _finish(
    source: Source, job: ShardJob, writer: ShardWriter, counter: _Counter, counted: Future[None]
) -> Shard:
    """Write the per-episode tensors once all rows are counted, and make the file durable."""
    counted.result()
    episodes = slice(job.first_episode, job.last_episode)
    lengths = np.ascontiguousarray(source.episodes.lengths[episodes])
    writer.append("episode_lengths", lengths)
    writer.append("episode_returns", counter.returns)
    writer.append("episode_terminated", np.ascontiguousarray(source.terminated[episodes]))
    writer.append("episode_truncated", np.ascontiguousarray(source.truncated[episodes]))
    record = ShardRecord(
        name=shard_name(job.index),
        episodes=lengths.size,
        steps=int(lengths.sum()),
        bytes=writer.bytes,
        header_bytes=len(writer.header),
        header_digest=digest(writer.header),
        digests=writer.finish(),
    )
    return Shard(
        record=record, moments=counter.moments, returns=counter.returns, choices=counter.choices
    )


def _pieces(source: Source, column: ColumnSpec, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Cut ``[start, stop)`` at multiples of whole chunks, so that none is read twice."""
    chunk = max(1, source.preferred_rows(column.name))
    rows = chunk * max(1, PIECE_BYTES // (chunk * column.step_bytes))
    while start < stop:
        end = min(stop, (start // rows + 1) * rows)
        yield start, end
        start = end


def _read_rows(
    source: Source, column: ColumnSpec, stored: ColumnSpec, start: int, stop: int
) -> Array:
    """Read rows in stored form, (stop - start, *stored shape), C order."""
    where = f"column {column.name}, steps {start} to {stop - 1}"
    try:
        rows = source.read(column.name, start, stop)
    except GearError:
        raise
    except (OSError, RuntimeError) as error:
        what = f"cannot read the source: {error}"
        raise InputError("SOURCE_READ", what, where=where, remedy="check the file") from error
    if rows.shape != (stop - start, *column.shape) or rows.dtype != column.dtype:
        what = f"the source gave {rows.dtype} {rows.shape} where {column.dtype} "
        what += f"{(stop - start, *column.shape)} was promised"
        remedy = "the file may have changed; convert it again"
        raise InputError("SOURCE_READ", what, where=where, remedy=remedy)
    if stored.dtype != column.dtype:
        with np.errstate(invalid="ignore"):
            numbers = rows.astype(stored.dtype)
        if not np.array_equal(numbers, rows):
            what = "a column named as discrete holds other than whole numbers"
            remedy = f"leave {column.name} out of --discrete"
            raise InputError("COLUMN", what, where=where, remedy=remedy)
        rows = numbers
    dtype, shape = stored_form(stored)
    return np.ascontiguousarray(rows).view(dtype).reshape(stop - start, *shape)


class _Counter:
    """Statistics of one shard, fed in step order."""

    def __init__(self, source: Source, job: ShardJob, settings: Settings) -> None:
        self._offsets = source.episodes.offsets[job.first_episode : job.last_episode + 1]
        self._first_episode = job.first_episode
        self._allow_nonfinite = settings.allow_nonfinite
        self.moments = {c.name: Moments(stored_form(c)[1]) for c in settings.stored}
        self.returns: Float64Array = np.zeros(self._offsets.size - 1)
        self.choices = any(
            c.name == ACTIONS and c.dtype.kind == "f" and math.prod(c.shape) == 1
            for c in settings.stored
        )

    def add(self, column: ColumnSpec, rows: Array, start: int) -> None:
        """Add `rows` of `column` whose first is step `start` of the source."""
        moments = self.moments[column.name]
        bad = moments.update(rows)
        if bad is not None and not self._allow_nonfinite:
            raise self._nonfinite(column, start + bad)
        if column.dtype == np.bool_ and moments.high.max() > 1:
            what = "a bool column holds bytes other than 0 and 1"
            where = f"column {column.name}, steps {start} to {start + len(rows) - 1}"
            raise InputError("COLUMN", what, where=where, remedy="store the column as uint8")
        if column.name == ACTIONS and self.choices:
            small = moments.low.min() >= 0 and moments.high.max() < MOST_CHOICES
            self.choices = bool(small and np.array_equal(rows, np.rint(rows)))
        if column.name == REWARDS:
            self._add_returns(rows.reshape(-1).astype(np.float64), start)

    def _add_returns(self, rewards: Float64Array, start: int) -> None:
        first = int(np.searchsorted(self._offsets, start, side="right")) - 1
        last = int(np.searchsorted(self._offsets, start + rewards.size, side="left"))
        bounds = np.maximum(self._offsets[first:last] - start, 0)
        with np.errstate(all="ignore"):
            self.returns[first:last] += np.add.reduceat(rewards, bounds)

    def _nonfinite(self, column: ColumnSpec, step: int) -> InputError:
        episode = int(np.searchsorted(self._offsets, step, side="right")) - 1
        inside = step - int(self._offsets[episode])
        where = f"column {column.name}, step {step}: step {inside} of episode "
        where += f"{self._first_episode + episode}"
        remedy = "repair the source, or accept such values (--allow-nonfinite)"
        return InputError("COLUMN", "NaN or infinity in the data", where=where, remedy=remedy)


# worker processes ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Opening:
    """What a source was opened with."""

    uri: str | Path
    rule: str | None
    names: Mapping[str, str]


_worker: dict[str, Any] = {}  # of a worker process: its source, settings and folder


def write_in_processes(
    opening: Opening,
    source: Source,
    jobs: Sequence[ShardJob],
    settings: Settings,
    folder: Path,
    workers: int,
    advance: Advance,
) -> list[Shard]:
    offsets, step_bytes = source.episodes.offsets, sum(c.step_bytes for c in settings.stored)
    lengths = digest(source.episodes.lengths.tobytes())
    with ProcessPoolExecutor(
        max_workers=workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin_worker,
        initargs=(os.getpid(), opening, source.spec, lengths, settings, folder),
    ) as pool:
        try:
            with interrupts_kept_from_children():
                futures = [pool.submit(_in_worker, job) for job in jobs]
            waiting = dict(zip(futures, jobs, strict=True))
            while waiting:
                done, _ = wait(waiting, timeout=0.2, return_when="FIRST_COMPLETED")
                for future in done:
                    future.result()
                    job = waiting.pop(future)
                    steps = offsets[job.last_episode] - offsets[job.first_episode]
                    advance(int(steps) * step_bytes)
                advance(0)
            return [future.result() for future in futures]
        except BrokenProcessPool as error:
            remedy = "look above for its message; memory may have run out: use fewer workers"
            raise GearError("SYSTEM", "a worker process died", remedy=remedy) from error
        finally:
            pool.shutdown(cancel_futures=True)


def _begin_worker(
    parent: int, opening: Opening, spec: TableSpec, lengths: str, settings: Settings, folder: Path
) -> None:
    die_with_parent(parent)
    _worker.update(opening=opening, spec=spec, lengths=lengths, settings=settings, folder=folder)


def _in_worker(job: ShardJob) -> Shard:
    if "source" not in _worker:  # not in the initializer, whose errors nobody sees
        opening = _worker["opening"]
        source = open_source(opening.uri, rule=opening.rule, names=opening.names)
        same = digest(source.episodes.lengths.tobytes()) == _worker["lengths"]
        if not same or source.spec != _worker["spec"]:
            raise changed_error(str(opening.uri))
        _worker["source"] = source
    settings, folder = _worker["settings"], _worker["folder"]
    return write_shards(_worker["source"], [job], settings, folder, lambda n: None)[0]
