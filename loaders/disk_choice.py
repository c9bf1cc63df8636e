"""Whether a loader's rows stay on disk; what cannot be read from there is refused first."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from gear_offline.core.progress import say
from gear_offline.core.system import RESERVE_BYTES, available_bytes
from gear_offline.core.text import size_text
from gear_offline.distributed.world import World
from gear_offline.errors import InputError
from gear_offline.sampling.stream import Stream
from gear_offline.tables.disk import DiskGather
from gear_offline.tables.joint import Source
from gear_offline.tables.table import table_bytes


def open_disk(
    dataset: Source,
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

    Options are those of `gear_offline.loaders.loader.GearLoader`, `rows` the other ones of
    `DiskGather`.
    """
    if isinstance(host_budget, np.integer):
        host_budget = int(host_budget)
    if host_budget is not None and (type(host_budget) is not int or host_budget < 1):
        raise InputError(
            "LOADER_OPTION",
            f"host_budget={host_budget!r} is not a number of bytes",
            remedy="give bytes from 1, such as 4 << 30, or None",
        )
    if placement not in ("auto", "hbm", "peer", "host", "disk"):
        raise InputError(
            "LOADER_OPTION",
            f"placement={placement!r} is not usable",
            remedy="use 'auto', 'hbm', 'peer', 'host' or 'disk'",
        )
    if placement not in ("auto", "disk"):
        return None
    reason = "as asked for"
    if placement == "auto":
        why = _too_large(dataset, world, host_budget, rows)
        if why is None:
            return None
        reason = why
    on_gpu = device.type == "cuda"
    if on_gpu and engine == "on":
        raise InputError(
            "LOADER_OPTION",
            f"engine='on' cannot gather rows that stay on disk ({reason})",
            remedy="use engine='auto' or 'off', or a placement and a budget that hold the table",
        )
    sampler = stream.selection
    if sampler.learner is not None or sampler.cuts_windows:
        raise InputError(
            "LOADER_OPTION",
            f"strategy {sampler.name!r} needs the rows in memory: what it draws is not known ahead "
            f"of use, and the rows stay on disk ({reason})",
            remedy="use placement='host', or another strategy",
        )
    if host_budget is None:
        ranks = world.nodes.count(world.nodes[world.rank])
        host_budget = max((available_bytes() - RESERVE_BYTES) // (2 * ranks), 1)
    disk = DiskGather(dataset, stream, host_budget=host_budget, pin=on_gpu, **rows)
    if placement == "auto" or on_gpu:
        how = "into page-locked memory, and copied" if on_gpu else "here"
        say(
            f"placement {placement}: the rows stay on disk, {reason}; "
            f"{size_text(host_budget)} of host memory keep {disk.sizes.slots:,} windows; "
            f"the CPU gathers batches {how}"
        )
    return disk


def _too_large(
    dataset: Source, world: World, host_budget: int | None, rows: dict[str, Any]
) -> str | None:
    """Return why the table should not be in memory, or None."""
    if host_budget is None and world.size > 1:
        return None  # the ranks of a node build one table together, or none: none may step aside
    names = ("context_length", "normalize_states", "extra_columns", "frame_stack")
    needed = table_bytes(dataset, **{name: rows[name] for name in names})
    limit = available_bytes() - RESERVE_BYTES if host_budget is None else host_budget
    if needed <= limit:
        return None
    source = "available" if host_budget is None else "the budget"
    return f"since they take {size_text(needed)} in memory and {size_text(limit)} are {source}"
