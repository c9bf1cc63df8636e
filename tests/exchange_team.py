"""Processes that play the ranks of a job in tests of the exchange; torch only where it is used.

Shape legend: E episodes, N steps.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast
from unittest import mock

import numpy as np
import numpy.typing as npt

from gear_offline.distributed import INTERFACE_VARIABLE
from gear_offline.distributed.rdma import Endpoint, RdmaExchange
from gear_offline.distributed.reads import NodeRows, Reads
from gear_offline.errors import GearError

ANSWER_SECONDS = 240.0
UNTOUCHED = 255  # bytes of landing memory before anything came
SPAN, BLOCKS, MOST_READS = 9, 4, 8  # of windows in a GPU's ring, for tests with episodes this long
Bytes = npt.NDArray[np.uint8]
ReadRow = tuple[int, int, int, int, int, int]  # reader, owner, episode, start, steps, row


@dataclass(frozen=True)
class FolderWorld:
    """Ranks without torch: messages are files."""

    rank: int
    nodes: tuple[int, ...]
    timeout: float
    folder: Path
    count: list[int] = field(default_factory=lambda: [0])

    @property
    def size(self) -> int:
        return len(self.nodes)

    def gather(self, value: Any) -> list[Any]:
        self.count[0] += 1
        files = [self.folder / f"{self.count[0]}-{rank}" for rank in range(self.size)]
        part = self.folder / f"part-{self.rank}"
        part.write_text(json.dumps(value))
        part.rename(files[self.rank])
        deadline = time.monotonic() + 60.0  # an emulated processor takes long to load pyverbs
        while not all(file.exists() for file in files):
            if time.monotonic() > deadline:
                raise GearError("RANK_LOST", "a message did not come")
            time.sleep(1e-3)
        return [json.loads(file.read_text()) for file in files]


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of episodes in column groups, and the node that holds each episode."""

    lengths: tuple[int, ...]
    nodes: tuple[int, ...]
    row_bytes: tuple[int, ...]

    def rows_of(self, group: int, episode: int) -> Bytes:
        generator = np.random.default_rng([group, episode])
        shape = (self.lengths[episode], self.row_bytes[group])
        return generator.integers(0, UNTOUCHED, shape, dtype=np.uint8)

    def held(self, node: int) -> NodeRows:
        here = [episode for episode, other in enumerate(self.nodes) if other == node]
        rows = tuple(
            np.concatenate([np.empty((0, n), np.uint8), *(self.rows_of(g, e) for e in here)])
            for g, n in enumerate(self.row_bytes)
        )
        return NodeRows(lengths=np.array(self.lengths), nodes=np.array(self.nodes), rows=rows)

    def landing(self, rows: int) -> tuple[Bytes, ...]:
        return tuple(np.full((rows, n), UNTOUCHED, np.uint8) for n in self.row_bytes)

    def expected(self, rank: int, rows: int, steps: Sequence[Sequence[ReadRow]]) -> list[bytes]:
        """Return what lands: the naive way."""
        out = self.landing(rows)
        for reader, _, episode, start, count, row in (read for reads in steps for read in reads):
            for step in range(count if reader == rank else 0):
                for group, landing in enumerate(out):
                    landing[row + step] = self.rows_of(group, episode)[start + step]
        return [landing.tobytes() for landing in out]


def reads_of(rows: Sequence[ReadRow]) -> Reads:
    columns = np.array(rows, np.int64).reshape(-1, 6).T
    names = ("readers", "owners", "episodes", "starts", "steps", "rows")
    return Reads(**dict(zip(names, columns, strict=True)))


class Windows:
    """An exchange between GPUs as the tests use one: a block's windows are copied to its rows."""

    def __init__(self, held: NodeRows, landing: tuple[Bytes, ...], world: Any, device: str) -> None:
        import torch

        from gear_offline.distributed.exchange import open_exchange
        from gear_offline.distributed.nccl import NcclExchange
        from gear_offline.kernels.columns import ColumnGroup, Field, GroupAddresses
        from gear_offline.kernels.gather_gpu import GpuGather

        self.rank, self.landing, self.device = world.rank, landing, device
        here = held.nodes == world.node
        rows = [torch.from_numpy(group).to(device) for group in held.rows]
        groups = []
        for kept, group in zip(rows, held.rows, strict=True):
            field = Field(name="states", dtype=group.dtype, shape=group.shape[1:])
            firsts = np.where(here, held.first_rows(), 0) * group.shape[1]
            both = ColumnGroup(fields=(field,), rows=group)
            groups.append(GroupAddresses(group=both, addresses=kept.data_ptr() + firsts))
        offsets = np.append(0, np.cumsum(held.lengths))
        place = torch.device(device)
        engine = GpuGather(
            groups, offsets, device=place, context_length=SPAN, rank_batch=1, keep=rows
        )
        windows = BLOCKS * MOST_READS
        if device == "cpu":
            self.exchange: Any = NcclExchange(engine, world, span=SPAN, windows=windows)
        else:
            places: dict[str, Any] = {"engine": engine, "span": SPAN, "windows": windows}
            self.exchange = open_exchange(held, landing, world, road="auto", **places)
            assert isinstance(self.exchange, NcclExchange)
        self.posted: dict[int, Reads] = {}

    def post(self, block: int, reads: Reads) -> None:
        reads = reads.take(np.lexsort((reads.owners, reads.readers)))
        turn = np.arange(len(reads)) - np.searchsorted(reads.readers, reads.readers)
        windows = (block % BLOCKS) * MOST_READS + turn
        self.posted[block] = reads.take(np.flatnonzero(reads.readers == self.rank))
        self.exchange.post(block, Reads(**{**vars(reads), "rows": windows * SPAN}))

    def wait(self, block: int) -> None:
        import torch

        self.exchange.wait(block)
        if self.device != "cpu":
            torch.cuda.synchronize()
        own = self.posted.pop(block)
        for group, ring in zip(self.landing, self.exchange.ring, strict=True):
            landed = ring[(block % BLOCKS) * MOST_READS :].cpu().numpy()
            for window, row, steps in zip(landed, own.rows, own.steps, strict=False):
                group[row : row + steps] = window[:steps]

    def close(self) -> None:
        self.exchange.close()


class Player:
    """One rank, inside its process."""

    def __init__(self, rank: int, nodes: tuple[int, ...], transport: str, folder: str) -> None:
        self.rank, self.nodes, self.transport = rank, nodes, transport
        self.folder, self.opened = Path(folder), 0
        self.exchange: Any = None
        self.landing: tuple[Bytes, ...] = ()

    def open(self, table: Table, rows: int, *, seconds: float = 30.0, road: str = "gloo") -> None:
        """Open the transport under test into new landing memory."""
        held, self.landing = table.held(self.nodes[self.rank]), table.landing(rows)
        self.opened += 1
        if self.transport != "rdma":
            from gear_offline.distributed.exchange import open_exchange
            from gear_offline.distributed.world import World

            world = World(rank=self.rank, nodes=self.nodes, timeout=seconds)
            if self.transport == "gloo":
                self.exchange = open_exchange(held, self.landing, world, road=cast(Any, road))
            else:
                device = "cpu" if self.transport == "packed" else f"cuda:{self.rank}"
                self.exchange = Windows(held, self.landing, world, device)
            return
        folder = self.folder / str(self.opened)
        folder.mkdir(exist_ok=True)
        messages = FolderWorld(self.rank, self.nodes, seconds, folder)
        endpoint = Endpoint.open(timeout=seconds)
        self.exchange = RdmaExchange(held, self.landing, messages, endpoint)


@dataclass(frozen=True)
class Failure:
    """An exception of a rank."""

    code: str
    text: str
    trace: str
    seconds: float


def _play(
    pipe: Connection, rank: int, nodes: tuple[int, ...], transport: str, folder: str, kernels: str
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    said = os.open(f"{folder}/said-{rank}", os.O_WRONLY | os.O_CREAT)
    if transport == "nccl":
        import torch

        os.dup2(said, 2)
        torch.cuda.set_device(rank)
    if transport == "packed":
        import torch

        from tests.kernels_on_cpu import Kernels, on_cpu

        patches = on_cpu(Kernels(ctypes.CDLL(kernels)))
        patches.__enter__()
        mock.patch.object(torch.cuda, "Event", mock.Mock).start()
    if transport != "rdma":
        import torch.distributed as dist

        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=len(nodes),
            timeout=timedelta(seconds=30),
        )
    else:
        os.environ[INTERFACE_VARIABLE] = os.environ["GEAR_OFFLINE_RDMA_INTERFACE"]
    player = Player(rank, nodes, transport, folder)
    pipe.send("ready")
    while (task := pipe.recv()) is not None:
        function, arguments = task
        begin = time.monotonic()
        try:
            pipe.send(function(player, *arguments))
        except Exception as error:
            code = error.code if isinstance(error, GearError) else type(error).__name__
            seconds = time.monotonic() - begin
            pipe.send(Failure(code, str(error), traceback.format_exc(), seconds))
    os._exit(0)  # a group with a dead member does not end in order


class Team:
    """The processes of all ranks, each on its node, over ``"gloo"``, ``"rdma"`` or ``"nccl"``.

    ``"packed"`` is the code of ``"nccl"`` with collectives of gloo and `kernels` for the CPU.
    """

    def __init__(self, nodes: tuple[int, ...], transport: str, kernels: str = "") -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="gear-exchange-test-")
        context = multiprocessing.get_context("forkserver")
        loaded = ["pyverbs.qp"] if transport == "rdma" else ["torch.distributed"]
        context.set_forkserver_preload(["tests.exchange_team", *loaded])  # once, not a rank
        self.ranks, self.pipes, self.processes = range(len(nodes)), [], []
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        for rank in self.ranks:
            ours, theirs = context.Pipe()
            words = (theirs, rank, nodes, transport, self._folder.name, kernels)
            process = context.Process(target=_play, args=words, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        assert self.answers() == ["ready"] * len(nodes)

    def start(self, function: Callable[..., Any], *arguments: Any, rank: int) -> None:
        self.pipes[rank].send((function, arguments))

    def answers(self, ranks: Sequence[int] | None = None) -> list[Any]:
        found = []
        for rank in self.ranks if ranks is None else ranks:
            assert self.pipes[rank].poll(ANSWER_SECONDS), f"rank {rank} does not answer"
            found.append(self.pipes[rank].recv())
        return found

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Run a function on every rank; return what each gave, `Failure` for an exception."""
        for rank in self.ranks:
            self.start(function, *arguments, rank=rank)
        return self.answers()

    def ended(self, rank: int, seconds: float) -> tuple[int | None, str]:
        """Return the exit code of a rank that ends in time, and what it said."""
        self.processes[rank].join(seconds)
        return self.processes[rank].exitcode, Path(f"{self._folder.name}/said-{rank}").read_text()

    def kill(self, rank: int, number: signal.Signals = signal.SIGKILL) -> None:
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        for pipe in self.pipes:
            pipe.close()
        self._folder.cleanup()
