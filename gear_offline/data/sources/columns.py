"""Columns of sources: their kinds, and their names here and in a format."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gear_offline.core.types import Array
from gear_offline.data.dataset.schema import is_column_name, is_step_shape, is_storable
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
    if not shape or dtype is None or not is_storable(dtype):
        return False
    return is_step_shape(shape[1:], dtype.itemsize)


def read_rows(column: Any, start: int, stop: int) -> Array:
    """Return rows ``[start, stop)`` of an array, or of what has a ``read`` for them."""
    return column[start:stop] if isinstance(column, np.ndarray) else column.read(start, stop)


def legal_names(names: Iterable[str]) -> dict[str, str]:
    """Return for each name the column's: ``_`` for what no column may have, a number if taken."""
    columns, used = dict[str, str](), set[str]()
    for name in sorted(names, key=lambda n: not is_column_name(n)):  # legal ones stay
        segments = (re.sub(r"[^A-Za-z0-9_.\-]", "_", segment) for segment in name.split("/"))
        legal = "/".join(re.sub(r"^[.\-]|^$", "_", segment) for segment in segments)
        legal = re.sub(r"\.\.+", ".", legal)[:MAX_NAME_CHARS].rstrip("/")
        number, unique = 2, legal
        while unique.casefold() in used:
            number, unique = number + 1, f"{legal[: MAX_NAME_CHARS - 10]}_{number}"
        used.add(unique.casefold())
        columns[name] = unique
    return columns


def suggest_columns(stored: Iterable[str], flags: Container[str]) -> str:
    """Return a ready ``--columns`` for arrays of usual names and `flags`; "" without actions."""
    names, origins = list(stored), dict[str, str]()
    for column, usual in USUAL_NAMES.items():
        fits = [n for name in usual for n in names if n.split("/")[-1].lower() == name]
        origins |= {column: fits[0]} if fits else {}
    if not {"observations", "actions"} <= origins.keys():
        return ""
    pairs = [name if name == origin else f"{name}={origin}" for name, origin in origins.items()]
    return ",".join([*pairs, *(name for name in names if name in flags)])


def split_names(text: str) -> list[str]:
    """Return the columns that ``"a + b"`` names."""
    return [name.strip().strip("/") for name in text.split("+")]


def rename_columns(stored: Iterable[str], names: Mapping[str, str]) -> set[str]:
    """Return the columns as they are called once the user's `names` are given."""
    used = {name for origin in names.values() for name in split_names(origin)}
    return {*stored} - used | {*names}


def common_columns(
    tables: Iterable[tuple[str, Kinds]],
    required: Container[str] | None = None,
    *,
    where: Path | str = "",
    remedy: str,
) -> tuple[Kinds, dict[str, str]]:
    """Return the columns that all named tables have alike, what is left out and why.

    One that is `required`, by its name up to the first ``/``, default each, is refused instead.
    """
    (first, columns), *followers = tables
    left_out: dict[str, str] = {}
    for table, kinds in followers:
        for name in {**columns, **kinds} if kinds != columns else ():
            if name in left_out or columns.get(name) == kinds.get(name):
                continue
            texts = ["{} {}".format(*k[name]) if name in k else "missing" for k in (kinds, columns)]
            left_out[name] = f"{texts[0]} in {table}, {texts[1]} in {first}"
            if required is None or name.split("/")[0] in required:
                raise misfit(f"column {name} is {left_out[name]}", where, remedy)
    return {n: columns[n] for n in columns if n not in left_out}, left_out


def some_names(names: Iterable[str], limit: int = 12) -> str:
    """Return the first names of many, for a message."""
    listed = sorted(names)
    return ", ".join(listed[:limit]) + (", ..." if len(listed) > limit else "") or "nothing"
