"""Which episode lies in whose GPU memory and which in pinned host memory, behind one address table.

A gather needs the address of each episode's first row and nothing else, so any mix of memories is
one launch.  The hottest episodes may be in every GPU of the node, the next lie in one GPU each and
are read by the others over NVLink, and what does not fit is read in place from pinned host memory.
One GPU is the plain case: then there is its own memory and the host's.  Spreading tables over
linked GPUs by how often rows are read is the idea of Quiver (Tan et al. 2023, arXiv:2305.10863);
here the probabilities are those of the sampler, known exactly.

Shape legend: E episodes, G GPUs of the node, N steps, W elements of a row, M margin.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from gear_offline.core.text import size_text
from gear_offline.core.types import Array, BoolArray, Float64Array, Int64Array
from gear_offline.dataset.schema import EpisodeIndex
from gear_offline.errors import GearError, InputError
from gear_offline.kernels.columns import GroupAddresses
from gear_offline.tables.device import DeviceMemory, too_large
from gear_offline.tables.table import Table

if TYPE_CHECKING:
    import torch

Placement = Literal["auto", "hbm", "peer", "host"]
HBM, HOST, PEER = 0, 1, 2  # tiers: in this GPU (or every one), in the host, in another GPU

HBM_SHARE = 0.6  # of the free GPU memory: model, optimiser and activations need the rest
ALIGNMENT_BYTES = 256  # of each group in GPU memory, as CUDA's own allocations
STAGING_BYTES = 64 << 20  # scattered episodes are packed into pieces of this size and copied
# Nanoseconds a kilobyte, from GPU memory, over NVLink and from host memory that all GPUs of a
# node read at once: 1,900, 360 and 37 GB/s on four H200 (docs/benchmarks/gather.json, peers.json).
HBM_COST, PEER_COST, HOST_COST = 0.53, 2.8, 27.0


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The processes that place one table together, one a GPU."""

    rank: int = 0  # this one
    nodes: tuple[int, ...] = (0,)  # of each rank
    # Returns every rank's JSON-able value, in their order; all ranks call it together.
    gather: Callable[[Any], list[Any]] = lambda value: [value]

    @property
    def neighbours(self) -> list[int]:
        """The ranks of this rank's node."""
        return [r for r, node in enumerate(self.nodes) if node == self.nodes[self.rank]]


@dataclass(frozen=True, kw_only=True, eq=False)
class PlacedTable:
    """A table whose rows a GPU can read; it holds the memory that the addresses point to."""

    episodes: EpisodeIndex
    groups: tuple[GroupAddresses, ...]  # their rows are empty where none is read from host memory
    device: torch.device
    tiers: npt.NDArray[np.uint8]  # (E,) `HBM`, `PEER` or `HOST`, seen from this GPU
    hbm_bytes: int  # of rows served from this GPU's memory
    peer_bytes: int  # from other GPUs of the node
    host_bytes: int  # from pinned host memory
    reason: str  # the decision in one line
    _kept: list[Any] = field(default_factory=list, repr=False)
    _close: weakref.finalize[Any, Any] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        finish = weakref.finalize(self, _release, self._kept)
        finish.atexit = False  # the driver frees everything when the process ends
        object.__setattr__(self, "_close", finish)

    def close(self) -> None:
        """Wait for the GPU, then let go of its memory and of the pinned memory; can be repeated."""
        self._close()


def _release(kept: list[Any]) -> None:
    if kept:
        kept[0].wait()
    kept.clear()


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
) -> PlacedTable:
    """Bring a table's rows to where a GPU can read them.

    ``"hbm"``: all in GPU memory.  ``"host"``: all read in place from pinned host memory.
    ``"peer"``: parted over the GPUs of the node, which read each other's memory.  ``"auto"``: all
    in GPU memory if that fits the budget (`HBM_SHARE` of what is free), else the hottest episodes,
    with peers if there are any.  `episode_weight` (E,) is how often each is drawn, in any unit; by
    default its length.  All `ranks` call this together, with the same options; what other GPUs have
    mapped stays in this one's memory until the process ends.  With `landing` the landing rows are
    pinned, too.  The first episodes of a table that has grown stay where they were `before`, if all
    of them and the new ones have room in the memory of one GPU.
    """
    ranks = Ranks() if ranks is None else ranks
    if placement == "peer" and min(ranks.nodes.count(node) for node in ranks.nodes) == 1:
        raise InputError(
            "LOADER_OPTION",
            "placement 'peer' needs several GPUs of one node",
            remedy="start one process a GPU with torchrun, or use 'auto'",
        )
    lengths = table.episodes.lengths
    sizes = lengths * table.row_bytes
    weights = np.asarray(lengths if episode_weight is None else episode_weight, np.float64)
    assert weights.shape == lengths.shape, "the sampler was made for these episodes"
    spare = ALIGNMENT_BYTES * len(table.groups)
    shares = placement in ("auto", "peer") and len(ranks.nodes) > 1  # the same on every rank
    there = 0  # bytes that may stay
    if before is not None and not shares and not before.host_bytes:
        there = before.hbm_bytes
    own = memory.free_bytes() + there if hbm_budget is None else hbm_budget
    if hbm_budget is None and placement != "hbm":
        own = int(own * HBM_SHARE)
    gpus = ranks.neighbours
    total = int(sizes.sum())
    # Every rank hears of every budget, so that all of a node decide alike, and no rank waits in a
    # collective call for one of another node that decided otherwise.
    budgets = ranks.gather(own) if shares else [own] * len(ranks.nodes)
    budget = min(budgets[rank] for rank in gpus)
    whole = placement == "hbm" or (placement == "auto" and total + spare <= budget)
    if placement == "hbm" and total + spare > budget:
        source = "free on the device" if hbm_budget is None else "the given budget"
        raise too_large(total + spare, budget, source)
    limit = f"budget {size_text(budget)}"
    if before is not None and there and whole:
        reason = f"placement {placement}: {size_text(total)} in GPU memory ({limit})"
        return _grown(before, table, memory, reason)
    if placement == "host" or whole:
        gpus = [ranks.rank]
    plan = plan_episodes(
        sizes,
        weights,
        0 if placement == "host" else total if whole else max(budget - spare - there, 0),
        len(gpus),
        copy=placement != "peer",
    )
    answers: list[Any] = []  # of each rank: the handle of its memory, and its error
    try:
        if placement == "peer" and (plan.tiers == HOST).any():
            raise too_large(total, budget * len(gpus), f"free on {len(gpus)} GPUs")
        index = gpus.index(ranks.rank)
        rows = _Rows(memory, table, plan, index, parted=len(gpus) > 1, landing=landing)
    except GearError as error:
        if shares:
            ranks.gather(("", str(error)))
        raise
    if shares:
        answers = ranks.gather((rows.handle, ""))
    bases = [rows.base]
    if len(gpus) > 1:  # everybody has uploaded by now, or failed
        for rank in gpus:
            if answers[rank][1]:
                raise GearError("RANK_FAILED", f"rank {rank} failed: {answers[rank][1]}")
        bases = [
            rows.base if rank == ranks.rank else memory.open_shared(answers[rank][0])
            for rank in gpus
        ]
    here = plan.lie_in(rows.index)
    in_host = plan.tiers == HOST
    limit += " a GPU" if len(gpus) > 1 else ""
    return PlacedTable(
        episodes=table.episodes,
        groups=rows.groups(table, bases),
        device=memory.device,
        tiers=np.where(here, HBM, plan.tiers).astype(np.uint8),
        hbm_bytes=int(sizes[here].sum()),
        peer_bytes=int(sizes[~here & ~in_host].sum()),
        host_bytes=int(sizes[in_host].sum()),
        reason=f"placement {placement}: {_places(sizes, plan, len(gpus))} ({limit})",
        _kept=[memory, rows],
    )


def _grown(before: PlacedTable, table: Table, memory: DeviceMemory, reason: str) -> PlacedTable:
    """Return a table all in GPU memory, of which only the rows of new episodes are uploaded."""
    new = np.arange(table.episodes.episodes) >= before.episodes.episodes
    begins = _begins(table, new)
    base, buffer = memory.allocate(begins[-1])
    _upload(memory, table, new, base, begins)
    lengths = table.episodes.lengths[new]
    packed = np.cumsum(lengths) - lengths  # new steps before each
    groups = [
        replace(each, addresses=np.append(each.addresses, base + begin + packed * group.row_bytes))
        for each, begin, group in zip(before.groups, begins, table.groups, strict=False)
    ]
    return PlacedTable(
        episodes=table.episodes,
        groups=tuple(groups),
        device=memory.device,
        tiers=np.full(len(new), HBM, np.uint8),
        hbm_bytes=table.episodes.steps * table.row_bytes,
        peer_bytes=0,
        host_bytes=0,
        reason=reason,
        _kept=[*before._kept, buffer],
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """Where each episode lies."""

    tiers: npt.NDArray[np.uint8]  # (E,) `HBM` (in every GPU), `PEER` (in one of several) or `HOST`
    owners: Int64Array  # (E,) the GPU of an episode that lies in one; 0 elsewhere
    # Of reads, by weight, from a GPU's own memory (mean over GPUs), from peers, from the host.
    shares: tuple[float, float, float]

    def lie_in(self, gpu: int) -> BoolArray:
        """Return (E,) whether an episode lies in a GPU's own memory."""
        own = (self.tiers == PEER) & (self.owners == gpu)
        return np.asarray(own | (self.tiers == HBM), dtype=np.bool_)


def plan_episodes(
    sizes: Int64Array, weights: Float64Array, budget_bytes: int, gpus: int = 1, *, copy: bool = True
) -> Plan:
    """Choose by time saved per byte of GPU memory.

    An episode that comes from the host into one GPU costs its bytes once and saves the host's
    slow reads; one that is then copied to all costs G - 1 times its bytes and saves reads over
    NVLink.  Among equals earlier episodes come first, so that under a sampler that is uniform over
    steps those of one GPU are a prefix: one copy.  With one GPU the weight that is left behind is
    at most the optimum's plus one episode's, as always with this rule.

    `sizes` are (E,) bytes over all groups, `weights` (E,) how often an episode is drawn, in any
    unit, the budget that of each GPU; with `copy` an episode may be in every GPU.
    """
    density = weights / sizes
    order = np.argsort(-density, kind="stable")
    everywhere = 0
    if copy and gpus > 1:
        spread_cost = ((gpus - 1) * PEER_COST + HBM_COST) / gpus
        gains = np.concatenate(
            [
                (HOST_COST - spread_cost) * density[order],
                (spread_cost - HBM_COST) / (gpus - 1) * density[order],
            ]
        )
        costs = np.concatenate([sizes[order], (gpus - 1) * sizes[order]])
        ranked = np.argsort(-gains, kind="stable")
        taken = int(np.searchsorted(np.cumsum(costs[ranked]), budget_bytes * gpus, side="right"))
        everywhere = int((ranked[:taken] >= len(order)).sum())
    fits = int(sizes.sum()) <= budget_bytes * gpus
    while True:
        tiers, owners = _deal(order, everywhere, sizes, budget_bytes, gpus)
        # Equal shares are not exactly equal: then fewer copies rather than rows in the host.
        if not fits or not everywhere or not (tiers == HOST).any():
            break
        everywhere -= 1 + everywhere // 50
    total = float(weights.sum()) or 1.0
    copied, parted, rest = (float(weights[tiers == t].sum()) / total for t in (HBM, PEER, HOST))
    own, others = copied + parted / gpus, parted * (gpus - 1) / gpus
    return Plan(tiers=tiers, owners=owners, shares=(own, others, rest))


def _deal(
    order: Int64Array, everywhere: int, sizes: Int64Array, budget_bytes: int, gpus: int
) -> tuple[npt.NDArray[np.uint8], Int64Array]:
    """Return tiers and owners: the first `everywhere` in every GPU, the others dealt out.

    Forth and back in the order of weight per byte, so that GPUs hold like shares of bytes and of
    probability; each takes what fits.
    """
    tiers, owners = np.full(len(sizes), HOST, np.uint8), np.zeros(len(sizes), np.int64)
    copied, dealt = order[:everywhere], order[everywhere:]
    tiers[copied] = HBM
    turn = np.arange(len(dealt)) % (2 * gpus)
    owner = np.where(turn < gpus, turn, 2 * gpus - 1 - turn)
    left = budget_bytes - int(sizes[copied].sum())
    for gpu in range(gpus):
        taken = _first_that_fit(dealt[owner == gpu], sizes, left)
        tiers[taken] = PEER if gpus > 1 else HBM
        owners[taken] = gpu
    return tiers, owners


def _first_that_fit(order: Int64Array, sizes: Int64Array, budget_bytes: int) -> Int64Array:
    """Return the episodes of `order` that fit the budget, leaving out those that do not."""
    taken: list[Int64Array] = []
    while len(order):
        order = order[sizes[order] <= budget_bytes]
        count = int(np.searchsorted(np.cumsum(sizes[order]), budget_bytes, side="right"))
        taken.append(order[:count])
        budget_bytes -= int(sizes[order[:count]].sum())
        order = order[count:]
    return np.concatenate([np.zeros(0, np.int64), *taken])


class _Rows:
    """What one GPU holds of a table: its episodes packed in GPU memory, the host's rows pinned."""

    def __init__(
        self,
        memory: DeviceMemory,
        table: Table,
        plan: Plan,
        index: int,
        *,
        parted: bool,
        landing: bool,
    ) -> None:
        self.index, self.handle, self.base, self._plan = index, "", 0, plan
        own = plan.lie_in(index)
        begins = _begins(table, own)
        if parted:
            self.base, self.handle = memory.allocate_shared(max(begins[-1], ALIGNMENT_BYTES))
        elif begins[-1]:
            self.base, self._buffer = memory.allocate(begins[-1])
        _upload(memory, table, own, self.base, begins)
        self._in_host = bool((plan.tiers == HOST).any())
        self._first_pinned = 0 if self._in_host else table.landing_row
        self._pinned = []
        if self._in_host or landing:
            self._pinned = [memory.pin(g.rows[self._first_pinned :]) for g in table.groups]

    def groups(self, table: Table, bases: list[int]) -> tuple[GroupAddresses, ...]:
        """Return where each group's episodes lie, given each GPU's base address."""
        lengths = table.episodes.lengths
        placed = []
        for number, group in enumerate(table.groups):
            addresses = np.zeros(len(lengths), np.int64)
            rows = np.empty((0, group.width), group.dtype)  # width and dtype without the memory
            row_zero = 0
            if self._pinned:
                row_zero = self._pinned[number].address - self._first_pinned * group.row_bytes
            if self._in_host:
                rows, addresses = group.rows, row_zero + table.first_rows() * group.row_bytes
            # Own memory last, so that episodes that are everywhere are read there.
            for gpu in sorted(range(len(bases)), key=lambda gpu: gpu == self.index):
                own = self._plan.lie_in(gpu)
                packed = np.cumsum(lengths * own) - lengths * own  # own steps before each
                begin = bases[gpu] + _begins(table, own)[number]
                addresses = np.where(own, begin + packed * group.row_bytes, addresses)
            single = replace(group, rows=rows)
            placed.append(GroupAddresses(group=single, addresses=addresses, row_zero=row_zero))
        return tuple(placed)


def _begins(table: Table, own: BoolArray) -> list[int]:
    """Return where each group begins in the memory of a GPU, and the size of all."""
    steps = int(table.episodes.lengths[own].sum())
    begins = [0]
    for group in table.groups:
        end = begins[-1] + steps * group.row_bytes
        begins.append(end + -end % ALIGNMENT_BYTES)
    return begins


def _upload(
    memory: DeviceMemory, table: Table, own: BoolArray, base: int, begins: list[int]
) -> None:
    """Copy the rows of a GPU's own episodes to its memory from `base` on, packed."""
    for group, begin in zip(table.groups, begins, strict=False):
        at = base + begin
        for rows in _packed(table, group.rows, own):
            memory.upload(at, rows)
            at += rows.nbytes


def _packed(table: Table, rows: Array, own: BoolArray) -> Iterator[Array]:
    """Yield the rows of the GPU's episodes in order: long runs directly, short ones packed."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], own.view(np.int8), [0]))))
    offsets = table.margin + table.episodes.offsets[edges]
    short: list[Array] = []
    for low, high in offsets.reshape(-1, 2).tolist():
        run = rows[low:high]
        if short and sum(part.nbytes for part in short) + run.nbytes > STAGING_BYTES:
            yield np.concatenate(short)
            short = []
        if run.nbytes > STAGING_BYTES:
            yield run
        else:
            short.append(run)
    if short:
        yield np.concatenate(short)


def _places(sizes: Int64Array, plan: Plan, gpus: int) -> str:
    """Say how many bytes lie where, and where reads are expected."""
    names = {
        HBM: "in every GPU" if gpus > 1 else "in GPU memory",
        PEER: f"over {gpus} GPUs",
        HOST: "in pinned host memory",
    }
    amounts = ((name, int(sizes[plan.tiers == tier].sum())) for tier, name in names.items())
    text = ", ".join(f"{size_text(nbytes)} {name}" for name, nbytes in amounts if nbytes)
    own, peer, host = (f"{share:.1%}" for share in plan.shares)
    return f"{text}; expected reads: {own} from own memory, {peer} from peers, {host} from the host"
