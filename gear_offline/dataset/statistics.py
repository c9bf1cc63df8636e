"""Statistics gathered while rows stream by: moments of columns, spread of episode returns.

Everything is float64 and made in one pass: sums of ``x - x0`` and of their squares, where x0 is
near the mean (the mean so far), so that a large common offset costs no digits.  Parts of a column
are merged with the formula of Chan, Golub and LeVeque (1979); the result depends on the order of
the parts only, not on who computed them.

Shape legend: N rows (steps), D elements of one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import nan, prod

import numpy as np
import numpy.typing as npt

from gear_offline.core.text import count_text
from gear_offline.core.types import Array, Float64Array, Int64Array

BLOCK_ELEMENTS = 1 << 16  # 512 KiB of float64: stays in a core's second-level cache
WIDE_ROW = 1 << 11  # narrow rows are folded to about this width: reductions then vectorise
HISTOGRAM_BINS = 20


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ColumnStatistics:
    """Summary of one column over all steps.

    Attributes
    ----------
    count
        Steps the column has.
    nonfinite
        NaN and infinite elements, over all steps.  They take no part in the other fields.
    mean, std, min, max
        float64, shape of one stored step.  `std` is the population's (divided by the count, not
        by count - 1), inexact where all values are below 1e-150: float64 hardly holds their
        squares.  NaN where an element has no finite value at all.
    """

    count: int
    nonfinite: int
    mean: Float64Array
    std: Float64Array
    min: Float64Array
    max: Float64Array

    def __repr__(self) -> str:
        shape = " x ".join(map(str, self.mean.shape))
        facts = [count_text(self.count, "step") + (f" of {shape}" if shape else "")]
        if self.nonfinite:
            facts.append(f"{count_text(self.nonfinite, 'value')} NaN or infinite")
        facts += [f"{name} {_short(getattr(self, name))}" for name in ("mean", "std", "min", "max")]
        return f"ColumnStatistics({', '.join(facts)})"


def _short(values: Float64Array) -> str:
    """Return numbers as one line: of many the first two and the last two."""
    return np.array2string(
        values.ravel() if values.ndim else values,
        formatter={"float_kind": "{:.4g}".format},
        threshold=4,
        edgeitems=2,
        max_line_width=1000,
    )


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
            # NaN survives minimum and maximum: two finite results mean that all is finite.
            if np.isfinite(low).all() and np.isfinite(high).all():
                rest = total / len(flat)
                self._merge(len(flat), centre + rest, squares - total * rest, low, high)
                return None
            return self._update_masked(flat)

    def _update_masked(self, rows: Array) -> int:
        """Add rows of which some are not finite; returns the first such row."""
        step, first = max(1, BLOCK_ELEMENTS // rows.shape[1]), -1
        for start in range(0, len(rows), step):
            block = rows[start : start + step].astype(np.float64)
            finite = np.isfinite(block)
            if first < 0 and not finite.all():
                first = start + int(np.argmin(finite.all(axis=1)))
            counts = finite.sum(axis=0, dtype=np.int64)
            mean = np.where(finite, block, 0).sum(axis=0) / np.maximum(counts, 1)
            squares = (np.where(finite, block - mean, 0.0) ** 2).sum(axis=0)
            low = np.where(finite, block, np.inf).min(axis=0)
            self._merge(counts, mean, squares, low, np.where(finite, block, -np.inf).max(axis=0))
        return first

    def _merge(
        self,
        count: int | Int64Array,
        mean: Float64Array,
        squares: Float64Array,
        low: Float64Array,
        high: Float64Array,
    ) -> None:
        total = self.counts + count
        share = np.divide(count, total, out=np.zeros(total.shape), where=total > 0)
        delta = mean - self.mean
        self.squares += np.maximum(squares, 0) + delta * delta * (self.counts * share)
        self.mean += delta * share
        self.counts = total
        np.minimum(self.low, low, out=self.low)
        np.maximum(self.high, high, out=self.high)

    def merge(self, other: Moments) -> None:
        """Add what `other` saw; its rows come after this one's."""
        self.rows += other.rows
        with np.errstate(all="ignore"):
            self._merge(other.counts, other.mean, other.squares, other.low, other.high)

    def result(self) -> ColumnStatistics:
        """Return the summary of everything added so far."""
        with np.errstate(all="ignore"):
            std = np.sqrt(self.squares / np.maximum(self.counts, 1))
        constant = self.low == self.high  # then exactly, whatever rounding left
        mean, std = np.where(constant, self.low, self.mean), np.where(constant, 0.0, std)
        mean, std, low, high = (
            np.where(self.counts > 0, values, np.nan).reshape(self.shape)
            for values in (mean, std, self.low, self.high)
        )
        nonfinite = self.rows * self.counts.size - int(self.counts.sum())
        return ColumnStatistics(
            count=self.rows, nonfinite=nonfinite, mean=mean, std=std, min=low, max=high
        )


def _rough_mean(rows: Array) -> Float64Array:
    """Return (D,) numbers near the mean of rows (N, D), zeros where there are none."""
    mean = rows[:: max(1, len(rows) // 64)].mean(axis=0, dtype=np.float64)
    return np.where(np.isfinite(mean), mean, 0.0)


def _sums(rows: Array, centre: Float64Array) -> tuple[Float64Array, ...]:
    """Return sums and sums of squares of rows (N, D) less `centre`, and minima and maxima, (D,).

    Several narrow rows are laid side by side: NumPy reduces over the first axis with vector
    instructions along the second, and eleven numbers wide is slow, two thousand is fast.
    """
    width = rows.shape[1]
    fold = max(1, WIDE_ROW // width)
    whole = len(rows) // fold * fold
    total, squares = np.zeros(width), np.zeros(width)
    low, high = np.full(width, np.inf), np.full(width, -np.inf)
    for part in (rows[:whole].reshape(-1, fold * width), rows[whole:]):
        if not len(part):
            continue
        columns = part.shape[1]
        shift = np.tile(centre, columns // width)
        step = max(1, BLOCK_ELEMENTS // columns)
        scratch = np.empty((min(step, len(part)), columns))
        sums, ends = np.zeros((2, columns)), np.stack([part[0], part[0]])
        for start in range(0, len(part), step):
            block = part[start : start + step]  # stays in the cache for all that follows
            np.minimum(ends[0], block.min(axis=0), out=ends[0])
            np.maximum(ends[1], block.max(axis=0), out=ends[1])
            wide = np.subtract(block, shift, out=scratch[: len(block)])
            sums[0] += wide.sum(axis=0)
            sums[1] += np.einsum("ij,ij->j", wide, wide)
        total += sums[0].reshape(-1, width).sum(axis=0)
        squares += sums[1].reshape(-1, width).sum(axis=0)
        np.minimum(low, ends[0].reshape(-1, width).min(axis=0), out=low)
        np.maximum(high, ends[1].reshape(-1, width).max(axis=0), out=high)
    return total, squares, low, high


@dataclass(frozen=True, kw_only=True, repr=False)
class Distribution:
    """Summary and histogram of one number per episode."""

    count: int  # episodes whose number is finite; the other fields cover these
    mean: float  # this and the next three: NaN when `count` is 0
    std: float
    min: float
    max: float
    edges: tuple[float, ...]  # ascending, one more than `counts`; empty when `count` is 0
    counts: tuple[int, ...]  # episodes per bin, the last one closed on both sides

    def __repr__(self) -> str:
        facts = [f"{name} {getattr(self, name):.4g}" for name in ("mean", "std", "min", "max")]
        bins = count_text(len(self.counts), "bin")
        return f"Distribution({count_text(self.count, 'episode')}, {', '.join(facts)}, {bins})"


def distribution(
    values: npt.ArrayLike, *, bins: int = HISTOGRAM_BINS, whole: bool = False
) -> Distribution:
    """Summarise (E,) numbers, e.g. episode returns or lengths; NaN and infinities are left out.

    With `whole` the numbers are whole and so are the edges of the histogram: bins have one whole
    width, so that each holds equally many numbers, and the last edge lies above the maximum.
    """
    finite = np.asarray(values, np.float64)
    finite = finite[np.isfinite(finite)]
    if not finite.size:
        return Distribution(count=0, mean=nan, std=nan, min=nan, max=nan, edges=(), counts=())
    low, high = float(finite.min()), float(finite.max())
    edges, counts = np.asarray([low, high]), np.asarray([finite.size])
    if whole:
        width = (int(high) - int(low)) // bins + 1
        edges = np.arange(int(low), int(high) + width + 1, width, dtype=np.int64)
        counts = np.histogram(finite, bins=edges)[0]
    elif low < high and np.isfinite(high - low):
        # NumPy refuses a range that spans too few floats for that many bins: then keep one bin.
        with suppress(ValueError):
            counts, edges = np.histogram(finite, bins=bins, range=(low, high))
    with np.errstate(all="ignore"):
        mean, std = float(finite.mean()), float(finite.std())
    return Distribution(
        count=int(finite.size),
        mean=mean,
        std=std,
        min=low,
        max=high,
        edges=tuple(map(float, edges)),
        counts=tuple(map(int, counts)),
    )
