"""Statistics gathered while rows stream by: moments of columns, spread of episode returns.

Everything is float64 and made in one pass: sums of ``x - x0`` and of their squares.  x0 is near
the mean (the mean so far), so that a large common offset costs no digits.  Parts of a column
are merged with the formula of Chan, Golub and LeVeque (1979); the result depends on the order of
the parts only, not on who computed them.

Shape legend: N rows (steps), D elements of one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from math import nan, prod
from types import NoneType
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    PlainSerializer,
    PlainValidator,
    model_validator,
)

from gear_offline.core.types import Array, Float64Array, Int64Array

BLOCK_ELEMENTS = 1 << 16  # 512 KiB of float64: stays in a core's second-level cache
NARROW = 64  # elements of a row: below it sums are up to ten times as fast down whole columns
HISTOGRAM_BINS, MAX_BINS = 20, 1000


class Model(BaseModel):
    """A part of a manifest, checked when it is made and when it is read."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


Count = Annotated[int, Field(ge=0, lt=1 << 63)]


def _to_array(value: Any) -> Float64Array:
    """Return nested lists of numbers as a read-only array; null is NaN."""
    values = value if isinstance(value, np.ndarray) else np.array(value, object)
    if values.dtype == object and not {type(v) for v in values.flat} <= {int, float, NoneType}:
        raise ValueError("not an array of numbers")
    array = values.astype(np.float64)
    array.setflags(write=False)
    return array


def _to_lists(value: Any) -> Any:
    """Return lists for JSON; null for NaN and infinities."""
    values = np.asarray(value)
    finite = np.isfinite(values)
    return (values if finite.all() else np.where(finite, values, np.array(None))).tolist()


Values = Annotated[Any, PlainValidator(_to_array), PlainSerializer(_to_lists)]
_null_is_nan = BeforeValidator(lambda value: nan if value is None else value)
Number = Annotated[float, _null_is_nan, PlainSerializer(_to_lists)]


class ColumnStatistics(Model):
    """Summary of one column over all steps."""

    count: Count  # of steps
    nonfinite: Count  # NaN and infinite elements, which take no part in the rest
    # float64, shape of one stored step; NaN where an element has no finite value at all
    mean: Values
    # of the population (divided by the count); inexact where all values are below 1e-150: float64
    # hardly holds their squares
    std: Values
    min: Values
    max: Values


class Moments:
    """Running moments of a column whose rows have `shape`, element by element."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = tuple(shape)
        width = prod(self.shape)
        self.rows = 0
        self.counts: Int64Array = np.zeros(width, np.int64)  # (D,) finite values seen
        self.mean: Float64Array = np.zeros(width)
        self.squares: Float64Array = np.zeros(width)  # (D,) sum of (x - mean)^2
        self.low: Float64Array = np.full(width, np.inf)
        self.high: Float64Array = np.full(width, -np.inf)

    @classmethod
    def of(cls, facts: ColumnStatistics) -> Moments:
        """Return the moments of a column that is finite everywhere."""
        moments = cls(facts.mean.shape)
        moments.rows, moments.counts = facts.count, moments.counts + facts.count
        moments.squares = facts.std.ravel() ** 2 * facts.count
        values = (facts.mean, facts.min, facts.max)
        moments.mean, moments.low, moments.high = (each.flatten() for each in values)
        return moments

    def update(self, rows: Array) -> int | None:
        """Add `rows`, (N, *shape) of a real dtype; return the first that is not all finite."""
        flat = rows.reshape(len(rows), self.counts.size)
        if flat.dtype == np.bool_:
            flat = flat.view(np.uint8)
        if not len(flat):
            return None
        self.rows += len(flat)
        with np.errstate(all="ignore"):
            centre = self.mean if self.counts.any() else _rough_mean(flat)
            total, squares, low, high = _sums(flat, centre)
            counts: int | Int64Array = len(flat)
            first = None
            # NaN survives minimum and maximum: two finite results mean that all is finite.
            if not (np.isfinite(low).all() and np.isfinite(high).all()):
                finite = np.isfinite(flat)
                first = int(np.argmin(finite.all(axis=1)))
                counts = finite.sum(axis=0, dtype=np.int64)
                total, squares = _sums(np.where(finite, flat, centre), centre)[:2]
                low = np.where(finite, flat, np.inf).min(axis=0)
                high = np.where(finite, flat, -np.inf).max(axis=0)
            offset = total / np.maximum(counts, 1)
            self._merge(counts, centre + offset, squares - total * offset, low, high)
        return first

    def _merge(self, count: int | Int64Array, *moments: Float64Array) -> None:
        mean, squares, low, high = moments
        total = self.counts + count
        share = np.divide(count, total, out=np.zeros(total.shape), where=total > 0)
        delta = mean - self.mean
        self.squares += np.maximum(squares, 0) + delta * delta * (self.counts * share)
        self.mean += delta * share
        self.counts = total
        np.minimum(self.low, low, out=self.low)
        np.maximum(self.high, high, out=self.high)

    def merge(self, later: Moments) -> None:
        """Add the moments of `later` rows, which come after this one's."""
        self.rows += later.rows
        with np.errstate(all="ignore"):
            self._merge(later.counts, later.mean, later.squares, later.low, later.high)

    def result(self) -> ColumnStatistics:
        """Return the summary of everything added so far."""
        with np.errstate(all="ignore"):
            std = np.sqrt(self.squares / np.maximum(self.counts, 1))
        constant = self.low == self.high  # then exactly, whatever rounding left
        mean, std = np.where(constant, self.low, self.mean), np.where(constant, 0.0, std)
        values = (mean, std, self.low, self.high)
        shaped = (np.where(self.counts > 0, value, np.nan).reshape(self.shape) for value in values)
        nonfinite = self.rows * self.counts.size - int(self.counts.sum())
        spread = dict(zip(("mean", "std", "min", "max"), shaped, strict=True))
        return ColumnStatistics(count=self.rows, nonfinite=nonfinite, **spread)


def _rough_mean(rows: Array) -> Float64Array:
    """Return (D,) numbers near the mean of rows (N, D), zeros where there are none."""
    mean = rows[:: max(1, len(rows) // 64)].mean(axis=0, dtype=np.float64)
    return np.where(np.isfinite(mean), mean, 0.0)


def _sums(rows: Array, centre: Float64Array) -> Float64Array:
    """Return sums and squares' sums of rows (N, D) less `centre`, minima and maxima: (4, D)."""
    width = rows.shape[1]
    sums = np.array([[0.0], [0.0], [np.inf], [-np.inf]]).repeat(width, axis=1)
    step = max(1, BLOCK_ELEMENTS // width)
    for start in range(0, len(rows), step):
        block = rows[start : start + step]
        if width < NARROW:
            block = np.asfortranarray(block, np.float64)
        shifted = block - centre
        sums[0] += shifted.sum(axis=0)
        sums[1] += np.einsum("ij,ij->j", shifted, shifted)
        np.minimum(sums[2], block.min(axis=0), out=sums[2])
        np.maximum(sums[3], block.max(axis=0), out=sums[3])
    return sums


class Histogram(Model):
    """Episodes by bin; half-open bins, the last one closed."""

    edges: Annotated[list[FiniteFloat], Field(max_length=MAX_BINS + 1)]  # ascending
    counts: Annotated[list[Count], Field(max_length=MAX_BINS)]

    @model_validator(mode="after")
    def _check(self) -> Histogram:
        if len(self.edges) != (len(self.counts) + 1 if self.counts else 0):
            raise ValueError("a histogram needs one edge more than counts")
        return self


class Distribution(Model):
    """Summary and histogram of one number per episode."""

    count: Count  # episodes whose number is finite; the other fields cover these
    mean: Number  # this and the next three: NaN when `count` is 0
    std: Number
    min: Number
    max: Number
    histogram: Histogram


def distribution(values: npt.ArrayLike, *, integers: bool = False) -> Distribution:
    """Summarise (E,) numbers, e.g. episode returns or lengths; NaN and infinities are left out.

    With `integers` the edges of the histogram are integers, too.  Bins have one integer width, so
    that each holds equally many numbers; the last edge lies above the maximum.
    """
    finite = np.asarray(values, np.float64)
    finite = finite[np.isfinite(finite)]
    if not finite.size:
        none = Histogram(edges=[], counts=[])
        return Distribution(count=0, mean=nan, std=nan, min=nan, max=nan, histogram=none)
    low, high = float(finite.min()), float(finite.max())
    edges: Array = np.array([low, high])
    counts: Array = np.array([finite.size])
    with np.errstate(all="ignore"):
        mean, std = float(finite.mean()), float(finite.std())
    if integers:
        width = (int(high) - int(low)) // HISTOGRAM_BINS + 1
        edges = np.arange(int(low), int(high) + width + 1, width, dtype=np.int64)
        counts = np.histogram(finite, bins=edges)[0]
    elif low < high and np.isfinite(high - low):
        # NumPy refuses a range that spans too few floats for that many bins: then keep one bin.
        with suppress(ValueError):
            counts, edges = np.histogram(finite, bins=HISTOGRAM_BINS, range=(low, high))
    bins = Histogram(edges=list(map(float, edges)), counts=list(map(int, counts)))
    return Distribution(count=finite.size, mean=mean, std=std, min=low, max=high, histogram=bins)
