"""How the ranks of a job find each other: every rank says something, every rank reads it all.

What goes through a rendezvous is not secret and not trusted: addresses and names only.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from gear_offline.errors import GearError


class Rendezvous(Protocol):
    """Gathers short messages.

    Attributes
    ----------
    rank, world
        This rank, and how many there are.
    """

    rank: int
    world: int

    def gather(self, name: str, value: bytes, *, timeout: timedelta) -> list[bytes]:
        """Return the `value` of each rank under `name`, by rank; all call it, in the same order.

        Raises
        ------
        GearError
            ``EXCHANGE_PEER`` naming who did not come within `timeout`.
        """
        ...


class FolderRendezvous:
    """Through an empty folder that all ranks see; needs no torch.

    Parameters
    ----------
    folder
        Made if it is not there.  Use a new one for each job.
    rank, world
        This rank, and how many there are.
    """

    POLL_SECONDS = 0.005

    def __init__(self, folder: str | Path, *, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._turns = 0

    def gather(self, name: str, value: bytes, *, timeout: timedelta) -> list[bytes]:
        """Return the `value` of each rank under `name`; `timeout` as in `Rendezvous.gather`."""
        stem = f"{self._turns:04d}-{name}"
        self._turns += 1
        draft = self._folder / f".{stem}.{self.rank}.{os.getpid()}"
        draft.write_bytes(value)
        draft.rename(self._folder / f"{stem}.{self.rank}")  # others see it whole or not at all
        deadline = time.monotonic() + timeout.total_seconds()
        paths = [self._folder / f"{stem}.{rank}" for rank in range(self.world)]
        while missing := [rank for rank, path in enumerate(paths) if not path.exists()]:
            if time.monotonic() > deadline:
                raise absent(missing, timeout)
            time.sleep(self.POLL_SECONDS)
        return [path.read_bytes() for path in paths]


class GroupRendezvous:
    """Through a torch process group of any backend.

    Parameters
    ----------
    group
        Process group; its ranks are the exchange's ranks.
    device
        Device of its tensors.
    """

    def __init__(self, group: Any, device: Any) -> None:
        import torch.distributed as dist

        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self._group, self._device = group, device

    def gather(self, name: str, value: bytes, *, timeout: timedelta) -> list[bytes]:
        import torch
        import torch.distributed as dist

        try:
            size = torch.tensor([len(value)], dtype=torch.int64, device=self._device)
            sizes = [torch.zeros_like(size) for _ in range(self.world)]
            dist.all_gather(sizes, size, group=self._group)
            lengths = [int(s) for s in sizes]
            padded = torch.zeros(max(*lengths, 1), dtype=torch.uint8, device=self._device)
            padded[: len(value)] = torch.frombuffer(bytearray(value or b"\0"), dtype=torch.uint8)[
                : len(value)
            ].to(padded.device)
            every = [torch.zeros_like(padded) for _ in range(self.world)]
            dist.all_gather(every, padded, group=self._group)
        except RuntimeError as error:
            raise GearError(
                "EXCHANGE_PEER",
                f"the ranks did not meet over torch.distributed: {error}",
                remedy="look at the other ranks' messages, and at the network between them",
            ) from error
        return [bytes(e[:n].cpu().numpy()) for e, n in zip(every, lengths, strict=True)]


def absent(ranks: list[int], timeout: timedelta) -> GearError:
    """Return the error that names ranks which did not come."""
    names = ", ".join(str(rank) for rank in ranks)
    return GearError(
        "EXCHANGE_PEER",
        f"rank {names} did not join within {timeout.total_seconds():g} s",
        remedy="look at the messages of that rank, and at the network to its node",
    )
