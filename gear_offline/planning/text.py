"""A plan as a table for the terminal: a row for each part of the document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from gear_offline.core.text import size_text

SECONDS = ((1e-3, "us", 1e6), (1.0, "ms", 1e3), (600.0, "s", 1.0), (7200.0, "min", 1 / 60))


def print_plan(document: Mapping[str, Any]) -> None:
    """Print what `plan` predicts, with the units of people."""
    table = Table(title=f"{document['recipe']} (predicted)", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for part, values in document.items():
        if part != "recipe":
            table.add_row(part, _text(part, values))
    console = Console()
    console.print(table)
    console.print(
        "Assumed: all nodes alike, the network's full rate between any two of them, shards on "
        "each node's own storage; no evaluations, no checkpoints."
    )


def _text(name: str, value: Any) -> str:
    """Return a value in the unit that its name says."""
    if isinstance(value, Mapping):  # {"hbm": ...} has the unit of what it is called as a whole
        unit = name if any(word in name for word in ("bytes", "shares")) else ""
        parts = (f"{_label(key)} {_text(unit or key, v)}" for key, v in value.items() if v)
        return ", ".join(parts)
    if isinstance(value, str):
        return value
    if "bytes" in name:
        return size_text(int(value)) + ("/s" if "per_second" in name else "")
    if name.endswith("seconds"):
        for limit, unit, factor in SECONDS:
            if value < limit:
                return f"{value * factor:,.3g} {unit}"
        return f"{value / 3600:,.1f} h"
    if name.endswith(("share", "shares")):
        return f"{value:.2%}"
    return f"{value:,.3g}" if isinstance(value, float) and value < 1000 else f"{value:,.0f}"


def _label(name: str) -> str:
    for unit in ("_seconds", "_bytes", "_bytes_per_second", "_share"):
        name = name.removesuffix(unit)
    return name.replace("_", " ")
