"""The public door of sweeps: a recipe, settings and seeds in, a table out.

What can be told of a mistake without torch is told before torch is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gear_offline.config.arguments import check_arguments
from gear_offline.config.files import Overrides
from gear_offline.config.recipe import Recipe, load_recipe, recipe_option
from gear_offline.core.text import to_plain
from gear_offline.distributed import read_rank_and_size
from gear_offline.errors import InputError, given_path
from gear_offline.sweep.trials import SweepDirectory, Trial, make_trials, parse_options

if TYPE_CHECKING:
    from gear_offline.models.base import SequenceModel
    from gear_offline.sweep.report import SweepResult


@check_arguments(recipe_option)
def sweep(
    recipe: Recipe | str | os.PathLike[str],
    overrides: Overrides = (),
    *,
    seeds: str | int | Sequence[int] | None = None,
    out: str | os.PathLike[str] | None = None,
    parallel: int | None = None,
    ray: str | None = None,
    quiet: bool = False,
    model: type[SequenceModel] | str | None = None,
) -> SweepResult:
    """Train a recipe with several settings and seeds, and compare them.

    Called again it goes on: complete trials stay as they are, the others continue from their
    newest checkpoints.  Further values and seeds of the same options are trained as well; with
    fewer the table is of these alone.

    Parameters
    ----------
    recipe
        A recipe, or what `gear_offline.load_recipe` takes.
    overrides
        Dotted options, each with its value or a list of values: ``{"model.layers": [3, 4]}``, or
        as the command line takes them: ``["model.layers=3,4"]``.  Every combination is a trial.
        A list that `gear_offline.train` takes, as of ``evaluate.targets``, is one value.
    seeds
        A number of seeds from 0 on, or a list, also ``"3,5,8..10"``; by default the recipe's own.
    out
        Directory of the sweep; by default ``runs/NAME-sweep``.
    parallel
        Trials at a time: on each GPU in a stack, if their shapes are equal, by default 16, and with
        1 each gives the bits of a run alone; one a core on a CPU; with Ray one a GPU or core.
    ray
        Address of a Ray cluster, such as ``"auto"``: each trial is a task there with its share of
        the CPUs and GPUs.  All nodes have to see this directory and `out`.
    quiet
        Print nothing.
    model
        In place of ``model.kind``: a class derived from `gear_offline.SequenceModel`, or its name.

    Returns
    -------
    SweepResult
        How each trial stands, and the table over seeds.  A trial that fails ends alone.

    Raises
    ------
    InputError
        ``USAGE``, ``RECIPE``, ``RUN_MISMATCH`` for a run of the directory with another recipe,
        ``RUN_LOCKED``, and those of preparing the data, before any trial begins.
    UnavailableError
        With `ray`: ``PACKAGE_MISSING``, ``UNAVAILABLE``, and ``SYSTEM`` for a node without `out`.
    TrainingInterrupted
        ``INTERRUPTED`` after Ctrl-C or SIGTERM; what the trials have done is saved.
    """
    values = option_values(recipe, overrides)
    if model is not None:
        if "model.kind" in values:
            raise InputError("USAGE", "model.kind is given twice", remedy="keep one of them")
        values["model.kind"] = [model]
    if out is None:
        names = values.get("name", [])
        name = load_recipe(recipe, {"name": names[0]} if len(names) == 1 else ()).name
        out = Path("runs") / f"{name}-sweep"
    folder = given_path(out, "OUTPUT_WRITE", where="out")
    directory = SweepDirectory(folder)
    naming = directory.read().trials[0].settings if directory.is_begun else ()
    trials = make_trials(recipe, values, seeds, naming=tuple(naming))
    return run_trials(trials, folder, parallel=parallel, ray=ray, quiet=quiet)


def option_values(
    recipe: Recipe | str | os.PathLike[str], options: Overrides
) -> dict[str, list[Any]]:
    """Return the values of each option, as texts ``key=a,b,c`` or in a mapping.

    There a value that `gear_offline.train` takes is one value, and a list of such are several.
    """
    if not isinstance(options, Mapping):
        return parse_options([options] if isinstance(options, str) else options)
    return {
        key: values if isinstance(values, list) and not _is_one(recipe, key, values) else [values]
        for key, values in ((key, to_plain(value)) for key, value in options.items())
    }


def _is_one(recipe: Recipe | str | os.PathLike[str], key: str, value: list[Any]) -> bool:
    """Return true if a list is itself the value of an option, as of ``evaluate.targets``."""
    from gear_offline.runs.checks import check_selection

    try:
        check_selection(load_recipe(recipe, {key: value}), "")
    except InputError:
        return False
    return True


def run_trials(
    trials: Sequence[Trial],
    out: Path,
    *,
    parallel: int | None = None,
    ray: str | None = None,
    quiet: bool = False,
) -> SweepResult:
    """Train `trials` into the sweep directory `out`, as `sweep` does."""
    if read_rank_and_size()[1] > 1:
        problem, remedy = "a sweep runs in one process", "start it without torchrun"
        raise InputError("USAGE", problem, remedy=remedy)
    _check_trials(trials, parallel)
    SweepDirectory(out).check()
    from gear_offline.sweep.run import train_trials  # loads torch

    return train_trials(trials, out, parallel=parallel, ray=ray, quiet=quiet)


def _check_trials(trials: Sequence[Trial], parallel: int | None) -> None:
    names = [trial.name for trial in trials]
    problem, remedy = "", "give at least one value and seed, each once"
    if not trials:
        problem = "no trials"
    elif len(set(names)) < len(names):
        problem = f"two trials are called {next(n for n in names if names.count(n) > 1)}"
    elif len(devices := {trial.recipe.train.device for trial in trials}) > 1:
        problem, remedy = f"trials on {' and '.join(sorted(devices))}", "give all one train.device"
    elif parallel is not None and parallel < 1:
        problem, remedy = f"{parallel} trials at a time", "give a number from 1"
    if problem:
        raise InputError("USAGE", problem, remedy=remedy)
    from gear_offline.runs.checks import check_data, check_recipe  # slow to load

    for trial in trials:
        check_recipe(trial.recipe, where=f"run {trial.name}")
    for recipe in {trial.recipe.data_key: trial.recipe for trial in trials}.values():
        check_data(recipe)
