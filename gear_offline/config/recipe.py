"""A recipe: one YAML file that says data, loader, model, optimiser, training and evaluation.

The classes are the list of all options, the text under each field is its documentation, and
docs/recipes.md shows both as tables; ``recipe.train.steps`` is the option ``train.steps``.  Every
default is the value of the Decision Transformer paper's locomotion experiments (Chen et al. 2021,
arXiv:2106.01345, and its public code).  Everything is checked when a recipe is built: whatever is
wrong becomes one `InputError` with the dotted path of the option.

`gear_offline.config.files` finds, merges and copies recipe files; `load_recipe` is the way in.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError, model_validator

from gear_offline.config.files import RecipeEntry, copy_recipe, list_recipes, read_merged
from gear_offline.config.problems import to_input_error
from gear_offline.config.sections import (
    DataSettings,
    EvaluateSettings,
    LoaderSettings,
    ModelSettings,
    Name,
    OptimizerSettings,
    Section,
    Seed,
    SelectionSettings,
    TrainSettings,
)
from gear_offline.config.strict_yaml import dump_yaml
from gear_offline.config.task_checks import check_tasks
from gear_offline.core.text import count_text
from gear_offline.errors import InputError

__all__ = [
    "Recipe",
    "RecipeEntry",
    "copy_recipe",
    "list_recipes",
    "load_recipe",
]


class Recipe(Section):
    """One training run, from data to score."""

    name: Name
    """Name of the recipe and of its run directory."""
    description: str = ""
    """One line for `recipes ls`."""
    seed: Seed = 0
    """Seed of the model's weights, of dropout and of the selection."""
    data: DataSettings = DataSettings()
    loader: LoaderSettings = LoaderSettings()
    selection: SelectionSettings = SelectionSettings()
    model: ModelSettings = ModelSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    train: TrainSettings = TrainSettings()
    evaluate: EvaluateSettings = EvaluateSettings()

    def __repr__(self) -> str:
        loader, model, tasks = self.loader, self.model, self.data.tasks
        data = f"tasks {', '.join(tasks)}" if tasks else self.data.path or "no data"
        return (
            f"Recipe({self.name!r}: {data}, {self.train.steps:,} steps of {loader.batch_size} x "
            f"{loader.context_length}, {self.selection.strategy}, {model.hidden_size} wide, "
            f"{count_text(model.layers, 'layer')}, seed {self.seed}, on {self.train.device})"
        )

    __str__ = __repr__  # all options: `to_yaml`

    @model_validator(mode="after")
    def _check_across_sections(self) -> Self:
        model, optimizer = self.model, self.optimizer
        if model.hidden_size % model.heads:
            raise InputError(
                "RECIPE_VALUE",
                f"model.hidden_size must be a multiple of model.heads ({model.heads}), "
                f"got {model.hidden_size}",
                remedy=f"try {-(-model.hidden_size // model.heads) * model.heads}",
            )
        if optimizer.warmup_steps > self.train.steps:
            raise InputError(
                "RECIPE_VALUE",
                f"optimizer.warmup_steps must not exceed train.steps ({self.train.steps}), "
                f"got {optimizer.warmup_steps}",
                remedy=f"a run of {self.train.steps} steps would never reach its learning rate: "
                f"try optimizer.warmup_steps={max(1, self.train.steps // 10)}",
            )
        if self.loader.batch_size % self.train.accumulate:
            raise InputError(
                "RECIPE_VALUE",
                f"train.accumulate must divide loader.batch_size ({self.loader.batch_size}), "
                f"got {self.train.accumulate}",
                remedy="micro-batches are equal parts of a batch",
            )
        if self.train.deterministic and self.train.compile == "on":
            raise InputError(
                "RECIPE_VALUE",
                "train.compile=on and train.deterministic exclude each other",
                remedy="compiled kernels are chosen by timing them: use train.compile=auto",
            )
        if model.max_timestep is not None and model.max_timestep < self.loader.context_length:
            raise InputError(
                "RECIPE_VALUE",
                f"model.max_timestep must be at least loader.context_length "
                f"({self.loader.context_length}), got {model.max_timestep}",
                remedy="raise it to the longest episode, or null for that of the data",
            )
        if self.evaluate.targets is not None and not self.evaluate.targets:
            raise InputError(
                "RECIPE_VALUE",
                "evaluate.targets must name at least one return, got an empty list",
                remedy="null takes targets from the data; evaluate.episodes: 0 turns it off",
            )
        if self.data.source is not None and self.data.collect is not None:
            raise InputError(
                "RECIPE_VALUE", "data.source and data.collect exclude each other", remedy="keep one"
            )
        if (self.data.source or self.data.collect) and self.data.path is None:
            raise InputError(
                "RECIPE_VALUE",
                "data.path is null, so there is no place for what data.source or data.collect give",
                remedy="set data.path to the directory that receives the shards",
            )
        check_tasks(self.data, self.evaluate)
        return self

    @classmethod
    def parse(cls, value: Mapping[str, Any], *, where: str = "recipe") -> Recipe:
        """Build a recipe from nested mappings.

        Parameters
        ----------
        value
            Options by section, as in a recipe file whose bases were applied.
        where
            What errors name.

        Raises
        ------
        InputError
            ``RECIPE_UNKNOWN_KEY``, ``RECIPE_MISSING``, ``RECIPE_TYPE`` or ``RECIPE_VALUE``.
        """
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            raise to_input_error(cls, error, where=where) from None

    def to_dict(self) -> dict[str, Any]:
        """Return the recipe as nested dicts and lists, every option present."""
        return self.model_dump(mode="json")

    def to_yaml(self) -> str:
        """Return the recipe as YAML that `load_recipe` reads back equal."""
        return dump_yaml(self.to_dict())

    def replace(self, **options: Any) -> Recipe:
        """Return a copy with options changed, dots written as two underscores.

        ``recipe.replace(train__steps=10)`` sets ``train.steps``.
        """
        changed = self.to_dict()
        for key, value in options.items():
            *sections, leaf = key.split("__")
            place = changed
            for section in sections:  # one that is not there, `parse` refuses by its name
                below = place.get(section)
                place[section] = below if isinstance(below, dict) else {}
                place = place[section]
            place[leaf] = value
        return Recipe.parse(changed)


def load_recipe(
    name_or_path: str | Path, overrides: Sequence[str] | Mapping[str, Any] = ()
) -> Recipe:
    """Read a recipe by name or from a file, apply its bases, then ``key=value`` overrides.

    Parameters
    ----------
    name_or_path
        Name of a recipe that comes with gear-offline, a YAML file, or a run directory (its
        ``recipe.yaml``).
    overrides
        Dotted options and YAML values, e.g. ``"train.steps=3000"``,
        ``"evaluate.targets=[3600, 1800]"``; or ``{"train.steps": 3000}``.

    Raises
    ------
    InputError
        ``RECIPE_*``, naming the file and the dotted option.

    Examples
    --------
    >>> import gear_offline as go
    >>> recipe = go.load_recipe("smoke", {"train.steps": 100})
    >>> recipe
    Recipe('smoke': data/smoke-pendulum, 100 steps of 16 x 5, uniform_steps, ...)
    >>> recipe.name, recipe.train.steps, recipe.loader.batch_size
    ('smoke', 100, 16)
    >>> recipe.replace(optimizer__learning_rate=0.01).optimizer.learning_rate
    0.01
    >>> go.load_recipe("smoke", ["train.stepz=1"])
    Traceback (most recent call last):
        ...
    gear_offline.errors.InputError: ...
    """
    if isinstance(overrides, Mapping):
        overrides = [_override(key, value) for key, value in overrides.items()]
    elif isinstance(overrides, str):
        overrides = [overrides]
    merged, where = read_merged(name_or_path, overrides)
    return Recipe.parse(merged, where=where)


def _override(key: str, value: Any) -> str:
    """Return ``key=value``; NumPy's numbers and arrays and paths are written as what they hold."""

    def plain(part: Any) -> Any:
        if isinstance(part, os.PathLike):
            return os.fspath(part)
        if hasattr(part, "tolist"):  # NumPy is not needed to read a recipe
            return part.tolist()
        raise InputError(
            "RECIPE_TYPE",
            f"{key} cannot be a {type(part).__name__}",
            remedy="give what a recipe can say: a number, text, true, false, null, a list",
        )

    return f"{key}={json.dumps(value, default=plain)}"
