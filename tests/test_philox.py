"""Philox 4x32-10 against its published answers and an oracle written from the paper."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gear_offline.kernels import philox

WORD = st.integers(0, 2**32 - 1)
DRAW = st.integers(0, 2**64 - 1)


def oracle(
    counter: tuple[int, ...], key: tuple[int, int], rounds: int = 10
) -> tuple[int, int, int, int]:
    """Some rounds in Python integers, from figure 2 and section 3.3 of Salmon et al. 2011."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        high0, low0 = divmod(0xD2511F53 * c0, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


# Random123's kat_vectors, generator philox4x32, with its rounds.
KNOWN = [
    (10, (0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        10,
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        10,
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
    (7, (0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    (
        7,
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662),
    ),
    (
        7,
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
    ),
]


@pytest.mark.parametrize(("rounds", "counter", "key", "expected"), KNOWN)
def test_known_answers(
    rounds: int,
    counter: tuple[int, int, int, int],
    key: tuple[int, int],
    expected: tuple[int, ...],
) -> None:
    words = philox.philox4x32(counter, key, rounds=rounds)
    assert tuple(int(word) for word in words) == expected
    assert oracle(counter, key, rounds) == expected


@given(st.lists(st.tuples(WORD, WORD, WORD, WORD), min_size=1, max_size=20), WORD, WORD)
def test_matches_oracle(counters: list[tuple[int, ...]], key0: int, key1: int) -> None:
    c0, c1, c2, c3 = np.array(counters, dtype=np.uint32).T
    words = np.stack(philox.philox4x32((c0, c1, c2, c3), (key0, key1)), axis=-1)
    assert words.dtype == np.uint32
    assert words.tolist() == [list(oracle(counter, (key0, key1))) for counter in counters]


def test_broadcasting_and_runs_longer_than_the_lanes() -> None:
    slots = np.arange(philox.LANES + 7, dtype=np.uint32)
    steps = np.array([[3], [9]], dtype=np.uint32)
    words = philox.philox4x32((slots, 5, steps, 0), (1, 2))
    assert words[0].shape == (2, philox.LANES + 7)
    for row, step in enumerate((3, 9)):
        for slot in (0, 1, philox.LANES - 1, philox.LANES, philox.LANES + 6):
            expected = oracle((slot, 5, step, 0), (1, 2))
            assert tuple(int(word[row, slot]) for word in words) == expected


@settings(max_examples=50)
@given(
    seed=st.integers(0, 2**64 - 1),
    stream=WORD,
    first_step=st.integers(0, 2**63) | st.integers(2**32 - 3, 2**32),
    steps=st.integers(1, 4),
    count=st.integers(1, 5),
)
def test_draws_lay_out_counter_and_key_as_documented(
    seed: int, stream: int, first_step: int, steps: int, count: int
) -> None:
    first, second = philox.draws(
        seed=seed, stream=stream, first_step=first_step, steps=steps, count=count
    )
    assert first.dtype == second.dtype == np.uint64
    for row in range(steps):
        step = first_step + row
        for slot in range(count):
            words = oracle(
                (slot, stream, step % 2**32, step // 2**32), (seed % 2**32, seed // 2**32)
            )
            assert int(first[row, slot]) == words[0] + words[1] * 2**32
            assert int(second[row, slot]) == words[2] + words[3] * 2**32


@settings(max_examples=300)
@given(st.lists(DRAW, min_size=1, max_size=8), st.integers(1, 2**63 - 1))
@example([2**64 - 1], 2**63 - 1)
@example([2**64 - 1], 2**32 - 1)
@example([2**64 - 1], 2**32)
@example([2**64 - 1, 0], 1)
def test_bounded_is_the_high_half_of_the_product(draw: list[int], n: int) -> None:
    values = philox.bounded(np.array(draw, dtype=np.uint64), n)
    assert values.dtype == np.int64
    assert values.tolist() == [r * n // 2**64 for r in draw]


def test_bounded_takes_one_size_per_draw() -> None:
    draw = np.full(4, 2**63, dtype=np.uint64)
    sizes = np.array([1, 7, 2**33, 2**62], dtype=np.int64)
    assert philox.bounded(draw, sizes).tolist() == [0, 3, 2**32, 2**61]


@given(st.integers(1, 2**63 - 1), st.data())
def test_bias_bound(n: int, data: st.DataObject) -> None:
    """The draws that map to one value number floor or ceil of 2^64 / n, counted exactly."""
    value = data.draw(st.integers(0, n - 1))
    first = -(-value * 2**64 // n)  # smallest r with r * n // 2^64 == value
    after = -(-(value + 1) * 2**64 // n)
    edges = np.array([first, after - 1], dtype=np.uint64)
    assert philox.bounded(edges, n).tolist() == [value, value]
    if first > 0:
        assert int(philox.bounded(np.array([first - 1], dtype=np.uint64), n)[0]) == value - 1
    error = abs(Fraction(after - first, 2**64) - Fraction(1, n))
    assert error < Fraction(1, 2**64)
