"""Batches of a dataset that is spread over nodes: every rank its share, most of it from its node.

Every rank draws the same global batches and assigns them alike.  What a rank trains on and does
not hold comes through the exchange, posted a block of steps ahead, so that it travels while
earlier steps are trained on.

A law that learns from losses is drawn only when its step has come: then nothing travels ahead, and
a step waits for what its rank does not hold.

Shape legend: T steps of a block, B segments of a rank, K steps of a window, L rows before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gear_offline.distributed.assignment import ANYWHERE, Assigner
from gear_offline.distributed.exchange import Exchange, Held, Reads
from gear_offline.distributed.sharding import NodeShare
from gear_offline.distributed.world import World
from gear_offline.errors import GearError
from gear_offline.kernels.columns import convert
from gear_offline.kernels.gather import Padding, Windows, filled, torch_dtype
from gear_offline.sampling import Sampler, Segments
from gear_offline.tables.table import Table

AnyArray = npt.NDArray[Any]
Int64Array = npt.NDArray[np.int64]
AHEAD = 2  # blocks whose rows may be on their way


class LocalGather(Protocol):
    """Fills windows of segments that the node holds, named by their local episodes."""

    def __call__(self, segments: Segments) -> Windows: ...


@dataclass(kw_only=True, eq=False)
class _Block:
    """A block of steps that is assigned, and what of it is on its way."""

    first_step: int
    number: int  # of the exchange's steps
    segments: Segments  # (T, B), of the whole dataset
    far: Int64Array  # flat positions whose rows come from other nodes
    real: Int64Array  # of those, the real steps
    lands: list[AnyArray]  # (positions of the block, L + K, width), one for each group


def held_rows(table: Table, share: NodeShare) -> Held:
    """Return what the exchange may read from this node: whole episodes, in their order."""
    last = table.margin + table.episodes.steps
    rows = []
    for group in table.groups:
        rows.append(group.rows[table.margin : last])
    return Held(lengths=share.lengths, nodes=share.nodes, rows=tuple(rows))


def landing_memory(table: Table, *, context_length: int, segments: int) -> tuple[AnyArray, ...]:
    """Return rows for `AHEAD` blocks of segments that come from other nodes."""
    history = max(group.history for group in table.groups)
    count = AHEAD * segments * (context_length + history)
    return tuple(np.zeros((count, group.width), group.dtype) for group in table.groups)


class ShardedBatches:
    """Windows of consecutive steps, of this rank.

    Parameters
    ----------
    world
        All ranks; they make the same calls in the same order.
    share
        What this rank's node holds.
    table
        Of the shards of `share`.
    gather
        Fills windows from `table`.
    exchange, landing
        Between all ranks, into the memory of `landing_memory`.
    selection, seed, batch_size, context_length, padding
        As `gear_offline.loaders.loader.GearLoader`; `batch_size` is that of all ranks.
    """

    def __init__(
        self,
        *,
        world: World,
        share: NodeShare,
        table: Table,
        gather: LocalGather,
        exchange: Exchange,
        landing: tuple[AnyArray, ...],
        selection: Sampler,
        seed: int,
        batch_size: int,
        context_length: int,
        padding: Padding,
    ) -> None:
        self._world, self._share, self._table, self._gather = world, share, table, gather
        self._lengths, self._exchange, self._selection = share.lengths, exchange, selection
        self._seed, self._batch, self._span, self._padding = (
            seed,
            batch_size,
            context_length,
            padding,
        )
        self._history = max(group.history for group in table.groups)
        self._ahead_blocks = AHEAD - 1 if selection.learner is None else 0
        self._assigner = Assigner(torch.tensor(world.nodes))
        self._nodes = np.array(world.nodes)
        self._anywhere = torch.full((batch_size,), ANYWHERE)
        self._members = [np.flatnonzero(self._nodes == node) for node in range(world.node_count)]
        self._number = -1
        self._ahead: list[_Block] = []
        self._landing = landing
        self.read_segments = self.far_segments = 0  # of this rank, since the beginning

    def windows(self, first_step: int, steps: int) -> Windows:
        """Return (T, B, K, ...) windows, and post what comes next."""
        wanted = (first_step, steps)
        if not self._ahead or self._key(self._ahead[0]) != wanted:
            self._drop()
            self._ahead = [self._post(first_step, steps)]
        block = self._ahead.pop(0)
        for later in range(len(self._ahead), self._ahead_blocks):
            self._ahead.append(self._post(first_step + (later + 1) * steps, steps))
        near, mine = self._is_near(block), block.segments
        local = Segments(
            episodes=np.where(near, self._share.local[mine.episodes], 0),
            starts=np.where(near, mine.starts, 0),
            probability=mine.probability,
            lengths=mine.lengths,
        )
        windows = self._gather(local)
        self._exchange.wait(block.number)
        self._complete(windows, block)
        self.read_segments += block.segments.episodes.size
        self.far_segments += len(block.far)
        return windows

    def slots_at(self, step: int) -> Int64Array:
        """Return (B,) int64: which slots of a step's global batch are this rank's, ascending."""
        drawn = self._selection.sample(self._seed, step, 1, self._batch)[0]
        homes = torch.from_numpy(self._share.nodes[drawn.episodes])
        found = self._assigner.assign(self._anywhere, homes)
        return np.asarray(found.slots[self._world.rank].numpy())

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

    @staticmethod
    def _key(block: _Block) -> tuple[int, int]:
        return block.first_step, len(block.segments.episodes)

    @staticmethod
    def _is_near(block: _Block) -> npt.NDArray[np.bool_]:
        near = np.ones(block.segments.episodes.size, bool)
        near[block.far] = False
        return near.reshape(block.segments.shape)

    def _post(self, first_step: int, steps: int) -> _Block:
        """Draw, assign, and begin to fetch a block."""
        drawn = self._selection.sample(self._seed, first_step, steps, self._batch)
        homes = self._share.nodes[drawn.episodes]  # (T, global batch)
        ranks, width = self._world.rank, self._world.share(self._batch)
        taken = np.empty((steps, width), np.int64)
        parts = []
        for step in range(steps):
            found = self._assigner.assign(self._anywhere, torch.from_numpy(homes[step]))
            slots = found.slots.numpy()
            taken[step] = slots[ranks]
            parts.append(self._moves(slots, homes[step], drawn[step], step, width))
        rows = np.arange(steps)[:, None]
        mine = Segments(
            episodes=drawn.episodes[rows, taken],
            starts=drawn.starts[rows, taken],
            probability=drawn.probability[rows, taken],
            lengths=None if drawn.lengths is None else drawn.lengths[rows, taken],
        )
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
        self._number += 1
        span = self._span + self._history
        half = len(self._landing[0]) // AHEAD
        first_row = self._number % AHEAD * half
        assert steps * width * span <= half, "blocks are not larger than was said"
        reads = Reads(**dict(zip(_COLUMNS, columns, strict=True)))
        reads.rows[:] += first_row
        self._exchange.post(self._number, reads)
        lands = [
            rows[first_row : first_row + steps * width * span].reshape(steps * width, span, -1)
            for rows in self._landing
        ]
        far = np.flatnonzero(self._share.nodes[mine.episodes] != self._world.nodes[ranks])
        return _Block(
            first_step=first_step,
            number=self._number,
            segments=mine,
            far=far,
            real=self._real(mine).reshape(-1)[far],
            lands=lands,
        )

    def _real(self, segments: Segments) -> Int64Array:
        """Return how many steps of each window exist."""
        left = self._lengths[segments.episodes] - segments.starts
        real: Int64Array = np.minimum(left, self._span)
        if segments.lengths is not None:
            real = np.minimum(real, np.maximum(segments.lengths, 1))
        return real

    def _moves(
        self, slots: Int64Array, homes: Int64Array, drawn: Segments, step: int, width: int
    ) -> tuple[Int64Array, ...]:
        """Return the columns of `Reads` of one step: segments that leave their node."""
        readers, places = np.nonzero(homes[slots] != self._nodes[:, None])
        moved = slots[readers, places]
        episodes, starts = drawn.episodes[moved], drawn.starts[moved]
        real = self._real(drawn)[moved]
        first, last = filled(
            starts, real, span=self._span, history=self._history, padding=self._padding
        )
        owners = np.empty(len(moved), np.int64)
        for node, members in enumerate(self._members):  # the ranks of a node serve in turn
            there = homes[moved] == node
            owners[there] = members[moved[there] % len(members)]
        rows = (step * width + places) * (self._span + self._history) + first
        begins = starts - np.minimum(starts, self._history)
        return readers, owners, episodes, begins, last - first, rows

    def _complete(self, windows: Windows, block: _Block) -> None:
        """Put the rows that came from other nodes into the windows, and name all of them."""
        device = windows.segments.device
        names = np.stack([block.segments.episodes, block.segments.starts], axis=-1)
        windows.segments.copy_(torch.from_numpy(names))
        if not len(block.far):
            return
        starts = block.segments.starts.reshape(-1)[block.far]
        inside, first = self._inside(starts, block.real, history=0)
        steps = np.arange(self._span)
        times = np.where(inside, starts[:, None] + steps - first[:, None], 0)
        at = torch.from_numpy(block.far).to(device)

        def put(target: Tensor, values: Any) -> None:
            flat = target.view(-1, *target.shape[block.segments.episodes.ndim :])
            flat.index_copy_(0, at, torch.from_numpy(np.ascontiguousarray(values)).to(device))

        put(windows.timesteps, times)
        put(windows.attention_mask, inside.astype(np.int64))
        for group, buffer, land in zip(
            self._table.groups, windows.buffers, block.lands, strict=True
        ):
            inside, _ = self._inside(starts, block.real, history=group.history)
            came = land[block.far, self._history - group.history :]
            rows = np.where(inside[:, :, None], came, land.dtype.type(0))
            if not group.is_final:
                field = group.fields[0]
                final = convert(rows.reshape(*rows.shape[:2], *field.shape), field)
                rows = np.where(inside[:, :, None], final.reshape(rows.shape), field.dtype.type(0))
                assert torch_dtype(rows.dtype) == buffer.dtype
            put(buffer, rows)

    def _inside(
        self, starts: Int64Array, real: Int64Array, *, history: int
    ) -> tuple[npt.NDArray[np.bool_], Int64Array]:
        """Return (n, K + history): which rows are of the episode, and (n,) the first of them."""
        first, last = filled(starts, real, span=self._span, history=history, padding=self._padding)
        rows = np.arange(self._span + history)
        return (rows >= first[:, None]) & (rows < last[:, None]), first


_COLUMNS = ("readers", "owners", "episodes", "starts", "steps", "rows")
