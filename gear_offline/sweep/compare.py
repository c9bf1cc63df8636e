"""Runs side by side: a table as a sweep's, and their curves in one picture.

Settings are named by the options that the runs' recipes differ in, as a sweep names them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gear_offline.config.files import flat
from gear_offline.config.sections import OptimizerSettings
from gear_offline.core.files import check_new_file, writing
from gear_offline.core.text import Document
from gear_offline.errors import InputError, given_path
from gear_offline.progress import Printed, Terminal
from gear_offline.runs.run import Run, open_run
from gear_offline.sweep.report import plot_curves
from gear_offline.sweep.results import SeedTable, TrialResult, make_table, read_result
from gear_offline.sweep.trials import SweepDirectory, Trial, settings_label, trial_name
from gear_offline.training.json_lines import last_record

LONGEST_LABEL = 80  # characters; beyond that the directory's name tells more
NO_SETTINGS = ("name", "description", "seed", "train.threads")


@dataclass(frozen=True, kw_only=True, repr=False)
class RunComparison(Printed, Document):
    """The results of runs, side by side; prints as a table."""

    table: SeedTable  # a row a setting, over its seeds, the best one first
    runs: dict[str, str]  # path of each run, and the setting that it is of
    environments: dict[str, tuple[str, ...]]  # names of runs by where they were evaluated
    plot: Path | None  # the picture of the curves, if one was asked for

    def print(self, *, console: Terminal | None = None) -> None:
        """Print a row a setting, and which runs' returns may be compared."""
        console = console or Terminal()
        self.table.print(console)
        if len(self.environments) > 1:
            console.print("Returns of one environment alone are comparable; they are left out:")
            for environment, names in self.environments.items():
                console.print(f"  {environment}: {', '.join(names)}")


def compare_runs(
    runs: Sequence[Run | str | os.PathLike[str]],
    *,
    out: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
) -> RunComparison:
    """Put runs side by side, complete or not: returns, scores and losses, and their curves.

    Runs whose recipes differ in nothing but the seed are one setting, with mean and interval; if
    all are, each run is a row.  Of runs in different environments, whose returns have different
    units, the normalized scores are compared, or the losses where one has no score.

    Parameters
    ----------
    runs
        Two run directories or more; a sweep directory stands for the runs of its trials.
    out
        File for the curves, ``.png`` or ``.svg``.
    overwrite
        Replace that file.

    Raises
    ------
    InputError
        ``RUN_NOT_FOUND``; ``USAGE`` for fewer than two runs, one that has logged nothing yet, or a
        picture of another format; ``OUTPUT_EXISTS``, ``OUTPUT_WRITE``.

    Examples
    --------
    `runs/tiny` is what the example of `gear_offline.train` makes.

    >>> import gear_offline as go
    >>> wide = {"model.hidden_size": 64, "train.steps": 8}
    >>> run = go.train("runs/tiny", wide, out="runs/wide", quiet=True)
    >>> comparison = go.compare_runs(["runs/tiny", run], out="curves.svg")
    >>> sorted(comparison.runs.values())
    ['hidden_size=16, steps=4', 'hidden_size=64, steps=8']
    """
    named = [runs] if isinstance(runs, (str, os.PathLike)) else runs
    paths = {
        os.path.realpath(path): path
        for run in named
        for path in _runs_in(given_path(run, "RUN_NOT_FOUND", where="runs"))
    }
    if len(paths) < 2:
        remedy = "name two different runs or more, or a sweep; `gear-offline runs ls` lists them"
        raise InputError("USAGE", "there is nothing to compare", remedy=remedy)
    plot = None if out is None else given_path(out, "OUTPUT_WRITE", where="out")
    if plot is not None and plot.suffix not in (".png", ".svg"):
        remedy = "let its name end with .png or .svg"
        raise InputError("USAGE", "a picture of this format is not made", str(plot), remedy)
    opened = [open_run(path) for path in paths.values()]
    if plot is not None:
        check_new_file(plot, overwrite=overwrite)
    results = [
        replace(read_result(trial, run.path), status="complete")  # as far as it is
        for run, trial in zip(opened, _trials(opened), strict=True)
    ]
    for result in results:
        if not any(result.curves.values()):
            remedy = "wait for its first line of metrics, or leave it out"
            raise InputError("USAGE", "the run has logged nothing yet", str(result.path), remedy)
    environments = dict[str, tuple[str, ...]]()
    for result in results:
        if result.last is not None:
            place = ", ".join(task.environment for task in result.last.tasks)
            environments[place] = (*environments.get(place, ()), result.trial.name)
    if len(environments) > 1:
        results = _without_returns(results)
    table = make_table(results)
    if plot is not None:
        with writing(plot):
            plot_curves(plot, results, table)
    labels = {str(result.path): result.trial.label for result in results}
    return RunComparison(table=table, runs=labels, environments=environments, plot=plot)


def _runs_in(path: Path) -> list[Path]:
    """Return the runs of a sweep's trials that have begun; another path is a run's."""
    if not SweepDirectory(path).is_begun:
        return [path]
    return [run for run in sorted(path.glob("runs/*")) if last_record(run / "metrics.jsonl")]


def _without_returns(results: Sequence[TrialResult]) -> list[TrialResult]:
    """Leave normalized scores, where all have them, and losses."""
    curves = [result.curves for result in results]
    scored = all(own["normalized_score"].keys() >= own["return"].keys() for own in curves)
    kept = {"normalized_score", "loss"} if scored else {"loss"}
    return [
        replace(result, curves={name: own[name] if name in kept else {} for name in own})
        for result, own in zip(results, curves, strict=True)
    ]


def _trials(runs: Sequence[Run]) -> list[Trial]:
    """Return each run as a trial, set apart by the options in which its recipe differs."""
    recipes = [run.recipe for run in runs]
    seeds, options = [r.seed for r in recipes], [flat(r.to_dict()) for r in recipes]
    auto = OptimizerSettings()  # what it comes to is no setting of its own
    if all(auto.warmup(r.train.steps) == r.optimizer.warmup_steps for r in recipes):
        options = [own | {"optimizer.warmup_steps": "auto"} for own in options]
    keys = dict.fromkeys(key for own in options for key in own if key not in NO_SETTINGS)
    differing = [key for key in keys if any(own.get(key) != options[0].get(key) for own in options)]
    settings = [{key: own[key] for key in differing if key in own} for own in options]
    pairs = zip(settings, seeds, strict=True)
    labels = [settings_label(own) or trial_name("", seed) for own, seed in pairs]
    is_told_apart = len(set(zip(labels, seeds, strict=True))) == len(runs)
    if not is_told_apart or max(map(len, labels)) > LONGEST_LABEL:
        names = [run.name for run in runs]
        labels = names if len(set(names)) == len(runs) else [str(run.path) for run in runs]
    return [
        Trial(name=run.name, label=label, recipe=recipe, settings=setting)
        for run, label, recipe, setting in zip(runs, labels, recipes, settings, strict=True)
    ]
