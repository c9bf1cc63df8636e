"""Without replacement: a bijection every epoch, a new one each time, even on tiny tables."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gear_offline.kernels.philox import draws
from gear_offline.sampling.bijection import ROUNDS, KeyedOrder
from gear_offline.sampling.ordered import places
from gear_offline.sampling.selection import make_selection
from tests.law_support import facts, p_value


def order(size: int, seed: int, epoch: int) -> list[int]:
    at = np.arange(size, dtype=np.int64)
    found = KeyedOrder(size)(seed=seed, first_epoch=epoch, epochs=np.zeros_like(at), places=at)
    return [int(value) for value in found]


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 70) | st.sampled_from([127, 128, 129, 1000]),
    seed=st.integers(0, 2**64 - 1),
    epoch=st.integers(0, 2**63 - 1),
)
def test_an_epoch_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    assert sorted(order(size, seed, epoch)) == list(range(size))


def oracle(size: int, seed: int, epoch: int, place: int) -> int:
    """The documented network in Python integers."""
    bits = max((size - 1).bit_length(), 2)
    right = bits // 2
    widths = (bits - right, right)
    first, second = draws(seed=seed, stream=3, first_step=epoch, steps=1, count=ROUNDS)

    def mixed(value: int) -> int:
        for multiplier in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
            value ^= value >> 33
            value = value * multiplier % 2**64
        return value ^ value >> 33

    value = place
    while True:
        halves = [value >> right, value % (1 << right)]
        for turn in range(ROUNDS):
            side = turn % 2
            halves[side] ^= mixed(halves[1 - side] ^ int(first[0, turn])) % (1 << widths[side])
        value = halves[0] << right | halves[1]
        if value < size:
            return (value + int(second[0, 0]) * size // 2**64) % size


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 2**62),
    seed=st.integers(0, 2**64 - 1),
    epoch=st.integers(0, 2**62),
    data=st.data(),
)
def test_the_order_is_the_documented_one(
    size: int, seed: int, epoch: int, data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, size - 1))
    found = KeyedOrder(size)(
        seed=seed,
        first_epoch=epoch,
        epochs=np.zeros(1, dtype=np.int64),
        places=np.array([place], dtype=np.int64),
    )
    assert found.tolist() == [oracle(size, seed, epoch, place)]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_every_thing_is_as_likely_in_every_place(size: int) -> None:
    """Chi-square of each place over 6,000 epochs, significance 1e-4 for each."""
    epochs = 6_000
    at = np.tile(np.arange(size, dtype=np.int64), epochs)
    rows = np.repeat(np.arange(epochs, dtype=np.int64), size)
    found = KeyedOrder(size)(seed=4, first_epoch=0, epochs=rows, places=at).reshape(-1, size)
    for place in range(size):
        counts = np.bincount(found[:, place], minlength=size)
        assert p_value(counts, np.full(size, epochs / size)) > 1e-4


def test_orders_differ_and_all_of_four_things_come() -> None:
    seen = {tuple(order(4, seed=1, epoch=epoch)) for epoch in range(2_000)}
    assert seen == set(itertools.permutations(range(4)))
    assert order(50, 1, 0) != order(50, 1, 1) and order(50, 1, 0) != order(50, 2, 0)


def test_neighbours_of_an_epoch_are_independent() -> None:
    """Differences of neighbouring places fill 16 cells evenly, significance 1e-4."""
    found = np.array(order(1 << 15, seed=3, epoch=9))
    cells = np.bincount((found[1:] - found[:-1]) % (1 << 15) >> 11, minlength=16)
    assert p_value(cells, np.full(16, cells.sum() / 16)) > 1e-4
    halves = np.bincount(2 * (found[:-1] >> 14) + (found[1:] >> 14), minlength=4)
    assert p_value(halves, np.full(4, halves.sum() / 4)) > 1e-4


@pytest.mark.parametrize("batch", [1, 4, 11, 16, 40])
def test_each_segment_once_an_epoch_whatever_the_batch(batch: int) -> None:
    """The last batch of an epoch goes on with the next one."""
    lengths = [4, 1, 6]
    law = make_selection("shuffled_epochs", facts(lengths))
    drawn = law.select_many(seed=8, first_step=0, steps=11, count=batch)
    rows = (np.array([0, 4, 5])[drawn.episodes] + drawn.starts).reshape(-1)
    for epoch in rows.reshape(-1, 11):
        assert sorted(epoch.tolist()) == list(range(11))
    pieces = [law.select(seed=8, step=step, count=batch) for step in range(11)]
    assert np.array_equal(np.stack([p.starts for p in pieces]), drawn.starts)


@given(
    first_step=st.integers(0, 2**63 - 1),
    count=st.integers(1, 50),
    size=st.integers(1, 2**63 - 1) | st.integers(1, 60),
)
def test_places_of_slots_are_exact(first_step: int, count: int, size: int) -> None:
    epoch, epochs, at = places(first_step=first_step, steps=2, count=count, size=size)
    expected = [divmod(first_step * count + slot, size) for slot in range(2 * count)]
    found = zip(epochs.reshape(-1).tolist(), at.reshape(-1).tolist(), strict=True)
    assert [(epoch + e, p) for e, p in found] == expected
