"""Statistics gathered while rows stream by: moments of columns, spread of episode returns.

Everything is float64.  A column's moments are computed over blocks that fit the cache, and blocks
are merged with the formula of Chan, Golub and LeVeque (1979).  Within a block the sum of squared
distances from the mean comes from plain sums of squares, unless that would cancel digits: then a
second pass over the block takes the distances themselves.  So a large common offset costs no
accuracy, and parts computed by different processes merge to a result that depends on the order of
the parts only.

Shape legend: N rows (steps), D elements of one row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from gear_offline.core.text import count_text
from gear_offline.dataset.schema import Int64Array

__all__ = ["ColumnStatistics"]

Float64Array = npt.NDArray[np.float64]

BLOCK_ELEMENTS = 1 << 16  # 512 KiB of float64: stays in a core's second-level cache
TILE_ELEMENTS = 1 << 12  # widest piece of a row handled at once, so that tiles keep 16 rows
LANE_ELEMENTS = 1 << 11  # narrow rows are folded to about this width: reductions then vectorise
CANCELLATION = 1e-4  # sums of squares lose up to this share of their digits, not more
HISTOGRAM_BINS = 20
REPR_VALUES = 4  # of a column that are shown


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
    """Return numbers as one line: of many the first and the last ones."""
    return np.array2string(
        values.ravel() if values.ndim else values,
        formatter={"float_kind": "{:.4g}".format},
        threshold=REPR_VALUES,
        edgeitems=REPR_VALUES // 2,
        max_line_width=1000,
    )


class Moments:
    """Running moments of a column, element by element.

    Parameters
    ----------
    shape
        Shape of one row.
    """

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = tuple(shape)
        width = prod(self.shape)
        self.rows = 0
        self.counts: Int64Array = np.zeros(width, np.int64)  # (D,) finite values seen
        self.mean: Float64Array = np.zeros(width)
        self.squares: Float64Array = np.zeros(width)  # (D,) sum of (x - mean)^2
        self.low: Float64Array = np.full(width, np.inf)
        self.high: Float64Array = np.full(width, -np.inf)

    def update(self, rows: npt.NDArray[Any]) -> int | None:
        """Add `rows`, (N, *shape) of a real dtype.

        Returns
        -------
        int or None
            The first row that holds NaN or an infinity, ``None`` if there is none.
        """
        flat = rows.reshape(rows.shape[0], self.counts.size)
        moments = _moments
        if flat.dtype == np.bool_:
            flat, moments = flat.view(np.uint8), _moments_of_flags
        self.rows += len(flat)
        bad: list[int] = []
        with np.errstate(all="ignore"):
            for left in range(0, flat.shape[1] if len(flat) else 0, TILE_ELEMENTS):
                tile = flat[:, left : left + TILE_ELEMENTS]
                span = slice(left, left + tile.shape[1])
                mean, squares, low, high = moments(tile)
                # NaN survives minimum and maximum: two finite results mean that all is finite.
                if np.isfinite(low).all() and np.isfinite(high).all():
                    self._merge(span, len(tile), mean, squares, low, high)
                else:
                    bad.append(self._update_masked(tile, span))
        return min(bad, default=None)

    def _update_masked(self, tile: npt.NDArray[Any], span: slice) -> int:
        """Add rows of which some are not finite; returns the first such row."""
        step = max(1, BLOCK_ELEMENTS // tile.shape[1])
        first_bad: list[int] = []
        for start in range(0, len(tile), step):
            block = tile[start : start + step]
            finite = np.isfinite(block)
            if not first_bad and not finite.all():
                first_bad.append(start + int(np.argmin(finite.all(axis=1))))
            self._merge(span, *_masked(block, finite))
        return first_bad[0]

    def _merge(
        self,
        span: slice,
        count: int | Int64Array,
        mean: Float64Array,
        squares: Float64Array,
        low: Float64Array,
        high: Float64Array,
    ) -> None:
        before = self.counts[span]
        total = before + count
        share = np.divide(count, total, out=np.zeros(total.shape), where=total > 0)
        delta = mean - self.mean[span]
        self.squares[span] += squares + delta * delta * (before * share)
        self.mean[span] += delta * share
        self.counts[span] = total
        np.minimum(self.low[span], low, out=self.low[span])
        np.maximum(self.high[span], high, out=self.high[span])

    def merge(self, other: Moments) -> None:
        """Add what `other` saw; its rows come after this one's."""
        self.rows += other.rows
        with np.errstate(all="ignore"):
            self._merge(slice(None), other.counts, other.mean, other.squares, other.low, other.high)

    def result(self) -> ColumnStatistics:
        """Return the summary of everything added so far."""
        seen = self.counts > 0
        with np.errstate(all="ignore"):
            std = np.sqrt(self.squares / np.maximum(self.counts, 1))
        pick = [
            np.where(seen, values, np.nan).reshape(self.shape)
            for values in (self.mean, std, self.low, self.high)
        ]
        return ColumnStatistics(
            count=self.rows,
            nonfinite=self.rows * self.counts.size - int(self.counts.sum()),
            mean=pick[0],
            std=pick[1],
            min=pick[2],
            max=pick[3],
        )

    def to_json(self) -> dict[str, Any]:
        """Return the running state, exact; `from_json` restores it."""
        return {
            "shape": list(self.shape),
            "rows": self.rows,
            "counts": self.counts.tolist(),
            "parts": [a.tolist() for a in (self.mean, self.squares, self.low, self.high)],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Moments:
        """Restore the state that `to_json` returned."""
        found = cls(tuple(value["shape"]))
        found.rows = int(value["rows"])
        found.counts = np.asarray(value["counts"], np.int64)
        parts = [np.asarray(part, np.float64) for part in value["parts"]]
        found.mean, found.squares, found.low, found.high = parts
        return found


def _lanes(rows: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Lay several narrow rows (N, D) side by side; returns (M, fold * D) and the rows left over.

    NumPy reduces over the first axis with vector instructions along the second: eleven numbers
    wide is slow, two thousand is fast.
    """
    fold = max(1, LANE_ELEMENTS // rows.shape[1])
    whole = len(rows) // fold * fold
    if fold == 1:
        return rows, rows[whole:]
    return rows[:whole].reshape(-1, fold * rows.shape[1]), rows[whole:]


def _moments(rows: npt.NDArray[Any]) -> tuple[Float64Array, ...]:
    """Return mean, sum of squared distances from it, minimum and maximum, (D,), of rows (N, D).

    Only minimum and maximum mean anything when some element is not finite.
    """
    count, width = rows.shape
    total, raw, low, high = _sums(rows, np.zeros(width))
    mean = total / count
    squares = raw - count * mean * mean
    if not (squares >= CANCELLATION * raw).all():
        # Some element is far from zero compared with its spread: distances first, then squares.
        rest, squares, *_ = _sums(rows, mean)
        squares -= rest * rest / count  # what rounding of the mean left
    return mean, np.maximum(squares, 0.0), low, high


def _moments_of_flags(rows: npt.NDArray[Any]) -> tuple[Float64Array, ...]:
    """Return what `_moments` does, for bytes 0 and 1: counting is enough, and exact."""
    mean = np.count_nonzero(rows, axis=0) / len(rows)
    squares = len(rows) * mean * (1 - mean)
    return mean, squares, rows.min(axis=0).astype(float), rows.max(axis=0).astype(float)


def _sums(rows: npt.NDArray[Any], centre: Float64Array) -> tuple[Float64Array, ...]:
    """Return sums and sums of squares of rows (N, D) less `centre`, and minima and maxima.

    All are (D,).  Minima and maxima are those of the rows themselves.
    """
    width = rows.shape[1]
    total, squares = np.zeros(width), np.zeros(width)
    low, high = np.full(width, np.inf), np.full(width, -np.inf)
    for part in _lanes(rows):
        if not len(part):
            continue
        lanes = part.shape[1]
        step = max(1, BLOCK_ELEMENTS // lanes)
        scratch = np.empty((min(step, len(part)), lanes))
        sums = np.zeros((2, lanes))
        ends = np.stack([part[0], part[0]])
        shift = np.tile(centre, lanes // width) if centre.any() else None
        for start in range(0, len(part), step):
            block = part[start : start + step]  # stays in the cache for all that follows
            np.minimum(ends[0], np.minimum.reduce(block, axis=0), out=ends[0])
            np.maximum(ends[1], np.maximum.reduce(block, axis=0), out=ends[1])
            wide = scratch[: len(block)]
            np.copyto(wide, block)
            if shift is not None:
                wide -= shift
            sums[0] += np.add.reduce(wide, axis=0)
            sums[1] += np.einsum("ij,ij->j", wide, wide)
        total += sums[0].reshape(-1, width).sum(axis=0)
        squares += sums[1].reshape(-1, width).sum(axis=0)
        np.minimum(low, ends[0].reshape(-1, width).min(axis=0), out=low)
        np.maximum(high, ends[1].reshape(-1, width).max(axis=0), out=high)
    return total, squares, low, high


def _masked(
    block: npt.NDArray[Any], finite: npt.NDArray[np.bool_]
) -> tuple[Int64Array, Float64Array, Float64Array, Float64Array, Float64Array]:
    """Return counts, mean, squares, low, high (each (D,)) of the finite elements of a block."""
    counts = finite.sum(axis=0, dtype=np.int64)
    wide = np.where(finite, block, 0).astype(np.float64)
    mean = wide.sum(axis=0) / np.maximum(counts, 1)
    squares = (np.where(finite, wide - mean, 0.0) ** 2).sum(axis=0)
    low = np.where(finite, wide, np.inf).min(axis=0)
    high = np.where(finite, wide, -np.inf).max(axis=0)
    return counts, mean, squares, low, high


@dataclass(frozen=True, kw_only=True, repr=False)
class Distribution:
    """Summary and histogram of one number per episode.

    Attributes
    ----------
    count
        Episodes whose number is finite; the other fields cover these.
    mean, std, min, max
        float64; NaN when `count` is 0.
    edges
        Ascending histogram edges, one more than `counts`; empty when `count` is 0.
    counts
        Episodes per histogram bin, the last bin closed on both sides.
    """

    count: int
    mean: float
    std: float
    min: float
    max: float
    edges: tuple[float, ...]
    counts: tuple[int, ...]

    def __repr__(self) -> str:
        facts = [f"{name} {getattr(self, name):.4g}" for name in ("mean", "std", "min", "max")]
        facts += [count_text(len(self.counts), "bin")]
        return f"Distribution({count_text(self.count, 'episode')}, {', '.join(facts)})"


def distribution(
    values: npt.ArrayLike, *, bins: int = HISTOGRAM_BINS, whole: bool = False
) -> Distribution:
    """Summarise (E,) numbers, e.g. episode returns or lengths; NaN and infinities are left out.

    With `whole` the numbers are whole and so are the edges of the histogram: bins have one whole
    width, so that each holds equally many numbers, and the last edge lies above the maximum.
    """
    found = np.asarray(values, np.float64)
    found = found[np.isfinite(found)]
    if not found.size:
        nan = float("nan")
        return Distribution(count=0, mean=nan, std=nan, min=nan, max=nan, edges=(), counts=())
    low, high = float(found.min()), float(found.max())
    edges, counts = np.asarray([low, high]), np.asarray([found.size])
    if whole:
        width = (int(high) - int(low)) // bins + 1
        edges = np.arange(int(low), int(high) + width + 1, width, dtype=np.int64)
        counts = np.histogram(found, bins=edges)[0]
    elif low < high and np.isfinite(high - low):
        # NumPy refuses a range that spans too few floats for that many bins: then keep one bin.
        with suppress(ValueError):
            counts, edges = np.histogram(found, bins=bins, range=(low, high))
    with np.errstate(all="ignore"):
        mean, std = float(found.mean()), float(found.std())
    return Distribution(
        count=int(found.size),
        mean=mean,
        std=std,
        min=low,
        max=high,
        edges=tuple(map(float, edges)),
        counts=tuple(map(int, counts)),
    )


def histogram_edges(values: npt.NDArray[np.float64], bins: int) -> npt.NDArray[np.float64]:
    """Return the (bins + 1,) edges of a picture of finite `values` (n,), n >= 1.

    Values that are equal but for the rounding of their sums lie in the middle of a wider range:
    NumPy refuses one that spans fewer floats than there are bins.
    """
    low, high = float(values.min()), float(values.max())
    if nearly_equal(values):
        room = max(0.5, 1e-6 * abs(low))
        low, high = low - room, high + room
    return np.linspace(low, high, bins + 1)


def nearly_equal(values: npt.NDArray[np.float64]) -> bool:
    """Return whether finite `values` (n,), n >= 1, differ by no more than rounding."""
    low, high = float(values.min()), float(values.max())
    return high - low <= 1e-12 * max(abs(low), abs(high))
