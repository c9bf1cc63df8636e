"""Samplers at their public door: pure, exact, with the probability that the definition gives."""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gear_offline.batches.sampling import (
    CumulativeWeights,
    Facts,
    HostFunction,
    PartWeights,
    Sampler,
    Segments,
    TaskPart,
    make_sampler,
    mix_tasks,
    registry,
    resolve_options,
    strategy,
    strategy_names,
)
from gear_offline.data.dataset.schema import EpisodeIndex
from gear_offline.errors import InputError
from tests.sampling_support import CASES, CONTEXT, IDS, MIXED, Key, exact_law, facts, keys, p_value
from tests.support import failing_code, one_error

LENGTHS = [1, 7, 2, 9, 5, 3]
TABLES = st.lists(st.integers(2, 13), min_size=2, max_size=9)
NAMED = pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
RANDOM = [
    pytest.param(*c, id=i) for c, i in zip(CASES, IDS, strict=True) if c[0] not in ("fifo", "lifo")
]


def make(name: str, options: dict[str, Any], lengths: list[int], **more: Any) -> Sampler:
    return make_sampler(name, facts(lengths, **more), context_length=CONTEXT, **options)


def same(one: Segments, other: Segments) -> bool:
    pairs = [(getattr(one, n), getattr(other, n)) for n in ("episodes", "starts", "probability")]
    assert (one.lengths is None) == (other.lengths is None)
    lengths = one.lengths is None or np.array_equal(one.lengths, other.lengths)  # type: ignore[arg-type]
    return lengths and all(np.array_equal(a, b) for a, b in pairs)


def test_every_strategy_is_tested() -> None:
    assert {name for name, _ in CASES} == set(strategy_names())


@NAMED
@settings(max_examples=12)
@given(
    lengths=TABLES,
    seed=st.integers(0, 2**64 - 1),
    first_step=st.integers(0, 2**63 - 10),
    cut=st.integers(1, 5),
    count=st.integers(1, 2),
)
def test_a_step_alone_is_that_row_of_a_block(
    name: str, options: dict[str, Any], lengths: list[int], seed: int, first_step: int,
    cut: int, count: int,
) -> None:  # fmt: skip
    sampler = make(name, options, lengths)
    whole = sampler.sample(seed, first_step, 6, count)
    assert whole.shape == (6, count)
    assert whole.episodes.dtype == whole.starts.dtype == np.int64
    assert whole.probability.dtype == np.float64
    assert same(sampler.sample(seed, first_step, cut, count), whole[:cut])
    assert same(sampler.sample(seed, first_step + cut, 6 - cut, count), whole[cut:])
    again = make(name, json.loads(json.dumps(sampler.options)), lengths)
    assert same(again.sample(np.uint64(seed), np.int64(first_step), 6, np.int64(count)), whole)  # type: ignore[arg-type]
    table = np.array(lengths)
    assert (whole.episodes >= 0).all() and (whole.episodes < len(lengths)).all()
    assert (whole.starts >= 0).all() and (whole.starts < table[whole.episodes]).all()
    assert (whole.probability > 0).all() and (whole.probability <= 1).all()
    assert (whole.lengths is not None) == sampler.cuts_windows
    density = sampler.density(whole)
    if density is not None:
        np.testing.assert_allclose(density, whole.probability, rtol=1e-14)


def check_law(drawn: Segments, lengths: list[int], law: dict[Key, float]) -> None:
    """Probabilities are exact; frequencies by chi-square at 1e-4, with the seed of the draws."""
    assert math.isclose(sum(law.values()), 1.0)
    named = keys(drawn, lengths)
    for key, chance in zip(named, drawn.probability.reshape(-1), strict=True):
        assert math.isclose(chance, law[key], rel_tol=1e-12), key
    counts = Counter(named)
    expected = np.array([law[key] for key in law]) * len(named)
    seen, often = np.array([counts[key] for key in law]), expected >= 5
    seen = np.append(seen[often], seen[~often].sum())
    expected = np.append(expected[often], max(expected[~often].sum(), 1e-9))
    assert p_value(seen, expected) > 1e-4


@pytest.mark.parametrize(("name", "options"), RANDOM)
def test_frequencies_and_probabilities_are_exact(name: str, options: dict[str, Any]) -> None:
    shape = (7, 2000) if "schedule" in options else (4000, 3)  # its first point lasts eight steps
    drawn = make(name, options, LENGTHS).sample(5, 0, *shape)
    check_law(drawn, LENGTHS, exact_law(name, facts(LENGTHS), **options))


@NAMED
def test_one_episode_of_one_step(name: str, options: dict[str, Any]) -> None:
    sampler = make(name, options, [1], terminated=[True])
    drawn = sampler.sample(1, 2**62, 3, 1)
    assert not drawn.episodes.any() and not drawn.starts.any()
    np.testing.assert_allclose(drawn.probability, 1.0)


@pytest.mark.parametrize("name", ["fifo", "lifo", "shuffled_epochs", "min_dt"])
@settings(max_examples=20)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=12),
    count=st.integers(1, 6),
    seed=st.integers(0, 2**64 - 1),
)
def test_an_epoch_takes_each_thing_once(
    name: str, lengths: list[int], count: int, seed: int
) -> None:
    sampler, index = make(name, {}, lengths), facts(lengths).episodes
    by_episode = name == "min_dt"
    things = len(lengths) if by_episode else sum(lengths)
    count = min(count, things)
    drawn = sampler.sample(seed, 0, -(-2 * things // count), count)
    rows = (drawn.episodes if by_episode else index.offsets[drawn.episodes] + drawn.starts).ravel()
    size = things // count * count if by_episode else things
    epochs = [rows[:size].tolist(), rows[size : 2 * size].tolist()]
    assert all(len(set(each)) == size for each in epochs)
    if name in ("fifo", "lifo"):
        assert epochs == [list(range(things))[:: 1 if name == "fifo" else -1]] * 2
    elif not by_episode and things > 20:
        assert epochs[0] != epochs[1]


def test_orders_are_even() -> None:
    """Each thing in each place: chi-square over 4000 epochs of 7 places, at 1e-4."""
    things = make("shuffled_epochs", {}, [1] * 7).sample(11, 0, 4000, 7).episodes
    counts = np.bincount((7 * np.arange(7) + things).ravel(), minlength=49)
    # 7 independent rows of 6 degrees of freedom, then the columns are fixed: 36, so 49 is lenient
    assert p_value(counts, np.full(49, 4000 / 7)) > 1e-4


def test_strata_take_turns() -> None:
    """Slots next to each other take strata next to each other, whatever the batch size."""
    data = facts([3] * 8, returns=range(8))
    drawn = make_sampler("stratified_return", data, strata=4).sample(1, 0, 500, 7)
    stratum = drawn.episodes // 2
    assert ((np.diff(stratum, axis=1) - 1) % 4 == 0).all()
    assert p_value(np.bincount(stratum[:, 0], minlength=4), np.full(4, 125.0)) > 1e-4


@pytest.mark.parametrize(
    ("name", "options", "kept"),
    [
        ("top_k", {"k": 2}, {1, 2}),
        ("top_percent", {"percent": 50, "of": "episodes"}, {1, 2, 4, 5}),
        ("top_percent", {"percent": 40}, {1, 2, 4}),  # 9 of 24 steps
        ("heap", {}, {1}),
        ("heap", {"of": "min"}, {0}),
    ],
)
def test_of_equal_returns_the_earlier_are_taken(
    name: str, options: dict[str, Any], kept: set[int]
) -> None:
    data = facts([3] * 8, returns=[0, 1, 1, 0, 1, 1, 0, 1])
    drawn = make_sampler(name, data, **options).sample(1, 0, 50, 7)
    assert {*drawn.episodes.ravel().tolist()} == kept


@settings(max_examples=60)
@given(table=TABLES, data=st.data(), episodes=st.booleans(), seed=st.integers(0, 2**64 - 1))
def test_a_column_weighs_steps_or_episodes(
    table: list[int], data: st.DataObject, episodes: bool, seed: int
) -> None:
    """Probabilities are the column's shares; what weighs 0 is never drawn."""
    number = st.floats(0, 1e300) | st.integers(0, 9).map(float)
    column = np.array(data.draw(st.lists(number, min_size=sum(table), max_size=sum(table))))
    column[data.draw(st.integers(0, table[0] - 1)) if not episodes else 0] = 1.0
    source = facts(table, column=column.reshape(-1, 1))
    sampler = make_sampler("weighted", source, column="w", unit=["steps", "episodes"][episodes])
    drawn, index = sampler.sample(seed, 3, 4, 50), source.episodes
    firsts, rows = index.offsets[:-1], index.offsets[drawn.episodes] + drawn.starts
    shares = column / np.max(column)
    each = np.repeat(shares[firsts] / table, table) if episodes else shares
    np.testing.assert_allclose(drawn.probability, (each / each.sum())[rows], rtol=1e-9, atol=1e-18)
    assert (column[firsts[drawn.episodes]] if episodes else column[rows]).all()
    assert (sampler.gpu is not None) == episodes and sampler.episode_weight is not None
    by_episode = np.add.reduceat(each / each.sum(), firsts)
    least = 2.0**-62 * sum(table)  # each step that weighs anything has a mass
    np.testing.assert_allclose(sampler.episode_weight, by_episode, rtol=1e-9, atol=least)


def test_columns_that_are_no_weights() -> None:
    for column, words in (
        (np.ones((7, 2)), r"float64 \(2,\) a step is not one"),
        (np.ones(7, np.complex64), "complex64"),
        (np.array([1, 0, math.nan, 0, 0, 0, 0]), "number 2 is nan"),
        (np.array([1, 0, 0, -1, 0, math.inf, 0]), "column w.*inspect"),
        (np.zeros(7), "not all 0"),
    ):
        with one_error("SELECTION", words):
            make_sampler("weighted", facts([3, 4], column=column), column="w")


POINTS = [{"step": 10, "weights": [1, 0]}, {"step": 20, "weights": [1, 3]}]


def test_a_schedule_moves_from_point_to_point() -> None:
    parts: list[Any] = [{"strategy": "top_k", "k": 1}, {"strategy": "uniform_episodes"}]
    sampler = make("mixture", {"parts": parts, "schedule": POINTS}, LENGTHS)
    first, second = make("top_k", {"k": 1}, LENGTHS), make("uniform_episodes", {}, LENGTHS)
    for step, share in [(0, 0.0), (10, 0.0), (14, 0.3), (20, 0.75), (2**50, 0.75)]:
        drawn = sampler.sample(1, step, 1, 3000)
        ideal = (1 - share) * first.density(drawn) + share * second.density(drawn)  # type: ignore[operator]
        np.testing.assert_allclose(drawn.probability, ideal, rtol=1e-12)
        best = drawn.episodes == first.sample(0, 0, 1, 1).episodes[0, 0]
        taken = (1 - share) + share / len(LENGTHS)
        assert abs(best.mean() - taken) < 4.5 * math.sqrt(taken * (1 - taken) / 3000) + 1e-9
    alone = second.sample(1, 2**50, 1, 3000)
    assert (sampler.sample(1, 2**50, 1, 3000).starts == alone.starts).mean() > 0.7, "same slots"


def test_a_mixture_pads_as_its_parts_do() -> None:
    def side(*names: str) -> Any:
        parts = [{"strategy": name, "weight": 1.0} for name in names]
        return make("mixture", {"parts": parts}, LENGTHS).padding

    assert side("original", "uniform_steps") == side("huggingface", "original") == "left"
    assert side("uniform_episodes", "corl") == "right" and side("uniform_steps") is None
    with one_error("SELECTION", "original left, corl right"):
        side("original", "corl")


def test_a_mixture_of_weights_is_drawn_in_one_go() -> None:
    parts = [{"strategy": "uniform_steps", "weight": 1}, {"strategy": "top_k", "k": 1, "weight": 1}]
    combined = make("mixture", {"parts": parts}, LENGTHS)
    assert combined.gpu is not None and combined.episode_weight is not None
    assert combined.episode_weight.sum() == pytest.approx(1)
    learning = [{"strategy": "prioritized", "weight": 1}, {**parts[0], "weight": 2}]
    mixed = make("mixture", {"parts": learning}, LENGTHS)
    assert mixed.gpu is None and mixed.loss_sampler is not None
    mixed.loss_sampler.update(np.array([[1, 3]]), np.array([50.0], np.float32))
    named = mixed.sample(1, 0, 300, 4)
    hot = (named.episodes == 1) & (named.starts == 3)
    assert hot.mean() > 0.1 and len(set(named.probability[hot].tolist())) == 1


@pytest.mark.parametrize("scheduled", [False, True])
def test_tasks(scheduled: bool) -> None:
    """Each task has its own share, and in it its own probabilities."""
    lengths = [[3, 5], [2, 2, 4], [6]]
    names = ["uniform_steps", "return_weighted", "stratified_return" if scheduled else "top_k"]
    options: list[dict[str, Any]] = [{}, {}, {"k": 1} if names[2] == "top_k" else {}]
    tasks = [
        TaskPart(name=str(n), sampler=make(name, more, table), weight=float(n + 1))
        for n, (name, more, table) in enumerate(zip(names, options, lengths, strict=True))
    ]
    joint = mix_tasks(tasks, PartWeights([0], [[1.0, 2.0, 3.0]]) if scheduled else None)
    flat, law = [n for table in lengths for n in table], dict[Key, float]()
    assert joint.index.lengths.tolist() == flat and joint.name == "tasks"
    for n, (name, more, table) in enumerate(zip(names, options, lengths, strict=True)):
        first = sum(map(len, lengths[:n]))
        for (episode, *rest), chance in exact_law(name, facts(table), **more).items():
            law[episode + first, rest[0], rest[1]] = chance * (n + 1) / 6
    check_law(joint.sample(2, 0, 40, 50), flat, law)
    assert mix_tasks(tasks[:1]) is tasks[0].sampler


def test_tasks_that_cannot_be_mixed() -> None:
    other = TaskPart(name="other", sampler=make("uniform_steps", {}, [3]))
    for name in ("fifo", "min_dt", "d3rlpy", "prioritized"):
        task = TaskPart(name="task", sampler=make(name, {}, [3, 4]))
        assert failing_code(lambda task=task: mix_tasks([task, other])) == "SELECTION"  # type: ignore[misc]


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("top_k", {}, "k"),
    ("top_k", {"k": 0}, "k: Input should be greater than or equal to 1, got 0"),
    ("top_k", {"k": 2, "units": "steps"}, "units"),
    ("top_percent", {"percent": 0}, "percent: Input should be greater than 0"),
    ("top_percent", {"percent": "10"}, "percent: Input should be a valid number"),
    ("top_percent", {"of": "step"}, "'steps' or 'episodes'"),
    ("return_weighted", {"rule": "soft"}, "'softmax', 'rank' or 'percentile'"),
    ("weighted", {"unit": "steps"}, "column (required)"),
    ("stratified_return", {"strata": 2000}, "less than or equal to 1024"),
    ("prioritized", {"beta": 1.5}, "less than or equal to 1"),
    ("prioritized", {"initial": 200.0}, "at most largest, 100"),
    ("uniform_steps", {"k": 1}, "takes no options"),
    ("mixture", {}, "parts"),
    ("mixture", {"parts": 3}, "a valid list"),
    ("mixture", {"parts": [{"strategy": "fifo", "weight": 1}]}, "slots and steps alike"),
    ("mixture", {"parts": [{"strategy": "uniform_steps"}]}, "give each part a weight"),
    ("mixture", {"parts": [{"strategy": "nothing", "weight": 1}]}, "no selection strategy"),
    ("mixture", {"parts": [{"strategy": "uniform_steps", "weight": 0}]}, "not be all zero"),
    ("mixture", {"parts": [{"strategy": "uniform_steps", "weight": "1"}]}, "weights.0: "),
    ("mixture", {"parts": [{"strategy": "top_k", "k": 0, "weight": 1}]}, "'top_k': k: "),
    ("mixture", {"parts": MIXED[:2], "schedule": POINTS[::-1]}, "must rise"),
    ("mixture", {"parts": MIXED[:3], "schedule": POINTS}, "lists of 3 numbers"),
    ("uniform", {}, "no selection strategy 'uniform'"),
    ("top_kk", {}, "did you mean 'top_k'"),
]


@pytest.mark.parametrize(("name", "options", "words"), BAD)
def test_options_that_do_not_fit(name: str, options: dict[str, Any], words: str) -> None:
    with one_error("SELECTION", re.escape(words)):
        resolve_options(name, options)


def test_data_that_cannot_be_drawn_from() -> None:
    def codes(name: str, data: Any, **options: Any) -> str:
        return failing_code(lambda: make_sampler(name, data, **options))

    plain = EpisodeIndex(np.array([3, 4]))
    assert codes("top_k", plain, k=1) == "SELECTION", "no returns"
    assert codes("min_dt", plain) == "SELECTION", "no context length"
    assert codes("weighted", plain, column="rewards") == "SELECTION", "no columns"
    assert codes("d3rlpy", plain, context_length=4) == "SELECTION", "no flags"
    assert codes("uniform_steps", EpisodeIndex(np.array([], np.int64))) == "SELECTION"
    assert codes("return_weighted", facts([3, 4], returns=[1.0, math.nan])) == "SELECTION"
    never = facts([1, 1], terminated=[False, False])
    assert codes("d3rlpy", never, context_length=4) == "SELECTION"
    min_dt = make("min_dt", {}, [3, 4])
    assert failing_code(lambda: min_dt.sample(0, 0, 1, 3)) == "SELECTION"
    two = [{"strategy": "prioritized", "weight": 1}] * 2
    assert codes("mixture", plain, parts=two) == "SELECTION", "two that learn"
    numbers = np.array([0, 1])
    with pytest.raises(InputError):
        Segments(episodes=numbers, starts=numbers[:1], probability=numbers.astype(float))


@pytest.mark.parametrize("name", ["uniform_steps", "fifo", "min_dt", "mixture"])
@pytest.mark.parametrize(
    "change",
    [{"seed": -1}, {"seed": 2**64}, {"first_step": -1}, {"first_step": 2**63}, {"count": 0},
     {"seed": 1.5}, {"first_step": "3"}, {"first_step": 2**63 - 1, "steps": 2}],
)  # fmt: skip
def test_numbers_out_of_range(name: str, change: dict[str, Any]) -> None:
    options = {"parts": MIXED, "schedule": [{"step": 0, "weights": [1] * 5}]}
    sampler = make(name, options if name == "mixture" else {}, LENGTHS)
    asked = {"seed": 0, "first_step": 0, "steps": 1, "count": 1} | change
    assert failing_code(lambda: sampler.sample(**asked)) == "SELECTION"


@pytest.fixture
def forget_own() -> Iterator[None]:
    yield
    registry._STRATEGIES.pop("own", None)


@pytest.mark.usefixtures("forget_own")
def test_a_function_of_ones_own_draws_on_the_host() -> None:
    @strategy("own")
    def last(facts: Facts, back: int = 0) -> HostFunction:
        """The start so many steps before the end of episode B - 1 - b."""

        def sample(seed: int, first_step: int, steps: int, count: int) -> Segments:
            episodes = np.tile(np.arange(count)[::-1], (steps, 1))
            starts = facts.episodes.lengths[episodes] - 1 - back
            return Segments(episodes=episodes, starts=starts, probability=np.ones(starts.shape))

        return HostFunction(facts.episodes, sample)

    sampler = make("own", {}, LENGTHS)
    assert sampler.sample(0, 0, 2, 3).starts.tolist() == [[1, 6, 0]] * 2
    assert (sampler.name, sampler.options, sampler.gpu) == ("own", {"back": 0}, None)
    few = make_sampler("own", facts(LENGTHS), kept=np.arange(6) % 2 == 1)
    assert few.sample(0, 0, 1, 3).episodes.tolist() == [[5, 3, 1]]
    with one_error("SELECTION", "back: Input should be a whole number"):
        make("own", {"back": 1.5}, LENGTHS)
    with one_error("SELECTION", "own cannot be a part: the density"):
        make("mixture", {"parts": [{"strategy": "own", "weight": 1}]}, LENGTHS)
    part = TaskPart(name="own", sampler=sampler)
    assert failing_code(lambda: mix_tasks([part, part])) == "SELECTION"


@pytest.mark.usefixtures("forget_own")
@pytest.mark.parametrize("weights", [[1.0, 2.0], 1.0, None])
def test_weights_of_ones_own_are_one_an_episode(weights: Any) -> None:
    strategy("own")(lambda facts: weights)
    with one_error("SELECTION", "6 weights are needed"):
        make("own", {}, LENGTHS)


def test_episodes_that_crowd_a_range_of_the_guide_are_found_as_by_a_search() -> None:
    weights = np.ones(4001)  # several share a range beside the one that has nearly everything
    weights[2000] = 1e5
    sampler = CumulativeWeights(EpisodeIndex(np.ones(4001, np.int64)), weights)
    drawn = sampler.sample(5, 0, 20, 1000).episodes.ravel()
    raw = np.random.Philox(key=np.array([5, 0], np.uint64)).random_raw(40_000)[::2]
    ends = np.cumsum(weights) / weights.sum()
    np.testing.assert_array_equal(drawn, np.searchsorted(ends, raw * 2.0**-64, side="right"))
    assert np.count_nonzero(drawn != 2000) > 500
