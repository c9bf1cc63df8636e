"""Readers fetch rows: one-sided RDMA reads, straight into landing memory, by pyverbs.

The owner's processor takes no part: its device answers, whatever its process does.  This module
does not import torch.

Shape legend: R ranks, L landing rows.
"""

from __future__ import annotations

import enum
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from ipaddress import IPv6Address
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import psutil

from gear_offline.distributed import INTERFACE_VARIABLE
from gear_offline.distributed.reads import NodeRows, Reads, as_bytes
from gear_offline.errors import GearError, UnavailableError, together

DEVICES = Path("/sys/class/infiniband")
IN_FLIGHT = 1024  # reads of one rank, where the device allows it
READS_AT_ONCE = 16  # that a queue pair answers at once (max_dest_rd_atomic)
RETRIES = 6  # 7 would be for ever on Soft-RoCE: a dead peer would never be noticed
TICK_SECONDS = 4.096e-6  # unit of a queue pair's timeout: TICK * 2**timeout
MOST_TIMEOUT = 18  # 1.1 s, and 7.5 s with all retries
MOST_BYTES = 1 << 30  # of one read; a message of RDMA has at most 2 GiB
SPINS = 200  # polls without a pause, before a wait gives the processor away
NAP_SECONDS = 20e-6
CLOSE_SECONDS = 10.0  # that who closes waits for the others to have read everything
CLOSE_PAUSE_SECONDS = 1e-3
CLOSING = (1 << 64) - 1  # the number of reads that ask whether a peer is done
# Of completions that failed: the ones that a peer which is gone, or has closed, causes.
STATUS = {5: "flushed", 10: "remote access error", 12: "no answer after retries"}


class Memory(NamedTuple):
    """Registered memory: its address, and the key to read from it or to read into it."""

    address: int
    key: int


class RankMessages(Protocol):
    """The part of a `World` that reads need; the module of `World` imports torch."""

    @property
    def rank(self) -> int: ...
    @property
    def nodes(self) -> tuple[int, ...]: ...
    @property
    def timeout(self) -> float: ...
    def gather(self, value: Any) -> list[Any]: ...


class RdmaExchange:
    """An `Exchange` by RDMA reads; `endpoint` belongs to it from now on."""

    in_stream = False

    def __init__(
        self,
        node_rows: NodeRows,
        landing: tuple[npt.NDArray[np.generic], ...],
        world: RankMessages,
        endpoint: Endpoint,
    ) -> None:
        self._world, self._node_rows, self._endpoint = world, node_rows, endpoint
        self._landing = [as_bytes(rows) for rows in landing]
        self._first_rows = node_rows.first_rows()
        self._left: dict[int, int] = {}  # reads of a posted block that are not done
        self._broken = False
        # What peers read when they close, and where this rank reads theirs.
        self._done, self._others_done = np.zeros(1, np.uint8), np.zeros(len(world.nodes), np.uint8)
        self._peers = [r for r, n in enumerate(world.nodes) if n != world.nodes[world.rank]]
        try:
            offers = together(world.gather, self._offer)
            # Of each rank: its column groups, then its flag.
            self._sources = [[Memory(*region) for region in regions] for regions, _ in offers]
            # Nobody reads before everybody answers.
            together(world.gather, lambda: self._connect([pairs for _, pairs in offers]))
        except BaseException:
            endpoint.close()
            raise

    def _offer(self) -> tuple[list[Memory], dict[int, Any]]:
        """Register memory; return the part that others may read, and pairs for them."""
        register = self._endpoint.register
        offered = [*(as_bytes(rows) for rows in self._node_rows.rows), self._done]
        self._targets = [register(rows) for rows in (*self._landing, self._others_done)]
        pairs = {peer: self._endpoint.make_pair(peer) for peer in self._peers}
        return [register(rows, remote=True) for rows in offered], pairs

    def _connect(self, pairs: list[dict[str, Any]]) -> None:
        for peer in self._peers:
            self._endpoint.connect(peer, pairs[peer][str(self._world.rank)])

    def post(self, block: int, reads: Reads) -> None:
        assert block not in self._left, "each block is posted once"
        endpoint, local = self._endpoint, reads.made_by(self._world.rank)
        local.check(self._node_rows, len(self._landing[0]))
        self._left[block] = len(local) * len(self._landing)
        first_rows = self._first_rows[local.episodes] + local.starts
        columns = (local.owners, first_rows, local.steps, local.rows)
        for owner, first, steps, row in zip(*(c.tolist() for c in columns), strict=True):
            for group, landing in enumerate(self._landing):
                width = landing.shape[1]
                assert steps * width <= MOST_BYTES, "windows are shorter"
                (source, key), (target, own_key) = self._sources[owner][group], self._targets[group]
                if endpoint.in_flight == endpoint.room:
                    self._poll_until(lambda: endpoint.in_flight < endpoint.room)
                try:
                    read = (
                        Memory(source + first * width, key),
                        Memory(target + row * width, own_key),
                    )
                    endpoint.post(owner, block, *read, steps * width)
                except endpoint.verbs.PyverbsError as error:
                    raise self._lost(owner, str(error)) from error

    def wait(self, block: int) -> None:
        self._poll_until(lambda: not self._left[block])
        del self._left[block]

    def _poll_until(self, done: Callable[[], bool]) -> None:
        """Take completions until `done()`, or until time is up."""
        deadline, idle = time.monotonic() + self._world.timeout, 0
        while not done():
            completions = self._endpoint.poll()
            for number, owner, status in completions:
                if status:
                    raise self._lost(owner, STATUS.get(status, f"status {status}"))
                if number != CLOSING:
                    self._left[number] -= 1
            idle = 0 if completions else idle + 1
            if idle >= SPINS:
                if time.monotonic() > deadline:
                    raise self._lost(None, f"reads took more than {self._world.timeout:g} s")
                time.sleep(NAP_SECONDS)

    def _lost(self, owner: int | None, why: str) -> GearError:
        self._broken = True
        problem = (
            f"{'another rank' if owner is None else f'rank {owner}'} cannot be read from: {why}"
        )
        remedy = "see the messages of that rank, and the network to its node"
        return GearError("RANK_LOST", problem, self._endpoint.describe(), remedy)

    def close(self) -> None:
        if self._endpoint.closed:
            return
        with suppress(GearError):  # who closes does not want to know any more
            for block in [] if self._broken else list(self._left):
                self.wait(block)
        self._done[0] = 1
        self._wait_for_readers()
        self._endpoint.close()

    def _wait_for_readers(self) -> None:
        """Wait until no peer reads from this rank any more: until it is done too, or gone.

        Peers' flags are read as rows are, without a collective: who closes after an error of its
        own does so while the others are in the middle of something else.
        """
        endpoint, waiting, pending = self._endpoint, set(self._peers), set[int]()
        deadline = time.monotonic() + min(CLOSE_SECONDS, self._world.timeout)
        flags, key = self._targets[-1]
        while waiting and time.monotonic() < deadline:
            for peer in sorted(waiting - pending)[: max(endpoint.room - endpoint.in_flight, 0)]:
                try:
                    endpoint.post(
                        peer, CLOSING, self._sources[peer][-1], Memory(flags + peer, key), 1
                    )
                    pending.add(peer)
                except endpoint.verbs.PyverbsError:
                    waiting.discard(peer)
            for number, peer, status in endpoint.poll():
                if status:
                    waiting.discard(peer)  # it has closed, or is gone
                if number == CLOSING:
                    pending.discard(peer)
            waiting -= set(np.flatnonzero(self._others_done).tolist())
            time.sleep(CLOSE_PAUSE_SECONDS)


@dataclass(frozen=True, kw_only=True)
class Port:
    """A port of an RDMA device, e.g. ``"mlx5_0"`` and 1, and its address there."""

    device: str
    number: int
    gid_index: int
    gid: str


class Endpoint:
    """An RDMA device: queue pairs to peers, registered memory, one completion queue."""

    def __init__(self, verbs: Any, port: Port, *, timeout: float) -> None:
        self.verbs, self.port, self.in_flight, self.closed = verbs, port, 0, False
        self._timeout = retry_exponent(timeout)
        self._pairs: dict[int, Any] = {}
        self._owner_of: dict[int, int] = {}  # by number of the queue pair
        self._regions: list[tuple[Any, Any]] = []  # and the memory that each is over
        self._open: list[Any] = []  # in the order of making
        try:
            with self._refusals():
                context = self._add_resource(verbs.Context(name=port.device))
                limits, facts = context.query_device(), context.query_port(port.number)
                self._mtu, self._lid = int(facts.active_mtu), int(facts.lid)
                self._reads = max(1, min(READS_AT_ONCE, int(limits.max_qp_rd_atom)))
                self.room = min(IN_FLIGHT, int(limits.max_qp_wr), int(limits.max_cqe) - 1)
                self._pd = self._add_resource(verbs.PD(context))
                self._cq = self._add_resource(verbs.CQ(context, self.room + 1))
        except UnavailableError:
            self.close()
            raise
        # One request for all reads: posting copies it.  `sg_list` makes it refer to `_sge`, which
        # both would free if they were closed: neither is.  A new pair of objects costs 2 to 4 us.
        self._sge = verbs.SGE(0, 0, 0)
        self._request = verbs.SendWR(
            num_sge=1,
            sg=[self._sge],
            opcode=verbs.IBV_WR_RDMA_READ,
            send_flags=verbs.IBV_SEND_SIGNALED,
        )
        self._request.sg_list = self._sge

    @classmethod
    def open(cls, *, timeout: float) -> Endpoint:
        """Open the device of this node's network interface."""
        return cls(load_verbs(), find_port(interface_gids()), timeout=timeout)

    def _add_resource(self, resource: Any) -> Any:
        self._open.append(resource)
        return resource

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """Turn errors of pyverbs into ``EXCHANGE``."""
        try:
            yield
        except self.verbs.PyverbsError as error:
            problem = f"the RDMA device refuses: {error}"
            remedy = "check `rdma link` and the rights on /dev/infiniband, or set "
            remedy += "loader.exchange=gloo"
            raise UnavailableError("EXCHANGE", problem, self.describe(), remedy) from error

    def describe(self) -> str:
        return f"{self.port.device} port {self.port.number}, {self.port.gid}"

    def make_pair(self, peer: int) -> dict[str, Any]:
        """Make a queue pair; return the facts by which the peer connects to it."""
        verbs = self.verbs
        room = verbs.QPCap(max_send_wr=self.room, max_recv_wr=1, max_send_sge=1, max_recv_sge=1)
        plan = verbs.QPInitAttr(
            qp_type=verbs.IBV_QPT_RC, scq=self._cq, rcq=self._cq, cap=room, sq_sig_all=0
        )
        with self._refusals():
            pair = self._pairs[peer] = verbs.QP(self._pd, plan)
        self._owner_of[int(pair.qp_num)] = peer
        facts = {"number": int(pair.qp_num), "gid": self.port.gid, "lid": self._lid}
        return facts | {"mtu": self._mtu, "reads": self._reads}

    def connect(self, peer: int, facts: dict[str, Any]) -> None:
        """Bring a queue pair up; the peer may read, and nothing else."""
        verbs, pair, port = self.verbs, self._pairs[peer], self.port
        attributes = verbs.QPAttr(port_num=port.number)
        attributes.qp_access_flags = verbs.IBV_ACCESS_REMOTE_READ
        with self._refusals():
            pair.to_init(attributes)
            gid = verbs.GID(facts["gid"])
            route = verbs.GlobalRoute(dgid=gid, sgid_index=port.gid_index, hop_limit=64)
            attributes.ah_attr = verbs.AHAttr(
                port_num=port.number, is_global=1, gr=route, dlid=facts["lid"]
            )
            attributes.path_mtu = min(self._mtu, facts["mtu"])
            attributes.dest_qp_num, attributes.rq_psn = facts["number"], 0
            attributes.max_dest_rd_atomic, attributes.min_rnr_timer = self._reads, 12
            pair.to_rtr(attributes)
            attributes.sq_psn, attributes.timeout = 0, self._timeout
            attributes.retry_cnt, attributes.rnr_retry = RETRIES, 7
            attributes.max_rd_atomic = min(self._reads, facts["reads"])
            pair.to_rts(attributes)

    def register(self, memory: npt.NDArray[np.uint8], *, remote: bool = False) -> Memory:
        """Register memory: for reads by peers, or as a place where this side's reads land."""
        verbs, address = self.verbs, memory.ctypes.data
        access = verbs.IBV_ACCESS_REMOTE_READ if remote else verbs.IBV_ACCESS_LOCAL_WRITE
        try:
            region = verbs.MR(self._pd, memory.nbytes, access, address=address)
        except verbs.PyverbsError as error:
            problem = f"{memory.nbytes} bytes cannot be registered for RDMA: {error}"
            remedy = "raise the limit of locked memory (`ulimit -l unlimited`), or set "
            remedy += "loader.exchange=gloo"
            raise GearError("MEMORY", problem, self.describe(), remedy) from error
        self._regions.append((region, memory))
        return Memory(address, int(region.rkey if remote else region.lkey))

    def post(self, peer: int, number: int, source: Memory, target: Memory, size: int) -> None:
        """Begin to read `size` bytes of a peer at `source` to `target`; `poll` tells `number`."""
        sge, request = self._sge, self._request
        sge.addr, sge.length, sge.lkey = target.address, size, target.key
        request.wr_id = number
        request.set_wr_rdma(source.key, source.address)
        self._pairs[peer].post_send(request)
        self.in_flight += 1

    def poll(self) -> list[tuple[int, int, int]]:
        """Return (number, peer, status) of reads that are done; status 0 is good."""
        count, completions = self._cq.poll(64)
        self.in_flight -= count
        owner_of, completed = self._owner_of, completions[:count]
        return [(int(c.wr_id), owner_of[int(c.qp_num)], int(c.status)) for c in completed]

    def close(self) -> None:
        """Deregister all memory and close the device; nothing of it can be used afterwards."""
        self.closed = True
        regions = [region for region, _ in self._regions]
        # Queue pairs first: no read may reach memory that goes away.
        for resource in [*self._pairs.values(), *regions, *reversed(self._open)]:
            with suppress(self.verbs.PyverbsError):  # of a device that is gone
                resource.close()
        for resources in (self._pairs, self._regions, self._open):
            resources.clear()


def retry_exponent(timeout: float) -> int:
    """Return a queue pair's timeout so that all its retries take at most half of `timeout`."""
    seconds = timeout / 2 / (RETRIES + 1)
    return min(MOST_TIMEOUT, max(1, int(np.log2(seconds / TICK_SECONDS))))


def interface_gids() -> set[IPv6Address]:
    """Return the RDMA addresses that the network interface for other nodes has.

    It is ``GEAR_OFFLINE_INTERFACE``, or else the one that leads to ``MASTER_ADDR``.  A RoCE address
    is the interface's IPv4 address, one of InfiniBand the end of its hardware address.
    """
    interfaces = psutil.net_if_addrs()
    name = os.environ.get(INTERFACE_VARIABLE)
    if not name:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 9))  # sends nothing
            except OSError:
                return set()
            local = str(probe.getsockname()[0])
        names = (n for n, entries in interfaces.items() if local in {a.address for a in entries})
        name = next(names, "")
    gids = set()
    for address in interfaces.get(name, []):
        if address.family == socket.AF_INET:
            gids.add(IPv6Address(f"::ffff:{address.address}"))
        elif address.family == psutil.AF_LINK and address.address.count(":") == 19:
            gids.add(IPv6Address(bytes.fromhex(address.address.replace(":", ""))[4:]))
    return gids


def find_port(gids: set[IPv6Address], root: Path = DEVICES) -> Port:
    """Return the active port that has one of the addresses; ``EXCHANGE`` if there is none."""
    paths = sorted(root.glob("*/ports/*"))
    for path in paths:
        ethernet = _text(path / "link_layer") == "Ethernet"
        if "ACTIVE" not in _text(path / "state"):
            continue
        for index in sorted(int(entry.name) for entry in (path / "gids").iterdir()):
            gid = _text(path / "gids" / str(index))
            if not gid or IPv6Address(gid) not in gids:
                continue
            if not ethernet or _text(path / "gid_attrs/types" / str(index)) == "RoCE v2":
                device, number = path.parent.parent.name, int(path.name)
                return Port(device=device, number=number, gid_index=index, gid=gid)
    devices = ", ".join(sorted({path.parent.parent.name for path in paths}))
    problem = "this machine has no RDMA device"
    if devices:
        problem = f"none of the RDMA devices {devices} is active on this node's network interface"
    remedy = f"name the interface in {INTERFACE_VARIABLE} (`rdma link` shows them), or set "
    raise UnavailableError("EXCHANGE", problem, remedy=remedy + "loader.exchange=gloo")


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # unused entries of the address table cannot be read
        return ""


@cache
def load_verbs() -> Any:
    """Return a namespace of pyverbs' classes and, as integers, its ``IBV_*`` constants."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    names: dict[str, Any] = {}
    try:
        for module in ("device", "pd", "mr", "cq", "qp", "wr", "addr", "pyverbs_error"):
            names |= vars(import_module(f"pyverbs.{module}"))
        try:
            names |= vars(import_module("pyverbs.enums"))
        except ModuleNotFoundError:  # later than 57: members of classes
            for member_class in vars(import_module("pyverbs.libibverbs_enums")).values():
                if isinstance(member_class, type) and issubclass(member_class, enum.Enum):
                    members = member_class.__members__.items()
                    names |= {name: int(member.value) for name, member in members}
    except ImportError as error:
        remedy = "install the package of your distribution (Debian, Ubuntu: apt install "
        remedy += "python3-pyverbs; versions 44 to 59), or set loader.exchange=gloo"
        problem = f"pyverbs cannot be loaded: {error}"
        raise UnavailableError("PACKAGE_MISSING", problem, remedy=remedy) from error
    finally:  # importing pyverbs configures the root logger of the program
        root.handlers[:] = handlers
        root.setLevel(level)
    return SimpleNamespace(**names)
