"""The processes of one training run: their ranks, their nodes and their small messages.

Processes are started by ``torchrun``, which also restarts them and names those that died.  Messages
are JSON over gloo, so that nothing unpickles what came over a network.

Shape legend: W ranks.
"""

from __future__ import annotations

import json
import math
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from gear_offline.core.text import show_error
from gear_offline.distributed import (
    INTERFACE_VARIABLE,
    check_meeting_place,
    environment_number,
    read_rank_and_size,
)
from gear_offline.errors import GearError, InputError, UnavailableError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")
TIMEOUT_SECONDS = 600.0  # longer than an evaluation between two steps
JOIN_PAUSE_SECONDS = 0.002
POLL_SECONDS = 100e-6
SIGN_SECONDS = 5.0  # between two signs of life of a rank that the others wait for
GONE = "another rank is gone or too slow"
GO_ON = "torchrun --max-restarts goes on from the last checkpoint with --resume"
DONE, WORKING = True, False  # how a rank stands that others may wait for; text: its error


@dataclass(frozen=True, kw_only=True, eq=False)
class World:
    """The ranks of a run; `World()` is a single process."""

    rank: int = 0  # of this process
    nodes: tuple[int, ...] = (0,)  # (W,), the node of each rank, from 0
    # gloo group of all ranks, for messages and tensors in host memory; None: torch's default group
    control: Any = field(default=None, repr=False)
    timeout: float = TIMEOUT_SECONDS  # after which a silent rank counts as lost
    feeds: bool = True  # it reads data; else it works on the batch of rank `rank`: `data_world`

    @property
    def size(self) -> int:
        return len(self.nodes)

    @property
    def is_first(self) -> bool:
        """True on the rank that writes files and prints."""
        return self.rank == 0

    @property
    def node(self) -> int:
        return self.nodes[self.rank]

    @property
    def members(self) -> list[int]:
        """The ranks of this rank's node."""
        return [rank for rank, node in enumerate(self.nodes) if node == self.node]

    @property
    def leader(self) -> int:
        """The first rank of this rank's node."""
        return self.nodes.index(self.node)

    @property
    def node_count(self) -> int:
        return len(set(self.nodes))

    def rank_batch(self, global_batch: int) -> int:
        """Return B, this rank's segments of a global batch."""
        if global_batch % self.size:
            problem = f"a batch of {global_batch} segments cannot be shared equally by "
            problem += f"{self.size} ranks"
            remedy = f"use a multiple of {self.size}; it is the size of the global batch"
            raise InputError("LOADER_OPTION", problem, "loader.batch_size", remedy)
        return global_batch // self.size

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's `value`, JSON-able, in the order of ranks."""
        if self.size == 1:
            return [value]
        message = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = [int(length) for length in self.gather_tensor(torch.tensor([len(message)]))]
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(message)] = message
        sizes = zip(self.gather_tensor(padded), lengths, strict=True)
        return [json.loads(text[:length].numpy().tobytes()) for text, length in sizes]

    def lead(self, make: Callable[[], T], *, leader: int = 0) -> T | None:
        """Return the result of `make` on `leader` (of each rank's choice), ``None`` on the others.

        They wait as long as it works and lives; ranks that wait for it take part in nothing else.
        An error of the leader is its own there, and ``RANK_FAILED`` on those that waited for it.
        """
        result: T | None = None
        error: Exception | None = None
        if self.rank == leader:
            with self._signs_of_life():
                try:
                    result = make()
                except Exception as caught:
                    error = caught
        try:
            state = WORKING
            while state == WORKING:
                state = self.gather(DONE if error is None else str(error))[leader]
        finally:
            if error is not None:  # whatever became of the others
                raise error
        if state != DONE:
            problem = f"rank {leader} failed: {state}"
            raise GearError("RANK_FAILED", problem, remedy="see its own message")
        return result

    @contextmanager
    def _signs_of_life(self) -> Iterator[None]:
        """Signal repeatedly to the ranks that wait that this one still works."""
        done, pause = threading.Event(), min(SIGN_SECONDS, self.timeout / 4)

        def tell() -> None:
            with suppress(GearError):  # the main thread finds the same when it is done
                while self.size > 1 and not done.wait(pause):
                    self.gather(WORKING)

        thread = threading.Thread(target=tell, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def guard(self, doing: str) -> AbstractContextManager[None]:
        """Return `peers` for a collective call of this world's ranks."""
        return nullcontext() if self.size == 1 else peers(doing)

    def wait_for_gpu(
        self, event: Any, *, doing: str = "the GPU added up gradients", pause: float = POLL_SECONDS
    ) -> None:
        """Wait for a GPU's `event`, polled at every `pause`.

        NCCL's watchdog does not see the collectives of a CUDA graph: a GPU whose peers are gone
        waits in its kernel without end.  After `timeout` seconds the process ends with code 1 and
        ``RANK_LOST`` on stderr.  It cannot raise an error: neither the graph nor the process group
        can be closed while the GPU waits.
        """
        if self.size == 1:
            event.synchronize()
            return
        deadline = time.monotonic() + self.timeout
        while not event.query():
            if time.monotonic() > deadline:
                waited = f"waited {self.timeout:g} s"
                show_error("RANK_LOST", f"{GONE}, while {doing}: {waited}; {GO_ON}")
                sys.stderr.flush()
                os._exit(1)
            time.sleep(pause)

    def sum_into(self, tensor: Tensor) -> None:
        """Add up a tensor over all ranks, in place, wherever it lies."""
        if self.size > 1:
            group = None if tensor.is_cuda else self.control
            with self.guard("adding up"):
                dist.all_reduce(tensor, group=group)

    def send_tensors(self, tensors: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        """Return rank 0's named tensors (``None`` elsewhere) on every rank, in host memory."""
        names = [[n, str(t.dtype)[6:], list(t.shape)] for n, t in (tensors or {}).items()]
        described = self.gather(names if self.is_first else None)[0]
        received = {}
        for name, dtype, shape in described:
            if self.is_first and tensors is not None:
                value = tensors[name].detach().cpu().contiguous()
            else:
                value = torch.empty(shape, dtype=getattr(torch, dtype))
            if self.size > 1 and value.numel():
                flat = value.reshape(-1).view(torch.uint8)
                with self.guard("sending the state of the run"):
                    dist.broadcast(flat, group_src=0, group=self.control)
            received[name] = value
        return received

    def gather_tensor(self, tensor: Tensor) -> list[Tensor]:
        """Return every rank's tensor, of one shape, in host memory."""
        local = tensor.detach().cpu().contiguous()
        if self.size == 1:
            return [local]
        tensors = [torch.empty_like(local) for _ in self.nodes]
        with self.guard("exchanging a message"):
            dist.all_gather(tensors, local, group=self.control)
        return tensors


@contextmanager
def peers(doing: str) -> Iterator[None]:
    """Turn the failure of a collective call into ``RANK_LOST``, with torch's own text.

    Put nothing but collective calls inside: gloo's errors have no class of their own.
    """
    try:
        yield
    except RuntimeError as error:
        # Out of memory, CUDA errors and the like have classes; those of lost ranks are DistErrors
        # with NCCL and plain RuntimeErrors with gloo.
        if type(error) is not RuntimeError and not isinstance(error, dist.DistError):
            raise
        raise rank_lost(doing, error) from error


def rank_lost(doing: str, error: object) -> GearError:
    """Return ``RANK_LOST`` for a collective that failed with `error`."""
    # Without where in its sources torch made the message, and without its advice.
    text = re.sub(r"\[[^]]*\.cc:\d+\] ", "", str(error).strip()).splitlines() or [repr(error)]
    problem = f"{GONE}, while {doing}: {text[0].split('. ')[0]}"
    remedy = f"see the messages of the other ranks; {GO_ON}; train.timeout says how long to wait"
    return GearError("RANK_LOST", problem, remedy=remedy)


@contextmanager
def open_world(device: torch.device, *, timeout: float = TIMEOUT_SECONDS) -> Iterator[World]:
    """Join the other processes that ``torchrun`` started; a world of one without it.

    NCCL connects ranks whose `device` is a GPU, gloo the rest.  A rank that is silent for `timeout`
    seconds counts as lost (``RANK_LOST``).
    """
    if read_rank_and_size()[1] == 1 or dist.is_initialized():
        yield World()
        return
    check_meeting_place()
    if interface := os.environ.get(INTERFACE_VARIABLE):  # for everything, unless torch is told
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, interface)
    limit, untyped = timedelta(seconds=timeout), cast(Any, dist)
    with peers("joining the group"):
        store, rank, size = next(untyped.rendezvous("env://", timeout=limit))
        store = _fresh_store(store, rank, size, timeout)
        group: dict[str, Any] = {"store": store, "rank": rank, "world_size": size}
        if device.type == "cuda":
            torch.cuda.set_device(device)
            dist.init_process_group("nccl", timeout=limit, device_id=device, **group)
        else:
            dist.init_process_group("gloo", timeout=limit, **group)
    try:
        yield joined_world(timeout=timeout)
    finally:
        dist.destroy_process_group()


def _fresh_store(store: Any, rank: int, size: int, timeout: float) -> Any:
    """Return a part of torchrun's store that no earlier start of the ranks has written to.

    torch 2.13 keeps one store for all restarts, with the addresses of the dead in it.  Its agents
    do not count restarts alike: an agent does not count that its ranks were stopped because those
    of another node failed.  So rank 0 makes up a name and tells it to each rank of this start,
    which asks with a number that nobody has used before.
    """
    if rank:
        number = os.urandom(8).hex()
        store.set(f"gear-offline/here/{rank}", number)
        name = store.get(f"gear-offline/name/{number}").decode()  # waits until it is there
        store.set(f"gear-offline/{name}/{rank}", b"1")
        return cast(Any, dist).PrefixStore(f"gear-offline/{name}", store)
    name, missing = os.urandom(8).hex(), list(range(1, size))
    answered: dict[int, bytes] = {}  # also numbers of the dead, until the living write theirs
    deadline = time.monotonic() + timeout
    while missing:
        for peer in missing:
            key = f"gear-offline/here/{peer}"
            if store.check([key]) and (peer_number := store.get(key)) != answered.get(peer):
                store.set(f"gear-offline/name/{peer_number.decode()}", name)
                answered[peer] = peer_number
        missing = [peer for peer in missing if not store.check([f"gear-offline/{name}/{peer}"])]
        if missing and time.monotonic() > deadline:
            raise rank_lost("joining the group", f"ranks {missing} have not come")
        time.sleep(JOIN_PAUSE_SECONDS)
    return cast(Any, dist).PrefixStore(f"gear-offline/{name}", store)


_JOINED: WeakKeyDictionary[Any, World] = WeakKeyDictionary()


def joined_world(*, timeout: float = TIMEOUT_SECONDS) -> World:
    """Return the ranks of torch's default process group, whoever made it; else a world of one.

    All ranks call it together the first time, which takes the `timeout`; later calls return the
    same world at once.  Processes that a launcher started (``WORLD_SIZE``) and that have not been
    joined into a group yet are ``LOADER_OPTION``: they would all read the same batches.
    """
    if not dist.is_available() or not dist.is_initialized():
        if (size := environment_number("WORLD_SIZE", 1) or 1) > 1:
            problem = f"this is one of {size} processes, and they have no process group yet"
            remedy = "make the loader after torch.distributed.init_process_group, or after your "
            remedy += "trainer has called it (Lightning: in train_dataloader); world=None reads "
            remedy += "the same batches in every process"
            raise InputError("LOADER_OPTION", problem, "WORLD_SIZE", remedy)
        return World()
    default = dist.group.WORLD
    if default not in _JOINED:
        size = dist.get_world_size()
        control = None
        if size > 1 and dist.get_backend() != "gloo":
            with peers("joining the group"):
                control = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        world = World(rank=dist.get_rank(), nodes=(0,) * size, control=control, timeout=timeout)
        _JOINED[default] = _with_nodes(world)
    return _JOINED[default]


def data_world(
    mesh: DeviceMesh, dims: str | Sequence[str] = "dp", *, timeout: float = TIMEOUT_SECONDS
) -> World:
    """Return the world of the ranks that feed a model's input, for `GearLoader`.

    With tensor or pipeline parallelism several ranks work on one batch.  The first of them in every
    dimension that is not data-parallel reads it; on the others `World.feeds` is false, and they
    read nothing.  All ranks of the job call it together.

    `mesh` is over all ranks, with named dimensions; `dims` are the data-parallel ones, e.g.
    ``("dp_replicate", "dp_shard")``.  Another mesh is ``LOADER_OPTION``.
    """
    names = tuple(mesh.mesh_dim_names or ())
    dim_names = (dims,) if isinstance(dims, str) else tuple(dims)
    if not dim_names or not set(dim_names) <= set(names):
        problem = f"the mesh has no dimension {', '.join(map(repr, set(dim_names) - set(names)))}"
        remedy = "name the data-parallel dimensions: data_world(mesh, dims=...)"
        raise InputError("LOADER_OPTION", problem, f"dimensions {list(names)}", remedy)
    grid = mesh.mesh
    if grid.numel() != dist.get_world_size():
        problem = f"the mesh has {grid.numel()} of {dist.get_world_size()} ranks"
        raise InputError("LOADER_OPTION", problem, remedy="use a mesh over all ranks")
    data = tuple(names.index(name) for name in dim_names)
    model_dims = tuple(dim for dim in range(len(names)) if dim not in data)
    replicas = math.prod(grid.shape[dim] for dim in data)
    rows = grid.permute(*data, *model_dims).reshape(replicas, -1)  # (W, ranks on one batch)
    readers = rows[:, 0].tolist()
    with peers("joining the group"):
        control = dist.new_group(readers, backend="gloo", timeout=timedelta(seconds=timeout))
    rank = int((rows == dist.get_rank()).any(1).nonzero())
    world = World(rank=rank, nodes=(0,) * len(readers), control=control, timeout=timeout)
    if dist.get_rank() not in readers:
        return replace(world, control=None, feeds=False)
    return _with_nodes(world)


def _with_nodes(world: World) -> World:
    """Number the nodes: by torchrun's group of ranks, else by the host's name."""
    names = world.gather(os.environ.get("GROUP_RANK") or socket.gethostname())
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return replace(world, nodes=tuple(numbers[name] for name in names))


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Make a GPU torch's current one inside: streams and graphs are made for that one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def resolve_device(device: str | torch.device, *, where: str = "") -> torch.device:
    """Return the torch device; ``"auto"`` is CUDA where there is one; `where` the user said it."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
        if resolved.type not in ("cpu", "cuda", "mps"):
            raise TypeError("batches are made by a CPU or a GPU")
    except (RuntimeError, TypeError) as error:
        remedy = "use one that torch has here, such as 'auto', 'cpu', 'cuda' or 'cuda:0'"
        raise InputError("LOADER_OPTION", f"{device=} is not usable", where, remedy) from error
    is_here: Any = {"cuda": torch.cuda.is_available, "mps": torch.backends.mps.is_available}
    if resolved.type in is_here and not is_here[resolved.type]():
        name = resolved.type.upper()
        problem = f"device {str(device)!r} was asked for and no {name} device is available"
        remedy = f"use {where or 'device'}=auto or cpu, or run gear-offline doctor"
        raise UnavailableError("DEVICE", problem, where, remedy)
    return resolved


def rank_device(name: str | torch.device) -> torch.device:
    """Return a rank's own device for ``"cuda"``: the one of its number on the node."""
    device = torch.device(name)
    if device.type != "cuda" or device.index is not None:
        return device
    local = environment_number("LOCAL_RANK", 0) or 0
    if local >= torch.cuda.device_count():
        problem = f"rank {local} of this node has no GPU, there are {torch.cuda.device_count()}"
        remedy = "start at most one process for each GPU, or set train.device=cpu"
        raise InputError("DEVICE", problem, "--nproc-per-node", remedy)
    return torch.device("cuda", local)
