"""Learners that need (s, a, r, s', done): behaviour cloning and implicit Q-learning.

    gear-offline collect CartPole-v1 cartpole.hdf5 --policy random --steps 20000
    gear-offline convert cartpole.hdf5 data/cartpole
    python examples/td_learning.py data/cartpole

A window of two steps is a transition: the second state is s'.  `transitions` is all that there is
to it; the rest is IQL (Kostrikov et al., "Offline reinforcement learning with implicit Q-learning",
2021, arXiv:2110.06169) with small networks, for vectors of numbers as states and for discrete or
continuous actions.  What `transitions` takes care of, each for a reason:

- A window never reaches into another episode, so the last step of an episode has no s' in it.
- If the episode *terminated* there, none is needed: what comes after counts as zero.
- If it was cut there (a time limit, the end of the file), s' is not known.  Taking zero for its
  value would teach that time limits are terminal, so such a step gets no weight.
- How episodes end is asked of the dataset, `dataset.terminated`: sources name their flags
  differently, and some have none.

Shape legend: B transitions, S observation size, A action size or number of discrete actions.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gear_offline as go
from gear_offline.evaluation.play import evaluate_tasks
from gear_offline.evaluation.tasks import EvaluationTask


@dataclass(frozen=True, kw_only=True, eq=False)
class Transitions:
    """B steps and what came after each."""

    states: Tensor  # (B, S) float32
    actions: Tensor  # (B, A) float32, or (B,) int64 if discrete
    rewards: Tensor  # (B,) float32
    next_states: Tensor  # (B, S) float32; zeros where the episode ends
    terminated: Tensor  # (B,) bool: nothing comes after
    known: Tensor  # (B,) bool: s' is there, or none is needed


def transitions(batch: go.Batch, terminated: Tensor) -> Transitions:
    """Read the first two steps of each window as a transition.

    Parameters
    ----------
    batch
        Windows of two steps or more, padded right, one action a step.
    terminated
        (E,) bool, whether each episode of the dataset terminated, on the batch's device.
    """
    if batch.padding != "right":
        raise ValueError("a transition is the first two steps of a window: padding='right'")
    last = batch.attention_mask[:, 1] == 0  # nothing of the episode after the first step
    ends = last & terminated[batch.segments[:, 0]]
    return Transitions(
        states=batch.states[:, 0],
        actions=batch.actions[:, 0],
        rewards=batch.rewards[:, 0, 0],
        next_states=batch.states[:, 1],
        terminated=ends,
        known=~last | ends,
    )


def stream(loader: go.GearLoader) -> Iterator[Transitions]:
    """Yield the loader's batches as transitions, without end."""
    terminated = torch.from_numpy(loader.dataset.terminated.copy()).to(loader.device)
    for batch in loader:
        yield transitions(batch, terminated)


def network(inputs: int, outputs: int, hidden: int) -> nn.Sequential:
    """Return a perceptron with two hidden layers."""
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(),
        nn.Linear(hidden, outputs),
    )  # fmt: skip


class Learner:
    """Two Q, one V and a policy, trained as IQL says; with `cloning` the policy alone.

    Parameters
    ----------
    gamma, expectile, temperature
        Of IQL: discount, tau of the value's regression (0.5: the mean), beta of the weights
        ``exp(beta * advantage)`` of the policy.
    slow_rate
        Share of the critics that their slow copies, which teach the value, take over each step.
    """

    def __init__(
        self,
        dataset: go.Dataset,
        *,
        hidden: int = 64,
        learning_rate: float = 3e-4,
        gamma: float = 0.99,
        expectile: float = 0.7,
        temperature: float = 3.0,
        slow_rate: float = 0.005,
        cloning: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        spec, self.discrete = dataset.spec, dataset.spec["actions"].dtype.kind in "iub"
        size = spec["observations"].shape[0]
        highest = int(dataset.statistics["actions"].max.max())
        self.actions = highest + 1 if self.discrete else spec["actions"].shape[0]
        self.gamma, self.expectile, self.temperature = gamma, expectile, temperature
        self.cloning, self.slow_rate = cloning, slow_rate
        self.value = network(size, 1, hidden).to(device)
        self.critics = nn.ModuleList(network(size + self.actions, 1, hidden) for _ in range(2))
        self.critics.to(device)
        self.slow = deepcopy(self.critics).requires_grad_(False)
        self.policy = network(size, self.actions, hidden).to(device)
        parts = (self.value, self.critics, self.policy)
        parameters = [parameter for part in parts for parameter in part.parameters()]
        self.optimizer = torch.optim.Adam(parameters, learning_rate)

    def step(self, data: Transitions) -> dict[str, float]:
        """Take one optimiser step; return its losses."""
        losses = {"policy": self._policy_loss(data)}
        if not self.cloning:
            losses |= {"value": self._value_loss(data), "critic": self._critic_loss(data)}
        self.optimizer.zero_grad()
        torch.autograd.backward(list(losses.values()))
        self.optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.critics.parameters(), strict=True):
                slow.lerp_(fast, self.slow_rate)
        return {name: loss.item() for name, loss in losses.items()}

    def _values_of(self, critics: nn.ModuleList, data: Transitions) -> Tensor:
        actions = F.one_hot(data.actions, self.actions) if self.discrete else data.actions
        inputs = torch.cat([data.states, actions.float()], dim=1)
        return torch.stack([critic(inputs)[:, 0] for critic in critics])  # (2, B)

    def _advantage(self, data: Transitions) -> Tensor:
        with torch.no_grad():
            highest = self._values_of(self.slow, data).min(0).values
        value: Tensor = self.value(data.states)
        return highest - value[:, 0]

    def _value_loss(self, data: Transitions) -> Tensor:
        advantage = self._advantage(data)
        weight = torch.where(advantage > 0, self.expectile, 1 - self.expectile)
        return (weight * advantage**2).mean()

    def _critic_loss(self, data: Transitions) -> Tensor:
        with torch.no_grad():
            after = self.value(data.next_states)[:, 0].masked_fill(data.terminated, 0.0)
            target = data.rewards + self.gamma * after
        error = (self._values_of(self.critics, data) - target) ** 2
        # Where the episode was cut, s' is unknown and the target means nothing.
        return torch.sum(error * data.known) / data.known.sum().clamp(min=1)

    def _policy_loss(self, data: Transitions) -> Tensor:
        output = self.policy(data.states)
        if self.discrete:
            loss = F.cross_entropy(output, data.actions, reduction="none")
        else:
            loss = ((output - data.actions) ** 2).mean(1)
        if self.cloning:
            return loss.mean()
        weight = (self.temperature * self._advantage(data).detach()).exp().clamp(max=100)
        return torch.mean(weight * loss)


class Greedy:
    """Acts with a learner's policy: what `evaluate_tasks` plays.

    Observations from the environment are raw; the loader normalised those of the data.
    """

    def __init__(self, learner: Learner, dataset: go.Dataset) -> None:
        statistics = dataset.statistics["observations"]
        self.learner, self.mean, self.divisor = learner, statistics.mean, statistics.std + 1e-6

    def reset(self, indices: Any, targets: Any) -> None:
        """Nothing to forget, and no return to ask for."""

    def observe_reward(self, rewards: Any, indices: Any = None) -> None:
        """Nothing to learn."""

    def act(self, observations: npt.NDArray[Any], indices: Any = None) -> npt.NDArray[Any]:
        """Return the actions for `observations` (m, S): (m, A) float32, or (m,) int64."""
        normal = ((observations - self.mean) / self.divisor).astype(np.float32)
        device = next(self.learner.policy.parameters()).device
        with torch.no_grad():
            output: Tensor = self.learner.policy(torch.from_numpy(normal).to(device))
        actions: npt.NDArray[Any] = (output.argmax(1) if self.learner.discrete else output).numpy(
            force=True
        )
        return actions


def main(arguments: list[str] | None = None) -> None:
    """Train on a dataset of GEAR shards, and play in its environment."""
    parser = argparse.ArgumentParser(description="implicit Q-learning on a GearLoader")
    parser.add_argument("dataset")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--cloning", action="store_true", help="behaviour cloning instead")
    parser.add_argument("--reward-scale", type=float, default=1.0, help="rewards are divided by it")
    parser.add_argument("--environment", help="Gymnasium id; default the dataset's")
    parser.add_argument("--episodes", type=int, default=10)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    dataset = go.open_dataset(options.dataset)
    loader = go.GearLoader(dataset, batch_size=256, context_length=2, normalize_states=True)
    learner = Learner(dataset, cloning=options.cloning, device=loader.device)
    losses: dict[str, float] = {}
    for step, data in zip(range(1, options.steps + 1), stream(loader), strict=False):
        scaled = data.rewards / options.reward_scale
        losses = learner.step(Transitions(**vars(data) | {"rewards": scaled}))
        if step % 500 == 0 or step == options.steps:
            shown = ", ".join(f"{name} {loss:.4g}" for name, loss in losses.items())
            print(f"step {step}: {shown}")
    environment = options.environment or dataset.environment_id
    if environment is None:
        print("no evaluation: the dataset names no environment; say it: --environment")
        return
    greedy = Greedy(learner, dataset)
    task = EvaluationTask(
        environment=environment,
        targets=(0.0,),  # asked of nobody
        episodes=options.episodes,
    )
    played = evaluate_tasks(lambda _: greedy, [task])
    found, data_mean = played.mean_return, dataset.returns.mean()
    print(f"{environment}: {found:.4g}, mean of the data {data_mean:.4g}")


if __name__ == "__main__":
    main()
