"""Tables of limited size: what Reverb's own table keeps, and exact probabilities."""

import json
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gear_offline.batches.sampling import CumulativeWeights, make_sampler
from gear_offline.batches.sampling.items import Items
from gear_offline.config.recipe import load_recipe
from gear_offline.config.sections import DataSettings
from tests.sampling_support import CASES, CONTEXT, IDS, facts, p_value
from tests.support import one_error
from tests.test_sampling import LENGTHS, same

RECORDED = [  # from dm-reverb 0.14.0, removers alone and everything together
    json.loads((Path(__file__).parent / f"fixtures/reverb_{name}.json").read_text())
    for name in ("removers", "operations")
]
HEAPS = {f"{of}_heap": ("heap", {"of": of}) for of in ("max", "min")}


class Episodes:
    """As much of a dataset as a table looks at."""

    def __init__(self, returns: list[float]) -> None:
        self.returns = np.array(returns)

    def __len__(self) -> int:
        return len(self.returns)


def kept(items: Items, returns: list[float]) -> list[int]:
    found = items.insert(Episodes(returns))  # type: ignore[arg-type]
    assert found is not None
    return np.flatnonzero(found).tolist()


def table(remover: Any, max_size: int | None, seed: int = 0, slots: int = 1, **more: Any) -> Items:
    settings = {"path": "x", "admit_every": 1, "max_size": max_size, "remover": remover}
    data, loader = DataSettings.model_validate(settings | more), SimpleNamespace(batch_size=slots)
    return Items(SimpleNamespace(data=data, seed=seed, loader=loader))  # type: ignore[arg-type]


@pytest.mark.parametrize("case", RECORDED[0], ids=lambda c: f"{c['remover']}-{c['max_size']}")
def test_removers_keep_what_reverb_keeps(case: dict[str, Any]) -> None:
    """Asked after every insertion; many priorities are equal."""
    items, priorities = table(case["remover"], case["max_size"]), case["priorities"]
    found = [kept(items, priorities[: n + 1]) for n in range(len(priorities))]
    assert found == case["kept"]


@pytest.mark.parametrize("case", RECORDED[1], ids=lambda c: f"{c['sampler']}-{c['remover']}")
def test_operations_in_any_order_do_what_they_do_in_reverb(case: dict[str, Any]) -> None:
    """What may be done, what is drawn, how often it was, and how many are there; also a queue."""
    name, options = HEAPS.get(case["sampler"], (case["sampler"], {}))
    limits = {"max_times_sampled": case["most"] or 1000, "limiter": case["limiter"]}
    items, step = table(case["remover"], case["max_size"], **limits), 0
    priorities = list[float]()
    for (may_insert, may_sample), done in case["operations"]:
        items.advance(step, coming=1)
        items.insert(Episodes(priorities))  # type: ignore[arg-type]
        assert (items.missing() is None) == may_sample
        assert items.may_insert(1) == may_insert
        if isinstance(done, float):
            priorities.append(done)
            continue
        data = facts([1] * len(priorities), priorities)
        sampler = make_sampler(name, data, kept=items.kept, **options)
        drawn = items.count_draws(sampler, step).sample(0, step, 1, 1)
        names = ("episodes", "probability", "table_size", "times_sampled")
        assert [getattr(drawn, name).item() for name in names] == done
        step += 1


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 8), st.integers(0, 12), st.data())
def test_what_is_admitted_already_counts_as_inserted(
    first: int, behind: int, least: int, step: int, data: st.DataObject
) -> None:
    """More may come behind it as if it had come; so too where a run would wait for ever."""
    most, coming = data.draw(st.none() | st.integers(1, 4)), data.draw(st.integers(0, 12))
    limiter = {"min_size": least, "samples_per_insert": 2.0, "error_buffer": 2.0}
    both = [table("fifo", None, max_times_sampled=most, limiter=limiter) for _ in range(2)]
    for items in both:
        items.insert(Episodes([0.0] * first))  # type: ignore[arg-type]
        items.advance(step, coming=coming)
    both[1].insert(Episodes([0.0] * (first + behind)))  # type: ignore[arg-type]
    for more in (1, 3):
        assert both[0].may_admit(more, behind) == both[1].may_admit(more, 0)


@pytest.mark.parametrize("remover", ["uniform", "prioritized"])
def test_chance_removes_by_weight_alone(remover: str) -> None:
    """Against all that can happen, summed up: each time any item, in proportion to its weight."""
    priorities = [1.0, 4.0, 0.5, 2.0, 1.0, 3.0]

    @cache
    def law(there: tuple[int, ...], coming: int) -> Counter[tuple[int, ...]]:
        if coming == len(priorities):
            return Counter({there: 1.0})
        items, total = (*there, coming), Counter[tuple[int, ...]]()
        if len(items) <= 3:
            return law(items, coming + 1)
        weights = [1.0 if remover == "uniform" else priorities[i] for i in items]
        for item, weight in zip(items, weights, strict=True):
            rest = tuple(i for i in items if i != item)
            for end, chance in law(rest, coming + 1).items():
                total[end] += chance * weight / sum(weights)  # type: ignore[assignment]
        return total

    exact = law((), 0)
    drawn = Counter(tuple(kept(table(remover, 3, seed), priorities)) for seed in range(4000))
    assert set(drawn) <= set(exact)
    counts = np.array([drawn[end] for end in exact])
    assert p_value(counts, 4000 * np.array(list(exact.values()))) > 1e-4


def test_draws_are_counted_and_their_probabilities_exact() -> None:
    """Of every order of three draws, each of what is left then, in proportion to its weight."""
    lengths, most = [3, 1, 2], 2
    data = Episodes([0.0] * 3)
    counts, law = Counter[tuple[int, ...]](), dict[tuple[int, ...], float]()
    for seed in range(3000):
        items = table("fifo", None, seed, slots=3, max_times_sampled=most)
        sampler = make_sampler("uniform_steps", facts(lengths), kept=items.insert(data))  # type: ignore[arg-type]
        counted = items.count_draws(sampler, 0)
        drawn = counted.sample(seed, 0, 1, 3)[0]
        left, chance = Counter(dict.fromkeys(range(3), most)), 1.0
        for at, episode in enumerate(drawn.episodes.tolist()):
            assert drawn.table_size is not None and drawn.times_sampled is not None
            there = [e for e in left if left[e]]
            share = lengths[episode] / sum(lengths[e] for e in there)
            assert drawn.probability[at] == pytest.approx(share / lengths[episode], rel=1e-15)
            left[episode] -= 1
            assert drawn.times_sampled[at] == most - left[episode]
            assert drawn.table_size[at] == len(there)
            chance *= share
        order = tuple(drawn.episodes.tolist())
        counts[order], law[order] = counts[order] + 1, chance
        if seed == 0:
            block = counted.sample(seed, 0, 2, 3)  # all six
            assert same(block[1], counted.sample(seed, 1, 1, 3)[0])
            assert same(block[0], drawn)
            anew = counted.sample(seed, 2, 1, 3)  # nothing has come: all are there again
            assert anew.table_size is not None and anew.times_sampled is not None
            assert (anew.table_size[0, 0], anew.times_sampled[0, 0]) == (3, 1)
            assert counted.sample(seed, 1, 0, 3).shape == (0, 3)
    assert sum(law.values()) == pytest.approx(1)
    found = np.array([counts[order] for order in law])
    assert p_value(found, 3000 * np.array(list(law.values()))) > 1e-4


def test_counts_begin_anew_when_what_is_left_has_no_weight() -> None:
    items, data = (
        table("fifo", None, slots=2, max_times_sampled=1),
        facts([1, 1, 1], column=np.array([1, 0, 1])),
    )
    sampler = make_sampler("weighted", data, column="w", unit="episodes")
    items.insert(Episodes([0.0] * 3))  # type: ignore[arg-type]
    drawn = items.count_draws(sampler, 0).sample(0, 0, 3, 2)
    assert (np.sort(drawn.episodes, axis=1) == [0, 2]).all()


def test_what_draws_no_episodes_is_not_counted() -> None:
    with one_error("SELECTION", "prioritized draws no episodes by weight or in an order"):
        table("fifo", None, max_times_sampled=1).count_draws(
            make_sampler("prioritized", facts([3])), 0
        )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_size": 3}, "need admit_every"),
        ({"admit_every": 2, "max_size": 3, "limiter.min_size": 4}, "min_size is above max_size"),
        ({"admit_every": 2, "limiter.error_buffer": 4.0}, "need each other"),
        (
            {"admit_every": 2, "limiter.error_buffer": 31.0, "limiter.samples_per_insert": 1.0},
            "must span 64, twice .* got 62: raise it to 32",
        ),
    ],
)
def test_options_that_would_wait_for_ever_are_refused(options: dict[str, Any], said: str) -> None:
    changes = {f"data.{name}": value for name, value in options.items()}
    with one_error("RECIPE", said):
        load_recipe("smoke", {"data.path": "x", "data.collect": None} | changes)


@given(
    st.sampled_from(["fifo", "lifo", "uniform", "prioritized", "max_heap", "min_heap"]),
    st.integers(1, 4),
    st.lists(st.integers(0, 3), min_size=1, max_size=12),
    st.data(),
)
def test_what_is_kept_does_not_depend_on_who_looks_when(
    remover: str, size: int, priorities: list[int], data: Any
) -> None:
    values = [float(p) for p in priorities]
    items = table(remover, size)
    for looks in sorted(data.draw(st.lists(st.integers(1, len(values)), max_size=3))):
        kept(items, values[:looks])
    found = kept(items, values)
    assert found == kept(table(remover, size), values)
    assert len(found) == min(size, len(values))


@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
def test_a_sampler_draws_as_if_there_were_only_what_is_kept(
    name: str, options: dict[str, Any]
) -> None:
    is_kept = np.array([False, True, True, False, True, False])
    whole = replace(facts(LENGTHS), returns=np.array([9.0, 1, 3, 8, 2, 7]))
    alone = replace(whole, kept=is_kept).of_kept()
    sampler = make_sampler(name, whole, context_length=CONTEXT, kept=is_kept, **options)
    small = make_sampler(name, alone, context_length=CONTEXT, **options)
    drawn, fewer = (s.sample(5, 3, 40, 2) for s in (sampler, small))
    members = np.flatnonzero(is_kept)
    named = replace(fewer, episodes=members[fewer.episodes])
    if sampler.loss_sampler is None:
        assert same(drawn, named)
    assert is_kept[drawn.episodes].all()
    law, own = sampler.density(drawn), small.density(fewer)
    assert (law is None) == (own is None)
    if law is not None:
        np.testing.assert_allclose(law, drawn.probability, rtol=1e-12)
        everywhere = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
        starts = np.concatenate([np.arange(n) for n in LENGTHS])
        every = replace(drawn, episodes=everywhere, starts=starts, probability=0.0 * starts)
        total = sampler.density(replace(every, lengths=None))
        if not sampler.cuts_windows and total is not None:
            assert total.sum() == pytest.approx(1) and not total[~is_kept[everywhere]].any()
    if isinstance(sampler, CumulativeWeights) and isinstance(small, CumulativeWeights):
        numbers = np.random.default_rng(0).integers(0, 2**64, 1000, dtype=np.uint64)
        found = members[small.gpu.search.find(numbers)]
        assert np.array_equal(sampler.gpu.search.find(numbers), found)
    assert (sampler.gpu is None) or name != "shuffled_epochs"
    assert sampler.name == name and sampler.padding == small.padding
