"""Processes that play the ranks of a job in tests of the exchange; torch only where it is used.

Shape legend: E episodes, N steps, S stores.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import subprocess
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gear_offline.distributed.exchange import (
    Exchange,
    FolderRendezvous,
    Piece,
    Reads,
    Shelf,
    open_exchange,
)
from gear_offline.distributed.exchange.mesh import THREAD_NAME
from gear_offline.errors import GearError

SECRET = b"a secret of sixteen or more bytes"
INTERFACE_VARIABLE = "GEAR_OFFLINE_RDMA_INTERFACE"
CLONE_NEWNET = 0x40000000
ANSWER_SECONDS = 90.0

ReadRow = tuple[int, int, int, int, int, int]  # reader, owner, episode, start, steps, row


@dataclass(frozen=True, kw_only=True)
class World:
    """A table and who holds what of it.

    Attributes
    ----------
    lengths
        Steps of each episode.
    row_bytes
        Of each store.
    holdings
        For each rank, the episodes of each of its pieces.
    """

    lengths: tuple[int, ...]
    row_bytes: tuple[int, ...]
    holdings: tuple[tuple[tuple[int, ...], ...], ...]

    @cache  # noqa: B019 - a few small tables a test run
    def content(self, store: int) -> npt.NDArray[np.uint8]:
        """Return (N, W) uint8 rows of a store over all episodes."""
        generator = np.random.default_rng([store, *self.lengths])
        shape = (sum(self.lengths), self.row_bytes[store])
        return generator.integers(0, 256, shape, dtype=np.uint8)

    def rows_of(self, store: int, episode: int) -> npt.NDArray[np.uint8]:
        first = sum(self.lengths[:episode])
        return self.content(store)[first : first + self.lengths[episode]]

    def shelf(self, rank: int) -> Shelf:
        pieces = []
        for episodes in self.holdings[rank]:
            rows = tuple(
                np.concatenate(
                    [np.empty((0, n), np.uint8), *(self.rows_of(store, e) for e in episodes)]
                )
                for store, n in enumerate(self.row_bytes)
            )
            pieces.append(Piece(episodes=np.array(episodes, np.int64), rows=rows))
        return Shelf(lengths=self.lengths, row_bytes=self.row_bytes, pieces=pieces)

    def expected(self, rank: int, rows: int, reads: Sequence[ReadRow]) -> list[bytes]:
        """Return what the destination holds afterwards: the naive way."""
        out = [np.full((rows, n), 255, np.uint8) for n in self.row_bytes]
        for reader, _, episode, start, steps, row in reads:
            for step in range(steps if reader == rank else 0):
                for store, buffer in enumerate(out):
                    buffer[row + step] = self.rows_of(store, episode)[start + step]
        return [buffer.tobytes() for buffer in out]


def reads_of(rows: Sequence[ReadRow]) -> Reads:
    columns = np.array(rows, np.int64).reshape(-1, 6).T
    names = ("readers", "owners", "episodes", "starts", "steps", "rows")
    return Reads.of(**dict(zip(names, columns, strict=True)))


@dataclass
class Player:
    """One rank, inside its process."""

    rank: int
    world: int
    transport: str
    folder: Path
    opened: int = 0
    memory: dict[str, Any] = field(default_factory=dict)

    def open(self, shelf: Shelf, *, seconds: float = 30.0, **options: Any) -> Exchange:
        """Open the transport under test."""
        self.opened += 1
        options = {"timeout": timedelta(seconds=seconds), "quiet": True, **options}
        if self.transport in ("collective", "nccl"):
            return open_exchange(shelf, mode="off", **options)
        rendezvous = FolderRendezvous(
            self.folder / str(self.opened), rank=self.rank, world=self.world
        )
        options = {"secret": SECRET, "interface": os.environ[INTERFACE_VARIABLE], **options}
        return open_exchange(shelf, mode="on", rendezvous=rendezvous, **options)

    def resources(self) -> dict[str, int]:
        """Count what an exchange could leave behind."""
        threads = [t for t in threading.enumerate() if t.name == THREAD_NAME]
        found = {"threads": len(threads), "files": len(os.listdir("/proc/self/fd"))}
        if self.transport == "verbs":  # of all ranks: memory regions, queue pairs, domains
            show = subprocess.run(["rdma", "-j", "resource"], capture_output=True, check=True)
            (device,) = json.loads(show.stdout)
            found |= {kind: device[kind] for kind in ("mr", "qp", "cq", "pd")}
        return found


@dataclass(frozen=True)
class Failure:
    """An exception of a rank."""

    code: str
    text: str
    trace: str


def _enter(namespace: str) -> None:
    """Move this process into a network namespace (`os.setns` comes with Python 3.12)."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as file:
        if libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")


def _play(
    pipe: Connection, rank: int, world: int, transport: str, folder: str, node: Node | None
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if node is not None:
        _enter(node.namespace)
        os.environ["GLOO_SOCKET_IFNAME"] = node.interface
    if transport in ("collective", "nccl"):
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        if transport == "nccl":
            torch.cuda.set_device(rank)
        dist.init_process_group(
            "nccl" if transport == "nccl" else "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=60),
        )
    player = Player(rank=rank, world=world, transport=transport, folder=Path(folder))
    pipe.send("ready")
    while (task := pipe.recv()) is not None:
        function, arguments = task
        try:
            pipe.send(function(player, *arguments))
        except GearError as error:
            pipe.send(Failure(error.code, str(error), traceback.format_exc()))
        except Exception as error:
            pipe.send(Failure(type(error).__name__, str(error), traceback.format_exc()))
    os._exit(0)  # a group with a dead member does not end in order


@dataclass(frozen=True)
class Node:
    """A network namespace that plays a node, and its interface to the others."""

    namespace: str
    interface: str


class Team:
    """The processes of all ranks; a context manager.

    Parameters
    ----------
    world
        How many.
    transport
        ``"collective"`` (over gloo), ``"nccl"`` (the same over NCCL) or ``"verbs"``.
    nodes
        Where the ranks live; by default all in this network.
    """

    def __init__(self, world: int, transport: str, nodes: Sequence[Node] = ()) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="gear-exchange-test-")
        context = multiprocessing.get_context("forkserver")
        loaded = ["torch.distributed"] if transport != "verbs" else []
        context.set_forkserver_preload(["tests.exchange_plays", *loaded])  # once, not a rank
        self.pipes: list[Connection] = []
        self.processes = []
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_play,
                args=(
                    *(theirs, rank, world, transport, self._folder.name),
                    nodes[rank] if nodes else None,
                ),
                daemon=True,
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        for rank in range(world):
            assert self._answer(rank) == "ready"

    def start(self, function: Callable[..., Any], *arguments: Any, rank: int) -> None:
        self.pipes[rank].send((function, arguments))

    def _answer(self, rank: int) -> Any:
        if not self.pipes[rank].poll(ANSWER_SECONDS):
            raise AssertionError(f"rank {rank} does not answer")
        try:
            return self.pipes[rank].recv()
        except EOFError:
            return None  # it is dead

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Run a function on every rank; return what each gave, `Failure` for an exception."""
        for rank in range(len(self.pipes)):
            self.start(function, *arguments, rank=rank)
        return [self._answer(rank) for rank in range(len(self.pipes))]

    def answers(self, ranks: Sequence[int]) -> list[Any]:
        return [self._answer(rank) for rank in ranks]

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes:
            assert process.pid is not None
            if process.is_alive():
                process.kill()
            process.join()
        for pipe in self.pipes:
            pipe.close()
        self._folder.cleanup()
