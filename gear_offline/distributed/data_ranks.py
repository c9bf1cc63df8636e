"""Which ranks of a device mesh read data: those that feed a model's input, and no others.

With tensor or pipeline parallelism several ranks work on one batch.  One of them reads it: the
first in every dimension that is not data-parallel.  The others hold no table, draw nothing and
gather nothing; the training code sends them what they need (activations in a pipeline, the batch
under tensor parallelism), as it does anyway.

Shape legend: W ranks that feed a model's input.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from gear_offline.distributed.world import TIMEOUT_SECONDS, World
from gear_offline.errors import InputError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["data_world"]


def data_world(
    mesh: DeviceMesh,
    dims: str | Sequence[str] = "dp",
    *,
    timeout: float = TIMEOUT_SECONDS,
) -> World:
    """Return the world of the ranks that feed a model's input, for `GearLoader`.

    All ranks of the job call it together.  On a rank that reads nothing `World.feeds` is false,
    and `World.rank` is that of the rank whose batch it works on.

    Parameters
    ----------
    mesh
        Over all ranks, with named dimensions.
    dims
        Its data-parallel dimensions, e.g. ``("dp_replicate", "dp_shard")``.
    timeout
        Seconds after which a silent rank counts as lost.

    Raises
    ------
    InputError
        ``MESH`` if the mesh lacks such a dimension, or does not hold all ranks.
    GearError
        ``RANK_LOST``
    """
    names = tuple(mesh.mesh_dim_names or ())
    wanted = (dims,) if isinstance(dims, str) else tuple(dims)
    if not wanted or not set(wanted) <= set(names):
        raise InputError(
            "MESH",
            f"the mesh has no dimension {', '.join(map(repr, set(wanted) - set(names)))}",
            where=f"dimensions {list(names)}",
            remedy="name the data-parallel dimensions: data_world(mesh, dims=...)",
        )
    grid = mesh.mesh
    if grid.numel() != dist.get_world_size():
        raise InputError(
            "MESH",
            f"the mesh has {grid.numel()} of {dist.get_world_size()} ranks",
            remedy="use a mesh over all ranks",
        )
    data = tuple(names.index(name) for name in wanted)
    others = tuple(dim for dim in range(len(names)) if dim not in data)
    rows = grid.permute(*data, *others).reshape(-1, _product(grid.shape, others))  # (W, rest)
    me = dist.get_rank()
    rank = int((rows == me).any(1).nonzero())
    readers = rows[:, 0].tolist()
    group: Any = dist.new_group(readers, backend="gloo")
    world = World(
        rank=rank, nodes=(0,) * len(readers), control=group, timeout=timeout, feeds=me in readers
    )
    if not world.feeds:
        return World(rank=rank, nodes=world.nodes, timeout=timeout, feeds=False)
    found = world.gather(int(os.environ.get("GROUP_RANK", "0")))
    numbers = sorted(set(found))
    nodes = tuple(numbers.index(node) for node in found)
    return World(rank=rank, nodes=nodes, control=group, timeout=timeout)


def _product(shape: Sequence[int], dims: Sequence[int]) -> int:
    found = 1
    for dim in dims:
        found *= shape[dim]
    return found
