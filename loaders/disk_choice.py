"""Whether a loader's rows stay on disk, and what it says about that."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from gear_offline.core.progress import say
from gear_offline.core.system import available_bytes
from gear_offline.dataset.dataset import Dataset
from gear_offline.distributed.world import World
from gear_offline.errors import InputError
from gear_offline.sampling.stream import Stream
from gear_offline.tables.disk_gather import DiskGather
from gear_offline.tables.host_memory import RESERVE_BYTES
from gear_offline.tables.host_table import table_bytes
from gear_offline.tables.joint import in_memory_only, tasks_of
from gear_offline.tables.pinning import format_bytes


def open_disk(
    dataset: Dataset,
    stream: Stream,
    world: World,
    *,
    placement: str,
    host_budget: int | None,
    engine: str,
    device: torch.device,
    **rows: Any,
) -> DiskGather | None:
    """Return the gather over shards if the rows stay there, else None.

    Parameters
    ----------
    placement, host_budget, engine, device
        As `gear_offline.loaders.loader.GearLoader`.
    rows
        The other options of `DiskGather`.

    Raises
    ------
    InputError
        ``HOST_BUDGET``; ``PLACEMENT`` if the GPU shall gather what is on disk.
    """
    if isinstance(host_budget, np.integer):
        host_budget = int(host_budget)
    if host_budget is not None and (type(host_budget) is not int or host_budget < 1):
        raise InputError(
            "HOST_BUDGET",
            f"host_budget={host_budget!r} is not a number of bytes",
            remedy="give bytes from 1, such as 4 << 30, or None",
        )
    if placement not in ("auto", "hbm", "peer", "host", "disk"):
        raise InputError(
            "PLACEMENT",
            f"placement={placement!r} is not usable",
            remedy="use 'auto', 'hbm', 'peer', 'host' or 'disk'",
        )
    if tasks_of(dataset) and world.size > 1:
        if placement == "disk":
            raise in_memory_only(
                "placement='disk' on several ranks", "use one process, or another placement"
            )
        return None  # each would copy all rows
    reason = "as asked for"
    if placement != "disk":
        if placement != "auto":
            return None
        why = _too_large(dataset, world, host_budget, rows)
        if why is None:
            return None
        reason = why
    on_gpu = device.type == "cuda"
    if on_gpu and engine == "on":
        raise InputError(
            "PLACEMENT",
            f"engine='on' cannot gather rows that stay on disk ({reason})",
            remedy="use engine='auto' or 'off', or a placement and a budget that hold the table",
        )
    if host_budget is None:
        ranks = world.nodes.count(world.nodes[world.rank])
        host_budget = (available_bytes() - RESERVE_BYTES) // (2 * ranks)
    found = DiskGather(dataset, stream, host_budget=max(host_budget, 1), pin=on_gpu, **rows)
    if placement == "auto" or on_gpu:
        how = "into page-locked memory, and copied" if on_gpu else "here"
        say(
            f"placement {placement}: the rows stay on disk, {reason}; "
            f"{format_bytes(host_budget)} of host memory keep {found.sizes.slots:,} windows; "
            f"the CPU gathers batches {how}"
        )
    return found


def _too_large(
    dataset: Dataset, world: World, host_budget: int | None, rows: dict[str, Any]
) -> str | None:
    """Return why the table should not be in memory, or None."""
    if host_budget is None and world.size > 1:
        return None  # the ranks of a node build one table together, or none: none may step aside
    needed = table_bytes(
        dataset,
        context_length=rows["context_length"],
        normalize_states=rows["normalize_states"],
        extra_columns=rows["extra_columns"],
        frame_stack=rows["frame_stack"],
    )
    limit = available_bytes() - RESERVE_BYTES if host_budget is None else host_budget
    if needed <= limit:
        return None
    source = "available" if host_budget is None else "the budget"
    return (
        f"since they take {format_bytes(needed)} in memory and {format_bytes(limit)} are {source}"
    )
