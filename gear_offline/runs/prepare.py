"""From a recipe to data that are there and a recipe that says everything in numbers.

A recipe may leave to the data what belongs to the data: the environment, the returns to ask for,
the longest episode.  `resolve` fills these in, so that a run directory speaks for itself.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from math import isclose, isfinite
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gear_offline.config.files import MAKERS
from gear_offline.config.recipe import Recipe, whole_paths
from gear_offline.config.sections import CollectSettings, DataSettings, PlaySettings
from gear_offline.convert.conversion import convert
from gear_offline.convert.edits import options_text
from gear_offline.convert.record import find_changes
from gear_offline.core.files import check_folder, turn_of
from gear_offline.core.hub import is_there
from gear_offline.core.parts import is_same
from gear_offline.core.system import available_bytes, versions
from gear_offline.core.text import count_text, say, short, size_text, texts, typed
from gear_offline.dataset.dataset import Dataset
from gear_offline.dataset.growing import GrowingDataset
from gear_offline.dataset.scores import find_scores
from gear_offline.dataset.statistics import distribution
from gear_offline.distributed.world import World, resolve_device
from gear_offline.errors import InputError, UnavailableError
from gear_offline.evaluation.environments import (
    EnvironmentFacts,
    Options,
    probe,
    say_left_out,
    say_version,
)
from gear_offline.evaluation.play import check_goals, check_sizes
from gear_offline.loaders.options import loader_options, open_data, open_one, recipe_sampler
from gear_offline.models.base import ModelSizes, ModelTask, settings_dump, typed_settings
from gear_offline.models.decision_transformer import beyond_tanh
from gear_offline.runs.directory import going_on, recipe_before
from gear_offline.sampling.items import HAVE_PRIORITY, episode_priorities
from gear_offline.sources import open_source
from gear_offline.sources.uri import was_read_from
from gear_offline.tables.fields import is_image, standard_fields
from gear_offline.tables.joint import JointDataset, TableData
from gear_offline.tables.table import TableOptions, build_table, discounted_returns
from gear_offline.training.cost import cpu_threads, is_compiled
from gear_offline.training.model import data_sizes, resolve_precision
from gear_offline.training.trained import find_trained

MOST_FLOAT32 = float(np.finfo(np.float32).max)
SEEN = 0.05  # returns-to-go below it are next to nothing to the model
SLACK, LEAST_BEYOND = 0.01, 0.01  # of an action's range, and of actions: less is not said
SHARDS_READ = 8  # at most, to count actions
MOST_SQUARED = 1e18  # the squares of a layer's inputs are finite in float32, and so is their sum

# the data -------------------------------------------------------------------------------------


def prepare_dataset(
    recipe: Recipe, *, world: World | None = None, quiet: bool = False
) -> TableData:
    """Open the recipe's dataset, or those of its tasks, on every rank; make what is missing."""
    return open_data(recipe, partial(_open_on_ranks, world=world or World(), quiet=quiet))


def _open_on_ranks(recipe: Recipe, world: World, *, quiet: bool) -> Dataset:
    """Open a dataset on every rank; the first rank makes it if it is missing.

    Each node compares it with its digests once: its first rank does so while it loads the rows, or
    before any rank reads parts from disk.
    """
    prepared = world.lead(lambda: prepare_one(recipe, quiet=quiet))
    dataset = prepared or open_one(recipe)
    if recipe.loader.placement != "disk" and recipe.loader.host_budget is None:
        return dataset
    return world.lead(dataset.verify, leader=world.leader) or dataset.as_verified()


def open_growing(
    recipe: Recipe, sizes: ModelSizes, dataset: TableData, *, world: World, quiet: bool = False
) -> GrowingDataset | None:
    """Let the `dataset` of a resolved recipe grow by actors' episodes, if the recipe asks."""
    if recipe.data.admit_every is None:
        return None
    assert isinstance(dataset, Dataset), "data of several tasks do not grow"

    def check(piece: Dataset) -> None:  # no admitted piece may end the run
        _check(recipe, piece, sizes)
        manifest = piece.manifest.replace_fields(statistics=dataset.manifest.statistics)
        options = TableOptions.of(loader_options(recipe, dataset))
        table = build_table(replace(piece, manifest=manifest), options, threads=1)
        tops = [np.abs(g.rows).max() for g in table.groups if g.dtype == np.float32]
        if (largest := max(tops, default=0.0)) > MOST_SQUARED:
            what = f"a value or return-to-go of {largest:.1g} makes the loss infinite or NaN"
            raise InputError("COLUMN", what, str(piece.path), "leave such an episode out")
        if recipe.data.remover in HAVE_PRIORITY:
            episode_priorities(recipe.data, piece)  # raises where it has none

    def opened(*, admits: bool) -> GrowingDataset:
        whole = partial(recipe_sampler, recipe)
        return GrowingDataset(dataset, admits=admits, check=check, check_whole=whole, quiet=quiet)

    if recipe.loader.normalize_states:
        first = count_text(len(dataset), "first episode")
        say(f"states are normalised by the statistics of the {first}, for good", quiet=quiet)
    return world.lead(lambda: opened(admits=not recipe.data.replay)) or opened(admits=False)


def prepare_one(recipe: Recipe, *, quiet: bool = False) -> Dataset:
    """Open the one dataset of a recipe; make it first if it is missing.

    Where several processes miss it, the first makes it and the others wait.
    """
    data, maker = recipe.data, recipe.data.maker
    path = None if data.path is None else Path(data.path)
    if path is not None and not is_there(path) and (maker.source or maker.collect):
        with turn_of(path, quiet=quiet):
            if not is_there(path):
                made = data.model_copy(update={name: getattr(maker, name) for name in MAKERS})
                _make(made, path, quiet=quiet)
    dataset = open_one(recipe)
    _check_origin(recipe.data, dataset)
    return dataset


def _make(data: DataSettings, path: Path, *, quiet: bool) -> None:
    source = data.source
    if data.collect is not None:
        source = str(_collect(data.collect, path.with_name(path.name + ".hdf5"), quiet))
    say(f"converting {typed(source or '')} to {typed(path)}", quiet=quiet)
    convert(source or "", path, columns=data.columns, quiet=quiet)


def _check_origin(data: DataSettings, dataset: Dataset) -> None:
    """Refuse a dataset that is there already but was made of something else."""
    origin, path = dataset.manifest.source, dataset.path
    if data.source is None and data.collect is None:
        return
    facts = [*origin.attributes.get("edits", ()), *origin.attributes.get("options", ())]
    if facts != (asked := options_text(columns=data.columns)):
        has = {column.name.partition("/")[0] for column in dataset.spec} - {"rewards"}
        names = {name.partition("=")[0].strip() for name in data.columns or ()} - {"rewards"}
        if facts or has != {name.partition("/")[0] for name in names}:
            present = f"{origin.uri} with edits ({'; '.join(map(str, facts)) or 'none'})"
            wanted = f"{data.source or 'data.collect'} {'; '.join(asked) or 'alone'}"
            raise _mismatch("dataset", path, wanted, present)
    if data.collect is not None:
        collected = origin.attributes.get("attributes")
        _check_collected(data.collect, collected, "dataset", path)
        return
    files = [file.name for file in origin.files]
    if data.source is not None and not was_read_from(data.source, origin.uri, files):
        raise _mismatch("dataset", path, data.source, ", ".join(files) or origin.uri)
    if data.source is not None and (changed := ", ".join(find_changes(data.source, dataset))):
        sizes = ", ".join(f"{file.name} of {file.bytes:,} bytes" for file in origin.files[:3])
        raise _mismatch("dataset", path, f"{data.source}: {changed[:300]}", sizes)


def _check_collected(settings: CollectSettings, recorded: Any, what: str, path: Path) -> None:
    """Refuse a file or dataset whose recorded attributes are not what would be collected."""
    facts = {"env_id": None, "env_options": "{}"} | (recorded if isinstance(recorded, dict) else {})
    asked: dict[str, Any] = {"env_id": settings.environment, "seed": settings.seed}
    asked["env_options"] = json.dumps(settings.environment_options)
    if isinstance(options := facts.get("asked"), str):  # else another program recorded it
        facts = facts | json.loads(options)
        asked |= settings.model_dump(exclude={"environment", "environment_options", "gate"})
    # The version that was taken is recorded, of an environment that is named without one too.
    taken, wanted = str(facts.get("env_id")), settings.environment
    if re.sub(r"-v[0-9]+$", "", taken) == wanted or is_same(taken, wanted):
        del asked["env_id"]
    differ = [name for name, value in asked.items() if facts.get(name, value) != value]
    if differ:
        wanted = ", ".join(f"{name} {asked[name]}" for name in differ)
        raise _mismatch(what, path, wanted, ", ".join(f"{name} {facts[name]}" for name in differ))


def _mismatch(what: str, path: Path, wanted: str, actual: str) -> InputError:
    again = f"rm -r {shlex.quote(str(path))}"
    remedy = "take it as it is: data.source=null data.collect=null; or give another data.path, or "
    remedy += f"have it made again after `{again}`"
    what = f"the {what} that is there was made of {actual}, the recipe says {wanted}"
    return InputError("DATA_MISMATCH", what, str(path), remedy)


def _collect(settings: CollectSettings, file: Path, quiet: bool) -> Path:
    """Record the recipe's own data; a file that is there already is used."""
    from gear_offline.collect.collection import collect

    if file.exists():
        with open_source(file) as source:
            _check_collected(settings, source.info.attributes.get("attributes"), "file", file)
        say(f"using {typed(file)}, which was collected before", quiet=quiet)
        return file
    steps = count_text(settings.steps, "step")
    say(f"collecting {steps} of {settings.environment} in {typed(file)}", quiet=quiet)
    check_folder(file.parent, output=file)
    file.parent.mkdir(parents=True, exist_ok=True)
    # refuses a module that only a run names
    probe(settings.environment, settings.environment_options)
    options = settings.model_dump(exclude={"environment"})
    collect(settings.environment, file, **options, quiet=quiet)
    return file


# the recipe -----------------------------------------------------------------------------------


def settle(recipe: Recipe, run: Path, device: torch.device, *, start: Path | None = None) -> Recipe:
    """Return a recipe that leaves no number to the moment at which its run starts or goes on.

    What it leaves open is as it was when the run, or that of the checkpoint `start`, began.
    """
    before = recipe_before(run, start)
    recipe = recipe if before is None else going_on(recipe, before[0])
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


def resolve(
    recipe: Recipe, dataset: TableData, *, quiet: bool = False
) -> tuple[Recipe, ModelSizes]:
    """Fill in what the recipe leaves to the data, and check that recipe and data fit.

    Doing it again to the result changes nothing.
    """
    settings = settings_dump(typed_settings(recipe.model))  # with the defaults of its own options
    options = settings | recipe.model.model_dump()
    recipe = recipe.settle({"model": options})
    if isinstance(dataset, JointDataset):
        resolved, sizes = _resolve_tasks(recipe, dataset, quiet=quiet)
    else:
        resolved, sizes = _resolve_one(recipe, dataset, quiet=quiet)
    _check_memory(resolved, sizes)
    return resolved, sizes


def _resolve_tasks(
    recipe: Recipe, dataset: JointDataset, *, quiet: bool
) -> tuple[Recipe, ModelSizes]:
    options, normalized = recipe.to_dict(), recipe.loader.normalize_states
    singles, sizes, tasks = list[Recipe](), list[ModelSizes](), list[ModelTask]()
    for task in dataset.tasks:
        single, own = _resolve_one(recipe.of_task(task.name), task.dataset, quiet=quiet)
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
        sizes.append(own)
        returns = task.dataset.manifest.returns
        tasks.append(
            ModelTask.of(
                task.dataset,
                normalize_states=normalized,
                name=task.name,
                state_dim=own.state_dim,
                action_dim=own.action_dim,
                returns_scale=task.returns_scale,
                return_worst=returns.min,
                return_best=returns.max,
            )
        )
    joint = ModelSizes(
        state_dim=max(own.state_dim for own in sizes),
        action_dim=max(own.action_dim for own in sizes),
        discrete=any(own.discrete for own in sizes),
        columns=sizes[0].columns if sizes[0].columns[0].frames else (),
        tasks=tuple(tasks),
    )
    options["model"]["max_timestep"] = max(single.model.max_timestep or 0 for single in singles)
    bounded = all(single.model.action_tanh for single in singles)
    options["model"]["action_tanh"] = bounded and not joint.discrete
    return Recipe.read(options), joint


def _with_fallback(recipe: Recipe, dataset: Dataset) -> Recipe:
    """Return the recipe as its base plays data, if that has made these; else without it."""
    if (fallback := recipe.data.fallback) is None:
        return recipe
    changes, stored = {"data.fallback": None}, fallback.model_dump(mode="json")
    makers = {name: getattr(fallback, name) for name in MAKERS}
    with suppress(InputError):  # DATA_MISMATCH
        _check_origin(recipe.data.model_copy(update=makers), dataset)
        if recipe.data.maker is fallback:
            changes |= {f"data.{name}": stored[name] for name in MAKERS}
        for name in PlaySettings.model_fields:
            if getattr(recipe.evaluate, name) is None:
                changes[f"evaluate.{name}"] = stored[name]
    return recipe.replace(changes)


def _resolve_one(recipe: Recipe, dataset: Dataset, *, quiet: bool) -> tuple[Recipe, ModelSizes]:
    recipe = _with_fallback(recipe, dataset)
    _check_condition(recipe, dataset)
    sizes = data_sizes(dataset, recipe.loader.observations)
    environment = recipe.evaluate.environment or dataset.environment_id
    is_own = is_same(environment, dataset.environment_id)
    longest, plays = int(dataset.episodes.lengths.max()), recipe.evaluate.episodes > 0
    if plays:
        resolve_device(recipe.evaluate.device, where="evaluate.device")
    options = recipe.evaluate.environment_options
    if options is None and (is_own or dataset.environment_id is None):
        options = dataset.environment_options or None
    facts, sizes = _probe_environment(recipe, dataset, options, sizes, quiet=quiet)
    if facts is not None and plays:
        _say_clipped(dataset, facts, quiet=quiet)
    if facts is not None:
        longest = max(longest, facts.step_limit)
    elif plays:
        environment = None
    scores, known = dataset.reference_scores, None
    if scores is not None and (is_own or environment is None):
        is_named = find_scores(scores.name) is not None
        known = scores.name if is_named else [scores.minimum, scores.maximum]
    changes: dict[str, Any] = {
        "data.admissions": dataset.admissions or None,
        "evaluate.environment": environment,
        "evaluate.environment_options": options,
        "evaluate.reference": recipe.evaluate.reference or known,
        "evaluate.targets": _targets(recipe, dataset, facts if plays else None),
    }
    if facts is not None and not quiet:
        _say_what_differs(recipe, dataset, environment)
    _say_returns_scale(recipe, dataset, quiet=quiet)
    changes |= _model_options(recipe, dataset, longest, discrete=sizes.discrete)
    resolved = recipe.settle(changes)
    _check(resolved, dataset, sizes)
    return resolved, sizes


def _check_condition(recipe: Recipe, dataset: Dataset) -> None:
    """Refuse goals of frames, and returns of data without rewards."""
    goals, observed = recipe.loader.goals is not None, recipe.loader.observations
    has_frames = is_image(dataset.spec[observed[0]])
    if goals and has_frames:
        what, remedy = "goals are vectors, and the data are frames", "use loader.goals=null"
        raise InputError("COLUMN", what, where=str(dataset.path), remedy=remedy)
    if "rewards" not in dataset.spec and not goals and recipe.model.asks_returns:
        what = f"the data have no rewards, and model.kind={recipe.model.kind} is asked for returns"
        remedy = "clone the actions (model.kind=mlp), or add a column rewards to the source"
        if len(observed) == 1 and not has_frames:
            remedy = f"give it goals (loader.goals={{future: 1.0}}), {remedy}"
        raise InputError("COLUMN", what, where=str(dataset.path), remedy=remedy)


def _targets(
    recipe: Recipe, dataset: Dataset, facts: EnvironmentFacts | None
) -> Sequence[float] | None:
    """Return the targets of evaluations: those of the recipe, else tasks with goals, or returns.

    `facts` are None where nothing is played.
    """
    asked, goals = recipe.evaluate.targets, recipe.loader.goals is not None
    if goals and facts is None:
        return asked
    if goals and facts is not None:
        if asked:
            check_goals(facts, asked)
        elif asked is None and not facts.tasks:
            what, remedy = "it has no tasks with goals (task_infos)", "use evaluate.episodes=0"
            raise InputError("ENVIRONMENT", what, facts.environment_id, remedy)
        return list(range(1, facts.tasks + 1)) if asked is None else asked
    if asked is not None:
        return asked
    if "rewards" not in dataset.spec:
        return [0.0]  # the model does without returns: one play of it
    returns = dataset.manifest.returns
    if recipe.loader.gamma < 1.0:  # as training shows them
        returns = distribution(discounted_returns(dataset, recipe.loader.gamma))
    alike = isclose(returns.max, returns.mean, rel_tol=1e-9)  # of one and the same return
    alike = alike or recipe.model.asks_returns is False
    values = [returns.max] if alike else [returns.max, returns.mean]
    return values if isfinite(returns.mean) else None  # `_check` tells of rewards that are not


def _say_what_differs(recipe: Recipe, dataset: Dataset, environment: str | None) -> None:
    """Say in what the environment's rewards, observations and returns are not the data's."""
    goals = recipe.loader.goals is not None
    if dataset.reward_edits is None and not goals:
        what = "the data's rewards were edited, and how does not follow from those of single steps"
        say(f"{what}: playing subtracts the environment's own")
    mapped = texts(dataset.manifest.source.attributes.get("mapped"))
    if mapped and is_same(environment, dataset.environment_id):
        what = f"map made the data's {' and '.join(mapped)}, and {environment} has its own"
        say(f"{what}: evaluate.environment=MODULE:ID names one that maps them too")
    if recipe.loader.gamma < 1.0 and not goals:
        what = f"loader.gamma is {recipe.loader.gamma:g}: returns that are asked for are discounted"
        say(f"{what}, those that are achieved are not")


def _say_clipped(dataset: Dataset, environment: EnvironmentFacts, *, quiet: bool) -> None:
    """Say how many of the data's actions are beyond what the environment takes."""
    low, high, actions = environment.low, environment.high, dataset.statistics["actions"]
    width = high - low
    if environment.discrete or not np.isfinite(width).all():
        return
    low, high = low - SLACK * width, high + SLACK * width
    if (actions.min.reshape(-1) >= low).all() and (actions.max.reshape(-1) <= high).all():
        return
    beyond = count = 0
    shards = np.linspace(0, len(dataset.manifest.shards) - 1, SHARDS_READ).astype(int)
    for _, rows in chain.from_iterable(dataset.stream(n, "actions") for n in {*shards.tolist()}):
        values = rows.reshape(len(rows), -1)
        beyond, count = beyond + int(((values < low) | (values > high)).sum()), count + values.size
    if beyond > LEAST_BEYOND * count:
        what = f"{beyond / count:.0%} of the data's actions are beyond the bounds of "
        what += f"{environment.environment_id}, {environment.low.min():g} .. "
        what += f"{environment.high.max():g}: playing clips them"
        say(f"{what}; scale them (convert --map), or wrap the environment", quiet=quiet)


def _say_returns_scale(recipe: Recipe, dataset: Dataset, *, quiet: bool) -> None:
    """Say that ``loader.returns_scale`` leaves the model next to nothing of the returns."""
    scale, returns = recipe.loader.returns_scale, dataset.manifest.returns
    most = max(abs(returns.min), abs(returns.max)) if "rewards" in dataset.spec else 0.0
    unasked = recipe.loader.goals is not None or recipe.model.asks_returns is False
    if unasked or recipe.train.init is not None or not 0.0 < most < SEEN * scale:
        return
    what = f"returns of the data reach {short(most)} and loader.returns_scale is {scale:g}"
    better = f"loader.returns_scale={float(f'{most:.0e}'):g}"
    say(f"{what}: the model hardly sees them; {better} shows them", quiet=quiet)


def _model_options(
    recipe: Recipe, dataset: Dataset, longest: int, *, discrete: bool
) -> dict[str, Any]:
    """Return options of loader and model that follow from the data, or from ``train.init``."""
    changes: dict[str, Any] = {}
    start = None if recipe.train.init is None else find_trained(recipe.train.init)
    if start is not None:
        changes["loader.returns_scale"] = start.window.returns_scale
        normalized = any(column.state_mean for column in start.window.columns)
        changes["loader.normalize_states"] = normalized
    if recipe.model.max_timestep is None:
        own = max(longest, recipe.loader.context_length)
        changes["model.max_timestep"] = start.model.facts.max_timestep if start else own
    tanh, actions = getattr(recipe.model, "action_tanh", False), dataset.statistics["actions"]
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
    asked, plays = recipe.evaluate.environment, recipe.evaluate.episodes > 0
    name, facts, whole = asked or dataset.environment_id, None, sizes
    without = "no evaluation" if plays else "the data alone tell the model's sizes"
    if name is None:
        names = f"neither the recipe nor {dataset.path} names an environment"
        say(f"{without}: {names}; evaluate.environment=ID would", quiet=quiet or not plays)
        return None, sizes
    try:
        facts = probe(name, options)  # refuses to import a module that only a file names
        if sizes.discrete and facts.discrete:  # some actions may never occur in the data
            whole = sizes.model_copy(
                update={"action_dim": max(sizes.action_dim, facts.action_size)}
            )
        observed, otherwise = recipe.loader.observations, ", or set evaluate.episodes=0"
        check_sizes(facts, whole, observed, whose="the data", otherwise=otherwise, quiet=quiet)
    except (InputError, UnavailableError) as error:
        if plays and (asked or facts):
            raise
        say(f"{without}: {error if plays else error.what}", quiet=quiet)
        return None, sizes
    if not plays:
        return facts, whole
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
    here, simulated = versions("mujoco").get("mujoco", recorded), "infos/qpos" in dataset.statistics
    if simulated and recorded not in (None, here):
        what = f"the data are of MuJoCo {recorded}, and {here} plays"
        say(f"{what}: its contacts end elsewhere, which changes returns", quiet=quiet)
    return facts, whole


def _check(recipe: Recipe, dataset: Dataset, sizes: ModelSizes) -> None:
    """Refuse what training would stumble over much later, or quietly get wrong."""
    loader, model, path = recipe.loader, recipe.model, str(dataset.path)
    standard_fields(  # refuses what does not fit frames, or vectors
        dataset,
        normalize_states=loader.normalize_states,
        frame_stack=loader.frame_stack,
        observations=loader.observations,
    )
    for name in (*loader.observations, "actions", "rewards"):
        if name not in dataset.statistics:
            continue
        values, where = dataset.statistics[name], f"column {name} of {path}"
        if values.nonfinite:
            what = f"{count_text(values.nonfinite, 'value')} NaN or infinite"
            remedy = "repair the source and convert it again without --allow-nonfinite, or leave "
            remedy += "such episodes out with pick_episodes (docs/how-to/convert.md)"
            raise InputError("COLUMN", what, where=where, remedy=remedy)
        low, high = values.min.min(), values.max.max()
        is_choice = sizes.discrete and name == "actions"
        least, most = (0, sizes.action_dim - 1) if is_choice else (-MOST_FLOAT32, MOST_FLOAT32)
        if low < least or high > most:
            what = f"values reach {low:g} .. {high:g}, from {least:g} to {most:g} are usable"
            remedy = "scale the column in the source, or leave such an episode out"
            raise InputError("COLUMN", what, where=where, remedy=remedy)
    longest, rows = int(dataset.episodes.lengths.max()), model.max_timestep or 0
    if longest > rows:
        what = f"model.max_timestep must be at least the longest episode ({longest:,}), got "
        remedy = f"set model.max_timestep={longest}, or null to take it from the data"
        raise InputError("MODEL", f"{what}{rows:,}", where=path, remedy=remedy)
    actions = dataset.statistics["actions"]
    if (
        getattr(model, "action_tanh", False)
        and not sizes.discrete
        and beyond_tanh(actions.min, actions.max)
    ):
        what = f"actions reach {actions.min.min():g} .. {actions.max.max():g}, but "
        what += "model.action_tanh bounds what the model can predict to -1 .. 1"
        raise InputError("MODEL", what, where=path, remedy="set model.action_tanh=false")


def _check_memory(recipe: Recipe, sizes: ModelSizes) -> None:
    """Refuse what cannot fit: the kernel would kill the process instead, or pages would swap."""
    model, loader, (layers, size, tokens) = recipe.model, recipe.loader, recipe.model.shape
    # of the blocks and of the timesteps' embedding; a few rows more do not matter
    weights = (12 * layers * size + (model.max_timestep or 0)) * size
    # the columns, and the tokens of each step once; pixels are bytes
    state = sum(c.size // 4 if c.frames == "uint8" else c.size for c in sizes.columns)
    batch = loader.batch_size * loader.context_length * (state + sizes.action_dim + tokens * size)
    needed, available = 4 * max(weights, batch), available_bytes()
    if needed > available:
        options = "model.hidden_size, model.layers or model.max_timestep"
        if batch > weights:
            options = "loader.batch_size or loader.context_length"
        what = f"{size_text(needed)} of memory needed, {size_text(available)} available"
        remedy = f"lower {options}, or train on a machine with more memory"
        raise InputError("MEMORY", what, where=recipe.name, remedy=remedy)
