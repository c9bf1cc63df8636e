"""Many runs as one: a directory with an ordinary run directory a trial, and a table over seeds.

What a trial leaves behind is what `gear_offline.train` would have left: the same batches, random
numbers and steps; but for dropout and rounding where trials are stacked on a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gear_offline.config.recipe import Recipe, load_recipe
from gear_offline.config.tasks import data_key
from gear_offline.core.closing import Closing
from gear_offline.core.device import resolve_device
from gear_offline.core.system import usable_cores
from gear_offline.core.text import count_text
from gear_offline.errors import GearError, InputError
from gear_offline.evaluation.background import MOST_WORKERS
from gear_offline.progress import Progress, say
from gear_offline.runs import report
from gear_offline.runs.checks import check_recipe
from gear_offline.runs.directory import RESUMABLE, check_resumed
from gear_offline.runs.loop import TrainingInterrupted, train
from gear_offline.runs.prepare import prepare_dataset, resolve
from gear_offline.sweep.directory import SweepDirectory, SweepFile, merged
from gear_offline.sweep.errors import run_errors
from gear_offline.sweep.processes import train_in_processes
from gear_offline.sweep.report import SweepResult, read_sweep, write_sweep_report
from gear_offline.sweep.results import steps_done
from gear_offline.sweep.trials import Trial, make_trials
from gear_offline.tables.joint import TableData
from gear_offline.tables.shared import SharedTables

MOST_ON_A_GPU = 16  # more trials at a time need memory and are hardly faster
# of the driver for streams; its default of 8 makes further ones wait for each other
QUEUES = ("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def sweep(
    recipe: Recipe | str | Path,
    options: Mapping[str, Sequence[Any]] | None = None,
    *,
    seeds: int | Sequence[int] | None = None,
    out: str | Path | None = None,
    parallel: int | None = None,
    exact: bool = False,
    quiet: bool = False,
) -> SweepResult:
    """Train a recipe with several settings and seeds, and compare them.

    Called again it goes on: complete trials stay as they are, the others continue from their
    newest checkpoints.  Further values and seeds of the same options are trained as well; with
    fewer the table is of these alone.

    Parameters
    ----------
    recipe
        A recipe, or what `gear_offline.load_recipe` takes.
    options
        Dotted options, each with its values: ``{"model.layers": [3, 4]}``.  Every combination is a
        trial.
    seeds
        A number of seeds from 0 on, or a list of them; by default the recipe's own.
    out
        Directory of the sweep; by default ``runs/NAME-sweep``.
    parallel
        Trials at a time; by default 16 on a GPU, one a core on a CPU.
    exact
        On a GPU, do not stack trials of the same shape: each gives the bits of a run alone.
    quiet
        Print nothing.

    Returns
    -------
    SweepResult
        How each trial stands, and the table over seeds.  A trial that fails ends alone.

    Raises
    ------
    InputError
        ``USAGE``, ``RECIPE``, ``RUN_MISMATCH`` for a directory with another sweep, ``RUN_LOCKED``,
        and those of preparing the data, before any trial begins.
    TrainingInterrupted
        ``INTERRUPTED`` after Ctrl-C or SIGTERM; what the trials have done is saved.
    """
    if isinstance(seeds, int):
        seeds = range(seeds)
    if out is None:
        name = (recipe if isinstance(recipe, Recipe) else load_recipe(recipe)).name
        out = Path("runs") / f"{name}-sweep"
    place = Path(out)
    directory = SweepDirectory(place)
    named = directory.read().trials[0].settings if directory.is_begun else ()
    trials = make_trials(recipe, options or {}, seeds, named=tuple(named))
    return run_trials(trials, place, parallel=parallel, exact=exact, quiet=quiet)


def run_trials(
    trials: Sequence[Trial],
    out: Path,
    *,
    parallel: int | None = None,
    exact: bool = False,
    quiet: bool = False,
) -> SweepResult:
    """Train `trials` into the sweep directory `out`, as `sweep` does."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        what, remedy = "a sweep runs in one process", "start it without torchrun"
        raise InputError("USAGE", what, remedy=remedy)
    _check_trials(trials, parallel)
    for trial in trials:
        check_recipe(trial.recipe, where=f"run {trial.name}")
    return _Sweep(trials, SweepDirectory(out), parallel, exact=exact, quiet=quiet).complete()


def _check_trials(trials: Sequence[Trial], parallel: int | None) -> None:
    names = [trial.name for trial in trials]
    devices = {trial.recipe.train.device for trial in trials}
    what, remedy = "", "name each value and seed once"
    if not trials:
        what, remedy = "no trials", "give at least one value and seed"
    elif len(set(names)) < len(names):
        what = f"two trials are called {next(n for n in names if names.count(n) > 1)}"
    elif len(devices) > 1:
        what, remedy = f"trials on {' and '.join(sorted(devices))}", "give all one train.device"
    elif parallel is not None and parallel < 1:
        what, remedy = f"{parallel} trials at a time", "give a number from 1"
    if what:
        raise InputError("USAGE", what, remedy=remedy)


class _Sweep:
    """A sweep under way."""

    def __init__(
        self,
        trials: Sequence[Trial],
        directory: SweepDirectory,
        parallel: int | None,
        *,
        exact: bool,
        quiet: bool,
    ) -> None:
        self._trials, self._directory = trials, directory
        self._exact, self._quiet = exact, quiet
        self._datasets: dict[str, TableData] = {}
        self._device = resolve_device(trials[0].recipe.train.device)
        self._on_gpu = self._device.type == "cuda"
        if self._on_gpu:
            os.environ.setdefault(*QUEUES)  # without effect where the GPU is in use already
        most = MOST_ON_A_GPU if self._on_gpu else usable_cores()
        self._parallel = min(len(trials), parallel or most)

    def complete(self) -> SweepResult:
        """Train what is not complete, and report."""
        resolved = {}
        for trial in self._trials:  # whatever does not fit shows before the first step
            resolved[trial.name], _ = resolve(trial.recipe, self._open(trial.recipe), quiet=True)
        with self._directory.hold():
            begun = self._directory.read() if self._directory.is_begun else None
            where = self._directory.path
            file = merged(begun, self._trials, free=RESUMABLE, path=where)
            file.exact = file.exact or self._exact
            if not self._on_gpu and self._parallel > 1 and file.threads is None:
                file.threads = max(1, usable_cores() // self._parallel)
            left = self._directory.open_trials(self._trials)
            for trial in left:
                check_resumed(self._directory.run_path(trial), resolved[trial.name])
            self._directory.write(file)
            if left:
                self._train(left, file)
            return self._conclude(file)

    def _open(self, recipe: Recipe) -> TableData:
        """Return the data of a recipe, opened and verified once for all trials."""
        key = data_key(recipe)
        if key not in self._datasets:
            self._datasets[key] = prepare_dataset(recipe, quiet=self._quiet)
        return self._datasets[key]

    def _train(self, left: Sequence[Trial], file: SweepFile) -> None:
        done = len(self._trials) - len(left)
        say(
            f"{count_text(len(self._trials), 'run')} on {self._device}"
            f"{f', {done} complete already' if done else ''}, {self._parallel} at a time; "
            f"sweep directory {self._directory.path}",
            quiet=self._quiet,
        )
        # Every trial gets its share of the cores; none of it changes what the trial computes.
        threads = None if self._on_gpu or self._parallel == 1 else file.threads
        shared = [_with_share(trial, self._parallel, threads) for trial in left]
        try:
            if self._parallel == 1:
                self._one_by_one(shared)
            else:
                self._together(shared, file)
        except TrainingInterrupted as error:
            what = "stopped; what the trials have done is saved"
            where, remedy = str(self._directory.path), "the same command goes on"
            raise TrainingInterrupted("INTERRUPTED", what, where, remedy) from error

    def _one_by_one(self, trials: Sequence[Trial]) -> None:
        """Train here, each trial with the display of a run alone."""
        tables = SharedTables()
        for trial in trials:
            path = self._directory.run_path(trial)
            try:
                with run_errors(trial.name, path, self._device):
                    train(trial.recipe, out=path, resume=True, quiet=self._quiet, tables=tables)
            except TrainingInterrupted:
                raise
            except GearError as error:
                if error.code == "DEVICE":  # nothing can go on
                    raise
                self._directory.note_failure(trial, error)

    def _together(self, trials: Sequence[Trial], file: SweepFile) -> None:
        display = _Display(self._trials, self._directory, quiet=self._quiet)

        def ended(trial: Trial, error: GearError | None) -> None:
            if error is not None:
                self._directory.note_failure(trial, error)
            display.end(trial, error)

        options: dict[str, Any] = {
            "folder": self._directory.path / "runs",
            "parallel": self._parallel,
            "open_data": self._open,
            "ended": ended,
            "moved": display.move,
        }
        with display:
            if self._on_gpu:
                from gear_offline.sweep.concurrent import train_concurrently

                train_concurrently(trials, device=self._device, exact=file.exact, **options)
            else:
                train_in_processes(trials, threads=file.threads, **options)

    def _conclude(self, file: SweepFile) -> SweepResult:
        result = read_sweep(self._directory.path)
        by_name = {one.trial.name: one for one in result.trials}
        ordered = tuple(by_name[trial.name] for trial in self._trials)
        for one in ordered:  # a kill may have come between a run's summary and its report
            if one.status == "complete" and not (one.path / "report.md").exists():
                report.write_report(one.path)
        file.table = result.table.to_json()
        self._directory.write(file)
        write_sweep_report(result)
        return result


def _with_share(trial: Trial, parallel: int, threads: int | None) -> Trial:
    """Return a trial whose recipe has its share of the machine, where it does not say."""
    recipe, changes = trial.recipe, dict[str, int]()
    if recipe.train.threads is None and threads is not None:
        changes["train.threads"] = threads
    if recipe.evaluate.episodes and recipe.evaluate.workers is None and parallel > 1:
        spare = usable_cores() - parallel * (threads or 0)
        changes["evaluate.workers"] = max(1, min(MOST_WORKERS, spare // parallel))
    return replace(trial, recipe=recipe.replace(changes)) if changes else trial


class _Display(Closing):
    """The progress of all trials together."""

    def __init__(self, trials: Sequence[Trial], directory: SweepDirectory, *, quiet: bool) -> None:
        wanted = sum(trial.recipe.train.steps for trial in trials)
        self._done = {trial.name: steps_done(directory.run_path(trial)) for trial in trials}
        self._trials, self._ended = len(trials), len(trials) - len(directory.open_trials(trials))
        self._progress = Progress(
            directory.path.name, total=wanted, done=sum(self._done.values()), quiet=quiet
        )
        self._progress.__enter__()

    def close(self) -> None:
        self._progress.close()

    def move(self, trial: Trial, steps: int) -> None:
        """Note where a trial stands; cheap enough for every few steps."""
        self._done[trial.name] = steps
        done = f"{self._ended} of {self._trials}"
        self._progress.update(sum(self._done.values()), runs=done)

    def end(self, trial: Trial, error: GearError | None) -> None:
        """Note that a trial has ended, and say how."""
        self._ended += 1
        how = "complete" if error is None else f"{error.code}: {error.message}"
        self._progress.say(f"{trial.name}: {how} ({self._ended} of {self._trials})")
        self.move(trial, trial.recipe.train.steps)
