"""The model on several ranks: replicas (DDP), or shards of it (FSDP2).

Both are torch's.  With replicas every rank has all weights, gradients and moments, and gradients
are averaged while they are computed; captured steps do that themselves (`training.graph`).
With shards a rank has its part of each, and the weights of a block are collected when it runs.  A
checkpoint says the same, tensors by the model's names, whole or in shards, so that a run goes on
with another number of ranks, or in the other way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor

from gear_offline.config.recipe import Recipe
from gear_offline.core.text import size_text
from gear_offline.distributed.world import World, peers
from gear_offline.errors import InputError
from gear_offline.models.base import Losses, blocks_of
from gear_offline.training.cost import CONTEXT_BYTES, USABLE, memory_bytes

Kind = Literal["alone", "ddp", "fsdp"]


@dataclass(frozen=True)
class Parallel:
    """The way ranks share the model, and the reason, as a clause to print."""

    kind: Kind
    reason: str = ""
    # Of shards: a block's weights are freed after its forward pass and collected again for the
    # backward pass.  Otherwise they stay in between.
    reshard: bool = True

    @property
    def sharded(self) -> bool:
        return self.kind == "fsdp"


ALONE = Parallel("alone")


def choose_parallel(
    recipe: Recipe, parameters: int, world: World, device: torch.device, *, half: bool
) -> Parallel:
    """Choose replicas or shards for so many parameters: as the recipe says, or as fits.

    That is replicas, else shards; shards' weights stay collected between the passes if that fits.
    All ranks choose alike: the one with the least free memory decides.  `half`: products are in
    bfloat16.
    """
    if world.size == 1:
        return ALONE
    train = recipe.train
    if train.parallel == "ddp":
        return Parallel("ddp", "DDP, as the recipe says")
    if train.deterministic == "ranks":
        return Parallel("ddp", "replicas: train.deterministic=ranks")
    on_gpu, reason = device.type == "cuda", "FSDP, as the recipe says"
    free = min(world.gather(int(torch.cuda.mem_get_info(device)[0]))) if on_gpu else 0
    share = recipe.loader.batch_size // world.size
    memory = partial(memory_bytes, recipe, parameters, segments=share, half=half)
    if train.parallel == "auto":
        if not on_gpu:
            return Parallel("ddp", "DDP: ranks in host memory")
        needed = memory() + CONTEXT_BYTES
        if needed <= USABLE * free:
            return Parallel("ddp", f"DDP: {size_text(needed)} a rank fit in {size_text(free)} free")
        reason = f"FSDP: replicas need {size_text(needed)} a rank, {size_text(free)} are free"
    if recipe.model.is_stochastic:
        problem = "a stochastic policy is trained as replicas, not as shards of it"
        remedy = "use train.parallel=ddp, and a smaller model if that does not fit"
        raise InputError("MODEL", problem, "train.parallel", remedy)
    reshard, why = train.reshard == "on", ", as the recipe says"
    if train.reshard == "auto":
        needed = memory(shards=world.size, reshard=False) + CONTEXT_BYTES
        reshard, why = not on_gpu or needed > USABLE * free, ": ranks in host memory"
        if on_gpu:
            why = f": once a step takes {size_text(needed)} a rank, {size_text(free)} are free"
    how = "for each pass" if reshard else "once a step"
    return Parallel("fsdp", f"{reason}; weights collected {how}{why}", reshard)


def shard_model(
    losses: Losses,
    device: torch.device,
    world: World,
    precision: torch.dtype | None,
    parallel: Parallel,
    *,
    half_gradients: bool,
) -> None:
    """Shard a model, on any device, over the ranks, block by block, in place.

    What is around the blocks is collected when its `losses` are called.

    Its products are in `precision`, weights are updated in float32.  Gradients are added up over
    the ranks in float32, with `half_gradients` in `precision`, as those of replicas.
    """
    from torch.distributed.device_mesh import init_device_mesh  # these take a second to import
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    with world.guard("sharding the model"):
        options: dict[str, Any] = {"mesh": init_device_mesh(device.type, (world.size,))}
        if precision is not None:
            options["mp_policy"] = MixedPrecisionPolicy(
                param_dtype=precision, reduce_dtype=precision if half_gradients else torch.float32
            )
        for block in blocks_of(losses.model):
            fully_shard(block, reshard_after_forward=parallel.reshard, **options)
        fully_shard(losses, **options)  # what is around the blocks is kept in any case
        losses.to(device)  # what no group manages


def is_spread(tensor: Tensor) -> bool:
    """True of a DTensor, whose class alone takes a second to import."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor that may be spread over the ranks, which call this together.

    It stays where it is: the host does not wait for a GPU.
    """
    if not is_spread(tensor):
        return tensor
    with peers("collecting shards"):
        return cast(Any, tensor).full_tensor()  # type: ignore[no-any-return]


@torch.no_grad()
def take_over(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    """Copy whole tensors, which every rank has, into `own`, spread over the ranks or not.

    Other names or shapes than those of `own` are KeyError.
    """
    shapes, others = ({n: tuple(t.shape) for n, t in tensors.items()} for tensors in (own, given))
    for name in sorted({n for n, _ in shapes.items() ^ others.items()}):
        was, wanted = (each.get(name, "missing") for each in (others, shapes))
        raise KeyError(f"{name} is {was}, not {wanted}")
    for name, tensor in own.items():
        value = given[name]
        if is_spread(tensor) and not is_spread(value):
            from torch.distributed.tensor import distribute_tensor

            spread: Any = tensor
            mesh, layout = spread.device_mesh, spread.placements
            value = distribute_tensor(value.to(mesh.device_type), mesh, layout, src_data_rank=None)
        tensor.copy_(value)
