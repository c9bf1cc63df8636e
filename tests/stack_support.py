"""A stack of models that is compiled: what three test files for a GPU compare."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gear_offline.loaders.batch import join_batches
from gear_offline.models.stacked import StackedModels
from tests.test_stacked_models import make_batch, make_model


def compiled_stack(
    bias: str,
    *,
    count: int,
    windows: int,
    width: int,
    precision: torch.dtype | None = torch.bfloat16,
    device: str = "cuda",
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return losses and gradients of fresh models whose blocks have random biases of one kind."""
    batch = join_batches([make_batch(seed, windows) for seed in range(count)]).to(device)
    models: list[Any] = [make_model(seed, hidden_size=width) for seed in range(count)]
    for model in models:
        model.to(device)
        for block in model.encoder.h:
            torch.nn.init.normal_(block.get_parameter(bias))
    stacked = StackedModels(models, precision=precision)
    losses: Tensor = torch.compile(stacked.losses, dynamic=False)(batch)
    losses.sum().backward()  # type: ignore[no-untyped-call]
    found = {name: p.grad for name, p in stacked.named_parameters() if p.grad is not None}
    return losses.detach(), found
