"""The rows of a loader and their gather: choose a tier, then open it.

Shape legend: B segments of a rank, K steps of a window, E episodes.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from gear_offline.batches.sampling.draws import SegmentStream
from gear_offline.batches.tables.fields import ACTIONS, EXTRA
from gear_offline.batches.tables.joint import TableData, is_kept, parts_of
from gear_offline.batches.tables.shared import (
    PLACED,
    Handle,
    get_table,
    is_known,
    share_table,
    table_key,
)
from gear_offline.batches.tables.table import (
    Table,
    build_table,
    no_rows,
    plan_groups,
    span_index,
    table_bytes,
)
from gear_offline.core.system import RESERVE_BYTES, available_bytes
from gear_offline.core.text import say, size_text
from gear_offline.core.types import BoolArray, Int64Array
from gear_offline.data.dataset.schema import EpisodeIndex
from gear_offline.distributed.sharding import choose_share
from gear_offline.distributed.world import World
from gear_offline.errors import GearError, InputError, UnavailableError
from gear_offline.kernels.columns import ColumnGroup, GroupAddresses
from gear_offline.kernels.cuda_module import import_cupy
from gear_offline.kernels.draws import Segments
from gear_offline.kernels.gather import CpuGather, Windows
from gear_offline.kernels.gather_gpu import GpuGather
from gear_offline.loaders.chunks import Chunks, ExtraGather
from gear_offline.loaders.goals import GoalSampler
from gear_offline.loaders.options import LoaderOptions
from gear_offline.loaders.segments import LocalSegments, Ring, ShardedSegments

if TYPE_CHECKING:
    from gear_offline.batches.tables.disk import DiskGather
    from gear_offline.batches.tables.placement import PlacedTable


class Limits(NamedTuple):
    """Sizes of one pass, large enough that its fixed costs do not show."""

    segments: int  # of all ranks, selected and gathered in one pass, at most ...
    nbytes: int  # ... and at most this many bytes, at least one batch
    sharded_steps: int  # of a dataset spread over nodes: the first batch waits for all assignments
    ring_bytes: int  # ... and each part of the ring takes at most this, or what one pass needs


CPU_LIMITS = Limits(16_384, 32 << 20, 32, 128 << 20)  # more leave the processor's caches
GPU_LIMITS = Limits(65_536, 128 << 20, 64, 256 << 20)
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
BLOCK_STEPS = 256  # at most: Python's collector takes twice as long a batch where 1,024 wait

RankSegments = LocalSegments | ShardedSegments
Gather = CpuGather | GpuGather
ExtraGathers = tuple[tuple[ExtraGather, Gather], ...]  # goals, chunks, and what gathers them
# Of windows, of what goes with them, and what the rows lie in.
Gathers = tuple["Gather", "ExtraGathers", "Table | PlacedTable"]


@dataclass(frozen=True, eq=False)
class MemoryRows:
    """Rows in memory of the host or the GPUs."""

    memory: Any  # the `Table` or `PlacedTable` that they lie in: loaders that are alike share it
    segments: RankSegments
    block_steps: int
    device: torch.device
    gather: Gather
    extra_gathers: ExtraGathers

    def windows(self, first_step: int, steps: int, *, ahead: bool) -> Windows:
        """Return the (steps, B, K, ...) windows of consecutive steps, on the loader's device.

        `ahead`: as many steps that follow will be asked for next.
        """
        gather, event = self.gather, None
        if isinstance(gather, GpuGather) and gather.draws:
            # draw, locate, gather: one kernel
            windows = gather.draw_and_gather(first_step, steps)
            return _with_extras(windows, self.extra_gathers, first_step)
        # Draw here; rows of other nodes have landed then.  The gather knows where all others lie.
        block = self.segments.draw(first_step, steps)
        segments = block.segments
        if block.names is not None and isinstance(gather, GpuGather):
            windows = gather.gather_named(block.names)
        else:
            windows = gather.gather(segments, block.landing)
        windows = _with_counts(windows, segments)
        windows = _with_extras(windows, self.extra_gathers, first_step, segments)
        if isinstance(gather, GpuGather) and not self.segments.in_stream:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(gather.device))
        self.segments.release(event)
        return _move_windows(windows, self.device)

    def close(self) -> None:
        """Stop reading from disk and from other nodes."""
        self.segments.close()


@dataclass(frozen=True, eq=False)
class DiskRows:
    """Rows that stay in the shards and are read ahead of use."""

    memory: Table  # the slots of windows
    segments: LocalSegments
    block_steps: int
    gather: DiskGather
    device: torch.device
    extra_gathers: ExtraGathers  # of chunks, whose actions are in memory whole

    def windows(self, first_step: int, steps: int, *, ahead: bool) -> Windows:
        if ahead:
            windows = self.gather.draw_and_gather(first_step, steps)
        else:
            windows = self.gather.gather(self.segments.draw(first_step, steps).segments)
        episodes, starts = windows.segments.numpy().T.swapaxes(1, 2)
        chances = np.broadcast_to(np.float64(1), starts.shape)
        segments = Segments(episodes=episodes, starts=starts, probability=chances)
        windows = _with_extras(windows, self.extra_gathers, first_step, segments)
        return _move_windows(windows, self.device)

    def close(self) -> None:
        self.gather.close()


Rows = MemoryRows | DiskRows


def _with_counts(windows: Windows, segments: Segments) -> Windows:
    """Return windows with the counts of counted draws, (T, B) each, as fields."""
    if segments.times_sampled is not None:
        for name in ("probability", "times_sampled", "table_size"):
            values = torch.from_numpy(np.ascontiguousarray(getattr(segments, name)))
            windows = windows.with_field(EXTRA + name, values.to(windows.segments.device))
    return windows


def _with_extras(
    windows: Windows,
    extra_gathers: ExtraGathers,
    first_step: int,
    segments: Segments | None = None,
) -> Windows:
    """Return windows with what is gathered beside them, (T, B, any, ...), as further fields.

    Without `segments` the GPU draws them again.
    """
    for extra, rows in extra_gathers:
        if segments is not None:
            gathered = rows.gather(extra.draw(first_step, segments))
        else:
            assert isinstance(rows, GpuGather), "the GPU drew"
            gathered = rows.draw_and_gather(first_step, len(windows.segments))
        for name, values in extra.tensors(gathered).items():
            shape = tuple(values.shape[3:])
            windows = windows.with_field(EXTRA + name, values.contiguous(), shape)
    return windows


def _move_windows(windows: Windows, device: torch.device) -> Windows:
    if windows.segments.device == device:
        return windows
    return windows.map(lambda tensor: tensor.to(device, non_blocking=True))


@dataclass(frozen=True, eq=False)
class RowOpener:
    """Chooses a tier and opens rows there; all ranks of `world` call it together."""

    data: TableData
    stream: SegmentStream
    world: World
    device: torch.device
    options: LoaderOptions
    goals: GoalSampler | None

    @cached_property
    def _index(self) -> EpisodeIndex:
        return span_index(self.data, self.options.table)

    @property
    def _reach(self) -> Int64Array | None:
        return None if self._index.histories is None else self._index.reach

    @cached_property
    def _extra_gathers(self) -> list[ExtraGather]:
        """Gathers beside windows: goals, chunks."""
        span, chunk = self.options.context_length, self.options.chunk
        goals: list[ExtraGather] = [] if self.goals is None else [self.goals]
        return goals if chunk is None else [*goals, Chunks(self._index, span, chunk)]

    def open(self) -> Rows:
        """Open the rows: on disk, else in memory."""
        if not self.world.feeds:
            return self._open_memory(None)
        if (reason := self._disk_reason()) is not None:
            return self._open_disk(reason)
        return self._open_memory(self._make_ring())

    def _open_memory(self, ring: Ring | None) -> MemoryRows:
        """Open rows in memory: the GPU gathers them from where they are placed, else the CPU.

        Without a `ring` this node holds all rows.
        """
        options, device, build = self.options, self.device, cache(partial(self._build, ring))
        local = None if ring is None else ring.share.nodes == self.world.node
        opened: Gathers | None = None
        no_peers = None if ring is None else self._why_no_peers()
        if ring is None and options.exchange != "auto" and self.world.is_first:
            say(f"exchange {options.exchange}: not used, no rows are spread over nodes")
        if device.type == "cuda" and options.engine != "off" and self.world.feeds:
            opened = self._gpu_gathers(build, ring, maps=no_peers is None)
        gather, extra_gathers, memory = opened or self._cpu_gathers(build(), local)
        if ring is not None and no_peers is None:
            no_peers = self._agree(getattr(memory, "no_peers", "the CPU gathers"))
        if ring is not None:
            self._say_peers(no_peers)
        if ring is None or no_peers is None:
            segments: RankSegments = LocalSegments(self.stream)
            window = window_bytes(gather.groups, options.context_length)
            window += sum(window_bytes(rows.groups, each.steps) for each, rows in extra_gathers)
            steps = self._block_steps(window, self._limits)
        else:
            engine = gather if isinstance(gather, GpuGather) else None
            segments = ShardedSegments(self.stream, self.world, ring, build(), engine)
            steps = ring.pass_steps
        if isinstance(gather, GpuGather):
            device = gather.device
        return MemoryRows(memory, segments, steps, device, gather, extra_gathers)

    def _why_no_peers(self) -> str | None:
        """Return why rows of other nodes are not read in their GPUs; the same on every rank."""
        if self.options.exchange not in ("auto", "peer"):
            return "not asked for"
        if any(part.dataset.admissions for part in parts_of(self.data)):
            return "what data that grow leave behind would stay in GPU memory"
        host: str | None = None
        if self.device.type == "cuda" and self.options.engine != "off":
            with suppress(GearError, OSError):
                import_cupy()
                host = f"{socket.gethostname()} {BOOT_ID.read_text()}"
        hosts = self.world.gather(host)
        if None in hosts:
            return f"rank {hosts.index(None)} has no GPU that gathers"
        return None if len(set(hosts)) == 1 else f"the ranks are on {len(set(hosts))} hosts"

    def _agree(self, no_peers: str | None) -> str | None:
        """Return the reason, which is the same on every rank; an error on all where it is not."""
        reasons = self.world.gather(no_peers)
        if len(set(reasons)) > 1:
            rank = next(rank for rank, reason in enumerate(reasons) if reason is not None)
            problem = f"rank {rank} does not read the rows of other nodes as others do: "
            remedy = "see its own message, or set loader.exchange=gloo"
            raise GearError("RANK_FAILED", problem + reasons[rank], remedy=remedy)
        return no_peers

    def _say_peers(self, no_peers: str | None) -> None:
        """Say that rows of other nodes are read in place, or why not."""
        if no_peers is not None and self.options.exchange == "peer":
            remedy = "use loader.exchange=auto"
            raise UnavailableError("EXCHANGE", f"no peers: {no_peers}", remedy=remedy)
        asked = self.options.exchange in ("auto", "peer") and self.device.type == "cuda"
        if asked and self.world.is_first:
            says = "none, rows are read in the memory of their GPUs (every rank maps it)"
            say(f"exchange: {says if no_peers is None else f'not in place: {no_peers}'}")

    def _disk_reason(self) -> str | None:
        """Return the reason why the rows stay on disk, or None where they come into memory."""
        options, sampler = self.options, self.stream.selection
        reason, budget = None, options.host_budget
        names = (*options.observations, *options.extra_columns)
        if kept := [name for name in names if is_kept(self.data, name)]:
            reason = f"since frames of {', '.join(kept)} stay in videos"
            for name, usable in (("placement", "auto disk"), ("sharding", "auto replicate")):
                if (value := getattr(options, name)) not in usable.split():
                    problem = f"{name}={value!r} is not usable {reason}"
                    remedy = f"use {name}='auto', or convert without --video keep"
                    raise InputError("LOADER_OPTION", problem, remedy=remedy)
        elif options.placement == "disk":
            reason = "as asked for"
        # The ranks of a node build one table together: without a budget none may step aside.
        elif options.placement == "auto" and (budget is not None or self.world.size == 1):
            is_there = budget is None and is_known(self.data, options.table)
            row_bytes = 0 if is_there else table_bytes(self.data, options.table)
            limit = available_bytes() - RESERVE_BYTES if budget is None else budget
            if row_bytes > limit:
                reason = (
                    f"since they take {size_text(row_bytes)} in memory and {size_text(limit)} are "
                    f"{'available' if budget is None else 'the budget'}"
                )
        if reason is None:
            return None
        unfit = not sampler.can_prefetch or sampler.cuts_windows
        engine = self.device.type == "cuda" and options.engine == "on"
        if unfit or engine or self.goals is not None:
            problem = (
                f"strategy {sampler.name!r}" if unfit else "engine='on'" if engine else "goals"
            )
            problem = f"rows that stay on disk, {reason}, do not serve {problem}"
            remedy = "use placement='host' or more memory, or another option"
            if kept:
                remedy = "convert without --video keep, or use another option"
            raise InputError("LOADER_OPTION", problem, remedy=remedy)
        return reason

    def _open_disk(self, reason: str) -> DiskRows:
        from gear_offline.batches.tables.disk import DiskGather

        options, budget, pin = self.options, self.options.host_budget, self.device.type == "cuda"
        if budget is None:
            budget = max((available_bytes() - RESERVE_BYTES) // (2 * len(self.world.members)), 1)
        plans = plan_groups(self.data, options.table) if options.chunk is not None else []
        plans = [plan for plan in plans if ACTIONS in plan.fields]
        rows = self.data.episodes.steps + 2 * options.table.margin
        gather = DiskGather(
            self.data,
            self.stream,
            replace(options.table, chunk=None),
            host_budget=budget,
            kept_bytes=rows * sum(plan.row_bytes for plan in plans),
            processes=len(self.world.members),
            padding=options.padding,
            pin=pin,
        )
        _, extra_gathers, _ = self._cpu_gathers(
            build_table(self.data, options.table, plans=plans), None
        )
        if options.placement == "auto" or pin:
            how = "into page-locked memory, and copied" if pin else "here"
            say(
                f"placement {options.placement}: the rows stay on disk, {reason}; "
                f"{size_text(budget)} of host memory keep {gather.sizes.slots:,} windows; "
                f"the CPU gathers batches {how}"
            )
        window = window_bytes(gather.table.groups, options.context_length)
        window += sum(window_bytes(rows.groups, each.steps) for each, rows in extra_gathers)
        sizes, limits = gather.sizes, CPU_LIMITS
        segments = min(sizes.handout, limits.segments)
        nbytes = min(sizes.output_bytes, limits.nbytes)
        steps = self._block_steps(window, limits._replace(segments=segments, nbytes=nbytes))
        local = LocalSegments(self.stream)
        return DiskRows(gather.table, local, steps, gather, self.device, extra_gathers)

    @property
    def _limits(self) -> Limits:
        on_gpu = self.device.type == "cuda" and self.options.engine != "off"
        return GPU_LIMITS if on_gpu else CPU_LIMITS

    def _block_steps(self, window: int, limits: Limits) -> int:
        """Return the steps of a block within the limits, at least one."""
        if not self.stream.selection.can_prefetch:
            return 1
        fits = limits.nbytes // max(self.stream.rank_batch * window, 1)
        return max(1, min(limits.segments // self.stream.global_batch, fits, BLOCK_STEPS))

    def _make_ring(self) -> Ring | None:
        """Return the share and landing rows of this rank; None where each node holds all rows."""
        options = self.options
        is_whole = bool(self._extra_gathers) or options.span == "history"
        sharding = "replicate" if is_whole else options.sharding
        share = choose_share(self.data, self.stream.selection, self.world, options.table, sharding)
        if share is None:
            return None
        row_bytes = table_bytes(self.data, options.table) // self.data.episodes.steps
        window = row_bytes * options.table.margin
        # The ranks' blocks are the same, also where some have no GPU.
        limits, rank_batch = Limits(*min(self.world.gather(self._limits))), self.stream.rank_batch
        steps = min(self._block_steps(window, limits), limits.sharded_steps)
        fits = limits.ring_bytes // max(rank_batch * window, 1)
        fits = min(fits, limits.segments // self.stream.global_batch, limits.sharded_steps)
        passes = max(fits // steps, 1) if self.stream.selection.can_prefetch else 1
        return Ring(
            share=share,
            pass_steps=steps,
            steps=steps * passes,
            rank_batch=rank_batch,
            options=options,
        )

    def _build(self, ring: Ring | None) -> Table:
        """Build a table in memory of this process, or once a node if the node has several ranks."""
        world, ring_options = self.world, dict[str, Any]()
        if ring is not None:
            ring_options["shards"] = ring.share.shards.tolist()
            ring_options["landing_rows"] = ring.rows * len(world.members)
        if not world.feeds:
            return build_table(self.data, self.options.table, shards=())
        if world.size == world.node_count:
            make = build_table if ring_options else get_table
            return make(self.data, self.options.table, **ring_options)
        share = partial(share_table, self.data, self.options.table, **ring_options)
        shared = world.lead(share, leader=world.leader)
        handles = world.gather(None if shared is None else asdict(shared[1].handle()))
        if shared is None:
            shared = share(handle=Handle(**handles[world.leader]))
        world.gather(None)  # the leader's memory stays open until everyone has it
        return shared[0]

    def _cpu_gathers(self, table: Table, local: BoolArray | None) -> Gathers:
        """Return the CPU's gathers, as `_gpu_gathers` those of the GPU."""
        rows, span = (self._index.lengths, table.first_rows(local)), self.options.context_length
        make = partial(CpuGather, pin=self.device.type != "cpu")
        padding, reach = self.options.padding, self._reach
        gather = make(table.groups, *rows, context_length=span, padding=padding, reach=reach)
        extra_gathers = list[tuple[ExtraGather, Gather]]()
        for each in self._extra_gathers:
            groups = [group for group in table.groups if _has(group, each.field)]
            gathered = make(groups, *rows, context_length=each.steps, repeat=each.repeat)
            extra_gathers.append((each, gathered))
        return gather, tuple(extra_gathers), table

    def _gpu_gathers(
        self, build: Callable[[], Table], ring: Ring | None, *, maps: bool
    ) -> Gathers | None:
        """Place the table and return the GPU's gathers, as `Gathers`, and the copy.

        With ``"auto"`` None where that cannot be.  Beside a `ring` the table has some episodes;
        with `maps` the ranks try to read the others in place.
        """
        options, selection, world = self.options, self.stream.selection, self.world
        draw = selection.gpu if all(each.behind for each in self._extra_gathers) else None
        try:
            if ring is None and draw is not None and draw.tree is not None:
                draw.tree(self.device)  # the table takes what is left
            placed = self._place(build, ring, maps=maps)
            groups: Sequence[GroupAddresses] = placed.groups
            if ring is not None and placed.no_peers is not None:
                draw, local = None, ring.share.nodes == world.node
                groups = [_for_all_episodes(each, local) for each in groups]
            make = partial(
                GpuGather,
                offsets=self._index.offsets,
                device=placed.device,
                draw=draw,
                seed=self.stream.seed,
                first_slot=self.stream.first_slot,
                global_batch=self.stream.global_batch,
                rank_batch=self.stream.rank_batch,
                reads_host=placed.reads_host,
                reason=placed.reason,
                keep=placed,
            )
            engine = make(
                groups,
                context_length=options.context_length,
                padding=options.padding,
                reach=self._reach,
            )
            extra_gathers = list[tuple[ExtraGather, Gather]]()
            for each in self._extra_gathers:
                rows = [row for row in groups if _has(row.group, each.field)]
                shape: Any = {"context_length": each.steps, "repeat": each.repeat}
                extra_gathers.append((each, make(rows, **shape, behind=each.behind)))
            return engine, tuple(extra_gathers), placed
        except GearError as error:
            if options.engine == "on" or options.placement != "auto":
                raise
            say(f"engine auto: batches are gathered by the CPU: {error}")
            return None

    def _place(self, build: Callable[[], Table], ring: Ring | None, *, maps: bool) -> PlacedTable:
        """Place the table; loaders of this process that are alike share its copy on the GPU."""
        from gear_offline.batches.tables.device import DeviceMemory
        from gear_offline.batches.tables.placement import Ranks, Spread, place_table

        options, world = self.options, self.world
        how, key = (str(self.device), options.placement, options.hbm_budget), ""
        if world.size == 1:
            key = table_key(self.data, options.table)
            if (shared_table := PLACED.get((key, *how))) is not None:
                return shared_table  # type: ignore[no-any-return]
        weights, read = self.stream.selection.episode_weight, None
        is_alone = world.size == 1 and ring is None and self._index.is_side_by_side
        if is_alone and not is_known(self.data, options.table):
            plan = partial(build_table, self.data, options.table, allocate=no_rows)
            table = plan(fill=False)
            read = lambda lend: build() if lend is None else plan(lend=lend)  # noqa: E731
        else:
            table = build()
        if weights is not None and len(weights) != self.data.episodes.episodes:
            weights = None  # the sampler draws from the first episodes only
        spread = None
        if ring is not None:
            spread = Spread(lengths=ring.share.lengths, nodes=ring.share.nodes)
            weights = None if weights is None else weights[spread.nodes == world.node]
        placed = place_table(
            table,
            DeviceMemory(self.device),
            placement=options.placement,  # type: ignore[arg-type]  # not on disk
            hbm_budget=options.hbm_budget,
            episode_weight=weights,
            ranks=Ranks(rank=world.rank, nodes=world.nodes, gather=world.gather),
            landing=ring is not None,
            before=PLACED.get((table.grown_from, *how)),
            spread=spread if maps else None,
            read=read,
        )
        if key:
            PLACED[key, *how] = placed
        return placed


def window_bytes(groups: Sequence[ColumnGroup], context_length: int) -> int:
    """Return the bytes that a window of `context_length` steps takes while it is gathered."""
    rows = sum(
        (context_length + group.history)
        * group.width
        * max(group.dtype.itemsize, max(field.dtype.itemsize for field in group.fields))
        for group in groups
    )
    return rows + 16 * context_length  # timesteps and mask


def _has(group: ColumnGroup, name: str) -> bool:
    return any(field.name == name for field in group.fields)


def _for_all_episodes(each: GroupAddresses, local: BoolArray) -> GroupAddresses:
    """Return addresses for all episodes of a dataset; those that the table lacks get another's.

    Only segments that nobody has written yet read there, while a captured step is rehearsed.
    """
    addresses = np.full(len(local), each.addresses[0])
    addresses[local] = each.addresses
    return replace(each, addresses=addresses)
