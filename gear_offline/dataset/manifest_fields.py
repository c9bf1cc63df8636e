"""Typed access to the parts of a manifest's JSON; anything odd raises `ValueError`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gear_offline.dataset.schema import ColumnSpec
from gear_offline.dataset.shards import (
    CODES,
    DIGEST_BYTES,
    REMEDY_DAMAGED,
    RESERVED_NAMES,
    stored_form,
)
from gear_offline.dataset.statistics import ColumnStatistics, Distribution
from gear_offline.errors import InputError

_DIGITS = 2 * DIGEST_BYTES
_HEX = re.compile(r"[0-9a-f]*")
_PARTS = ("mean", "std", "min", "max")


def fields(value: Any, keys: Sequence[str]) -> tuple[Any, ...]:
    """Return the values of exactly `keys` from a JSON object."""
    if not isinstance(value, dict) or set(value) != set(keys):
        found = sorted(value)[:20] if isinstance(value, dict) else type(value).__name__
        raise ValueError(f"expected an object with keys {sorted(keys)}, got {found}")
    return tuple(value[key] for key in keys)


def as_object(value: Any) -> dict[str, Any]:
    """Return a copy of a JSON object."""
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, got {type(value).__name__}")
    return dict(value)


def as_list(value: Any) -> list[Any]:
    """Return a JSON array."""
    if not isinstance(value, list):
        raise ValueError(f"expected an array, got {type(value).__name__}")
    return value


def as_text(value: Any) -> str:
    """Return a JSON string."""
    if not isinstance(value, str):
        raise ValueError(f"expected a string, got {type(value).__name__}")
    return value


def as_count(value: Any, *, least: int = 0) -> int:
    """Return a whole number in [least, 2^63)."""
    if type(value) is not int or not least <= value < 1 << 63:
        raise ValueError(f"expected a whole number of at least {least}, got {str(value)[:40]}")
    return value


def as_number(value: Any) -> float:
    """Return a JSON number as a float; null stands for NaN."""
    if value is None:
        return math.nan
    if type(value) not in (int, float):
        raise ValueError(f"expected a number, got {type(value).__name__}")
    return float(value)


def as_digests(value: Any, *, count: int | None = None) -> tuple[str, ...]:
    """Split joined hexadecimal digests of 32 digits each."""
    text = as_text(value)
    wrong = len(text) % _DIGITS if count is None else len(text) != count * _DIGITS
    if wrong or not _HEX.fullmatch(text):
        raise ValueError(f"not a list of digests: {text[:40]!r}")
    return tuple(text[i : i + _DIGITS] for i in range(0, len(text), _DIGITS))


def column_to_json(column: ColumnSpec) -> dict[str, Any]:
    """Describe a column and, under ``stored``, the form its tensors have in the shards."""
    dtype, shape = stored_form(column)
    return {**column.to_json(), "stored": {"dtype": CODES[dtype], "shape": list(shape)}}


def column_from_json(value: Any) -> ColumnSpec:
    """Read back what `column_to_json` wrote."""
    fields(value, ("name", "dtype", "shape", "stored"))
    try:
        column = ColumnSpec.from_json(value)
    except InputError as error:
        raise ValueError(str(error)) from error
    if column.name in RESERVED_NAMES or column_to_json(column) != value:
        raise ValueError(f"column {column.name!r} is not described as version 1 does")
    return column


def _plain(value: Any) -> Any:
    """Turn (nested lists of) floats into JSON: null stands for NaN and infinities."""
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return value if math.isfinite(value) else None


def statistics_to_json(value: ColumnStatistics) -> dict[str, Any]:
    """Describe statistics; arrays become nested lists, a scalar column's a number."""
    parts = {name: _plain(getattr(value, name).tolist()) for name in _PARTS}
    return {"count": value.count, "nonfinite": value.nonfinite, **parts}


def statistics_from_json(value: Any, column: ColumnSpec) -> ColumnStatistics:
    """Read back what `statistics_to_json` wrote for `column`."""
    shape = stored_form(column)[1]
    count, nonfinite, *parts = fields(value, ("count", "nonfinite", *_PARTS))
    arrays = []
    for part in parts:
        array = np.asarray(_numbers(part, len(shape)), np.float64)
        if array.shape != shape:
            raise ValueError(f"statistics of {column.name!r} have shape {array.shape}")
        array.setflags(write=False)
        arrays.append(array)
    mean, std, low, high = arrays
    return ColumnStatistics(
        count=as_count(count),
        nonfinite=as_count(nonfinite),
        mean=mean,
        std=std,
        min=low,
        max=high,
    )


def _numbers(value: Any, depth: int) -> Any:
    if depth == 0:
        return as_number(value)
    return [_numbers(v, depth - 1) for v in as_list(value)]


def distribution_to_json(value: Distribution) -> dict[str, Any]:
    """Describe a distribution."""
    return {
        "count": value.count,
        **{name: _plain(getattr(value, name)) for name in _PARTS},
        "histogram": {"edges": list(value.edges), "counts": list(value.counts)},
    }


def distribution_from_json(value: Any) -> Distribution:
    """Read back what `distribution_to_json` wrote."""
    count, mean, std, low, high, histogram = fields(value, ("count", *_PARTS, "histogram"))
    edges, counts = (as_list(v) for v in fields(histogram, ("edges", "counts")))
    if edges and len(edges) != len(counts) + 1:
        raise ValueError("a histogram needs one edge more than counts")
    return Distribution(
        count=as_count(count),
        mean=as_number(mean),
        std=as_number(std),
        min=as_number(low),
        max=as_number(high),
        edges=tuple(as_number(e) for e in edges),
        counts=tuple(as_count(c) for c in counts),
    )


def scores_from_json(value: Any) -> Mapping[str, Any] | None:
    """Read reference scores: name, minimum, maximum, indicative, note."""
    if value is None:
        return None
    keys = ("name", "minimum", "maximum", "indicative", "note")
    name, low, high, indicative, note = fields(value, keys)
    if type(indicative) is not bool:
        raise ValueError("indicative must be true or false")
    found = {"name": as_text(name), "minimum": as_number(low), "maximum": as_number(high)}
    return {**found, "indicative": indicative, "note": as_text(note)}


def bad_format(where: str, what: str) -> InputError:
    """Return the error ``MANIFEST_FORMAT``."""
    return InputError(
        "MANIFEST_FORMAT", f"manifest is not usable: {what}", where=where, remedy=REMEDY_DAMAGED
    )


def no_constant(text: str) -> float:
    """Refuse NaN and infinities, which are no JSON."""
    raise ValueError(f"{text} is not a JSON number")
