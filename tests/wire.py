"""Ranks that are threads of one process, and the collectives between them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from gear_offline.distributed.world import World


class Wire:
    """Adds up or collects what the threads of one process give, each a rank; nothing before a wait.

    Attributes
    ----------
    launched
        Of each rank, lengths of what it gave, and how many gradients were ready by then.
    """

    def __init__(self, ranks: int, *, nodes: int = 2) -> None:
        self.ranks, self.nodes, self.given = ranks, nodes, threading.Condition()
        self.sent: list[list[Tensor]] = [[] for _ in range(ranks)]
        self.words: list[list[object]] = [[] for _ in range(ranks)]
        self.launched: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
        self.ready = [0] * ranks
        self.place = threading.local()

    def all_reduce(self, tensor: Tensor, *, async_op: bool = False) -> Wire.Work | None:
        def finish(sent: list[Tensor]) -> None:
            tensor.copy_(torch.stack(sent).sum(0))

        return self._give(tensor, finish, async_op=async_op)

    def _give(
        self, tensor: Tensor, finish: Callable[[list[Tensor]], object], *, async_op: bool
    ) -> Wire.Work | None:
        rank: int = self.place.rank
        self.launched[rank].append((tensor.numel(), self.ready[rank]))
        with self.given:
            self.sent[rank].append(tensor.clone())
            self.given.notify_all()
        work = Wire.Work(self, finish, len(self.sent[rank]))
        if async_op:
            return work
        work.wait()
        return None

    def count(self, rank: int) -> None:
        self.ready[rank] += 1

    def gather(self, word: object) -> list[object]:
        mine = self.words[self.place.rank]
        with self.given:
            mine.append(word)
            self.given.notify_all()
            assert self.given.wait_for(
                lambda: all(len(words) >= len(mine) for words in self.words), timeout=20
            )
        return [words[len(mine) - 1] for words in self.words]

    class Work:
        def __init__(
            self, wire: Wire, finish: Callable[[list[Tensor]], object], number: int
        ) -> None:
            self.wire, self.finish, self.number = wire, finish, number

        def wait(self) -> None:
            wire = self.wire
            with wire.given:
                assert wire.given.wait_for(
                    lambda: all(len(sent) >= self.number for sent in wire.sent), timeout=20
                )
            self.finish([sent[self.number - 1] for sent in wire.sent])

    def run(self, work: Callable[[int, World], None]) -> None:
        """Do something on each rank, in a thread of its own."""

        def begin(rank: int) -> None:
            self.place.rank = rank
            world = SimpleNamespace(
                rank=rank,
                size=self.ranks,
                node_count=self.nodes,
                gather=self.gather,
                guard=lambda _: nullcontext(),
            )
            work(rank, cast(World, world))

        with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(self.ranks) as pool:
            patch.setattr("torch.distributed.all_reduce", self.all_reduce)
            for done in [pool.submit(begin, rank) for rank in range(self.ranks)]:
                done.result(timeout=30)
