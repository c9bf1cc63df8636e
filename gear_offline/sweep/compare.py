"""Runs side by side: a table as a sweep's, and their curves in one picture.

Runs are grouped by the options that their recipes differ in, but the seed.  Labels come afterwards:
these options as a sweep names them, or the names of the runs where that is too long.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gear_offline.artifacts.json_lines import last_record
from gear_offline.config.arguments import check_arguments
from gear_offline.config.files import flat
from gear_offline.config.recipe import Recipe
from gear_offline.config.sections import OptimizerSettings
from gear_offline.config.strict_yaml import dump_yaml
from gear_offline.core.files import check_new_file, write_file, writing
from gear_offline.core.parts import is_same
from gear_offline.core.progress import Printed, Terminal
from gear_offline.core.text import Document
from gear_offline.errors import InputError, given_path
from gear_offline.runs.resume import RESUMABLE
from gear_offline.runs.run import Run, open_run
from gear_offline.sweep.report import plot_asked, plot_curves
from gear_offline.sweep.results import SeedTable, TrialResult, make_table, read_result
from gear_offline.sweep.trials import SweepDirectory, Trial, settings_labels, trial_name

LONGEST_LABEL = 80  # characters; beyond that a directory's name tells more
NO_SETTINGS = {"name", "seed", *RESUMABLE} - {"train.steps"}  # none of them changes a step


@dataclass(frozen=True, kw_only=True, repr=False)
class RunComparison(Printed, Document):
    """The results of runs, side by side; prints as a table."""

    table: SeedTable  # a row a setting, over its seeds, the best one first
    runs: dict[str, str]  # path of each run, and the setting that it is of
    environments: dict[str, tuple[str, ...]]  # names of runs by where they were evaluated
    plot: Path | None  # the picture of the curves or the page, if one was asked for

    def print(self, *, console: Terminal | None = None) -> None:
        """Print a row a setting, and which runs' returns may be compared."""
        console = console or Terminal()
        self.table.print(console)
        if len(self.environments) > 1:
            console.print("Returns of one environment alone are comparable; they are left out:")
            for environment, names in self.environments.items():
                console.print(f"  {environment}: {', '.join(names)}")


@check_arguments()
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
        File for the curves, ``.png`` or ``.svg``; or ``.html``, a page with everything: table,
        curves, asked and achieved returns, and the options that differ.
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
    listed = [runs] if isinstance(runs, (str, os.PathLike)) else runs
    paths = {
        os.path.realpath(path): path
        for run in listed
        for path in _runs_in(given_path(run, "RUN_NOT_FOUND", where="runs"))
    }
    opened = [open_run(path) for path in paths.values()]
    if len(paths) < 2:
        remedy = "name two different runs or more, or a sweep; `gear-offline runs ls` lists them"
        raise InputError("USAGE", "there is nothing to compare", remedy=remedy)
    plot = None if out is None else given_path(out, "OUTPUT_WRITE", where="out")
    if plot is not None and plot.suffix not in (".html", ".png", ".svg"):
        remedy = "let its name end with .html, .png or .svg"
        raise InputError("USAGE", "a page or picture of this format is not made", str(plot), remedy)
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
    environments, ids = dict[str, tuple[str, ...]](), dict[str, None]()
    for result in results:
        if result.last is not None:
            names = [task.environment for task in result.last.tasks]
            names = [next((each for each in ids if is_same(each, name)), name) for name in names]
            ids |= dict.fromkeys(names)
            label = ", ".join(names)
            environments[label] = (*environments.get(label, ()), result.trial.name)
    if len(environments) > 1:
        results = _without_returns(results)
    table = make_table(results)
    if plot is not None:
        with writing(plot):
            if plot.suffix == ".html":
                _write_page(plot, results, table, environments)
            else:
                plot_curves(plot, results, table)
    labels = {str(result.path): result.trial.label for result in results}
    return RunComparison(table=table, runs=labels, environments=environments, plot=plot)


def _write_page(
    path: Path,
    results: Sequence[TrialResult],
    table: SeedTable,
    environments: Mapping[str, Sequence[str]],
) -> None:
    from gear_offline.runs.page import make_page
    from gear_offline.runs.report import render_page  # matplotlib takes half a second

    with tempfile.TemporaryDirectory(prefix="gear-") as name:
        folder = Path(name)
        plot_curves(folder / "curves.png", results, table)
        text = render_page(
            Path(__file__).with_name("compare.md.j2"),
            results=results,
            table=table,
            environments=environments,
            options=dict.fromkeys(option for row in table.rows for option in row.settings),
            shows_asked=plot_asked(folder / "asked.png", table, {}) is not None,
        )
        write_file(path, make_page(text, folder).encode())


def _runs_in(path: Path) -> list[Path]:
    """Return the runs of a sweep's trials that have begun; another path is a run's."""
    if not SweepDirectory(path).is_begun:
        return [path]
    return [run for run in sorted(path.glob("runs/*")) if last_record(run / "metrics.jsonl")]


def _without_returns(results: Sequence[TrialResult]) -> list[TrialResult]:
    """Leave normalized scores, where all have them, and losses."""
    curves = [result.curves for result in results]
    scored = all(curve["normalized_score"].keys() >= curve["return"].keys() for curve in curves)
    metrics = {"normalized_score", "loss"} if scored else {"loss"}
    return [
        replace(result, curves={name: curve[name] if name in metrics else {} for name in curve})
        for result, curve in zip(results, curves, strict=True)
    ]


def _trials(runs: Sequence[Run]) -> list[Trial]:
    """Return each run as a trial: grouped by its settings first, labelled afterwards.

    Where all runs have one setting, each is a row; those of one setting and seed are two settings.
    """
    recipes = [run.recipe for run in runs]
    seeds, options = [recipe.seed for recipe in recipes], _options(recipes)
    auto = OptimizerSettings()  # what it comes to is no setting of its own
    if all(auto.warmup(r.train.steps) == r.optimizer.warmup_steps for r in recipes):
        options = [row | {"optimizer.warmup_steps": "auto"} for row in options]
    keys = dict.fromkeys(key for row in options for key in row)
    differing = [key for key in keys if any(row.get(key) != options[0].get(key) for row in options)]
    settings = [{key: row[key] for key in differing if key in row} for row in options]
    groups: list[Any] = [dump_yaml(row) for row in settings]
    stems = [
        run.name.removesuffix(f"s{seed}").rstrip("-,") or run.path.resolve().parents[1].name
        for run, seed in zip(runs, seeds, strict=True)
    ]
    if not differing:
        groups = list(range(len(runs)))
    elif len(set(zip(groups, seeds, strict=True))) < len(runs):
        groups = list(zip(groups, stems, strict=True))
    pairs = zip(settings_labels(settings), seeds, strict=True)
    naming = zip(runs, stems, groups, strict=True)
    namings = (
        [label or trial_name("", seed) for label, seed in pairs],
        [stem if groups.count(group) > 1 else run.name for run, stem, group in naming],
        [str(run.path) for run in runs],
    )
    for labels in namings:
        label_of = dict(reversed([*zip(groups, labels, strict=True)]))  # that of its first run
        if len({*label_of.values()}) == len(label_of) and max(map(len, labels)) <= LONGEST_LABEL:
            break
    return [
        Trial(name=run.name, label=label_of[group], recipe=recipe, settings=setting)
        for run, group, recipe, setting in zip(runs, groups, recipes, settings, strict=True)
    ]


def _options(recipes: Sequence[Recipe]) -> list[dict[str, Any]]:
    """Return the dotted options that make each recipe's setting, where one part has one name."""
    names, options = dict[tuple[str, str], str](), []
    for recipe in recipes:
        part_names = dict[str, str]()
        for name, digest in recipe.parts.items():
            key, used = (name.rpartition(":")[2], digest or name), names.values()
            names.setdefault(key, f"{name} {digest[-8:]}" if name in used else name)
            part_names[name] = names[key]
        values = flat(_replace_names(recipe.to_dict() | {"parts": {}}, part_names))
        options.append({key: values[key] for key in values if key not in NO_SETTINGS})
    return options


def _replace_names(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _replace_names(item, names) for key, item in value.items()}
    if isinstance(value, list):
        return [_replace_names(item, names) for item in value]
    return names.get(value, value) if isinstance(value, str) else value
