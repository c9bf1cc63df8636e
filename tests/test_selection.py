"""Selection laws: purity, chunking, exact probabilities, distribution, 64-bit range."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gear_offline.dataset.schema import EpisodeIndex
from gear_offline.errors import InputError
from gear_offline.kernels.philox import draws
from gear_offline.sampling import selection as module
from gear_offline.sampling.selection import (
    Segments,
    Selection,
    StepLocator,
    make_selection,
    register,
    selection_names,
)

NAMES = ("uniform_steps", "uniform_episodes")
LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=12)


def index_of(lengths: list[int]) -> EpisodeIndex:
    return EpisodeIndex(np.array(lengths, dtype=np.int64))


def same(one: Segments, other: Segments) -> bool:
    return (
        np.array_equal(one.episodes, other.episodes)
        and np.array_equal(one.starts, other.starts)
        and np.array_equal(one.probability, other.probability)
    )


def p_value(counts: npt.NDArray[Any], expected: npt.NDArray[np.float64]) -> float:
    """Upper tail of the chi-square distribution, cells minus one degrees of freedom."""
    statistic = float(((counts - expected) ** 2 / expected).sum())
    half = torch.tensor([max(counts.size - 1, 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def even(counts: npt.NDArray[Any]) -> float:
    """`p_value` of equal shares."""
    return p_value(counts, np.full(counts.size, counts.sum() / counts.size))


def exact_law(name: str, lengths: list[int]) -> npt.NDArray[np.float64]:
    """Probability of every (episode, start), in table order, from the definition of the law."""
    law = []
    for length in lengths:
        share = {
            "uniform_steps": length / sum(lengths),  # an episode in proportion to its length,
            "uniform_episodes": 1 / len(lengths),
        }[name]
        law += [share / length] * length  # then a start uniformly
    return np.array(law)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60)
@given(
    lengths=LENGTHS,
    seed=st.integers(0, 2**64 - 1),
    first_step=st.integers(0, 2**63 - 10),
    cuts=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    count=st.integers(1, 9),
)
def test_pure_function_for_any_chunking(
    name: str, lengths: list[int], seed: int, first_step: int, cuts: list[int], count: int
) -> None:
    selection = make_selection(name, index_of(lengths))
    steps = min(sum(cuts), 8)
    whole = selection.select_many(seed=seed, first_step=first_step, steps=steps, count=count)
    assert whole.shape == (steps, count)
    assert whole.episodes.dtype == whole.starts.dtype == np.int64
    assert whole.probability.dtype == np.float64
    at = 0
    for cut in cuts:
        cut = min(cut, steps - at)
        part = selection.select_many(seed=seed, first_step=first_step + at, steps=cut, count=count)
        assert same(part, whole[at : at + cut])
        at += cut
    for row in range(steps):
        assert same(selection.select(seed=seed, step=first_step + row, count=count), whole[row])
    # Slots do not depend on how many there are, and a second object draws the same.
    fewer = make_selection(name, index_of(lengths)).select(seed=seed, step=first_step, count=1)
    assert same(fewer, whole[0][:1])
    # Every segment starts inside its episode, with the probability that the definition gives.
    assert (whole.episodes >= 0).all() and (whole.episodes < len(lengths)).all()
    assert (whole.starts >= 0).all()
    assert (whole.starts < np.array(lengths)[whole.episodes]).all()
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    expected = exact_law(name, lengths)[offsets[whole.episodes] + whole.starts]
    np.testing.assert_allclose(whole.probability, expected, rtol=1e-14)


def test_first_draws_follow_the_documented_formula() -> None:
    """Pins the stream: a change here changes every user's batches."""
    lengths = [3, 1, 6]
    first, second = draws(seed=5, stream=0, first_step=11, steps=1, count=50)
    steps = make_selection("uniform_steps", index_of(lengths)).select(seed=5, step=11, count=50)
    flat = [(e, s) for e, length in enumerate(lengths) for s in range(length)]
    expected = [flat[int(r) * 10 // 2**64] for r in first[0]]
    assert list(zip(steps.episodes.tolist(), steps.starts.tolist(), strict=True)) == expected
    uniform = make_selection("uniform_episodes", index_of(lengths)).select(
        seed=5, step=11, count=50
    )
    for e, s, r, q in zip(uniform.episodes, uniform.starts, first[0], second[0], strict=True):
        assert int(e) == int(r) * 3 // 2**64
        assert int(s) == int(q) * lengths[int(e)] // 2**64


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("lengths", [[1, 7, 2, 30, 10], [1, 1, 1], [200]])
def test_distribution_chi_square(name: str, lengths: list[int]) -> None:
    """Chi-square over all (episode, start) cells.

    Significance 1e-4 for each of the six cases; the seed is fixed, so the result never changes.
    """
    law = exact_law(name, lengths)
    selection = make_selection(name, index_of(lengths))
    drawn = selection.select_many(seed=2026, first_step=0, steps=200, count=1000)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    counts = np.bincount((offsets[drawn.episodes] + drawn.starts).ravel(), minlength=law.size)
    assert p_value(counts, law * drawn.episodes.size) > 1e-4
    # The test has power: the other law's counts would be refused where the laws differ.
    other = exact_law(NAMES[1 - NAMES.index(name)], lengths)
    if not np.allclose(law, other):
        assert p_value(counts, other * drawn.episodes.size) < 1e-30


@pytest.mark.parametrize("by", ["slots", "steps", "seeds"])
def test_neighbours_are_independent(by: str) -> None:
    """Pairs of neighbouring slots, steps or seeds fill an 8 x 8 table evenly, significance 1e-4."""
    selection = make_selection("uniform_steps", index_of([8]))
    if by == "seeds":
        rows = np.stack([selection.select(seed=s, step=0, count=100).starts for s in range(401)])
    else:
        rows = selection.select_many(seed=7, first_step=0, steps=401, count=101).starts
    rows = rows.T if by == "slots" else rows
    pairs = (rows[:-1] * 8 + rows[1:]).ravel()
    assert even(np.bincount(pairs, minlength=64)) > 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_tables_of_two_to_the_forty_steps(name: str) -> None:
    """No overflow and no rounding: low bits of huge positions are still uniform."""
    lengths = np.full(1 << 12, 1 << 28, dtype=np.int64)
    lengths[0] -= 5
    lengths[1] += 5
    index = EpisodeIndex(lengths)
    assert index.steps == 1 << 40
    drawn = make_selection(name, index).select(seed=1, step=2**40, count=20_000)
    assert (drawn.starts >= 0).all() and (drawn.starts < lengths[drawn.episodes]).all()
    np.testing.assert_allclose(drawn.probability, 2.0**-40, rtol=1e-6)
    assert even(np.bincount(drawn.starts & 15, minlength=16)) > 1e-4
    assert even(np.bincount(drawn.episodes >> 8, minlength=16)) > 1e-4
    if name == "uniform_steps":
        first, _ = draws(seed=1, stream=0, first_step=2**40, steps=1, count=20_000)
        exact = [int(r) >> 24 for r in first[0]]  # r * 2^40 // 2^64
        assert (index.offsets[drawn.episodes] + drawn.starts).tolist() == exact


def test_one_episode_longer_than_32_bits() -> None:
    index = EpisodeIndex(np.array([2**62], dtype=np.int64))
    drawn = make_selection("uniform_steps", index).select(seed=0, step=0, count=100)
    assert int(drawn.starts.max()) > 2**61
    assert (drawn.starts < 2**62).all()


@given(st.lists(st.integers(1, 3) | st.integers(1, 5000), min_size=1, max_size=60))
def test_locator_equals_the_episode_index(lengths: list[int]) -> None:
    index = index_of(lengths)
    edges = np.concatenate([index.offsets[:-1], index.offsets[1:] - 1, index.offsets[:-1] // 2])
    steps = np.unique(np.concatenate([edges, np.arange(0, index.steps, 7)]))
    assert np.array_equal(StepLocator(index)(steps), index.episode_of(steps))


def test_seeds_and_steps_differ() -> None:
    selection = make_selection("uniform_steps", index_of([1000]))
    base = selection.select(seed=0, step=0, count=64).starts
    for seed, step in ((1, 0), (0, 1), (2**32, 0), (2**63, 0), (0, 2**32)):
        assert (selection.select(seed=seed, step=step, count=64).starts != base).mean() > 0.9


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"seed": -1}, "SELECTION_RANGE"),
        ({"seed": 2**64}, "SELECTION_RANGE"),
        ({"step": -1}, "SELECTION_RANGE"),
        ({"step": 2**63}, "SELECTION_RANGE"),
        ({"count": 0}, "SELECTION_RANGE"),
        ({"seed": 1.5}, "SELECTION_RANGE"),
        ({"step": "3"}, "SELECTION_RANGE"),
        ({"step": None}, "SELECTION_RANGE"),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_out_of_range_arguments(name: str, change: dict[str, Any], code: str) -> None:
    selection = make_selection(name, index_of([3]))
    with pytest.raises(InputError) as caught:
        selection.select(**({"seed": 0, "step": 0, "count": 1} | change))
    assert caught.value.code == code


def test_unknown_name_options_and_empty_tables() -> None:
    with pytest.raises(InputError, match="did you mean 'uniform_steps'") as caught:
        make_selection("uniform_step", index_of([3]))
    assert caught.value.code == "SELECTION_UNKNOWN"
    with pytest.raises(InputError, match="no selection strategy None") as caught:
        make_selection(None, index_of([3]))  # type: ignore[arg-type]
    assert caught.value.code == "SELECTION_UNKNOWN"
    with pytest.raises(InputError, match="temperature") as caught:
        make_selection("uniform_steps", index_of([3]), temperature=2)
    assert caught.value.code == "SELECTION_OPTIONS"
    with pytest.raises(InputError) as caught:
        make_selection("uniform_steps", index_of([]))
    assert caught.value.code == "SELECTION_EMPTY"
    for wrong in ("data/mine", None, [EpisodeIndex(lengths=np.array([3]))]):
        with pytest.raises(InputError) as caught:
            make_selection("uniform_steps", wrong)  # type: ignore[arg-type]
        assert caught.value.code == "DATASET_KIND"


@pytest.fixture
def last_steps() -> Iterator[str]:
    """Register a strategy of the user's own for one test."""

    @dataclass(frozen=True)
    class LastSteps:
        index: EpisodeIndex
        back: int = 1
        name = "last_steps"

        @property
        def options(self) -> Mapping[str, Any]:
            return {"back": self.back}

        def select(self, *, seed: int, step: int, count: int) -> Segments:
            return self.select_many(seed=seed, first_step=step, steps=1, count=count)[0]

        def select_many(self, *, seed: int, first_step: int, steps: int, count: int) -> Segments:
            base = module.UniformEpisodes(self.index).select_many(
                seed=seed, first_step=first_step, steps=steps, count=count
            )
            starts = np.maximum(self.index.lengths[base.episodes] - self.back, 0)
            return replace(base, starts=starts)

    register("last_steps")(LastSteps)
    yield "last_steps"
    module._FACTORIES.pop("last_steps")


def test_registry_is_open(last_steps: str) -> None:
    assert last_steps in selection_names()
    selection = make_selection(last_steps, index_of([4, 9]), back=2)
    assert isinstance(selection, Selection)
    assert json.loads(json.dumps(dict(selection.options))) == {"back": 2}
    drawn = selection.select(seed=0, step=0, count=20)
    assert set(zip(drawn.episodes.tolist(), drawn.starts.tolist(), strict=True)) == {(0, 2), (1, 7)}
    with pytest.raises(ValueError, match="already registered"):
        register(last_steps)(make_selection)


def test_a_law_that_does_not_take_its_options_is_one_clear_error() -> None:
    def needs_number(index: EpisodeIndex, *, power: float = 1.0) -> Selection:
        return make_selection("uniform_steps", index_of([4] * round(index.episodes**power)))

    register("needs_number")(needs_number)
    try:
        assert make_selection("needs_number", index_of([4, 9]), power=2.0).name == "uniform_steps"
        with pytest.raises(InputError, match="cannot be made with power='much'") as caught:
            make_selection("needs_number", index_of([4, 9]), power="much")
        assert caught.value.code == "SELECTION_OPTIONS"
        assert isinstance(caught.value.__cause__, TypeError)
        with pytest.raises(InputError) as inner:  # its own errors keep their codes
            make_selection("needs_number", index_of([4, 9]), power=-1e9)
        assert inner.value.code == "SELECTION_EMPTY"
    finally:
        module._FACTORIES.pop("needs_number")


def test_segments_must_agree_in_shape() -> None:
    with pytest.raises(InputError) as caught:
        Segments(
            episodes=np.zeros(2, np.int64), starts=np.zeros(3, np.int64), probability=np.ones(2)
        )
    assert caught.value.code == "SEGMENTS_SHAPE"
