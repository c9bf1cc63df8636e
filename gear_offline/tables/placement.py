"""Which episode lies in whose GPU memory and which in pinned host memory, behind one address table.

A gather needs the address of each episode's first row and nothing else, so any mix of memories is
one launch.  A table that fits lies in every GPU.  Of a larger one the hottest episodes are dealt
out to the GPUs of the node, which read each other's memory over NVLink, and the rest is read in
place from pinned host memory.  One GPU is the plain case: then there is its own memory and the
host's.  Spreading tables over linked GPUs by how often rows are read is the idea of Quiver (Tan et
al. 2023, arXiv:2305.10863); here the probabilities are those of the sampler, known exactly.

Shape legend: E episodes, G GPUs of the node.
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
from gear_offline.errors import GearError, InputError
from gear_offline.kernels.columns import GroupAddresses
from gear_offline.tables.device import DeviceMemory, too_large
from gear_offline.tables.table import Table

if TYPE_CHECKING:
    import torch

Placement = Literal["auto", "hbm", "peer", "host"]
HOST = -1  # in the place of a GPU's number: the episode is read from pinned host memory

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
        """The ranks of this rank's node."""
        return [r for r, node in enumerate(self.nodes) if node == self.nodes[self.rank]]


@dataclass(frozen=True, kw_only=True, eq=False)
class PlacedTable:
    """A table whose rows a GPU can read; it holds the memory that the addresses point to.

    That is let go of with the table, when the GPU has done its work.
    """

    groups: tuple[GroupAddresses, ...]  # their rows are empty where none is read from host memory
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
        """Whether some rows lie in host memory."""
        return bool((self.owners == HOST).any())


def _release(kept: list[Any]) -> None:
    memory, *_ = kept
    memory.wait()
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
    parted over the node's GPUs if there are several.  `episode_weight` (E,) is how often each is
    drawn, in any unit; by default its length.  All `ranks` call this together, with the same
    options; what other GPUs have mapped stays in this one's memory until the process ends.  With
    `landing` the landing rows are pinned, too.  The first episodes of a table that has grown stay
    where they were `before`, if all of them and the new ones have room in the memory of one GPU.
    """
    ranks = Ranks() if ranks is None else ranks
    if placement == "peer" and min(ranks.nodes.count(node) for node in ranks.nodes) == 1:
        raise InputError(
            "LOADER_OPTION",
            "placement 'peer' needs several GPUs of one node",
            remedy="start one process a GPU with torchrun, or use 'auto'",
        )
    together = placement in ("auto", "peer") and len(ranks.nodes) > 1  # the same on every rank
    if before is not None and (together or before.reads_host):
        before = None
    there = 0 if before is None else before.hbm_bytes
    budget = _budget(memory, placement, hbm_budget, there, ranks, together=together)
    sizes = table.episodes.lengths * table.row_bytes
    needed = int(sizes.sum()) + ALIGNMENT_BYTES * len(table.groups)
    if placement == "hbm" and needed > budget:
        source = "free on the device" if hbm_budget is None else "the given budget"
        raise too_large(needed, budget, source)
    fits = placement == "hbm" or (placement == "auto" and needed <= budget)
    gpus = [ranks.rank] if fits or placement == "host" else ranks.neighbours
    weights = np.asarray(
        table.episodes.lengths if episode_weight is None else episode_weight, np.float64
    )
    assert weights.shape == sizes.shape, "the sampler was made for these episodes"
    owners = np.zeros(len(sizes), np.int64)
    if not fits:
        room = 0 if placement == "host" else budget - there - needed + int(sizes.sum())
        owners, before = deal_out(sizes, weights, room, len(gpus)), None

    handle, failure = "", None
    try:
        if placement == "peer" and (owners == HOST).any():
            raise too_large(needed, budget * len(gpus), f"free on {len(gpus)} GPUs")
        rows = _Rows(memory, table, owners, gpus.index(ranks.rank), before)
        base, handle = rows.upload(shared=len(gpus) > 1)
        rows.pin(landing=landing)
    except GearError as error:
        failure = error
    answers = ranks.gather((handle, str(failure or ""))) if together else []
    if failure is not None:
        raise failure
    bases = [base]
    if len(gpus) > 1:  # everybody has uploaded by now, or failed
        for rank in gpus:
            if answers[rank][1]:
                raise GearError("RANK_FAILED", f"rank {rank} failed: {answers[rank][1]}")
        bases = [base if r == ranks.rank else memory.open_shared(answers[r][0]) for r in gpus]
    limit = f"budget {size_text(budget)}{' a GPU' if len(gpus) > 1 else ''}"
    return PlacedTable(
        groups=rows.addresses(bases),
        device=memory.device,
        owners=owners,
        hbm_bytes=int(sizes[rows.own].sum()),
        reason=f"placement {placement}: {_places(sizes, weights, owners, len(gpus))} ({limit})",
        kept=rows.kept,
    )


def _budget(
    memory: DeviceMemory,
    placement: Placement,
    given: int | None,
    there: int,
    ranks: Ranks,
    *,
    together: bool,
) -> int:
    """Return the bytes that rows may take in each GPU of this node, with those that are `there`."""
    own = given
    if own is None:
        own = memory.free_bytes() + there
        own = own if placement == "hbm" else int(own * HBM_SHARE)
    if not together:
        return own
    # Every rank hears of every budget, so that all of a node decide alike, and no rank waits in a
    # collective call for one of another node that decided otherwise.
    budgets = ranks.gather(own)
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
        coming, left = order[dealt == gpu], budget_bytes
        while len(coming):
            coming = coming[sizes[coming] <= left]
            count = int(np.searchsorted(np.cumsum(sizes[coming]), left, side="right"))
            taken, coming = np.split(coming, [count])
            owners[taken] = gpu
            left -= int(sizes[taken].sum())
    return owners


class _Rows:
    """What GPU `index` holds of a table: its episodes packed in its memory, the host's rows pinned.

    The first episodes of a table that has grown lie where they lay `before`.
    """

    def __init__(
        self,
        memory: DeviceMemory,
        table: Table,
        owners: Int64Array,
        index: int,
        before: PlacedTable | None,
    ) -> None:
        self._memory, self._table, self._owners, self._before = memory, table, owners, before
        self.own = owners == index
        self._stays = 0 if before is None else len(before.owners)
        self.kept: list[Any] = [memory, *([] if before is None else before.kept)]
        self._pinned: list[Any] = []
        self._first_pinned = 0

    def upload(self, *, shared: bool) -> tuple[int, str]:
        """Copy own episodes to new memory; return its address, and a handle if it is shared."""
        held, _, begins = self._packed(self.own)
        handle = ""
        if shared:
            base, handle = self._memory.allocate_shared(max(begins[-1], ALIGNMENT_BYTES))
        elif begins[-1]:
            base, buffer = self._memory.allocate(begins[-1])
            self.kept.append(buffer)
        else:
            base = 0
        for group, begin in zip(self._table.groups, begins, strict=False):
            at = base + begin
            for rows in _runs(self._table, group.rows, held):
                self._memory.upload(at, rows)
                at += rows.nbytes
        return base, handle

    def pin(self, *, landing: bool) -> None:
        """Pin the rows that are read from host memory: all, or with `landing` those behind them."""
        in_host = bool((self._owners == HOST).any())
        if in_host or landing:
            self._first_pinned = 0 if in_host else self._table.landing_row
            rows = (group.rows[self._first_pinned :] for group in self._table.groups)
            self._pinned = [self._memory.pin(each) for each in rows]
            self.kept += self._pinned

    def addresses(self, bases: list[int]) -> tuple[GroupAddresses, ...]:
        """Return where each group's episodes lie, given the address of each GPU's memory."""
        parts = [self._packed(self._owners == gpu) for gpu in range(len(bases))]
        in_host, placed = self._owners == HOST, []
        for number, group in enumerate(self._table.groups):
            row_zero = 0
            if self._pinned:
                row_zero = self._pinned[number].address - self._first_pinned * group.row_bytes
            addresses = row_zero + self._table.first_rows() * group.row_bytes  # in the host
            for base, (held, steps, begins) in zip(bases, parts, strict=True):
                addresses[held] = base + begins[number] + steps * group.row_bytes
            if self._before is not None:
                addresses[: self._stays] = self._before.groups[number].addresses
            if not in_host.any():  # width and dtype without the memory
                group = replace(group, rows=np.empty((0, group.width), group.dtype))
            placed.append(GroupAddresses(group=group, addresses=addresses, row_zero=row_zero))
        return tuple(placed)

    def _packed(self, held: BoolArray) -> tuple[BoolArray, Int64Array, list[int]]:
        """Return how episodes that a GPU holds lie in its memory: group by group, without gaps.

        Which of them are new (E,), how many steps lie in front of each of those, and where each
        group begins, with the end of all.
        """
        held = held & (np.arange(len(held)) >= self._stays)
        lengths = self._table.episodes.lengths[held]
        begins = [0]
        for group in self._table.groups:
            end = begins[-1] + int(lengths.sum()) * group.row_bytes
            begins.append(end + -end % ALIGNMENT_BYTES)
        return held, np.cumsum(lengths) - lengths, begins


def _runs(table: Table, rows: Array, held: BoolArray) -> Iterator[Array]:
    """Yield the rows of some episodes in order: long runs directly, short ones packed."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], held.view(np.int8), [0]))))
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


def _places(sizes: Int64Array, weights: Float64Array, owners: Int64Array, gpus: int) -> str:
    """Say how many bytes lie where, and which share of the reads goes there."""
    where = f"over {gpus} GPUs" if gpus > 1 else "in GPU memory"
    parts = ((owners != HOST, where), (owners == HOST, "in pinned host memory"))
    return ", ".join(
        f"{size_text(int(sizes[part].sum()))} {name}, "
        f"{weights[part].sum() / (weights.sum() or 1.0):.1%} of the reads"
        for part, name in parts
        if part.any()
    )
