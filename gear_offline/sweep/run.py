"""Many runs as one: a directory with an ordinary run directory a trial, and a table over seeds.

What a trial leaves behind is what `gear_offline.train` would have left: the same batches, random
numbers and steps; but for dropout and rounding where trials are stacked on a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from gear_offline.batches.tables.joint import TableData
from gear_offline.config.recipe import Recipe
from gear_offline.core.parts import is_importable
from gear_offline.core.progress import Progress
from gear_offline.core.system import usable_cores
from gear_offline.core.text import count_text, first_line, say
from gear_offline.core.workers import Caller, RayPool, WorkerPool
from gear_offline.distributed.world import resolve_device
from gear_offline.errors import InputError
from gear_offline.evaluation.environments import PROBED, pack_environment
from gear_offline.runs.data import prepare_dataset
from gear_offline.runs.evaluations import MOST_WORKERS
from gear_offline.runs.loop import TrainingInterrupted
from gear_offline.runs.resolve import find_start, resolve
from gear_offline.runs.resume import find_past
from gear_offline.sweep.jobs import (
    LOCK_SECONDS,
    gpus_of,
    train_in_pool,
    train_in_processes,
    train_on_gpus,
)
from gear_offline.sweep.report import SweepResult, read_sweep
from gear_offline.sweep.results import is_complete, is_played, steps_done
from gear_offline.sweep.stacks import MOST_IN_A_STACK, train_stacks
from gear_offline.sweep.trials import SweepDirectory, SweepFile, Trial
from gear_offline.sweep.work import Work

# of the driver: with its default of 8, batches of a larger stack wait for each other
QUEUES = ("CUDA_DEVICE_MAX_CONNECTIONS", "32")
JOBS_OF_A_WORKER = 4  # reports, at least: a process takes longer to start than one


def train_trials(
    trials: Sequence[Trial],
    out: Path,
    *,
    parallel: int | None = None,
    ray: str | None = None,
    quiet: bool = False,
) -> SweepResult:
    """Train `trials`, which `run_trials` has checked, into the sweep directory `out`."""
    with ExitStack() as stack:
        stack.callback(PROBED.reset, PROBED.set({}))
        pool = None if ray is None else stack.enter_context(RayPool(ray))
        label, directory = trials[0].recipe.train.device, SweepDirectory(out)
        device = resolve_device(label) if pool is None else torch.device(pool.device(label))
        cores, node_cores = (pool.cpus, pool.node_cpus) if pool else (usable_cores(),) * 2
        most = cores
        if device.type == "cuda":
            os.environ.setdefault(*QUEUES)  # without effect where the GPU is in use already
            most = pool.gpus if pool else MOST_IN_A_STACK
        parallel = min(len(trials), parallel or most)
        datasets, resolved = _prepare(trials, quiet=quiet)
        played = [recipe.environments for recipe in resolved.values() if recipe.plays]
        environments = [pack_environment(name) for name in dict.fromkeys(chain(*played))]
        part_names = {name for recipe in resolved.values() for name in recipe.part_names}
        is_bound = None in environments or not all(map(is_importable, part_names))
        if is_bound and device.type != "cuda" and pool is None:  # only this process has it
            parallel = 1
        stack.enter_context(directory.hold())
        file = directory.file_for(trials)
        # Every trial gets its share of the cores; none of it changes what the trial computes.
        threads = None
        if pool is not None or (device.type != "cuda" and parallel > 1):
            threads = file.threads = file.threads or max(1, min(node_cores, cores // parallel))
        pending = _list_unfinished(trials, directory, resolved, datasets)
        if pool is not None:
            pool.share(parallel, cpus=threads or 1, device=device.type)
            pool.check(directory.path)
        directory.write(file)
        if pending:
            ended, count = len(trials) - len(pending), count_text(len(trials), "run")
            complete = f", {ended} complete already" if ended else ""
            many = f" on {cores} cores, slower than {cores}" if threads and parallel > cores else ""
            where = f"{parallel} at a time{many}; sweep directory {directory.path}"
            say(f"{count} on {device}{complete}, {where}", quiet=quiet)
            steps = {trial.name: steps_done(directory.run_path(trial)) for trial in trials}
            total = sum(trial.recipe.train.steps for trial in trials)
            name, begun = directory.path.name, sum(steps.values())
            work = Work(
                trials=[_with_share(trial, parallel, threads, pool) for trial in pending],
                folder=directory.path / "runs",
                device=device,
                parallel=parallel,
                threads=threads,
                environments=tuple(filter(None, environments)),
                datasets=datasets,
                progress=Progress(name, total=total, done=begun, quiet=quiet),
                steps=steps,
                failures=file.failures,
            )
            try:
                with work.progress:
                    _train(work, pool, [] if is_bound else gpus_of(device))
            except TrainingInterrupted as error:
                problem, remedy = "stopped; what is done is saved", "the same command goes on"
                raise TrainingInterrupted(error.code, problem, str(out), remedy) from error
            finally:
                directory.write(file)  # what has failed
        return _conclude(directory, file, quiet=quiet)


def _prepare(
    trials: Sequence[Trial], *, quiet: bool
) -> tuple[dict[str, TableData], dict[str, Recipe]]:
    """Return data by their key, and recipes by trial: what does not fit shows before any step."""
    datasets, resolved = dict[str, TableData](), dict[str, Recipe]()
    for trial in trials:
        key = trial.recipe.data_key
        if key not in datasets:
            datasets[key] = prepare_dataset(trial.recipe, quiet=quiet)
        start = find_start(trial.recipe)
        resolved[trial.name], _ = resolve(trial.recipe, datasets[key], start, quiet=True)
    return datasets, resolved


def _list_unfinished(
    trials: Sequence[Trial],
    directory: SweepDirectory,
    resolved: Mapping[str, Recipe],
    datasets: Mapping[str, TableData],
) -> list[Trial]:
    """Return the trials that are not complete and evaluated; refuse runs of other recipes."""
    pending = []
    for trial in trials:  # complete ones too: the name of a run has to tell what it is
        path, recipe = directory.run_path(trial), resolved[trial.name]
        if (past := find_past(path)) is not None:
            past.check(past.fill(recipe), datasets[trial.recipe.data_key])
            if changed := past.changed_parts(recipe):
                problem = f"{', '.join(changed)} has changed since this run began"
                remedy = "sweep into another directory (--out), or put the file back as it was"
                raise InputError("RUN_MISMATCH", problem, str(path), remedy)
        if not (is_complete(trial, path) and is_played(recipe, path)):
            pending.append(trial)
    return pending


def _conclude(directory: SweepDirectory, file: SweepFile, *, quiet: bool) -> SweepResult:
    """Read what the trials came to; write the table and the reports."""
    result = read_sweep(directory.path)
    complete = [trial.path for trial in result.trials if trial.status == "complete"]
    jobs = [path for path in complete if not (path / "report.md").exists()]
    processes = min(len(jobs) // JOBS_OF_A_WORKER, usable_cores())
    with ExitStack() as stack:
        errors: Iterable[str | None] = map(partial(report_of, Caller()), jobs)
        if processes > 1:
            pool = stack.enter_context(WorkerPool(processes))
            errors = pool.run(f"{__name__}:report_of", [[path] for path in jobs])
        progress = Progress("reports", total=len(jobs), unit="runs", quiet=quiet or not jobs)
        stack.enter_context(progress)
        for error in errors:
            if error:
                progress.say(error)
            progress.advance()
    file.table = result.table.to_json()
    directory.write(file)
    result.write()
    return result


def report_of(caller: Caller, run: Path) -> str | None:
    """Write the report of a run, a job; return what went wrong."""
    from gear_offline.runs.report import write_report  # matplotlib takes half a second

    try:
        write_report(run)
    except Exception as error:
        return f"{run}: there is no report: {first_line(error)}"
    return None


def _train(work: Work, pool: RayPool | None, gpus: Sequence[str]) -> None:
    if pool is not None:
        train_in_pool(work, pool, patience=LOCK_SECONDS)
    elif min(len(gpus), len(work.trials)) > 1:
        train_on_gpus(work, gpus)
    elif work.parallel == 1 or work.device.type == "cuda":
        train_stacks(work)
    else:
        train_in_processes(work)


def _with_share(trial: Trial, parallel: int, threads: int | None, pool: RayPool | None) -> Trial:
    """Return a trial whose recipe has its share of the machines, where it does not say."""
    recipe, changes = trial.recipe, dict[str, Any]()
    if pool is not None:  # nodes with GPUs may train on their CPUs
        changes["train.device"] = pool.device(recipe.train.device)
    if recipe.train.threads is None and threads is not None:
        changes["train.threads"] = threads
    if recipe.evaluate.episodes and recipe.evaluate.workers is None and (parallel > 1 or pool):
        spare = usable_cores() - parallel * (threads or 0) if pool is None else 0
        changes["evaluate.workers"] = max(1, min(MOST_WORKERS, spare // parallel))
    return trial.model_copy(update={"recipe": recipe.settle(changes)}) if changes else trial
