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
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gear_offline.dataset.schema import EpisodeIndex
from gear_offline.errors import InputError, UnavailableError
from gear_offline.kernels.columns import ColumnGroup, GroupAddresses
from gear_offline.tables.device_memory import CudaMemory, Memory
from gear_offline.tables.placement_plan import Placement, decide, episode_weights
from gear_offline.tables.table import Table

if TYPE_CHECKING:
    import torch

    from gear_offline.distributed.world import World

__all__ = ["PlacedGroup", "PlacedTable", "place_table"]

HBM, HOST = 0, 1  # values of `PlacedGroup.tiers`

ALIGNMENT_BYTES = 256  # of each group in GPU memory, as CUDA's own allocations
STAGING_BYTES = 64 << 20  # scattered episodes are packed into pieces of this size and copied

Array = npt.NDArray[Any]
Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, eq=False)
class PlacedGroup:
    """Where one group's rows lie.

    Attributes
    ----------
    group
        Fields, dtype and width; its rows are empty where no episode is read from host memory.
    addresses
        (E,) int64, device-visible address of each episode's first row.
    row_bytes
        Bytes from one step to the next.
    tiers
        (E,) uint8, `HBM` or `HOST`.
    """

    group: ColumnGroup
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
    groups
        As the table's, in its order.
    device
        The GPU.
    hbm_bytes, peer_bytes, host_bytes
        Bytes of rows served from either tier: this GPU's memory, that of other GPUs of the node,
        pinned host memory.  The host copy of the whole table stays in memory
        if `host_bytes` is not 0.
    reason
        The decision in one line.
    """

    episodes: EpisodeIndex
    groups: tuple[PlacedGroup, ...]
    device: torch.device
    hbm_bytes: int
    host_bytes: int
    reason: str
    peer_bytes: int = 0
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


def place_table(
    table: Table,
    *,
    device: torch.device | str,
    placement: Placement = "auto",
    hbm_budget: int | None = None,
    episode_weight: npt.ArrayLike | None = None,
    world: World | None = None,
) -> PlacedTable:
    """Bring a table's rows to where a GPU can read them.

    Parameters
    ----------
    table
        In memory of this process.
    device
        A CUDA device.
    placement
        ``"hbm"``: all in GPU memory.  ``"host"``: all read in place from pinned host memory.
        ``"peer"``: parted over the GPUs of the node, which read each other's memory.  ``"auto"``:
        all in GPU memory if that fits the budget, else the hottest episodes, with peers if there
        are any.
    hbm_budget
        Bytes of GPU memory to use; by default `HBM_SHARE` of what is free, for ``"hbm"`` all of it.
    episode_weight
        (E,), how often each episode is drawn, in any unit; by default its length, which is the
        law of ``uniform_steps``.
    world
        The ranks that place the same table together, one a GPU.

    Raises
    ------
    GearError
        ``HBM_SHORT`` if ``"hbm"`` does not fit; ``HOST_PIN`` or ``MEMLOCK_LIMIT``.
    InputError
        ``PLACEMENT`` (unknown, negative budget), ``EPISODE_WEIGHT``.
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
    memory = CudaMemory(device)
    if world is not None and world.size > 1:
        from gear_offline.tables.peer_placement import NodePeers, place_with

        return place_with(
            memory,
            NodePeers(world),
            table,
            device=device,
            placement=placement,
            hbm_budget=hbm_budget,
            episode_weight=episode_weight,
        )
    return place_in(
        memory,
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
    check_placement(table, placement, hbm_budget)
    row_bytes = sum(bytes_of_row(group) for group in table.groups)
    lengths = table.episodes.lengths
    plan, reason = decide(
        lengths * row_bytes,
        episode_weights(episode_weight, lengths),
        placement=placement,
        hbm_budget=hbm_budget,
        spare_bytes=ALIGNMENT_BYTES * len(table.groups),
        memory=memory,
    )
    held: list[Any] = []
    begins = begins_of(table, plan.in_hbm)
    base, buffer = memory.allocate(begins[-1]) if plan.hbm_bytes else (0, None)
    packed = np.cumsum(lengths * plan.in_hbm) - lengths * plan.in_hbm  # chosen steps before each
    groups = []
    for group, begin in zip(table.groups, begins, strict=False):
        if buffer is not None:
            upload(memory, buffer, begin, table, group.rows, plan.in_hbm)
        addresses = base + begin + packed * bytes_of_row(group)
        rows = np.empty((0, group.width), group.dtype)  # width and dtype without the memory
        if plan.host_bytes:
            rows = group.rows
            pinned = memory.pin(rows)
            held.append(pinned)
            first = table.margin + table.episodes.offsets[:-1]
            in_host = pinned.address + first * bytes_of_row(group)
            addresses = np.where(plan.in_hbm, addresses, in_host)
        groups.append(
            PlacedGroup(
                group=replace(group, rows=rows),
                addresses=addresses,
                row_bytes=bytes_of_row(group),
                tiers=np.where(plan.in_hbm, HBM, HOST).astype(np.uint8),
            )
        )
    return PlacedTable(
        episodes=table.episodes,
        groups=tuple(groups),
        device=device,
        hbm_bytes=plan.hbm_bytes,
        host_bytes=plan.host_bytes,
        reason=reason,
        _held=[*held, buffer],
    )


def check_placement(table: Table, placement: str, hbm_budget: int | None) -> None:
    if placement not in ("auto", "hbm", "host", "peer"):
        raise InputError(
            "PLACEMENT",
            f"placement={placement!r} is not usable",
            remedy="use 'auto', 'hbm', 'peer' or 'host'",
        )
    if hbm_budget is not None and hbm_budget < 0:
        raise InputError(
            "PLACEMENT", f"hbm_budget={hbm_budget} is negative", remedy="give bytes from 0"
        )


def bytes_of_row(group: ColumnGroup) -> int:
    return group.width * group.dtype.itemsize


def begins_of(table: Table, in_hbm: BoolArray) -> list[int]:
    """Return where each group begins in the GPU's buffer, and the buffer's size."""
    steps = int(table.episodes.lengths[in_hbm].sum())
    begins = [0]
    for group in table.groups:
        end = begins[-1] + steps * bytes_of_row(group)
        begins.append(end + -end % ALIGNMENT_BYTES)
    return begins


def upload(
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


def group_addresses(placed: PlacedTable) -> list[GroupAddresses]:
    """Return where the GPU's gather finds the rows."""
    return [GroupAddresses(group=each.group, addresses=each.addresses) for each in placed.groups]
