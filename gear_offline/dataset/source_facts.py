"""What a source says of itself, small enough for a manifest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

MAX_FACT_CHARS = 4096
REST = "and more"  # bears the number of entries that a mapping has lost


def small_facts(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return `attributes` as JSON of at most `MAX_FACT_CHARS` each.

    A mapping or a list that is longer loses entries and says how many; other values are cut.
    """
    return {str(name): _small(value) for name, value in attributes.items()}


def _small(value: Any) -> Any:
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return str(value)[:MAX_FACT_CHARS]
    found = json.loads(text)
    if len(text) <= MAX_FACT_CHARS:
        return found
    if isinstance(found, dict):
        kept = dict(_fitting(found.items()))
        return {**kept, REST: len(found) - len(kept)}
    if isinstance(found, list):
        items = _fitting(found)
        return [*items, f"and {len(found) - len(items)} more"]
    return str(found)[:MAX_FACT_CHARS]


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
    found = attributes.get("warnings", [])
    return list(map(str, found)) if isinstance(found, list) else [str(found)]


def left_out_of(attributes: Mapping[str, Any]) -> tuple[dict[str, str], int]:
    """Return what a source says is no column, and why; and how many more there are."""
    found = attributes.get("left_out")
    named = dict(found) if isinstance(found, dict) else {}
    more = named.pop(REST, 0)
    return named, more if isinstance(more, int) else 0
