"""Implicit Q-learning (Kostrikov et al. 2021, arXiv:2110.06169): values without acting.

The value V is the expectile of the slow critics at the data's actions, the critics are regressed on
``r + gamma V(s')``, and the policy clones the data's actions, weighted by ``exp(beta (Q - V))``.
Nothing comes after a step at which the environment ended the episode.  A step whose next state is
not known, at a cut, teaches the critics nothing.  As in the authors' code the policy's learning
rate falls as a cosine, the others' stay.

Shape legend: B windows, K steps, S state elements, A action elements or discrete actions.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gear_offline.config.sections import IQLSettings, OptimizerSettings
from gear_offline.errors import InputError
from gear_offline.models.base import ModelFacts, PlayedWindow, SequenceModel

COLUMNS = ("next_states", "terminated", "has_next")
LARGEST_WEIGHT = 100.0  # of an action; as in the authors' code
LOG_STD = (-5.0, 2.0)  # as there


class IQL(SequenceModel):
    """Two critics, their slow copies, a value and a policy, of vectors as states."""

    Settings = IQLSettings
    sees_timesteps = False
    loss_names = ("value", "critic", "policy")
    formula = "6 FLOP a weight that is learnt, 2 one that is not, and step"

    def __init__(self, facts: ModelFacts, settings: IQLSettings) -> None:
        super().__init__(facts, settings)
        if facts.goals or len(facts.columns) > 1 or facts.columns[0].frames:
            problem, remedy = "iql takes one column of vectors", "use it without frames and goals"
            raise InputError("MODEL", problem, "model.kind", remedy)
        states, pairs = facts.state_dim, facts.state_dim + facts.action_dim
        self.value = self._network(states, 1)
        self.critics = nn.ModuleList([self._network(pairs, 1) for _ in range(2)])
        self.slow = nn.ModuleList([self._network(pairs, 1) for _ in range(2)])
        self.slow.load_state_dict(self.critics.state_dict())
        self.slow.requires_grad_(False)
        self.policy = self._network(states, facts.action_dim)
        self.stochastic = settings.policy == "gaussian" and not facts.discrete
        if self.stochastic:
            self.log_std = nn.Parameter(torch.zeros(facts.action_dim))

    def predict(self, batch: Any) -> Tensor:
        """Return the policy's means, (B, K, A), or logits of discrete actions."""
        actions: Tensor = self.policy(batch.states.flatten(2))
        return torch.tanh(actions) if self.bounded else actions

    def act(self, window: PlayedWindow) -> Tensor:
        mean = window.last(self.predict(window))
        return mean + self._log_std.exp() * window.noise if self.stochastic else mean

    def losses(self, batch: Any) -> dict[str, Tensor]:
        """Return the losses of value, critics and policy, each (B, K)."""
        extras, options = batch.extras, self.settings
        if batch.rewards is None or not extras.keys() >= set(COLUMNS):
            problem = f"iql needs rewards and the columns {', '.join(COLUMNS)}"
            remedy = f"use recipe iql, or loader.extra_columns={','.join(COLUMNS)}"
            raise InputError("MODEL", problem, "loader.extra_columns", remedy)
        states = batch.states.flatten(2)
        pairs = torch.cat([states, self._flat_actions(batch.actions)], -1)
        value = self.value(states)[..., 0]  # (B, K)
        with torch.no_grad():
            highest = torch.minimum(*(critic(pairs)[..., 0] for critic in self.slow))
            following = self.value(extras["next_states"].flatten(2))[..., 0]
            rewards = batch.rewards[..., 0] / options.reward_scale
            target = rewards + options.gamma * following.where(~extras["terminated"], 0.0)
        advantage = highest - value
        side = (advantage < 0).float()  # 1 - expectile there
        errors = [(critic(pairs)[..., 0] - target) ** 2 for critic in self.critics]
        known = extras["has_next"] | extras["terminated"]
        weight = (options.temperature * advantage.detach()).exp().clamp(max=LARGEST_WEIGHT)
        return {
            "value": (options.expectile - side).abs() * advantage**2,
            "critic": torch.stack(errors).mean(0).where(known, 0.0),
            "policy": weight * self._policy_loss(batch),
        }

    def parameter_groups(self, optimizer: OptimizerSettings) -> list[dict[str, Any]]:
        learnt = [*self.policy.parameters(), *([self.log_std] if self.stochastic else [])]
        return [{"params": learnt, "schedule": self.settings.policy_schedule}]

    def estimate(self, states: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Return V(s) and the lesser Q(s, a), (...) each, in units of the data's rewards."""
        pairs = torch.cat([states, self._flat_actions(actions)], -1)
        lesser = torch.minimum(*(critic(pairs)[..., 0] for critic in self.slow))
        scale = self.settings.reward_scale
        return scale * self.value(states)[..., 0], scale * lesser

    def after_step(self) -> None:
        slow = zip(self.slow.parameters(), self.critics.parameters(), strict=True)
        for copy, critic in slow:
            copy.lerp_(critic, self.settings.target_rate)

    @property
    def bounded(self) -> bool:
        return bool(self.settings.action_tanh) and not self.facts.discrete

    def flops(self, segments: int) -> float:
        counts = [(p.numel(), p.requires_grad) for p in self.parameters()]
        weights = sum(count * (6.0 if learns else 2.0) for count, learns in counts)
        return weights * segments * self.facts.context_length

    @property
    def _log_std(self) -> Tensor:
        return self.log_std.clamp(*LOG_STD)

    def _flat_actions(self, actions: Tensor) -> Tensor:
        discrete = self.facts.discrete
        return F.one_hot(actions, self.facts.action_dim).float() if discrete else actions

    def _policy_loss(self, batch: Any) -> Tensor:
        """Return minus the log-likelihood of the data's actions, or the squared error: (B, K)."""
        actions, predicted = batch.actions, self.predict(batch)
        if self.facts.discrete:
            losses: Tensor = F.cross_entropy(predicted.mT, actions, reduction="none")
            return losses
        if not self.stochastic:
            return torch.sum((predicted - actions) ** 2, -1)
        log_std = self._log_std
        normal = (actions - predicted) / log_std.exp()
        return torch.sum(0.5 * normal**2 + log_std + 0.5 * math.log(2 * math.pi), -1)

    def _network(self, inputs: int, outputs: int) -> nn.Sequential:
        sizes = [inputs, *[self.settings.hidden_size] * self.settings.layers]
        layers: list[nn.Module] = []
        for inside, outside in pairwise(sizes):
            layers += [nn.Linear(inside, outside), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(sizes[-1], outputs))
