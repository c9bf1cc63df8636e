"""Cloning by a multilayer perceptron, the baseline of every comparison.

It predicts the action of a step from the states of the last steps and, if asked, from what the
window is asked for.  ``condition``: ``nothing`` is behavioural cloning (BC; with the strategy
``top_percent`` %BC), ``returns`` is RvS (Emmons et al. 2021, arXiv:2112.10751), ``goals`` goal-
conditioned cloning (GCBC; Ghosh et al. 2019, arXiv:1912.06088).

Shape legend: B windows, K steps, H steps of history, S state elements, A action elements.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from gear_offline.config.sections import MLPSettings
from gear_offline.errors import InputError
from gear_offline.models.base import ModelFacts, SequenceModel

ACTIVATIONS: dict[str, Any] = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU, "tanh": nn.Tanh}
ACTIVATIONS["gelu_new"] = partial(nn.GELU, "tanh")


class MLP(SequenceModel):
    """A perceptron of the last states, with or without a condition."""

    Settings = MLPSettings
    sees_timesteps = False
    formula = "6 FLOP a weight and step"

    def __init__(self, facts: ModelFacts, settings: MLPSettings) -> None:
        super().__init__(facts, settings)
        if (settings.condition == "goals") != facts.goals and settings.condition != "nothing":
            have = "goals, as the loader gives" if facts.goals else "returns: there are no goals"
            remedy = "loader.goals={future: 1.0} gives goals; model.condition=nothing needs none"
            problem = f"model.condition={settings.condition}, but windows have {have}"
            raise InputError("MODEL", problem, "model.condition", remedy)
        if settings.history > facts.context_length:
            problem = f"model.history={settings.history} steps of windows of {facts.context_length}"
            raise InputError("MODEL", problem, "model.history", "raise loader.context_length")
        extra = {"nothing": 0, "returns": 1, "goals": facts.state_width}[settings.condition]
        width, activation = settings.hidden_size, ACTIVATIONS[settings.activation]
        sizes = [settings.history * facts.state_width + extra, *[width] * settings.layers]
        layers: list[nn.Module] = []
        for inside, outside in pairwise(sizes):
            layers += [nn.Linear(inside, outside), activation(), nn.Dropout(settings.dropout)]
        self.layers = nn.Sequential(*layers, nn.Linear(width, facts.action_dim))
        if settings.initialization == "glorot":
            for layer in self.layers:
                if isinstance(layer, nn.Linear):
                    nn.init.xavier_uniform_(layer.weight, 0.1 if layer is self.layers[-1] else 1.0)
                    nn.init.zeros_(layer.bias)

    def predict(self, batch: Any) -> Tensor:
        """Return the actions of each step, (B, K, A), logits of discrete ones."""
        states, history = self._flat(batch.states), self.settings.history
        real = (batch.attention_mask != 0).unsqueeze(-1)
        states = nn.functional.pad(states.where(real, 0.0), (0, 0, history - 1, 0))
        inputs = [states.unfold(1, history, 1).flatten(2)]  # (B, K, S H)
        if self.settings.condition == "returns":
            inputs.append(batch.returns_to_go)
        elif self.settings.condition == "goals":
            inputs.append(self._flat(batch.goals).expand(-1, states.shape[1] - history + 1, -1))
        action: Tensor = self.layers(torch.cat(inputs, -1))
        return torch.tanh(action) if self.bounded else action

    def _flat(self, states: Any) -> Tensor:
        """Return states (B, K, *S) as (B, K, S), bytes of frames in [0, 1]."""
        if isinstance(states, Mapping):
            return torch.cat([self._flat(states[c.name]) for c in self.facts.columns], -1)
        flat: Tensor = states.flatten(2).float()
        return flat if states.is_floating_point() else flat / 255.0

    @property
    def bounded(self) -> bool:
        return bool(self.settings.action_tanh) and not self.facts.discrete

    def flops(self, segments: int) -> float:
        weights = sum(parameter.numel() for parameter in self.parameters())
        return 6.0 * weights * segments * self.facts.context_length
