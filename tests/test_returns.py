"""Returns-to-go: the bits of a loop over the steps, however many episodes are summed at once."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gear_offline.errors import InputError
from gear_offline.tables import returns as module
from gear_offline.tables.returns import sum_returns, whole_episodes
from tests.segment_oracle import same_bits


def naive(
    rewards: npt.NDArray[Any], lengths: list[int], gamma: float, scale: float
) -> npt.NDArray[np.float32]:
    values = rewards.reshape(-1).astype(np.float64).tolist()
    found: list[float] = []
    at = 0
    for length in lengths:
        rest, back = 0.0, []
        for number, reward in enumerate(reversed(values[at : at + length])):
            rest = reward if number == 0 else reward + gamma * rest
            back.append(rest)
        found += back[::-1]
        at += length
    with np.errstate(over="ignore"):
        return (np.array(found, dtype=np.float64) / scale).astype(np.float32)


def offsets_of(lengths: list[int]) -> npt.NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


lengths_of = st.one_of(
    st.lists(st.integers(1, 40), min_size=1, max_size=30),  # ragged, several classes
    st.lists(st.integers(33, 60), min_size=1, max_size=30),  # ragged, one class
    st.tuples(st.integers(1, 30), st.integers(1, 40)).map(lambda t: [t[1]] * t[0]),  # equal
)


@settings(max_examples=150, deadline=None)
@given(
    lengths=lengths_of,
    gamma=st.sampled_from([1.0, 0.99, 0.5, 0.0]),
    scale=st.sampled_from([1.0, 3.0, 1000.0]),
    dtype=st.sampled_from([np.float32, np.float64, np.int32, np.bool_]),
    zeros=st.booleans(),
    few=st.sampled_from([0, 8]),
    seed=st.integers(0, 99),
)
def test_the_bits_of_a_loop(
    lengths: list[int], gamma: float, scale: float, dtype: Any, zeros: bool, few: int, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    steps = sum(lengths)
    rewards = (generator.normal(size=steps) * 10.0 ** generator.integers(-8, 8, steps)).astype(
        dtype
    )
    if zeros:
        rewards[generator.random(steps) < 0.7] = -0.0 if rewards.dtype.kind == "f" else 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "FEW_EPISODES", few)
        begins = offsets_of(lengths)
        found = sum_returns(rewards, begins + 7, gamma=gamma, scale=scale)
        assert same_bits(found, naive(rewards, lengths, gamma, scale))
        work, out = np.empty(steps + 3), np.full(steps + 3, 5, np.float32)
        again = sum_returns(
            rewards[:, None], begins.tolist(), gamma=gamma, scale=scale, work=work, out=out
        )
    assert np.shares_memory(again, out) and same_bits(again, found)
    assert (out[steps:] == 5).all()


def test_infinite_rewards_stay_and_sums_that_overflow_are_refused() -> None:
    rewards = np.array([1.0, np.inf, 2.0, np.nan, 4.0, 5.0], np.float32)
    found = sum_returns(rewards, [0, 3, 6], gamma=1.0, scale=1.0)
    assert found.tolist()[:3] == [np.inf, np.inf, 2.0]
    assert np.isnan(found[3]) and found.tolist()[4:] == [9.0, 5.0]
    large = np.array([-3e38, 3e38, 3e38], np.float32)
    with pytest.raises(InputError, match="column rewards, step 11") as caught:
        sum_returns(large, [10, 13], gamma=1.0, scale=1.0)
    assert caught.value.code == "CAST_OVERFLOW"
    assert sum_returns(large, [10, 13], gamma=1.0, scale=2.0).tolist()[1] == np.float32(3e38)


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 9), max_size=30), steps=st.integers(1, 40))
def test_runs_cover_all_episodes_in_order(lengths: list[int], steps: int) -> None:
    offsets = offsets_of(lengths).tolist()
    runs = list(whole_episodes(offsets, steps))
    assert [e for first, last in runs for e in range(first, last)] == list(range(len(lengths)))
    for first, last in runs:
        assert last > first
        assert offsets[last] - offsets[first] >= steps or last == len(lengths)
        assert offsets[last - 1] - offsets[first] < steps  # not one episode more than needed
    assert all(one[1] == other[0] for one, other in pairwise(runs))
