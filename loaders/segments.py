"""The segments of a rank's batches, and where rows that other nodes hold have landed.

Every rank draws the same global batches.  Where each node holds all rows, a rank has its slots of
them.  Where a dataset is spread over nodes, all ranks assign the segments alike, most of them to a
rank of the node that holds them.  The rows of the others are read ahead, a block of steps at a
time, into a ring of landing rows behind those of the table, where the gather reads them like any
others: a thread draws, assigns and exchanges, so that a step of training does not wait for it.

Shape legend: T steps of a block, B segments of a rank, E episodes.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

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

PARTS = 3  # of the ring: rows that are on their way, that are read, and that were read just now


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

    For blocks of up to `steps` x `rank_batch` segments.
    """

    share: NodeShare
    steps: int
    rank_batch: int
    options: LoaderOptions

    @property
    def part_rows(self) -> int:
        return self.steps * self.rank_batch * self.options.table.margin

    @property
    def rows(self) -> int:
        return PARTS * self.part_rows


Block = tuple[Segments, Int64Array]  # what `draw` returns, when its rows have landed
Coming = tuple[int, int, int, Future[Block]]  # first step, steps, number among the exchange's


class ShardedSegments:
    """Segments of a dataset that is spread over nodes; an exchange fills the `ring` of a table.

    The methods are those of `LocalSegments`; rows that landed stay until the block has been
    released and two more drawn.  All ranks make the same calls in the same order, this one, too.
    A thread of its own uses the exchange: it prepares the block that follows while one is trained
    on.  A sampler that draws only when its step has come has nothing prepared.
    """

    def __init__(self, stream: SegmentStream, world: World, ring: Ring, table: Table) -> None:
        from gear_offline.distributed.exchange import open_exchange

        self._stream, self._world, self.ring = stream, world, ring
        self._assigner = Assigner(world.nodes, stream.global_batch)
        nodes, share = np.array(world.nodes), ring.share
        self._members = [np.flatnonzero(nodes == node) for node in range(world.node_count)]
        # The ranks of a node have their landing rows one after the other in the same memory.
        self._first_row = table.landing_row + world.members.index(world.rank) * ring.rows
        landing = slice(self._first_row, self._first_row + ring.rows)
        held = slice(table.margin, table.margin + table.episodes.steps)
        own = tuple(group.rows[held] for group in table.groups)
        self._exchange = open_exchange(
            NodeRows(lengths=share.lengths, nodes=share.nodes, rows=own),
            tuple(group.rows[landing] for group in table.groups),
            world,
            mode=ring.options.exchange,
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gear-exchange")
        self._coming: Coming | None = None
        self._posted = self._drawn = -1
        self._read: list[Any] = [None] * PARTS  # event behind the gather of each part of the ring
        self._error: BaseException | None = None  # which ended the exchange

    def draw(self, first_step: int, steps: int) -> Block:
        coming, ahead = self._coming, self._stream.selection.ahead
        if coming is None or coming[:2] != (first_step, steps):
            self._drop()
            coming = self._prepare(first_step, steps)
        self._coming = self._prepare(first_step + steps, steps) if ahead else None
        *_, self._drawn, block = coming
        return block.result()

    def release(self, event: Any = None) -> None:
        self._read[self._drawn % PARTS] = event

    def slots_at(self, step: int) -> Int64Array:
        homes = self.ring.share.nodes[self._stream.draw(step, 1).episodes]
        slots: Int64Array = self._assigner.assign(homes)[0][0, self._world.rank]
        return slots

    def close(self) -> None:
        try:
            self._drop()
        except GearError:
            pass  # was raised where batches were asked for
        finally:
            self._thread.shutdown()
            self._exchange.close()

    def _drop(self) -> None:
        coming, self._coming = self._coming, None
        if coming is not None:
            coming[-1].result()

    def _prepare(self, first_step: int, steps: int) -> Coming:
        self._posted += 1
        number, part = self._posted, self._posted % PARTS
        event, self._read[part] = self._read[part], None
        block = self._thread.submit(self._try, number, first_step, steps, event)
        return first_step, steps, number, block

    def _try(self, *arguments: Any) -> Block:
        """`_fetch`, but after an error nothing is asked of the exchange any more."""
        if self._error is not None:
            raise self._error
        try:
            return self._fetch(*arguments)
        except BaseException as error:
            self._error = error
            raise

    def _fetch(self, number: int, first_step: int, steps: int, event: Any) -> Block:
        """Draw and assign a block, and read what this rank's node does not hold; in the thread.

        The rows that lay in the same part of the ring are read when `event` has come.
        """
        ring, share, rank = self.ring, self.ring.share, self._world.rank
        options = ring.options
        span, history, padding = options.context_length, options.table.history, options.padding
        # draw and assign
        drawn = self._stream.draw(first_step, steps)
        homes = share.nodes[drawn.episodes]
        slots, moves = self._assigner.assign(homes)
        step, readers, places = np.nonzero(moves)  # of all ranks' segments, those held elsewhere
        moved = (step, slots[step, readers, places])
        far = drawn[moved]
        # locate: where each lands in this part of the ring, and which rank sends it
        real = real_steps(far, share.lengths, span)
        before = np.minimum(far.starts, history)
        # A window lies as the gather copies it, so that what it copies besides is its own part.
        begin, _ = filled(far.starts, real, span=span, history=history, padding=padding)
        rows = (number % PARTS) * ring.part_rows + begin
        rows += (step * ring.rank_batch + places) * options.table.margin
        owners, home = np.empty(len(step), np.int64), homes[moved]
        for node, members in enumerate(self._members):  # the ranks of a node serve in turn
            at_node = home == node
            owners[at_node] = members[moved[1][at_node] % len(members)]
        # fetch
        if event is not None:
            self._world.wait_for_gpu(event)
        self._exchange.post(
            number,
            Reads(
                readers=readers,
                owners=owners,
                episodes=far.episodes,
                starts=far.starts - before,
                steps=before + real,
                rows=rows,
            ),
        )
        landing = np.full((steps, ring.rank_batch), -1)
        own = readers == rank
        landing[step[own], places[own]] = self._first_row + (rows + before)[own]
        every = np.arange(steps)[:, None]
        segments = drawn[every, slots[:, rank]]
        self._exchange.wait(number)
        return segments, landing
