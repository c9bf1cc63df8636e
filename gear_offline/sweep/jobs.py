"""The trials of a sweep as jobs of a pool: in processes on a CPU or on GPUs, or as tasks of Ray.

Processes of one machine read one table in shared memory; tasks of Ray have tables of their own.
A process on a GPU trains a share of the stacks.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from gear_offline.batches.tables.shared import PublishedTables, attach_tables
from gear_offline.config.recipe import Recipe
from gear_offline.core.interruption import StopRequest
from gear_offline.core.progress import Progress
from gear_offline.core.workers import LOST, Caller, Pool, WorkerPool
from gear_offline.distributed.world import resolve_device
from gear_offline.errors import GearError, InputError
from gear_offline.evaluation.environments import PROBED, Pack
from gear_offline.loaders.options import loader_options
from gear_offline.runs.data import prepare_dataset
from gear_offline.runs.loop import TrainingInterrupted, train_run
from gear_offline.sweep.results import steps_done
from gear_offline.sweep.stacks import stacks_of, train_stacks
from gear_offline.sweep.trials import Trial
from gear_offline.sweep.work import Work, run_errors

POLL_SECONDS = 0.2
LOCK_SECONDS = 120  # the lock of a node that has died lasts for 90 on NFS
T = TypeVar("T")


def run_jobs(
    pool: Pool,
    jobs: Iterable[tuple[T, tuple[Any, ...]]],
    end: Callable[[T, Any], None],
    note: Callable[[list[T]], None] = lambda _: None,
) -> None:
    """Do jobs, each for an owner: `end` takes what one gave, `note` those that run, time and again.

    After Ctrl-C or SIGTERM every job is interrupted, then ``INTERRUPTED`` is raised.
    """
    waiting, running, interrupted = deque(jobs), dict[int, T](), False
    with StopRequest() as stop:
        while running or (waiting and not interrupted):
            while waiting and pool.has_room and not interrupted:
                owner, words = waiting.popleft()
                running[pool.submit(*words)] = owner
            if stop.signal_name is not None and not interrupted:
                interrupted = True
                pool.interrupt()
            for number, value in pool.wait(POLL_SECONDS):
                owner = running.pop(number)
                is_lost = isinstance(value, GearError) and value.code == LOST
                # one that is interrupted before it trains is ended by the signal
                if not (interrupted and (is_lost or isinstance(value, TrainingInterrupted))):
                    end(owner, value)
            note(list(running.values()))
    if interrupted:
        raise TrainingInterrupted("INTERRUPTED", f"stopped by {stop.signal_name}")


# a trial a job ---------------------------------------------------------------------------------


def train_in_processes(work: Work) -> None:
    """Train each trial in a worker process."""
    shared = PublishedTables()
    for trial in work.trials:  # a trial whose table does not fit there reads one of its own
        with suppress(GearError):
            dataset = work.datasets[trial.recipe.data_key]
            shared.add(dataset, loader_options(trial.recipe, dataset))
    with WorkerPool(work.parallel, threads=work.threads) as pool:
        train_in_pool(work, pool, shared.handles())


def train_in_pool(work: Work, pool: Pool, handles: str = "{}", patience: float = 0) -> None:
    """Train each trial as a job of a pool; `patience` is for the locks of lost ones, in seconds.

    After Ctrl-C or SIGTERM every trial saves a checkpoint, then ``INTERRUPTED`` is raised.
    """

    def end(trial: Trial, error: GearError | None) -> None:
        if error is not None and error.code == LOST:
            remedy = "run the sweep again: it goes on from the last checkpoint"
            error = GearError(LOST, error.problem, where=trial.name, remedy=remedy)
        work.end(trial, error)

    def note(trials: list[Trial]) -> None:
        for trial in trials:
            work.note_steps(trial, steps_done(work.folder / trial.name))

    how = work.environments, handles, patience
    train = f"{__name__}:train_trial"
    jobs = [(t, (train, t.recipe, work.folder / t.name, *how)) for t in work.trials]
    run_jobs(pool, jobs, end, note)


def train_trial(
    caller: Caller,
    recipe: Recipe,
    path: Path,
    environments: tuple[Pack, ...],
    handles: str,
    patience: float,
) -> None:
    """Train one trial in a worker."""
    end = time.monotonic() + patience
    _prepare(handles)
    for environment in environments:
        environment.learn()
    with run_errors(path.name, path, resolve_device(recipe.train.device)):
        while True:
            try:
                train_run(recipe, out=path, resume=True, quiet=True)
                return
            except InputError as error:
                if error.code != "RUN_LOCKED" or time.monotonic() > end:
                    raise
            time.sleep(POLL_SECONDS)


@cache
def _prepare(handles: str) -> None:
    """Take over the caller's tables, once a worker."""
    attach_tables(handles)


# a share of the stacks a GPU -------------------------------------------------------------------


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
    how = work.folder, work.device.type, work.parallel, work.environments
    failed = list[GearError]()

    def note(message: dict[str, int] | tuple[str, GearError | None]) -> None:
        if isinstance(message, dict):
            for name, steps in message.items():
                work.note_steps(trials[name], steps)
        else:
            name, error = message
            work.end(trials[name], error)

    jobs = [
        (gpu, (f"{__name__}:train_share", share, gpu, block.tolist() or cores, *how))
        for share, gpu, block in zip(shares, gpus, blocks, strict=False)
    ]
    with WorkerPool(len(shares), threads=None) as pool:
        pool.on_message = note
        run_jobs(pool, jobs, lambda _, value: failed.extend([value] if value else []))
    for error in failed:
        if error.code != LOST:
            raise error
        remedy = "the same command goes on; fewer runs at a time (--parallel) take less memory"
        raise GearError(LOST, error.problem, remedy=remedy)


@dataclass(frozen=True, kw_only=True)
class _GpuWork(Work):
    """The trials of one process, which tells its caller how they move and end."""

    caller: Caller
    sent_at: list[float] = field(default_factory=lambda: [0.0])  # the last steps, in seconds

    def note_steps(self, trial: Trial, steps: int) -> None:
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
    environments: Sequence[Pack],
) -> None:
    """Train a share of the trials on a GPU and some cores, in a worker."""
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # before this process uses CUDA
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))
    PROBED.set({})
    for environment in environments:
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
