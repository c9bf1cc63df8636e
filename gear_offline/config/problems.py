"""Turn what pydantic says about a recipe into one `InputError` with the dotted path and a way out.

Codes: ``RECIPE_UNKNOWN_KEY``, ``RECIPE_MISSING``, ``RECIPE_TYPE``, ``RECIPE_VALUE``.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from gear_offline.errors import InputError

_TYPE_NAMES = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a section of `key: value` lines",
    "model_type": "a section of `key: value` lines",
    "model_attributes_type": "a section of `key: value` lines",
}
_COUNTS = {2: "two", 3: "three", 4: "four"}
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"
DEVICE_PATTERN = r"^(auto|cpu|cuda(:[0-9]+)?)$"
_PATTERN_NAMES = {
    NAME_PATTERN: "letters, digits, '.', '_' and '-', at most 100",
    DEVICE_PATTERN: "auto, cpu, cuda or cuda:N",
}


def section_model(annotation: Any) -> type[BaseModel] | None:
    """Return the model class in a field's annotation (``X`` or ``X | None``), if there is one."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def entry_model(annotation: Any) -> type[BaseModel] | None:
    """Return the model class of the entries of a field that is a mapping or a list of sections."""
    for candidate in get_args(annotation):
        for inner in get_args(candidate):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                return inner
    return None


def dotted_fields(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield every leaf option of `model` as a dotted path, in the order of definition."""
    for name, field in model.model_fields.items():
        section = section_model(field.annotation)
        if section is None:
            yield prefix + name
        else:
            yield from dotted_fields(section, f"{prefix}{name}.")


def nearest(name: str, known: Sequence[str]) -> str | None:
    """Return the entry of `known` that `name` was probably meant to be."""
    found = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return found[0] if found else None


def _walk(
    model: type[BaseModel], path: Sequence[str | int]
) -> list[tuple[type[BaseModel], FieldInfo | None]]:
    """Return the section that each part of `path` is looked for in, and its field there.

    It ends with the first part that leads to no section.  Names of entries have no field.
    """
    found: list[tuple[type[BaseModel], FieldInfo | None]] = []
    section: type[BaseModel] | None = model
    entry: type[BaseModel] | None = None
    for part in path:
        if section is None:
            break
        if entry is not None:  # the name or place of an entry
            found.append((section, None))
            section, entry = entry, None
            continue
        field = section.model_fields.get(str(part))
        found.append((section, field))
        entry = entry_model(field.annotation) if field else None
        if entry is None:
            section = section_model(field.annotation) if field else None
    return found


def unknown_key(model: type[BaseModel], path: Sequence[str], *, where: str) -> InputError:
    """Return the error for the option `path` that `model` does not have."""
    found = _walk(model, path)  # to an unknown section, or an option taken for one
    return _unknown(model, found[-1][0], path[: len(found)], path, where)


def _unknown(
    model: type[BaseModel],
    parent: type[BaseModel],
    bad: Sequence[str],
    path: Sequence[str],
    where: str,
) -> InputError:
    """Return the error for `path`, whose first part that `parent` does not know ends `bad`."""
    prefix = "".join(f"{part}." for part in bad[:-1])
    here = list(parent.model_fields)
    everywhere = {known: known.split(".")[-1] for known in dotted_fields(model)}
    close = bad[-1] if bad[-1] in here else nearest(bad[-1], here)
    elsewhere = nearest(path[-1], list(everywhere.values()))
    if close and (len(bad) < len(path) or elsewhere != path[-1]):
        guess: str | None = prefix + close
    else:
        guess = next((known for known, leaf in everywhere.items() if leaf == elsewhere), None)
    return InputError(
        "RECIPE_UNKNOWN_KEY",
        f"unknown option {'.'.join(path)!r}",
        where=where,
        remedy=f"did you mean {guess!r}?" if guess else f"options here: {', '.join(here)}",
    )


def _wrong_count(
    model: type[BaseModel], problem: Any, problems: Sequence[Any], *, where: str
) -> InputError | None:
    """Return the error for an option of so many numbers that is no list of as many; else None."""
    kind, path = problem["type"], list(problem["loc"])
    if kind == "missing" and isinstance(path[-1], int):  # the number that would be there
        path.pop()
    elif kind not in ("tuple_type", "too_long", "too_short"):
        return None
    found = _walk(model, path)
    field = found[-1][1] if len(found) == len(path) else None
    candidates = (field.annotation, *get_args(field.annotation)) if field else ()
    kinds = next((get_args(c) for c in candidates if get_origin(c) is tuple), ())
    if field is None or not kinds or kinds[-1] is Ellipsis:  # as many as one likes
        return None
    dotted, others = ".".join(map(str, path)), len(problems)
    others -= sum(list(p["loc"][: len(path)]) == path for p in problems)
    default = field.default
    example = default if isinstance(default, tuple) else list(range(1, len(kinds) + 1))
    return InputError(
        "RECIPE_TYPE" if kind == "tuple_type" else "RECIPE_VALUE",
        f"{dotted} must be a list of {_COUNTS.get(len(kinds), len(kinds))} numbers, "
        f"got {_shown(problem['input'])}" + (f" (and {others} more)" if others else ""),
        where=where,
        remedy=f"write it like {dotted}={json.dumps(example, separators=(',', ':'))}",
    )


def _shown(value: Any) -> str:
    plain = value is None or isinstance(value, bool)  # which YAML and Python name differently
    text = json.dumps(value) if plain else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _wanted(name: str, got: Any) -> tuple[str, str]:
    """Return what a value of the wrong type should have been, and the remedy."""
    if name == "a list":
        return name, "write it in brackets: [1, 2]"
    if name == "a whole number" and type(got) is float and got.is_integer():
        return (
            f"{name}, of at most 2^53 where it is written with an exponent or a point",
            "give a smaller one, or all its digits: beyond that such a number is rounded",
        )
    return name, ""


def to_input_error(model: type[BaseModel], error: ValidationError, *, where: str) -> InputError:
    """Return one `InputError` for `error`: the worst problem, and how many more there are."""
    problems = error.errors(include_url=False)
    order = {"extra_forbidden": 0, "missing": 1, "value_error": 3}
    problem = min(problems, key=lambda p: order.get(p["type"], 2))
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    path = [str(part) for part in problem["loc"]]
    dotted = ".".join(path)
    kind, got, context = problem["type"], problem.get("input"), problem.get("ctx", {})
    if kind == "extra_forbidden":
        return unknown_key(model, path, where=where)
    if wrong_count := _wrong_count(model, problem, problems, where=where):
        return wrong_count
    if kind == "missing":
        return InputError(
            "RECIPE_MISSING",
            f"option {dotted!r} is missing{more}",
            where=where,
            remedy=f"add {dotted}",
        )
    cause = context.get("error")
    if isinstance(cause, InputError):
        return InputError(cause.code, cause.what + more, where=where, remedy=cause.remedy)
    if kind in _TYPE_NAMES:
        wanted, remedy = _wanted(_TYPE_NAMES[kind], got)
        return InputError(
            "RECIPE_TYPE",
            f"{dotted} must be {wanted}, got {_shown(got)}{more}",
            where=where,
            remedy=remedy,
        )
    if kind == "string_pattern_mismatch":
        reason = _PATTERN_NAMES[context["pattern"]]
    elif kind in ("too_long", "too_short"):
        bound = context.get("max_length", context.get("min_length"))
        reason = f"a list of {'at most' if kind == 'too_long' else 'at least'} {bound} items"
    else:
        reason = problem["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    guess = None
    if kind == "literal_error" and isinstance(got, str):
        guess = nearest(got, re.findall("'([^']*)'", str(context["expected"])))
    return InputError(
        "RECIPE_VALUE",
        f"{dotted} must be {reason}, got {_shown(got)}{more}",
        where=where,
        remedy=f"did you mean {guess!r}?" if guess else "",
    )
