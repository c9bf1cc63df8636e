"""Batches of segments by other libraries: each a function from data to "give me the next batch".

A peer that is not installed raises ImportError when it is made.

Shape legend: N steps, E episodes, B segments, K steps of a segment.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, RandomSampler

from benchmarks.common import ACTION_DIM, STATE_DIM, Data, Served
from gear_offline.core.types import Int64Array

NextBatch = Callable[[], object]
FEW_STEPS = 100_000  # of peers that hold a row a window, or take minutes to fill
WORKERS = 2  # of Minari's DataLoader
FIELDS = ("states", "actions", "rewards", "returns_to_go", "timesteps", "attention_mask")


def _shorten(data: Data) -> Data:
    """Return the first episodes."""
    count = int(np.searchsorted(data.offsets, FEW_STEPS, side="right")) - 1
    steps = int(data.offsets[count])
    names = ("states", "actions", "rewards", "returns_to_go")
    columns = {name: getattr(data, name)[:steps] for name in names}
    return replace(data, offsets=data.offsets[: count + 1], **columns)


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


def hugging_face_windows(data: Data, batch_size: int, span: int) -> NextBatch:
    """Hugging Face `datasets`: a padded window a row, tables of Arrow, no workers.

    Slower on two cores: rows of steps, the formats "torch" and "numpy", workers.
    """
    import datasets
    import pyarrow

    data = _shorten(data)
    lengths = np.diff(data.offsets)
    first = np.arange(data.offsets[-1])
    starts, ends = (np.repeat(edge, lengths) for edge in (data.offsets[:-1], data.offsets[1:]))
    fields: Any = PlainGather(data, span)(first, first - starts, ends)
    lists = [
        pyarrow.ListArray.from_arrays(
            np.arange(len(first) + 1, dtype=np.int32) * field[0].numel(), field.numpy().reshape(-1)
        )
        for field in fields
    ]
    rows = datasets.Dataset(pyarrow.table(lists, names=FIELDS)).with_format("arrow")
    shapes = [(batch_size, *field.shape[1:]) for field in fields]
    generator = np.random.default_rng(0)

    def call() -> object:
        table: Any = rows[generator.integers(0, len(first), batch_size).tolist()]
        return [
            torch.from_numpy(np.array(column.combine_chunks().flatten()).reshape(shape))
            for column, shape in zip(table.columns, shapes, strict=True)
        ]

    return call


def minari_episodes(data: Data, batch_size: int, span: int) -> NextBatch:
    """Minari's dataset in Arrow files, episodes through a `DataLoader` of two workers.

    Slower: HDF5 files, `sample_episodes`, no workers.
    """
    import gymnasium
    import minari
    import pyarrow  # noqa: F401  # its Arrow files need it

    data = _shorten(data)
    buffers = [
        minari.data_collector.EpisodeBuffer(
            observations=data.states[[*range(begin, end), end - 1]],
            actions=data.actions[begin:end],
            rewards=list(data.rewards[begin:end]),
            terminations=[False] * (end - begin),
            truncations=[False] * (end - begin - 1) + [True],
        )
        for begin, end in itertools.pairwise(data.offsets.tolist())
    ]
    spaces = [gymnasium.spaces.Box(-9, 9, x.shape[1:]) for x in (data.states, data.actions)]
    os.environ["MINARI_DATASETS_PATH"] = str(data.dataset.path.parent)
    with warnings.catch_warnings(action="ignore"):  # it misses an author, a description, ...
        episodes: Any = minari.create_dataset_from_buffers(
            f"benchmark/hopper{batch_size}-v0",
            buffers,
            observation_space=spaces[0],
            action_space=spaces[1],
            data_format="arrow",
        )
    others = active_children()
    batches = iter(
        DataLoader(
            episodes,
            batch_size,
            sampler=RandomSampler(episodes, replacement=True, num_samples=1 << 40),
            collate_fn=partial(_cut_windows, np.random.default_rng(0), span),
            num_workers=WORKERS,
        )
    )
    workers = tuple(child.pid or 0 for child in active_children() if child not in others)
    return Served(batches.__next__, workers)


def _cut_windows(generator: np.random.Generator, span: int, episodes: Sequence[Any]) -> object:
    """Cut a window out of each episode of Minari, pad and stack them."""
    fields = [np.zeros((len(episodes), span, n), np.float32) for n in (STATE_DIM, ACTION_DIM, 1, 1)]
    timesteps, mask = (np.zeros((len(episodes), span), np.int64) for _ in range(2))
    for row, episode in enumerate(episodes):
        start = int(generator.integers(len(episode.rewards)))
        window = slice(start, start + span)
        rest = np.cumsum(episode.rewards[::-1])[::-1]
        columns = (
            episode.observations[:-1],
            episode.actions,
            episode.rewards[:, None],
            rest[:, None],
        )
        for field, column in zip(fields, columns, strict=True):
            values = column[window]
            field[row, : len(values)] = values
        timesteps[row, : len(values)] = np.arange(start, start + len(values))
        mask[row, : len(values)] = 1
    return [torch.from_numpy(x) for x in (*fields, timesteps, mask)]


def reverb_dataset(data: Data, batch_size: int, span: int) -> NextBatch:
    """Reverb's `TrajectoryDataset` of a table in the same process, the fastest of its settings.

    An item is a segment without padding.  REVERB names a Python that has dm-reverb.
    """
    if "REVERB" not in os.environ:
        raise ImportError("REVERB names no Python that has dm-reverb")
    command = [os.environ["REVERB"], "-m", "benchmarks.reverb_reader"]
    command += [str(write_steps(data)), str(span), str(batch_size)]
    pipe = subprocess.PIPE
    child = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    ask, answer = child.stdin, child.stdout
    assert ask is not None and answer is not None

    def call() -> object:
        print(file=ask, flush=True)
        return answer.readline()

    if not call():
        raise ImportError(f"{command[0]} ended")
    return Served(call, (child.pid,))


def write_steps(data: Data) -> Path:
    """Write the columns of the first episodes, and where they end, for a child to read."""
    data, path = _shorten(data), data.dataset.path.parent / "steps.npz"
    columns = {name: getattr(data, name) for name in ("states", "actions")}
    columns |= {name: getattr(data, name)[:, None] for name in ("rewards", "returns_to_go")}
    begins = np.repeat(data.offsets[:-1], np.diff(data.offsets))
    columns["timesteps"] = np.arange(len(begins)) - begins
    np.savez(path, ends=data.offsets[1:], **columns)
    return path


PEERS: dict[str, Callable[[Data, int, int], NextBatch]] = {
    "NumPy gather": numpy_gather,
    "NumPy gather + selection": numpy_gather_and_selection,
    "original procedure": original_procedure,
    "d3rlpy": d3rlpy_trajectories,
    "TorchRL": torchrl_slices,
    "Hugging Face datasets": hugging_face_windows,
    "Minari": minari_episodes,
    "Reverb": reverb_dataset,
}
