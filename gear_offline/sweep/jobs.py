"""The trials of a sweep as jobs of a pool: in processes on a CPU, or as tasks of Ray.

Processes of one machine read one table in shared memory; tasks of Ray have tables of their own.
What ends one of several runs is its own error, so that the others go on.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from gear_offline.config.recipe import Recipe
from gear_offline.core.files import write_error
from gear_offline.core.interruption import StopRequest
from gear_offline.core.text import first_line, typed
from gear_offline.distributed.world import resolve_device
from gear_offline.errors import GearError, InputError, is_out_of_memory
from gear_offline.evaluation.environments import Known
from gear_offline.loaders.options import loader_options
from gear_offline.progress import Progress
from gear_offline.runs.loop import TrainingInterrupted, train_run
from gear_offline.sweep.results import is_played, steps_done
from gear_offline.sweep.trials import Trial
from gear_offline.tables.joint import TableData
from gear_offline.tables.shared import PublishedTables, attach_tables
from gear_offline.training.records import read_evaluations
from gear_offline.workers import LOST, Caller, Pool, WorkerPool

POLL_SECONDS = 0.2
LOCK_SECONDS = 120  # the lock of a node that has died lasts for 90 on NFS


@dataclass(frozen=True, kw_only=True)
class Work:
    """The trials that a scheduler trains, its means, and its progress."""

    trials: Sequence[Trial]  # that are not complete
    folder: Path  # each trial is trained into ``folder/NAME``
    device: torch.device
    parallel: int  # trials at a time; in this process, of a stack
    threads: int | None  # of a trial in a process of its own
    known: tuple[Known, ...] = ()  # what other processes have to learn of environments
    datasets: Mapping[str, TableData]  # by `Recipe.data_key`, opened and checked
    progress: Progress  # of all trials together
    steps: dict[str, int]  # done, by trial, also of complete ones
    failures: dict[str, str]  # "CODE: what was wrong" by trial

    def moved(self, trial: Trial, steps: int) -> None:
        """Note where a trial stands; cheap enough for every few steps."""
        self.steps[trial.name] = steps
        self.progress.update(sum(self.steps.values()))

    def end(self, trial: Trial, error: GearError | None) -> None:
        """Note how a trial has ended; raise ``DEVICE``, after which nothing can go on."""
        if error is not None and error.code == "DEVICE":
            raise error
        path, steps, how = self.folder / trial.name, trial.recipe.train.steps, "complete"
        if reports := read_evaluations(path):
            how += f"; step {reports[-1].step:,}: {reports[-1].summary()[1]}"
        elif not is_played(trial.recipe, path):
            how = "all steps are done, evaluations are left"
        if error is not None:
            how = self.failures[trial.name] = f"{error.code}: {error.message}"
        self.progress.say(f"{trial.name}: {how}")
        self.moved(trial, steps if error is None else steps_done(path))


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
    context = handles, patience
    waiting, running = deque(work.trials), dict[int, Trial]()
    interrupted = False
    with StopRequest() as stop:
        while running or (waiting and not interrupted):
            while waiting and pool.has_room and not interrupted:
                trial = waiting.popleft()
                path, known = work.folder / trial.name, work.known
                number = pool.submit(f"{__name__}:train_trial", trial.recipe, path, known, *context)
                running[number] = trial
            if stop.signal_name is not None and not interrupted:
                interrupted = True
                pool.interrupt()
            for number, value in pool.wait(POLL_SECONDS):
                trial, error = running.pop(number), value
                is_lost = isinstance(error, GearError) and error.code == LOST
                if is_lost:
                    remedy = "run the sweep again: it goes on from the last checkpoint"
                    error = GearError(LOST, error.what, where=trial.name, remedy=remedy)
                # one that is interrupted before it trains is ended by the signal
                if not (interrupted and (is_lost or isinstance(error, TrainingInterrupted))):
                    work.end(trial, error)
            for trial in running.values():
                work.moved(trial, steps_done(work.folder / trial.name))
    if interrupted:
        raise TrainingInterrupted("INTERRUPTED", f"stopped by {stop.signal_name}")


def train_trial(
    caller: Caller,
    recipe: Recipe,
    path: Path,
    known: tuple[Known, ...],
    handles: str,
    patience: float,
) -> None:
    """Train one trial in a worker."""
    end = time.monotonic() + patience
    _prepare(handles)
    for environment in known:
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


@contextmanager
def run_errors(name: str, path: Path, device: torch.device) -> Iterator[None]:
    """Turn whatever ends one of several runs into a `GearError`, so that the others can go on.

    ``DEVICE`` says that they cannot: after some errors of CUDA (an illegal address, a failed
    launch) each further call of the process fails too.
    """
    try:
        yield
    except OSError as error:
        raise write_error(error, str(path)) from error
    except Exception as error:
        first = first_line(error)
        is_told = isinstance(error, GearError)
        if getattr(error, "code", "MODEL") == "MODEL" and _is_lost(device):
            what = f"the GPU does nothing more for this process after {type(error).__name__}"
            remedy = "the same command goes on from the newest checkpoints"
            raise GearError("DEVICE", f"{what}: {first}", name, remedy) from error
        if is_told:
            raise
        if is_out_of_memory(error):
            remedy = "fewer runs at a time (sweep --parallel), or a smaller model or batch"
            raise GearError("MEMORY", f"out of memory: {first}", name, remedy) from error
        remedy = f"`gear-offline train {typed(path)} --resume --debug` shows where"
        raise GearError("INTERNAL", f"{type(error).__name__}: {first}", name, remedy) from error


def _is_lost(device: torch.device) -> bool:
    """Return true if a GPU does nothing more for this process; asked after an error."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # such errors come again with each call, others do not
    except RuntimeError:
        return True
    return False
