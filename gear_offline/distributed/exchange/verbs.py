"""Readers fetch: one-sided RDMA reads of ranges of rows, straight into the destination.

The owner's processor takes no part.  A step's reads become one array of work requests; the part of
each peer is a chain of its own and is posted in one call.  At most `Endpoint.window` reads are in
flight to a peer; what is beyond is posted as completions come, inside `post` and `wait`.

Shape legend: m reads of this rank, S stores, c = m * S requests.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np

from gear_offline.distributed.exchange.contract import (
    DEPTH,
    TIMEOUT,
    Destination,
    Ledger,
    Reads,
    Shelf,
)
from gear_offline.distributed.exchange.directory import Directory, exchange_notices, own_notice
from gear_offline.distributed.exchange.endpoint import (
    REFUSED,
    STATUS,
    WINDOW,
    Card,
    Endpoint,
    Region,
)
from gear_offline.distributed.exchange.membership import Membership
from gear_offline.distributed.exchange.memory import RowMemory, put_rows, run_indices, take_rows
from gear_offline.distributed.exchange.mesh import Mesh
from gear_offline.distributed.exchange.rdma_device import Port
from gear_offline.distributed.exchange.step_requests import Part, fill_requests
from gear_offline.distributed.exchange.verbs_library import load_verbs
from gear_offline.distributed.exchange.work_requests import Chain, make_poster
from gear_offline.errors import GearError

POLL = 64  # completions taken at a time
SPINS = 200  # polls without a pause, before the wait gives the processor away
NAP_SECONDS = 20e-6
LOOK_SECONDS = 0.01  # between looks at the peers' connections
CHAIN_ROWS = 4096  # rows of the request array, more if a step needs them
NEWS_SECONDS = 0.3  # for news of a peer to arrive after its queue pair has failed


@dataclass(eq=False)
class _Step:
    """Completions that a posted step still waits for, and requests not yet posted."""

    owners: set[int]
    chain: Chain | None = None
    waiting: deque[Part] = field(default_factory=deque)
    left: int = 0


@dataclass(frozen=True)
class _Flight:
    """A chain under way."""

    step: _Step
    rank: int
    count: int


class VerbsExchange(Membership):
    """An `Exchange` over RDMA.

    Parameters
    ----------
    shelf
        What this rank holds; registered for remote reads until `close`.
    mesh
        Connections to the peers, owned by the exchange from now on.
    port
        From `gear_offline.distributed.exchange.rdma_device.find_port`.
    depth, timeout
        See `gear_offline.distributed.exchange.open_exchange`.
    window
        Most reads in flight to one peer.

    Raises
    ------
    UnavailableError
        ``VERBS_MISSING``, ``VERBS_DEVICE``
    GearError
        ``EXCHANGE_MEMORY``, ``EXCHANGE_PEER``, ``EXCHANGE_TIMEOUT``
    """

    name = "verbs"

    def __init__(
        self,
        shelf: Shelf,
        *,
        mesh: Mesh,
        port: Port,
        depth: int = DEPTH,
        timeout: timedelta = TIMEOUT,
        window: int = WINDOW,
    ) -> None:
        self.rank, self.world = mesh.rank, mesh.world
        self._shelf, self._mesh, self._timeout = shelf, mesh, timeout
        self._ledger = Ledger(depth)
        self._verbs = load_verbs()
        self._poster = make_poster(self._verbs)
        self._chains: list[Chain] = []  # not in use
        self._flights: dict[int, _Flight] = {}
        self._number = 0
        peers = [rank for rank in range(self.world) if rank != self.rank]
        self._endpoint = Endpoint(self._verbs, port, peers, window=window)
        self._rank_of = {int(pair.qp_num): rank for rank, pair in self._endpoint.pairs.items()}
        self._room = dict.fromkeys(peers, self._endpoint.window)
        try:
            self._connect(peers)
            regions = [[self._offer(memory) for memory in stores] for stores in shelf.memory]
            # The peers learn the keys only now: over connections that have proved the secret.
            self._directory: Directory = exchange_notices(mesh, shelf, own_notice(shelf, regions))
        except BaseException:
            self._endpoint.close()
            raise

    def _connect(self, peers: Sequence[int]) -> None:
        cards = {str(rank): asdict(self._endpoint.card(rank)) for rank in peers}
        answers = self._mesh.gather("pairs", json.dumps(cards).encode())
        for rank in peers:
            try:
                card = Card(**json.loads(answers[rank])[str(self.rank)])
            except (ValueError, KeyError, TypeError) as error:
                raise GearError(
                    "EXCHANGE_PEER",
                    f"{self._mesh.name_of(rank)} described its queue pair in a way that cannot be "
                    f"used: {error}",
                    remedy="run the same version on every node",
                ) from error
            self._endpoint.connect(rank, card, timeout=self._timeout)
        self._mesh.gather("connected")

    def _offer(self, memory: RowMemory) -> tuple[int, int]:
        """Register rows for reads by peers; return address and key."""
        if not memory.nbytes:
            return 0, 0
        region = self._endpoint.register(memory, remote=True)
        return region.base, region.remote_key

    def register(self, buffers: Sequence[Any]) -> Destination:
        self._ledger.check()
        found = Destination.of(buffers, self._shelf.row_bytes)
        keys: tuple[Region | None, ...] = tuple(
            self._endpoint.register(memory, remote=False) if memory.nbytes else None
            for memory in found.memory
        )
        return Destination(memory=found.memory, keys=keys)

    def post(self, step: int, reads: Reads, destination: Destination) -> None:
        self._ledger.begin(step)
        reads.check(self.world)
        self._raise_news()
        mine = reads.made_by(self.rank)
        entries = self._directory.find(mine, destination.rows)
        found = _Step(owners=set(np.unique(mine.owners).tolist()))
        if len(mine):
            chain = found.chain = self._take_chain(len(mine) * len(destination.memory))
            found.waiting = fill_requests(chain, mine, entries, self._directory, destination)
        if any(memory.on_gpu for memory in destination.memory):
            _finish_gpu_work()
        self._ledger.posted(step, found)
        self._mesh.position = step
        if self.rank in found.owners:
            self._copy_own(mine, entries, destination)
            found.waiting = deque(part for part in found.waiting if part.rank != self.rank)
        self._launch(found)

    def _take_chain(self, rows: int) -> Chain:
        """Return a chain of at least `rows` that no step uses."""
        chain = self._chains.pop() if self._chains else Chain(max(rows, CHAIN_ROWS))
        return chain if chain.capacity >= rows else Chain(max(rows, 2 * chain.capacity))

    def _copy_own(self, mine: Reads, entries: Any, destination: Destination) -> None:
        """Copy what this rank reads from itself."""
        at = np.flatnonzero(mine.owners == self.rank)
        for read, entry in zip(at.tolist(), entries[at].tolist(), strict=True):
            steps = mine.steps[read : read + 1]
            first = self._directory.first[entry] + mine.starts[read : read + 1]
            rows = run_indices(mine.rows[read : read + 1], steps)
            sources = self._shelf.memory[int(self._directory.piece[entry])]
            for source, target in zip(sources, destination.memory, strict=True):
                if target.on_gpu or source.on_gpu:
                    put_rows(target, rows, source.bytes[int(first[0]) : int(first[0]) + len(rows)])
                else:
                    into = target.bytes[int(rows[0]) : int(rows[0]) + len(rows)]
                    take_rows(source, run_indices(first, steps), into)

    def _launch(self, step: _Step) -> None:
        """Post what fits into the windows of the peers; the rest waits for completions."""
        if step.chain is None:
            return
        now: list[Part] = []
        later: deque[Part] = deque()
        for part in step.waiting:
            middle = min(part.end, part.begin + self._room[part.rank])
            if middle > part.begin:
                now.append(Part(part.rank, part.begin, middle))
                self._room[part.rank] -= middle - part.begin
            if middle < part.end:
                later.append(Part(part.rank, middle, part.end))
        step.waiting = later
        if now:
            self._post_parts(step, step.chain, now)
        if not later:  # posted requests have been copied by the provider
            step.chain.join()
            self._chains.append(step.chain)
            step.chain = None

    def _post_parts(self, step: _Step, chain: Chain, parts: Sequence[Part]) -> None:
        numbers = range(self._number + 1, self._number + 1 + len(parts))
        self._number += len(parts)
        firsts = chain.cut([(part.begin, part.end) for part in parts], numbers)
        for part, number, first in zip(parts, numbers, firsts, strict=True):
            count = part.end - part.begin
            try:
                self._poster.post(self._endpoint.pairs[part.rank], first, count)
            except self._verbs.PyverbsError as error:
                fault = self._fault(part.rank, f"posting failed: {error}")
                raise self._ledger.fail(fault) from error
            self._flights[number] = _Flight(step, part.rank, count)
            step.left += 1

    def wait(self, step: int, *, timeout: timedelta | None = None) -> None:
        found: _Step = self._ledger.work_of(step)
        timeout = timeout or self._timeout
        deadline = time.monotonic() + timeout.total_seconds() * 0.75  # the rest is for the blame
        spins, look = 0, 0.0
        while found.left or found.waiting:
            if self._progress():
                spins = 0
                continue
            spins += 1
            if spins < SPINS:
                continue
            now = time.monotonic()
            if now > look:
                self._raise_news()
                look = now + LOOK_SECONDS
            if now > deadline:
                late = self._mesh.blame(step, timeout, sorted(found.owners))
                raise self._ledger.fail(late)
            time.sleep(NAP_SECONDS)
        del self._ledger.open[step]

    def _progress(self) -> bool:
        """Take completions and post what they make room for; return whether there were any."""
        completions = self._endpoint.poll(POLL)
        for completion in completions:
            if int(completion.status):  # of any request, not only of the last one of a chain
                rank = self._rank_of[int(completion.qp_num)]
                raise self._ledger.fail(self._status_fault(rank, int(completion.status)))
            flight = self._flights.pop(int(completion.wr_id))
            self._room[flight.rank] += flight.count
            flight.step.left -= 1
        if completions:
            for step in self._ledger.open.values():
                if step.waiting:
                    self._launch(step)
        return bool(completions)

    def _status_fault(self, rank: int, status: int) -> GearError:
        what = STATUS.get(status, f"status {status}")
        if status in REFUSED:  # as a process that is killed does when its memory goes first
            refused = GearError(
                "EXCHANGE_REFUSED",
                f"{self._mesh.name_of(rank)} refused a read: {what}",
                remedy="its memory is no longer registered, or the ranks disagree about the table",
            )
            return self._news() or refused
        return self._fault(rank, f"a read failed: {what}")

    def _fault(self, rank: int, what: str) -> GearError:
        """Return the error for a peer's queue pair that failed; the peer may have said why."""
        return self._news() or GearError(
            "EXCHANGE_PEER",
            f"{self._mesh.name_of(rank)} cannot be read from: {what}",
            remedy="look at the messages of that rank, and at the network to its node",
        )

    def _news(self) -> GearError | None:
        """Return what is heard of peers that are lost or gave up, within `NEWS_SECONDS`."""
        deadline = time.monotonic() + NEWS_SECONDS
        while time.monotonic() < deadline:
            if failure := self._mesh.failure():
                return failure
            time.sleep(0.01)
        return None

    def _raise_news(self) -> None:
        failure = self._mesh.failure()
        if failure is not None:
            raise self._ledger.fail(failure)

    def close(self) -> None:
        if self._ledger.closed:
            return
        if self._ledger.error is None:
            try:
                for step in list(self._ledger.open):
                    self.wait(step)
                self._mesh.gather("close")  # nobody reads from this rank any more
            except GearError:
                pass  # who closes does not want to know any more
        self._ledger.closed = True
        self._ledger.open.clear()
        self._flights.clear()
        self._endpoint.close()
        self._mesh.close()


def _finish_gpu_work() -> None:
    """Wait until what is queued on the GPU no longer uses the destination."""
    import torch

    torch.cuda.current_stream().synchronize()
