"""Tables of limited size: what Reverb's own table keeps, and exact probabilities."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gear_offline.config.sections import DataSettings
from gear_offline.kernels.draws import CumulativeWeights
from gear_offline.sampling import make_sampler
from gear_offline.sampling.items import Items
from tests.sampling_support import CASES, CONTEXT, IDS, facts, p_value
from tests.test_sampling import LENGTHS, same

RECORDED = json.loads((Path(__file__).parent / "fixtures/reverb_removers.json").read_text())


class Episodes:
    """As much of a dataset as a table looks at."""

    def __init__(self, returns: list[float]) -> None:
        self.returns = np.array(returns)

    def __len__(self) -> int:
        return len(self.returns)


def kept(items: Items, returns: list[float]) -> list[int]:
    found = items.follow(Episodes(returns))  # type: ignore[arg-type]
    assert found is not None
    return np.flatnonzero(found).tolist()


def table(remover: Any, max_size: int, seed: int = 0) -> Items:
    settings = {"path": "x", "admit_every": 1, "max_size": max_size, "remover": remover}
    return Items(DataSettings.model_validate(settings), seed)


@pytest.mark.parametrize("case", RECORDED, ids=lambda c: f"{c['remover']}-{c['max_size']}")
def test_removers_keep_what_reverb_keeps(case: dict[str, Any]) -> None:
    """Recorded from dm-reverb 0.14.0, which was asked after every insertion; many are equal."""
    items, priorities = table(case["remover"], case["max_size"]), case["priorities"]
    found = [kept(items, priorities[: n + 1]) for n in range(len(priorities))]
    assert found == case["kept"]


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
    if isinstance(sampler.gpu, CumulativeWeights) and isinstance(small.gpu, CumulativeWeights):
        numbers = np.random.default_rng(0).integers(0, 2**64, 1000, dtype=np.uint64)
        found = members[small.gpu.search.find(numbers)]
        assert np.array_equal(sampler.gpu.search.find(numbers), found)
    assert (sampler.gpu is None) or name != "shuffled_epochs"
    assert sampler.name == name and sampler.padding == small.padding
