"""What of a recipe can be checked without its data, beyond types and ranges: names and options.

Training asks the same before it makes any data.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gear_offline.config.problems import nearest
from gear_offline.config.recipe import Recipe, load_recipe
from gear_offline.config.sections import CollectSettings
from gear_offline.config.tasks import task_recipe
from gear_offline.core.environment_id import check_environment_id
from gear_offline.errors import InputError
from gear_offline.evaluation.environment_ids import unregistered


def validate_recipe(name_or_path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Check everything of a recipe that can be checked without its data, and return it.

    Beyond `load_recipe` this asks whether what it names exists: the selection strategy and its
    options, environments, the policy and quality of collected data, reference scores.

    Parameters
    ----------
    name_or_path, overrides
        As `load_recipe`.

    Raises
    ------
    InputError
        ``RECIPE_*`` and those of `check_recipe`.
    """
    recipe = load_recipe(name_or_path, overrides)
    check_recipe(recipe, where=str(name_or_path))
    return recipe


def check_recipe(recipe: Recipe, *, where: str = "") -> None:
    """Refuse names that nothing answers to.

    Raises
    ------
    InputError
        ``SELECTION``, ``REFERENCE_UNKNOWN``,
        ``ENVIRONMENT_UNKNOWN``, ``COLLECT_OPTION``, ``COLLECT_MIX``, ``RECIPE_VALUE``.
    """
    for name in recipe.data.tasks or {}:
        check_recipe(task_recipe(recipe, name), where=f"{where}: task {name}" if where else name)
    check_selection(recipe, where)
    if recipe.data.collect is not None:
        path = recipe.data.path
        _check_collect(recipe.data.collect, where, made=path is not None and Path(path).exists())
    settings = recipe.evaluate
    targets = settings.targets or ()
    if len(set(targets)) < len(targets):  # every target plays the same episodes
        raise InputError(
            "RECIPE_VALUE",
            f"evaluate.targets names a return twice, got {list(targets)}",
            where=where,
            remedy="name each return once; evaluate.episodes asks for more episodes of each",
        )
    if settings.environment is not None and settings.episodes > 0:
        _check_environment(settings.environment, "evaluate.environment", where)
    if settings.reference is not None:
        from gear_offline.dataset.scores import dataset_names, reference_scores

        if reference_scores(settings.reference) is None:
            guess = nearest(settings.reference, dataset_names())
            raise InputError(
                "REFERENCE_UNKNOWN",
                f"evaluate.reference must be a D4RL name, got {settings.reference!r}",
                where=where,
                remedy=f"did you mean {guess!r}?" if guess else "e.g. hopper-medium-v2, or null",
            )


def check_selection(recipe: Recipe, where: str) -> None:
    """Refuse a strategy that there is not, and options that are not its own (``SELECTION``)."""
    from gear_offline.sampling import parse_options

    try:
        parse_options(recipe.selection.strategy, recipe.selection.options)
    except InputError as error:
        raise InputError(
            error.code, f"selection: {error.what}", where=where, remedy=error.remedy
        ) from error


def _check_collect(settings: CollectSettings, where: str, *, made: bool) -> None:
    """Check who acts and what is recorded; `made` says that the data are there already."""
    from gear_offline.collect.request import requested_mix
    from gear_offline.collect.stable_baselines import LIBRARIES

    _check_environment(settings.environment, "data.collect.environment", where)
    policy = settings.policy
    library, colon, algorithm = policy.partition(":")
    known = ["random", "ars", *(f"{name}:ALGORITHM" for name in LIBRARIES)]
    trained = bool(colon) and library in LIBRARIES
    if trained and not (algorithm.isidentifier() and algorithm.isupper()):
        raise InputError(
            "RECIPE_VALUE",
            f"data.collect.policy must name an algorithm, got {policy!r}",
            where=where,
            remedy=f"write it like {library}:PPO",
        )
    if policy not in known[:2] and not trained and not made and not Path(policy).is_file():
        guess = nearest(policy, known[:2])
        raise InputError(
            "RECIPE_VALUE",
            f"data.collect.policy must be {', '.join(known)} or a policy file, got {policy!r}",
            where=where,
            remedy=f"did you mean {guess!r}?" if guess else "",
        )
    try:
        requested_mix(policy, settings.quality, settings.mix)
    except InputError as error:
        key = f"data.collect.{error.where or 'mix'}"
        raise InputError(
            error.code, f"{key}: {error.what}", where=where, remedy=error.remedy
        ) from error


def _check_environment(name: str, key: str, where: str) -> None:
    place = f"{where}: {key}" if where else key
    check_environment_id(name, where=place)
    problem = unregistered(name)
    if problem:
        raise InputError(
            "ENVIRONMENT_UNKNOWN",
            problem,
            where=place,
            remedy="use a registered id, or module:Name-v0 with the module that registers it",
        )
