"""A recipe: one YAML file that says data, loader, model, optimiser, training and evaluation.

The classes are the list of all options, the text under each field is its documentation, and
docs/hooks.py makes tables of both; ``recipe.train.steps`` is the option ``train.steps``.
Everything is checked when a recipe is built: all that is wrong becomes one `InputError`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError, model_validator

from gear_offline.config.arguments import check_arguments
from gear_offline.config.environment_options import beyond_bounds, options_name
from gear_offline.config.files import (
    Overrides,
    apply_overrides,
    find_part_names,
    find_recipe,
    with_bases,
)
from gear_offline.config.problems import guess_option, option_text
from gear_offline.config.sections import (
    DataSettings,
    EvaluateSettings,
    LoaderSettings,
    Model,
    Name,
    OptimizerSettings,
    PlaySettings,
    Section,
    Seed,
    SelectionSettings,
    StoredSettings,
    TrainSettings,
    TransformerSettings,
)
from gear_offline.config.strict_yaml import dump_yaml
from gear_offline.core.address import is_remote
from gear_offline.core.parts import admit, is_part, part_name, readmit
from gear_offline.core.text import to_plain
from gear_offline.errors import InputError


class Recipe(Section):
    """One training run, from data to score."""

    name: Name
    """Name of the recipe and of its run directory."""
    description: str = ""
    """One line for `recipes ls`."""
    seed: Seed = 0
    """Seed of the model's weights, of dropout and of the selection."""
    parts: dict[str, str] = {}  # noqa: RUF012 - pydantic copies it
    """Digests of its models, strategies and others of one's own, FILE.py:Name; kept with a run."""
    data: DataSettings = DataSettings()
    loader: LoaderSettings = LoaderSettings()
    selection: SelectionSettings = SelectionSettings()
    model: Model = TransformerSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    train: TrainSettings = TrainSettings()
    evaluate: EvaluateSettings = EvaluateSettings()

    def __repr__(self) -> str:
        loader, model, tasks = self.loader, self.model, self.data.tasks
        data = f"tasks {', '.join(tasks)}" if tasks else self.data.path or "no data"
        return (
            f"Recipe({self.name!r}: {data}, {self.train.steps:,} steps of {loader.batch_size} x "
            f"{loader.context_length}, {self.selection.strategy}, {model}, seed {self.seed}, "
            f"on {self.train.device})"
        )

    __str__ = __repr__  # all options: `to_yaml`

    @model_validator(mode="after")
    def _check_across_sections(self) -> Self:
        if problems := list(self._conflicts()):
            raise ValueError("; ".join(problems))
        # Nobody has typed a name, unless who makes the recipe says so: `parse`, `replace`.
        digests = {name: self.parts.get(name, "") for name in self.part_names}
        self.parts.clear()
        self.parts.update(digests)
        return self

    def _conflicts(self) -> Iterator[str]:
        model, loader, train = self.model, self.loader, self.train
        if isinstance(model, TransformerSettings) and model.hidden_size % model.heads:
            near = -(-model.hidden_size // model.heads) * model.heads
            rule = f"model.hidden_size must be a multiple of model.heads ({model.heads})"
            yield f"{rule}, got {model.hidden_size}: try {near}"
        if loader.batch_size % train.accumulate:
            rule = f"train.accumulate must divide loader.batch_size ({loader.batch_size})"
            yield f"{rule}, got {train.accumulate}"
        if train.deterministic and train.compile == "on":
            yield "train.compile=on (it times kernels) and train.deterministic exclude each other"
        if train.deterministic == "ranks":
            others = {
                "train.parallel=fsdp": train.parallel == "fsdp",
                "train.accumulate (a batch is computed in pieces)": train.accumulate > 1,
                "train.precision=fp8": train.precision == "fp8",
                "loader.sharding=shard": loader.sharding == "shard",
            }
            for option in (option for option, holds in others.items() if holds):
                yield f"{option} and train.deterministic=ranks exclude each other: keep one"
        is_short = model.max_timestep is not None and model.max_timestep < loader.context_length
        if is_short and loader.span == "episode":
            need = f"at least loader.context_length ({loader.context_length})"
            remedy = "raise it to the longest episode, or null for that of the data"
            yield f"model.max_timestep must be {need}, got {model.max_timestep}: {remedy}"
        if self.data.tasks and (train.init is not None or not model.takes_tasks):
            single = "policy=gaussian" if model.is_stochastic else f"kind={model.kind}"
            option = f"model.{single}" if train.init is None else "train.init"
            yield f"{option} is for one task, data.tasks names several"
        every, limiter = self.data.admit_every, self.data.limiter
        if every is not None and limiter and limiter.samples_per_insert:
            low, high = limiter.error_bounds(0)
            least = max(every * loader.batch_size, limiter.samples_per_insert)
            if high - low < 2 * least:
                yield (
                    f"data.limiter.error_buffer must span {2 * least:g}, twice the segments "
                    f"between two looks or of one insert, got {high - low:g}: raise it to {least:g}"
                )
        if train.best == "validation/loss" and self.data.held_out is None:
            yield "train.best=validation/loss needs data.held_out, such as 10%"
        if loader.condition == "advantage":
            if self.data.tasks or every is not None:
                other = "data.tasks" if self.data.tasks else "data.admit_every"
                why = "advantages are of one dataset that does not grow"
                yield f"loader.condition=advantage and {other} exclude each other: {why}"
            if model.asks_returns is False:
                takes = hasattr(model, "condition")
                remedy = "model.condition=returns takes it" if takes else "leave it"
                rule = "loader.condition=advantage needs a model that is asked for something"
                yield f"{rule}: {remedy}"
        if loader.chunk is not None and model.takes_chunks is False:
            remedy = "name a model of your own that does, model.kind=FILE.py:Name, or use null"
            yield f"model.kind={model.kind} does not use loader.chunk={loader.chunk}: {remedy}"
        if getattr(model, "condition", None) == "rewards":
            if model.kind != "decision_transformer":
                yield f"model.condition=rewards is for kind=decision_transformer, got {model.kind}"
            if loader.goals is not None:
                yield "model.condition=rewards and loader.goals exclude each other: keep one"
        if loader.goals is not None and self.data.tasks:
            yield "loader.goals and data.tasks exclude each other: goals are states of one dataset"
        if self.data.tasks and loader.observations != ("observations",):
            yield "data.tasks share the column observations: leave loader.observations out"
        if loader.goals is not None and len(loader.observations) > 1:
            yield "loader.goals are states of one column: name one in loader.observations"
        if loader.span == "history" and every is not None and loader.placement == "disk":
            rule = (
                "loader.span=history and loader.placement=disk exclude each other where data grow"
            )
            yield f"{rule}: what comes to a history lies elsewhere"
        if loader.goals is not None and every is not None:
            yield "loader.goals and data.admit_every exclude each other: goals need fixed data"
        if self.evaluate.episodes_of_memory > 1 and loader.span != "history":
            yield "evaluate.episodes_of_memory above 1 needs loader.span=history"
        for leaf in PlaySettings.model_fields if self.data.tasks else ():
            if getattr(self.evaluate, leaf) is not None:
                rule = f"evaluate.{leaf} and data.tasks exclude each other"
                yield f"{rule}: say {leaf} in each task, as data.tasks.NAME.{leaf}"

    def of_task(self, name: str) -> Recipe:
        """Return the recipe of one task alone, with what the tasks share."""
        task = (self.data.tasks or {})[name]
        data = {key: getattr(task, key) for key in StoredSettings.model_fields}
        evaluate = {key: getattr(task, key) for key in PlaySettings.model_fields}
        scale = task.returns_scale or self.loader.returns_scale
        # copies, not `replace`: its cost would be quadratic in the number of tasks
        return self.model_copy(
            update={
                "data": self.data.model_copy(update={**data, "tasks": None, "schedule": None}),
                "evaluate": self.evaluate.model_copy(update=evaluate),
                "loader": self.loader.model_copy(update={"returns_scale": scale}),
                "selection": task.selection or self.selection,
            }
        )

    @property
    def environments(self) -> tuple[str, ...]:
        """The environments that it names to evaluate in or to collect in, each once."""
        tasks = list((self.data.tasks or {}).values())
        fallbacks = [data.fallback for data in (self.data, *tasks) if data.fallback is not None]
        makers = [self.data.collect, *(task.collect for task in tasks)]
        makers += [fallback.collect for fallback in fallbacks]
        names = [self.evaluate.environment, *(task.environment for task in tasks)]
        names += [fallback.environment for fallback in fallbacks]
        names += [maker.environment for maker in makers if maker is not None]
        return tuple(dict.fromkeys(filter(None, names)))

    @property
    def _large_options(self) -> Iterator[str]:
        """Names of environments' options that a file alone may not ask for."""
        tasks = list((self.data.tasks or {}).values())
        makers = [self.data.collect, *(task.collect for task in tasks)]
        players: list[Any] = [self.evaluate, *tasks, *filter(None, makers)]
        for options in filter(None, (player.environment_options for player in players)):
            if beyond_bounds(options):
                yield options_name(options)

    @property
    def part_names(self) -> tuple[str, ...]:
        """The parts that it names from elsewhere, each once."""
        strategies = list(strategies_in(self.selection.model_dump()))
        for task in (self.data.tasks or {}).values():
            strategies += strategies_in(task.selection.model_dump() if task.selection else {})
        stored = [self.data, *(self.data.tasks or {}).values()]
        makers = [each for data in stored for each in (data, data.fallback) if each is not None]
        readers = [maker.reader for maker in makers]
        listed = (*readers, *self.train.trackers, *self.train.callbacks, *self._large_options)
        law = self.loader.goals and self.loader.goals.kind
        names = (self.model.kind, law, *strategies, *self.environments, *listed)
        return tuple(dict.fromkeys(filter(is_part, names)))

    @property
    def trusted(self) -> dict[str, str]:
        """Names and digests of when a user typed them; without a digest where nobody has.

        Names that are typed for this recipe itself are not among them.
        """
        return {name: self.parts[name] for name in self.part_names if name in self.parts}

    @property
    def plays(self) -> bool:
        """True if it is resolved and has an environment to evaluate in, and episodes to play."""
        names = [task.environment for task in (self.data.tasks or {}).values()]
        return self.evaluate.episodes > 0 and any([self.evaluate.environment, *names])

    @property
    def ranks_by_loss(self) -> bool:
        """True if a resolved recipe's best checkpoint is that of the lowest validation/loss."""
        by_loss = self.train.best == "auto" and self.data.held_out is not None and not self.plays
        return by_loss or self.train.best == "validation/loss"

    def evaluates_at(self, step: int) -> bool:
        """Return true if the policy is played after `step`."""
        every, last = self.train.evaluate_every, step == self.train.steps
        return self.plays and (last or (every is not None and step % every == 0))

    @property
    def data_paths(self) -> list[str | None]:
        """The whole paths of its datasets."""
        data = whole_paths(self.data.model_dump(mode="json"))
        return [data["path"], *(task["path"] for task in (data["tasks"] or {}).values())]

    @property
    def data_key(self) -> str:
        """The options that its dataset depends on; recipes of one key may share the dataset."""
        of_tasks = f" {self.loader.returns_scale}" if self.data.tasks else ""
        return json.dumps(whole_paths(self.data.model_dump(mode="json"))) + of_tasks

    @classmethod
    def parse(cls, value: Mapping[str, Any], *, where: str = "recipe") -> Recipe:
        """Build a recipe from the user's nested mappings, who types the names of parts in them.

        `where` is what errors (``RECIPE``) name.
        """
        return cls.read(value, where=where).typing(find_part_names(value))

    @classmethod
    def read(cls, value: Mapping[str, Any], *, where: str = "recipe") -> Recipe:
        """Build a recipe from nested mappings of a file, whose names of parts nobody has typed."""
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            problems = error.errors(include_url=False)
            text = "; ".join(option_text(cls, problem) for problem in problems)
            raise InputError("RECIPE", text, where=where) from None

    def to_dict(self) -> dict[str, Any]:
        """Return the recipe as nested dicts and lists, every option present."""
        return self.model_dump(mode="json")

    def to_yaml(self) -> str:
        """Return the recipe as YAML that `load_recipe` reads back equal."""
        return dump_yaml(self.to_dict())

    def typing(self, names: set[str]) -> Recipe:
        """Return a copy for which the user has typed names: `load_recipe` admits them."""
        digests = {name: digest for name, digest in self.parts.items() if name not in names}
        has_typed = len(digests) < len(self.parts)
        return self.model_copy(update={"parts": digests}) if has_typed else self

    def replace(self, overrides: Overrides) -> Recipe:
        """Return a copy with options changed by the user, given as for `load_recipe`.

        ``recipe.replace({"train.steps": 10})`` and ``recipe.replace("train.steps=10")`` are alike.
        """
        typed = find_part_names(apply_overrides({}, overrides)) | {*self.part_names} - {*self.parts}
        changed = Recipe.read(apply_overrides(self.to_dict(), overrides), where=self.name)
        return changed.typing(typed)

    def settle(self, changes: Mapping[str, Any]) -> Recipe:
        """Return a copy with dotted options as data or a run say; no other gives way to them."""
        options = self.to_dict()
        for key, value in changes.items():
            *sections, name = key.split(".")
            reduce(getitem, sections, options)[name] = to_plain(value)
        return Recipe.read(options, where=self.name)


def whole_paths(data: dict[str, Any]) -> dict[str, Any]:
    """Make the paths of datasets, and of sources that are there, whole in options ``data``."""
    for section in (data, *(data["tasks"] or {}).values()):
        if section["path"] is not None and not is_remote(section["path"]):
            section["path"] = os.path.abspath(section["path"])
        if section["source"] is not None and os.path.exists(section["source"]):  # no d4rl:NAME
            section["source"] = os.path.abspath(section["source"])
    return data


def recipe_option(name: str) -> str | None:
    """Return the option of a recipe that a function's unknown argument was probably meant to be."""
    return guess_option(Recipe, [name])


@check_arguments(recipe_option)
def load_recipe(recipe: Recipe | str | os.PathLike[str], overrides: Overrides = ()) -> Recipe:
    """Read a recipe by name or from a file, apply its bases, then overrides.

    Parameters
    ----------
    recipe
        Name of a recipe that comes with gear-offline, a YAML file, a run directory (its
        ``recipe.yaml``), or a recipe that was read before.
    overrides
        Dotted options and their values, as a mapping (``{"train.steps": 3000}``) or as the command
        line takes them (``"train.steps=3000"``, ``"evaluate.targets=[3600, 1800]"``), one or many.

    Raises
    ------
    InputError
        ``RECIPE``, naming the file and every option that is wrong.

    Examples
    --------
    >>> import gear_offline as go
    >>> recipe = go.load_recipe("smoke", {"train.steps": 100})
    >>> recipe
    Recipe('smoke': data/smoke-pendulum, 100 steps of 16 x 5, uniform_steps, ...)
    >>> recipe.name, recipe.train.steps, recipe.loader.batch_size
    ('smoke', 100, 16)
    >>> recipe.replace({"optimizer.learning_rate": 0.01}).optimizer.learning_rate
    0.01
    >>> go.load_recipe("smoke", "train.stepz=1")
    Traceback (most recent call last):
        ...
    gear_offline.errors.InputError: [RECIPE] unknown option 'train.stepz', did you mean ...
    """
    if isinstance(recipe, Recipe):
        loaded = recipe.replace(overrides) if overrides else recipe
    else:
        name = recipe if isinstance(recipe, str) else Path(recipe)
        loaded = read_recipe(find_recipe(name), overrides, where=str(name))
    if not (names := loaded.part_names):
        return loaded
    readmit(loaded.trusted)
    new_digests = admit(name for name in names if name not in loaded.parts)
    return loaded.model_copy(update={"parts": loaded.trusted | new_digests})


def read_recipe(path: Path, overrides: Overrides = (), *, where: str = "") -> Recipe:
    """Read a recipe file; the parts that it names are not admitted."""
    options, typed = with_bases(path)
    options = {"name": path.stem, "description": ""} | options
    loaded = Recipe.read(apply_overrides(options, overrides), where=where or str(path))
    return loaded.typing(typed | find_part_names(apply_overrides({}, overrides)))


def strategies_in(options: Any) -> Iterator[str]:
    """Yield the strategies in a selection, those of its parts too."""
    if isinstance(options, Mapping):
        name = part_name(options.get("strategy"))
        if isinstance(name, str):
            yield name
        options = list(options.values())
    if isinstance(options, (list, tuple)):
        for option in options:
            yield from strategies_in(option)
