"""Streaming statistics against NumPy's float64 over the whole array."""

import math
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gear_offline.data.dataset.statistics import BLOCK_ELEMENTS, NARROW, Moments, distribution


def naive(values: npt.NDArray[Any]) -> tuple[npt.NDArray[np.float64], ...]:
    """Two passes over everything, exactly rounded sums."""
    rows = values.reshape(len(values), -1).astype(np.float64)
    mean = np.asarray([math.fsum(c) / len(c) for c in rows.T])
    squares = [math.fsum((c - m) ** 2) for c, m in zip(rows.T, mean, strict=True)]
    std = np.sqrt(np.asarray(squares) / len(rows))
    return mean, std, rows.min(axis=0), rows.max(axis=0)


def feed(values: npt.NDArray[Any], *cuts: int) -> Moments:
    """Add `values` in pieces that end at `cuts`."""
    moments = Moments(values.shape[1:])
    for part in np.split(values, sorted(cuts)):
        assert moments.update(part) is None
    return moments


def check(values: npt.NDArray[Any], moments: Moments, *, tolerance: float = 1e-12) -> None:
    found = moments.result()
    mean, std, low, high = (part.reshape(values.shape[1:]) for part in naive(values))
    assert found.count == len(values)
    assert found.nonfinite == 0
    scale = np.maximum(np.abs(low), np.abs(high)) + 1e-300
    np.testing.assert_allclose((found.mean - mean) / scale, 0, atol=tolerance)
    np.testing.assert_allclose(found.std, std, rtol=1e-9, atol=1e-13 * float(scale.max()))
    np.testing.assert_array_equal(found.min, low)
    np.testing.assert_array_equal(found.max, high)


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i1", "i4", "i8", "u1", "u2", "u8", "?"])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (11,), (2, 5)])
def test_matches_numpy(dtype: str, shape: tuple[int, ...]) -> None:
    generator = np.random.default_rng(1)
    values = (generator.uniform(0, 1, size=(3_001, *shape)) * 120).astype(dtype)
    if dtype == "?":
        values = generator.integers(0, 2, size=(3_001, *shape)).astype(bool)
    check(values, feed(values, 7, 2_500, 2_501))


@pytest.mark.parametrize("offset", [0.0, 1e3, 1e9, -1e12])
@pytest.mark.parametrize("width", [1, 11, NARROW - 1, NARROW + 3])
def test_blocks_and_large_offsets_cost_no_accuracy(width: int, offset: float) -> None:
    rows = min(3 * BLOCK_ELEMENTS // width + 5, 40_000)
    values = np.random.default_rng(2).normal(size=(rows, width)) + offset
    values[rows // 2 :] += 1e6
    check(values, feed(values, rows // 3))


def test_constant_columns_have_no_spread() -> None:
    for constant in (0.0, 1.0, -3.25, 1e15, 1e308):
        found = feed(np.full((10_000, 3), constant), 17).result()
        assert (found.std == 0).all() and (found.mean == constant).all()


@settings(max_examples=150)
@given(
    values=hnp.arrays(
        np.float64,
        st.tuples(st.integers(1, 60), st.integers(1, 4)),
        # smaller ones have squares that float64 hardly holds
        elements=st.floats(-1e6, 1e6).map(lambda value: value if abs(value) > 1e-140 else 0.0),
    ),
    cut=st.integers(0, 60),
)
def test_any_values_any_cut(values: npt.NDArray[np.float64], cut: int) -> None:
    check(values, feed(values, min(cut, len(values))), tolerance=1e-11)
    merged = feed(values[:cut])
    merged.merge(feed(values[cut:]))
    check(values, merged, tolerance=1e-11)


@settings(max_examples=60)
@given(
    values=hnp.arrays(
        np.float32,
        st.tuples(st.integers(1, 40), st.integers(1, 3)),
        elements=st.floats(width=32, allow_nan=True, allow_infinity=True),
    )
)
def test_nonfinite_values_are_counted_and_left_out(values: npt.NDArray[np.float32]) -> None:
    moments = Moments(values.shape[1:])
    bad = moments.update(values)
    finite = np.isfinite(values)
    assert bad == (None if finite.all() else int(np.argmin(finite.all(axis=1))))
    found = moments.result()
    assert found.nonfinite == int((~finite).sum())
    for element in range(values.shape[1]):
        kept = values[finite[:, element], element].astype(np.float64)
        if not kept.size:
            assert np.isnan(found.mean[element]) and np.isnan(found.max[element])
            continue
        scale = float(np.abs(kept).max()) + 1e-300
        assert found.mean[element] / scale == pytest.approx(kept.mean() / scale, abs=1e-9)
        assert found.min[element] == kept.min()
        assert found.max[element] == kept.max()


def test_distribution_counts_every_value_once() -> None:
    values = np.random.default_rng(7).normal(size=1_000)
    found = distribution(values)
    assert sum(found.histogram.counts) == found.count == 1_000
    assert len(found.histogram.edges) == len(found.histogram.counts) + 1
    assert (found.histogram.edges[0], found.histogram.edges[-1]) == (values.min(), values.max())
    inside = [((values >= a) & (values < b)).sum() for a, b in pairwise(found.histogram.edges)]
    inside[-1] += int((values == found.histogram.edges[-1]).sum())
    assert list(found.histogram.counts) == inside
    assert found.mean == pytest.approx(values.mean())
    assert found.std == pytest.approx(values.std())


AWKWARD = ([3.0], [1e17, 1e17], [1.0, np.nextafter(1.0, 2.0)], [-1.7e308, 1.7e308])


@pytest.mark.parametrize("values", [*AWKWARD, [np.nan, 2.0, np.inf], [0.0, 5e-324], [np.nan]])
def test_distribution_of_awkward_values(values: list[float]) -> None:
    found = distribution(values)
    finite = [v for v in values if math.isfinite(v)]
    assert found.count == sum(found.histogram.counts) == len(finite)
    if finite:
        assert (found.min, found.max) == (min(finite), max(finite))
    else:
        assert found.histogram.counts == [] and math.isnan(found.mean)


@given(st.lists(st.integers(1, 5_000), min_size=1, max_size=30))
def test_distribution_of_whole_numbers_has_whole_bins(values: list[int]) -> None:
    found = distribution(values, integers=True)
    widths = {b - a for a, b in pairwise(found.histogram.edges)}
    assert len(widths) == 1 and all(edge.is_integer() for edge in (*found.histogram.edges, *widths))
    assert found.histogram.edges[0] == min(values) and len(found.histogram.counts) <= 20
    naive = [sum(a <= v < b for v in values) for a, b in pairwise(found.histogram.edges)]
    assert list(found.histogram.counts) == naive and sum(naive) == len(values)
