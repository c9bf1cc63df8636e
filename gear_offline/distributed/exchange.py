"""Rows that other nodes hold, brought into landing memory of this rank ahead of their use.

By three roads, of which all ranks take the same: from GPU to GPU by NCCL
(`gear_offline.distributed.nccl`), by RDMA reads (`gear_offline.distributed.rdma`), or by
collectives of gloo, here.
"""

from __future__ import annotations

from datetime import timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from gear_offline.config.sections import Road
from gear_offline.core.text import say
from gear_offline.distributed.rdma import Endpoint, RdmaExchange
from gear_offline.distributed.reads import NodeRows, Reads, as_bytes, ranges
from gear_offline.distributed.world import World, rank_lost
from gear_offline.errors import GearError, UnavailableError, together

if TYPE_CHECKING:
    from gear_offline.kernels.gather_gpu import GpuGather


class Exchange(Protocol):
    """Moves rows between nodes.

    All ranks open, post the same blocks of segments with the same reads in the same order, and
    close.  Posted blocks are read in the background.  After an error the exchange can only be
    closed.

    Attributes
    ----------
    in_stream
        Rows land in the order of torch's current stream: who launches gathers posts.  Else any one
        thread may use the exchange.
    """

    in_stream: bool

    def post(self, block: int, reads: Reads) -> None:
        """Begin the reads of a block; its landing rows must not be touched until `wait` returns."""
        ...

    def wait(self, block: int) -> None:
        """Wait until all rows of a posted block have landed; once a block, in any order.

        ``RANK_LOST`` at the latest after the world's timeout.
        """
        ...

    def close(self) -> None:
        """Give memory and connections back; `wait` for no posted block afterwards."""
        ...


def open_exchange(
    node_rows: NodeRows,
    landing: tuple[npt.NDArray[Any], ...],
    world: World,
    *,
    road: Road,
    engine: GpuGather | None = None,
    span: int = 1,
    windows: int = 0,
) -> Exchange:
    """Open an exchange; all ranks of `world` call it together, with the same road.

    Rows of other nodes go to `landing`: one C-contiguous, writable (L, W) array for each column
    group.  By ``"nccl"`` they go to GPU memory, `windows` of `span` rows, where the `engine` that
    gathers this rank's batches reads them.  ``"auto"`` is the first of ``"nccl"``, ``"rdma"`` and
    ``"gloo"`` that every rank can take.  A road that is named is taken, or an error says what is
    missing and where.
    """
    widths = [
        [rows.shape[1] * rows.itemsize for rows in groups] for groups in (landing, node_rows.rows)
    ]
    assert widths[0] == widths[1], "rows of one shape"
    assert len({len(rows) for rows in landing}) == 1, "as many landing rows in every column group"
    reasons = list[str]()
    if road in ("auto", "nccl"):
        why = _why_no_nccl(world, engine)
        if engine is not None and why is None:
            from gear_offline.distributed.nccl import NcclExchange

            _say(world, "NCCL, from GPU to GPU", ["every rank has a GPU of its own"])
            return NcclExchange(engine, world, span=span, windows=windows)
        reasons.append(f"no NCCL: {why}")
        if road == "nccl":
            raise UnavailableError("EXCHANGE", reasons[0], remedy="use loader.exchange=auto")
    if engine is not None:
        engine.reads_host = True  # what has landed
    if road in ("auto", "rdma"):
        try:
            endpoint = _open_endpoint(world)
        except GearError as error:
            if road == "rdma" or error.code == "RANK_LOST":
                raise
            reasons.append(f"no RDMA: {error.problem}")
        else:
            _say(world, "RDMA reads", [*reasons, f"every rank can; here {endpoint.describe()}"])
            return RdmaExchange(node_rows, landing, world, endpoint)
    _say(world, "collectives of gloo", reasons or ["exchange=gloo"])
    return CollectiveExchange(node_rows, landing, world)


def _say(world: World, road: str, reasons: list[str]) -> None:
    say(f"exchange: {road} ({'; '.join(reasons)})", quiet=not world.is_first)


def _why_no_nccl(world: World, engine: GpuGather | None) -> str | None:
    """Return the reason against NCCL for the exchange, the same on every rank, or None."""
    facts = None if engine is None else torch.cuda.get_device_properties(engine.device)
    gpus = world.gather(None if facts is None else str(facts.uuid))
    if None in gpus:
        return f"rank {gpus.index(None)} has no GPU that gathers"
    if len(set(gpus)) < len(gpus):
        twice = next(each for each in gpus if gpus.count(each) > 1)
        return f"ranks {', '.join(str(r) for r, g in enumerate(gpus) if g == twice)} share a GPU"
    if not dist.is_nccl_available():
        return "this torch has none"
    if world.size < dist.get_world_size():
        return "some ranks of the job read no data"
    return None


def _open_endpoint(world: World) -> Endpoint:
    """Return this rank's RDMA endpoint; if one rank lacks it, all raise the error."""
    opened = list[Endpoint]()
    try:
        together(world.gather, lambda: opened.append(Endpoint.open(timeout=world.timeout)))
    except GearError:
        for endpoint in opened:
            endpoint.close()
        raise
    return opened[0]


class CollectiveExchange:
    """Owners push rows: one all_to_all_single a block, over gloo, from and to host memory.

    Every rank knows all reads of a block, so every rank knows all sizes and there is no round for
    them.  The column groups of a row travel side by side.  The gloo group is the exchange's own,
    so that a thread may use it while others use the world's.
    """

    in_stream = False

    def __init__(
        self, node_rows: NodeRows, landing: tuple[npt.NDArray[np.generic], ...], world: World
    ) -> None:
        self._world, self._node_rows = world, node_rows
        self._sources = [as_bytes(rows) for rows in node_rows.rows]
        self._landing = [as_bytes(rows) for rows in landing]
        self._first_rows = node_rows.first_rows()
        ends = np.cumsum([source.shape[1] for source in self._sources]).tolist()
        self._width = ends[-1]  # bytes of a row
        self._columns = [slice(*pair) for pair in pairwise([0, *ends])]
        self._posted = dict[int, tuple[Reads, Tensor, Any] | None]()  # own, received, the work
        with world.guard("opening the exchange"):
            members = dist.get_process_group_ranks(world.control or dist.group.WORLD)
            self._group = dist.new_group(
                members,
                backend="gloo",
                timeout=timedelta(seconds=world.timeout),
                use_local_synchronization=True,
            )

    def post(self, block: int, reads: Reads) -> None:
        assert block not in self._posted, "each block is posted once"
        self._posted[block] = None
        if not len(reads):
            return
        rank, size = self._world.rank, self._world.size
        local, served = reads.made_by(rank), reads.served_by(rank)
        local.check(self._node_rows, len(self._landing[0]))
        counts_in, counts_out = (  # rows
            np.bincount(ranks, steps, size).astype(int).tolist()
            for ranks, steps in ((local.owners, local.steps), (served.readers, served.steps))
        )
        rows = ranges(self._first_rows[served.episodes] + served.starts, served.steps)
        sent = np.empty((len(rows), self._width), np.uint8)
        for columns, source in zip(self._columns, self._sources, strict=True):
            sent[:, columns] = source[rows]
        received = torch.empty((sum(counts_in), self._width), dtype=torch.uint8)
        with self._world.guard(f"posting the rows of block {block}"):
            work = dist.all_to_all_single(
                received,
                torch.from_numpy(sent),
                counts_in,
                counts_out,
                group=self._group,
                async_op=True,
            )
        self._posted[block] = local, received, work

    def wait(self, block: int) -> None:
        posted = self._posted.pop(block)
        if posted is None:
            return
        reads, received, work = posted
        try:
            work.wait(timedelta(seconds=self._world.timeout))
        except RuntimeError as error:
            owners = ", ".join(map(str, np.unique(reads.owners)))
            doing = f"waiting for the rows of block {block}"
            doing += f" from ranks {owners}" if owners else ""
            raise rank_lost(doing, error) from error
        rows = ranges(reads.rows, reads.steps)
        for columns, landing in zip(self._columns, self._landing, strict=True):
            landing[rows] = received.numpy()[:, columns]

    def close(self) -> None:
        self._posted.clear()  # the group ends with torch's: its name cannot be used again
