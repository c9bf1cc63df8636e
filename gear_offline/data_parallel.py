"""Training on several ranks: each works on its share of a global batch, gradients are averaged.

Shape legend: W ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gear_offline.loaders.batch import Batch
from gear_offline.loaders.feedback import SegmentFeedback
from gear_offline.models.decision_transformer import DecisionTransformer
from gear_offline.models.loss import action_loss
from gear_offline.world import World

# small kernels that do not depend on each other become one: a third fewer launches a step
COMPILE: dict[str, Any] = {"combo_kernels": True}
SEED_STRIDE = 0x9E3779B97F4A7C15  # ranks draw dropout from streams far apart


def valid_steps(batch: Batch, world: World) -> Tensor | None:
    """Return the real steps of the global batch divided by W: the divisor of a rank's loss.

    With it the mean of the ranks' gradients is the gradient of the global batch's mean, however
    padding is spread over ranks.  ``None`` for a single rank, which divides by its own.
    """
    if world.size == 1:
        return None
    steps = (batch.attention_mask != 0).sum().float()
    world.sum_into(steps)
    return steps / world.size


def make_loss(
    model: DecisionTransformer,
    world: World,
    *,
    compiled: bool = False,
    feedback: SegmentFeedback | None = None,
    fixed_buckets: bool = False,
) -> Callable[[Batch], Tensor]:
    """Return the loss of a rank's batch; its backward averages gradients over the ranks.

    With `feedback` segments are weighted, and the selection hears of their losses.

    With `fixed_buckets` gradients are grouped by the order of parameters in every step.  Otherwise
    the first step of a process groups them so and later ones by the order in which they were
    ready; with three ranks or more the place in a group decides the order of the sums.
    """
    if world.size == 1 and feedback is None:
        return torch.compile(model.loss, dynamic=False, options=COMPILE) if compiled else model.loss
    wrapped: nn.Module = model
    device = next(model.parameters()).device
    if world.size > 1:
        with world.guard("building the model"):
            wrapped = DistributedDataParallel(
                model,
                device_ids=[device] if device.type == "cuda" else None,
                gradient_as_bucket_view=True,
                find_unused_parameters=fixed_buckets,  # only so are groups never made anew
            )

    forward: Callable[..., Any] = torch.compile(wrapped, dynamic=False) if compiled else wrapped

    def loss(batch: Batch) -> Tensor:
        output = forward(**batch.model_inputs(), padding=batch.padding, only_actions=True)
        valid = valid_steps(batch, world)
        if feedback is not None:
            return feedback.loss(output.action_preds, batch, valid_steps=valid)
        return action_loss(
            output.action_preds,
            batch.actions,
            batch.attention_mask,
            valid_steps=valid,
            valid_actions=model.valid_actions(batch),
        )

    return loss


def seed_rank(seed: int, world: World) -> None:
    """Give every rank but the first one random numbers of its own."""
    if world.rank:
        torch.manual_seed((seed + world.rank * SEED_STRIDE) % (1 << 63))


def random_states(world: World, device: torch.device) -> dict[str, Tensor]:
    """Return the states of torch's random numbers of all ranks, by name."""
    kinds = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        kinds["cuda"] = torch.cuda.get_rng_state(device)
    found = {}
    for kind, state in kinds.items():
        for rank, tensor in enumerate(world.gather_tensor(state)):
            found[_name(kind, rank)] = tensor
    return found


def restore_random(tensors: Mapping[str, Tensor], world: World, device: torch.device) -> None:
    """Take over this rank's states, as far as they were saved."""
    cpu: Any = tensors.get(_name("cpu", world.rank))
    if cpu is not None:
        torch.set_rng_state(cpu)
    cuda = tensors.get(_name("cuda", world.rank))
    if device.type == "cuda" and cuda is not None:
        torch.cuda.set_rng_state(cuda, device)


def _name(kind: str, rank: int) -> str:
    return f"random/{kind}" if rank == 0 else f"random/{kind}/{rank}"
