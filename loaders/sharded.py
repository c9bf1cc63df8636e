"""The segments of a dataset that is spread over nodes: most of a rank's lie on its own node.

Every rank draws the same global batches and assigns them alike.  Rows that its node does not hold
are read, a block of steps ahead, into a ring of landing rows behind the rows of the table, where
the gather reads them like any others.  A sampler that learns from losses draws only when its step
has come: then nothing travels ahead.

Shape legend: T steps of a block, N slots of a global batch, B segments of a rank, K steps of a
window, H rows of history before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gear_offline.core.types import Int64Array
from gear_offline.distributed.assignment import Assigner
from gear_offline.distributed.reads import Held, Reads
from gear_offline.distributed.sharding import NodeShare
from gear_offline.distributed.world import World
from gear_offline.errors import GearError
from gear_offline.kernels.gather import Padding
from gear_offline.kernels.segments import Segments
from gear_offline.sampling.base import Stream
from gear_offline.tables.table import Table

if TYPE_CHECKING:
    from gear_offline.distributed.exchange import Exchange

PARTS = 3  # of the ring: rows that are on their way, that are read, and that were read just now


@dataclass(frozen=True, kw_only=True)
class Ring:
    """The landing rows of a rank, for blocks of up to `steps` x `share` segments."""

    steps: int
    share: int
    context_length: int
    history: int
    place: int  # how many ranks of the node have theirs in front, in the same memory

    @property
    def segment_rows(self) -> int:
        return self.context_length + self.history

    @property
    def part_rows(self) -> int:
        return self.steps * self.share * self.segment_rows

    @property
    def rows(self) -> int:
        return PARTS * self.part_rows

    def of(self, table: Table) -> tuple[Any, ...]:
        """Return this rank's (rows, W) landing rows of each column group."""
        first = 2 * table.margin + table.episodes.steps + self.place * self.rows
        return tuple(group.rows[first : first + self.rows] for group in table.groups)


def held_rows(table: Table, share: NodeShare) -> Held:
    """Return what other nodes may read from this one: whole episodes, in their order."""
    rows = tuple(
        group.rows[table.margin : table.margin + table.episodes.steps] for group in table.groups
    )
    return Held(lengths=share.lengths, nodes=share.nodes, rows=rows)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Block:
    """The (T, B) segments of a rank, whose rows are on their way."""

    first_step: int
    number: int  # of the exchange's steps
    segments: Segments
    landing: Int64Array


class ShardedSegments:
    """Names this rank's segments of consecutive steps, and where rows of other nodes landed.

    All ranks make the same calls in the same order.  `exchange` brings rows into those of `ring`.
    """

    def __init__(
        self,
        stream: Stream,
        world: World,
        share: NodeShare,
        exchange: Exchange,
        ring: Ring,
        padding: Padding,
    ) -> None:
        self._stream, self._world, self._share = stream, world, share
        self._exchange, self._ring, self._left = exchange, ring, padding == "left"
        self._blocks_ahead = 1 if stream.selection.learner is None else 0
        self._assigner = Assigner(torch.tensor(world.nodes))
        self._nodes = np.array(world.nodes)
        self._members = [np.flatnonzero(self._nodes == node) for node in range(world.node_count)]
        self._ahead: list[_Block] = []
        self._number = self._taken = -1
        self._read: list[Any] = [None] * PARTS  # event behind the gather of each part of the ring
        self.all_segments = self.far_segments = 0  # of this rank, since the beginning

    def take(self, first_step: int, steps: int) -> tuple[Segments, Int64Array]:
        """Return (T, B) segments and landing rows, -1 for held ones; post what comes next.

        The rows have landed, and stay until `release` has been called and two more blocks taken.
        """
        coming = [(block.first_step, len(block.landing)) for block in self._ahead[:1]]
        if coming != [(first_step, steps)]:
            self._drop()
            self._ahead = [self._post(first_step, steps)]
        block = self._ahead.pop(0)
        for later in range(len(self._ahead), self._blocks_ahead):
            self._ahead.append(self._post(first_step + (later + 1) * steps, steps))
        self._exchange.wait(block.number)
        self._taken = block.number
        self.all_segments += block.landing.size
        self.far_segments += int((block.landing >= 0).sum())
        return block.segments, block.landing

    def release(self, event: Any = None) -> None:
        """Say that the block taken last is read, or will be when a CUDA event has come."""
        self._read[self._taken % PARTS] = event

    def slots_at(self, step: int) -> Int64Array:
        """Return (B,) int64: which slots of a step's global batch are this rank's, ascending."""
        homes = self._share.nodes[self._draw(step, 1).episodes]
        slots: Int64Array = self._assign(homes)[0, self._world.rank]
        return slots

    def close(self) -> None:
        """End the exchange; all ranks together, or after an error that has broken it."""
        try:
            self._drop()
        except GearError:
            pass  # was raised where batches were asked for
        finally:
            self._exchange.close()

    def _drop(self) -> None:
        for block in self._ahead:
            self._exchange.wait(block.number)
        self._ahead = []

    def _draw(self, first_step: int, steps: int) -> Segments:
        stream = self._stream
        return stream.selection.sample(stream.seed, first_step, steps, stream.batch_size)

    def _assign(self, homes: Int64Array) -> Int64Array:
        """Return (T, W, B) the slots of each rank, from (T, N) the nodes that hold them."""
        slots: Int64Array = self._assigner.assign_steps(torch.from_numpy(homes)).numpy()
        return slots

    def _post(self, first_step: int, steps: int) -> _Block:
        """Draw and assign a block, and begin to read what this rank's node does not hold."""
        ring, rank = self._ring, self._world.rank
        drawn = self._draw(first_step, steps)
        homes = self._share.nodes[drawn.episodes]
        slots = self._assign(homes)
        every = np.arange(steps)[:, None]
        far = homes[every[:, None], slots] != self._nodes[:, None]
        step, readers, places = np.nonzero(far)
        moved = slots[step, readers, places]
        named = _pick(drawn, step, moved)
        real = np.minimum(self._share.lengths[named.episodes] - named.starts, ring.context_length)
        if named.lengths is not None:
            real = np.minimum(real, np.maximum(named.lengths, 1))
        before = np.minimum(named.starts, ring.history)
        self._number += 1
        part = self._number % PARTS
        # A window lies as the gather copies it, so that what it copies besides is its own part.
        first = part * ring.part_rows + (step * ring.share + places) * ring.segment_rows
        first += ring.history + (ring.context_length - real) * self._left
        owners = np.empty(len(moved), np.int64)
        home = homes[step, moved]
        for node, members in enumerate(self._members):  # the ranks of a node serve in turn
            there = home == node
            owners[there] = members[moved[there] % len(members)]
        if self._read[part] is not None:
            self._read[part].synchronize()
            self._read[part] = None
        self._exchange.post(
            self._number,
            Reads(
                readers=readers,
                owners=owners,
                episodes=named.episodes,
                starts=named.starts - before,
                steps=before + real,
                rows=first - before,
            ),
        )
        landing = np.full((steps, ring.share), -1)
        own = readers == rank
        landing[step[own], places[own]] = ring.place * ring.rows + first[own]
        return _Block(
            first_step=first_step,
            number=self._number,
            segments=_pick(drawn, every, slots[:, rank]),
            landing=landing,
        )


def _pick(segments: Segments, steps: Int64Array, slots: Int64Array) -> Segments:
    """Return the segments at some steps and slots."""
    at, lengths = (steps, slots), segments.lengths
    return Segments(
        episodes=segments.episodes[at],
        starts=segments.starts[at],
        probability=segments.probability[at],
        lengths=None if lengths is None else lengths[at],
    )
