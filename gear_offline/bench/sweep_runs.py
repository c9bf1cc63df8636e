"""Learners of the paper's model that train side by side on one GPU, and their rate."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gear_offline.config.recipe import load_recipe
from gear_offline.dataset.dataset import Dataset
from gear_offline.sweep.track import Track
from gear_offline.training.learner import Learner
from gear_offline.training.training_model import ModelSizes

CHUNK = 8  # steps of a run that are launched together
DEEP = 4  # chunks on their way, at most
DEVICE = torch.device("cuda")


def make_learner(dataset: Dataset, options: Sequence[str], seed: int) -> Learner:
    """Return a learner of the paper's model; it is built under torch's current random numbers."""
    fixed = ("data.path=unused", "train.device=cuda", "train.log_every=1000000", f"seed={seed}")
    recipe = load_recipe("paper", (*fixed, *options))
    states, actions = (dataset.spec[c].shape[0] for c in ("observations", "actions"))
    sizes = ModelSizes(state_dim=states, action_dim=actions, discrete=False)
    torch.manual_seed(seed)
    return Learner(recipe, sizes, dataset, DEVICE)


class Runs:
    """Learners on tracks of their own that advance in turns."""

    def __init__(
        self, dataset: Dataset, options: Sequence[str], count: int, streams: Sequence[Any] = ()
    ) -> None:
        self.tracks = [Track(DEVICE, stream=streams[n] if streams else None) for n in range(count)]
        self.learners = []
        for seed, track in enumerate(self.tracks):
            with track.alone():
                self.learners.append(make_learner(dataset, options, seed))
                torch.cuda.synchronize()

    def advance(self, steps: int) -> None:
        """Do `steps` steps of each run; the host runs ahead by a bounded number."""
        marks: list[list[Any]] = [[] for _ in self.tracks]
        for done in range(0, steps, CHUNK):
            for track, learner, mine in zip(self.tracks, self.learners, marks, strict=True):
                if len(mine) >= DEEP:
                    mine.pop(0).synchronize()
                with track.alone() if learner._captured is None else track.launching():
                    for _ in range(min(CHUNK, steps - done)):
                        learner.advance()
                mine.append(track.mark())
        torch.cuda.synchronize()

    def first(self, count: int) -> Runs:
        """Return some of the runs."""
        part = copy.copy(self)
        part.tracks, part.learners = self.tracks[:count], self.learners[:count]
        return part

    def host_us(self) -> float:
        """Return the microseconds that the host takes to launch one step of one run."""
        began = time.perf_counter()
        for track, learner in zip(self.tracks, self.learners, strict=True):
            with track.launching():
                for _ in range(CHUNK):
                    learner.advance()
        seconds = time.perf_counter() - began
        torch.cuda.synchronize()
        return seconds * 1e6 / CHUNK / len(self.tracks)

    def parameters(self) -> list[list[Tensor]]:
        return [[p.detach().clone() for p in x.model.parameters()] for x in self.learners]


def rate(advance: Callable[[int], None], seconds: float, runs: int) -> dict[str, float]:
    """Return optimiser steps a second of all runs together, the median of three turns."""
    advance(2 * CHUNK)
    began = time.perf_counter()
    advance(10 * CHUNK)
    steps = max(CHUNK, int(10 * CHUNK * seconds / 3 / (time.perf_counter() - began)))
    found = []
    for _ in range(3):
        began = time.perf_counter()
        advance(steps)
        found.append(runs * steps / (time.perf_counter() - began))
    return {"steps_per_second": sorted(found)[1], "slowest": min(found), "fastest": max(found)}
