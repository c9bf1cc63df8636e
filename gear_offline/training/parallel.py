"""How the ranks of a run share the model: replicas (DDP), or shards of it (FSDP2).

Both are torch's.  With replicas every rank has all weights, gradients and moments, and gradients
are averaged while they are computed; captured steps do that themselves (`training.rank_gradients`).
With shards a rank has its part of each, and the weights of a block are collected when it runs.  A
checkpoint says the same, tensors by the model's names, whole or in shards, so that a run goes on
with another number of ranks, or in the other way.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn

from gear_offline.config.recipe import Recipe
from gear_offline.core.text import size_text
from gear_offline.distributed.world import World, peers
from gear_offline.training.training_memory import (
    CONTEXT_BYTES,
    USABLE,
    kept_bytes,
    shard_bytes,
    state_bytes,
)

if TYPE_CHECKING:
    from gear_offline.models.decision_transformer import DecisionTransformer

Kind = Literal["alone", "ddp", "fsdp"]


@dataclass(frozen=True)
class Parallel:
    """How the ranks share the model, and why, as a clause to print.

    Attributes
    ----------
    reshard
        Of shards: a block's weights are freed after its forward pass and collected again for the
        backward pass.  Otherwise they stay in between.
    """

    kind: Kind
    reason: str = ""
    reshard: bool = True

    @property
    def sharded(self) -> bool:
        return self.kind == "fsdp"


def choose_parallel(
    recipe: Recipe, model: nn.Module, world: World, device: torch.device, *, half: bool
) -> Parallel:
    """Return how to share `model`: as the recipe says, or replicas if they fit.

    Shards' weights stay collected between the passes as the recipe says, or if that fits.  All
    ranks choose alike: the one with the least free memory decides.

    Parameters
    ----------
    half
        Products are in bfloat16.
    """
    if world.size == 1:
        return Parallel("alone")
    wanted = recipe.train.parallel
    if wanted == "ddp":
        return Parallel("ddp", "DDP, as the recipe says")
    free = None
    if device.type == "cuda":
        free = min(world.gather(int(torch.cuda.mem_get_info(device)[0])))
    needed = replica_bytes(recipe, model, world, half=half)
    if wanted == "auto" and free is None:
        return Parallel("ddp", "DDP: ranks in host memory")
    if wanted == "auto" and free is not None and needed <= USABLE * free:
        return Parallel("ddp", f"DDP: {size_text(needed)} a rank fit in {size_text(free)} free")
    reason = "FSDP, as the recipe says"
    if wanted == "auto" and free is not None:
        reason = f"FSDP: replicas need {size_text(needed)} a rank, {size_text(free)} are free"
    needed = gathered_bytes(recipe, _learning(model), ranks=world.size, half=half)
    reshard, remark = _choose_reshard(recipe, needed, free)
    return Parallel("fsdp", f"{reason}; weights {remark}", reshard)


def _choose_reshard(recipe: Recipe, needed: int, free: int | None) -> tuple[bool, str]:
    """Return whether blocks' weights are freed between the passes, and what to say of them.

    Parameters
    ----------
    needed
        Bytes of a rank that keeps them.
    free
        Least bytes of a rank's GPU; None: ranks in host memory.
    """
    wanted, often = recipe.train.reshard, "collected for each pass"
    if wanted == "on":
        return True, f"{often}, as the recipe says"
    if wanted == "off":
        return False, "collected once a step, as the recipe says"
    if free is None:
        return True, f"{often}: ranks in host memory"
    if needed <= USABLE * free:
        fit = f"{size_text(needed)} a rank fit in {size_text(free)} free"
        return False, f"collected once a step: {fit}"
    return (
        True,
        f"{often}: once a step needs {size_text(needed)} a rank, {size_text(free)} are free",
    )


def replica_bytes(recipe: Recipe, model: nn.Module, world: World, *, half: bool) -> int:
    """Return what a rank with all of the model keeps in memory, by formula."""
    state = state_bytes(_learning(model), half=half)
    return state + _kept(recipe, world.size, half=half) + CONTEXT_BYTES


def gathered_bytes(recipe: Recipe, parameters: int, *, ranks: int, half: bool) -> int:
    """Return what a rank keeps that has shards, and all weights between the passes, by formula."""
    state = shard_bytes(parameters, ranks=ranks, half=half, gathered=True)
    return state + _kept(recipe, ranks, half=half) + CONTEXT_BYTES


def _learning(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def _kept(recipe: Recipe, ranks: int, *, half: bool) -> int:
    segments = recipe.loader.batch_size // ranks // recipe.train.accumulate
    return kept_bytes(
        tokens=3 * segments * recipe.loader.context_length,
        layers=recipe.model.layers,
        width=recipe.model.hidden_size,
        half=half,
        recompute=recipe.train.recompute,
    )


def has_half_gradients(recipe: Recipe, *, half: bool) -> bool:
    """Return whether gradients are in 16 bits, also those that ranks add up.

    Those of micro-batches are not: they would add up coarsely.

    Parameters
    ----------
    half
        Products are in bfloat16.
    """
    return half and recipe.train.weights == "bf16" and recipe.train.accumulate == 1


def shard_model(
    model: DecisionTransformer,
    device: torch.device,
    world: World,
    precision: torch.dtype | None,
    parallel: Parallel,
    *,
    half_gradients: bool,
) -> None:
    """Shard a model over the ranks, block by block, in place; it need not be on the device.

    Its products are in `precision`, weights are updated in float32.  Gradients are added up over
    the ranks in float32, with `half_gradients` in `precision`, as those of replicas.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    # A linear head's result is a view; nothing here writes to it in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    with world.guard("sharding the model"):
        options: dict[str, Any] = {"mesh": init_device_mesh(device.type, (world.size,))}
        if precision is not None:
            options["mp_policy"] = MixedPrecisionPolicy(
                param_dtype=precision, reduce_dtype=precision if half_gradients else torch.float32
            )
        for block in model.encoder.h:
            fully_shard(block, reshard_after_forward=parallel.reshard, **options)
        fully_shard(model, **options)  # what is around the blocks is kept in any case
        model.to(device)  # type: ignore[arg-type, unused-ignore]  # what no group manages


def working_copy(
    recipe: Recipe,
    model: DecisionTransformer,
    precision: torch.dtype | None,
    parallel: Parallel,
) -> tuple[DecisionTransformer, torch.dtype | None, str]:
    """Return what steps compute with, the autocast type left for them, and a remark on both.

    With ``train.weights=bf16`` a copy of the model in bfloat16, of which nothing needs a cast;
    otherwise the model itself.
    """
    if precision is None:
        return model, None, ""
    narrow = has_half_gradients(recipe, half=True)
    if parallel.sharded:  # cast when they are collected
        sums = "bfloat16" if narrow else "float32"
        return model, precision, f"bfloat16 products of float32 shards, {sums} sums of gradients"
    if narrow:
        working: Any = copy.deepcopy(model)
        return working.to(precision), None, "bfloat16 weights, float32 updates"
    if recipe.train.weights == "fp32":
        return model, precision, ""
    remark = "; bfloat16 gradients would add up micro-batches coarsely"
    return model, precision, f"bfloat16 autocast, float32 weights{remark}"


def whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor that may be spread over the ranks, which call this together.

    It stays where it is: the host does not wait for a GPU.
    """
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return tensor
    with peers("collecting shards"):
        return tensor.full_tensor()


def collect(tensors: Mapping[str, Tensor], *, wanted: bool) -> dict[str, Tensor]:
    """Return named tensors as `whole` does, those that were spread in host memory.

    Parameters
    ----------
    wanted
        By this rank: the others get nothing and keep no copy.
    """
    found = {}
    for name, tensor in tensors.items():
        full = whole(tensor)
        if wanted:
            found[name] = full if full is tensor else full.cpu()
    return found


def is_spread(tensor: Tensor) -> bool:
    """Whether this rank holds a part of `tensor`."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def spread(tensor: Tensor, like: Tensor) -> Tensor:
    """Return this rank's view of a whole tensor that every rank has, laid out as `like`.

    One that is spread already stays as it is.
    """
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(like, DTensor) or isinstance(tensor, DTensor):
        return tensor
    mesh = like.device_mesh
    return distribute_tensor(tensor.to(mesh.device_type), mesh, like.placements, src_data_rank=None)


def model_tensors(model: nn.Module, *, wanted: bool = True) -> dict[str, Tensor]:
    """Return the parameters by name, whole; ranks call this together.

    Shards are collected in host memory on the ranks that want them; the others get nothing.
    Parameters of a model that is not sharded are not copied.
    """
    if not is_sharded(model):
        return model.state_dict() if wanted else {}
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    with peers("collecting the weights"):
        found = get_model_state_dict(model, options=options)
    return cast(dict[str, Tensor], found) if wanted else {}


def load_model_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Take over whole parameters, which every rank has."""
    if not is_sharded(model):
        model.load_state_dict(dict(tensors))
        return
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    options = StateDictOptions(full_state_dict=True, strict=True)
    with peers("spreading the weights"):
        set_model_state_dict(model, dict(tensors), options=options)


def is_sharded(model: nn.Module) -> bool:
    """Whether `shard_model` was called for a model."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed.fsdp import FSDPModule

    return isinstance(model, FSDPModule)
