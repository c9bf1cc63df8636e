"""Owners push: one all_to_all_single a step, over NCCL on GPUs and gloo on CPUs.

Every rank knows all reads of a step, so every rank knows all sizes: there is no round for them.
The rows of one peer travel as one run of bytes, store after store.  The collective of a step runs
while earlier steps are trained on: on gloo's threads, or on a stream of its own.

Shape legend: m reads, R rows, W bytes of a row.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from threading import Thread
from typing import Any

import numpy as np
import torch
import torch.distributed
from torch import Tensor

from gear_offline.distributed.exchange.contract import (
    DEPTH,
    TIMEOUT,
    Destination,
    Int64Array,
    Ledger,
    Reads,
    Shelf,
)
from gear_offline.distributed.exchange.directory import Directory, exchange_notices, own_notice
from gear_offline.distributed.exchange.membership import Membership
from gear_offline.distributed.exchange.memory import put_rows, run_indices, take_rows
from gear_offline.distributed.exchange.mesh import Mesh
from gear_offline.errors import GearError, InputError

dist: Any = torch.distributed  # its stubs leave out most of what is used here
SLICE = timedelta(milliseconds=50)  # of a wait, between looks at the peers
MARGIN = timedelta(seconds=60)
NOTICE_SECONDS = 1.0  # for news of a peer to arrive after a collective has failed


@dataclass(kw_only=True, eq=False)
class _Step:
    """A posted step: what is under way, and where its bytes go."""

    reads: Reads
    destination: Destination
    received: Tensor | None = None
    sent: Tensor | None = None  # kept until the collective is done
    work: Any = None
    done: Any = None  # CUDA event


class CollectiveExchange(Membership):
    """An `Exchange` over a process group of its own.

    Parameters
    ----------
    shelf
        What this rank holds.
    group
        Torch process group, whose ranks are the exchange's; ``None`` for the default one.
    mesh
        Connections to the peers, owned by the exchange from now on.
    depth, timeout
        See `gear_offline.distributed.exchange.open_exchange`.
    """

    name = "collective"

    def __init__(
        self,
        shelf: Shelf,
        *,
        group: Any = None,
        mesh: Mesh,
        depth: int = DEPTH,
        timeout: timedelta = TIMEOUT,
    ) -> None:
        self.rank, self.world = mesh.rank, mesh.world
        self._shelf, self._mesh, self._timeout = shelf, mesh, timeout
        self._row_bytes = shelf.row_bytes
        self._ledger = Ledger(depth)
        self._directory: Directory = exchange_notices(mesh, shelf, own_notice(shelf))
        self._device = torch.device("cpu")
        self._stream: Any = None
        make_stream: Any = torch.cuda.Stream
        if dist.get_backend(group) == "nccl":
            self._device = torch.device("cuda", torch.cuda.current_device())
            self._stream = make_stream(self._device)
        self._group: Any = _own_group(mesh, self._device, timeout)

    def register(self, buffers: Sequence[Any]) -> Destination:
        self._ledger.check()
        return Destination.of(buffers, self._row_bytes)

    def post(self, step: int, reads: Reads, destination: Destination) -> None:
        self._ledger.begin(step)
        reads.check(self.world)
        self._raise_news()
        # All reads, also of others: who refuses a step must not leave the rest in a collective.
        self._directory.find(reads, None)
        mine, served = reads.made_by(self.rank), reads.served_by(self.rank)
        try:
            self._directory.find(mine, destination.rows)
        except InputError as error:  # only this rank knows its destination
            self._mesh.abort(f"{error.code}: {error}")
            raise self._ledger.fail(error) from None
        entries = self._directory.find(served, None)
        found = _Step(reads=mine, destination=destination)
        if len(reads):
            if self._stream is not None:
                self._stream.wait_stream(torch.cuda.current_stream(self._device))
                with torch.cuda.stream(self._stream):
                    self._push(found, served, entries)
            else:
                self._push(found, served, entries)
        self._ledger.posted(step, found)
        self._mesh.position = step

    def _push(self, found: _Step, served: Reads, entries: Int64Array) -> None:
        """Pack what the peers read, and start the collective."""
        row = sum(self._row_bytes)
        out_rows = _rows_by(served.readers, served.steps, self.world)
        in_rows = _rows_by(found.reads.owners, found.reads.steps, self.world)
        found.sent = self._pack(served, entries, out_rows)
        found.received = torch.empty(
            int(in_rows.sum()) * row, dtype=torch.uint8, device=self._device
        )
        found.work = self._group.alltoall_base(
            found.received, found.sent, (in_rows * row).tolist(), (out_rows * row).tolist()
        )

    def _pack(self, served: Reads, entries: Int64Array, out_rows: Int64Array) -> Tensor:
        """Return the bytes for all readers, in the order of ranks, store after store for each."""
        directory = self._directory
        sent = torch.empty(
            int(out_rows.sum()) * sum(self._row_bytes), dtype=torch.uint8, device=self._device
        )
        flat: Any = sent if sent.is_cuda else sent.numpy()
        firsts = directory.first[entries] + served.starts
        pieces = directory.piece[entries]
        base = 0
        for reader in np.flatnonzero(out_rows).tolist():
            at = np.flatnonzero(served.readers == reader)
            for store, row_bytes in enumerate(self._row_bytes):
                end = base + int(out_rows[reader]) * row_bytes
                into = flat[base:end].reshape(-1, row_bytes)
                self._take(store, pieces[at], firsts[at], served.steps[at], into)
                base = end
        return sent

    def _take(
        self, store: int, pieces: Int64Array, firsts: Int64Array, steps: Int64Array, out: Any
    ) -> None:
        """Gather rows of m reads from the pieces of one store into (R, W) uint8 `out`."""
        row = 0
        cuts = np.flatnonzero(np.diff(pieces)) + 1  # runs of reads from the same piece
        for begin, end in zip([0, *cuts], [*cuts, len(pieces)], strict=True):
            source = self._shelf.memory[int(pieces[begin])][store]
            indices = run_indices(firsts[begin:end], steps[begin:end])
            take_rows(source, indices, out[row : row + len(indices)])
            row += len(indices)

    def wait(self, step: int, *, timeout: timedelta | None = None) -> None:
        found: _Step = self._ledger.work_of(step)
        if found.work is not None:
            self._finish(step, found, timeout or self._timeout)
        if found.received is not None and len(found.reads):
            if self._stream is not None:
                with torch.cuda.stream(self._stream):
                    found.work.wait()  # orders the stream, not the host
                    self._unpack(found)
                torch.cuda.current_stream(self._device).wait_stream(self._stream)
            else:
                self._unpack(found)
        del self._ledger.open[step]

    def _finish(self, step: int, found: _Step, timeout: timedelta) -> None:
        """Wait on the host until the collective is done, or say who keeps us waiting."""
        # Asking the peers takes a while too, and belongs to the timeout.
        deadline = time.monotonic() + timeout.total_seconds() * 0.75
        while True:
            done = False
            try:
                done = found.work.is_completed()  # before: rows may come as the slice ends
                if self._device.type == "cuda":
                    if done:
                        return
                    time.sleep(20e-6)
                else:
                    found.work.wait(SLICE)
                    return
            except RuntimeError as error:
                if self._device.type == "cuda" or done:
                    raise self._ledger.fail(self._news_of(step, error)) from error
            self._raise_news()
            if time.monotonic() > deadline:
                late = self._mesh.blame(step, timeout, np.unique(found.reads.owners).tolist())
                raise self._ledger.fail(late)

    def _unpack(self, found: _Step) -> None:
        """Copy what came to the rows of the destination."""
        assert found.received is not None, "called for steps with a collective"
        reads = found.reads
        flat: Any = found.received if found.received.is_cuda else found.received.numpy()
        base = 0
        owners = np.unique(reads.owners)
        for owner in owners.tolist():
            at = np.flatnonzero(reads.owners == owner)
            rows = run_indices(reads.rows[at], reads.steps[at])
            for memory in found.destination.memory:
                end = base + len(rows) * memory.row_bytes
                put_rows(memory, rows, flat[base:end].reshape(-1, memory.row_bytes))
                base = end

    def _raise_news(self) -> None:
        failure = self._mesh.failure()
        if failure is not None:
            raise self._ledger.fail(failure)

    def _news_of(self, step: int, error: RuntimeError) -> GearError:
        """Return why a collective failed; the peers' connections tell more than torch does."""
        deadline = time.monotonic() + NOTICE_SECONDS
        while time.monotonic() < deadline:
            failure = self._mesh.failure()
            if failure is not None:
                return failure
            time.sleep(0.01)
        blamed = self._mesh.blame(step, self._timeout)
        return GearError(
            "EXCHANGE_PEER",
            f"the collective of step {step} failed: {error}; {blamed.what}",
            remedy="look at the other ranks' messages",
        )

    def close(self) -> None:
        if self._ledger.closed:
            return
        if self._ledger.error is None:
            try:
                for step in list(self._ledger.open):
                    self.wait(step)
                self._mesh.gather("close")
            except GearError:
                pass  # who closes does not want to know any more
        self._end()

    def _end(self) -> None:
        self._ledger.closed = True
        self._ledger.open.clear()
        group, self._group = [self._group], None
        if self._ledger.error is None:
            group[0].shutdown()
        else:
            group[0].abort()  # nothing else ends a collective of NCCL that hangs
            # Those of gloo end only by themselves, at the group's timeout, and who drops the last
            # reference waits for them: not this thread.
            Thread(target=group.clear, name="gear-exchange-end", daemon=True).start()
        self._mesh.close()


def _own_group(mesh: Mesh, device: torch.device, timeout: timedelta) -> Any:
    """Return a process group that no one else uses.

    Its collectives do not queue behind the gradients'.  It is made here and not by
    `torch.distributed.new_group`, which gives the groups of some of the ranks the same name again
    after one was closed, and lets them meet at addresses that are no longer valid.
    """
    store = dist.PrefixStore(f"gear-offline/{mesh.job}", dist.distributed_c10d._get_default_store())
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout * 2 + MARGIN  # ours comes first: this one ends the process
        return dist.ProcessGroupNCCL(store, mesh.rank, mesh.world, options)
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=mesh.address)]
    return dist.ProcessGroupGloo(store, mesh.rank, mesh.world, options)


def _rows_by(ranks: Int64Array, steps: Int64Array, world: int) -> Int64Array:
    """Return (world,) int64 rows of each rank."""
    return np.bincount(ranks, weights=steps, minlength=world).astype(np.int64)
