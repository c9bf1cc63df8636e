"""Check whether a recipe fits its data, and the machine; say what a user may have overlooked."""

from __future__ import annotations

import math
from itertools import chain

import numpy as np

from gear_offline.batches.tables.fields import is_image, standard_fields
from gear_offline.config.recipe import Recipe
from gear_offline.core.parts import is_same
from gear_offline.core.system import available_bytes
from gear_offline.core.text import count_text, say, short, size_text, texts
from gear_offline.data.dataset.dataset import Dataset
from gear_offline.data.dataset.schema import ADVANTAGES, check_advantages
from gear_offline.errors import InputError
from gear_offline.evaluation.environments import EnvironmentFacts
from gear_offline.models.base import ModelSizes
from gear_offline.models.decision_transformer import beyond_tanh

MOST_FLOAT32 = float(np.finfo(np.float32).max)
SEEN = 0.05  # returns-to-go below it are next to nothing to the model
SLACK, LEAST_BEYOND = 0.01, 0.01  # of an action's range, and of actions: less is not said
SHARDS_READ = 8  # at most, to count actions


def check_condition(recipe: Recipe, dataset: Dataset) -> None:
    """Refuse goals of frames, and returns of data without rewards."""
    goals, observed = recipe.loader.goals is not None, recipe.loader.observations
    has_frames = is_image(dataset.spec[observed[0]])
    sees_rewards = getattr(recipe.model, "condition", None) == "rewards"
    needs_rewards = "rewards" not in dataset.spec and (recipe.model.asks_returns or sees_rewards)
    if goals and has_frames:
        problem, remedy = "goals are vectors, and the data are frames", "use loader.goals=null"
        raise InputError("COLUMN", problem, where=dataset.name, remedy=remedy)
    if recipe.loader.condition == "advantage":
        check_advantages(dataset.spec, dataset.name)
        if not 0.0 < float(dataset.statistics[ADVANTAGES].std.max()) < math.inf:
            problem, remedy = "advantages are all alike", "compute them by another run"
            raise InputError("COLUMN", problem, dataset.name, remedy)
    elif needs_rewards and not goals:
        use = "model.condition=rewards sees them"
        use = use if sees_rewards else f"model.kind={recipe.model.kind} is asked for returns"
        problem = f"the data have no rewards, and {use}"
        remedy = "clone the actions (model.kind=mlp), or add a column rewards to the source"
        if len(observed) == 1 and not has_frames:
            remedy = f"give it goals (loader.goals={{future: 1.0}}), {remedy}"
        raise InputError("COLUMN", problem, where=dataset.name, remedy=remedy)


def check_fit(recipe: Recipe, dataset: Dataset, sizes: ModelSizes) -> None:
    """Refuse what training would stumble over much later, or quietly get wrong."""
    loader, model, path = recipe.loader, recipe.model, dataset.name
    standard_fields(  # refuses what does not fit frames, or vectors
        dataset,
        normalize_states=loader.normalize_states,
        frame_stack=loader.frame_stack,
        observations=loader.observations,
    )
    condition = [ADVANTAGES] if loader.condition == "advantage" else []
    for name in (*loader.observations, "actions", "rewards", *condition):
        if name not in dataset.statistics:
            continue
        values, where = dataset.statistics[name], f"column {name} of {path}"
        if values.nonfinite:
            problem = f"{count_text(values.nonfinite, 'value')} NaN or infinite"
            remedy = "repair the source and convert it again without --allow-nonfinite, or leave "
            remedy += "such episodes out with pick_episodes (docs/how-to/convert.md)"
            raise InputError("COLUMN", problem, where=where, remedy=remedy)
        low, high = values.min.min(), values.max.max()
        is_choice = sizes.discrete and name == "actions"
        least, most = (0, sizes.action_dim - 1) if is_choice else (-MOST_FLOAT32, MOST_FLOAT32)
        if low < least or high > most:
            problem = f"values reach {low:g} .. {high:g}, from {least:g} to {most:g} are usable"
            remedy = "scale the column in the source, or leave such an episode out"
            raise InputError("COLUMN", problem, where=where, remedy=remedy)
    longest, rows = int(dataset.episodes.lengths.max()), model.max_timestep or 0
    if longest > rows:
        problem = f"model.max_timestep must be at least the longest episode ({longest:,}), got "
        remedy = f"set model.max_timestep={longest}, or null to take it from the data"
        raise InputError("MODEL", f"{problem}{rows:,}", where=path, remedy=remedy)
    actions = dataset.statistics["actions"]
    if (
        getattr(model, "action_tanh", False)
        and not sizes.discrete
        and beyond_tanh(actions.min, actions.max)
    ):
        problem = f"actions reach {actions.min.min():g} .. {actions.max.max():g}, but "
        problem += "model.action_tanh bounds what the model can predict to -1 .. 1"
        raise InputError("MODEL", problem, where=path, remedy="set model.action_tanh=false")


def check_memory(recipe: Recipe, sizes: ModelSizes) -> None:
    """Refuse what cannot fit: the kernel would kill the process instead, or pages would swap."""
    model, loader, (layers, size, tokens) = recipe.model, recipe.loader, recipe.model.shape
    # of the blocks and of the timesteps' embedding; a few rows more do not matter
    weights = (12 * layers * size + (model.max_timestep or 0)) * size
    # the columns, and the tokens of each step once; pixels are bytes
    state = sum(c.size // 4 if c.frames == "uint8" else c.size for c in sizes.columns)
    batch = loader.context_length * (state + sizes.action_dim + tokens * size)
    batch = loader.batch_size * (batch + (loader.chunk or 0) * sizes.action_dim)
    demand, available = 4 * max(weights, batch), available_bytes()
    if demand > available:
        options = "model.hidden_size, model.layers or model.max_timestep"
        if batch > weights:
            chunk = "" if loader.chunk is None else "loader.chunk, "
            options = f"{chunk}loader.batch_size or loader.context_length"
        problem = f"{size_text(demand)} of memory needed, {size_text(available)} available"
        remedy = f"lower {options}, or train on a machine with more memory"
        raise InputError("MEMORY", problem, where=recipe.name, remedy=remedy)


def say_what_differs(recipe: Recipe, dataset: Dataset, environment: str | None) -> None:
    """Say in what the environment's rewards, observations and returns are not the data's."""
    sums_rewards = recipe.loader.goals is None and recipe.loader.condition == "return"
    if dataset.reward_edits is None and sums_rewards:
        text = "the data's rewards were edited, and how does not follow from those of single steps"
        say(f"{text}: playing subtracts the environment's own")
    mapped = texts(dataset.manifest.source.attributes.get("mapped"))
    if mapped and is_same(environment, dataset.environment_id):
        text = f"map made the data's {' and '.join(mapped)}, and {environment} has its own"
        say(f"{text}: evaluate.environment=MODULE:ID names one that maps them too")
    if recipe.loader.gamma < 1.0 and sums_rewards:
        text = f"loader.gamma is {recipe.loader.gamma:g}: returns that are asked for are discounted"
        say(f"{text}, those that are achieved are not")


def say_chunks(recipe: Recipe, *, quiet: bool) -> None:
    """Say where no chunk of actions begins, if windows are chosen by their first steps."""
    loader, by_last = recipe.loader, recipe.selection.strategy == "d3rlpy"
    if loader.chunk and loader.context_length > 1 and loader.span == "episode" and not by_last:
        text = f"chunks begin at none of the first {loader.context_length - 1} steps of an episode"
        say(f"{text}; selection.strategy=d3rlpy loader.padding=left: at all alike", quiet=quiet)


def say_clipped(dataset: Dataset, environment: EnvironmentFacts, *, quiet: bool) -> None:
    """Say the share of actions of the data beyond the bounds of the environment."""
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
        finding = f"{beyond / count:.0%} of the data's actions are beyond the bounds of "
        finding += f"{environment.environment_id}, {environment.low.min():g} .. "
        finding += f"{environment.high.max():g}: playing clips them"
        say(f"{finding}; scale them (convert --map), or wrap the environment", quiet=quiet)


def say_returns_scale(recipe: Recipe, dataset: Dataset, *, quiet: bool) -> None:
    """Say that ``loader.returns_scale`` leaves the model next to nothing of the returns."""
    scale, returns = recipe.loader.returns_scale, dataset.manifest.returns
    most = max(abs(returns.min), abs(returns.max)) if "rewards" in dataset.spec else 0.0
    unasked = recipe.loader.goals is not None or recipe.model.asks_returns is False
    unasked |= recipe.loader.condition == "advantage"
    if unasked or recipe.train.init is not None or not 0.0 < most < SEEN * scale:
        return
    finding = f"returns of the data reach {short(most)} and loader.returns_scale is {scale:g}"
    better = f"loader.returns_scale={float(f'{most:.0e}'):g}"
    say(f"{finding}: the model hardly sees them; {better} shows them", quiet=quiet)
