"""From a recipe to data that is there and a recipe that says everything in numbers.

A recipe may leave to the data what belongs to the data: the environment, the returns to ask for,
the longest episode.  `resolve` fills these in, so that a run directory speaks for itself.
"""

from __future__ import annotations

import re
from math import isclose, prod
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np

from gear_offline.config.recipe import Recipe
from gear_offline.config.sections import CollectSettings, DataSettings
from gear_offline.convert import convert
from gear_offline.core.files import check_path
from gear_offline.core.progress import say
from gear_offline.core.system import available_bytes
from gear_offline.core.text import count_text, size_text
from gear_offline.dataset.dataset import Dataset, open_dataset
from gear_offline.dataset.scores import dataset_file, reference_scores
from gear_offline.errors import InputError, UnavailableError
from gear_offline.evaluation.environments import probe, say_version
from gear_offline.loaders.recipes import open_tasks
from gear_offline.tables.fields import is_image, standard_fields
from gear_offline.tables.joint import JointDataset, TableData
from gear_offline.training.model import ModelSizes

if TYPE_CHECKING:
    pass


def prepare_dataset(recipe: Recipe, *, quiet: bool = False) -> TableData:
    """Open the recipe's dataset, or those of its tasks; see `prepare_one`."""
    if recipe.data.tasks:
        return open_tasks(recipe, lambda one: prepare_one(one, quiet=quiet))
    return prepare_one(recipe, quiet=quiet)


def prepare_one(recipe: Recipe, *, quiet: bool = False) -> Dataset:
    """Open the dataset of a recipe of one, making it first when it does not exist.

    Raises
    ------
    InputError
        ``DATA_MISMATCH`` when it was made of something else than the recipe says;
        ``DATA_MISSING`` when it does not exist and the recipe does not say how to make it, and
        the errors of collecting, converting and opening.
    """
    if recipe.data.path is None:
        raise InputError(
            "DATA_MISSING",
            "the recipe names no data",
            where="data.path",
            remedy="set data.path to a dataset, and data.source to a file to convert into it",
        )
    path = Path(recipe.data.path)
    if not path.exists():
        source = recipe.data.source
        if recipe.data.collect is not None:
            source = str(_collect(recipe.data.collect, path.with_name(path.name + ".hdf5"), quiet))
        if source is None:
            raise InputError(
                "DATA_MISSING",
                f"no dataset at {path} (relative to {Path.cwd()})",
                where="data.path",
                remedy="make it with `gear-offline convert`, or say what to convert: data.source",
            )
        say(f"converting {source} to {path}", quiet=quiet)
        convert(source, path, quiet=quiet)
        return open_recipe_dataset(recipe)
    dataset = open_recipe_dataset(recipe)
    _check_origin(recipe.data, dataset)
    return dataset


def open_recipe_dataset(recipe: Recipe) -> Dataset:
    """Open the dataset of a recipe; blocks are compared with their digests when they are loaded."""
    assert recipe.data.path is not None, "checked before anything is opened"
    return open_dataset(recipe.data.path, verify=False)


def _check_origin(settings: DataSettings, dataset: Dataset) -> None:
    """Refuse a dataset that is there already but was made of something else."""
    made = dataset.manifest.source
    wanted = found = ""
    if settings.collect is not None:
        wanted, found = _differences(settings.collect, made.attributes.get("attributes"))
    elif settings.source is not None:
        names = [file.name for file in made.files]
        scheme, _, name = settings.source.partition(":")
        if scheme in ("d4rl", "minari") and name:
            # The file of a D4RL dataset may have been converted under its own name.
            file = PurePosixPath(dataset_file(name) or "" if scheme == "d4rl" else "").name
            if made.uri != settings.source and (not file or file not in names):
                wanted, found = settings.source, made.uri
        elif names and Path(settings.source).is_file() and Path(settings.source).name not in names:
            wanted, found = Path(settings.source).name, ", ".join(names)
    if wanted:
        raise _mismatch("dataset", dataset.path, wanted, found)


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


def _mismatch(what: str, path: Path, wanted: str, found: str) -> InputError:
    return InputError(
        "DATA_MISMATCH",
        f"the {what} that is there was made of {found}, the recipe says {wanted}",
        where=str(path),
        remedy=f"give another data.path, or remove that {what} to have it made again",
    )


def _collect(settings: CollectSettings, file: Path, quiet: bool) -> Path:
    """Record the recipe's own data; a file that is there already is used."""
    from gear_offline.collect import collect
    from gear_offline.sources import open_source

    if file.exists():
        with open_source(file) as source:
            wanted, found = _differences(settings, source.info.attributes.get("attributes"))
        if wanted:
            raise _mismatch("file", file, wanted, found)
        say(f"using {file}, which was collected before", quiet=quiet)
        return file
    say(
        f"collecting {count_text(settings.steps, 'step')} of {settings.environment} in {file}",
        quiet=quiet,
    )
    check_path(file.parent, output=file)
    file.parent.mkdir(parents=True, exist_ok=True)
    probe(settings.environment)  # refuses a module that only a run names
    options = settings.model_dump(exclude={"environment"})
    collect(settings.environment, file, **options, quiet=quiet)
    return file


def resolve(
    recipe: Recipe, dataset: TableData, *, quiet: bool = False
) -> tuple[Recipe, ModelSizes]:
    """Fill in what the recipe leaves to the data, and check that recipe and data fit.

    Doing it again to the result changes nothing.

    Raises
    ------
    InputError
        ``ENVIRONMENT_UNKNOWN``, ``ENVIRONMENT_MISMATCH``, ``TIMESTEP_RANGE``, ``ACTION_RANGE``,
        ``REFERENCE_UNKNOWN``, ``COLUMN``.
    UnavailableError
        ``ENVIRONMENT_PACKAGE`` when the recipe itself names an environment that cannot be made;
        ``DEVICE`` when evaluations are asked for on one that is not here.
    """
    from gear_offline.evaluation.evaluate import resolve_reference
    from gear_offline.runs.task_preparation import resolve_tasks

    if isinstance(dataset, JointDataset):
        return resolve_tasks(recipe, dataset, quiet=quiet)

    sizes = _sizes(dataset)
    environment = recipe.evaluate.environment or dataset.environment_id
    longest = int(dataset.episodes.lengths.max())
    if environment is None and recipe.evaluate.episodes > 0:
        names = f"neither the recipe nor {dataset.path} names an environment"
        say(f"no evaluation: {names}; evaluate.environment=ID would", quiet=quiet)
    if environment is not None and recipe.evaluate.episodes > 0:
        try:
            facts = probe(environment)
        except (InputError, UnavailableError) as error:
            if recipe.evaluate.environment is not None:
                raise
            say(f"no evaluation: {error}", quiet=quiet)
            environment = None
        else:
            say_version(environment, quiet=quiet)
            there = ModelSizes(
                state_dim=facts.state_size,
                action_dim=facts.action_size,
                discrete=facts.discrete,
                frame_shape=facts.observation_shape if sizes.frame_shape else (),
            )
            sizes = _agreed(sizes, there, environment)
            longest = max(longest, facts.step_limit)
    changes: dict[str, Any] = {
        "evaluate__environment": environment,
        "evaluate__reference": recipe.evaluate.reference or _reference(dataset),
    }
    if recipe.evaluate.targets is None:
        returns = dataset.manifest.returns
        alike = isclose(returns.max, returns.mean, rel_tol=1e-9)  # of one and the same return
        changes["evaluate__targets"] = [returns.max] if alike else [returns.max, returns.mean]
    if recipe.model.max_timestep is None:
        changes["model__max_timestep"] = max(longest, recipe.loader.context_length)
    if sizes.discrete and recipe.model.action_tanh:
        changes["model__action_tanh"] = False  # logits are not bounded
    resolved = recipe.replace(**changes)
    if environment is not None and resolved.evaluate.episodes > 0:
        resolve_reference(environment, resolved.evaluate.reference)  # now, not after 10,000 steps
        _check_evaluation_device(resolved.evaluate.device)
    _check(resolved, dataset, sizes)
    return resolved, sizes


def _check_evaluation_device(device: str) -> None:
    from gear_offline.core.device import resolve_device

    try:
        resolve_device(device)
    except UnavailableError as error:
        raise UnavailableError(
            error.code, error.what, where="evaluate.device", remedy="use evaluate.device=auto"
        ) from error


def _reference(dataset: Dataset) -> str | None:
    scores = dataset.reference_scores
    return scores.name if scores is not None and reference_scores(scores.name) else None


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
    if same and (
        data.action_dim == environment.action_dim
        or (data.discrete and data.action_dim < environment.action_dim)
    ):
        return environment
    raise InputError(
        "ENVIRONMENT",
        f"{name} has {_words(environment)}, the data {_words(data)}",
        where="evaluate.environment",
        remedy="name the environment that the data came from, or set evaluate.episodes=0",
    )


def _words(sizes: ModelSizes) -> str:
    seen = count_text(sizes.state_dim, "observation value")
    if sizes.frame_shape:
        seen = f"frames of {' x '.join(map(str, sizes.frame_shape))}"
    acts = count_text(sizes.action_dim, "discrete action" if sizes.discrete else "action value")
    return f"{seen} and {acts}"


def _check(recipe: Recipe, dataset: Dataset, sizes: ModelSizes) -> None:
    """Refuse what training would stumble over much later, or quietly get wrong."""
    from gear_offline.models.decision_transformer import beyond_tanh

    loader = recipe.loader
    standard_fields(  # refuses what does not fit frames, or vectors
        dataset,
        normalize_states=loader.normalize_states,
        frame_stack=loader.frame_stack,
        recipe=True,
    )
    for column in ("observations", "actions", "rewards"):
        found = dataset.statistics[column]
        if found.nonfinite or not np.isfinite(found.std).all():
            what = f"{count_text(found.nonfinite, 'value')} NaN or infinite"
            remedy = (
                "repair the source and convert it again without --allow-nonfinite, or leave such "
                "episodes out with pick_episodes (docs/sources.md)"
            )
            if not found.nonfinite:
                what = "values so large that they have no standard deviation in float64"
                remedy = "scale the column in the source, and convert it again"
            where = f"column {column} of {dataset.path}"
            raise InputError("COLUMN", what, where=where, remedy=remedy)
    check_memory(recipe, sizes)
    longest = int(dataset.episodes.lengths.max())
    rows = recipe.model.max_timestep or 0
    if longest > rows:
        raise InputError(
            "TIMESTEP_RANGE",
            f"model.max_timestep must be at least the longest episode ({longest:,}), got {rows:,}",
            where=str(dataset.path),
            remedy=f"set model.max_timestep={longest}, or null to take it from the data",
        )
    if recipe.model.action_tanh and not sizes.discrete:
        statistics = dataset.statistics["actions"]
        outside = beyond_tanh(statistics.min.ravel(), statistics.max.ravel())
        if outside:
            low, high = statistics.min.ravel()[outside], statistics.max.ravel()[outside]
            raise InputError(
                "ACTION_RANGE",
                f"actions reach {low.min():g} .. {high.max():g}, but model.action_tanh bounds "
                "what the model can predict to -1 .. 1",
                where=str(dataset.path),
                remedy="set model.action_tanh=false",
            )


def check_memory(recipe: Recipe, sizes: ModelSizes) -> None:
    """Refuse what cannot fit: the kernel would kill the process instead, or pages would swap."""
    model, loader = recipe.model, recipe.loader
    size, available = model.hidden_size, available_bytes()
    # of the blocks and of the timesteps' embedding; a few rows more do not matter
    weights = (12 * model.layers * size + (model.max_timestep or 0)) * size
    # the columns, and the three tokens of each step once; pixels are bytes
    state = sizes.state_dim // 4 if sizes.frame_shape else sizes.state_dim
    batch = loader.batch_size * loader.context_length * (state + sizes.action_dim + 3 * size)
    for what, options, numbers in (
        ("the weights", ("hidden_size", "layers", "max_timestep"), weights),
        ("a batch and its tokens", ("batch_size", "context_length"), batch),
    ):
        if 4 * numbers > available:
            section, values = ("model", model) if numbers is weights else ("loader", loader)
            given = ", ".join(f"{section}.{name}={getattr(values, name)}" for name in options)
            raise InputError(
                "MEMORY",
                f"{what} take {size_text(4 * numbers)} with {given}, "
                f"{size_text(available)} of memory are available",
                where=recipe.name,
                remedy="make them smaller, or train on a machine with more memory",
            )
