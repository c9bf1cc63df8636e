"""Where a loader's rows are: a tier is chosen, then rows are opened there.

Shape legend: B segments of a rank, K steps of a window, E episodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gear_offline.core.progress import say
from gear_offline.core.system import RESERVE_BYTES, available_bytes
from gear_offline.core.text import size_text
from gear_offline.core.types import BoolArray, Int64Array
from gear_offline.distributed.sharding import NodeShare, shard_weights, share_shards, take_share
from gear_offline.distributed.world import World
from gear_offline.errors import GearError, InputError
from gear_offline.kernels.columns import ColumnGroup, GroupAddresses
from gear_offline.kernels.draws import PriorityTree
from gear_offline.kernels.gather import CpuGather, Windows
from gear_offline.kernels.segments import Segments
from gear_offline.loaders.options import LoaderOptions
from gear_offline.sampling import Sampler
from gear_offline.sampling.base import Stream
from gear_offline.tables.joint import Source
from gear_offline.tables.shared import Handle, share_table
from gear_offline.tables.table import Table, build_table, table_bytes

if TYPE_CHECKING:
    from gear_offline.kernels.gather_gpu import GpuGather
    from gear_offline.loaders.sharded import Ring, ShardedSegments
    from gear_offline.tables.disk import DiskGather
    from gear_offline.tables.placement import PlacedTable


BLOCK_SEGMENTS = 16384  # segments selected and gathered in one pass, at most ...
BLOCK_BYTES = 32 << 20  # ... and at most this many bytes, at least one batch
SHARDED_STEPS = 32  # of a dataset spread over nodes: the first batch waits for all assignments


@dataclass(frozen=True, kw_only=True)
class Tier:
    """Where rows will be: on disk for a `reason`, else in memory; a `share` of them or all."""

    reason: str | None = None
    share: NodeShare | None = None


def choose_tier(
    source: Source, sampler: Sampler, world: World, options: LoaderOptions, on_gpu: bool
) -> Tier:
    """Decide where rows will be, before anything is built; all ranks call it together."""
    if not world.feeds:
        return Tier()
    reason = "as asked for" if options.placement == "disk" else None
    if options.placement == "auto":
        reason = _too_large(source, world, options)
    if reason is None:
        return Tier(share=_choose_share(source, sampler, world, options))
    problem = ""
    if sampler.learner is not None or sampler.cuts_windows:
        problem = f"strategy {sampler.name!r}"
    elif on_gpu and options.engine == "on":
        problem = "engine='on'"
    if problem:
        raise InputError(
            "LOADER_OPTION",
            f"rows that stay on disk, {reason}, do not serve {problem}",
            remedy="use placement='host' or more memory, or another option",
        )
    return Tier(reason=reason)


def _too_large(source: Source, world: World, options: LoaderOptions) -> str | None:
    """Return why the table should not be in memory, or None."""
    budget = options.host_budget
    if budget is None and world.size > 1:
        return None  # the ranks of a node build one table together, or none: none may step aside
    needed = table_bytes(source, **options.sizes)
    limit = available_bytes() - RESERVE_BYTES if budget is None else budget
    if needed <= limit:
        return None
    which = "available" if budget is None else "the budget"
    return f"since they take {size_text(needed)} in memory and {size_text(limit)} are {which}"


def _choose_share(
    source: Source, sampler: Sampler, world: World, options: LoaderOptions
) -> NodeShare | None:
    """Return what this rank's node holds, or None if every node holds all.

    Nodes get equal shares of the probability where the sampler knows it, else of steps.
    """
    if world.node_count == 1 or options.sharding == "replicate":
        return None
    needed = table_bytes(source, **options.sizes)
    if options.sharding == "auto" and needed <= min(
        world.gather(available_bytes() - RESERVE_BYTES)
    ):
        return None
    steps, weight = shard_weights(source), sampler.episode_weight
    weights = steps if weight is None else shard_weights(source, weight)
    owners, node = share_shards(weights, world.node_count, sizes=steps), world.nodes[world.rank]
    share = take_share(source, owners, node)
    say(
        f"sharding {options.sharding}: {len(share.shards)} of {len(weights)} shards, "
        f"{steps[owners == node].sum() / steps.sum():.1%} of {size_text(needed)} and "
        f"{weights[owners == node].sum() / weights.sum():.1%} of the draws, on this one of "
        f"{world.node_count} nodes",
        quiet=world.rank != world.leader,
    )
    return share


class Rows:
    """Open rows, and what makes windows of them: a gather, an engine or a reader of a disk."""

    table: Table  # in host memory; of rows on disk, the slots that they are read into

    def __init__(self, stream: Stream, device: torch.device) -> None:
        self._stream, self._device = stream, device
        self.block_steps = 1  # made in one pass
        self.engine: GpuGather | None = None
        self.disk: DiskGather | None = None
        self.remote: ShardedSegments | None = None  # of other nodes
        self.gather: CpuGather | None = None

    def windows(self, first_step: int, steps: int, *, ahead: bool) -> Windows:
        """Return the (steps, B, K, ...) windows of consecutive steps, on the device.

        `ahead`: as many steps that follow will be asked for next.
        """
        engine = self.engine
        if engine is not None and engine.draws:
            return engine.fill(first_step=first_step, steps=steps)
        if self.disk is not None and ahead:
            return self._moved(self.disk.fill_steps(first_step=first_step, steps=steps))
        segments, landing = self.take(first_step, steps)
        if engine is not None:
            windows = engine.gather(segments, landing)
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))
            self.release(event)
            return windows
        if self.disk is not None:
            return self._moved(self.disk.fill(segments))
        assert self.gather is not None, "rows are in memory or on disk"
        windows = self.gather.fill(segments, landing)
        self.release()
        return self._moved(windows)

    def take(self, first_step: int, steps: int) -> tuple[Segments, Int64Array | None]:
        """Return the (steps, B) segments of a rank, and the landing rows of remote ones."""
        if self.remote is not None:
            return self.remote.take(first_step, steps)
        return self._stream.segments(first_step, steps), None

    def release(self, event: Any = None) -> None:
        """Say that rows taken last are read, or will be when a CUDA event has come."""
        if self.remote is not None:
            self.remote.release(event)

    def close(self) -> None:
        """Stop reading from disk and from other nodes."""
        for part in (self.disk, self.remote):
            if part is not None:
                part.close()

    def _moved(self, windows: Windows) -> Windows:
        if self._device.type == "cpu":
            return windows
        return windows.map(lambda tensor: tensor.to(self._device, non_blocking=True))


def open_rows(
    source: Source,
    stream: Stream,
    world: World,
    device: torch.device,
    options: LoaderOptions,
    table: Table | None = None,
) -> Rows:
    """Choose a tier, or take `table`, and open rows there; all ranks call it together."""
    rows, on_gpu = Rows(stream, device), device.type == "cuda"
    tier, ring = Tier(), None
    if table is None:
        tier = choose_tier(source, stream.selection, world, options, on_gpu)
        if tier.reason is not None:
            _open_disk(rows, source, stream, world, tier.reason, options, pin=on_gpu)
            return rows
        landing_rows, shards = 0, None
        if tier.share is not None:
            ring, shards = _make_ring(source, stream, world, options), tier.share.shards.tolist()
            landing_rows = ring.rows * world.nodes.count(world.nodes[world.rank])
        table = _node_table(
            world, source, shards=shards, landing_rows=landing_rows, **options.values
        )
    else:
        _check_table(table, source, options)
    rows.table, share = table, tier.share
    held = None if share is None else share.nodes == world.nodes[world.rank]
    rows.block_steps = _block_steps(stream, window_bytes(table.groups, options.context_length))
    if on_gpu and options.engine != "off" and world.feeds:
        rows.engine = _open_engine(table, source, stream, world, device, options, held)
    if rows.engine is None:
        _need_rows(table)
        rows.gather = CpuGather(
            table.groups,
            source.episodes.offsets,
            margin=table.margin,
            context_length=options.context_length,
            padding=options.padding,
            held=held,
            pin=device.type != "cpu",
        )
    elif share is None and not rows.engine.reads_host:
        rows.table = table.without_rows()  # the GPU holds them all
    if share is not None and ring is not None:
        from gear_offline.distributed.exchange import open_exchange
        from gear_offline.loaders.sharded import ShardedSegments, held_rows

        exchange = open_exchange(
            held_rows(table, share), ring.of(table), world, mode=options.exchange
        )
        rows.remote = ShardedSegments(stream, world, share, exchange, ring, options.padding)
        rows.block_steps = ring.steps
    if stream.selection.learner is not None:
        rows.block_steps = 1  # the next step depends on the losses of this one
    return rows


def _make_ring(source: Source, stream: Stream, world: World, options: LoaderOptions) -> Ring:
    """Return the landing rows that this rank will need."""
    from gear_offline.loaders.sharded import Ring

    ranks = [rank for rank, node in enumerate(world.nodes) if node == world.nodes[world.rank]]
    history = options.frame_stack - 1
    row_bytes = table_bytes(source, **options.sizes) // source.episodes.steps
    steps = _block_steps(stream, row_bytes * (options.context_length + history))
    return Ring(
        steps=min(steps, SHARDED_STEPS) if stream.selection.learner is None else 1,
        share=stream.share,
        context_length=options.context_length,
        history=history,
        place=ranks.index(world.rank),
    )


def window_bytes(groups: Sequence[ColumnGroup], context_length: int) -> int:
    """Return the bytes that a window of `context_length` steps takes while it is gathered."""
    rows = sum(
        (context_length + group.history)
        * group.width
        * max(group.dtype.itemsize, max(field.dtype.itemsize for field in group.fields))
        for group in groups
    )
    return rows + 16 * context_length  # timesteps and mask


def _block_steps(stream: Stream, window: int, limits: tuple[int, int] | None = None) -> int:
    """Return the steps of a block of at most so many segments and bytes, at least one."""
    segments, nbytes = limits or (BLOCK_SEGMENTS, BLOCK_BYTES)
    return max(1, min(segments // stream.batch_size, nbytes // max(stream.share * window, 1)))


def _check_table(table: Table, source: Source, options: LoaderOptions) -> None:
    same = np.array_equal(table.episodes.lengths, source.episodes.lengths)
    if not same or table.margin != options.context_length + options.frame_stack - 1:
        raise InputError(
            "LOADER_OPTION",
            "the table is not one of this dataset for these windows",
            remedy="give build_table the same dataset, context_length and frame_stack",
        )


def _need_rows(table: Table) -> None:
    if not table.owned_bytes:
        raise InputError(
            "LOADER_OPTION",
            "the rows of the table are in a GPU's memory alone",
            remedy="build one with build_table and give it to all loaders",
        )


def _open_disk(
    rows: Rows,
    source: Source,
    stream: Stream,
    world: World,
    reason: str,
    options: LoaderOptions,
    *,
    pin: bool,
) -> None:
    from gear_offline.tables.disk import DiskGather

    budget = options.host_budget
    if budget is None:
        ranks = world.nodes.count(world.nodes[world.rank])
        budget = max((available_bytes() - RESERVE_BYTES) // (2 * ranks), 1)
    rows.disk = DiskGather(
        source, stream, host_budget=budget, pin=pin, padding=options.padding, **options.values
    )
    rows.table = rows.disk.table
    limits = rows.disk.sizes.block_limits(BLOCK_SEGMENTS, BLOCK_BYTES)
    window = window_bytes(rows.table.groups, options.context_length)
    rows.block_steps = _block_steps(stream, window, limits)
    if options.placement == "auto" or pin:
        how = "into page-locked memory, and copied" if pin else "here"
        say(
            f"placement {options.placement}: the rows stay on disk, {reason}; "
            f"{size_text(budget)} of host memory keep {rows.disk.sizes.slots:,} windows; "
            f"the CPU gathers batches {how}"
        )


def _node_table(
    world: World, source: Source, *, shards: Sequence[int] | None, **options: Any
) -> Table:
    """Build a table in memory of this process, or once a node if the node has several ranks."""
    if not world.feeds:
        return build_table(source, shards=(), **options)
    if len(world.nodes) == world.node_count:
        return build_table(source, shards=shards, **options)
    made = world.lead(lambda: share_table(source, shards=shards, **options), leader=world.leader)
    handles = world.gather(None if made is None else asdict(made[1].handle()))
    if made is None:
        handle = Handle(**handles[world.leader])
        made = share_table(source, handle=handle, shards=shards, **options)
    world.gather(None)  # the leader's memory stays open until everyone has it
    return made[0]


def _open_engine(
    table: Table,
    source: Source,
    stream: Stream,
    world: World,
    device: torch.device,
    options: LoaderOptions,
    held: BoolArray | None,
) -> GpuGather | None:
    """Place the table and return the GPU's gather; with ``"auto"`` None where that cannot be."""
    from gear_offline.kernels.gather_gpu import GpuGather

    sampler = stream.selection
    draw = sampler.gpu if held is None else None
    try:
        if isinstance(draw, PriorityTree):
            draw.on_device(device)  # the table takes what is left
        placed = _place(table, sampler, world, device, options, held)
        groups, pinned = list(placed.groups), list[Any]()
        if held is not None:
            groups, pinned = _with_landing(table, placed, held)
        return GpuGather(
            groups,
            source.episodes.offsets,
            device=placed.device,
            context_length=options.context_length,
            padding=options.padding,
            batch_size=stream.share,
            draw=draw,
            drawn_from=sampler.index.offsets,
            seed=stream.seed,
            first_slot=stream.first_slot,
            global_batch=stream.batch_size,
            reads_host=placed.host_bytes > 0 or held is not None,
            reason=placed.reason,
            held=(placed, pinned),
        )
    except GearError as error:
        if options.engine == "on" or options.placement != "auto":
            raise
        say(f"engine auto: batches are gathered by the CPU: {error}")
        return None


def _place(
    table: Table,
    sampler: Sampler,
    world: World,
    device: torch.device,
    options: LoaderOptions,
    held: BoolArray | None,
) -> PlacedTable:
    """Place a table; loaders that were given the same table share its copy on the GPU."""
    from gear_offline.tables.placement import Ranks, place_table

    weights = sampler.episode_weight
    if weights is not None and held is not None:
        weights = weights[held]
    if weights is not None and len(weights) != table.episodes.episodes:
        weights = None
    key = (str(device), options.placement, options.hbm_budget)
    drawn = key if weights is None else (*key, weights.tobytes())
    placed: PlacedTable | None = table.placed.get(key) or table.placed.get(drawn)
    if placed is None:
        _need_rows(table)
        placed = place_table(
            table,
            device=device,
            placement=options.placement,  # type: ignore[arg-type]  # not on disk
            hbm_budget=options.hbm_budget,
            episode_weight=weights,
            ranks=Ranks(rank=world.rank, nodes=world.nodes, gather=world.gather),
        )
        whole = placed.host_bytes + placed.peer_bytes == 0  # whatever is drawn more often
        table.placed[key if whole else drawn] = placed
    return placed


def _with_landing(
    table: Table, placed: PlacedTable, held: BoolArray
) -> tuple[list[GroupAddresses], list[Any]]:
    """Return the addresses of all episodes, 0 of those not held, and of landing rows.

    Those are pinned with the other rows, or alone if none is read from host memory: by the list.
    """
    from gear_offline.tables.device import DeviceMemory
    from gear_offline.tables.placement import HOST

    in_host, pinned = np.flatnonzero(placed.tiers == HOST), list[Any]()
    landing = 2 * table.margin + table.episodes.steps
    groups = []
    for each, group in zip(placed.groups, table.groups, strict=True):
        if len(in_host):
            row = table.margin + table.episodes.offsets[in_host[0]]
            address = int(each.addresses[in_host[0]] + (landing - row) * group.row_bytes)
        else:
            pinned.append(DeviceMemory(placed.device).pin(group.rows[landing:]))
            address = pinned[-1].address
        addresses = np.zeros(len(held), np.int64)
        addresses[held] = each.addresses
        groups.append(replace(each, addresses=addresses, landing=address))
    return groups, pinned
