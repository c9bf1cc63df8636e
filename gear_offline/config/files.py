"""Recipe files: the ones that come with gear-offline, inheritance by ``base:``, overrides."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gear_offline.config.strict_yaml import MAX_BYTES, parse_yaml
from gear_offline.errors import InputError

RECIPES = Path(__file__).parents[1] / "recipes"
MAX_BASES = 8
_SELECTION = ("strategy", "options")  # keys of the section; others are the strategy's options
_REPLACED_WHOLE = ("selection.options",)  # another strategy's options mean nothing to this one


@dataclass(frozen=True, kw_only=True)
class RecipeEntry:
    """One recipe that comes with gear-offline.

    Attributes
    ----------
    name, description
        As in the file.
    base
        Recipe that it changes; None for one that stands alone.
    path
        The file.
    """

    name: str
    description: str
    base: str | None
    path: Path


def recipe_paths() -> dict[str, Path]:
    """Return the recipes that come with gear-offline: name to file, sorted by name."""
    return {path.stem: path for path in sorted(RECIPES.rglob("*.yaml"))}


def list_recipes() -> list[RecipeEntry]:
    """Return every recipe that comes with gear-offline, sorted by name."""
    return [
        RecipeEntry(
            name=name,
            description=str(read_merged(path)[0].get("description", "")),
            base=_read(path).get("base"),
            path=path,
        )
        for name, path in recipe_paths().items()
    ]


def copy_recipe(name: str, destination: str | Path | None = None) -> Path:
    """Copy the recipe `name` to `destination` (default: ``NAME.yaml`` here) and return its path.

    The copy is named after its file, so that its runs get a directory of their own.

    Raises
    ------
    InputError
        ``RECIPE_NOT_FOUND``; ``RECIPE_EXISTS`` rather than overwrite a file; ``OUTPUT_WRITE`` when
        the path leads through a file, ``RECIPE_WRITE``.
    """
    from gear_offline.core.files import check_path  # which loads NumPy: recipes are read without

    source = _find(name)
    target = Path(destination) if destination is not None else Path(f"{source.stem}.yaml")
    if target.is_dir():
        target = target / f"{source.stem}.yaml"
    check_path(target.parent, output=target)
    try:
        text = re.sub(r"(?m)^name: .*$", f"name: {target.stem}", source.read_text("utf-8"), count=1)
        with open(target, "x", encoding="utf-8") as file:
            try:
                file.write(text)
                file.flush()
            except OSError:
                target.unlink()
                raise
    except FileExistsError:
        raise InputError(
            "RECIPE_EXISTS", f"{target} exists", remedy="give another name or remove it"
        ) from None
    except OSError as error:
        raise InputError(
            "RECIPE_WRITE",
            f"cannot write {target}: {error.strerror}",
            remedy="check that the folder exists, has room, and that you may write there",
        ) from error
    return target


def read_merged(
    name_or_path: str | Path, overrides: Sequence[str] = ()
) -> tuple[dict[str, Any], str]:
    """Return the merged options of a recipe, its bases and `overrides`, and where they are from."""
    path = _find(name_or_path)
    where = str(name_or_path)
    chain: list[tuple[Path, dict[str, Any]]] = []
    while True:
        if any(os.path.samefile(path, seen) for seen, _ in chain) or len(chain) == MAX_BASES:
            names = " -> ".join([*(str(seen) for seen, _ in chain), str(path)])
            raise InputError(
                "RECIPE_BASE",
                f"bases go round or too deep: {names}",
                where=where,
                remedy=f"shorten the chain: at most {MAX_BASES} files, each once",
            )
        content = _read(path)
        base = content.pop("base", None)
        chain.append((path, content))
        if base is None:
            break
        if not isinstance(base, str):
            raise InputError("RECIPE_TYPE", f"base must be text, got {base!r}", where=str(path))
        path = _find(base, beside=path)
    merged: dict[str, Any] = {}
    chain[0][1].setdefault("name", chain[0][0].stem)
    chain[0][1].setdefault("description", "")  # what a base says is of the base
    for _, content in reversed(chain):
        merged = _merge(merged, _with_options(content))
    _drop_options(merged, overrides)
    for override in overrides:
        _apply(merged, override)
    return merged, where


def _find(name_or_path: str | Path, *, beside: Path | None = None) -> Path:
    """Return the file of a recipe given by name, file or run directory."""
    text = str(name_or_path)
    shipped = recipe_paths()
    looks_like_path = os.sep in text or text.endswith((".yaml", ".yml"))
    candidate = Path(text)
    if beside is not None and looks_like_path:
        candidate = beside.parent / text
    if (looks_like_path or isinstance(name_or_path, Path)) and candidate.is_file():
        return candidate
    if candidate.is_dir() and (candidate / "recipe.yaml").is_file():
        return candidate / "recipe.yaml"
    if not looks_like_path and text in shipped:
        return shipped[text]
    stem = Path(text).stem
    guess = difflib.get_close_matches(stem, list(shipped), n=1)
    hint = f"did you mean {guess[0]!r}? " if guess else ""
    reason = ", and no such file" if looks_like_path else ""
    if candidate.is_dir():
        reason = "; the folder of that name is no run: it has no recipe.yaml"
    elif candidate.is_file():
        reason = "; a file's name ends with .yaml"
    raise InputError(
        "RECIPE_NOT_FOUND",
        f"no recipe {text!r}{reason}",
        where=str(beside) if beside else "",
        remedy=f"{hint}`gear-offline recipes ls` lists them",
    )


def _read(path: Path) -> dict[str, Any]:
    """Return the mapping in a recipe file, its base not yet applied."""
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_BYTES + 1)
        text = raw.decode("utf-8")
    except OSError as error:
        raise InputError(
            "RECIPE_NOT_FOUND", f"cannot read {path}: {error.strerror or error}"
        ) from error
    except UnicodeDecodeError as error:
        raise InputError(
            "RECIPE_SYNTAX", "not UTF-8 text", where=str(path), remedy="save it as UTF-8"
        ) from error
    content = parse_yaml(text, where=str(path))
    if not isinstance(content, dict):
        raise InputError(
            "RECIPE_SYNTAX",
            "a recipe is a list of `key: value` lines",
            where=str(path),
            remedy="`gear-offline recipes cp paper` gives one to start from",
        )
    return content


def _with_options(content: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe file's content with what stands beside `selection.strategy` as options.

    A file that names a strategy starts without the options of its base.
    """
    section = content.get("selection")
    if not isinstance(section, dict):
        return content
    beside = {key: value for key, value in section.items() if key not in _SELECTION}
    options = section.get("options", {})
    if isinstance(options, dict) and (beside or "strategy" in section):
        rest = {key: value for key, value in section.items() if key in _SELECTION}
        return {**content, "selection": {**rest, "options": {**options, **beside}}}
    return content


def _drop_options(merged: dict[str, Any], overrides: Sequence[str]) -> None:
    """Take out the options of a strategy in whose place `overrides` name another."""
    section = merged.get("selection")
    pairs = (override.partition("=") for override in overrides)
    named = [text for key, _, text in pairs if key.strip() == "selection.strategy"]
    if named and isinstance(section, dict):
        strategy = parse_yaml(named[-1], where="override selection.strategy")
        if strategy != section.get("strategy"):
            merged["selection"] = {**section, "options": {}}


def _merge(base: Mapping[str, Any], top: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return `base` with the options of `top` laid over it, section by section."""
    merged = dict(base)
    for key, value in top.items():
        below = merged.get(key)
        dotted = prefix + key
        if isinstance(below, dict) and isinstance(value, dict) and dotted not in _REPLACED_WHOLE:
            merged[key] = _merge(below, value, f"{dotted}.")
        else:
            merged[key] = value
    return merged


def _apply(merged: dict[str, Any], override: str) -> None:
    """Set one ``dotted.key=value`` in `merged`."""
    key, separator, text = override.partition("=")
    path = key.strip().split(".")
    if path[0] == "selection" and len(path) == 2 and path[1] not in _SELECTION:
        path.insert(1, "options")
    if not separator or not all(path):
        raise InputError(
            "RECIPE_OVERRIDE",
            f"{override!r} is not an override",
            remedy="write options as key=value, e.g. train.steps=3000",
        )
    value = parse_yaml(text, where=f"override {key.strip()}")
    if path == ["selection"]:
        value = _with_options({"selection": value})["selection"]
    place = merged
    for part in path[:-1]:
        below = place.get(part)
        place[part] = dict(below) if isinstance(below, dict) else {}
        place = place[part]
    dotted, below = ".".join(path), place.get(path[-1])
    if isinstance(value, dict) and isinstance(below, dict) and dotted not in _REPLACED_WHOLE:
        value = _merge(below, value, f"{dotted}.")
    place[path[-1]] = value
