"""Whether the GPU gathers a loader's batches, and what it says about that."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

import torch

from gear_offline.core.progress import say
from gear_offline.distributed.world import World
from gear_offline.errors import GearError
from gear_offline.kernels.draws import PriorityTree
from gear_offline.kernels.gather import Padding, Windows
from gear_offline.loaders.options import need_rows
from gear_offline.sampling import Segments
from gear_offline.sampling.stream import Stream
from gear_offline.tables.table import Table

if TYPE_CHECKING:
    from gear_offline.kernels.gather_gpu import GpuGather
    from gear_offline.tables.placement import PlacedTable, Placement

Engine = Literal["auto", "on", "off"]


class Gather(Protocol):
    """What fills the windows of named segments."""

    def fill(self, segments: Segments) -> Windows:
        """Return the windows of `segments`, of any leading shape, in memory of their own."""
        ...


def make_engine(
    table: Table,
    stream: Stream,
    *,
    device: torch.device,
    world: World,
    engine: Engine,
    placement: Placement,
    hbm_budget: int | None,
    context_length: int,
    padding: Padding,
) -> GpuGather | None:
    """Place the table and return the engine; with ``"auto"`` None where that cannot be."""
    from gear_offline.kernels.gather_gpu import GpuGather
    from gear_offline.tables.placement import Ranks, place_table

    weights = stream.selection.episode_weight
    if weights is not None and len(weights) != table.episodes.episodes:
        weights = None  # a node's share of the episodes

    def place() -> PlacedTable:
        return place_table(
            table,
            device=device,
            placement=placement,
            hbm_budget=hbm_budget,
            episode_weight=weights,
            ranks=Ranks(rank=world.rank, nodes=tuple(world.nodes), gather=world.gather),
        )

    try:
        draw, drawn = stream.selection.gpu, stream.selection.index
        if isinstance(draw, PriorityTree):
            draw.on_device(device)  # the table takes what is left
        # Loaders that were given the same table share its copy on the GPU.
        key = (str(device), placement, hbm_budget)
        by_weight = key if weights is None else (*key, weights.tobytes())
        placed = table.placed.get(key) or table.placed.get(by_weight)
        if placed is None:
            need_rows(table)
            placed = place()
            whole = placed.host_bytes + placed.peer_bytes == 0  # whatever is drawn more often
            table.placed[key if whole else by_weight] = placed
        return GpuGather(
            placed.groups,
            placed.episodes.offsets,
            device=placed.device,
            # A node's part of a spread dataset is gathered from by name only.
            draw=draw if drawn.steps <= placed.episodes.steps else None,
            drawn_from=drawn.offsets,
            reads_host=placed.host_bytes > 0,
            held=placed,
            seed=stream.seed,
            batch_size=stream.share,
            context_length=context_length,
            padding=padding,
            first_slot=stream.first_slot,
            global_batch=stream.batch_size,
        )
    except GearError as error:
        if engine == "on" or placement != "auto":
            raise
        say(f"engine auto: batches are gathered by the CPU: {error}")
        return None
