"""Which episode lies in GPU memory and which in pinned host memory, behind one address table.

A gather needs the address of each episode's first row and nothing else, so any mix of tiers is
one launch.  Host memory is read by the GPU in place, about 35 times slower than its own memory;
so the episodes that are drawn most often per byte go into GPU memory until the budget is spent.

Shape legend: E episodes, N steps, W elements of a row, M margin.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from gear_offline.device_memory import CudaMemory, Memory, too_large
from gear_offline.errors import InputError, UnavailableError
from gear_offline.pinning import format_bytes
from gear_offline.schema import EpisodeIndex
from gear_offline.table import Store, Table

if TYPE_CHECKING:
    import torch

Tier = Literal["hbm", "host"]
Placement = Literal["auto", "hbm", "host"]
HBM, HOST = 0, 1  # values of `PlacedStore.tiers`

HBM_SHARE = 0.6  # of the free GPU memory: model, optimiser and activations need the rest
ALIGNMENT_BYTES = 256  # of each store in GPU memory, as CUDA's own allocations
STAGING_BYTES = 64 << 20  # scattered episodes are packed into pieces of this size and copied

Array = npt.NDArray[Any]
Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, eq=False)
class PlacedStore:
    """Where one store's rows lie.

    Attributes
    ----------
    store
        Fields, dtype and width; its rows are empty where no episode is read from host memory.
    addresses
        (E,) int64, device-visible address of each episode's first row.
    row_bytes
        Bytes from one step to the next.
    tiers
        (E,) uint8, `HBM` or `HOST`.
    """

    store: Store
    addresses: Int64Array
    row_bytes: int
    tiers: npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True, eq=False)
class PlacedTable:
    """A table whose rows a GPU can read; it holds the memory that the addresses point to.

    Attributes
    ----------
    episodes
        Episode index.
    stores
        As the table's, in its order.
    device
        The GPU.
    hbm_bytes, host_bytes
        Bytes of rows served from either tier.  The host copy of the whole table stays in memory
        if `host_bytes` is not 0.
    reason
        The decision in one line.
    """

    episodes: EpisodeIndex
    stores: tuple[PlacedStore, ...]
    device: torch.device
    hbm_bytes: int
    host_bytes: int
    reason: str
    _held: list[Any] = field(default_factory=list, repr=False)
    _close: weakref.finalize[Any, Any] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        finish = weakref.finalize(self, _release, self.device, self._held)
        finish.atexit = False  # the driver frees everything when the process ends
        object.__setattr__(self, "_close", finish)

    def close(self) -> None:
        """Wait for the GPU, then let go of its memory and of the pinned memory; can be repeated."""
        self._close()


def _release(device: torch.device, held: list[Any]) -> None:
    if device.type == "cuda" and held:
        import torch

        torch.cuda.synchronize(device)  # a kernel may still read what is freed here
    held.clear()


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """Which episodes go into GPU memory.

    Attributes
    ----------
    in_hbm
        (E,) bool.
    hbm_bytes, host_bytes
        Bytes on either side.
    hbm_share
        Share of accesses, by weight, that GPU memory serves.
    """

    in_hbm: BoolArray
    hbm_bytes: int
    host_bytes: int
    hbm_share: float


def plan_episodes(sizes: Int64Array, weights: npt.NDArray[np.float64], budget_bytes: int) -> Plan:
    """Choose episodes by weight per byte, densest first, until nothing more fits the budget.

    Among equals earlier episodes come first, so that under a law that is uniform over steps the
    chosen ones are a prefix: one copy.  The weight that is left behind is at most the optimum's
    plus one episode's, as always with this rule.

    Parameters
    ----------
    sizes
        (E,) int64 bytes of each episode over all stores, at least 1.
    weights
        (E,) float64, how often an episode is drawn, in any unit.
    budget_bytes
        Bytes of GPU memory that may be used.
    """
    order = np.argsort(-(weights / sizes), kind="stable")
    chosen = np.zeros(len(sizes), dtype=bool)
    left = budget_bytes
    while len(order):
        order = order[sizes[order] <= left]
        fits = int(np.searchsorted(np.cumsum(sizes[order]), left, side="right"))
        chosen[order[:fits]] = True
        left -= int(sizes[order[:fits]].sum())
        order = order[fits:]
        if not fits:
            break
    total = float(weights.sum())
    hbm_bytes = int(sizes[chosen].sum())
    return Plan(
        in_hbm=chosen,
        hbm_bytes=hbm_bytes,
        host_bytes=int(sizes.sum()) - hbm_bytes,
        hbm_share=float(weights[chosen].sum()) / total if total else 0.0,
    )


def place_table(
    table: Table,
    *,
    device: torch.device | str,
    placement: Placement = "auto",
    hbm_budget: int | None = None,
    episode_weight: npt.ArrayLike | None = None,
) -> PlacedTable:
    """Bring a table's rows to where a GPU can read them.

    Parameters
    ----------
    table
        Its rows must be in memory of this process (``mode="read"``).
    device
        A CUDA device.
    placement
        ``"hbm"``: all in GPU memory.  ``"host"``: all read in place from pinned host memory.
        ``"auto"``: all in GPU memory if that fits the budget, else the hottest episodes.
    hbm_budget
        Bytes of GPU memory to use; by default `HBM_SHARE` of what is free, for ``"hbm"`` all of it.
    episode_weight
        (E,), how often each episode is drawn, in any unit; by default its length, which is the
        law of ``uniform_steps``.

    Raises
    ------
    GearError
        ``HBM_SHORT`` if ``"hbm"`` does not fit; ``HOST_PIN`` or ``MEMLOCK_LIMIT``.
    InputError
        ``PLACEMENT`` (unknown, negative budget, mapped table), ``EPISODE_WEIGHT``.
    UnavailableError
        ``CUDA_RUNTIME``
    """
    import torch

    device = torch.device(device)
    if device.type != "cuda" or not torch.cuda.is_available():
        raise UnavailableError(
            "CUDA_RUNTIME",
            f"a table cannot be placed for device {str(device)!r}: no such CUDA device",
            remedy="run `gear-offline doctor`, or use device='cpu'",
        )
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return place_in(
        CudaMemory(device),
        table,
        device=device,
        placement=placement,
        hbm_budget=hbm_budget,
        episode_weight=episode_weight,
    )


def place_in(
    memory: Memory,
    table: Table,
    *,
    device: torch.device,
    placement: Placement,
    hbm_budget: int | None,
    episode_weight: npt.ArrayLike | None,
) -> PlacedTable:
    """As `place_table`, in the given memory."""
    _check(table, placement, hbm_budget)
    row_bytes = sum(_row_bytes(store) for store in table.stores)
    lengths = table.episodes.lengths
    plan, reason = decide(
        lengths * row_bytes,
        _weights(episode_weight, lengths),
        placement=placement,
        hbm_budget=hbm_budget,
        spare_bytes=ALIGNMENT_BYTES * len(table.stores),
        memory=memory,
    )
    held: list[Any] = []
    begins = _begins(table, plan.in_hbm)
    base, buffer = memory.allocate(begins[-1]) if plan.hbm_bytes else (0, None)
    packed = np.cumsum(lengths * plan.in_hbm) - lengths * plan.in_hbm  # chosen steps before each
    stores = []
    for store, begin in zip(table.stores, begins, strict=False):
        assert store.rows is not None, "checked above"
        if buffer is not None:
            _upload(memory, buffer, begin, table, store.rows, plan.in_hbm)
        addresses = base + begin + packed * _row_bytes(store)
        rows = np.empty((0, store.width), store.dtype)  # width and dtype without the memory
        if plan.host_bytes:
            rows = store.rows
            pinned = memory.pin(rows)
            held.append(pinned)
            first = table.margin + table.episodes.offsets[:-1]
            in_host = pinned.address + first * _row_bytes(store)
            addresses = np.where(plan.in_hbm, addresses, in_host)
        stores.append(
            PlacedStore(
                store=replace(store, rows=rows),
                addresses=addresses,
                row_bytes=_row_bytes(store),
                tiers=np.where(plan.in_hbm, HBM, HOST).astype(np.uint8),
            )
        )
    return PlacedTable(
        episodes=table.episodes,
        stores=tuple(stores),
        device=device,
        hbm_bytes=plan.hbm_bytes,
        host_bytes=plan.host_bytes,
        reason=reason,
        _held=[*held, buffer],
    )


def decide(
    sizes: Int64Array,
    weights: npt.NDArray[np.float64],
    *,
    placement: Placement,
    hbm_budget: int | None,
    spare_bytes: int,
    memory: Memory,
) -> tuple[Plan, str]:
    """Return the plan and the line that says why; `place_table` states the rule.

    `spare_bytes` of the budget are left for the alignment of stores.
    """
    total = int(sizes.sum())
    if placement == "host":
        return plan_episodes(sizes, weights, 0), (
            f"placement host: {format_bytes(total)} in pinned host memory, as asked for"
        )
    if placement == "hbm":
        budget = memory.free_bytes() if hbm_budget is None else hbm_budget
        source = "free on the device" if hbm_budget is None else "the given budget"
        if total + spare_bytes > budget:
            raise too_large(total + spare_bytes, budget, source)
        return plan_episodes(sizes, weights, total), (
            f"placement hbm: {format_bytes(total)} in GPU memory, as asked for"
        )
    if hbm_budget is None:
        free = memory.free_bytes()
        budget = int(free * HBM_SHARE)
        source = f"{HBM_SHARE:.0%} of {format_bytes(free)} free"
    else:
        budget, source = hbm_budget, "given"
    plan = plan_episodes(sizes, weights, budget - spare_bytes)
    limit = f"budget {format_bytes(budget)}, {source}"
    if not plan.host_bytes:
        return plan, f"placement auto: all {format_bytes(total)} in GPU memory ({limit})"
    return plan, (
        f"placement auto: {format_bytes(plan.hbm_bytes)} of {format_bytes(total)} in GPU memory "
        f"({limit}): {int(plan.in_hbm.sum()):,} of {len(sizes):,} episodes, "
        f"{plan.hbm_share:.0%} of accesses; the rest in pinned host memory"
    )


def _check(table: Table, placement: str, hbm_budget: int | None) -> None:
    if placement not in ("auto", "hbm", "host"):
        raise InputError(
            "PLACEMENT",
            f"placement={placement!r} is not usable",
            remedy="use 'auto', 'hbm' or 'host'",
        )
    if hbm_budget is not None and hbm_budget < 0:
        raise InputError(
            "PLACEMENT", f"hbm_budget={hbm_budget} is negative", remedy="give bytes from 0"
        )
    if any(store.rows is None for store in table.stores):
        raise InputError(
            "PLACEMENT",
            "a table of mapped files cannot be placed for a GPU",
            remedy="build it with mode='read'",
        )


def _weights(given: npt.ArrayLike | None, lengths: Int64Array) -> npt.NDArray[np.float64]:
    weights = np.asarray(lengths if given is None else given, dtype=np.float64)
    if weights.shape != lengths.shape or not np.isfinite(weights).all() or (weights < 0).any():
        raise InputError(
            "EPISODE_WEIGHT",
            f"episode weights of shape {weights.shape} are not usable",
            remedy=f"give {len(lengths)} finite numbers from 0, one an episode",
        )
    return weights


def _row_bytes(store: Store) -> int:
    return store.width * store.dtype.itemsize


def _begins(table: Table, in_hbm: BoolArray) -> list[int]:
    """Return where each store begins in the GPU's buffer, and the buffer's size."""
    steps = int(table.episodes.lengths[in_hbm].sum())
    begins = [0]
    for store in table.stores:
        end = begins[-1] + steps * _row_bytes(store)
        begins.append(end + -end % ALIGNMENT_BYTES)
    return begins


def _upload(
    memory: Memory, buffer: Any, begin: int, table: Table, rows: Array, in_hbm: BoolArray
) -> None:
    """Copy the chosen episodes, packed in their order: long runs directly, short ones together."""
    row_bytes = rows.shape[1] * rows.itemsize
    staging: list[Array] = []
    staged = 0

    def flush() -> None:
        nonlocal begin, staged
        if staging:
            memory.upload(buffer, begin, np.concatenate(staging))
            begin += staged
            staging.clear()
            staged = 0

    for first, last in _runs(in_hbm):
        low, high = (table.margin + int(table.episodes.offsets[e]) for e in (first, last))
        run_bytes = (high - low) * row_bytes
        if staged + run_bytes > STAGING_BYTES:
            flush()
        if run_bytes > STAGING_BYTES:
            memory.upload(buffer, begin, rows[low:high])
            begin += run_bytes
        else:
            staging.append(rows[low:high])
            staged += run_bytes
    flush()


def _runs(chosen: BoolArray) -> Iterator[tuple[int, int]]:
    """Yield runs ``[first, last)`` of consecutive chosen episodes."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], chosen.view(np.int8), [0]))))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
