"""Ranks that are threads of one process, and the all-reduce between them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from gear_offline.distributed.world import World


class Wire:
    """Adds up what the threads of one process give, each a rank; nothing before a wait.

    `launched` has the lengths of what each rank gave.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks, self.given = ranks, threading.Condition()
        self.sent: list[list[Tensor]] = [[] for _ in range(ranks)]
        self.launched: list[list[int]] = [[] for _ in range(ranks)]
        self.place = threading.local()

    def all_reduce(self, tensor: Tensor, *, async_op: bool) -> SimpleNamespace:
        assert async_op, "the host does not wait"
        sent = self.sent[self.place.rank]
        self.launched[self.place.rank].append(tensor.numel())
        with self.given:
            sent.append(tensor.clone())
            self.given.notify_all()
        number = len(sent)

        def wait() -> None:
            with self.given:
                assert self.given.wait_for(
                    lambda: all(len(sent) >= number for sent in self.sent), timeout=20
                )
            tensor.copy_(torch.stack([sent[number - 1] for sent in self.sent]).sum(0))

        return SimpleNamespace(wait=wait)

    def run(self, work: Callable[[int, World], None]) -> None:
        """Do something on each rank, in a thread of its own."""

        def begin(rank: int) -> None:
            self.place.rank = rank
            work(rank, cast(World, SimpleNamespace(rank=rank, size=self.ranks)))

        with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(self.ranks) as pool:
            patch.setattr("torch.distributed.all_reduce", self.all_reduce)
            for done in [pool.submit(begin, rank) for rank in range(self.ranks)]:
                done.result(timeout=30)
