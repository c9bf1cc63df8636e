"""One RDMA device of a job: a protection domain, a queue pair for each peer, registered memory.

Everything that talks to pyverbs objects is here; `distributed.exchange.verbs` decides what to read
and when.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from gear_offline.distributed.exchange.gpu_memory import DmaBuf, export_dma_buf
from gear_offline.distributed.exchange.memory import RowMemory
from gear_offline.distributed.exchange.rdma_device import Port
from gear_offline.errors import GearError, UnavailableError

WINDOW = 4096  # reads in flight to one peer, where the device allows it
MAX_READS_AT_ONCE = 16  # outstanding requests that a queue pair answers (max_dest_rd_atomic)
RETRIES = 6  # 7 would be for ever on Soft-RoCE: a dead peer would never be noticed
TICK_SECONDS = 4.096e-6  # unit of a queue pair's timeout: TICK * 2**timeout
RNR_TIMER, RNR_RETRIES = 12, 7
HOP_LIMIT = 64
STATUS = {
    1: "local length error", 2: "local queue pair error", 4: "local protection error",
    5: "flushed", 9: "remote invalid request", 10: "remote access error",
    11: "remote operation error", 12: "no answer after retries", 13: "receiver not ready",
}  # fmt: skip
REFUSED = (9, 10)


@dataclass(frozen=True, kw_only=True, eq=False)
class Region:
    """Registered memory.

    Attributes
    ----------
    base
        int, what requests call its first byte.
    local_key, remote_key
        For requests of this side and of the peers.
    """

    base: int
    local_key: int
    remote_key: int
    _mr: Any
    _memory: RowMemory | None
    _dma_buf: DmaBuf | None = None

    def close(self) -> None:
        self._mr.close()
        if self._dma_buf is not None:
            self._dma_buf.close()


@dataclass(frozen=True, kw_only=True)
class Card:
    """What a peer must know to connect a queue pair.

    Attributes
    ----------
    number, sequence
        Of the queue pair, and of its first packet.
    gid, lid, mtu, reads
        Address, packet size (as verbs counts it) and reads that are answered at once.
    """

    number: int
    sequence: int
    gid: str
    lid: int
    mtu: int
    reads: int


class Endpoint:
    """Queue pairs to all peers over one port.

    Parameters
    ----------
    verbs
        From `gear_offline.distributed.exchange.verbs_library.load_verbs`.
    port
        From `gear_offline.distributed.exchange.rdma_device.find_port`.
    peers
        Ranks.
    window
        Reads in flight to one peer; fewer if the device has less room.

    Attributes
    ----------
    window
        Reads in flight to one peer.
    pairs
        Queue pair by rank.

    Raises
    ------
    UnavailableError
        ``VERBS_DEVICE`` if the device refuses.
    """

    def __init__(
        self, verbs: Any, port: Port, peers: Iterable[int], *, window: int = WINDOW
    ) -> None:
        self._verbs, self._port = verbs, port
        self.pairs: dict[int, Any] = {}
        self._regions: list[Region] = []
        self._open: list[Any] = []  # in the order of making
        self._sequences: dict[int, int] = {}
        ranks = list(peers)
        try:
            self._context = self._keep(verbs.Context(name=port.device))
            limits = self._context.query_device()
            facts = self._context.query_port(port.number)
            self._mtu, self._lid = int(facts.active_mtu), int(facts.lid)
            self._reads = max(1, min(MAX_READS_AT_ONCE, int(limits.max_qp_rd_atom)))
            self.window = max(1, min(window, int(limits.max_qp_wr)))
            self._pd = self._keep(verbs.PD(self._context))
            # A completion for each chain; after a fault also one for each request behind it.
            entries = min(int(limits.max_cqe), max(len(ranks), 1) * self.window + 1)
            self._cq = self._keep(verbs.CQ(self._context, entries))
            for rank in ranks:
                self.pairs[rank] = self._make_pair(rank)
        except verbs.PyverbsError as error:
            self.close()
            raise _refused(port, error) from error

    def _keep(self, thing: Any) -> Any:
        self._open.append(thing)
        return thing

    def _make_pair(self, rank: int) -> Any:
        verbs = self._verbs
        room = verbs.QPCap(max_send_wr=self.window, max_recv_wr=1, max_send_sge=1, max_recv_sge=1)
        plan = verbs.QPInitAttr(
            qp_type=verbs.IBV_QPT_RC, scq=self._cq, rcq=self._cq, cap=room, sq_sig_all=0
        )
        self._sequences[rank] = int.from_bytes(os.urandom(3), "big")
        return self._keep(verbs.QP(self._pd, plan))

    def card(self, rank: int) -> Card:
        """Return what `rank` needs to connect to this side."""
        return Card(
            number=int(self.pairs[rank].qp_num),
            sequence=self._sequences[rank],
            gid=self._port.gid,
            lid=self._lid,
            mtu=self._mtu,
            reads=self._reads,
        )

    def connect(self, rank: int, card: Card, *, timeout: timedelta) -> None:
        """Bring the queue pair of `rank` up; the peer may read, and nothing else.

        Parameters
        ----------
        timeout
            Of the exchange; the device gives up after about half of it.

        Raises
        ------
        UnavailableError
            ``VERBS_DEVICE``
        """
        verbs = self._verbs
        attributes = verbs.QPAttr(port_num=self._port.number)
        attributes.qp_access_flags = verbs.IBV_ACCESS_REMOTE_READ
        try:
            self.pairs[rank].to_init(attributes)
            route = verbs.GlobalRoute(
                dgid=verbs.GID(card.gid), sgid_index=self._port.gid_index, hop_limit=HOP_LIMIT
            )
            attributes.ah_attr = verbs.AHAttr(
                port_num=self._port.number, is_global=1, gr=route, dlid=card.lid
            )
            attributes.path_mtu = min(self._mtu, card.mtu)
            attributes.dest_qp_num, attributes.rq_psn = card.number, card.sequence
            attributes.max_dest_rd_atomic, attributes.min_rnr_timer = self._reads, RNR_TIMER
            self.pairs[rank].to_rtr(attributes)
            attributes.sq_psn = self._sequences[rank]
            attributes.timeout = retry_exponent(timeout)
            attributes.retry_cnt, attributes.rnr_retry = RETRIES, RNR_RETRIES
            attributes.max_rd_atomic = min(self._reads, card.reads)
            self.pairs[rank].to_rts(attributes)
        except verbs.PyverbsError as error:
            raise _refused(self._port, error) from error

    def register(self, memory: RowMemory, *, remote: bool) -> Region:
        """Register memory: for reads by peers, or as a place where this side's reads land.

        Raises
        ------
        GearError
            ``EXCHANGE_MEMORY``
        """
        verbs = self._verbs
        access = verbs.IBV_ACCESS_REMOTE_READ if remote else verbs.IBV_ACCESS_LOCAL_WRITE
        dma_buf = None
        try:
            if memory.on_gpu:
                dma_buf = export_dma_buf(memory.address, memory.nbytes)
                base = dma_buf.offset  # what pyverbs makes the region's first address
                mr = verbs.DmaBufMR(self._pd, memory.nbytes, access, dma_buf.descriptor, base)
            else:
                base = memory.address
                mr = verbs.MR(self._pd, memory.nbytes, access, address=base)
        except verbs.PyverbsError as error:
            if dma_buf is not None:
                dma_buf.close()
            raise GearError(
                "EXCHANGE_MEMORY",
                f"{memory.nbytes} bytes of {memory.device} memory cannot be registered: {error}",
                where=self._port.describe(),
                remedy="raise the limit of locked memory (`ulimit -l unlimited`), or mode='off'",
            ) from error
        region = Region(
            base=base,
            local_key=int(mr.lkey),
            remote_key=int(mr.rkey),
            _mr=mr,
            _memory=memory,
            _dma_buf=dma_buf,
        )
        self._regions.append(region)
        return region

    def poll(self, most: int) -> list[Any]:
        """Return up to `most` completions: ``wr_id``, ``status``, ``qp_num``."""
        count, found = self._cq.poll(most)
        return list(found[:count])

    def close(self) -> None:
        """Deregister all memory and close the device; nothing of it can be used afterwards."""
        things = [
            *self.pairs.values(),  # first: no read may reach memory that goes away
            *self._regions,
            *reversed(self._open),
        ]
        for thing in things:
            with suppress(self._verbs.PyverbsError):  # of a device that is gone
                thing.close()
        self.pairs.clear()
        self._regions.clear()
        self._open.clear()


def retry_exponent(timeout: timedelta) -> int:
    """Return the queue pair's timeout so that all its retries take about half of `timeout`.

    A device may take up to four times as long as it says.
    """
    seconds = timeout.total_seconds() / 2 / (RETRIES + 1)
    exponent = 1
    while TICK_SECONDS * 2 ** (exponent + 1) <= seconds and exponent < 20:
        exponent += 1
    return exponent


def _refused(port: Port, error: Exception) -> UnavailableError:
    return UnavailableError(
        "VERBS_DEVICE",
        f"the RDMA device refuses: {error}",
        where=port.describe(),
        remedy="check `rdma link` and the rights on /dev/infiniband, or use mode='off'",
    )
