"""The processes of one training run: who they are, on which nodes, and small words between them.

Processes are started by ``torchrun``, which also restarts them.  Words between them are JSON over
gloo, so that nothing unpickles what came over a network.

Shape legend: W ranks.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gear_offline.distributed.exchange.addresses import address_of
from gear_offline.distributed.joining import private_store
from gear_offline.distributed.roll_call import RollCall, missing_ranks
from gear_offline.errors import GearError, InputError

__all__ = ["World", "joined_world", "open_world"]

T = TypeVar("T")
_untyped: Any = dist  # names that torch does not export for type checkers
INTERFACE_VARIABLE = "GEAR_OFFLINE_INTERFACE"
# what gloo's errors, which have no class of their own, say of lost and silent ranks
_LOST = re.compile(r"gloo|nccl|connection|timed? ?out|peer|socket|recv|broken pipe", re.IGNORECASE)
TIMEOUT_SECONDS = 600.0  # longer than an evaluation between two steps


@dataclass(frozen=True, kw_only=True, eq=False)
class World:
    """The ranks of a run; `World()` is a single process.

    Attributes
    ----------
    rank
        This process, from 0.
    nodes
        (W,), the node of each rank, from 0.
    control
        gloo group of all ranks, for words and tensors in host memory; ``None`` when alone.
    cards
        (W,), how each rank is asked whether it is there; empty when alone.
    timeout
        Seconds after which a silent rank counts as lost.
    feeds
        Whether this process reads data.  One that does not stands beside rank `rank`, whose batch
        it works on; see `gear_offline.distributed.data_ranks`.
    """

    rank: int = 0
    nodes: tuple[int, ...] = (0,)
    control: Any = field(default=None, repr=False)
    cards: tuple[str, ...] = field(default=(), repr=False)
    timeout: float = TIMEOUT_SECONDS
    feeds: bool = True

    @property
    def size(self) -> int:
        """W."""
        return len(self.nodes)

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes files and speaks."""
        return self.rank == 0

    @property
    def leader(self) -> int:
        """The first rank of this rank's node."""
        return self.nodes.index(self.nodes[self.rank])

    @property
    def node_count(self) -> int:
        """Nodes of all ranks."""
        return len(set(self.nodes))

    def share(self, batch_size: int) -> int:
        """Return B, this rank's segments of a global batch.

        Raises
        ------
        InputError
            ``BATCH_SHARE`` if ranks cannot have equal shares.
        """
        if batch_size % self.size:
            raise InputError(
                "BATCH_SHARE",
                f"a batch of {batch_size} segments cannot be shared equally by {self.size} ranks",
                where="loader.batch_size",
                remedy=f"use a multiple of {self.size}; it is the size of the global batch",
            )
        return batch_size // self.size

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's `value`, JSON-able, in the order of ranks."""
        if self.size == 1:
            return [value]
        mine = json.dumps(value).encode()
        with self.guard("exchanging a word"):
            lengths = [torch.zeros(1, dtype=torch.int64) for _ in self.nodes]
            dist.all_gather(lengths, torch.tensor([len(mine)]), group=self.control)
            longest = max(int(length) for length in lengths)
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
            found = [torch.zeros_like(padded) for _ in self.nodes]
            dist.all_gather(found, padded, group=self.control)
        sizes = zip(found, lengths, strict=True)
        return [json.loads(bytes(t[: int(n)].tolist())) for t, n in sizes]

    def lead(self, make: Callable[[], T], *, leader: int = 0) -> T | None:
        """Run `make` on `leader` (of each rank's choice) while the others wait for it.

        Returns
        -------
        T or None
            What `make` returned; ``None`` on the other ranks.

        Raises
        ------
        GearError
            The leader's error on the leader, ``RANK_FAILED`` on those that waited for it.
        """
        found: T | None = None
        error: Exception | None = None
        if self.rank == leader:
            try:
                found = make()
            except Exception as caught:
                error = caught
        failures = self.gather(None if error is None else str(error))
        if error is not None:
            raise error
        if failures[leader] is not None:
            raise GearError(
                "RANK_FAILED",
                f"rank {leader} failed: {failures[leader]}",
                remedy="see its own message",
            )
        return found

    def guard(self, doing: str) -> AbstractContextManager[None]:
        """Return `peers` for work that other ranks take part in."""
        return nullcontext() if self.size == 1 else peers(doing, self.cards, rank=self.rank)

    def sum_into(self, tensor: Tensor) -> None:
        """Add up a tensor over all ranks, in place, wherever it lies."""
        if self.size > 1:
            group = None if tensor.is_cuda else self.control
            with self.guard("adding up"):
                dist.all_reduce(tensor, group=group)

    def send_tensors(self, tensors: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        """Return rank 0's named tensors on every rank, in host memory.

        Parameters
        ----------
        tensors
            On rank 0; ``None`` elsewhere.
        """
        names = [[n, str(t.dtype)[6:], list(t.shape)] for n, t in (tensors or {}).items()]
        described = self.gather(names if self.is_first else None)[0]
        found = {}
        for name, dtype, shape in described:
            if self.is_first and tensors is not None:
                value = tensors[name].detach().cpu().contiguous()
            else:
                value = torch.empty(shape, dtype=getattr(torch, dtype))
            if self.size > 1 and value.numel():
                with self.guard("sending the state of the run"):
                    flat = value.reshape(-1).view(torch.uint8)
                    dist.broadcast(flat, src=0, group=self.control)
            found[name] = value
        return found

    def gather_tensor(self, tensor: Tensor) -> list[Tensor]:
        """Return every rank's tensor, of one shape, in host memory."""
        mine = tensor.detach().cpu().contiguous()
        if self.size == 1:
            return [mine]
        found = [torch.empty_like(mine) for _ in self.nodes]
        with self.guard("collecting tensors"):
            dist.all_gather(found, mine, group=self.control)
        return found


@contextmanager
def peers(doing: str, cards: Sequence[str] = (), *, rank: int = 0) -> Iterator[None]:
    """Turn the errors of lost or silent ranks into one that names them.

    Parameters
    ----------
    doing
        What was going on, for the message.
    cards, rank
        Of the world, and this one; without cards torch's message has to do, which names an address.

    Raises
    ------
    GearError
        ``RANK_LOST``
    """
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and not _LOST.search(str(error)):
            raise
        who = "; ".join(missing_ranks(cards, but=rank)) or "another rank is gone or too slow"
        raise GearError(
            "RANK_LOST",
            f"{who}, while {doing}: {_short(error)}",
            remedy="see the messages of the other ranks; torchrun --max-restarts goes on from the "
            "last checkpoint with --resume; train.timeout says how long to wait",
        ) from error


def _short(error: RuntimeError) -> str:
    """Return torch's message without where in its sources it was made, and without its advice."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return re.sub(r"^\[[^]]*\.cc:\d+\] ", "", lines[0]).split(". ")[0]


@contextmanager
def open_world(device: torch.device, *, timeout: float = TIMEOUT_SECONDS) -> Iterator[World]:
    """Join the other processes that ``torchrun`` started; a world of one without it.

    Parameters
    ----------
    device
        Where this rank trains; NCCL connects CUDA devices, gloo the rest.
    timeout
        Seconds after which a silent rank counts as lost.

    Raises
    ------
    GearError
        ``RANK_LOST``
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        yield World()
        return
    limit = timedelta(seconds=timeout)
    address = _own_address()
    with peers("joining the group"):
        store, rank, size = next(_untyped.rendezvous("env://", timeout=limit))
        store = private_store(store, rank=rank, size=size, timeout=timeout)
        group: dict[str, Any] = {"store": store, "rank": rank, "world_size": size}
        if device.type == "cuda":
            torch.cuda.set_device(device)
            dist.init_process_group("nccl", timeout=limit, device_id=device, **group)
            control = dist.new_group(backend="gloo", timeout=limit)
        else:
            dist.init_process_group("gloo", timeout=limit, **group)
            control = dist.group.WORLD
    roll_call = RollCall(address, ranks=size)
    alone = World(rank=rank, nodes=(0,) * size, control=control, timeout=timeout)
    try:
        words = alone.gather([int(os.environ.get("GROUP_RANK", "0")), roll_call.card])
        numbers = sorted({node for node, _ in words})
        nodes = tuple(numbers.index(node) for node, _ in words)
        cards = tuple(card for _, card in words)
        yield replace(alone, nodes=nodes, cards=cards)
    finally:
        roll_call.close()
        dist.destroy_process_group()


def joined_world() -> World:
    """Return the ranks of a group that someone else made, such as a Hugging Face `Trainer`.

    All ranks call it together, once.  Without a group it is a world of one.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return World()
    with peers("joining the group"):
        backend = dist.get_backend()
        control = dist.group.WORLD if backend == "gloo" else dist.new_group(backend="gloo")
        alone = World(rank=dist.get_rank(), nodes=(0,) * dist.get_world_size(), control=control)
        found = alone.gather(int(os.environ.get("GROUP_RANK", "0")))
    numbers = sorted(set(found))
    return replace(alone, nodes=tuple(numbers.index(node) for node in found))


def _own_address() -> str:
    """Return the address that other ranks reach this one at.

    ``GEAR_OFFLINE_INTERFACE`` names the interface for everything, unless torch is told another one.
    """
    interface = os.environ.get(INTERFACE_VARIABLE)
    if interface:
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, interface)
        return address_of(interface)
    alone = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
    return "127.0.0.1" if alone else address_of(None)


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Make a GPU torch's current one inside: streams and graphs are made for that one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def rank_device(name: str | torch.device) -> torch.device:
    """Return a rank's own device for ``"cuda"``: the one of its number on the node.

    Raises
    ------
    InputError
        ``RANK_DEVICE`` if the node has fewer GPUs than ranks.
    """
    device = torch.device(name)
    if device.type != "cuda" or device.index is not None:
        return device
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if local >= torch.cuda.device_count():
        raise InputError(
            "RANK_DEVICE",
            f"rank {local} of this node has no GPU, there are {torch.cuda.device_count()}",
            where="--nproc-per-node",
            remedy="start at most one process for each GPU, or set train.device=cpu",
        )
    return torch.device("cuda", local)
