"""The tier of each episode (`hbm`, `peer` or `host`), behind one address table.

A gather needs the address of each episode's first row and nothing else, so any mix of tiers is one
launch.  `place_table` decides which GPU owns each episode, copies this GPU's share, packed group by
group, pins what stays in host memory, and writes down the addresses.

A table that fits lies in every GPU.  The hottest episodes of a larger one are dealt out to the
GPUs of the node, which read each other's memory over NVLink.  The rest is read in place from pinned
host memory.  Spreading tables over linked GPUs by how often rows are read is the idea of Quiver
(Tan et al. 2023, arXiv:2305.10863); here the probabilities are the sampler's, known exactly.

Shape legend: E episodes, G GPUs of the node.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from gear_offline.batches.tables.device import DeviceMemory, Pinned, too_large
from gear_offline.batches.tables.table import CHUNK_BYTES, Lend, Table, private_rows
from gear_offline.core.text import size_text
from gear_offline.core.types import Array, BoolArray, Float64Array, Int64Array
from gear_offline.errors import GearError, InputError, together
from gear_offline.kernels.columns import GroupAddresses

Placement = Literal["auto", "hbm", "peer", "host"]
Read = Callable[[Lend | None], Table]  # reads rows into what is lent; without it, into a table
HOST = -1  # the owner of an episode that is read from pinned host memory

HBM_SHARE = 0.6  # of the free GPU memory: model, optimiser and activations need the rest
ALIGNMENT_BYTES = 256  # of each group in GPU memory, as CUDA's own allocations
STAGING_BYTES = 64 << 20  # scattered episodes are packed into pieces of this size and copied


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The processes that place one table together, one a GPU."""

    rank: int = 0  # this one
    nodes: tuple[int, ...] = (0,)  # of each rank
    # Returns every rank's JSON-able value, in their order; all ranks call it together.
    gather: Callable[[Any], list[Any]] = lambda value: [value]

    @property
    def neighbours(self) -> list[int]:
        """The ranks on this rank's node."""
        return [r for r, node in enumerate(self.nodes) if node == self.nodes[self.rank]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Spread:
    """A dataset of which each node's table has some episodes."""

    lengths: Int64Array  # (E,) steps of every episode
    nodes: Int64Array  # (E,) the node that holds it


@dataclass(frozen=True, kw_only=True, eq=False)
class PlacedTable:
    """A table whose rows a GPU can read; it holds the memory that the addresses point to.

    That is let go of with the table, when the GPU has done its work.
    """

    groups: tuple[GroupAddresses, ...]  # their rows are empty where none is read from host memory
    no_peers: str | None  # why rows of other nodes have no addresses; None: they have
    device: torch.device
    owners: Int64Array  # (E,) which of the GPUs that share the table holds an episode, or `HOST`
    hbm_bytes: int  # of rows in this GPU's memory
    reason: str  # the decision in one line
    kept: list[Any] = field(repr=False)  # the device, then all that addresses point to

    def __post_init__(self) -> None:
        # At the end of the process the driver frees everything.
        weakref.finalize(self, _release, self.kept).atexit = False

    @property
    def reads_host(self) -> bool:
        """True if some rows lie in host memory."""
        return bool((self.owners == HOST).any())


def _release(allocations: list[Any]) -> None:
    memory, *_ = allocations
    memory.wait()
    allocations.clear()


def place_table(
    table: Table,
    memory: DeviceMemory,
    *,
    placement: Placement = "auto",
    hbm_budget: int | None = None,
    episode_weight: npt.ArrayLike | None = None,
    ranks: Ranks | None = None,
    landing: bool = False,
    before: PlacedTable | None = None,
    spread: Spread | None = None,
    read: Read | None = None,
) -> PlacedTable:
    """Bring a table's rows into memory that a GPU can read.

    ``"hbm"``: all in GPU memory.  ``"host"``: all read in place from pinned host memory.
    ``"peer"``: parted over the GPUs of the node, which read each other's memory.  ``"auto"``: all
    in GPU memory if that fits the budget (`HBM_SHARE` of what is free), else the hottest episodes,
    parted over the node's GPUs if there are several.  `episode_weight` (E,) is how often each is
    drawn, in any unit; by default its length.  All `ranks` call this together, with the same
    options; what other GPUs have mapped stays in this one's memory until the process ends.  With
    `landing` the landing rows are pinned, too.  The first episodes of a table that has grown stay
    where they were `before`, if all of them and the new ones have room in the memory of one GPU.

    A table without rows is `read` when it is known where they go.  If all go to this GPU and no
    other one maps them, they are read piece by piece into its memory, and the host never has them.
    Else they are read into host memory and placed from there.
    """
    ranks = Ranks() if ranks is None else ranks
    if placement == "peer" and min(ranks.nodes.count(node) for node in ranks.nodes) == 1:
        problem = "placement 'peer' needs several GPUs of one node"
        remedy = "start one process a GPU with torchrun, or use 'auto'"
        raise InputError("LOADER_OPTION", problem, remedy=remedy)
    collective = placement in ("auto", "peer") and len(ranks.nodes) > 1  # the same on every rank
    is_apart = table.episodes.histories is not None  # a history would go on elsewhere
    if before is not None and (collective or before.reads_host or is_apart):
        before = None
    bytes_before = 0 if before is None else before.hbm_bytes
    budget = _budget(memory, placement, hbm_budget, bytes_before, ranks, collective=collective)
    sizes = table.episodes.lengths * table.row_bytes
    if episode_weight is None:
        weights = table.episodes.lengths.astype(np.float64)
    else:
        weights = np.asarray(episode_weight, np.float64)[table.order]
    assert weights.shape == sizes.shape, "the sampler was made for these episodes"

    # Who owns each episode; a history is read from one place.
    facts, whole = (sizes, weights), np.arange(len(sizes))
    if table.episodes.histories is not None:
        whole = np.unique(table.episodes.histories, return_inverse=True)[1]
        sums = [np.bincount(whole, values).astype(np.float64) for values in facts]
        facts = sums[0].astype(np.int64), sums[1]
    gaps = ALIGNMENT_BYTES * len(table.groups)
    total_bytes = int(sizes.sum()) + gaps
    gpus, owners = [ranks.rank], np.zeros(len(sizes), np.int64)
    if placement == "hbm" and total_bytes > budget:
        source = "free on the device" if hbm_budget is None else "the given budget"
        raise too_large(total_bytes, budget, source)
    if placement == "host":
        owners[:], before = HOST, None
    elif placement == "peer" or total_bytes > budget:
        gpus = ranks.neighbours
        owners, before = deal_out(*facts, budget - bytes_before - gaps, len(gpus))[whole], None

    no_peers: str | None = "not asked for"
    if spread is not None:  # the answer is the same on every rank
        is_whole = ranks.gather(len(gpus) == 1 and not (owners == HOST).any())
        no_peers = None
        if not all(is_whole):
            no_peers = f"rank {is_whole.index(False)} has not all its rows in GPU memory"
    is_mapped = no_peers is None
    collective = collective or is_mapped
    is_shared = len(gpus) > 1 or is_mapped
    if read is not None and (is_shared or before is not None or (owners == HOST).any()):
        table, read = read(None), None

    # Copy this GPU's share, without the rows it has from `before`, and pin the host's.
    is_new = np.arange(len(owners)) >= (0 if before is None else len(before.owners))
    lengths = table.episodes.lengths
    shares = [_Share.of(table, lengths, is_new & (owners == gpu)) for gpu in range(len(gpus))]
    position = gpus.index(ranks.rank)
    allocations = [memory, *([] if before is None else before.kept)]

    def bring() -> tuple[int, str]:
        if placement == "peer" and (owners == HOST).any():
            raise too_large(total_bytes, budget * len(gpus), f"free on {len(gpus)} GPUs")
        return _upload(table, shares[position], memory, allocations, read, shared=is_shared)

    brought = together(ranks.gather, bring) if collective else [bring()]
    base, _ = brought[ranks.rank if collective else 0]
    bases = [base if r == ranks.rank else memory.open_shared(brought[r][1]) for r in gpus]
    others = dict[int, int]()
    if is_mapped:
        others, no_peers = _open_nodes(memory, ranks, [handle for _, handle in brought])

    def pin() -> list[int]:
        lands, in_host = landing and no_peers is not None, bool((owners == HOST).any())
        return _pin(table, memory, allocations, in_host=in_host, landing=lands)

    row_zeros = together(ranks.gather, pin)[ranks.rank] if collective else pin()
    limit = f"budget {size_text(budget)}{' a GPU' if len(gpus) > 1 else ''}"
    groups = _address_groups(table, row_zeros, bases, shares, owners, before)
    if spread is not None and no_peers is None:
        groups = _address_nodes(groups, table, spread, others)
        limit += ", other nodes' in the memory of their GPUs"
    return PlacedTable(
        groups=groups,
        no_peers=no_peers,
        device=memory.device,
        owners=owners,
        hbm_bytes=int(sizes[owners == position].sum()),
        reason=f"placement {placement}: {_places(sizes, weights, owners, len(gpus))} ({limit})",
        kept=allocations,
    )


def _address_groups(
    table: Table,
    row_zeros: Sequence[int],
    bases: Sequence[int],
    shares: Sequence[_Share],
    owners: Int64Array,
    before: PlacedTable | None,
) -> tuple[GroupAddresses, ...]:
    """Return the addresses of episodes: on the GPU that owns one, where it was, or on the host."""
    groups = []
    for number, (group, row_zero) in enumerate(zip(table.groups, row_zeros, strict=True)):
        rows = table.margin + table.episodes.offsets[:-1]
        addresses = row_zero + rows * group.row_bytes  # in host memory
        for base, share in zip(bases, shares, strict=True):
            addresses[share.held] = base + share.begins[number] + share.steps * group.row_bytes
        if before is not None:
            addresses[: len(before.owners)] = before.groups[number].addresses
        addresses[table.order] = addresses.copy()
        if (owners != HOST).all():  # width and dtype without the memory
            group = replace(group, rows=np.empty((0, group.width), group.dtype))
        groups.append(GroupAddresses(group=group, addresses=addresses, row_zero=row_zero))
    return tuple(groups)


def _open_nodes(
    memory: DeviceMemory, ranks: Ranks, handles: Sequence[str]
) -> tuple[dict[int, int], str | None]:
    """Map the rows of the other nodes; return their addresses, and why not if any rank failed.

    The GPUs of a node hold the same, so each rank reads from one of another node.
    """
    turn, problem, bases = ranks.neighbours.index(ranks.rank), None, dict[int, int]()
    try:
        for node in sorted({*ranks.nodes} - {ranks.nodes[ranks.rank]}):
            members = [rank for rank, each in enumerate(ranks.nodes) if each == node]
            bases[node] = memory.open_shared(handles[members[turn % len(members)]])
    except GearError as error:
        problem = error.problem
    failures = enumerate(ranks.gather(problem))
    return bases, next((f"rank {rank}: {text}" for rank, text in failures if text), None)


def _address_nodes(
    groups: Sequence[GroupAddresses], table: Table, spread: Spread, bases: Mapping[int, int]
) -> tuple[GroupAddresses, ...]:
    """Return the addresses of all episodes, where each node's GPUs have theirs from `bases` on."""
    addresses = [np.empty(len(spread.nodes), np.int64) for _ in groups]
    local = ~np.isin(spread.nodes, list(bases))
    for rows, each in zip(addresses, groups, strict=True):
        rows[local] = each.addresses
    for node, base in bases.items():
        share = _Share.of(table, spread.lengths, spread.nodes == node)
        for rows, begin, each in zip(addresses, share.begins, groups, strict=False):
            rows[share.held] = base + begin + share.steps * each.group.row_bytes
    return tuple(replace(e, addresses=a) for e, a in zip(groups, addresses, strict=True))


def _budget(
    memory: DeviceMemory,
    placement: Placement,
    hbm_budget: int | None,
    bytes_before: int,
    ranks: Ranks,
    *,
    collective: bool,
) -> int:
    """Return the bytes that rows may take in each GPU of this node, with those from `before`."""
    budget = hbm_budget
    if budget is None:
        budget = memory.free_bytes() + bytes_before
        budget = budget if placement == "hbm" else int(budget * HBM_SHARE)
    if not collective:
        return budget
    # Every rank hears of every budget, so that all of a node decide alike, and no rank waits in a
    # collective call for one of another node that decided otherwise.
    budgets = ranks.gather(budget)
    return min(int(budgets[rank]) for rank in ranks.neighbours)


def deal_out(sizes: Int64Array, weights: Float64Array, budget_bytes: int, gpus: int) -> Int64Array:
    """Return the GPU of each episode, (E,) int64, or `HOST` where there is no room for it.

    In the order of weight per byte, forth and back, so that GPUs hold like shares of bytes and of
    probability; each takes what fits.  Among equals earlier episodes come first, so that under a
    sampler that is uniform over steps those of one GPU are a prefix: one copy.  With one GPU the
    weight that is left behind is at most the optimum's plus one episode's.

    `sizes` are (E,) bytes over all groups, `weights` (E,) how often an episode is drawn, in any
    unit, the budget that of each GPU.
    """
    order = np.argsort(-(weights / sizes), kind="stable")
    turn = np.arange(len(order)) % (2 * gpus)
    dealt = np.minimum(turn, 2 * gpus - 1 - turn)
    owners = np.full(len(sizes), HOST, np.int64)
    for gpu in range(gpus):
        coming, remaining = order[dealt == gpu], budget_bytes
        while len(coming):
            coming = coming[sizes[coming] <= remaining]
            count = int(np.searchsorted(np.cumsum(sizes[coming]), remaining, side="right"))
            fitting, coming = np.split(coming, [count])
            owners[fitting] = gpu
            remaining -= int(sizes[fitting].sum())
    return owners


@dataclass(frozen=True, eq=False)
class _Share:
    """The layout of a GPU's episodes in its memory: group by group, without gaps."""

    held: BoolArray  # (E,) which they are
    steps: Int64Array  # in front of each of them
    begins: list[int]  # of each group, in bytes; then the end of all

    @classmethod
    def of(cls, table: Table, lengths: Int64Array, held: BoolArray) -> _Share:
        lengths = lengths[held]
        begins = [0]
        for group in table.groups:
            end = begins[-1] + int(lengths.sum()) * group.row_bytes
            begins.append(end + -end % ALIGNMENT_BYTES)
        return cls(held, np.cumsum(lengths) - lengths, begins)


def _upload(
    table: Table,
    share: _Share,
    memory: DeviceMemory,
    allocations: list[Any],
    read: Read | None,
    *,
    shared: bool,
) -> tuple[int, str]:
    """Bring a share to new GPU memory; return its address, and a handle if it is `shared`."""
    base, handle, nbytes = 0, "", share.begins[-1]
    if shared:
        base, handle = memory.allocate_shared(max(nbytes, ALIGNMENT_BYTES))
    elif nbytes:
        base, buffer = memory.allocate(nbytes)
        allocations.append(buffer)
    begins, stream = [base + begin for begin in share.begins], memory.copy_stream()
    if read is not None:
        read(_Scratch(table, begins, memory, stream, target=[*allocations]).lend)
        return base, handle
    for group, at in zip(table.groups, begins, strict=False):
        for rows in _runs(table, group.rows, share.held):
            memory.upload(at, rows, stream)
            at += rows.nbytes
    return base, handle


@dataclass(frozen=True, eq=False)
class _Scratch:
    """Page-locked memory in which threads fill pieces of rows, which are then copied to a GPU.

    A thread has one piece at a time, of about `CHUNK_BYTES`.  It waits for its copy, which takes
    0.04 ms at 50 GB/s where filling takes 1; the others fill theirs meanwhile.  So nobody writes to
    a piece that is being copied, and once the threads have ended no copy is under way, after an
    error or Ctrl-C too.  Where memory cannot be page-locked the copies are slower.
    """

    table: Table
    begins: Sequence[int]  # address of each group's rows
    memory: DeviceMemory
    stream: Any  # of the copies
    target: Any  # kept for as long as a thread has a piece
    idle: list[Pinned] = field(default_factory=list)

    @contextmanager
    def lend(self, number: int, step: int, count: int) -> Iterator[Array]:
        """Lend the rows of some steps, as `Lend`."""
        group = self.table.groups[number]
        scratch = self._take(nbytes := count * group.row_bytes)
        rows = scratch.array[:nbytes].view(group.dtype).reshape(count, group.width)
        rows[:] = 0
        yield rows
        self.memory.upload(self.begins[number] + step * group.row_bytes, rows, self.stream)
        self.idle.append(scratch)

    def _take(self, nbytes: int) -> Pinned:
        with suppress(IndexError):  # other threads have all
            if (scratch := self.idle.pop()).array.nbytes >= nbytes:
                return scratch
        array = private_rows((max(nbytes, CHUNK_BYTES),), np.dtype(np.uint8))
        try:
            return self.memory.pin(array)
        except GearError:
            return Pinned(array, 0)


def _pin(
    table: Table, memory: DeviceMemory, allocations: list[Any], *, in_host: bool, landing: bool
) -> list[int]:
    """Pin all rows if some are read `in_host`, with `landing` else those rows; return addresses.

    An address is that of a group's row 0, for the GPU; 0 where nothing is pinned.
    """
    if not (in_host or landing):
        return [0] * len(table.groups)
    first, row_zeros = 0 if in_host else table.landing_row, []
    for group in table.groups:
        pinned = memory.pin(group.rows[first:])
        allocations.append(pinned)
        row_zeros.append(pinned.address - first * group.row_bytes)
    return row_zeros


def _runs(table: Table, rows: Array, held: BoolArray) -> Iterator[Array]:
    """Yield the rows of some episodes in order: long runs directly, short ones packed."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], held.view(np.int8), [0]))))
    offsets = table.margin + table.episodes.offsets[edges]
    short: list[Array] = []
    for low, high in offsets.reshape(-1, 2).tolist():
        run = rows[low:high]
        if short and sum(piece.nbytes for piece in short) + run.nbytes > STAGING_BYTES:
            yield np.concatenate(short)
            short = []
        if run.nbytes > STAGING_BYTES:
            yield run
        else:
            short.append(run)
    if short:
        yield np.concatenate(short)


def _places(sizes: Int64Array, weights: Float64Array, owners: Int64Array, gpus: int) -> str:
    """Describe the bytes and the share of the reads of each place."""
    where = f"over {gpus} GPUs" if gpus > 1 else "in GPU memory"
    places = ((owners != HOST, where), (owners == HOST, "in pinned host memory"))
    return ", ".join(
        f"{size_text(int(sizes[mask].sum()))} {name}, "
        f"{weights[mask].sum() / (weights.sum() or 1.0):.1%} of the reads"
        for mask, name in places
        if mask.any()
    )
