"""YAML as recipes use it: scalars of YAML 1.2, each key once, no anchors.

PyYAML follows YAML 1.1, where ``1e-4`` is a string, ``no`` is false and ``1:30`` is ninety.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml
from pydantic import ByteSize, TypeAdapter

from gear_offline.core.files import read_regular
from gear_offline.core.text import quote
from gear_offline.errors import InputError

MAX_BYTES = 256 << 10
MOST_DEPTH = 50
_FLOAT = r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
_GROUPED = re.compile(r"[-+]?[0-9]+(?:_[0-9]+)+")


def parse_yaml(text: str, *, where: str) -> Any:
    """Return the one YAML document in `text`; `where` (a file or an option) is for the error."""
    if len(text) > MAX_BYTES:
        raise InputError("RECIPE", f"larger than {MAX_BYTES >> 10} KiB", where, "shorten it")
    try:
        _check_events(text)
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        problem, mark = f"{error.context or ''} {error.problem}", error.problem_mark
        location = f"{where} line {mark.line + 1}, column {mark.column + 1}" if mark else where
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        problem, location = " ".join(str(error).split())[:200], where
    remedy = "write plain `key: value` YAML, indented by spaces"
    raise InputError("RECIPE", problem, location, remedy)


def parse_value(key: str, text: str) -> Any:
    """Return the value that `text` gives an option; refuse to cut it at a ``#``."""
    if re.search(r"(^|\s)#", text) and text.lstrip()[:1] not in "'\"[{":
        remedy = f"write {quote(f'{key}={json.dumps(text, ensure_ascii=False)}')}"
        raise InputError("RECIPE", f"of {text!r} YAML leaves out all from # on", key, remedy)
    return parse_yaml(text, where=f"override {key}")


def read_yaml(path: Path) -> Any:
    """Return the one YAML document in a small file."""
    try:
        text = read_regular(path, most=MAX_BYTES).decode()
    except (OSError, ValueError) as error:
        problem, remedy = f"cannot be read: {error}", "give a small file of UTF-8 text"
        raise InputError("RECIPE", problem, str(path), remedy) from error
    return parse_yaml(text, where=str(path))


def dump_yaml(value: Any) -> str:
    """Return `value` (dicts, lists, scalars) as YAML that `parse_yaml` reads back equal."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=99, allow_unicode=True)


def whole_number(value: Any) -> Any:
    """Return the integer that ``1e5`` or ``100_000`` stands for; anything else as it is.

    In YAML 1.2 the one is a float and the other text, so whoever wants an integer asks here.
    """
    is_whole = type(value) is float and value.is_integer() and abs(value) <= 1 << 53  # exact
    if is_whole or (isinstance(value, str) and _GROUPED.fullmatch(value)):
        return int(value)
    return value


def byte_count(value: Any) -> Any:
    """Return the bytes of a size such as ``256MiB`` or ``2GB``; anything else as it is."""
    value = whole_number(value)
    if not isinstance(value, str):
        return value
    try:
        return int(TypeAdapter(ByteSize).validate_python(value))
    except ValueError:
        problem = f"{value!r} is not a size; write it like 256MiB, 2GB or 1048576"
        raise ValueError(problem) from None


def _check_events(text: str) -> None:
    """Refuse what fills all memory, or the stack, when it is composed."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError("anchors and aliases are not allowed")
        starts, ends = yaml.CollectionStartEvent, yaml.CollectionEndEvent
        depth += isinstance(event, starts) - isinstance(event, ends)
        if depth > MOST_DEPTH:
            raise ValueError(f"nested deeper than {MOST_DEPTH}")


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """A safe loader, which makes no objects: in C where libyaml is."""

    def construct_mapping(self, node: yaml.Node, deep: bool = False) -> dict[Any, Any]:
        assert isinstance(node, yaml.MappingNode)
        mapping: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str) or key in mapping:
                problem = "given twice" if isinstance(key, str) else "no name"
                line = key_node.start_mark.line + 1
                raise ValueError(f"line {line}: the key {key!r} is {problem}")
            mapping[key] = self.construct_object(value_node, deep=deep)
        return mapping


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(
    list,
    lambda dumper, data: dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=True),
)
for _class in (_Loader, _Dumper):  # the dumper quotes what the loader would not read as text
    _class.yaml_implicit_resolvers = {}
    for _tag, _pattern, _first in (
        ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
        ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
        ("int", r"[-+]?[0-9]+", list("-+0123456789")),
        ("float", rf"{_FLOAT}|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", list("-+.0123456789")),
    ):
        _class.add_implicit_resolver(
            f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), _first
        )
# YAML 1.2 reads 010 as ten; the 1.1 constructor would read eight.
_Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(str(node.value)))
