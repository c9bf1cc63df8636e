"""Does a policy learn turned controls in context?  A continuous task beside `benchmarks.dark_room`.

    python -m benchmarks.turned --out turned

A point is to reach the middle of a plane, but its controls are turned by an angle that is hidden.
Linear policies learn it by ARS for 48 angles, two each; a model that sees their histories plays
many episodes of each of 16 other angles, with its weights frozen.  Beside it: windows that end with
their episode, learners like those of the data, and who knows the angle.  It writes OUT.json and
prints returns.  Intervals are those of `benchmarks.dark_room`, over angles.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

import gear_offline as go
from benchmarks import dark_room
from benchmarks.study import begin_study, write_study
from gear_offline.core.types import Array, Float64Array

ROOM = f"{__file__}:Turned"
STEPS, STRIDE = 10, 0.2  # of an episode; the length of a step at most
TRAINED, HELD_OUT, LEARNERS = 48, 16, 2  # angles; learners of each
OPTIONS: dict[str, Any] = {
    "evaluate.environment": ROOM,
    "evaluate.environment_options": None,
    "evaluate.sample": False,
    "loader.batch_size": 16,
    "loader.context_length": 150,
    "model.hidden_size": 64,
    "model.layers": 2,
    "train.steps": 1500,
    "train.checkpoint_every": 1500,
    "optimizer.warmup_steps": 100,
    "selection": {
        "strategy": "mixture",
        "parts": [
            {"strategy": "first_episodes", "column": "history", "weight": 0.7},
            {"strategy": "uniform_steps", "weight": 0.3},
        ],
    },
}


class Turned(gymnasium.Env[Array, Array]):
    """Observations are a position, actions a step; a reward is minus the distance to the middle.

    The angle is given, or ``reset(seed=n)`` takes held-out angle n, counted in circles.  Without a
    seed it stays.  Episodes begin somewhere on the unit circle.
    """

    metadata = {"render_modes": []}  # noqa: RUF012 - Gymnasium's name

    def __init__(self, angle: float | None = None, render_mode: str | None = None) -> None:
        self.render_mode, self._given, self._angle = render_mode, angle, angle or 0.0
        self.observation_space = gymnasium.spaces.Box(-4.0, 4.0, (2,))
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,))
        self._position, self._steps = np.zeros(2), 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Array, dict[str, Any]]:
        """Begin an episode."""
        super().reset(seed=seed)
        if self._given is None and seed is not None:
            self._angle = 2 * np.pi * (seed % HELD_OUT + 0.5) / HELD_OUT
        start = self.np_random.uniform(0, 2 * np.pi)
        self._position, self._steps = np.array([np.cos(start), np.sin(start)]), 0
        return self._position.astype(np.float32), {}

    def step(self, action: Array) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        """Move by the action, turned."""
        cos, sin = np.cos(self._angle), np.sin(self._angle)
        move = np.array([[cos, -sin], [sin, cos]]) @ action / max(float(np.hypot(*action)), 1.0)
        self._position = np.clip(self._position + STRIDE * move, -4.0, 4.0)
        self._steps += 1
        reward = -float(np.hypot(*self._position))
        return self._position.astype(np.float32), reward, False, self._steps == STEPS, {}


def learn(folder: Path, angles: Float64Array, episodes: int, steps: int, seed: int) -> go.Dataset:
    """Record learners of some angles in one dataset: a history each, of so many episodes."""
    if not (folder / "all").exists():
        read, history = list[dict[str, Any]](), list[int]()
        for number, angle in enumerate(angles.tolist()):
            file, part = folder / f"{number}.hdf5", folder / str(number)
            how: dict[str, Any] = {"environment_options": {"angle": angle}, "policy": "ars"}
            how |= {"histories": LEARNERS, "train_steps": steps, "seed": seed + number}
            how |= {"steps": LEARNERS * episodes * STEPS, "processes": 1, "overwrite": True}
            go.collect(ROOM, file, quiet=True, **how)
            go.convert(file, part, quiet=True, overwrite=True)
            data = go.open_dataset(part)
            assert data.histories is not None
            for own in np.unique(data.histories).tolist():
                for episode in np.flatnonzero(data.histories == own)[:episodes].tolist():
                    names = ("observations", "actions", "rewards")
                    row = {name: data[episode][name] for name in names}
                    read.append(row | {"truncated": True})
                    history.append(LEARNERS * number + own)
        source = go.from_episodes(read, history=history)
        go.convert(source, folder / "all", quiet=True)
    return go.open_dataset(folder / "all")


def by_episode(data: go.Dataset, episodes: int) -> Float64Array:
    """Return the returns (angles, learners, episodes) of learners."""
    assert data.histories is not None
    rows = [data.returns[data.histories == own][:episodes] for own in np.unique(data.histories)]
    return np.stack(rows).reshape(-1, LEARNERS, episodes)


def main() -> None:
    """Make data, train, play and write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("overrides", nargs="*", help="options of the recipe, KEY=VALUE")
    parser.add_argument("--out", type=Path, default=Path("turned"), help="name without its end")
    parser.add_argument("--seeds", type=int, default=2, help="of training")
    parser.add_argument("--tries", type=int, default=10, help="of each angle and seed")
    parser.add_argument("--episodes", type=int, default=30, help="of a memory and a learner")
    parser.add_argument("--learning", type=int, default=15_000, help="steps of a learner")
    options = parser.parse_args()
    document, folder, episodes = begin_study("turned"), options.out, options.episodes
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("trained", "others"):
        (folder / name).mkdir(exist_ok=True)
    angles = [
        2 * np.pi * (np.arange(count) + 0.5 * (count == HELD_OUT)) / count
        for count in (TRAINED, HELD_OUT)
    ]
    data = learn(folder / "trained", angles[0], episodes, options.learning, 0)
    others = learn(folder / "others", angles[1], episodes, options.learning, 10_000)
    results = {"source": dark_room.sum_up(by_episode(others, episodes))}
    for variant in ("histories", "cut"):
        every = list[Float64Array]()
        for seed in range(options.seeds):
            run, how = folder / f"{variant}-{seed}", {"settings": OPTIONS | {"seed": seed}}
            if not (run / "summary.json").exists():
                overrides = options.overrides
                dark_room.train(run, data.path, variant, steps=STEPS, overrides=overrides, **how)
            memory = episodes if variant == "histories" else 1
            report = go.evaluate(
                run,
                episodes=HELD_OUT * options.tries,
                episodes_of_memory=memory,
                seed=HELD_OUT * 1000,
                quiet=True,
            )
            returns = np.array(report.targets[0].returns).reshape(options.tries, HELD_OUT, memory)
            every.append(returns.swapaxes(0, 1))
            print(variant, seed, every[-1].mean((0, 1)).round(2).tolist(), flush=True)
        results[variant] = dark_room.sum_up(np.concatenate(every, axis=1))
        best = -float(sum(max(1.0 - STRIDE * (step + 1), 0.0) for step in range(STEPS)))
        document |= {"known": best, "results": results}
        write_study(folder, document)
    for name, each in results.items():
        first, last = (f"{each[end]['mean']:.2f} {each[end]['ci95']}" for end in ("first", "last"))
        print(f"{name}: return {first} in the first episodes, {last} in the last")


if __name__ == "__main__":
    main()
