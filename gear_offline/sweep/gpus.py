"""A sweep on the GPUs of a machine: a process each trains its share of the stacks."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

import numpy as np
import torch

from gear_offline.core.interruption import StopRequest
from gear_offline.errors import GearError
from gear_offline.evaluation.environments import PROBED, Known
from gear_offline.progress import Progress
from gear_offline.runs.data import prepare_dataset
from gear_offline.runs.loop import TrainingInterrupted
from gear_offline.sweep.jobs import POLL_SECONDS, Work
from gear_offline.sweep.stacks import stacks_of, train_stacks
from gear_offline.sweep.trials import Trial
from gear_offline.workers import LOST, Caller, WorkerPool


def gpus_of(device: torch.device) -> list[str]:
    """Return the GPUs that a sweep on `device` uses, as ``CUDA_VISIBLE_DEVICES`` names them."""
    if device != torch.device("cuda"):  # one is named, or none
        return []
    count = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    return visible.split(",")[:count]


def train_on_gpus(work: Work, gpus: Sequence[str]) -> None:
    """Deal the stacks out to the GPUs; raise ``INTERRUPTED`` after Ctrl-C.

    Each has a process, and its share of the cores.  What ends one process leaves the others alone,
    and is raised when they are through.
    """
    work = replace(work, parallel=min(work.parallel, -(-len(work.trials) // len(gpus))))
    stacks, trials = list(stacks_of(work)), {trial.name: trial for trial in work.trials}
    dealt = [list(chain(*stacks[number :: len(gpus)])) for number in range(len(gpus))]
    shares = [share for share in dealt if share]
    cores = sorted(os.sched_getaffinity(0))
    blocks = np.array_split(cores, len(shares))  # neighbours share caches

    def note(message: dict[str, int] | tuple[str, GearError | None]) -> None:
        if isinstance(message, dict):
            for name, steps in message.items():
                work.moved(trials[name], steps)
        else:
            name, error = message
            work.end(trials[name], error)

    with WorkerPool(len(shares), threads=None) as pool, StopRequest() as stop:
        pool.on_message, failed, interrupted = note, list[GearError](), False
        for share, gpu, block in zip(shares, gpus, blocks, strict=False):
            how = work.folder, work.device.type, work.parallel, work.known
            pool.submit(f"{__name__}:train_share", share, gpu, block.tolist() or cores, *how)
        running = len(shares)
        while running:
            if stop.signal_name is not None and not interrupted:
                interrupted = True
                pool.interrupt()
            ended = [value for _, value in pool.wait(POLL_SECONDS)]
            running -= len(ended)
            failed += [value for value in ended if isinstance(value, GearError)]
    if interrupted:
        raise TrainingInterrupted("INTERRUPTED", f"stopped by {stop.signal_name}")
    for error in failed:
        if error.code != LOST:
            raise error
        remedy = "the same command goes on; fewer runs at a time (--parallel) take less memory"
        raise GearError(LOST, error.what, remedy=remedy)


@dataclass(frozen=True, kw_only=True)
class _GpuWork(Work):
    """The trials of one process, which tells its caller how they move and end."""

    caller: Caller
    sent_at: list[float] = field(default_factory=lambda: [0.0])  # the last steps, in seconds

    def moved(self, trial: Trial, steps: int) -> None:
        self.steps[trial.name] = steps
        if (now := time.monotonic()) > self.sent_at[0] + POLL_SECONDS:
            self.sent_at[0] = now
            self.caller.send(self.steps)

    def end(self, trial: Trial, error: GearError | None) -> None:
        if error is not None and error.code == "DEVICE":
            raise error
        self.steps[trial.name] = trial.recipe.train.steps
        self.caller.send((trial.name, error))


def train_share(
    caller: Caller,
    trials: Sequence[Trial],
    gpu: str,
    cores: Sequence[int],
    folder: Path,
    device: str,
    parallel: int,
    known: Sequence[Known],
) -> None:
    """Train a share of the trials on a GPU and some cores, in a worker."""
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # before this process uses CUDA
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))
    PROBED.set({})
    for environment in known:
        environment.learn()
    recipes = {trial.recipe.data_key: trial.recipe for trial in trials}
    train_stacks(
        _GpuWork(
            trials=trials,
            folder=folder,
            device=torch.device(device),
            parallel=parallel,
            threads=None,
            datasets={key: prepare_dataset(recipe, quiet=True) for key, recipe in recipes.items()},
            progress=Progress("", total=0, quiet=True),
            steps={},
            failures={},
            caller=caller,
        )
    )
