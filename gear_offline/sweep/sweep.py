"""Many runs as one: a directory with an ordinary run directory a point, and a table over seeds.

What a run of a sweep leaves behind is what `runs.trainer.train` would have left: the same
batches, the same random numbers, the same steps; but for dropout and rounding where runs are
stacked.  `gear_offline.sweep.modes` decides how the runs share the machine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from gear_offline.config.recipe import Recipe
from gear_offline.config.tasks import data_key
from gear_offline.core.device import resolve_device
from gear_offline.core.progress import say
from gear_offline.core.text import count_text, remedies_once
from gear_offline.errors import GearError, InputError
from gear_offline.evaluation.results import summary_text
from gear_offline.loaders.recipes import recipe_sampler
from gear_offline.runs.checks import check_recipe
from gear_offline.runs.errors import gpu_lost, in_words, is_gpu_lost
from gear_offline.runs.preparation import prepare_dataset, resolve
from gear_offline.runs.trainer import RESUMABLE, check_resumed, train
from gear_offline.runs.training_run import TrainingInterrupted
from gear_offline.sweep.directory import SweepDirectory, recorded_options
from gear_offline.sweep.display import SweepDisplay
from gear_offline.sweep.modes import Choice, Mode, choose
from gear_offline.sweep.points import SweepPoint, name_points
from gear_offline.sweep.results import RunResult, is_complete, read_result, steps_done
from gear_offline.tables.joint import TableData
from gear_offline.tables.shared import SharedTables
from gear_offline.training.stack import check_stackable

__all__ = ["RunResult", "default_sweep_path", "run_sweep"]

# of the driver for streams; its default of 8 makes further ones wait for each other
QUEUES = ("CUDA_DEVICE_MAX_CONNECTIONS", "32")

Ended = Callable[[SweepPoint, GearError | None], None]


def default_sweep_path(recipe: Recipe) -> Path:
    """Return ``runs/NAME-sweep`` under the current directory."""
    return Path("runs") / f"{recipe.name}-sweep"


def run_sweep(
    points: Sequence[Recipe],
    out: str | Path,
    *,
    names: Sequence[str] | None = None,
    mode: Mode = "auto",
    parallel: int | None = None,
    quiet: bool = False,
    report: bool = True,
    others: bool = False,
) -> list[RunResult]:
    """Train every point, each into a run directory of its own under ``OUT/runs``.

    Called again with the same points it goes on: runs that are complete stay as they are, the
    others continue from their newest checkpoints.  Called with more points it runs those too, and
    with some of the points these alone: the other runs stay as they are.

    Parameters
    ----------
    points
        One recipe a run; all for the same device.  See `gear_offline.sweep.points.grid`.
    out
        Directory of the sweep.
    names
        Of the run directories; by default what differs between the points, and the seed.
    mode
        ``"streams"``: in one process, their steps side by side on a GPU.  ``"stacked"``: in one
        process, their steps as one; dropout draws other numbers.  ``"processes"``: in
        processes that read one table.  ``"serial"``: one after another.  ``"auto"``: streams on a
        GPU, processes on a CPU with several cores.
    parallel
        Runs at a time; by default by mode.
    quiet
        Print nothing.
    report
        Write ``sweep.md`` and plots at the end.
    others
        Whether recipes may differ in anything from those of runs that `out` holds, as long as their
        names do.

    Returns
    -------
    list of RunResult
        In the order of `points`.  A run that fails ends alone, with ``status="failed"``.

    Raises
    ------
    UnavailableError
        ``DEVICE`` for streams without a GPU, ``UNAVAILABLE``.
    GearError
        ``GPU_LOST`` after an error of CUDA that ends all runs of this process.
    InputError
        ``SWEEP_POINTS``, ``SWEEP_EXISTS``, ``SWEEP_LOCKED``, ``SWEEP_DIRECTORY``, ``USAGE``,
        ``RUN_RECIPE`` for fewer steps than a run has done, and those of checking recipes and
        preparing data, before any run begins.
    TrainingInterrupted
        ``SWEEP_INTERRUPTED`` after Ctrl-C or SIGTERM; what the runs have done is saved.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError("USAGE", "a sweep runs in one process", remedy="start it without torchrun")
    whole = name_points(points, names, options=() if others else recorded_options(Path(out)))
    for point in whole:
        check_recipe(point.recipe, where=f"run {point.name}")
    sweep = Sweep(whole, Path(out), mode=mode, parallel=parallel, quiet=quiet, others=others)
    return sweep.complete(report=report)


class Sweep:
    """A sweep under way; use `run_sweep`."""

    def __init__(
        self,
        points: Sequence[SweepPoint],
        out: Path,
        *,
        mode: str,
        parallel: int | None,
        quiet: bool,
        others: bool = False,
    ) -> None:
        self._others = others
        self._points, self._out, self._quiet = points, out, quiet
        self._mode, self._parallel = mode, parallel
        self._datasets: dict[str, TableData] = {}
        self._device = self._one_device()
        if self._device.type == "cuda":
            os.environ.setdefault(*QUEUES)  # without effect where the GPU is in use already
        choose(points, self._device, mode=mode, parallel=parallel)  # refuses before data are made

    def _one_device(self) -> torch.device:
        names = {point.recipe.train.device for point in self._points}
        if len(names) > 1:
            raise InputError(
                "SWEEP_POINTS",
                f"the points train on different devices: {', '.join(sorted(names))}",
                remedy="give all the same train.device",
            )
        return resolve_device(names.pop())

    def complete(self, *, report: bool) -> list[RunResult]:
        """Run what is left to run, and report."""
        resolved = {}
        for point in self._points:  # whatever does not fit shows before the first step
            dataset = self._dataset(point)
            recipe, sizes = resolve(point.recipe, dataset, quiet=True)
            resolved[point.name] = recipe
            if self._mode == "stacked":
                learns = recipe_sampler(recipe, dataset).loss_sampler is not None
                check_stackable(recipe, sizes, learns=learns)
        with SweepDirectory(
            self._out, self._points, free=RESUMABLE, others=self._others
        ) as directory:
            place, mode = directory.run_path, self._mode
            if mode == "auto" and directory.document.get("mode") == "stacked":
                mode = "stacked"  # others would go on with other random numbers
            choice = choose(
                self._points,
                self._device,
                mode=mode,
                parallel=self._parallel,
                threads=directory.document.get("threads"),
            )
            open_ = [point for point in self._points if not is_complete(point, place(point))]
            for point in open_:
                check_resumed(place(point), resolved[point.name])
            if open_:
                directory.note(mode=choice.mode, parallel=choice.parallel, threads=choice.threads)
                self._announce(choice, len(open_))
                try:
                    self._run(directory, choice, open_)
                except TrainingInterrupted as error:
                    raise TrainingInterrupted(
                        "SWEEP_INTERRUPTED",
                        f"{error.what.split(' after step')[0]}, what the runs have done is saved",
                        where=str(self._out),
                        remedy="the same command goes on",
                    ) from error
                except Exception as error:
                    if isinstance(error, GearError) or not is_gpu_lost(self._device):
                        raise
                    raise gpu_lost(error, str(self._out)) from error
            return self._conclude(directory, report=report)

    def _dataset(self, point: SweepPoint) -> TableData:
        """Return the data of a point, opened and verified once for all."""
        key = data_key(point.recipe)
        if key not in self._datasets:
            self._datasets[key] = prepare_dataset(point.recipe, quiet=self._quiet)
        return self._datasets[key]

    def _announce(self, choice: Choice, left: int) -> None:
        done = len(self._points) - left
        before = f", {done} of them complete already" if done else ""
        at_once = f", {choice.parallel} at a time" if choice.parallel > 1 else ""
        threads = f", {count_text(choice.threads, 'thread')} each" if choice.threads else ""
        say(
            f"{count_text(len(self._points), 'run')}{before}, on {self._device}: {choice.mode}"
            f"{at_once}{threads} ({choice.reason}); sweep directory {self._out}",
            quiet=self._quiet,
        )

    def _run(self, directory: SweepDirectory, choice: Choice, points: list[SweepPoint]) -> None:
        place = directory.run_path
        wanted = {point.name: point.recipe.train.steps for point in self._points}
        serial = choice.mode == "serial"
        display = SweepDisplay(self._out.name, wanted, quiet=self._quiet, bar=not serial)

        errors: list[str] = []

        def ended(point: SweepPoint, error: GearError | None) -> None:
            told = None if error is None else f"{error.code}: {error.message}"
            directory.note_run(point.name, error=told)
            if told is None:
                display.end(point.name, _outcome(read_result(point, place(point))))
            else:
                errors.append(told)
                display.end(point.name, remedies_once(errors)[-1])

        left = {point.name for point in points}
        with display:
            display.begin(
                {name: steps for name, steps in wanted.items() if name not in left}
                | {point.name: steps_done(place(point)) for point in points},
                complete=wanted.keys() - left,
            )
            if serial:
                self._in_series(points, place, ended)
            elif choice.mode in ("streams", "stacked"):
                from gear_offline.sweep.stack import StackTurns
                from gear_offline.sweep.turns import Turns

                turns = (Turns if choice.mode == "streams" else StackTurns)(
                    self._device,
                    parallel=choice.parallel,
                    share=choice.recipe,
                    prepare=self._dataset,
                    place=place,
                    display=display,
                )
                turns.complete(points, ended)
            else:
                self._in_processes(points, choice, place, ended, display)

    def _in_series(
        self, points: list[SweepPoint], place: Callable[[SweepPoint], Path], ended: Ended
    ) -> None:
        tables = SharedTables()
        for point in points:
            path = place(point)
            try:
                with in_words(point.name, path, self._device):
                    train(
                        point.recipe,
                        out=path,
                        resume=path.exists(),
                        quiet=self._quiet,
                        tables=tables,
                    )
            except TrainingInterrupted:
                raise
            except GearError as error:
                ended(point, error)
            else:
                ended(point, None)

    def _in_processes(
        self,
        points: list[SweepPoint],
        choice: Choice,
        place: Callable[[SweepPoint], Path],
        ended: Ended,
        display: SweepDisplay,
    ) -> None:
        from gear_offline.sweep.processes import Processes, build_tables

        tables = build_tables(points, self._dataset)
        processes = Processes(
            parallel=choice.parallel,
            threads=choice.threads,
            share=choice.recipe,
            place=place,
            display=display,
        )
        processes.complete(points, ended, tables=tables)

    def _conclude(self, directory: SweepDirectory, *, report: bool) -> list[RunResult]:
        from gear_offline.sweep.summary import summarize

        errors = {row["name"]: row["error"] for row in directory.document["points"]}
        results = [
            read_result(point, directory.run_path(point), error=errors[point.name])
            for point in self._points
        ]
        directory.note_runs({r.name: {"status": r.status, "error": r.error} for r in results})
        directory.note(summary=summarize(self._points, results))
        if report:
            from gear_offline.runs.report import write_report
            from gear_offline.sweep.report import write_sweep_report

            for result in results:  # a kill may have come between the summary and its report
                if result.status == "complete" and not (result.path / "report.md").exists():
                    write_report(result.path)
            write_sweep_report(self._out)
        return results


def _outcome(result: RunResult) -> str:
    parts = ["complete"]
    if result.loss is not None:
        parts.append(f"loss {result.loss:.4g}")
    if result.evaluation_last is not None:
        parts.append(summary_text(result.evaluation_last)[0])
    return ", ".join(parts)
