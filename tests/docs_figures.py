"""Figures of documents, held against the JSON files that the benchmarks wrote.

A figure agrees if it is the measured number rounded to the digits that are shown.
"""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

from tests.docs_support import ROOT, tables

FOLDER = ROOT / "docs" / "benchmarks"
NUMBER = re.compile(r"(?<![\w.])[-+\u2212]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?(?![\w.]*\d)")


@cache
def measured(name: str) -> Any:
    """Return the document of a benchmark."""
    return json.loads((FOLDER / f"{name}.json").read_text())


def row(name: str, /, **where: object) -> Any:
    """Return the one result of a benchmark with these values."""
    rows = [r for r in measured(name)["results"] if all(r.get(k) == v for k, v in where.items())]
    assert len(rows) == 1, (name, where, len(rows))
    return rows[0]


def agrees(shown: str, value: float) -> bool:
    """Return whether a printed number is `value`, rounded to as many digits."""
    text = shown.replace(",", "").replace("\u2212", "-")
    mantissa, _, exponent = text.partition("e")
    decimals = len(mantissa.partition(".")[2])
    unit = 10.0 ** (int(exponent or 0) - decimals)
    return abs(float(text) - value) <= unit * 0.5 * (1 + 1e-9)


def table_rows(page: str, column: str) -> list[list[str]]:
    """Return the rows of the one table of a page with a column of that name."""
    found = [t for t in tables((ROOT / page).read_text()) if column in t[0]]
    assert len(found) == 1, f"{page} has {len(found)} tables with a column {column!r}"
    return found[0][2:]


def disagreements(rows: list[list[str]], expected: list[list[float | None]]) -> list[str]:
    """Return the cells after the first whose numbers are not the expected ones, row by row.

    ``None`` stands for a number that was not measured by the benchmark.
    """
    wrong = [] if len(rows) == len(expected) else [f"{len(rows)} rows, not {len(expected)}"]
    for cells, values in zip(rows, expected, strict=False):
        shown = [text for cell in cells[1:] for text in NUMBER.findall(cell)]
        if len(shown) != len(values):
            wrong.append(f"{cells[0]}: {len(shown)} numbers, not {len(values)}")
        pairs = zip(shown, values, strict=False)
        wrong += [
            f"{cells[0]}: {text} is {value:.6g}"
            for text, value in pairs
            if value is not None and not agrees(text, value)
        ]
    return wrong
