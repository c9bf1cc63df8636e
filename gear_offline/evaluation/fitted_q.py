"""Fitted Q evaluation: the values of many policies on one dataset, as one stack of critics.

A critic is regressed on ``r + gamma Q(s', policy(s'))`` over the transitions of the data (Le et al.
2019, arXiv:1903.08738); the value of the next state is kept within the range of the data's returns.
All policies' critics are one batched product a layer.  Critic number c of every policy begins with
the same weights and sees the same bootstrap sample of episodes, so that differences between
policies are differences of pairs.

Shape legend: P policies, C critics of each, N steps, E episodes, B rows, S state elements, A action
elements, D = S + A inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gear_offline.core.types import Array, BoolArray, Int64Array

WIDTH, ROWS = 64, 128
LEARNING_RATE, TARGET_RATE = 1e-3, 0.02
CLONED_SHARE = 0.25  # of the steps, before which a critic learns the data's own returns


@dataclass(frozen=True, kw_only=True, eq=False)
class Transitions:
    """The steps of a dataset; inputs have a scale of about 1."""

    states: Array  # (N, S) float32
    actions: Array  # (N, A) float32
    rewards: Array  # (N,) float32
    returns: Array  # (N,) float32, discounted, to the end of the episode
    next_states: Array  # (N, S) float32
    terminated: BoolArray  # (N,), nothing comes after
    known: BoolArray  # (N,), the next state is known, or none is needed
    episodes: Int64Array  # (N,), numbers from 0


def fit_critics(
    data: Transitions,
    next_actions: Array,
    states: Array,
    actions: Array,
    *,
    gamma: float,
    critics: int,
    steps: int,
    seed: int,
    device: torch.device,
    on_step: Callable[[], None] = lambda: None,
) -> Array:
    """Fit critics to policies whose actions at the next states are `next_actions` (P, N, A).

    Return the values (2, P, C, n) of `states` (n, S) and `actions` (P, n, A): after two thirds of
    the steps, and at the end.
    """
    generator = torch.Generator(device).manual_seed(seed)
    count, width = len(next_actions), data.states.shape[1] + data.actions.shape[1]
    tensors = {name: torch.from_numpy(rows).to(device) for name, rows in vars(data).items()}
    following = torch.from_numpy(next_actions).to(device)
    rows = _bootstrap_rows(data, critics, seed)
    places = [torch.from_numpy(each).to(device) for each in rows]
    wide = data.returns.astype(np.float64)
    mean, scale = float(wide.mean()), float(wide.std()) or 1.0
    lowest, highest = float(data.returns.min()), float(data.returns.max())
    weights = list[Tensor]()
    for inside, outside in ((width, WIDTH), (WIDTH, WIDTH), (WIDTH, 1)):
        drawn = torch.empty(1, critics, inside + 1, outside, device=device)
        drawn.uniform_(-(inside**-0.5), inside**-0.5, generator=generator)
        weights.append(drawn.repeat(count, 1, 1, 1).requires_grad_())
    slow = [weight.detach().clone() for weight in weights]
    optimizer = torch.optim.Adam(weights, LEARNING_RATE)
    wanted = torch.from_numpy(states).to(device).expand(count, -1, -1)
    asked = torch.cat([wanted, torch.from_numpy(actions).to(device)], -1)[:, None]
    first, values = int(CLONED_SHARE * steps), list[Array]()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, 2 * (1 - step / steps))
        drawn_rows = [
            each[torch.randint(len(each), (ROWS,), device=device, generator=generator)]
            for each in places
        ]
        batch = torch.stack(drawn_rows)  # (C, B)
        pairs = torch.cat([tensors["states"][batch], tensors["actions"][batch]], -1)
        if step < first:
            target = tensors["returns"][batch].expand(count, -1, -1)
        else:
            with torch.no_grad():
                after = tensors["next_states"][batch].expand(count, -1, -1, -1)
                inputs = torch.cat([after, following[:, batch]], -1)
                value = (mean + scale * _values(slow, inputs)).clamp(lowest, highest)
                value = value.where(~tensors["terminated"][batch], 0.0)
                target = tensors["rewards"][batch] + gamma * value
        error = _values(weights, pairs.expand(count, -1, -1, -1)) - (target - mean) / scale
        loss = (error**2).mean(-1).sum()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        with torch.no_grad():
            for copy, weight in zip(slow, weights, strict=True):
                copy.lerp_(weight, TARGET_RATE if step >= first else 1.0)
        on_step()
        if step + 1 in (-(-2 * steps // 3), steps):
            with torch.no_grad():
                values.append(mean + scale * _values(slow, asked).cpu().numpy().astype(np.float64))
    return np.stack([values[0], values[-1]])


def _values(weights: list[Tensor], inputs: Tensor) -> Tensor:
    """(P, C, n, D) -> (P, C, n)."""
    hidden = inputs
    for number, weight in enumerate(weights):
        hidden = torch.matmul(hidden, weight[:, :, :-1]) + weight[:, :, -1:]
        hidden = torch.relu(hidden) if number < len(weights) - 1 else hidden
    return hidden[..., 0]


def _bootstrap_rows(data: Transitions, critics: int, seed: int) -> list[Int64Array]:
    """Return the rows of each critic: those of episodes that were drawn with replacement.

    An episode without a known step is not drawn.
    """
    generator, count = np.random.default_rng(seed), int(data.episodes[-1]) + 1
    taught = np.unique(data.episodes[data.known])
    samples = list[Int64Array]()
    for _ in range(critics):
        drawn = taught[generator.integers(len(taught), size=len(taught))]
        times = np.bincount(drawn, minlength=count)
        samples.append(np.repeat(np.arange(len(data.known)), times[data.episodes] * data.known))
    return samples
