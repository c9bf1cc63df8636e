"""Recipe files: the ones that come with gear-offline, bases by ``base:``, overrides."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gear_offline.config.environment_options import options_name
from gear_offline.config.problems import nearest
from gear_offline.config.sections import PlaySettings
from gear_offline.config.strict_yaml import dump_yaml, parse_value, read_yaml
from gear_offline.core.files import LOCK, check_new_file, write_file, writing
from gear_offline.core.parts import is_part, is_same, part_name
from gear_offline.core.text import quote, to_plain
from gear_offline.errors import InputError, given_path, in_home

RECIPES = Path(__file__).parents[1] / "recipes"
MAX_BASES = 8

# sections of options of one's own
OWN_OPTIONS = {"selection": "strategy", "model": "kind", "goals": "kind"}
MAKERS = ("source", "reader", "collect")
KINDS = [f"{section}.{name}" for section, name in OWN_OPTIONS.items()]

Overrides = str | Sequence[str] | Mapping[str, Any]


def recipe_paths() -> dict[str, Path]:
    """Return the recipes that come with gear-offline: name to file, sorted by name."""
    return {path.stem: path for path in sorted(RECIPES.rglob("*.yaml"))}


def recipe_descriptions() -> dict[str, str]:
    """Return the recipes that come with gear-offline: name to what it is for."""
    return {name: _read(path).get("description", "") for name, path in recipe_paths().items()}


def copy_recipe(name: str, destination: str | os.PathLike[str] = ".") -> Path:
    """Copy the recipe `name` to a file, or as ``NAME.yaml`` to a directory; return its path.

    The copy is named after its file, so that its runs get a directory of their own.  An existing
    file is not replaced (``OUTPUT_EXISTS``).
    """
    source, target = find_recipe(name), given_path(destination, "OUTPUT_WRITE", where="destination")
    if target.is_dir():
        target = target / f"{source.stem}.yaml"
    text = source.read_text("utf-8")
    if is_of_run(source):  # nobody types names by copying them
        content = _read(source)
        digests = dict.fromkeys(sorted(find_part_names(content)), "")
        text = dump_yaml(content | {"parts": digests | dict(content.get("parts") or {})})
    text = re.sub(r"(?m)^name: .*$", f"name: {target.stem}", text, count=1)
    check_new_file(target)
    with writing(target):
        write_file(target, text.encode())
    return target


def apply_overrides(options: dict[str, Any], overrides: Overrides) -> dict[str, Any]:
    """Return nested `options` with dotted ones set: ``{"a.b": 1}``, or ``"a.b=1"``, one or many."""
    merged, overlay = options, dict[str, Any]()
    # another strategy or model drops the options that there are, so it comes first
    values = _once(_pairs(overrides))
    for key, value in sorted(values.items(), key=lambda pair: pair[0] not in KINDS):
        for section in reversed(key.split(".")):
            value = {section: value}
        merged, overlay = _merge(merged, value), _merge(overlay, value)
    return _give_way(options, overlay, merged)


def with_value(overrides: Overrides, option: str, value: Any) -> Overrides:
    """Return overrides and one more, unless its value is None; it may be a class."""
    return overrides if value is None else _once((*_pairs(overrides), (option, value)))


def find_recipe(name_or_path: str | os.PathLike[str], *, relative_to: Path | None = None) -> Path:
    """Return the file of a recipe given by name, file or run directory."""
    text, shipped = in_home(str(name_or_path)), recipe_paths()
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
        problem = f"{text} is a dataset, not a recipe"
        raise InputError("RECIPE", problem, remedy=f"{train}{quote(text)}")
    if path.is_file():
        data = quote(f"data/{path.stem}")
        remedy = "a recipe's name ends with .yaml; if it is data: "
        remedy += f"gear-offline convert {quote(text)} {data}, then {train}{data}"
        raise InputError("RECIPE", f"{text} is not a recipe", remedy=remedy)
    if (path / "checkpoints").is_dir():
        raise lost_recipe(path)
    guess = nearest(path.stem, list(shipped))
    may_be_run = path.is_dir() or (is_path and not path.suffix)
    problem = f"no recipe {text!r}" + (" and no run there" if may_be_run else "")
    if path.suffix in (".yaml", ".yml"):
        problem = f"there is no file {text}"
    remedy = (f"did you mean {guess!r}? " if guess else "") + "`gear-offline recipes ls` lists them"
    raise InputError("RECIPE", problem, str(relative_to or ""), remedy)


def lost_recipe(run: Path) -> InputError:
    """Return the error of a run whose recipe.yaml is not there any more."""
    remedy = "copy it there again, or give its recipe by name: gear-offline train RECIPE --resume "
    remedy += f"--out {quote(run)}; evaluate and export-policy work without"
    return InputError("RUN_NOT_FOUND", "the run's recipe.yaml is not there", str(run), remedy)


def is_of_run(path: Path) -> bool:
    """Return true for a recipe that a run may have written, of which nobody has typed a word."""
    file = path.resolve()
    markers = ("metrics.jsonl", LOCK)
    return file.name == "recipe.yaml" or any((file.parent / name).exists() for name in markers)


def find_part_names(options: Any) -> set[str]:
    """Return the names in options that their writer types, in texts and lists of them.

    Names under ``parts`` are of those who typed them before.
    """
    if isinstance(options, Mapping):
        digests, how = options.get("parts"), options.get("environment_options")
        names = find_part_names([value for key, value in options.items() if key != "parts"])
        names |= {options_name(how)} if isinstance(how, Mapping) else set()
        return names - {*(digests if isinstance(digests, Mapping) else ())}
    if isinstance(options, (list, tuple)):
        return set[str]().union(*map(find_part_names, options))
    words: list[Any] = [options, *options.split(",")] if isinstance(options, str) else [options]
    part_names = [part_name(word.strip() if isinstance(word, str) else word) for word in words]
    return {name for name in part_names if is_part(name)}


def with_bases(path: Path, depth: int = 0) -> tuple[dict[str, Any], set[str]]:
    """Return the options in a recipe file, laid over those of its base, and the names typed there.

    Nobody has typed those of a run's recipe, nor those that it is based on.
    """
    content = _read(path)
    names = set[str]() if is_of_run(path) else find_part_names(content)
    base = content.pop("base", None)
    if base is None:
        return content, names
    if not isinstance(base, str):
        raise InputError("RECIPE", f"base must be text, got {base!r}", where=str(path))
    if depth == MAX_BASES:
        problem = f"bases go round, or deeper than {MAX_BASES} files"
        raise InputError("RECIPE", problem, str(path), "shorten the chain")
    below, more = with_bases(find_recipe(base, relative_to=path), depth + 1)
    about_base = ("name", "description")
    below = {k: v for k, v in below.items() if k not in about_base}
    options = _give_way(below, content, _merge(below, content))
    return options, names if is_of_run(path) else names | more


def _read(path: Path) -> dict[str, Any]:
    """Return the mapping in a recipe file, its base not yet applied."""
    content = read_yaml(path)
    if not isinstance(content, dict):
        remedy = "`gear-offline recipes cp paper` gives one to start from"
        raise InputError("RECIPE", "a recipe is `key: value` lines", str(path), remedy)
    return {key: _beside(value, path.absolute().parent) for key, value in content.items()}


def _beside(value: Any, folder: Path) -> Any:
    """Return options with the whole path of each FILE.py:Name that lies beside the recipe."""
    if isinstance(value, dict):
        return {key: _beside(item, folder) for key, item in value.items()}
    if isinstance(value, list):
        return [_beside(item, folder) for item in value]
    file = value.rpartition(":")[0] if is_part(value) else ""
    is_there = file.endswith(".py") and (folder / file).is_file()
    return f"{folder}{os.sep}{value}" if is_there and not os.path.isabs(file) else value


def _pairs(overrides: Overrides) -> Iterator[tuple[str, Any]]:
    """Yield the dotted option and the value of each override."""
    if isinstance(overrides, Mapping):
        for key, value in overrides.items():
            yield key, to_plain(value)
        return
    for text in [overrides] if isinstance(overrides, str) else overrides:
        key, equals, value = map(str.strip, text.partition("="))
        if not equals or not all(key.split(".")):
            remedy = "write options as key=value, e.g. train.steps=3000"
            raise InputError("RECIPE", f"{text!r} is not an override", remedy=remedy)
        yield key, parse_value(key, value)


def _once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return values by their option; refuse two of one (``USAGE``): one would not count."""
    values = dict[str, Any]()
    for option, value in pairs:
        if option in values:
            raise InputError("USAGE", f"{option} is given twice", remedy="keep one of them")
        values[option] = value
    for option, value in values.items():
        below = [name for name in values if name.startswith(f"{option}.")]
        if below and not isinstance(value, Mapping | None):  # null: without that section
            selector = OWN_OPTIONS.get(option)
            remedy = f"write {option}.{selector}={value}" if selector else "keep one of them"
            problem = f"{option}={value} and {below[0]} exclude each other"
            raise InputError("USAGE", problem, remedy=remedy)
    return values


def _merge(below: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    """Return `below` with the options of `top` laid over it, section by section.

    Another strategy or kind of model drops the options of the one before.
    """
    merged = dict(below)
    for key, value in top.items():
        under: Any = merged.get(key)
        sections = isinstance(under, dict) and isinstance(value, dict)
        if sections and (selector := OWN_OPTIONS.get(key)) in value:  # each has its own options
            default = "decision_transformer" if key == "model" else None
            sections = is_same(value[selector], under.get(selector, default))
        merged[key] = _merge(under, value) if sections else value
    return merged


def _give_way(below: dict[str, Any], top: dict[str, Any], merged: dict[str, Any]) -> dict[str, Any]:
    """Return `merged` without what belongs to the data or environment that `top` replaces.

    Who names data, or what makes them, means these: source, collect and evaluation of those below
    become their fallback.  Who names an environment gets neither options nor scores of another.
    """
    tasks = [name for name in _at(below, "data", "tasks") if _at(merged, "data", "tasks", name)]
    for keys in (("data",), *(("data", "tasks", name) for name in tasks)):
        play_keys = keys if len(keys) > 1 else ("evaluate",)
        before, given_data, now = (_at(options, *keys) for options in (below, top, merged))
        played, typed = _at(below, *play_keys), {*_at(top, *play_keys)}
        environment = _at(merged, *play_keys).get("environment")
        is_other = not is_same(environment, played.get("environment"))
        typed |= {"reference", "environment_options"} if is_other else set()
        play = dict.fromkeys(typed - _at(top, *play_keys).keys())
        data, fallback = dict[str, Any](), before.get("fallback")
        makers = {name: before.get(name) for name in MAKERS}
        is_named = given_data.get("path") and not any(given_data.get(name) for name in MAKERS)
        if any(makers.values()) and (is_named or _made_of(now) != _made_of(before)):
            facts = {name: played[name] for name in PlaySettings.model_fields if name in played}
            fallback = makers | facts
            data = dict.fromkeys(makers.keys() - given_data.keys())
            if given_data.get("source"):  # another file of that format, unless a reader is given
                data.pop("reader", None)
            play |= dict.fromkeys(facts.keys() - typed)
        if fallback and now and "fallback" not in given_data:
            data["fallback"] = {n: v for n, v in fallback.items() if n not in typed}
        for section, options in ((keys, data), (play_keys, play)):
            for key in reversed(section if options else ()):
                options = {key: options}
            merged = _merge(merged, options)
    return merged


def _made_of(data: dict[str, Any]) -> tuple[Any, Any]:
    return data.get("source"), _at(data, "collect").get("environment")


def _at(options: Any, *keys: str) -> dict[str, Any]:
    """Return a section's options, {} if it is missing."""
    for key in keys:
        options = options.get(key) if isinstance(options, dict) else None
    return options if isinstance(options, dict) else {}


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as dotted keys and values."""
    if not isinstance(value, dict) or not value:
        return {prefix: value}
    leaves: dict[str, Any] = {}
    for key, item in value.items():
        leaves.update(flat(item, f"{prefix}.{key}" if prefix else str(key)))
    return leaves
