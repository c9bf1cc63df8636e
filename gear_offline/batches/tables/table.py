"""Columns in memory, arranged so that a segment is one contiguous read: plan, build, fill.

Batches are cut from a table: states, actions, rewards, returns-to-go and any further columns, over
all steps of all episodes.  The float32 fields of one step lie side by side in one row of a group,
padded to a multiple of 16 bytes.  So a segment is one copy, and tensors of a batch are strided
views of those rows.  Wide fields (more than `PACKED_BYTES` a step as float32) are groups of their
own, in their source dtype.  So are those of several dimensions a step, such as images, discrete
actions and extra columns.

Before the first and after the last step lie `margin` rows of zeros, so that a window of that many
steps may begin or end outside the table.  Behind them segments of other nodes land (`remote`).

The rows are in host memory, of one process (`private_rows`), a node or a learner whose data grow
(`shared`).  `placement` copies them to GPUs or pins them, or reads them to a GPU in pieces that it
lends (`Lend`), and `disk` has none but its windows.

Shape legend: N steps, E episodes, n steps of a chunk, W elements of a row, M margin.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from math import prod
from typing import Any, Self

import numpy as np

from gear_offline.batches.tables.fields import (
    ACTIONS,
    EXTRA,
    STATES,
    standard_fields,
    to_float32,
)
from gear_offline.batches.tables.following import (
    FOLLOWING,
    STEPS,
    following_field,
    following_rows,
)
from gear_offline.batches.tables.joint import (
    JointDataset,
    Part,
    TableData,
    data_name,
    parts_of,
    shards_of,
)
from gear_offline.batches.tables.returns import sum_returns, whole_episodes
from gear_offline.config.sections import Condition, Span
from gear_offline.core.remote import map_in_threads
from gear_offline.core.system import usable_cores
from gear_offline.core.types import Array, BoolArray, Int64Array
from gear_offline.data.dataset.dataset import Dataset
from gear_offline.data.dataset.schema import ADVANTAGES, REWARDS, EpisodeIndex, check_advantages
from gear_offline.errors import InputError
from gear_offline.kernels.columns import ColumnGroup, Field, final_values

PACKED_BYTES = 1024  # fields up to this many bytes a step are stored as float32
RECORD_ALIGNMENT_BYTES = 16
CHUNK_BYTES = 16 << 20  # of a shard's columns and their rows: with 4 an H200 waits twice as long
RUN_STEPS = 1 << 18  # of whole episodes whose returns-to-go are summed at a time
SWITCH_SECONDS = 2e-4  # for the interpreter's lock: 16 threads loaded 1.6 times as fast on an H200
MAX_THREADS = 8  # more are slower: the kernel makes pages for one mapping no faster

Allocate = Callable[[tuple[int, ...], np.dtype[Any]], Array]
# Lends, for a group's number, a step and n, (n, W) zeros for the rows from that step on.  They are
# filled when the block ends.
Lend = Callable[[int, int, int], AbstractContextManager[Array]]


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """The options of a table; the loader checks the ranges.

    ``returns_to_go[t] = sum_{k >= t} gamma**(k - t) r_k / returns_scale`` over the rest of the
    episode is summed from its end in float64 and rounded once to float32.  Normalised states are
    ``(x - mean) / (std + 1e-6)`` with the statistics of the rows' own dataset, rounded likewise.
    """

    context_length: int  # longest window that will be cut, K
    condition: Condition = "return"  # advantage: in place of the sum, the step's own
    gamma: float = 1.0
    returns_scale: float = 1.0
    normalize_states: bool = False
    extra_columns: Sequence[str] = ()  # in their source dtype bit for bit, and `following` ones
    frame_stack: int = 1  # frames that make up a state; the column holds single ones
    observations: tuple[str, ...] = (STATES,)  # columns that make up a state
    span: Span = "episode"  # history: windows reach over the ends of episodes
    chunk: int | None = None  # actions that are read from one step on; then they lie apart

    @classmethod
    def of(cls, loader: Mapping[str, Any]) -> Self:
        """Return the table's options among those of a loader."""
        return cls(**{each.name: loader[each.name] for each in fields(cls) if each.name in loader})

    @property
    def condition_column(self) -> str:
        """The column that `returns_to_go` are made of."""
        return ADVANTAGES if self.condition == "advantage" else REWARDS

    @property
    def history(self) -> int:
        """The number of frames before a step that are shown with it, H."""
        return self.frame_stack - 1

    @property
    def margin(self) -> int:
        """Rows that a window takes, with its history: K + H; at least those of a chunk."""
        return max(self.context_length + self.history, self.chunk or 0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Table:
    """All column groups of a dataset, or of some of its shards."""

    episodes: EpisodeIndex  # over the N steps, as their rows lie
    groups: tuple[ColumnGroup, ...]  # each field is in exactly one
    margin: int  # rows of zeros in front and behind; windows up to this long can be cut
    # (E,) which of the source's episodes these are: those of a history lie side by side
    order: Any = ...  # as they are
    grown_from: str = ""  # the key of this table before it grew: its first episodes

    @property
    def row_bytes(self) -> int:
        """Bytes of one step over all groups."""
        return sum(group.row_bytes for group in self.groups)

    @property
    def landing_row(self) -> int:
        """The first row behind the last margin: there segments of other nodes land (`remote`)."""
        return 2 * self.margin + self.episodes.steps

    def first_rows(self, local: BoolArray | None = None) -> Int64Array:
        """Return the row of each episode's first step.

        With `local` (E,), which episodes of a dataset the table has: for all E, of others 0.
        """
        table_rows = np.empty(self.episodes.episodes, np.int64)
        table_rows[self.order] = self.margin + self.episodes.offsets[:-1]
        if local is None:
            return table_rows
        rows = np.zeros(len(local), np.int64)
        rows[local] = table_rows
        return rows


@dataclass(frozen=True, kw_only=True)
class GroupPlan:
    """The plan of a column group, before there is memory for it."""

    fields: Mapping[str | None, Field]  # by column of the source; None: the returns-to-go
    width: int  # elements of a row
    dtype: np.dtype[Any]
    final: bool  # True if the rows hold the batch's values; else the column stays as it is

    @property
    def row_bytes(self) -> int:
        """Bytes from one step to the next."""
        return self.width * self.dtype.itemsize

    @property
    def is_derived(self) -> bool:
        """True if its rows are in no file."""
        return not {None, *FOLLOWING}.isdisjoint(self.fields)

    @property
    def only(self) -> tuple[str | None, Field]:
        """The column and the field of a group of one."""
        (pair,) = self.fields.items()
        return pair


def plan_groups(
    source: TableData, options: TableOptions, *, apart: bool = False
) -> list[GroupPlan]:
    """Return the column groups of a table, in their order; with `apart` each column is one."""
    joint, normalize_states = isinstance(source, JointDataset), options.normalize_states
    if isinstance(source, JointDataset):
        if options.observations != (STATES,):
            problem = f"several datasets share the column {STATES}, got {[*options.observations]}"
            raise InputError("LOADER_OPTION", problem, remedy="leave observations out")
        for task in source.tasks:
            standard_fields(task.dataset, normalize_states=normalize_states)
    # Tasks have moments of their own, which their rows are normalised with when they are filled in.
    standard = standard_fields(
        source,  # type: ignore[arg-type]  # without normalisation no statistics are asked for
        normalize_states=normalize_states and not joint,
        frame_stack=options.frame_stack,
        observations=options.observations,
    )
    returns = Field(name="returns_to_go", dtype=np.dtype(np.float32), shape=(1,))
    condition = options.condition_column
    if condition == ADVANTAGES:
        check_advantages(source.spec, "condition")
    fields = standard | ({None: returns} if condition in source.spec else {})
    extra_columns = [*options.extra_columns, *[STEPS] * (options.span == "history")]
    names = [*options.observations, ACTIONS, REWARDS, *extra_columns]
    if len(set(names)) != len(names):
        problem = f"a column is named twice among {', '.join(names)}"
        remedy = f"name each once; of extra columns {', '.join(standard)} are there anyway"
        raise InputError("COLUMN", problem, remedy=remedy)
    packed = {
        column: f
        for column, f in fields.items()
        if len(f.shape) <= 1 and f.dtype == np.float32 and 4 * f.width <= PACKED_BYTES
        if options.chunk is None or column != ACTIONS
    }
    packed = {} if apart else packed
    alone = {column: f for column, f in fields.items() if column not in packed}
    plans = [_packed_plan(packed)] if packed else []
    for name in extra_columns:
        if name in FOLLOWING:
            single = following_field(name, [standard[each] for each in options.observations])
            width, dtype = single.width, single.dtype
            plan = GroupPlan(fields={name: single}, width=width, dtype=dtype, final=True)
            plans.append(plan)
        else:
            spec = source.spec[name]
            alone[name] = Field(name=EXTRA + name, dtype=spec.dtype, shape=spec.shape)
    for column, single in alone.items():
        spec = source.spec[condition if column is None else column]
        final = column is None or (joint and normalize_states and column == STATES)
        dtype = single.dtype if final else spec.dtype
        width = prod(spec.shape)
        plans.append(GroupPlan(fields={column: single}, width=width, dtype=dtype, final=final))
    return plans


def _packed_plan(fields: Mapping[str | None, Field]) -> GroupPlan:
    """Return one float32 group of the fields, side by side."""
    placed: dict[str | None, Field] = {}
    width = 0
    for column, single in fields.items():
        placed[column] = replace(single, offset=width, mean=None, divisor=None)  # rows are final
        width += single.width
    width += -width % (RECORD_ALIGNMENT_BYTES // 4)
    return GroupPlan(fields=placed, width=width, dtype=np.dtype(np.float32), final=True)


def private_rows(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return zeros in this process's memory, on pages of their own.

    So each can be page-locked by itself.
    """
    nbytes, page = prod(shape) * dtype.itemsize, mmap.PAGESIZE
    spare = np.zeros(nbytes + 2 * page, dtype=np.uint8)
    begin = -spare.ctypes.data % page
    return spare[begin : begin + nbytes].view(dtype).reshape(shape)


def no_rows(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return no rows, of the width and dtype of those that lie elsewhere."""
    return np.empty((0, *shape[1:]), dtype)


def build_table(
    source: TableData,
    options: TableOptions,
    *,
    plans: Sequence[GroupPlan] | None = None,
    shards: Sequence[int] | None = None,
    allocate: Allocate = private_rows,
    lend: Lend | None = None,
    fill: bool = True,
    filled_shards: int = 0,
    landing_rows: int = 0,
    threads: int | None = None,
) -> Table:
    """Read the columns of `source` and derive the returns-to-go.

    Memory, exactly: the packed fields cost ``ceil16(4 * (S + A + 2))`` bytes a step.  Other columns
    keep their source dtype.  Each group has ``2 * options.margin + landing_rows`` more rows, the
    last for segments that arrive from other nodes.  While reading, each thread has some megabytes
    more; there is one per core, up to 8.

    The table has the groups `plans`, by default all, of the `shards`, ascending numbers, by default
    all.  `allocate` gives zeroed, C-contiguous memory of a shape and dtype for each group, in their
    order.  Where another process has filled it, `fill` is false; where a smaller table lies in it,
    its shards are the first `filled_shards`.  With `lend`, called by all threads, each piece of the
    rows is filled in what that lends, and not in the table; histories must lie side by side.
    """
    plans, margin = plan_groups(source, options) if plans is None else plans, options.margin
    jobs = list(_jobs(source, shards))
    lengths = [job.lengths for job in jobs]
    index = EpisodeIndex(np.concatenate(lengths) if lengths else np.zeros(0, np.int64))
    if options.span == "history" and jobs:
        index = span_index(source, options)
        assert index.episodes == sum(map(len, lengths)), "a node has all shards"
    count = index.steps + 2 * margin + landing_rows
    groups = tuple(
        ColumnGroup(
            fields=tuple(plan.fields.values()), rows=allocate((count, plan.width), plan.dtype)
        )
        for plan in plans
    )
    table = Table(episodes=index.side_by_side, order=index.order, groups=groups, margin=margin)
    if fill:
        assert lend is None or index.is_side_by_side, "rows are lent in the order of the source"
        threads = max(1, threads or min(MAX_THREADS, usable_cores()))
        _fill(jobs[filled_shards:], plans, options, threads, lend or _lend_rows(table, index))
    return table


def _lend_rows(table: Table, index: EpisodeIndex) -> Lend:
    """Lend the table's rows; where other episodes come between those of a history, copies."""
    moves = None if index.is_side_by_side else index.rows - index.offsets[:-1]

    @contextmanager
    def lend(group: int, step: int, count: int) -> Iterator[Array]:
        rows = table.groups[group].rows[table.margin :]
        if moves is None:
            yield rows[step : step + count]
            return
        yield (copy := np.zeros((count, rows.shape[1]), rows.dtype))
        steps = np.arange(step, step + count)
        rows[steps + moves[index.offsets.searchsorted(steps, side="right") - 1]] = copy

    return lend


def span_index(source: TableData, options: TableOptions) -> EpisodeIndex:
    """Return the episodes of `source`, with the histories that windows reach over, if they do."""
    if options.span == "episode":
        return source.episodes
    if source.histories is None:
        problem = "span=history, and the data have no histories: windows would end with episodes"
        remedy = "say which episodes follow each other: convert --histories COLUMN; or leave "
        raise InputError("LOADER_OPTION", problem, data_name(source), f"{remedy}span=episode")
    return EpisodeIndex(source.episodes.lengths, source.histories)


def table_bytes(
    source: TableData,
    options: TableOptions,
    *,
    shards: Sequence[int] | None = None,
    landing_rows: int = 0,
) -> int:
    """Return the bytes that `build_table` takes for the rows, each group at pages of its own."""
    steps = sum(int(job.lengths.sum()) for job in _jobs(source, shards))
    rows = steps + 2 * options.margin + landing_rows
    return sum(whole_pages(rows * plan.row_bytes) for plan in plan_groups(source, options))


def whole_pages(nbytes: int) -> int:
    """Return `nbytes` rounded up to whole pages."""
    return nbytes + -nbytes % mmap.PAGESIZE


@dataclass(frozen=True, eq=False)
class _ShardRead:
    """A shard to read: its owner, its place in the rows, and the lengths of its episodes."""

    part: Part
    shard: int
    first_step: int  # in the table
    lengths: Int64Array


def _jobs(source: TableData, shards: Sequence[int] | None) -> Iterator[_ShardRead]:
    """Yield the chosen shards of a source, in their order."""
    everything, first_step = shards_of(parts_of(source)), 0
    for number in range(len(everything)) if shards is None else shards:
        task, shard = everything[number]
        steps = task.dataset.first_steps[shard : shard + 2]
        low, high = np.searchsorted(task.dataset.episodes.offsets, steps)
        lengths = task.dataset.episodes.lengths[low:high]
        yield _ShardRead(task, shard, first_step, lengths)
        first_step += int(lengths.sum())


def _fill(
    jobs: Sequence[_ShardRead],
    plans: Sequence[GroupPlan],
    options: TableOptions,
    threads: int,
    lend: Lend,
) -> None:
    """Read all shards, by threads of which each writes to rows or groups of its own."""
    how: Any = {name: getattr(options, name) for name in ("normalize_states", "observations")}
    fields = {
        task.name: standard_fields(task.dataset, **how)
        for task in {job.part.name: job.part for job in jobs}.values()
    }

    def fill(job: _ShardRead, groups: Sequence[int]) -> None:
        for group in groups if len(job.lengths) else ():  # a view may have none of a shard
            is_single = not (plans[group].final and FOLLOWING.isdisjoint(plans[group].fields))
            read = _copy_column if is_single else _fill_final
            read(job, plans[group], partial(lend, group), fields[job.part.name], options)

    # Where there are few shards, each group is work of its own.
    apart = threads > 1 and len(jobs) <= 2 * threads
    groups = range(len(plans))
    shares = [[group] for group in groups] if apart else [groups]
    work = ((job, share) for job in jobs for share in shares)
    with _quick_switches():
        for _ in map_in_threads(lambda each: fill(*each), work, threads, "gear-load"):
            pass


def _fill_final(
    job: _ShardRead,
    plan: GroupPlan,
    lend: Callable[[int, int], AbstractContextManager[Array]],
    fields: Mapping[str, Field],
    options: TableOptions,
) -> None:
    """Read the columns of a group side by side, in chunks."""
    dataset, base = job.part.dataset, int(job.part.dataset.first_steps[job.shard])
    ahead: dict[str | None, Array] = {}
    if None in plan.fields:  # summed from the ends of episodes, hence before all others
        values, ahead[None] = shard_returns(job.part, job.shard, options)
        if (condition := options.condition_column) in plan.fields:
            ahead[condition] = to_float32(values, condition, base)
    columns = [c for c in plan.fields if c is not None and c not in ahead]
    step_bytes = {c: dataset.spec[c].step_bytes for c in columns}
    chunk = max(CHUNK_BYTES // (plan.row_bytes + sum(step_bytes.values())), 1)
    streams = [dataset.stream(job.shard, c, chunk_bytes=chunk * step_bytes[c]) for c in columns]
    # a view's chunks are shorter by the steps that it has not
    for chunks in zip(*streams or [_chunks(ahead[None], base, chunk)], strict=True):
        begin, count = chunks[0][0] - base, len(chunks[0][1])
        with lend(job.first_step + begin, count) as rows:
            for column, (step, values) in zip(columns, chunks, strict=bool(streams)):
                assert step == base + begin, "columns are read side by side"
                single = fields[column]
                if single.mean is not None or single.dtype != np.float32:
                    final = final_values(values.reshape(count, *single.shape), single)
                else:
                    final = to_float32(values, column, step)
                _lay(rows, plan.fields[column].offset, final)
            for name, summed in ahead.items():
                _lay(rows, plan.fields[name].offset, summed[begin : begin + count])


def _copy_column(
    job: _ShardRead,
    plan: GroupPlan,
    lend: Callable[[int, int], AbstractContextManager[Array]],
    fields: Mapping[str, Field],
    options: TableOptions,
) -> None:
    """Read the column of a group of one, as it is stored, or what follows the steps."""
    dataset, (column, _), states = job.part.dataset, plan.only, options.observations[0]
    assert column is not None, "returns-to-go are no column"
    base = int(dataset.first_steps[job.shard])
    if column in FOLLOWING:
        following = following_rows(dataset, job.shard, column, fields[states], states)
        chunks = _chunks(following, base, max(CHUNK_BYTES // plan.row_bytes, 1))
    else:
        chunks = dataset.stream(job.shard, column, chunk_bytes=CHUNK_BYTES)
    for step, values in chunks:
        flat = values.reshape(len(values), -1)  # narrower than the rows of some tasks
        with lend(job.first_step + step - base, len(flat)) as rows:
            rows[:, : flat.shape[1]] = flat


def _chunks(values: Array, base: int, count: int) -> Iterator[tuple[int, Array]]:
    """Yield values of the steps from `base` on as `Dataset.stream` does, `count` at a time."""
    for begin in range(0, len(values), count):
        yield base + begin, values[begin : begin + count]


def shard_returns(task: Part, shard: int, options: TableOptions) -> tuple[Array, Array]:
    """Return (n, 1) rewards of a shard, as they are stored, and float32 returns-to-go.

    With condition advantage they are advantages; such a "return" is the step's own alone.
    """
    dataset, scale = task.dataset, options.returns_scale * task.returns_scale
    column = options.condition_column
    gamma = options.gamma if column == REWARDS else 0.0
    base, end = dataset.first_steps[shard : shard + 2].tolist()
    rewards = np.empty((end - base, 1), dataset.spec[column].dtype)
    for step, values in dataset.stream(shard, column):
        rewards[step - base : step - base + len(values)] = values.reshape(-1, 1)
    low, high = np.searchsorted(dataset.episodes.offsets, [base, end])
    offsets, returns = dataset.episodes.offsets[low : high + 1], np.empty((end - base, 1), "f4")
    for first, last in whole_episodes(offsets, RUN_STEPS):
        steps = slice(int(offsets[first]) - base, int(offsets[last]) - base)
        ends = offsets[first : last + 1]
        returns[steps, 0] = sum_returns(rewards[steps], ends, gamma=gamma, scale=scale)
    return rewards, returns


def discounted_returns(dataset: Dataset, gamma: float) -> Array:
    """Return (E,) float32, the first return-to-go of each whole episode, not scaled."""
    (task,), options = parts_of(dataset), TableOptions(context_length=1, gamma=gamma)
    shards = range(len(dataset.first_steps) - 1)
    returns = [shard_returns(task, shard, options)[1] for shard in shards]
    firsts: Array = np.concatenate(returns)[dataset.episodes.offsets[:-1], 0]
    return firsts


@contextmanager
def _quick_switches() -> Iterator[None]:
    """Shorten the interpreter's switch interval: a returning thread waits less for the lock."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, SWITCH_SECONDS))
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def _lay(rows: Array, offset: int, values: Array) -> None:
    """Write n values of a field into (n, W) rows, from element `offset` of each on.

    As one opaque item a row: NumPy then makes one loop over the rows, where a two-dimensional copy
    would begin a loop of a few elements in each of them.
    """
    flat = np.ascontiguousarray(values).reshape(len(rows), -1)
    item = np.dtype((np.void, flat.itemsize * flat.shape[1]))
    start = rows.itemsize * offset
    places: Array = np.ndarray((len(rows),), item, rows.data, start, (rows.strides[0],))
    places[:] = flat.view(item).reshape(-1)
