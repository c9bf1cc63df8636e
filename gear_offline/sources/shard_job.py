"""Convert one shard: read columns, digest and write them, gather their statistics.

Three things run at once, each in its own thread: reading the source, digesting and writing, and
statistics.  HDF5, xxhash, NumPy and the kernel's write release the interpreter lock.  At most
`DEPTH` pieces are on their way and one is being read, so a conversion needs about
``(DEPTH + 2) * piece_bytes`` of buffers, 26 bytes an episode and the source's own caches, whatever
the size of source or shard.  A piece has `PIECE_BYTES`, or what the source prefers if that is more
(8 MiB for HDF5 whose rows of chunks are not larger).

Shape legend: N steps and E episodes of this shard.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gear_offline.core.closing import Closing
from gear_offline.core.staging import write_error
from gear_offline.core.system import drop_pages
from gear_offline.dataset.manifest import ShardRecord, shard_name
from gear_offline.dataset.schema import ColumnSpec, Int64Array
from gear_offline.dataset.shards import (
    BlockDigests,
    TensorLayout,
    byte_view,
    digest,
    encode_header,
    plan_tensors,
    stored_form,
)
from gear_offline.dataset.statistics import Float64Array, Moments
from gear_offline.errors import GearError, InputError
from gear_offline.sources.base import Source

DEPTH = 2
PIECE_BYTES = 4 << 20  # a piece has about this many bytes, or one storage chunk if that is more
REWARDS = "rewards"

Advance = Callable[[int], None]


@dataclass(frozen=True, kw_only=True)
class ShardJob:
    """Which episodes go into which shard: ``[first_episode, last_episode)`` into `index`."""

    index: int
    first_episode: int
    last_episode: int


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is the same for all shards of a conversion."""

    columns: tuple[ColumnSpec, ...]
    block_bytes: int
    allow_nonfinite: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardResult:
    """A written shard, its columns' moments and its episodes' returns, (E,) float64."""

    record: ShardRecord
    moments: Mapping[str, Moments]
    returns: Float64Array


class _Stage(Closing):
    """One thread that works through calls in order; `submit` waits while `DEPTH` are pending."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1)
        self._pending: deque[Future[None]] = deque()

    def submit(self, call: Callable[..., None], *values: Any) -> None:
        while len(self._pending) >= DEPTH:
            self._pending.popleft().result()
        self._pending.append(self._pool.submit(call, *values))

    def drain(self) -> None:
        while self._pending:
            self._pending.popleft().result()

    def close(self) -> None:
        """Wait for the thread; what has not begun is dropped."""
        self._pool.shutdown(cancel_futures=True)


class _ShardFile:
    """A shard being written: digests what it writes."""

    def __init__(self, directory: int, name: str, tensors: Sequence[TensorLayout], block: int):
        self.name = name
        self._header = encode_header(tensors)
        self._tensors = {t.name: t for t in tensors}
        self._written = dict.fromkeys(self._tensors, 0)
        self._digests = {t.name: BlockDigests(block) for t in tensors}
        self._bytes = len(self._header) + tensors[-1].stop
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        self._handle = os.open(name, flags, 0o666, dir_fd=directory)
        self._put(memoryview(self._header), 0)

    def _put(self, data: memoryview, offset: int) -> None:
        while len(data):
            count = os.pwrite(self._handle, data, offset)
            data, offset = data[count:], offset + count

    def append(self, name: str, rows: npt.NDArray[Any]) -> None:
        """Write the next rows of tensor `name`."""
        data = byte_view(rows)
        offset = len(self._header) + self._tensors[name].start + self._written[name]
        try:
            self._put(data, offset)
            # Linux starts writing these pages to the disk now, so that fsync finds little to do.
            drop_pages(self._handle, offset, len(data))
        except OSError as error:
            raise write_error(error, self.name) from error
        self._digests[name].update(data)
        self._written[name] += len(data)

    def finish(self, *, episodes: int, steps: int) -> ShardRecord:
        """Make the file durable, close it and return its record."""
        try:
            os.fsync(self._handle)
        except OSError as error:
            raise write_error(error, self.name) from error
        finally:
            self.close()
        if self._written != {name: t.bytes for name, t in self._tensors.items()}:
            raise AssertionError(f"{self.name}: tensors were not written to their end")
        return ShardRecord(
            name=self.name,
            episodes=episodes,
            steps=steps,
            bytes=self._bytes,
            header_bytes=len(self._header),
            header_digest=digest(self._header),
            digests={name: found.finish() for name, found in self._digests.items()},
        )

    def close(self) -> None:
        os.close(self._handle)


def piece_rows(source: Source, column: ColumnSpec) -> int:
    """Rows per read: whole storage chunks, about `PIECE_BYTES`."""
    chunk = max(1, source.preferred_rows(column.name))
    return chunk * max(1, PIECE_BYTES // (chunk * column.step_bytes))


def _pieces(start: int, stop: int, rows: int) -> Iterator[tuple[int, int]]:
    """Cut ``[start, stop)`` at multiples of `rows`, so that no storage chunk is read twice."""
    while start < stop:
        end = min(stop, (start // rows + 1) * rows)
        yield start, end
        start = end


class _Gatherer:
    """Statistics of one shard, fed in step order."""

    def __init__(self, source: Source, job: ShardJob, settings: Settings) -> None:
        offsets = source.episodes.offsets[job.first_episode : job.last_episode + 1]
        self._offsets: Int64Array = offsets  # (E + 1,) global steps
        self._first_episode = job.first_episode
        self._allow_nonfinite = settings.allow_nonfinite
        self.moments = {c.name: Moments(stored_form(c)[1]) for c in settings.columns}
        self.returns: Float64Array = np.zeros(offsets.size - 1)

    def add(self, column: ColumnSpec, rows: npt.NDArray[Any], start: int) -> None:
        """Add `rows` of `column` whose first is global step `start`."""
        moments = self.moments[column.name]
        bad = moments.update(rows)
        if bad is not None and not self._allow_nonfinite:
            raise self._nonfinite(column, start + bad)
        if column.dtype == np.bool_ and moments.high.max() > 1:
            raise InputError(
                "BOOL_BYTES",
                "a bool column holds bytes other than 0 and 1",
                where=f"column {column.name}, steps {start} to {start + len(rows) - 1}",
                remedy="store the column as uint8",
            )
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
        return InputError(
            "NONFINITE",
            "NaN or infinity in the data",
            where=f"column {column.name}, step {step}: step {inside} of episode "
            f"{self._first_episode + episode}",
            remedy="repair the source, or accept such values (--allow-nonfinite)",
        )


def _read_rows(source: Source, column: ColumnSpec, start: int, stop: int) -> npt.NDArray[Any]:
    """Read rows in stored form, (stop - start, *stored shape), C order."""
    where = f"column {column.name}, steps {start} to {stop - 1}"
    try:
        rows = source.read(column.name, start, stop)
    except GearError:
        raise
    except (OSError, RuntimeError) as error:
        raise InputError(
            "SOURCE_READ", f"cannot read the source: {error}", where=where, remedy="check the file"
        ) from error
    if rows.shape != (stop - start, *column.shape) or rows.dtype != column.dtype:
        raise InputError(
            "SOURCE_READ",
            f"the source gave {rows.dtype} {rows.shape} where {column.dtype} "
            f"{(stop - start, *column.shape)} was promised",
            where=where,
            remedy="the file may have changed; convert it again",
        )
    dtype, shape = stored_form(column)
    return np.ascontiguousarray(rows).view(dtype).reshape(stop - start, *shape)


def write_shard(
    source: Source,
    job: ShardJob,
    settings: Settings,
    *,
    directory: int,
    advance: Advance = lambda n: None,
) -> Callable[[], ShardResult]:
    """Write one shard into the directory of descriptor `directory`.

    Parameters
    ----------
    advance
        Called with the number of source bytes done, from one thread.

    Returns
    -------
    callable
        To be called once, from any thread: waits until the file is on the disk, closes it and
        returns the result.  So the next shard can be read meanwhile.

    Raises
    ------
    InputError
        ``NONFINITE``, ``BOOL_BYTES``, ``SOURCE_READ`` and what the source raises.
    GearError
        ``OUTPUT_SPACE``, ``OUTPUT_WRITE``.
    """
    episodes = slice(job.first_episode, job.last_episode)
    lengths = source.episodes.lengths[episodes]
    first = int(source.episodes.offsets[job.first_episode])
    last = int(source.episodes.offsets[job.last_episode])
    tensors = plan_tensors(settings.columns, steps=last - first, episodes=lengths.size)
    gatherer = _Gatherer(source, job, settings)
    file = _ShardFile(directory, shard_name(job.index), tensors, settings.block_bytes)

    def write(column: ColumnSpec, rows: npt.NDArray[Any]) -> None:
        file.append(column.name, rows)
        advance(rows.nbytes)

    try:
        with _Stage() as writing, _Stage() as gathering:
            for column in settings.columns:
                for start, stop in _pieces(first, last, piece_rows(source, column)):
                    rows = _read_rows(source, column, start, stop)
                    writing.submit(write, column, rows)
                    gathering.submit(gatherer.add, column, rows, start)
            gathering.drain()
            writing.drain()
        file.append("episode_lengths", lengths)
        file.append("episode_returns", gatherer.returns)
        file.append("episode_terminated", source.terminated[episodes])
        file.append("episode_truncated", source.truncated[episodes])
    except BaseException:
        file.close()
        raise

    def finish() -> ShardResult:
        record = file.finish(episodes=lengths.size, steps=last - first)
        return ShardResult(record=record, moments=gatherer.moments, returns=gatherer.returns)

    return finish
