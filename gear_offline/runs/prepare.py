"""From a recipe to data that are there and a recipe that says everything in numbers.

A recipe may leave to the data what belongs to the data: the environment, the returns to ask for,
the longest episode.  `resolve` fills these in, so that a run directory speaks for itself.
"""

from __future__ import annotations

import re
from math import isclose, prod
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from gear_offline.config.recipe import Recipe
from gear_offline.config.sections import CollectSettings, DataSettings
from gear_offline.config.tasks import task_recipe
from gear_offline.convert.conversion import convert
from gear_offline.core.device import resolve_device
from gear_offline.core.files import check_folder
from gear_offline.core.system import available_bytes
from gear_offline.core.text import count_text, size_text
from gear_offline.dataset.dataset import Dataset, open_dataset
from gear_offline.dataset.scores import dataset_file, reference_scores
from gear_offline.distributed.world import World
from gear_offline.errors import InputError, UnavailableError
from gear_offline.evaluation.environments import probe, say_version
from gear_offline.evaluation.evaluate import resolve_reference
from gear_offline.loaders.recipes import open_tasks
from gear_offline.models.decision_transformer import beyond_tanh
from gear_offline.models.multitask import ModelTask
from gear_offline.progress import say
from gear_offline.sources import open_source
from gear_offline.tables.fields import STATES, is_image, standard_fields
from gear_offline.tables.joint import JointDataset, Part, TableData
from gear_offline.training.model import ModelSizes

# the data -------------------------------------------------------------------------------------


def prepare_dataset(
    recipe: Recipe, *, world: World | None = None, quiet: bool = False
) -> Dataset | JointDataset:
    """Open the recipe's dataset, or those of its tasks, on every rank; make what is missing."""
    alone = world or World()
    if recipe.data.tasks:
        return open_tasks(recipe, lambda task: _open_on_ranks(task, alone, quiet=quiet))
    return _open_on_ranks(recipe, alone, quiet=quiet)


def _open_on_ranks(recipe: Recipe, world: World, *, quiet: bool) -> Dataset:
    """Open a dataset that one rank makes; it is compared with its digests once a node.

    That is while the node's first rank loads it.  What is mapped, or read from disk in parts, is
    not compared then, so it is before any rank reads it.
    """
    made = world.lead(lambda: prepare_one(recipe, quiet=quiet))
    if world.size == 1:
        assert made is not None, "this rank has made it"
        return made
    is_read_in_parts = recipe.loader.placement == "disk" or recipe.loader.host_budget is not None

    def opened() -> Dataset:
        dataset = made or _open(recipe)
        return dataset.verify() if is_read_in_parts else dataset

    return world.lead(opened, leader=world.leader) or _open(recipe)


def prepare_one(recipe: Recipe, *, quiet: bool = False) -> Dataset:
    """Open the dataset of a recipe of one, making it first when it does not exist."""
    data = recipe.data
    if data.path is None:
        raise InputError(
            "DATASET_NOT_FOUND",
            "the recipe names no data",
            where="data.path",
            remedy="set data.path to a dataset, and data.source to a file to convert into it",
        )
    path = Path(data.path)
    if path.exists():
        dataset = _open(recipe)
        _check_origin(data, dataset)
        return dataset
    source = data.source
    if data.collect is not None:
        source = str(_collect(data.collect, path.with_name(path.name + ".hdf5"), quiet))
    if source is None:
        raise InputError(
            "DATASET_NOT_FOUND",
            f"no dataset at {path} (relative to {Path.cwd()})",
            where="data.path",
            remedy="make it with `gear-offline convert`, or say what to convert: data.source",
        )
    say(f"converting {source} to {path}", quiet=quiet)
    convert(source, path, quiet=quiet)
    return _open(recipe)


def _open(recipe: Recipe) -> Dataset:
    """Open a dataset; blocks are compared with their digests when they are loaded."""
    assert recipe.data.path is not None, "checked before anything is opened"
    return open_dataset(recipe.data.path, verify=False)


def _check_origin(data: DataSettings, dataset: Dataset) -> None:
    """Refuse a dataset that is there already but was made of something else."""
    origin = dataset.manifest.source
    wanted = actual = ""
    if data.collect is not None:
        wanted, actual = _differences(data.collect, origin.attributes.get("attributes"))
    elif data.source is not None:
        names = [file.name for file in origin.files]
        scheme, _, name = data.source.partition(":")
        if scheme in ("d4rl", "minari") and name:
            # The file of a D4RL dataset may have been converted under its own name.
            file = PurePosixPath(dataset_file(name) or "" if scheme == "d4rl" else "").name
            if origin.uri != data.source and (not file or file not in names):
                wanted, actual = data.source, origin.uri
        elif names and Path(data.source).is_file() and Path(data.source).name not in names:
            wanted, actual = Path(data.source).name, ", ".join(names)
    if wanted:
        raise _mismatch("dataset", dataset.path, wanted, actual)


def _differences(settings: CollectSettings, recorded: Any) -> tuple[str, str]:
    """Return in what a collected file's attributes differ from what was asked: that, and they."""
    facts = recorded if isinstance(recorded, dict) else {}
    asked: dict[str, Any] = {"env_id": settings.environment, "seed": settings.seed}
    # The version that was taken is recorded, of an environment that is named without one too.
    if re.sub(r"-v[0-9]+$", "", str(facts.get("env_id"))) == settings.environment:
        del asked["env_id"]
    differ = [name for name, value in asked.items() if facts.get(name, value) != value]
    return (
        ", ".join(f"{name} {asked[name]}" for name in differ),
        ", ".join(f"{name} {facts[name]}" for name in differ),
    )


def _mismatch(what: str, path: Path, wanted: str, actual: str) -> InputError:
    return InputError(
        "DATA_MISMATCH",
        f"the {what} that is there was made of {actual}, the recipe says {wanted}",
        where=str(path),
        remedy=f"give another data.path, or remove that {what} to have it made again",
    )


def _collect(settings: CollectSettings, file: Path, quiet: bool) -> Path:
    """Record the recipe's own data; a file that is there already is used."""
    from gear_offline.collect.collection import collect

    if file.exists():
        with open_source(file) as source:
            wanted, actual = _differences(settings, source.info.attributes.get("attributes"))
        if wanted:
            raise _mismatch("file", file, wanted, actual)
        say(f"using {file}, which was collected before", quiet=quiet)
        return file
    steps = count_text(settings.steps, "step")
    say(f"collecting {steps} of {settings.environment} in {file}", quiet=quiet)
    check_folder(file.parent, output=file)
    file.parent.mkdir(parents=True, exist_ok=True)
    probe(settings.environment)  # refuses a module that only a run names
    options = settings.model_dump(exclude={"environment"})
    collect(settings.environment, file, **options, quiet=quiet)
    return file


# the recipe -----------------------------------------------------------------------------------


def resolve(
    recipe: Recipe, dataset: TableData, *, quiet: bool = False
) -> tuple[Recipe, ModelSizes]:
    """Fill in what the recipe leaves to the data, and check that recipe and data fit.

    Doing it again to the result changes nothing.
    """
    if not isinstance(dataset, JointDataset):
        resolved, sizes = _resolve_one(recipe, dataset, quiet=quiet)
        _check_memory(resolved, sizes)
        return resolved, sizes
    options = recipe.to_dict()
    recipes, sizes_of = [], []
    for task in dataset.tasks:
        single, sizes = _resolve_one(task_recipe(recipe, task.name), task.dataset, quiet=quiet)
        evaluate = single.evaluate
        options["data"]["tasks"][task.name] |= {
            "returns_scale": single.loader.returns_scale,
            "environment": evaluate.environment,
            "reference": evaluate.reference,
            "targets": None if evaluate.targets is None else list(evaluate.targets),
        }
        recipes.append(single)
        sizes_of.append(sizes)
    options["model"]["max_timestep"] = max(single.model.max_timestep or 0 for single in recipes)
    if any(sizes.discrete for sizes in sizes_of):
        options["model"]["action_tanh"] = False
    resolved = Recipe.parse(options)
    joint = ModelSizes(
        state_dim=max(sizes.state_dim for sizes in sizes_of),
        action_dim=max(sizes.action_dim for sizes in sizes_of),
        discrete=any(sizes.discrete for sizes in sizes_of),
        frame_shape=sizes_of[0].frame_shape,
        tasks=tuple(
            _model_task(task, sizes, normalized=recipe.loader.normalize_states)
            for task, sizes in zip(dataset.tasks, sizes_of, strict=True)
        ),
    )
    _check_memory(resolved, joint)
    return resolved, joint


def _model_task(task: Part, sizes: ModelSizes, *, normalized: bool) -> ModelTask:
    moments, returns = task.dataset.statistics[STATES], task.dataset.manifest.returns
    normalized = normalized and not is_image(task.dataset.spec[STATES])
    return ModelTask(
        name=task.name,
        state_dim=sizes.state_dim,
        action_dim=sizes.action_dim,
        returns_scale=task.returns_scale,
        state_mean=tuple(moments.mean.ravel().tolist()) if normalized else None,
        state_std=tuple(moments.std.ravel().tolist()) if normalized else None,
        return_worst=returns.min,
        return_best=returns.max,
    )


def _resolve_one(recipe: Recipe, dataset: Dataset, *, quiet: bool) -> tuple[Recipe, ModelSizes]:
    sizes, evaluates = _sizes(dataset), recipe.evaluate.episodes > 0
    environment = recipe.evaluate.environment or dataset.environment_id
    longest = int(dataset.episodes.lengths.max())
    if evaluates:
        environment, there, limit = _environment(recipe, dataset, sizes, quiet=quiet)
        if environment is not None:
            sizes, longest = _agreed(sizes, there, environment), max(longest, limit)
            _check_evaluation_device(recipe.evaluate.device)
    scores = dataset.reference_scores
    known = scores.name if scores is not None and reference_scores(scores.name) else None
    changes: dict[str, Any] = {
        "evaluate.environment": environment,
        "evaluate.reference": recipe.evaluate.reference or known,
    }
    if recipe.evaluate.targets is None:
        returns = dataset.manifest.returns
        alike = isclose(returns.max, returns.mean, rel_tol=1e-9)  # of one and the same return
        changes["evaluate.targets"] = [returns.max] if alike else [returns.max, returns.mean]
    if recipe.model.max_timestep is None:
        changes["model.max_timestep"] = max(longest, recipe.loader.context_length)
    if sizes.discrete and recipe.model.action_tanh:
        changes["model.action_tanh"] = False  # logits are not bounded
    resolved = recipe.replace(changes)
    if environment is not None and evaluates:
        resolve_reference(environment, resolved.evaluate.reference)  # now, not after 10,000 steps
    _check(resolved, dataset, sizes)
    return resolved, sizes


def _environment(
    recipe: Recipe, dataset: Dataset, sizes: ModelSizes, *, quiet: bool
) -> tuple[str | None, ModelSizes, int]:
    """Return the environment to evaluate in, its sizes and its limit of steps.

    One that only the dataset names is made if that imports nothing, and may be missing here.
    """
    asked = recipe.evaluate.environment
    name = asked or dataset.environment_id
    if name is None:
        names = f"neither the recipe nor {dataset.path} names an environment"
        say(f"no evaluation: {names}; evaluate.environment=ID would", quiet=quiet)
        return None, sizes, 0
    try:
        facts = probe(name)  # refuses to import a module that only a file names
    except (InputError, UnavailableError) as error:
        if asked is not None:
            raise
        say(f"no evaluation: {error}", quiet=quiet)
        return None, sizes, 0
    say_version(name, quiet=quiet)
    there = ModelSizes(
        state_dim=facts.state_size,
        action_dim=facts.action_size,
        discrete=facts.discrete,
        frame_shape=facts.observation_shape if sizes.frame_shape else (),
    )
    return name, there, facts.step_limit


def _check_evaluation_device(device: str) -> None:
    try:
        resolve_device(device)
    except UnavailableError as error:
        remedy = "use evaluate.device=auto"
        raise UnavailableError(error.code, error.what, "evaluate.device", remedy) from error


def _sizes(dataset: Dataset) -> ModelSizes:
    """Return the sizes that the columns show; of discrete actions those that occur."""
    observations, actions = dataset.spec["observations"], dataset.spec["actions"]
    discrete = actions.dtype.kind in "iub"
    lowest = float(dataset.statistics["actions"].min.min())
    if discrete and (prod(actions.shape) != 1 or lowest < 0):
        raise InputError(
            "COLUMN",
            f"integer actions of per-step shape {actions.shape} from {lowest:g} on are not the "
            "numbers of one discrete choice",
            where=str(dataset.path),
            remedy="store one number from 0 a step, or store continuous actions as float32",
        )
    highest = int(dataset.statistics["actions"].max.max()) + 1 if discrete else 0
    return ModelSizes(
        state_dim=prod(observations.shape),
        action_dim=highest if discrete else prod(actions.shape),
        discrete=discrete,
        frame_shape=observations.shape if is_image(observations) else (),
    )


def _agreed(data: ModelSizes, environment: ModelSizes, name: str) -> ModelSizes:
    """Return the environment's sizes, which may have actions that never occur in the data."""
    same = (data.state_dim, data.discrete, data.frame_shape) == (
        environment.state_dim,
        environment.discrete,
        environment.frame_shape,
    )
    has_more = data.discrete and data.action_dim < environment.action_dim
    if same and (data.action_dim == environment.action_dim or has_more):
        return environment
    raise InputError(
        "ENVIRONMENT",
        f"{name} has {_sizes_text(environment)}, the data {_sizes_text(data)}",
        where="evaluate.environment",
        remedy="name the environment that the data came from, or set evaluate.episodes=0",
    )


def _sizes_text(sizes: ModelSizes) -> str:
    seen = count_text(sizes.state_dim, "observation value")
    if sizes.frame_shape:
        seen = f"frames of {' x '.join(map(str, sizes.frame_shape))}"
    acts = count_text(sizes.action_dim, "discrete action" if sizes.discrete else "action value")
    return f"{seen} and {acts}"


def _check(recipe: Recipe, dataset: Dataset, sizes: ModelSizes) -> None:
    """Refuse what training would stumble over much later, or quietly get wrong."""
    loader = recipe.loader
    standard_fields(  # refuses what does not fit frames, or vectors
        dataset,
        normalize_states=loader.normalize_states,
        frame_stack=loader.frame_stack,
        recipe=True,
    )
    for column in ("observations", "actions", "rewards"):
        values = dataset.statistics[column]
        if values.nonfinite or not np.isfinite(values.std).all():
            what = f"{count_text(values.nonfinite, 'value')} NaN or infinite"
            remedy = (
                "repair the source and convert it again without --allow-nonfinite, or leave such "
                "episodes out with pick_episodes (docs/how-to/convert.md)"
            )
            if not values.nonfinite:
                what = "values so large that they have no standard deviation in float64"
                remedy = "scale the column in the source, and convert it again"
            where = f"column {column} of {dataset.path}"
            raise InputError("COLUMN", what, where=where, remedy=remedy)
    longest = int(dataset.episodes.lengths.max())
    rows = recipe.model.max_timestep or 0
    if longest > rows:
        raise InputError(
            "MODEL",
            f"model.max_timestep must be at least the longest episode ({longest:,}), got {rows:,}",
            where=str(dataset.path),
            remedy=f"set model.max_timestep={longest}, or null to take it from the data",
        )
    if recipe.model.action_tanh and not sizes.discrete:
        actions = dataset.statistics["actions"]
        outside = beyond_tanh(actions.min.ravel(), actions.max.ravel())
        if outside:
            low, high = actions.min.ravel()[outside], actions.max.ravel()[outside]
            raise InputError(
                "MODEL",
                f"actions reach {low.min():g} .. {high.max():g}, but model.action_tanh bounds "
                "what the model can predict to -1 .. 1",
                where=str(dataset.path),
                remedy="set model.action_tanh=false",
            )


def _check_memory(recipe: Recipe, sizes: ModelSizes) -> None:
    """Refuse what cannot fit: the kernel would kill the process instead, or pages would swap."""
    model, loader = recipe.model, recipe.loader
    size, available = model.hidden_size, available_bytes()
    # of the blocks and of the timesteps' embedding; a few rows more do not matter
    weights = (12 * model.layers * size + (model.max_timestep or 0)) * size
    # the columns, and the three tokens of each step once; pixels are bytes
    state = sizes.state_dim // 4 if sizes.frame_shape else sizes.state_dim
    batch = loader.batch_size * loader.context_length * (state + sizes.action_dim + 3 * size)
    given = f"model.hidden_size={size}, model.layers={model.layers}"
    for what, numbers, options in (
        ("the weights", weights, f"{given}, model.max_timestep={model.max_timestep}"),
        (
            "a batch and its tokens",
            batch,
            f"loader.batch_size={loader.batch_size}, loader.context_length={loader.context_length}",
        ),
    ):
        if 4 * numbers > available:
            raise InputError(
                "MEMORY",
                f"{what} take {size_text(4 * numbers)} with {options}, "
                f"{size_text(available)} of memory are available",
                where=recipe.name,
                remedy="make them smaller, or train on a machine with more memory",
            )
