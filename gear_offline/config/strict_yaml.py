"""YAML for people: the JSON-like part of YAML 1.2, and a clear refusal of everything else.

PyYAML follows YAML 1.1, where ``1e-4`` is a string, ``no`` is false and ``1:30`` is ninety.  Here
scalars follow the YAML 1.2 core schema.  Repeated keys, aliases and anchors (whose expansion can
eat all memory), tags, deep nesting and large files are refused.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from gear_offline.errors import InputError

MAX_BYTES = 256 << 10
MAX_DEPTH = 16
_SEQ = "tag:yaml.org,2002:seq"


class _Loader(yaml.SafeLoader):
    """`yaml.SafeLoader` with YAML 1.2 scalars and no aliases, tags or repeated keys."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise yaml.MarkedYAMLError(
                problem="anchors and aliases are not allowed", problem_mark=event.start_mark
            )
        if getattr(event, "tag", None) is not None:
            raise yaml.MarkedYAMLError(
                problem=f"the tag {event.tag!r} is not allowed", problem_mark=event.start_mark
            )
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise yaml.MarkedYAMLError(
                problem=f"more than {MAX_DEPTH} nested levels", problem_mark=event.start_mark
            )
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: yaml.Node, deep: bool = False) -> dict[Any, Any]:
        assert isinstance(node, yaml.MappingNode), "the constructor gives mapping nodes only"
        found: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key!r} is not a name", problem_mark=key_node.start_mark
                )
            if key in found:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key!r} is given twice", problem_mark=key_node.start_mark
                )
            found[key] = self.construct_object(value_node, deep=deep)
        return found


class _Dumper(yaml.SafeDumper):
    """`yaml.SafeDumper` that quotes exactly what `_Loader` would not read back as a string."""

    def ignore_aliases(self, data: Any) -> bool:
        return True  # the same object twice is written twice: aliases are refused on reading


_Dumper.add_representer(
    list, lambda dumper, data: dumper.represent_sequence(_SEQ, data, flow_style=True)
)
_FLOAT = r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
for _class in (_Loader, _Dumper):
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


_GROUPED = re.compile(r"[-+]?[0-9]+(?:_[0-9]+)+")
_EXACT = 1 << 53  # every whole number up to here is a float64


def whole_number(value: Any) -> Any:
    """Return the integer that ``1e5`` or ``100_000`` stands for; anything else as it is.

    In YAML 1.2 the one is a float and the other text, so whoever wants an integer asks here.
    """
    if type(value) is float and value.is_integer() and abs(value) <= _EXACT:
        return int(value)
    if isinstance(value, str) and _GROUPED.fullmatch(value):
        return int(value)
    return value


def parse_yaml(text: str, *, where: str) -> Any:
    """Return the one YAML document in `text`.

    Parameters
    ----------
    text
        At most 256 KiB of YAML.
    where
        File name or option, for the message.

    Raises
    ------
    InputError
        ``RECIPE_SYNTAX`` for anything that is not plain, single-document YAML.
    """
    if len(text) > MAX_BYTES:
        raise InputError(
            "RECIPE_SYNTAX", f"larger than {MAX_BYTES >> 10} KiB", where=where, remedy="shorten it"
        )
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{where} line {mark.line + 1}, column {mark.column + 1}" if mark else where
        what = ", ".join(part for part in (error.context, error.problem) if part) or "not YAML"
        raise _syntax(what, place) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise _syntax(" ".join(str(error).split())[:200] or "not YAML", where) from error


def _syntax(what: str, where: str) -> InputError:
    return InputError(
        "RECIPE_SYNTAX", what, where=where, remedy="write plain `key: value` YAML, spaces to indent"
    )


def dump_yaml(value: Any) -> str:
    """Return `value` (dicts, lists, scalars) as YAML that `parse_yaml` reads back equal."""
    return yaml.dump(
        value,
        Dumper=_Dumper,
        sort_keys=False,
        default_flow_style=False,
        width=99,
        allow_unicode=True,
    )
