"""Owners' GPUs push rows: the gather's kernel packs them, one all-to-all of NCCL moves them.

Rows go from the memory where the owner's GPU reads them, its own or pinned host memory, into a ring
in the reader's GPU memory.  The gather's addresses reach that ring too.  NCCL takes NVLink,
InfiniBand, RoCE or EFA, whatever there is.  Nothing waits on the host.

Shape legend: W ranks, S rows of a landing window, L windows of the ring, n windows of a block.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from gear_offline.distributed.reads import Reads
from gear_offline.distributed.world import World
from gear_offline.kernels.columns import Field, GroupAddresses
from gear_offline.kernels.draws import Segments
from gear_offline.kernels.gather_gpu import GpuGather

WATCH_SECONDS = 0.01  # between two looks at whether a block has landed
SPARE_SECONDS = 60.0  # that torch's own watchdog waits longer than `World.wait_for_gpu`
_GROUPS: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # by torch's default group


class NcclExchange:
    """An `Exchange` that launches on torch's current stream: a block lands in its order.

    `engine` gathers this rank's batches, from a ring of `windows` times `span` rows, too.

    Two communicators can deadlock: rank 0's GPU runs a collective of one while it has no room for
    the other's, and rank 1's GPU the other way round.  Here none ever overlap.  The thread that
    trains posts, between two steps and at the same steps on all ranks, on the stream that those
    steps begin and end on.  So a block's all-to-all starts when all collectives of the step before
    are done, and ends before one of the next step starts.
    """

    in_stream = True

    def __init__(self, engine: GpuGather, world: World, *, span: int, windows: int) -> None:
        self._world, self._span = world, span
        ends = np.cumsum(engine.lengths)
        self._packer = GpuGather(
            [_address_bytes(each) for each in engine.placed],
            np.append(0, ends),
            device=engine.device,
            context_length=span,
            rank_batch=1,
            reads_host=engine.reads_host,
            keep=engine,
        )
        self.ring: tuple[Tensor, ...] = self._packer.allocate((windows,)).buffers  # (L, S, bytes)
        engine.land_in(self.ring)
        self._watched, self._closed = deque[Any](), threading.Event()
        threading.Thread(target=self._watch, daemon=True, name="gear-watch").start()
        with world.guard("opening the exchange"):
            self._group = _group(world, engine.device)
            zeros = torch.zeros(world.size, dtype=torch.uint8, device=engine.device)
            dist.all_to_all_single(zeros.clone(), zeros, group=self._group)  # all connect

    def ready(self, reads: Reads) -> Ready:
        """Prepare a post as far as it needs no GPU and no order, in any thread."""
        rank, size = self._world.rank, self._world.size
        local, served = reads.made_by(rank), reads.served_by(rank)
        begin, more = divmod(int(local.rows[0]) if len(local) else 0, self._span)
        in_turn = (begin + np.arange(len(local))) * self._span
        assert not more and np.array_equal(local.rows, in_turn), "windows lie in the owners' order"
        segments = Segments(
            episodes=served.episodes,
            starts=served.starts,
            probability=np.zeros(len(served)),
            lengths=served.steps,
        )
        return Ready(
            any=len(reads) > 0,
            windows=slice(begin, begin + len(local)),
            names=self._packer.name(segments),
            received=np.bincount(local.owners, minlength=size).tolist(),
            sent=np.bincount(served.readers, minlength=size).tolist(),
        )

    def post(self, block: int, reads: Reads | Ready) -> None:
        ready = self.ready(reads) if isinstance(reads, Reads) else reads
        if not ready.any:  # on all ranks
            return
        device, counts = self._packer.device, (ready.received, ready.sent)
        packed = self._packer.gather_named(ready.names.to(device, non_blocking=True)).buffers
        with self._world.guard(f"posting the rows of block {block}"):
            for rows, ring in zip(packed, self.ring, strict=True):
                dist.all_to_all_single(ring[ready.windows], rows, *counts, group=self._group)
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        self._watched.append(event)

    def wait(self, block: int) -> None:
        """Do nothing: the stream runs the next launch after the block has landed."""

    def close(self) -> None:
        self._closed.set()  # the group ends with torch's

    def _watch(self) -> None:
        """End the process when a block does not land in time, even if its threads wait."""
        while not self._closed.wait(WATCH_SECONDS):
            while self._watched:
                event, doing = self._watched.popleft(), "rows of other nodes travelled"
                self._world.wait_for_gpu(event, doing=doing, pause=WATCH_SECONDS)


@dataclass(frozen=True, kw_only=True, eq=False)
class Ready:
    """A block's reads, ready to be posted."""

    any: bool  # any rank reads
    windows: slice  # of the ring, where this rank's land
    names: Tensor  # (n, 4) what this rank sends, as the kernel takes it
    received: list[int]  # (W,) windows from each rank
    sent: list[int]  # (W,) windows to each rank


def _address_bytes(placed: GroupAddresses) -> GroupAddresses:
    """Return addresses of a group's rows as bytes, as they are stored."""
    group = placed.group
    rows = np.empty((0, group.row_bytes), np.uint8)
    field = Field(name="rows", dtype=rows.dtype, shape=(group.row_bytes,))
    return replace(placed, group=replace(group, fields=(field,), rows=rows))


def _group(world: World, device: torch.device) -> Any:
    """Return the communicator of all exchanges, which is made once: each holds GPU memory."""
    default = dist.group.WORLD
    if default not in _GROUPS:
        _GROUPS[default] = dist.new_group(
            backend="nccl" if device.type == "cuda" else "gloo",
            timeout=timedelta(seconds=world.timeout + SPARE_SECONDS),
        )
    return _GROUPS[default]
