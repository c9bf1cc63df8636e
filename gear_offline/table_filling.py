"""Fill the stores of a table from the shards, in several threads.

A thread takes a shard at a time and reads its columns side by side, in pieces that stay in the
core's cache: read, digest, cast, and lay into the rows.  The rows' pages are touched first by the
threads that fill them.  Where there are few shards, the columns of a shard are separate work.

Columns that stay as they are, such as images, are read into their rows directly.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from gear_offline.fields import REWARDS, Array, TableSource, convert, to_float32
from gear_offline.schema import Int64Array
from gear_offline.table import Store, StorePlan, sum_returns, whole_episodes

PIECE_BYTES = 1 << 20  # of the widest packed column; what a thread works on at a time
DIRECT_BYTES = 8 << 20  # of columns that are read into their rows
MAX_THREADS = 16


class Reader(Protocol):
    """Reads the rows of a part of the source in their order."""

    def read(self, column: str, out: Array) -> None:
        """Fill C-contiguous `out`, (n, *shape) in the column's dtype, with its next n rows."""
        ...


@runtime_checkable
class PartedSource(Protocol):
    """A source in parts (shards) of whole episodes that can be read at once."""

    @property
    def first_steps(self) -> Int64Array:
        """(parts + 1,) int64, first step of each part, and N."""
        ...

    def reader(
        self, index: int, columns: Iterable[str], *, check: bool
    ) -> AbstractContextManager[Reader]: ...


class _WholeReader:
    """Reads a source that has no parts."""

    def __init__(self, source: TableSource, *, check: bool) -> None:
        self._source = source
        self._check = check
        self._at: dict[str, int] = {}

    def read(self, column: str, out: Array) -> None:
        at = self._at.get(column, 0)
        self._at[column] = at + len(out)
        out[...] = self._source.read(column, at, at + len(out), check=self._check)


def fill_stores(
    source: TableSource,
    stores: Sequence[tuple[StorePlan, Store]],
    *,
    margin: int,
    gamma: float,
    returns_scale: float,
    check: bool,
    threads: int | None = None,
) -> None:
    """Fill the rows of `stores`; `gear_offline.table.build_table` states the rest."""
    threads = max(1, threads or min(MAX_THREADS, len(os.sched_getaffinity(0))))
    parted = source if isinstance(source, PartedSource) else None
    bounds = [0, source.episodes.steps] if parted is None else parted.first_steps.tolist()
    offsets = source.episodes.offsets
    job = _Filling(source, tuple(stores), margin, gamma, returns_scale)
    together = parted is None or threads == 1 or len(bounds) > 2 * threads
    groups = [job.columns()] if together else [[c] for c in job.columns()]

    def work(task: tuple[int, list[str]]) -> None:
        index, columns = task
        first, last = np.searchsorted(offsets, bounds[index : index + 2])
        reader: AbstractContextManager[Reader] = (
            nullcontext(_WholeReader(source, check=check))
            if parted is None
            else parted.reader(index, columns, check=check)
        )
        with reader as opened:
            job.fill(opened, columns, offsets[first : last + 1].tolist())

    tasks = [(index, group) for index in range(len(bounds) - 1) for group in groups]
    if threads == 1 or len(tasks) == 1:
        for task in tasks:
            work(task)
        return
    with ThreadPoolExecutor(min(threads, len(tasks)), thread_name_prefix="gear-load") as pool:
        jobs = [pool.submit(work, task) for task in tasks]
        try:
            for each in jobs:
                each.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


@dataclass(frozen=True)
class _Filling:
    """What all threads share; they write to different bytes."""

    source: TableSource
    stores: tuple[tuple[StorePlan, Store], ...]
    margin: int
    gamma: float
    returns_scale: float

    def columns(self) -> list[str]:
        return [c for plan, _ in self.stores for c in plan.fields if c is not None]

    def fill(self, reader: Reader, columns: list[str], offsets: list[int]) -> None:
        """Fill `columns` over whole episodes at global steps `offsets`."""
        spec = self.source.spec
        direct = {c for plan, _ in self.stores for c in plan.fields if c and not plan.packed}
        packed = [c for c in columns if c not in direct and c != REWARDS]
        # Rewards go along in whole episodes, since the returns-to-go are summed from their ends.
        widest = max((spec[c].step_bytes for c in [*packed, REWARDS]), default=1)
        rows = max(PIECE_BYTES // widest, 1)
        scratch = {c: np.empty((rows, *spec[c].shape), spec[c].dtype) for c in packed}
        for first, last in whole_episodes(offsets, rows):
            low, high = offsets[first], offsets[last]
            if REWARDS in columns:
                self._rewards(reader, offsets[first : last + 1])
            for start in range(low, high, rows):
                stop = min(start + rows, high)
                for column in packed:
                    values = scratch[column][: stop - start]
                    reader.read(column, values)
                    self._lay(column, start, values)
        for column in columns:
            if column in direct and column != REWARDS:
                self._read_rows(reader, column, offsets[0], offsets[-1])

    def _rewards(self, reader: Reader, offsets: list[int]) -> None:
        spec, start = self.source.spec[REWARDS], offsets[0]
        rewards = np.empty((offsets[-1] - start, *spec.shape), spec.dtype)
        reader.read(REWARDS, rewards)
        self._lay(REWARDS, start, rewards)
        returns = sum_returns(rewards, offsets, gamma=self.gamma, scale=self.returns_scale)
        self._lay(None, start, returns)

    def _lay(self, column: str | None, start: int, values: Array) -> None:
        """Write the final values of a column into the rows that begin at step `start`."""
        plan, store = next((p, s) for p, s in self.stores if column in p.fields)
        field = plan.fields[column]
        assert store.rows is not None, "stores in memory have rows"
        at = self.margin + start
        rows = store.rows[at : at + len(values)]
        values = values.reshape(len(values), *field.shape)
        if column is not None:
            if field.mean is None:
                values = to_float32(values, column, start)
            values = convert(values, field)
        rows[:, field.offset : field.offset + field.width] = values.reshape(len(values), -1)

    def _read_rows(self, reader: Reader, column: str, low: int, high: int) -> None:
        """Read a column that stays as it is into its rows."""
        store = next(s for p, s in self.stores if column in p.fields)
        assert store.rows is not None, "stores in memory have rows"
        shape = self.source.spec[column].shape
        rows = max(DIRECT_BYTES // self.source.spec[column].step_bytes, 1)
        for start in range(low, high, rows):
            stop = min(start + rows, high)
            target = store.rows[self.margin + start : self.margin + stop]
            reader.read(column, target.reshape(len(target), *shape))
