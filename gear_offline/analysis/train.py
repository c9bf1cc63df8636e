"""Train every strategy with every seed, judge the policies, and say how long it will take.

Runs are ordinary run directories under ``OUT/training/runs``; training again into the same folder
goes on where it stopped.  On a GPU policies are judged on CPU cores while runs train; on a CPU
afterwards, because the two would take each other's time.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gear_offline.analysis.candidates import Candidate
from gear_offline.analysis.judge import Judges, write_probes
from gear_offline.analysis.learning import learning_document
from gear_offline.analysis.outlook import Outlook
from gear_offline.analysis.plan import (
    MOST_SEEDS,
    RunPoints,
    TrainingPlan,
    make_plan,
    run_in_turn,
    run_together,
)
from gear_offline.analysis.significance import LEAST_PAIRS, limits_text
from gear_offline.config.recipe import Recipe
from gear_offline.core.interruption import StopRequest
from gear_offline.core.progress import say
from gear_offline.core.system import usable_cores
from gear_offline.core.text import count_text, strategies_text
from gear_offline.errors import InputError
from gear_offline.runs.held_directory import HeldDirectory
from gear_offline.runs.preparation import prepare_dataset, resolve
from gear_offline.runs.training_run import TrainingInterrupted

if TYPE_CHECKING:
    import torch

SPARE_CORES = 4  # not used for judging while a GPU trains


def check_request(recipe: Recipe, *, seeds: int, jobs: int | None, threshold: float | None) -> None:
    """Raise `InputError` (``STRATEGIES_OPTION``) unless `train_strategies` can take these."""
    if not 1 <= seeds <= MOST_SEEDS:
        raise InputError(
            "STRATEGIES_OPTION",
            f"{seeds} seeds",
            where="--seeds",
            remedy=f"give 1 to {MOST_SEEDS}; 3 is the least that shows a spread",
        )
    if jobs is not None and not 0 <= jobs <= 1024:
        raise InputError(
            "STRATEGIES_OPTION", f"{jobs} jobs", where="--jobs", remedy="give 0 to 1024"
        )
    if threshold is not None and not math.isfinite(threshold):
        raise InputError(
            "STRATEGIES_OPTION",
            f"a threshold of {threshold}",
            where="--threshold",
            remedy="give a return to reach",
        )
    if recipe.data.tasks is not None:
        raise InputError(
            "STRATEGIES_OPTION",
            "strategies are compared by training on one dataset, the recipe has several tasks",
            where="data.tasks",
            remedy="take one of the tasks as data.path, or leave out --train",
        )


def hold_comparison(out: Path) -> HeldDirectory:
    """Hold the folder of a comparison for as long as it is trained; a context manager.

    Each run holds its own directory as well, but only while it is trained: two comparisons in one
    folder would meet in the middle, at some run.

    Parameters
    ----------
    out
        Made if it is not there.

    Raises
    ------
    InputError
        ``STRATEGIES_LOCKED`` when another process holds it, ``OUTPUT_WRITE`` when it cannot be
        made.
    """
    taken = InputError(
        "STRATEGIES_LOCKED",
        "another process is training this comparison",
        where=str(out),
        remedy="wait for it, or give another folder with --out",
    )
    return HeldDirectory(out, unusable="OUTPUT_WRITE", taken=taken)


def train_strategies(
    recipe: Recipe,
    candidates: Sequence[Candidate],
    *,
    out: Path,
    seeds: int = 3,
    jobs: int | None = None,
    threshold: float | None = None,
    quiet: bool = False,
    run_points: RunPoints | None = None,
    on_stop: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Train, judge and compare; go on from whatever `out` holds.

    Parameters
    ----------
    recipe
        What all runs share; its seed is the first seed.
    candidates
        The baseline first.
    out
        Folder of the comparison: ``training/runs/``, ``judged/``, ``probe.safetensors``.  Where
        others may train into it, hold it by `hold_comparison`.
    seeds
        Of each strategy.
    jobs
        Processes that play policies; 0: this process, after training.  Default: the cores, less
        some while a GPU trains.
    threshold
        As `gear_offline.analysis.learning.learning_document`.
    quiet
        Show nothing.
    run_points
        What trains; default: `run_together` on a GPU, else `run_in_turn`.
    on_stop
        Given the document of what there is by then when a signal stops the work.

    Returns
    -------
    dict
        JSON-able; docs/strategies.md says what is in it.

    Raises
    ------
    InputError
        ``STRATEGIES_OPTION``; ``RUN_RECIPE`` when `out` holds runs of another recipe; those of
        preparing the data and of training.
    GearError
        ``STRATEGIES_WORKER``.  A run that failed is named in the document instead.
    TrainingInterrupted
        ``STRATEGIES_INTERRUPTED`` after Ctrl-C or SIGTERM; what was done is kept.
    """
    from gear_offline.core.device import resolve_device
    from gear_offline.runs.checks import check_recipe

    check_request(recipe, seeds=seeds, jobs=jobs, threshold=threshold)
    check_recipe(recipe, where=f"recipe {recipe.name}")
    dataset = prepare_dataset(recipe, quiet=quiet)
    resolved, _ = resolve(recipe, dataset, quiet=quiet)
    plan = make_plan(resolved, candidates, seeds=seeds, out=out)
    for point in plan.points:
        point.is_complete()  # refuses the runs of another recipe before any work
    probes = write_probes(resolved, dataset, out / "probe.safetensors")
    device = resolve_device(recipe.train.device)
    on_gpu = device.type == "cuda"
    runner = run_points or (run_together if on_gpu else run_in_turn)
    cores = usable_cores()
    if jobs is None:
        jobs = max(1, cores - SPARE_CORES) if on_gpu else (cores if cores > 1 else 0)
    judges = Judges(plan, probes, jobs=jobs)
    beside = on_gpu and jobs > 0
    say(
        f"{strategies_text(len(plan.candidates))}, {count_text(seeds, 'seed')} each: "
        f"{count_text(len(plan.points), 'run')} of {resolved.train.steps:,} steps in "
        f"{out / 'training'}, "
        f"{'side by side on one GPU' if runner is run_together else 'one after the other'}; "
        f"policies are played {'beside training' if beside else 'after training'}",
        quiet=quiet,
    )
    if seeds < LEAST_PAIRS:  # before the work, not only after it
        say(limits_text(seeds), quiet=quiet)
    began = time.monotonic()
    outlook = Outlook(plan, judges, beside=beside, quiet=quiet)

    def document(errors: Mapping[str, str]) -> dict[str, Any]:
        return {
            **learning_document(plan, probes, errors=errors, threshold=threshold),
            "engine": "sweep" if runner is run_together else "serial",
            "device": _device_name(device),
            "wall_seconds": round(time.monotonic() - began, 3),
            "resumed": outlook.found > 0,
        }

    try:
        return document(_work(plan, judges, runner, outlook, beside=beside))
    except TrainingInterrupted as error:
        if on_stop is not None:
            on_stop(document(judges.errors))
        raise TrainingInterrupted(  # the remedy of a single run would not go on with the rest
            "STRATEGIES_INTERRUPTED",
            "stopped, what was trained and played is kept",
            where=str(out),
            remedy="the same command goes on",
        ) from error


def _device_name(device: torch.device) -> str:
    if device.type != "cuda":
        return str(device)
    import torch

    return str(torch.cuda.get_device_name(device))


def _work(
    plan: TrainingPlan, judges: Judges, runner: RunPoints, outlook: Outlook, *, beside: bool
) -> dict[str, str]:
    """Train and judge; return the errors of runs that failed, by name."""
    trained, stop = threading.Event(), threading.Event()
    failures: list[BaseException] = []

    def sit() -> None:
        try:
            judges.sit(trained, stop)
        except BaseException as error:  # told by the main thread
            failures.append(error)

    thread = threading.Thread(target=sit, name="judges")
    with outlook:
        try:
            if beside:
                thread.start()
            todo = [point for point in plan.points if not point.is_complete()]
            errors = runner(plan.points, plan.out) if todo else {}
            trained.set()
            if not beside:
                thread.start()
            _wait(thread)
        except BaseException:
            stop.set()
            raise
        finally:
            if thread.is_alive():
                thread.join()
    if failures:
        raise failures[0]
    return {**judges.errors, **errors}


def _wait(thread: threading.Thread) -> None:
    """Wait for the judges; Ctrl-C and SIGTERM end it once what is being played is over."""
    with StopRequest() as request:
        while thread.is_alive():
            thread.join(0.2)
            if request.signal_name is not None:
                raise TrainingInterrupted("STRATEGIES_INTERRUPTED", "stopped")
