"""From the inputs of a Decision Transformer to its tokens: (return, state, action) of each step.

Shape legend: B windows, K steps, H hidden size, S state elements, A action elements or discrete
actions.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gear_offline.errors import InputError
from gear_offline.models.blocks import drop
from gear_offline.models.checks import check_timesteps
from gear_offline.models.encoders import FrameEncoder
from gear_offline.models.loss import TrainingBatch
from gear_offline.models.multitask import TaskEmbedding


class Tokens:
    """The part of `gear_offline.models.decision_transformer.DecisionTransformer` that embeds.

    The layers are the released class's, but for `frame_encoder` and `embed_task`.
    """

    config: Any
    training: bool
    discrete: bool
    encoder: Any
    embed_timestep: nn.Embedding
    embed_return: nn.Linear
    embed_state: nn.Linear
    embed_action: nn.Linear
    embed_ln: nn.LayerNorm
    frame_encoder: FrameEncoder | None
    embed_task: TaskEmbedding | None

    def valid_actions(self, batch: TrainingBatch) -> Tensor | None:
        """Return (B, A) bool, the action elements that each window's task has; None for all."""
        tasks: Tensor | None = getattr(batch, "tasks", None)  # batches of one's own may lack it
        if self.embed_task is None or tasks is None:
            return None
        return self.embed_task.valid_actions(tasks)

    def features(self, states: Tensor) -> Tensor:
        """Return what stands for the states, (B, K, S) floating with S = ``config.state_dim``.

        Parameters
        ----------
        states
            (B, K, ...) floating, further dimensions are flattened into S.  With an encoder
            (B, K, *frame) or (B, K, stack, *frame) uint8, or its features, floating.
        """
        if states.is_floating_point():
            return states.flatten(2).to(self.embed_state.weight.dtype)
        if self.frame_encoder is not None:
            return cast(Tensor, self.frame_encoder(states))
        return states.flatten(2).to(self.embed_state.weight.dtype)

    def _embed(
        self,
        states: Tensor | None,
        actions: Tensor | None,
        returns_to_go: Tensor | None,
        timesteps: Tensor | None,
        tasks: Tensor | None = None,
    ) -> Tensor:
        """Interleave (return, state, action) of each step: (B, 3K, H)."""
        if states is None or actions is None or returns_to_go is None or timesteps is None:
            raise InputError(
                "MODEL_INPUT", "states, actions, returns_to_go and timesteps are all needed"
            )
        if self.embed_task is not None and tasks is None:
            raise InputError(
                "MODEL_INPUT",
                "a model of several tasks needs the task of each window",
                where="tasks",
                remedy="give tasks, or take one out: gear_offline.models.multitask.single_task",
            )
        if timesteps.device.type == "cpu" and not torch.compiler.is_compiling():
            check_timesteps(timesteps, self.config.max_ep_len)
        kind = self.embed_ln.weight.dtype  # the data's is float32, weights may be narrower
        parts = (
            self.embed_return(returns_to_go.to(kind)),
            self.embed_state(self.features(states)),
            self._embed_actions(actions),
        )
        # stack on a new axis after the steps, so that reshaping interleaves by step: R s a R s a
        stacked = torch.stack(parts, dim=2) + self.embed_timestep(timesteps).unsqueeze(2)
        if self.embed_task is not None:
            stacked = stacked + self.embed_task(tasks)
        tokens = self.embed_ln(stacked.flatten(1, 2)) + self.encoder.wpe.weight[0]
        return drop(tokens, self.encoder.drop.p if self.training else 0.0)

    def _embed_actions(self, actions: Tensor) -> Tensor:
        layer = self.embed_action
        if actions.is_floating_point():
            return cast(Tensor, layer(actions.to(layer.weight.dtype)))
        if not self.discrete:
            raise InputError(
                "MODEL_INPUT",
                f"actions are {actions.dtype} but the model's actions are continuous",
                where="actions",
                remedy="build the model with discrete=True, or give floating-point actions",
            )
        return F.embedding(actions, layer.weight.t()) + layer.bias
