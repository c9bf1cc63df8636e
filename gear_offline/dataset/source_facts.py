"""What a source says of itself, small enough for a manifest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

MAX_FACT_CHARS = 4096
REST = "and more"  # bears the number of entries that a mapping has lost


def small_facts(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return `attributes` as JSON, shortened to `MAX_FACT_CHARS` each, and say what is lost."""
    return {str(name): _small(value) for name, value in attributes.items()}


def _small(value: Any) -> Any:
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return str(value)[:MAX_FACT_CHARS]
    plain = json.loads(text)
    if len(text) <= MAX_FACT_CHARS:
        return plain
    if isinstance(plain, dict):
        kept = dict(_fitting(plain.items()))
        return {**kept, REST: len(plain) - len(kept)}
    if isinstance(plain, list):
        items = _fitting(plain)
        return [*items, f"and {len(plain) - len(items)} more"]
    return str(plain)[:MAX_FACT_CHARS]


def _fitting(entries: Any) -> list[Any]:
    """Return the entries that have room; one that is too long does not keep out those behind it."""
    room = MAX_FACT_CHARS - 40  # for what is said of those that have none
    kept = []
    for entry in entries:
        length = len(json.dumps(entry)) + 2
        if length <= room:
            room -= length
            kept.append(entry)
    return kept


def warnings_of(attributes: Mapping[str, Any]) -> list[str]:
    """Return the warnings among a source's attributes."""
    warnings = attributes.get("warnings", [])
    return list(map(str, warnings)) if isinstance(warnings, list) else [str(warnings)]


def left_out_of(attributes: Mapping[str, Any]) -> tuple[dict[str, str], int]:
    """Return what a source says is no column, and why; and how many more there are."""
    left_out = attributes.get("left_out")
    named = dict(left_out) if isinstance(left_out, dict) else {}
    more = named.pop(REST, 0)
    return named, more if isinstance(more, int) else 0
