"""The trials of a sweep in worker processes on a CPU: all read one table in shared memory."""

from __future__ import annotations

import json
from collections import deque
from contextlib import ExitStack, suppress
from functools import cache
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from gear_offline.config.recipe import Recipe
from gear_offline.core.device import resolve_device
from gear_offline.core.interruption import StopRequest
from gear_offline.errors import GearError
from gear_offline.loaders.recipes import loader_options
from gear_offline.runs.loop import TrainingInterrupted, train
from gear_offline.sampling.base import own_strategies, register_own
from gear_offline.sweep.job import Job, run_errors
from gear_offline.sweep.results import steps_done
from gear_offline.sweep.trials import Trial
from gear_offline.tables.shared import SharedTables
from gear_offline.workers import LOST, Caller, Worker

POLL_SECONDS = 0.2


def train_in_processes(job: Job) -> None:
    """Train each trial in a worker process.

    After Ctrl-C or SIGTERM every trial saves a checkpoint, then ``INTERRUPTED`` is raised.
    """
    shared = SharedTables(publish=True)
    for trial in job.trials:  # a trial whose table does not fit there reads one of its own
        with suppress(GearError):
            dataset = job.dataset(trial.recipe)
            shared.table(dataset, loader_options(trial.recipe, dataset))
    context = json.dumps(shared.handles()), tuple(own_strategies())
    waiting, idle = deque(job.trials), list[Worker]()
    running: dict[Any, tuple[Worker, Trial]] = {}
    interrupted = False
    with StopRequest() as stop, ExitStack() as stack:
        while running or (waiting and not interrupted):
            while waiting and len(running) < job.parallel and not interrupted:
                trial = waiting.popleft()
                worker = idle.pop() if idle else stack.enter_context(Worker(threads=job.threads))
                path = job.folder / trial.name
                worker.start(f"{__name__}:train_trial", trial.recipe, path, *context)
                running[worker.connection] = worker, trial
            if stop.signal_name is not None and not interrupted:
                interrupted = True
                for worker, _ in running.values():
                    worker.interrupt()
            for connection in wait(list(running), POLL_SECONDS):
                worker, trial = running.pop(connection)
                error = _outcome(worker, trial)
                is_lost = error is not None and error.code == LOST
                if not is_lost:
                    idle.append(worker)
                # one that is interrupted before it trains is ended by the signal
                if not (interrupted and (is_lost or isinstance(error, TrainingInterrupted))):
                    job.end(trial, error)
            for _, trial in running.values():
                job.moved(trial, steps_done(job.folder / trial.name))
    if interrupted:
        raise TrainingInterrupted("INTERRUPTED", f"stopped by {stop.signal_name}")


def _outcome(worker: Worker, trial: Trial) -> GearError | None:
    try:
        worker.receive()
    except GearError as error:
        if error.code != LOST:
            return error
        remedy = "run the sweep again: it goes on from the last checkpoint"
        return GearError(LOST, error.what, where=trial.name, remedy=remedy)
    return None


def train_trial(
    caller: Caller, recipe: Recipe, path: Path, handles: str, strategies: tuple[str, ...]
) -> None:
    """Train one trial in a worker."""
    tables = _attached(handles, strategies)
    with run_errors(path.name, path, resolve_device(recipe.train.device)):
        train(recipe, out=path, resume=True, quiet=True, tables=tables)


@cache
def _attached(handles: str, strategies: tuple[str, ...]) -> SharedTables:
    """Return the tables that all trials of this worker read; know the caller's strategies."""
    register_own(strategies)
    return SharedTables(json.loads(handles))
