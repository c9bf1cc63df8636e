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
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gear_offline.core.types import Int64Array
from gear_offline.distributed.reads import NodeRows, Reads
from gear_offline.distributed.sharding import Assigner, NodeShare
from gear_offline.distributed.world import World
from gear_offline.errors import GearError
from gear_offline.kernels.draws import Segments
from gear_offline.kernels.gather import filled, real_steps
from gear_offline.loaders.options import LoaderOptions
from gear_offline.sampling.base import SegmentStream
from gear_offline.tables.table import Table

if TYPE_CHECKING:
    from gear_offline.kernels.gather_gpu import GpuGather

PARTS = 3  # of the ring: rows that are on their way, that are read, and that were read just now
PLANS = 2  # blocks ahead that are drawn and assigned at once, of an exchange that the GPU does


class LocalSegments:
    """All rows are here: a rank has its slots of the global batch, in order."""

    def __init__(self, stream: SegmentStream) -> None:
        self._stream = stream

    def draw(self, first_step: int, steps: int) -> tuple[Segments, Int64Array | None]:
        """Return (T, B) segments, and the landing row of each, -1 for those of the table."""
        return self._stream.segments(first_step, steps), None

    def release(self, event: Any = None) -> None:
        """Say that the block drawn last is read, or will be when a CUDA event has come."""

    def slots_at(self, step: int) -> Int64Array:
        """Return (B,) int64: which slots of a step's global batch are this rank's."""
        return np.arange(self._stream.rank_batch) + self._stream.first_slot

    def close(self) -> None:
        """End what runs in the background; all ranks together."""


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


Block = tuple[Segments, Int64Array]  # what `draw` returns
Coming = tuple[int, int, Future[Any]]  # first step, number, and the block or, in stream, its plan


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """A rank's segments of a block of steps, and the reads of all ranks that they need."""

    segments: Segments  # (T, B)
    landing: Int64Array  # (T, B) counted from the first row of a part of the ring, or -1
    reads: Reads  # so are the rows of these


class Planner:
    """Draws and assigns blocks of steps: the same for all ranks, whatever was planned before."""

    def __init__(self, stream: SegmentStream, world: World, ring: Ring, *, whole: bool) -> None:
        """`whole`: the gather copies whole windows, what is no row of the episode included."""
        self._stream, self._ring, self._rank, self._whole = stream, ring, world.rank, whole
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

    def plan(self, first_step: int, steps: int) -> Plan:
        share, options = self._ring.share, self._ring.options
        span, history, margin = options.context_length, options.table.history, options.table.margin
        drawn = self._stream.draw(first_step, steps)
        homes = share.nodes[drawn.episodes]
        slots, moves = self._assigner.assign(homes)
        # All ranks' segments that are held elsewhere, (M,): who reads which from whom.
        step, place = np.nonzero(moves)
        moved = (step, slots[step, place])
        home, readers = homes[moved], self._reader[place]
        owners = self._members[home, moved[1] % self._counts[home]]
        order = np.lexsort((owners, readers))
        step, place, readers, owners = (x[order] for x in (step, place, readers, owners))
        far = drawn[step, slots[step, place]]
        # Each lands in a window of its own, those of a reader one behind the other.
        counts = np.bincount(readers, minlength=len(self._assigner.places))
        ends = np.cumsum(counts)
        rows = (np.arange(len(far.episodes)) - np.repeat(ends - counts, counts)) * margin
        real, before = real_steps(far, share.lengths, span), np.minimum(far.starts, history)
        if self._whole:  # it lies as the gather copies it: what is copied besides is its own part
            rows += filled(far.starts, real, span=span, history=history, padding=options.padding)[0]
        own = slice(ends[self._rank] - counts[self._rank], ends[self._rank])
        landing = np.full((steps, self._ring.rank_batch), -1)
        landing[step[own], self._turn[place[own]]] = (rows + before)[own]
        return Plan(
            segments=drawn[np.arange(steps)[:, None], slots[:, self._own]],
            landing=landing,
            reads=Reads(
                readers=readers,
                owners=owners,
                episodes=far.episodes,
                starts=far.starts - before,
                steps=before + real,
                rows=rows,
            ),
        )


class ShardedSegments:
    """Segments of a dataset that is spread over nodes; an exchange fills the `ring` of a table.

    The methods are those of `LocalSegments`; rows that landed stay until the block has been
    released and two more drawn.  All ranks make the same calls in the same order, this one, too.
    The exchange is used by a thread of its own, which prepares the block that follows while one is
    trained on, or by the thread that draws if rows land in a GPU's order.  A sampler that draws
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

        self._world, self.ring, self._ahead = world, ring, stream.selection.ahead
        # The ranks of a node have their landing rows one after the other in the same memory.
        self._first_row = table.landing_row + world.members.index(world.rank) * ring.rows
        landing = slice(self._first_row, self._first_row + ring.rows)
        held = slice(table.margin, table.margin + table.episodes.steps)
        own = tuple(group.rows[held] for group in table.groups)
        self._exchange = open_exchange(
            NodeRows(lengths=ring.share.lengths, nodes=ring.share.nodes, rows=own),
            tuple(group.rows[landing] for group in table.groups),
            world,
            road=ring.options.exchange,
            engine=engine,
            span=table.margin,
            windows=PARTS * ring.steps * ring.rank_batch,
        )
        self._in_stream = self._exchange.in_stream
        self._device = None if engine is None else engine.device
        if self._in_stream:
            self._first_row = 0
        self._planner = Planner(stream, world, ring, whole=not self._in_stream)
        self._depth = PLANS if self._in_stream else 1
        self._threads = ThreadPoolExecutor(self._depth, thread_name_prefix="gear-exchange")
        self._first = -1  # step of the block that is drawn from
        self._block: Block | None = None
        self._coming = deque[Coming]()
        self._posted = self._drawn = -1
        self._read: list[Any] = [None] * PARTS  # event behind the gather of each part
        self._error: BaseException | None = None  # which ended the exchange

    def draw(self, first_step: int, steps: int) -> Block:
        """Return part of a block; rows of other nodes have landed, or will in the GPU's order."""
        at = first_step - self._first
        if self._block is None or not self._ahead or not 0 <= at <= self.ring.steps - steps:
            self._block, self._first, at = self._next(first_step), first_step, 0
        segments, landing = self._block
        return segments[at : at + steps], landing[at : at + steps]

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
        while self._coming:
            self._coming.popleft()[-1].result()

    def _next(self, first_step: int) -> Block:
        """Return the block that begins at a step, and prepare those that follow."""
        coming = self._coming
        if not coming or coming[0][0] != first_step:
            self._drop()
            self._prepare(first_step)
        _, self._drawn, work = coming.popleft()
        while self._ahead and len(coming) < self._depth:
            self._prepare(first_step + (len(coming) + 1) * self.ring.steps)
        if self._in_stream:
            return self._fetch(self._drawn, work.result)
        block: Block = work.result()
        return block

    def _prepare(self, first_step: int) -> None:
        self._posted += 1
        plan = partial(self._planner.plan, first_step, self.ring.steps)
        work = (plan,) if self._in_stream else (self._fetch, self._posted, plan)
        self._coming.append((first_step, self._posted, self._threads.submit(*work)))

    def _fetch(self, number: int, plan: Callable[[], Plan]) -> Block:
        """Read what this rank's node does not hold; nothing more after an error of the exchange."""
        if self._error is not None:
            raise self._error
        try:
            planned, part = plan(), number % PARTS
            event, self._read[part] = self._read[part], None
            if event is not None and self._in_stream:
                event.wait(torch.cuda.current_stream(self._device))
            elif event is not None:
                self._world.wait_for_gpu(event)
            first = part * self.ring.part_rows
            self._exchange.post(number, replace(planned.reads, rows=planned.reads.rows + first))
            first += self._first_row
            landing = np.where(planned.landing < 0, -1, planned.landing + first)
            self._exchange.wait(number)
            return planned.segments, landing
        except BaseException as error:
            self._error = error
            raise
