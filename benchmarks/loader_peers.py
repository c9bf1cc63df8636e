"""Batches of segments by other libraries: each a function from data to "give me the next batch".

A peer that is not installed raises ImportError when it is made.

Shape legend: N steps, E episodes, B segments, K steps of a segment.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.common import Data
from gear_offline.core.types import Int64Array

NextBatch = Callable[[], object]
REVERB_STEPS = 100_000  # its table holds an item a segment


class PlainGather:
    """The plain vectorised gather: one index matrix, one `numpy.take` a column.

    Padding points at a row of zeros behind the data, so that no second pass is needed.
    """

    def __init__(self, data: Data, span: int) -> None:
        self.steps = len(data.rewards)
        self.places = np.arange(span)
        columns = (data.states, data.actions, data.rewards[:, None], data.returns_to_go[:, None])
        self.columns = [np.concatenate([c, np.zeros_like(c[:1])]) for c in columns]

    def __call__(self, first: Int64Array, start: Int64Array, end: Int64Array) -> object:
        """Gather windows from global steps `first`; `start` within and global `end` of episodes."""
        rows = first[:, None] + self.places
        real = rows < end[:, None]
        rows = np.where(real, rows, self.steps)
        fields = [np.take(column, rows, axis=0) for column in self.columns]
        timesteps = np.where(real, start[:, None] + self.places, 0)
        return [torch.from_numpy(x) for x in (*fields, timesteps, real.astype(np.int64))]


def _draw(
    data: Data, generator: np.random.Generator, count: int
) -> tuple[Int64Array, Int64Array, Int64Array]:
    first = generator.integers(0, len(data.rewards), count)
    episode = np.searchsorted(data.offsets, first, side="right") - 1
    return first, first - data.offsets[episode], data.offsets[episode + 1]


def numpy_gather(data: Data, batch_size: int, span: int) -> NextBatch:
    """Gather segments that were drawn beforehand."""
    gather, generator = PlainGather(data, span), np.random.default_rng(0)
    drawn = [_draw(data, generator, batch_size) for _ in range(256)]
    at = 0

    def call() -> object:
        nonlocal at
        at = (at + 1) % len(drawn)
        return gather(*drawn[at])

    return call


def numpy_gather_and_selection(data: Data, batch_size: int, span: int) -> NextBatch:
    """Draw uniformly over steps with NumPy's generator, then gather."""
    gather, generator = PlainGather(data, span), np.random.default_rng(0)
    return lambda: gather(*_draw(data, generator, batch_size))


def original_procedure(data: Data, batch_size: int, span: int) -> NextBatch:
    """The paper's sampling, one segment at a time in Python: slice, sum rewards, pad, stack."""
    bounds = list(zip(data.offsets[:-1].tolist(), data.offsets[1:].tolist(), strict=True))
    episodes = [
        {"states": data.states[a:b], "actions": data.actions[a:b], "rewards": data.rewards[a:b]}
        for a, b in bounds
    ]
    lengths = np.diff(data.offsets)
    chances = lengths / lengths.sum()
    generator = np.random.default_rng(0)

    def padded(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        zeros = np.zeros((1, span - values.shape[0], *values.shape[1:]), values.dtype)
        return np.concatenate([zeros, values[None]], axis=1)

    def call() -> object:
        fields: list[list[npt.NDArray[Any]]] = [[] for _ in range(6)]
        for number in generator.choice(len(episodes), size=batch_size, p=chances):
            episode = episodes[number]
            start = int(generator.integers(0, lengths[number]))
            window = slice(start, start + span)
            rewards = episode["rewards"][start:].astype(np.float64)
            rest = np.zeros_like(rewards)
            total = 0.0
            for t in range(len(rewards) - 1, -1, -1):
                total += rewards[t]
                rest[t] = total
            states = episode["states"][window]
            parts = (
                states,
                episode["actions"][window],
                episode["rewards"][window][:, None],
                rest[:span, None].astype(np.float32),
                np.arange(start, start + len(states)),
                np.ones(len(states), dtype=np.int64),
            )
            for field, part in zip(fields, parts, strict=True):
                field.append(padded(part))
        return [torch.from_numpy(np.concatenate(field)) for field in fields]

    return call


def d3rlpy_trajectories(data: Data, batch_size: int, span: int) -> NextBatch:
    """d3rlpy's replay buffer, `sample_trajectory_batch`."""
    import d3rlpy

    bounds = zip(data.offsets[:-1].tolist(), data.offsets[1:].tolist(), strict=True)
    episodes = [
        d3rlpy.dataset.Episode(
            observations=data.states[a:b],
            actions=data.actions[a:b],
            rewards=data.rewards[a:b, None],
            terminated=True,
        )
        for a, b in bounds
    ]
    buffer = d3rlpy.dataset.ReplayBuffer(d3rlpy.dataset.InfiniteBuffer(), episodes=episodes)
    return lambda: buffer.sample_trajectory_batch(batch_size, span)


def torchrl_slices(data: Data, batch_size: int, span: int) -> NextBatch:
    """TorchRL's replay buffer with a slice sampler; flat slices, no padding."""
    from tensordict import TensorDict
    from torchrl.data import LazyTensorStorage, ReplayBuffer, SliceSampler

    steps = len(data.rewards)
    episode = np.repeat(np.arange(len(data.offsets) - 1), np.diff(data.offsets))
    rows = TensorDict(
        {
            "states": torch.from_numpy(data.states),
            "actions": torch.from_numpy(data.actions),
            "rewards": torch.from_numpy(data.rewards[:, None].copy()),
            "returns_to_go": torch.from_numpy(data.returns_to_go[:, None].copy()),
            "timesteps": torch.from_numpy(np.arange(steps) - data.offsets[episode]),
            "episode": torch.from_numpy(episode),
        },
        batch_size=[steps],
    )
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(steps),
        sampler=SliceSampler(slice_len=span, traj_key="episode", cache_values=True),
        batch_size=batch_size * span,
    )
    buffer.extend(rows)
    return lambda: buffer.sample()


def reverb_dataset(data: Data, batch_size: int, span: int) -> NextBatch:
    """Reverb's `TrajectoryDataset` of a table in the same process, the fastest of its settings.

    An item is a segment without padding.  REVERB names a Python that has dm-reverb.
    """
    if "REVERB" not in os.environ:
        raise ImportError("REVERB names no Python that has dm-reverb")
    ends = data.offsets[1 : np.searchsorted(data.offsets, REVERB_STEPS, side="right")]
    steps = ends[-1]
    columns = {name: getattr(data, name)[:steps] for name in ("states", "actions")}
    columns |= {name: getattr(data, name)[:steps, None] for name in ("rewards", "returns_to_go")}
    starts = data.offsets[: len(ends)]
    columns["timesteps"] = np.arange(steps) - np.repeat(starts, ends - starts)
    with tempfile.TemporaryDirectory(prefix="gear-benchmark-") as folder:
        path = Path(folder) / "steps.npz"
        np.savez(path, ends=ends, **columns)
        command = [os.environ["REVERB"], "-m", "benchmarks.reverb_reader", path, batch_size, span]
        pipe = subprocess.PIPE
        child = subprocess.Popen([*map(str, command)], stdin=pipe, stdout=pipe, text=True)
        ask, answer = child.stdin, child.stdout
        assert ask is not None and answer is not None

        def call() -> object:
            print(file=ask, flush=True)
            return answer.readline()

        if not call():
            raise ImportError(f"{command[0]} ended")
    return call


PEERS: dict[str, Callable[[Data, int, int], NextBatch]] = {
    "NumPy gather": numpy_gather,
    "NumPy gather + selection": numpy_gather_and_selection,
    "original procedure": original_procedure,
    "d3rlpy": d3rlpy_trajectories,
    "TorchRL": torchrl_slices,
    "Reverb": reverb_dataset,
}
