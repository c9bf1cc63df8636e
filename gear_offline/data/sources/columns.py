"""Columns of sources: their kinds, and their names here and in a format."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gear_offline.data.dataset.schema import is_column_name, is_step_shape
from gear_offline.data.sources.input_files import misfit

MAX_NAME_CHARS = 200
USUAL_NAMES = {  # of arrays that hold a column
    "observations": ("observations", "observation", "obs", "states", "state", "ob"),
    "actions": ("actions", "action", "acts", "act"),
    "rewards": ("rewards", "reward", "rews", "rew"),
}

Kinds = Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]  # dtype and step shape by column


def kinds_of(source: Any) -> Kinds:
    """Return dtype and step shape of the columns of a source or dataset."""
    return {column.name: (column.dtype, column.shape) for column in source.spec}


def row_kinds(columns: Mapping[str, Any]) -> Kinds:
    """Return dtype and step shape of (N, *shape) arrays, or of what has theirs."""
    return {n: (rows.dtype.newbyteorder("="), rows.shape[1:]) for n, rows in columns.items()}


def can_be_column(shape: tuple[int, ...] | None, dtype: np.dtype[Any] | None) -> bool:
    """Check that an array is one of numbers or bools, with a row for each step."""
    if not shape or dtype is None or dtype.kind not in "biufc" or dtype.char in "gG":
        return False
    return is_step_shape(shape[1:], dtype.itemsize)


def legal_names(names: Iterable[str]) -> dict[str, str]:
    """Return for each name the column's: ``_`` for what no column may have, a number if taken."""
    columns, taken = dict[str, str](), set[str]()
    for name in sorted(names, key=lambda n: not is_column_name(n)):  # legal ones stay
        parts = (re.sub(r"[^A-Za-z0-9_.\-]", "_", part) for part in name.split("/"))
        legal = "/".join(re.sub(r"^[.\-]|^$", "_", part) for part in parts)
        legal = re.sub(r"\.\.+", ".", legal)[:MAX_NAME_CHARS].rstrip("/")
        number, unique = 2, legal
        while unique.casefold() in taken:
            number, unique = number + 1, f"{legal[: MAX_NAME_CHARS - 10]}_{number}"
        taken.add(unique.casefold())
        columns[name] = unique
    return columns


def suggest_columns(stored: Iterable[str], others: Container[str]) -> str:
    """Return a ready ``--columns`` for arrays of usual names and `others`; "" without actions."""
    names, taken = list(stored), dict[str, str]()
    for column, usual in USUAL_NAMES.items():
        fits = [n for name in usual for n in names if n.split("/")[-1].lower() == name]
        taken |= {column: fits[0]} if fits else {}
    if not {"observations", "actions"} <= taken.keys():
        return ""
    pairs = [new if new == old else f"{new}={old}" for new, old in taken.items()]
    return ",".join([*pairs, *(name for name in names if name in others)])


def split_names(text: str) -> list[str]:
    """Return the columns that ``"a + b"`` names."""
    return [part.strip().strip("/") for part in text.split("+")]


def names_after(stored: Iterable[str], names: Mapping[str, str]) -> set[str]:
    """Return the columns as they are called once the user's `names` are given."""
    taken = {part for old in names.values() for part in split_names(old)}
    return {*stored} - taken | {*names}


def common_columns(
    parts: Iterable[tuple[str, Kinds]],
    needed: Container[str] | None = None,
    *,
    where: Path | str = "",
    remedy: str,
) -> tuple[Kinds, dict[str, str]]:
    """Return the columns that all named parts have alike, what is left out and why.

    One that is `needed`, by its name up to the first ``/``, default each, is refused instead.
    """
    (first, kinds), *others = parts
    left_out: dict[str, str] = {}
    for part, own in others:
        for name in {**kinds, **own} if own != kinds else ():
            if name in left_out or kinds.get(name) == own.get(name):
                continue
            new, old = ("{} {}".format(*k[name]) if name in k else "missing" for k in (own, kinds))
            left_out[name] = f"{new} in {part}, {old} in {first}"
            if needed is None or name.split("/")[0] in needed:
                raise misfit(f"column {name} is {left_out[name]}", where, remedy)
    return {name: kind for name, kind in kinds.items() if name not in left_out}, left_out


def some_names(names: Iterable[str], limit: int = 12) -> str:
    """Return the first names of many, for a message."""
    listed = sorted(names)
    return ", ".join(listed[:limit]) + (", ..." if len(listed) > limit else "") or "nothing"
