"""Checks of a recipe that need no data, beyond types and ranges: names and options."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from gear_offline.batches.sampling import resolve_options
from gear_offline.batches.sampling.draws import GOAL_LAWS
from gear_offline.config.problems import nearest, no_data
from gear_offline.config.recipe import Recipe
from gear_offline.config.sections import CollectSettings, ModelSettings, OwnModelSettings
from gear_offline.core.address import check_address, is_remote, is_there, parse_address
from gear_offline.core.parts import Kind, check_part, find_part, is_part
from gear_offline.data.dataset.manifest import check_dataset
from gear_offline.data.dataset.scores import dataset_names, find_scores
from gear_offline.data.sources.reader import READERS
from gear_offline.errors import InputError, UnavailableError
from gear_offline.evaluation.collect.policies import quality_parts
from gear_offline.evaluation.environments import check_environment
from gear_offline.models.kinds import MODELS
from gear_offline.runs.callbacks import CALLBACKS

_HOME = "gear_offline.runs.trackers"
NAMED_TRACKERS = {
    "tensorboard": f"{_HOME}:TensorBoard",
    "csv": f"{_HOME}:CSV",
    "trackio": f"{_HOME}:Trackio",
    "mlflow": f"{_HOME}:MLflow",
    "wandb": f"{_HOME}:WandB",
}
TRACKERS = Kind(noun="tracker", group="trackers", option="train.trackers", own=NAMED_TRACKERS)


def check_recipe(recipe: Recipe, *, where: str = "") -> None:
    """Refuse names that nothing answers to (``RECIPE``, ``SELECTION``, ``ENVIRONMENT``)."""
    for name in recipe.data.tasks or {}:
        single = recipe.of_task(name)
        check_recipe(single, where=f"{where}: task {name}" if where else name)
    check_model(recipe.model)
    if recipe.loader.goals and recipe.loader.goals.kind:
        find_part(GOAL_LAWS, recipe.loader.goals.kind)
    check_selection(recipe, where)
    check_trackers(recipe.train.trackers)
    for name in recipe.train.callbacks:
        find_part(CALLBACKS, name)
    if recipe.data.collect is not None:
        _check_collect(recipe.data.collect, where)
    settings = recipe.evaluate
    if settings.environment is not None and settings.episodes > 0:
        check_environment(settings.environment, _at(where, "evaluate.environment"))
    if isinstance(settings.reference, tuple) and settings.reference[0] >= settings.reference[1]:
        problem = "evaluate.reference has no higher return, which is to count 100, behind the lower"
        raise InputError("RECIPE", problem, where, "write [LOWER, HIGHER]")
    if isinstance(settings.reference, str) and find_scores(settings.reference) is None:
        guess = nearest(settings.reference, dataset_names())
        problem = f"evaluate.reference must be a D4RL name, got {settings.reference!r}"
        remedy = f"did you mean {guess!r}?" if guess else "e.g. hopper-medium-v2, or null"
        raise InputError("RECIPE", problem, where=where, remedy=remedy)


def check_data(recipe: Recipe, *, is_of_run: bool = False) -> None:
    """Refuse data that are neither there nor can be made, as far as their places tell.

    The data of a run, with `is_of_run`, are not made again.
    """
    for data in (recipe.data.tasks or {}).values() or [recipe.data]:
        is_made = not is_of_run and (data.maker.source or data.maker.collect)
        if not (is_made or (data.path and is_there(data.path))):
            raise no_data(data, is_of_run=is_of_run)
        if data.path and (not is_made or is_remote(data.path) or Path(data.path).is_file()):
            check_dataset(data.path)
        elif is_made and not (data.path and is_there(data.path)):
            check_reader(data.maker.reader)
            if address := parse_address(data.maker.source):
                check_address(address, "SOURCE_READ")


def check_reader(name: str | None) -> None:
    """Refuse a reader that is not there, or that only a run names."""
    if name is not None:
        find_part(replace(READERS, option="data.reader", code="RECIPE"), name)


def check_model(model: ModelSettings) -> None:
    """Refuse options that a model of somebody else does not take."""
    if isinstance(model, OwnModelSettings):
        if is_part(model.kind):
            check_part(MODELS, model.kind)
        from gear_offline.models.base import typed_settings  # loads torch

        typed_settings(model)


def check_trackers(names: Iterable[str]) -> None:
    """Refuse trackers whose package is not here (``PACKAGE_MISSING``)."""
    for name in names:
        if name not in NAMED_TRACKERS:
            find_part(TRACKERS, name)
        elif find_spec(name) is None:
            problem, remedy = f"{name} is not installed", "pip install 'gear-offline[trackers]'"
            raise UnavailableError("PACKAGE_MISSING", problem, "train.trackers", remedy)


def check_selection(recipe: Recipe, where: str) -> None:
    """Refuse a strategy that does not exist, and options that are not its own (``SELECTION``)."""
    try:
        resolve_options(recipe.selection.strategy, recipe.selection.options)
    except InputError as error:
        problem = f"selection: {error.problem}"
        raise InputError(error.code, problem, where=where, remedy=error.remedy) from error


def _check_collect(settings: CollectSettings, where: str) -> None:
    check_environment(settings.environment, _at(where, "data.collect.environment"))
    try:
        quality_parts(settings.policy, settings.quality)
    except InputError as error:
        problem = f"data.collect.{error.where}: {error.problem}"
        raise InputError("RECIPE", problem, where=where, remedy=error.remedy) from error


def _at(where: str, option: str) -> str:
    return f"{where}: {option}" if where else option
