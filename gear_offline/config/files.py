"""Recipe files: the ones that come with gear-offline, inheritance by ``base:``, overrides."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gear_offline.config.problems import nearest
from gear_offline.config.strict_yaml import MAX_BYTES, parse_yaml
from gear_offline.core.files import check_new_file, write_file, writing
from gear_offline.errors import InputError

RECIPES = Path(__file__).parents[1] / "recipes"
MAX_BASES = 8


@dataclass(frozen=True, kw_only=True)
class RecipeEntry:
    """One recipe that comes with gear-offline."""

    name: str
    description: str
    base: str | None  # the recipe that it changes
    path: Path


def recipe_paths() -> dict[str, Path]:
    """Return the recipes that come with gear-offline: name to file, sorted by name."""
    return {path.stem: path for path in sorted(RECIPES.rglob("*.yaml"))}


def list_recipes() -> list[RecipeEntry]:
    """Return every recipe that comes with gear-offline, sorted by name."""
    contents = [(name, path, _read(path)) for name, path in recipe_paths().items()]
    return [
        RecipeEntry(
            name=name,
            description=str(content.get("description", "")),
            base=content.get("base"),
            path=path,
        )
        for name, path, content in contents
    ]


def copy_recipe(name: str, destination: str | Path | None = None) -> Path:
    """Copy the recipe `name` to `destination` (default: ``NAME.yaml`` here) and return its path.

    The copy is named after its file, so that its runs get a directory of their own.  An existing
    file is not replaced (``OUTPUT_EXISTS``).
    """
    source = find_recipe(name)
    target = Path(destination) if destination is not None else Path(f"{source.stem}.yaml")
    if target.is_dir():
        target = target / f"{source.stem}.yaml"
    check_new_file(target)
    text = re.sub(r"(?m)^name: .*$", f"name: {target.stem}", source.read_text("utf-8"), count=1)
    with writing(target):
        write_file(target, text.encode())
    return target


def read_merged(
    name_or_path: str | Path, overrides: str | Sequence[str] | Mapping[str, Any] = ()
) -> dict[str, Any]:
    """Return the options of a recipe, with those of its bases below and `overrides` on top."""
    path = find_recipe(name_or_path)
    chain: list[dict[str, Any]] = []
    seen: list[Path] = []
    while True:
        if path.resolve() in seen or len(chain) == MAX_BASES:
            names = " -> ".join(map(str, [*seen, path]))
            raise InputError(
                "RECIPE",
                f"bases go round or too deep: {names}",
                where=str(name_or_path),
                remedy=f"shorten the chain: at most {MAX_BASES} files, each once",
            )
        seen.append(path.resolve())
        content = _read(path)
        base = content.pop("base", None)
        chain.append(content)
        if base is None:
            break
        if not isinstance(base, str):
            raise InputError("RECIPE", f"base must be text, got {base!r}", where=str(path))
        path = find_recipe(base, relative_to=path)
    chain[0].setdefault("name", seen[0].stem)
    chain[0].setdefault("description", "")  # a base's text describes the base
    merged: dict[str, Any] = {}
    for content in reversed(chain):
        merged = _merge(merged, _flat(content))
    return apply_overrides(merged, overrides)


def apply_overrides(
    options: dict[str, Any], overrides: str | Sequence[str] | Mapping[str, Any]
) -> dict[str, Any]:
    """Return nested `options` with dotted ones set: ``{"a.b": 1}``, or ``"a.b=1"``, one or many."""
    options = _flat(options)
    # another strategy drops the options of the one before, so it comes first
    pairs = sorted(_pairs(overrides), key=lambda pair: pair[0] != ["selection", "strategy"])
    for path, value in pairs:
        if path[:2] == ["selection", "options"]:
            del path[1]
            if len(path) == 1:
                strategy = options.get("selection", {}).get("strategy", "uniform_steps")
                value = {**value, "strategy": strategy} if isinstance(value, dict) else value
        for part in reversed(path):
            value = {part: value}
        options = _merge(options, _flat(value))
    return options


def find_recipe(name_or_path: str | Path, *, relative_to: Path | None = None) -> Path:
    """Return the file of a recipe given by name, file or run directory."""
    text, shipped = str(name_or_path), recipe_paths()
    is_path = isinstance(name_or_path, Path) or os.sep in text or text.endswith((".yaml", ".yml"))
    path = relative_to.parent / text if relative_to is not None and is_path else Path(text)
    if (path / "recipe.yaml").is_file():
        return path / "recipe.yaml"
    if path.suffix in (".yaml", ".yml") and path.is_file():
        return path
    if not is_path and text in shipped:
        return shipped[text]
    train = "gear-offline train paper data.path="
    if (path / "manifest.json").is_file():
        raise InputError("RECIPE", f"{text} is a dataset, not a recipe", remedy=f"{train}{text}")
    if path.is_file():
        remedy = f"gear-offline convert {text} data/{path.stem}, then {train}data/{path.stem}"
        if path.suffix not in (".hdf5", ".h5"):
            remedy = f"a recipe's name ends with .yaml; if it is data: {remedy}"
        raise InputError("RECIPE", f"{text} is not a recipe", remedy=remedy)
    guess = nearest(path.stem, list(shipped))
    hint = f"did you mean {guess!r}? " if guess else ""
    raise InputError(
        "RECIPE",
        f"no recipe {text!r}" + (" and no run there" if path.is_dir() else ""),
        where=str(relative_to or ""),
        remedy=f"{hint}`gear-offline recipes ls` lists them",
    )


def _read(path: Path) -> dict[str, Any]:
    """Return the mapping in a recipe file, its base not yet applied."""
    try:
        with open(path, "rb") as file:
            text = file.read(MAX_BYTES + 1).decode("utf-8")
    except OSError as error:
        raise InputError("RECIPE", f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError:
        raise InputError("RECIPE", "not UTF-8 text", str(path), "save it as UTF-8") from None
    content = parse_yaml(text, where=str(path))
    if not isinstance(content, dict):
        remedy = "`gear-offline recipes cp paper` gives one to start from"
        raise InputError("RECIPE", "a recipe is `key: value` lines", str(path), remedy)
    return content


def _pairs(
    overrides: str | Sequence[str] | Mapping[str, Any],
) -> Iterator[tuple[list[str], Any]]:
    """Yield the path and the value of each override."""
    if isinstance(overrides, Mapping):
        pairs = [(key, _plain(value)) for key, value in overrides.items()]
    else:
        pairs = []
        for text in [overrides] if isinstance(overrides, str) else overrides:
            key, equals, value = text.partition("=")
            if not equals or not key.strip():
                remedy = "write options as key=value, e.g. train.steps=3000"
                raise InputError("RECIPE", f"{text!r} is not an override", remedy=remedy)
            pairs.append((key.strip(), parse_yaml(value, where=f"override {key.strip()}")))
    for key, value in pairs:
        if not all(path := key.split(".")):
            raise InputError("RECIPE", f"{key!r} is not an option", remedy="e.g. train.steps")
        yield path, value


def _plain(value: Any) -> Any:
    """Return a value of Python as YAML would give it: NumPy's numbers and arrays, paths."""
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value.tolist() if hasattr(value, "tolist") else value


def _flat(content: dict[str, Any]) -> dict[str, Any]:
    """Return `content` with a selection's options next to its strategy, so that they merge."""
    section = content.get("selection")
    if not isinstance(section, dict) or not isinstance(section.get("options", {}), dict):
        return content
    rest = {key: value for key, value in section.items() if key != "options"}
    return {**content, "selection": {**section.get("options", {}), **rest}}


def _merge(below: Any, top: Any) -> dict[str, Any]:
    """Return `below` with the options of `top` laid over it, section by section.

    Options of a strategy mean nothing to another one: they go when another is named.
    """
    merged = dict(below)
    for key, value in top.items():
        under: Any = merged.get(key)
        sections = isinstance(under, dict) and isinstance(value, dict)
        if sections and key == "selection" and "strategy" in value:
            sections = value["strategy"] == under.get("strategy")
        merged[key] = _merge(under, value) if sections else value
    return merged
