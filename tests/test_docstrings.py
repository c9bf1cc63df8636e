"""Docstrings of what users call: they exist, and their parameters are those of the signatures."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Iterator
from importlib import import_module

import pytest

from gear_offline.errors import GearError
from tests.docs_support import PAGES, blocks
from tests.reference import names_of, reference

SECTION = re.compile(r"^([A-Z]\w+)\n-{3,}$", re.MULTILINE)


def public() -> dict[str, object]:
    """Return what the reference shows and what the pages import: name to object."""
    found: dict[str, object] = {}
    for module in reference():
        for name, thing in names_of(module).items():
            if str(getattr(thing, "__module__", "")).startswith("gear_offline") and callable(thing):
                found[name if found.get(name, thing) is thing else f"{module}.{name}"] = thing
    codes = [b.text for p in PAGES for b in blocks(p.read_text()) if b.language == "python"]
    for node in (node for code in codes for node in ast.walk(ast.parse(code))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gear_offline"):
            for alias in node.names:
                found[alias.name] = getattr(import_module(str(node.module)), alias.name)
    return found


def sections(text: str) -> dict[str, str]:
    """Return the sections of a NumPy-style docstring."""
    parts = SECTION.split(inspect.cleandoc(text))
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def described(section: str) -> list[str]:
    """Return the names that a section describes, ``a, b`` in one line included."""
    heads = [line for line in section.splitlines() if line and not line.startswith(" ")]
    return [n.strip().lstrip("*") for head in heads for n in head.split(":")[0].split(",")]


def wanted(thing: object) -> list[str]:
    """Return the parameters of a callable, without the instance."""
    return [name for name in inspect.signature(thing).parameters if name != "self"]  # type: ignore[arg-type]


def findings(name: str, thing: object, text: str | None) -> Iterator[str]:
    """Yield what is wrong: no docstring, a parameter that does not exist, one never mentioned."""
    if not text:
        yield f"{name} has no docstring"
        return
    found = sections(text)
    told = described(found.get("Parameters", "")) + described(found.get("Attributes", ""))
    if inspect.isclass(thing):
        if dataclasses.is_dataclass(thing):
            own = vars(thing).get("__annotations__", {})
            fields = {f.name for f in dataclasses.fields(thing) if not f.name.startswith("_")}
            fields &= set(own)  # what it inherits stands with its base
            yield from (f"{name} does not describe {n}" for n in sorted(fields - set(told)))
            return
        if "__init__" not in vars(thing) or getattr(thing, "_is_protocol", False):
            return
    known = wanted(thing)
    given = described(found.get("Parameters", ""))
    yield from (f"{name} has no {n}" for n in given if n not in known)
    missing = [n for n in known if n not in told and not re.search(rf"\b{n}\b", text)]
    if len(known) > 1 or "Parameters" in found:
        yield from (f"{name} does not describe {n}" for n in missing)


def methods(kind: type) -> Iterator[tuple[str, object, str | None]]:
    """Yield the public methods and properties that a class of ours defines itself."""
    for name, value in vars(kind).items():
        if name.startswith("_"):
            continue
        if isinstance(value, property):
            yield name, value.fget, inspect.getdoc(value)
        elif isinstance(value, staticmethod | classmethod):
            yield name, getattr(kind, name), inspect.getdoc(value)
        elif inspect.isfunction(value):
            yield name, value, inspect.getdoc(value)


@pytest.mark.parametrize("name", sorted(public()))
def test_docstrings_say_what_the_signatures_say(name: str) -> None:
    thing = public()[name]
    if inspect.isclass(thing) and issubclass(thing, GearError) and thing is not GearError:
        assert inspect.getdoc(thing)
        return
    found = list(findings(name, thing, inspect.getdoc(thing)))
    if inspect.isclass(thing):
        for method, value, text in methods(thing):
            found += findings(f"{name}.{method}", value, text)
    assert found == []


def test_wrong_docstrings_are_found() -> None:
    def call(first: int, second: int) -> int:
        return first + second

    section = "Add.\n\nParameters\n----------\n{}\n    What it is.\n"
    assert list(findings("call", call, None)) == ["call has no docstring"]
    assert list(findings("call", call, section.format("first, second"))) == []
    assert list(findings("call", call, section.format("first"))) == [
        "call does not describe second"
    ]
    assert list(findings("call", call, section.format("first, second, third"))) == [
        "call has no third"
    ]
    assert list(findings("call", call, "Add `first` to the other."))
    assert len(public()) > 100
