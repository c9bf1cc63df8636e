"""Resolve a recipe: put numbers for what it leaves to the run, or to its data.

A recipe may leave to the data what belongs to the data: the environment, the returns to ask for,
the longest episode.  `resolve` fills these in, so that a run directory speaks for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isclose, isfinite
from typing import Any

import numpy as np
import torch

from gear_offline.artifacts.trained import TrainedModel, find_trained
from gear_offline.batches.tables.joint import JointDataset, TableData
from gear_offline.batches.tables.table import discounted_returns
from gear_offline.config.files import MAKERS
from gear_offline.config.recipe import Recipe, whole_paths
from gear_offline.core.parts import is_same
from gear_offline.core.system import versions
from gear_offline.core.text import say, short
from gear_offline.data.dataset.dataset import Dataset
from gear_offline.data.dataset.schema import ADVANTAGES
from gear_offline.data.dataset.scores import find_scores
from gear_offline.data.dataset.statistics import distribution
from gear_offline.distributed.world import resolve_device
from gear_offline.errors import InputError, UnavailableError
from gear_offline.evaluation.collect.record import check_recorded
from gear_offline.evaluation.environments import (
    EnvironmentFacts,
    Options,
    probe,
    say_left_out,
    say_version,
)
from gear_offline.evaluation.play import check_goals, check_sizes
from gear_offline.models.base import ModelSizes, ModelTask, settings_dump, typed_settings
from gear_offline.models.decision_transformer import beyond_tanh
from gear_offline.runs.data import with_fallback
from gear_offline.runs.fit import (
    check_condition,
    check_fit,
    check_memory,
    say_chunks,
    say_clipped,
    say_returns_scale,
    say_what_differs,
)
from gear_offline.runs.resume import Past
from gear_offline.training.cost import cpu_threads, is_compiled
from gear_offline.training.model import data_sizes, resolve_precision

HIGH = 0.9  # quantile of the data's advantages that is asked for by default


def settle(recipe: Recipe, device: torch.device, past: Past | None = None) -> Recipe:
    """Return a recipe that leaves no number to the moment at which its run starts or goes on.

    What it leaves open is as it was when the run of its `past` began.
    """
    recipe = past.fill(recipe) if past else recipe
    train = recipe.train
    changes: dict[str, Any] = {
        "optimizer.warmup_steps": recipe.optimizer.warmup(train.steps),
        "train.compile": "on" if is_compiled(train) else "off",
        "train.threads": train.threads or cpu_threads(recipe),
    }
    if train.precision == "auto":
        half, _ = resolve_precision("auto", device)
        changes["train.precision"] = "fp32" if half is None else "bf16"
    options = recipe.settle(changes).to_dict()
    # the run may go on from another directory; data that are named so are no others
    whole_paths(options["data"])
    return Recipe.read(options, where=recipe.name)


def find_start(recipe: Recipe) -> TrainedModel | None:
    """Read the model that ``train.init`` names, if it names one."""
    return None if recipe.train.init is None else find_trained(recipe.train.init)


def resolve(
    recipe: Recipe,
    dataset: TableData,
    start: TrainedModel | None = None,
    *,
    quiet: bool = False,
) -> tuple[Recipe, ModelSizes]:
    """Fill in what the recipe leaves to the data, and check that recipe and data fit.

    `start` is what `find_start` reads.  Doing it again to the result changes nothing.
    """
    assert (start is None) == (recipe.train.init is None), "a start is what train.init names"
    settings = settings_dump(typed_settings(recipe.model))  # with the defaults of its own options
    options = settings | recipe.model.model_dump()
    recipe = recipe.settle({"model": options})
    if isinstance(dataset, JointDataset):
        resolved, sizes = _resolve_tasks(recipe, dataset, quiet=quiet)
    else:
        resolved, sizes = _resolve_one(recipe, dataset, start, quiet=quiet)
    check_memory(resolved, sizes)
    return resolved, sizes


def _resolve_tasks(
    recipe: Recipe, dataset: JointDataset, *, quiet: bool
) -> tuple[Recipe, ModelSizes]:
    options, normalized = recipe.to_dict(), recipe.loader.normalize_states
    singles, sizes, tasks = list[Recipe](), list[ModelSizes](), list[ModelTask]()
    for task in dataset.tasks:
        single, size = _resolve_one(recipe.of_task(task.name), task.dataset, None, quiet=quiet)
        evaluate = single.evaluate
        options["data"]["tasks"][task.name] |= {
            **single.data.model_dump(mode="json", include={*MAKERS, "fallback", "admissions"}),
            "returns_scale": single.loader.returns_scale,
            "environment": evaluate.environment,
            "environment_options": evaluate.environment_options,
            "reference": evaluate.reference,
            "targets": None if evaluate.targets is None else list(evaluate.targets),
        }
        singles.append(single)
        sizes.append(size)
        returns = task.dataset.manifest.returns
        is_played = task.dataset.reward_edits == ()
        tasks.append(
            ModelTask.of(
                task.dataset,
                normalize_states=normalized,
                name=task.name,
                state_dim=size.state_dim,
                action_dim=size.action_dim,
                returns_scale=task.returns_scale,
                return_worst=returns.min if is_played else 0.0,  # edited rewards have no score:
                return_best=returns.max if is_played else 0.0,  # what is played earns others
            )
        )
    joint = ModelSizes(
        state_dim=max(size.state_dim for size in sizes),
        action_dim=max(size.action_dim for size in sizes),
        discrete=any(size.discrete for size in sizes),
        columns=sizes[0].columns if sizes[0].columns[0].frames else (),
        tasks=tuple(tasks),
    )
    options["model"]["max_timestep"] = max(single.model.max_timestep or 0 for single in singles)
    bounded = all(single.model.action_tanh for single in singles)
    options["model"]["action_tanh"] = bounded and not joint.discrete
    return Recipe.read(options), joint


def _resolve_one(
    recipe: Recipe, dataset: Dataset, start: TrainedModel | None, *, quiet: bool
) -> tuple[Recipe, ModelSizes]:
    recipe = with_fallback(recipe, dataset)
    check_condition(recipe, dataset)
    if recipe.data.actors is not None:
        check_recorded(dataset)
    sizes, undivided = data_sizes(dataset, recipe.loader.observations), dataset.whole or dataset
    environment = recipe.evaluate.environment or dataset.environment_id
    is_own = is_same(environment, dataset.environment_id)
    longest, plays = int(undivided.episodes.lengths.max()), recipe.evaluate.episodes > 0
    if plays:
        resolve_device(recipe.evaluate.device, where="evaluate.device")
    options = recipe.evaluate.environment_options
    if options is None and (is_own or dataset.environment_id is None):
        options = dataset.environment_options or None
    facts, sizes = _probe_environment(recipe, dataset, options, sizes, quiet=quiet)
    if facts is not None and plays:
        say_clipped(dataset, facts, quiet=quiet)
    if facts is not None:
        longest = max(longest, facts.step_limit)
    elif plays:
        environment = None
    scores, reference = dataset.reference_scores, None
    if scores is not None and (is_own or environment is None):
        is_named = find_scores(scores.name) is not None
        reference = scores.name if is_named else [scores.minimum, scores.maximum]
    changes: dict[str, Any] = {
        "data.admissions": dataset.admissions or None,
        "evaluate.environment": environment,
        "evaluate.environment_options": options,
        "evaluate.reference": recipe.evaluate.reference or reference,
        "evaluate.targets": _targets(recipe, dataset, facts if plays else None),
    }
    if facts is not None and not quiet:
        say_what_differs(recipe, dataset, environment)
    say_returns_scale(recipe, dataset, quiet=quiet)
    say_chunks(recipe, quiet=quiet)
    if recipe.loader.condition == "advantage":
        moments, targets = dataset.statistics[ADVANTAGES], changes["evaluate.targets"]
        changes["loader.returns_scale"] = scale = float(moments.std.max())
        text = f"advantages are divided by their deviation, {short(scale)}; asked for is "
        text += ", ".join(map(short, targets))
        if recipe.evaluate.targets is None:
            text += ", their 90 % quantile"
        elif max(targets) > (highest := float(moments.max.max())):
            text += f", above their highest, {short(highest)}: evaluate.targets=null asks for less"
        say(text, quiet=quiet)
    changes |= _model_options(recipe, undivided, start, longest, discrete=sizes.discrete)
    resolved = recipe.settle(changes)
    check_fit(resolved, undivided, sizes)  # what is held out passes through the model, too
    return resolved, sizes


def _targets(
    recipe: Recipe, dataset: Dataset, facts: EnvironmentFacts | None
) -> Sequence[float] | None:
    """Return the targets of evaluations: those of the recipe, else tasks with goals, or returns.

    `facts` are None where nothing is played.
    """
    targets, goals = recipe.evaluate.targets, recipe.loader.goals is not None
    if goals and facts is None:
        return targets
    if goals and facts is not None:
        if targets:
            check_goals(facts, targets)
        elif targets is None and not facts.tasks:
            problem, remedy = "it has no tasks with goals (task_infos)", "use evaluate.episodes=0"
            raise InputError("ENVIRONMENT", problem, facts.environment_id, remedy)
        return list(range(1, facts.tasks + 1)) if targets is None else targets
    if targets is not None:
        return targets
    if recipe.loader.condition == "advantage":
        advantages = dataset.column(ADVANTAGES).astype(np.float64)
        return [float(f"{np.quantile(advantages[np.isfinite(advantages)], HIGH):.3g}")]
    if "rewards" not in dataset.spec:
        return [0.0]  # the model does without returns: one play of it
    returns = dataset.manifest.returns
    if recipe.loader.gamma < 1.0:  # as training shows them
        returns = distribution(discounted_returns(dataset, recipe.loader.gamma))
    alike = isclose(returns.max, returns.mean, rel_tol=1e-9)  # of one and the same return
    alike = alike or recipe.model.asks_returns is False
    values = [returns.max] if alike else [returns.max, returns.mean]
    return values if isfinite(returns.mean) else None  # `check_fit` tells of rewards that are not


def _model_options(
    recipe: Recipe,
    dataset: Dataset,
    start: TrainedModel | None,
    longest: int,
    *,
    discrete: bool,
) -> dict[str, Any]:
    """Return options of loader and model that follow from the data, or from ``train.init``."""
    changes: dict[str, Any] = {}
    if start is not None:
        if start.window.condition != recipe.loader.condition:
            problem = f"train.init was trained on condition {start.window.condition}"
            remedy = f"use loader.condition={start.window.condition}"
            raise InputError("MODEL", problem, str(recipe.train.init), remedy)
        changes["loader.returns_scale"] = start.window.returns_scale
        normalized = any(column.state_mean for column in start.window.columns)
        changes["loader.normalize_states"] = normalized
    if recipe.model.max_timestep is None:
        timesteps = max(longest, recipe.loader.context_length)
        changes["model.max_timestep"] = start.model.facts.max_timestep if start else timesteps
    if getattr(recipe.model, "reward_scale", None) == "auto":
        returns = dataset.manifest.returns
        spread = (returns.max - returns.min) / 1000
        changes["model.reward_scale"] = spread if isfinite(spread) and spread > 0 else 1.0
    actions = (dataset.whole or dataset).statistics["actions"]
    tanh = getattr(recipe.model, "action_tanh", False)
    if tanh and discrete:
        changes["model.action_tanh"] = False  # logits are not bounded
    elif tanh == "auto":
        fits = not beyond_tanh(actions.min, actions.max)
        changes["model.action_tanh"] = start.model.bounded if start else fits
    return changes


def _probe_environment(
    recipe: Recipe, dataset: Dataset, options: Options | None, sizes: ModelSizes, *, quiet: bool
) -> tuple[EnvironmentFacts | None, ModelSizes]:
    """Return facts of the environment to evaluate in, and the sizes, which it may complete.

    Without an environment the facts are None, and a line says so.  One that only the dataset names
    is made if that imports nothing, and may be missing here.  So may any where nothing is played.
    """
    explicit, plays = recipe.evaluate.environment, recipe.evaluate.episodes > 0
    name, facts, full_sizes = explicit or dataset.environment_id, None, sizes
    without = "no evaluation" if plays else "the data alone tell the model's sizes"
    if name is None:
        names = f"neither the recipe nor {dataset.name} names an environment"
        say(f"{without}: {names}; evaluate.environment=ID would", quiet=quiet or not plays)
        return None, sizes
    try:
        facts = probe(name, options)  # refuses to import a module that only a file names
        if sizes.discrete and facts.discrete:  # some actions may never occur in the data
            full_sizes = sizes.model_copy(
                update={"action_dim": max(sizes.action_dim, facts.action_size)}
            )
        observed, otherwise = recipe.loader.observations, ", or set evaluate.episodes=0"
        check_sizes(facts, full_sizes, observed, whose="the data", otherwise=otherwise, quiet=quiet)
    except (InputError, UnavailableError) as error:
        if plays and (explicit or facts):
            raise
        say(f"{without}: {error if plays else error.problem}", quiet=quiet)
        return None, sizes
    if not plays:
        return facts, full_sizes
    say_version(name, quiet=quiet)
    if dataset.environment_id and not is_same(name, dataset.environment_id):
        say(f"evaluation in {name}; the data are of {dataset.environment_id}", quiet=quiet)
    elif options and recipe.evaluate.environment_options is None:
        how = ", ".join(f"{key}={value}" for key, value in options.items())
        say(f"evaluation in {name} as the data say: {how}", quiet=quiet)
    else:
        say_left_out(options, dataset.environment_options, quiet=quiet)
    noted = dataset.manifest.source.attributes.get("attributes")  # of a file: anything
    recorded = noted.get("mujoco") if isinstance(noted, dict) else None
    mujoco = versions("mujoco").get("mujoco", recorded)
    if "infos/qpos" in dataset.statistics and recorded not in (None, mujoco):
        difference = f"the data are of MuJoCo {recorded}, and {mujoco} plays"
        say(f"{difference}: its contacts end elsewhere, which changes returns", quiet=quiet)
    return facts, full_sizes
