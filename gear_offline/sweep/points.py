"""The points of a sweep: one recipe a run, what they differ in, and how their runs are called."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gear_offline.config.recipe import Recipe, load_recipe
from gear_offline.config.strict_yaml import dump_yaml, parse_yaml, whole_number
from gear_offline.dataset.shard import digest
from gear_offline.errors import InputError

__all__ = ["SweepPoint", "grid", "name_points", "parse_points"]

MOST_POINTS = 10_000
MOST_SEEDS = 10_000
NAME_CHARS = 80
_UNSAFE = re.compile(r"[^A-Za-z0-9._=,+-]+")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=,+-]{0,99}")


@dataclass(frozen=True, kw_only=True)
class SweepPoint:
    """One run of a sweep.

    Attributes
    ----------
    name
        Of its run directory.
    recipe
        What it trains.
    settings
        Dotted option and value of what differs between the points of the sweep, without the seed.
    """

    name: str
    recipe: Recipe
    settings: Mapping[str, Any]

    @property
    def label(self) -> str:
        """Say the settings, the same for all seeds; the recipe's name if there are none."""
        return ", ".join(f"{key}={_text(value)}" for key, value in self.settings.items()) or (
            self.recipe.name
        )


def plain_label(label: str) -> str:
    """Return a point's label with its options named without their sections."""
    pairs = [part.partition("=") for part in label.split(", ")]
    return ", ".join(
        f"{key.rpartition('.')[2]}={value}" if sign else key for key, sign, value in pairs
    )


def parse_seeds(text: str | None) -> list[int] | None:
    """Return the seeds of ``"8"`` (0 to 7) or ``"3,5,7"``; ``None`` stays ``None``."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    numbers = [whole_number(parse_yaml(part, where="--seeds")) for part in parts if part]
    if not numbers or not all(type(n) is int and 0 <= n < 1 << 63 for n in numbers):
        raise InputError(
            "USAGE", f"--seeds {text!r} names no seeds", remedy="write it like 8, or like 3,5,7"
        )
    if len(parts) == 1:
        if not 1 <= numbers[0] <= MOST_SEEDS:
            raise InputError(
                "USAGE",
                f"--seeds {text!r} is not a number of seeds from 1 to {MOST_SEEDS:,}",
                remedy="a single seed is written with a comma: 12345,",
            )
        return list(range(numbers[0]))
    if len(set(numbers)) < len(numbers):
        raise InputError("USAGE", f"--seeds {text!r} names a seed twice", remedy="name each once")
    return list(numbers)


def parse_points(
    recipe: str | Path, overrides: Sequence[str] = (), *, seeds: Sequence[int] | None = None
) -> list[Recipe]:
    """Return the recipe of every point of a grid: the product of all lists, and of the seeds.

    Parameters
    ----------
    recipe
        As `gear_offline.config.recipe.load_recipe`.
    overrides
        ``key=value``, or ``key=a,b,c`` for several values; commas within brackets, braces or
        quotes do not count.
    seeds
        By default the recipe's own.

    Raises
    ------
    InputError
        ``SWEEP_POINTS`` for a key or value that is named twice or too many points; ``RECIPE_*``.
    """
    axes: dict[str, list[str]] = {}
    for override in overrides:
        key, separator, text = override.partition("=")
        key = key.strip()
        if not separator or not key:
            raise InputError(
                "RECIPE",
                f"{override!r} is not an override",
                remedy="write options as key=value or key=a,b,c, e.g. model.layers=3,4",
            )
        if key in axes:
            raise _points(f"{key} is given twice", "write all its values in one list: key=a,b,c")
        axes[key] = _values(key, text)
    if seeds is not None:
        if "seed" in axes:
            raise _points("seeds are given by --seeds and by seed=", "keep one of them")
        axes["seed"] = [str(seed) for seed in seeds]
    count = 1
    for values in axes.values():
        count *= len(values)
    if count > MOST_POINTS:
        raise _points(f"{count:,} points", f"at most {MOST_POINTS:,} fit one sweep")
    return [
        load_recipe(recipe, [f"{k}={v}" for k, v in zip(axes, chosen, strict=True)])
        for chosen in itertools.product(*axes.values())
    ]


def grid(
    recipe: Recipe, axes: Mapping[str, Sequence[Any]], seeds: Sequence[int] | None = None
) -> list[Recipe]:
    """Return the recipes of a grid: the product of all options' values, and of the seeds.

    Parameters
    ----------
    recipe
        What the points have in common.
    axes
        Dotted options, such as ``"optimizer.learning_rate"``, each with its values.
    seeds
        By default the recipe's own.
    """
    axes = {**axes, **({} if seeds is None else {"seed": seeds})}
    return [
        recipe.replace(**{key.replace(".", "__"): v for key, v in zip(axes, chosen, strict=True)})
        for chosen in itertools.product(*axes.values())
    ]


def name_points(
    recipes: Sequence[Recipe],
    names: Sequence[str] | None = None,
    *,
    options: Sequence[str] = (),
) -> tuple[SweepPoint, ...]:
    """Return the points of `recipes`, named by what differs and the seed unless `names` are given.

    Dotted `options` name the points whether they differ or not.

    Raises
    ------
    InputError
        ``SWEEP_POINTS``: no points, two equal ones, or names that cannot be directories.
    """
    if not recipes:
        raise _points("no points", "give at least one recipe")
    leaves = [flat(recipe.to_dict()) for recipe in recipes]
    keys = list(dict.fromkeys(key for row in leaves for key in row))
    first = leaves[0]
    differ = [*options] + [
        key
        for key in keys
        if key not in ("seed", "description", *options)
        and any(row.get(key) != first.get(key) for row in leaves)
    ]
    settings = [{key: row.get(key) for key in differ} for row in leaves]
    if names is None:
        names = [_name(row, recipe.seed) for row, recipe in zip(settings, recipes, strict=True)]
        said = [repr((row, recipe.seed)) for row, recipe in zip(settings, recipes, strict=True)]
        twice = next((n for n, text in enumerate(said) if text in said[:n]), None)
        if twice is not None:
            raise _points(f"two points are the same: {names[twice]}", "give each another seed")
    if len(names) != len(recipes):
        raise _points(f"{len(names)} names for {len(recipes)} points", "give one name each")
    for number, name in enumerate(names):
        if not _NAME.fullmatch(name):
            raise _points(
                f"{name!r} cannot be the name of a run", "use letters, digits and . _ = , + -"
            )
        if name in names[:number]:
            raise _points(f"two runs are called {name}", "give each a name of its own")
    return tuple(
        SweepPoint(name=name, recipe=recipe, settings=row)
        for name, recipe, row in zip(names, recipes, settings, strict=True)
    )


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as dotted keys and values."""
    if not isinstance(value, dict) or not value:
        return {prefix: value}
    found: dict[str, Any] = {}
    for key, item in value.items():
        found.update(flat(item, f"{prefix}.{key}" if prefix else str(key)))
    return found


def _values(key: str, text: str) -> list[str]:
    """Return the values of ``a,b,c``; commas inside brackets and quotes belong to a value."""
    parts, depth, quote = [""], 0, ""
    for sign in text:
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "\"'":
            quote = sign
        elif sign in "[{":
            depth += 1
        elif sign in "]}":
            depth -= 1
        if sign == "," and not quote and depth == 0:
            parts.append("")
        else:
            parts[-1] += sign
    if len(parts) > 1 and not all(part.strip() for part in parts):
        raise _points(f"{key}={text} has an empty value", "write null for no value")
    seen: list[Any] = []
    for part in parts:
        value = parse_yaml(part, where=f"override {key}")
        if any(value == other and type(value) is type(other) for other in seen):
            raise _points(f"{key} has the value {part.strip()} twice", "name each value once")
        seen.append(value)
    return parts


def _name(settings: Mapping[str, Any], seed: int) -> str:
    ends = [key.rpartition(".")[2] for key in settings]
    parts = []
    for key, end in zip(settings, ends, strict=True):
        called = end if ends.count(end) == 1 else key
        parts.append(f"{called}={_text(settings[key])}")
    whole = ",".join(parts)
    safe = _UNSAFE.sub("_", whole)
    if safe != whole or len(safe) > NAME_CHARS:  # two of them may look alike now
        safe = f"{safe[: NAME_CHARS - 9].rstrip('_')}-{digest(whole.encode())[:8]}"
    return f"{safe},s{seed}" if safe else f"s{seed}"


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return dump_yaml(value).strip().removesuffix("...").strip()


def _points(what: str, remedy: str) -> InputError:
    return InputError("SWEEP_POINTS", what, remedy=remedy)
