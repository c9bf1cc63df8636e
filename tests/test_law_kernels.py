"""Every law's kernel text, compiled for the CPU, against its twin: the same bits.

Shape legend: E episodes, K steps of a window.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gear_offline.dataset.schema import EpisodeIndex
from gear_offline.errors import InputError, UnavailableError
from gear_offline.kernels.select import DeviceSelect
from gear_offline.sampling.selection import (
    Facts,
    Segments,
    Selection,
    UniformSteps,
    WeightedEpisodes,
    make_selection,
)
from tests.kernels_on_cpu import compile_laws, on_cpu
from tests.law_support import LAW_CASES, facts


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return compile_laws(tmp_path_factory.mktemp("laws"))


def make(name: str, options: dict[str, Any], data: Facts, span: int) -> Selection:
    return make_selection(name, data, context_length=span, **options)


def same(found: Segments, expected: Segments) -> None:
    assert np.array_equal(found.episodes, expected.episodes)
    assert np.array_equal(found.starts, expected.starts)
    assert found.probability.tobytes() == np.ascontiguousarray(expected.probability).tobytes()
    assert (found.lengths is None) == (expected.lengths is None)
    if found.lengths is not None and expected.lengths is not None:
        assert np.array_equal(found.lengths, expected.lengths)


STEPS = st.one_of(st.integers(0, 300), st.integers(0, 2**63 - 4))


@settings(deadline=None, max_examples=25)
@pytest.mark.parametrize(("name", "options"), LAW_CASES)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=40),
    span=st.integers(1, 12),
    count=st.integers(1, 70),
    step=STEPS,
    seed=st.integers(0, 2**64 - 1),
    returns=st.integers(1, 9),
)
def test_segments_and_probabilities_are_those_of_the_twin(
    library: Any,
    name: str,
    options: dict[str, Any],
    lengths: list[int],
    span: int,
    count: int,
    step: int,
    seed: int,
    returns: int,
) -> None:
    count = min(count, len(lengths)) if name == "min_dt" else count
    values = [float(e % returns) for e in range(len(lengths))]
    data = facts(lengths, values, [True] + [e % 3 > 0 for e in range(1, len(lengths))])
    law, twin = (make(name, options, data, span) for _ in range(2))
    with on_cpu(library) as device:
        select = DeviceSelect(law, device=device, batch_size=count, context_length=span)
        found = select.segments(seed=seed, first_step=step, steps=3)
    # The number of an epoch is taken modulo 2^63 once a call.
    epochs = (step + 3) * count // sum(lengths)
    assume(epochs < 2**63)
    same(found, twin.select_many(seed=seed, first_step=step, steps=3, count=count))


@pytest.mark.parametrize(("name", "options"), LAW_CASES)
def test_one_episode_of_one_step(library: Any, name: str, options: dict[str, Any]) -> None:
    data = facts([1], [0.0], [True])
    law, twin = (make(name, options, data, 1) for _ in range(2))
    with on_cpu(library) as device:
        select = DeviceSelect(law, device=device, batch_size=1)
        found = select.segments(seed=5, first_step=2**40, steps=3)
    same(found, twin.select_many(seed=5, first_step=2**40, steps=3, count=1))
    assert not found.episodes.any() and not found.starts.any()


def test_rows_beyond_float32_and_2_to_the_32(library: Any) -> None:
    """Episodes of 2^33 steps: rows, epochs and keyed orders of 64 bits."""
    lengths = [2**33 + 7, 5, 2**34 + 11]
    data = facts(lengths, [1.0, 2.0, 3.0], [True, True, False])
    for name in ("uniform_steps", "fifo", "lifo", "shuffled_epochs", "d3rlpy", "uniform_episodes"):
        law = make(name, {}, data, 20)
        with on_cpu(library) as device:
            select = DeviceSelect(law, device=device, batch_size=50, context_length=20)
            found = select.segments(seed=3, first_step=2**29 - 1, steps=4)
        same(found, law.select_many(seed=3, first_step=2**29 - 1, steps=4, count=50))
        assert int(found.starts.max()) > 2**32 or name in ("fifo", "lifo")


def test_weights_over_twelve_orders_of_magnitude(library: Any) -> None:
    """Beyond 2^24 weights; the draws of a rare episode are those of the twin."""
    count = (1 << 24) + 5
    weights = np.ones(count)
    weights[count // 2 :] = 1e-12
    weights[7] = 0.0
    weights[-3:] = [1e7, 0.0, 0.0]
    law = WeightedEpisodes(EpisodeIndex(np.ones(count, np.int64)), weights)
    with on_cpu(library) as device:
        select = DeviceSelect(law, device=device, batch_size=5000)
        found = select.segments(seed=11, first_step=0, steps=2)
    same(found, law.select_many(seed=11, first_step=0, steps=2, count=5000))
    assert weights[found.episodes].all()
    assert len(np.unique(found.episodes)) > 2


@given(st.integers(0, 2**63 - 2), st.integers(0, 2**64 - 1), st.integers(1, 2**63))
def test_division_of_128_bits(library: Any, high: int, low: int, by: int) -> None:
    found = np.zeros(2, np.uint64)
    words = [ctypes.c_uint64(word) for word in (high, low, by)]
    library.divide_wide(*words, ctypes.c_void_p(found.ctypes.data))
    quotient, rest = divmod((high << 64) + low, by)
    assert found.tolist() == [quotient % 2**64, rest]


def test_laws_of_others_are_refused_and_weighted_ones_are_not(library: Any) -> None:
    index = EpisodeIndex(np.array([3, 4], dtype=np.int64))

    class Mine(UniformSteps):
        def select_many(self, **_: Any) -> Segments:
            raise NotImplementedError

    class Weighted(WeightedEpisodes):
        pass

    with on_cpu(library) as device:
        with pytest.raises(UnavailableError) as caught:
            DeviceSelect(Mine(index), device=device, batch_size=2)
        assert caught.value.code == "ENGINE_SELECTION"
        DeviceSelect(Weighted(index, np.array([1.0, 3.0])), device=device, batch_size=2)
        law = make_selection("d3rlpy", facts([5, 6]), context_length=3)
        with pytest.raises(UnavailableError, match="3 steps"):
            DeviceSelect(law, device=device, batch_size=2, context_length=4)
        few = make_selection("min_dt", facts([5, 6]), context_length=3)
        with pytest.raises(InputError) as missing:
            DeviceSelect(few, device=device, batch_size=3)
        assert missing.value.code == "SELECTION_BATCH"
