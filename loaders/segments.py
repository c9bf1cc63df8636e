"""The segments of a rank's batches, and where rows that other nodes hold have landed.

Every rank draws the same global batches.  Where each node holds all rows, a rank has its slots of
them.  Where a dataset is spread over nodes, all ranks assign the segments alike, most of them to a
rank of the node that holds them.  The rows of the others are read ahead, a block of steps at a
time, into a ring of landing rows, where the gather reads them like any others.  Threads draw and
assign.  Where hosts exchange, a thread does that too, and the ring lies behind the table's rows;
where GPUs do, it lies in GPU memory, and nothing waits.

Shape legend: T steps of a block, N segments of a step, B of them a rank's, M reads, E episodes, D
nodes, W ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from gear_offline.batches.sampling.draws import SegmentStream
from gear_offline.batches.tables.table import Table
from gear_offline.core.types import BoolArray, Int64Array
from gear_offline.distributed.reads import NodeRows, Reads
from gear_offline.distributed.sharding import Assigner, NodeShare
from gear_offline.distributed.world import World
from gear_offline.errors import GearError
from gear_offline.kernels.draws import Segments
from gear_offline.kernels.gather import locate_rows, real_steps
from gear_offline.loaders.options import LoaderOptions

if TYPE_CHECKING:
    from gear_offline.kernels.gather_gpu import GpuGather

T = TypeVar("T")
PARTS = 3  # of the ring: rows that are on their way, that are read, and that were read just now
PLANS = 2  # ahead, each by a thread, where GPUs exchange
PLAN_SEGMENTS = 16384  # of all ranks in a plan: more leave the processor's caches


@dataclass(frozen=True, eq=False)
class DrawnBlock:
    """The segments of consecutive steps."""

    segments: Segments  # (T, B)
    landing: Int64Array | None = None  # (T, B) the landing row of each, -1 for those of the table
    names: Tensor | None = None  # (T, B, 4) both on the GPU, if they are there

    def __getitem__(self, steps: slice) -> DrawnBlock:
        columns = (self.segments, self.landing, self.names)
        return DrawnBlock(*(column if column is None else column[steps] for column in columns))  # type: ignore[arg-type]


class LocalSegments:
    """All rows are here: a rank has its slots of the global batch, in order."""

    in_stream = True  # nobody needs to know when rows have been read

    def __init__(self, stream: SegmentStream) -> None:
        self._stream = stream

    def draw(self, first_step: int, steps: int) -> DrawnBlock:
        return DrawnBlock(self._stream.segments(first_step, steps))

    def release(self, event: Any = None) -> None:
        """Release the block drawn last: it is read, or will be once a CUDA event has passed."""

    def slots_at(self, step: int) -> Int64Array:
        """Return (B,) int64: which slots of a step's global batch are this rank's."""
        return np.arange(self._stream.rank_batch) + self._stream.first_slot

    def close(self) -> None:
        """End background work; all ranks together."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Ring:
    """The landing rows of a rank beside the `share` of its node.

    For blocks of `steps` x `rank_batch` segments, which are gathered `pass_steps` at a time.
    """

    share: NodeShare
    pass_steps: int
    steps: int
    rank_batch: int
    options: LoaderOptions

    @property
    def part_rows(self) -> int:
        return self.steps * self.rank_batch * self.options.table.margin

    @property
    def rows(self) -> int:
        return PARTS * self.part_rows


Planned = tuple[int, DrawnBlock, Any]  # number, and its reads if they are to be posted
Coming = tuple[int, Future[list[Planned]]]  # first step, and consecutive blocks from there


class Planner:
    """Draws and assigns blocks of steps, the same on all ranks; earlier plans do not matter."""

    def __init__(
        self,
        stream: SegmentStream,
        world: World,
        ring: Ring,
        *,
        first_row: int,
        whole_windows: bool,
    ) -> None:
        """Begin the ring at `first_row` of the rows that the gather reads.

        `whole_windows`: it copies whole windows, also what is no row of the episode.
        """
        self._stream, self._ring, self._rank = stream, ring, world.rank
        self._first_row, self._whole_windows = first_row, whole_windows
        self._assigner = Assigner(world.nodes, stream.global_batch)
        self._own = self._assigner.places[world.rank]
        # Of each place the rank, and which of its segments.
        self._reader, self._turn = np.empty((2, stream.global_batch), np.int64)
        self._reader[self._assigner.places] = np.arange(world.size)[:, None]
        self._turn[self._assigner.places] = np.arange(ring.rank_batch)
        # The ranks of a node serve in turn: (D, most ranks of a node).
        self._counts = np.bincount(world.nodes)
        self._members = np.zeros((world.node_count, self._counts.max()), np.int64)
        for node, count in enumerate(self._counts):
            self._members[node, :count] = np.flatnonzero(np.array(world.nodes) == node)

    def slots_at(self, step: int) -> Int64Array:
        homes = self._ring.share.nodes[self._stream.draw(step, 1).episodes]
        slots: Int64Array = self._assigner.assign(homes)[0][0, self._own]
        return slots

    def plan(self, first_step: int, first_rows: Int64Array) -> list[tuple[DrawnBlock, Reads]]:
        """Return a rank's blocks from a step on, and the reads of all ranks for each.

        The rows of a block land from its one of `first_rows` of the ring on.
        """
        share, options, steps = self._ring.share, self._ring.options, self._ring.steps
        span, history, margin = options.context_length, options.table.history, options.table.margin
        global_segments = self._stream.draw(first_step, steps * len(first_rows))
        homes = share.nodes[global_segments.episodes]
        slots, moves = self._assigner.assign(homes)
        slots += np.arange(len(homes))[:, None] * homes.shape[1]  # of all steps
        step, position, slot, readers, owners, block = self._elsewhere(homes, slots, moves)
        every = global_segments.flat()
        far = every[slot]
        # Each lands in a window of its own, those of a reader one behind the other.
        ranks = len(self._assigner.places)
        counts = np.bincount(block * ranks + readers, minlength=ranks * len(first_rows))
        ends = np.cumsum(counts)
        rows = (np.arange(len(step)) - np.repeat(ends - counts, counts)) * margin
        rows += first_rows[block]
        real, before = real_steps(far, share.lengths, span), np.minimum(far.starts, history)
        if self._whole_windows:  # rows lie as the gather copies them: behind the window's padding
            sides: Any = {"span": span, "history": history, "padding": options.padding}
            rows += locate_rows(far.starts, real, **sides)[0]
        local = np.flatnonzero(readers == self._rank)
        landing = np.full((len(homes), self._ring.rank_batch), -1)
        first_real = (rows + before)[local] + self._first_row
        landing[step[local], self._turn[position[local]]] = first_real
        segments = every[slots[:, self._own]]
        reads = Reads(
            readers=readers,
            owners=owners,
            episodes=far.episodes,
            starts=far.starts - before,
            steps=before + real,
            rows=rows,
        )
        all_steps, edges = DrawnBlock(segments, landing), [0, *ends[ranks - 1 :: ranks].tolist()]
        return [
            (all_steps[n * steps : (n + 1) * steps], reads.take(slice(*edges[n : n + 2])))
            for n in range(len(first_rows))
        ]

    def _elsewhere(
        self, homes: Int64Array, slots: Int64Array, moves: BoolArray
    ) -> tuple[Int64Array, ...]:
        """Return the reads of segments that are held elsewhere, (M,).

        Their step, place, slot, reader, owner and block, in the order of block, reader and owner.
        """
        at, batch = np.flatnonzero(moves), homes.shape[1]
        step, position = np.divmod(at, batch)
        slot = slots.reshape(-1)[at]
        home, readers = homes.reshape(-1)[slot], self._reader[position]
        block = step // self._ring.steps
        owners = self._members[home, slot % batch % self._counts[home]]
        order = np.lexsort((owners, readers, block))
        return tuple(each[order] for each in (step, position, slot, readers, owners, block))


class ShardedSegments:
    """Segments of a dataset that is spread over nodes; an exchange fills the `ring` of a table.

    The methods are those of `LocalSegments`; rows that landed stay until the block has been
    released and two more drawn.  All ranks make the same calls in the same order, this one, too.
    A thread prepares the block that follows while one is trained on: it plans and exchanges.  Where
    rows land in a GPU's order, threads plan and the one that draws posts.  A sampler that draws
    only when its step has come has nothing prepared.

    `engine` gathers the batches, if a GPU does.
    """

    def __init__(
        self,
        stream: SegmentStream,
        world: World,
        ring: Ring,
        table: Table,
        engine: GpuGather | None = None,
    ) -> None:
        from gear_offline.distributed.exchange import open_exchange

        self._world, self.ring, self._ahead = world, ring, stream.selection.can_prefetch
        # The ranks of a node have their landing rows one after the other in the same memory.
        begin = table.landing_row + world.members.index(world.rank) * ring.rows
        landing = slice(begin, begin + ring.rows)
        held = slice(table.margin, table.margin + table.episodes.steps)
        held_rows = tuple(group.rows[held] for group in table.groups)
        self._exchange: Any = open_exchange(
            NodeRows(lengths=ring.share.lengths, nodes=ring.share.nodes, rows=held_rows),
            tuple(group.rows[landing] for group in table.groups),
            world,
            road=ring.options.exchange,
            engine=engine,
            span=table.margin,
            windows=PARTS * ring.steps * ring.rank_batch,
        )
        self.in_stream = self._exchange.in_stream
        self._engine = engine
        self._stream: Any = None  # the one that blocks land on
        first_row = 0 if self.in_stream else begin
        whole = not self.in_stream
        self._planner = Planner(stream, world, ring, first_row=first_row, whole_windows=whole)
        self._depth, self._blocks = 1, 1  # plans ahead, and blocks of each
        if self.in_stream and self._ahead:
            blocks = PLAN_SEGMENTS // (ring.steps * stream.global_batch)
            self._depth, self._blocks = PLANS, max(blocks, 1)
        self._threads = ThreadPoolExecutor(self._depth, thread_name_prefix="gear-exchange")
        self._first = -1  # step of the block that is drawn from
        self._block: DrawnBlock | None = None
        self._planned, self._coming = deque[Planned](), deque[Coming]()
        self._numbers, self._drawn = 0, -1
        self._read: list[Any] = [None] * PARTS  # event behind the gather of each part
        self._error: BaseException | None = None  # which ended the exchange

    def draw(self, first_step: int, steps: int) -> DrawnBlock:
        """Return part of a block; rows of other nodes have landed, or will in the GPU's order."""
        at = first_step - self._first
        if self.in_stream and self._engine is not None:
            stream: Any = torch.cuda.current_stream(self._engine.device)
            if self._stream not in (None, stream):
                stream.wait_stream(self._stream)
            self._stream = stream
        if self._block is None or not self._ahead or not 0 <= at <= self.ring.steps - steps:
            self._block, self._first, at = self._next(first_step), first_step, 0
        return self._block[at : at + steps]

    def release(self, event: Any = None) -> None:
        self._read[self._drawn % PARTS] = event

    def slots_at(self, step: int) -> Int64Array:
        return self._planner.slots_at(step)

    def close(self) -> None:
        try:
            self._drop()
        except GearError:
            pass  # was raised where batches were asked for
        finally:
            self._threads.shutdown()
            self._exchange.close()

    def _drop(self) -> None:
        self._block = None
        self._planned.clear()
        while self._coming:
            self._coming.popleft()[-1].result()

    def _next(self, first_step: int) -> DrawnBlock:
        """Return the block that begins at a step, and prepare those that follow."""
        coming, steps = self._coming, self.ring.steps
        if not self._planned or first_step != self._first + steps:
            if not coming or coming[0][0] != first_step:
                self._drop()
                self._prepare(first_step)
            _, work = coming.popleft()
            while self._ahead and len(coming) < self._depth:
                self._prepare(first_step + (len(coming) + 1) * self._blocks * steps)
            self._planned = deque(work.result())
        self._drawn, block, reads = self._planned.popleft()
        return block if reads is None else self._run_guarded(self._post, self._drawn, block, reads)

    def _prepare(self, first_step: int) -> None:
        numbers = np.arange(self._numbers, self._numbers + self._blocks)
        self._numbers += self._blocks
        guarded = self._threads.submit(self._run_guarded, self._plan, first_step, numbers)
        self._coming.append((first_step, guarded))

    def _run_guarded(self, work: Callable[..., T], *arguments: Any) -> T:
        """Do a piece of work, but nothing more after an error."""
        if self._error is not None:
            raise self._error
        try:
            return work(*arguments)
        except BaseException as error:
            self._error = error
            raise

    def _plan(self, first_step: int, numbers: Int64Array) -> list[Planned]:
        """Plan blocks, and exchange their rows unless the GPU does; in a thread."""
        planned = list[Planned]()
        plans = self._planner.plan(first_step, numbers % PARTS * self.ring.part_rows)
        for number, (block, reads) in zip(numbers.tolist(), plans, strict=True):
            if self.in_stream:
                if self._engine is not None:
                    block = replace(block, names=self._engine.name(block.segments, block.landing))
                planned.append((number, block, self._exchange.ready(reads)))
                continue
            event, self._read[number % PARTS] = self._read[number % PARTS], None
            if event is not None:
                self._world.wait_for_gpu(event)
            self._exchange.post(number, reads)
            self._exchange.wait(number)
            planned.append((number, block, None))
        return planned

    def _post(self, number: int, block: DrawnBlock, reads: Any) -> DrawnBlock:
        """Have the GPU fetch the rows of a block."""
        self._exchange.post(number, reads)
        self._exchange.wait(number)
        if self._engine is None or block.names is None:
            return block
        return replace(block, names=block.names.to(self._engine.device, non_blocking=True))
