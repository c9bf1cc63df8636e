"""What of a model is compiled: all of a small one, the parts of a deep one one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gear_offline.config.sections import TrainSettings
from gear_offline.models.decision_transformer import DecisionTransformer

COMPILED_FROM = 20_000  # steps: fewer do not earn back half a minute of compiling
BLOCKWISE_FROM = 6  # blocks: compiled one by one they take seconds, as a whole a minute


def is_compiled(train: TrainSettings) -> bool:
    """Return whether a run's steps are compiled."""
    pays = train.steps >= COMPILED_FROM and not train.deterministic  # it times kernels
    return train.compile == "on" or (train.compile == "auto" and pays)


def is_deep(model: DecisionTransformer) -> bool:
    """Return whether a model is compiled in parts."""
    return len(model.encoder.h) >= BLOCKWISE_FROM


def compile_parts(model: DecisionTransformer, *, sharded: bool = False) -> None:
    """Compile each block's forward and the embeddings'; blocks are alike, so one or two do.

    Hooks on the blocks (FSDP's) and recomputing stay outside, and so do parameters' names.  The
    embeddings of a sharded model belong to what is collected around all blocks: they stay eager.
    So does a model that acts, whose shapes change.
    """
    parts: list[Any] = list(model.encoder.h)
    for block in parts:
        block.forward = _in_training(block, block.forward)
    if not sharded:
        whole: Any = model
        whole._embed = _in_training(model, model._embed)


def _in_training(module: nn.Module, eager: Callable[..., Any]) -> Callable[..., Any]:
    compiled = torch.compile(eager, dynamic=False)

    def call(*arguments: Any, **options: Any) -> Any:
        return (compiled if module.training else eager)(*arguments, **options)

    return call
