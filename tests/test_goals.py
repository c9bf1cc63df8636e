"""Goals of segments: their law against one written out by hand, their states, who may ask."""

from __future__ import annotations

from collections import Counter, defaultdict
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gear_offline.dataset.dataset import Dataset
from gear_offline.distributed.world import World
from gear_offline.loaders.loader import GearLoader
from gear_offline.loaders.options import check_options
from tests.image_support import image_columns
from tests.sampling_support import p_value
from tests.support import hopper_columns, make_dataset, one_error

LENGTHS = [6, 1, 9, 3]
SPAN = 3
OPTIONS: dict[str, Any] = {"batch_size": 8, "context_length": SPAN, "device": "cpu"}
LEFT: dict[str, Any] = {  # what GearLoader gives to `check_options` besides
    **dict.fromkeys(("placement", "sharding", "exchange"), "auto"),
    **{"context_length": 3, "padding": "right", "hbm_budget": None, "host_budget": None},
}
MIXED = {"current": 0.2, "future": 0.5, "final": 0.1, "random": 0.2, "discount": 0.75}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    columns = hopper_columns(sum(LENGTHS))
    del columns["rewards"]  # goals need none
    return make_dataset(tmp_path_factory.mktemp("goals"), LENGTHS, columns=columns)


def law(goals: dict[str, Any], episode: int, start: int) -> dict[tuple[int, int], float]:
    """The probability of every goal of a segment, from the definition in the docs."""
    now, last = min(start + SPAN, LENGTHS[episode]) - 1, LENGTHS[episode] - 1
    found: dict[tuple[int, int], Fraction] = defaultdict(Fraction)
    found[episode, now] += Fraction(goals.get("current", 0))
    found[episode, last] += Fraction(goals.get("final", 0))
    for each, length in enumerate(LENGTHS):
        for step in range(length):
            found[each, step] += Fraction(goals.get("random", 0)) / sum(LENGTHS)
    future, later = Fraction(goals.get("future", 0)), last - now
    keep = None if goals.get("discount") is None else Fraction(goals["discount"])
    for k in range(1, later + 1):
        share = Fraction(1, later) if keep is None else (1 - keep) * keep ** (k - 1)
        found[episode, now + k] += future * share
        future_left = 0 if keep is None else keep**later
    if later == 0:
        future_left = 1
    found[episode, last] += future * future_left
    whole = sum(Fraction(goals.get(name, 0)) for name in ("current", "future", "final", "random"))
    return {goal: float(chance / whole) for goal, chance in found.items() if chance}


@settings(max_examples=30, deadline=None)
@given(
    shares=st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.5]), min_size=4, max_size=4).filter(any),
    discount=st.none() | st.sampled_from([0.0, 0.5, 0.99]),
    seed=st.integers(0, 2**64 - 1),
    step=st.integers(0, 2**62),
)
def test_probabilities_are_those_of_the_law(
    dataset: Dataset, shares: list[float], discount: float | None, seed: int, step: int
) -> None:
    names = ("current", "future", "final", "random")
    goals: dict[str, Any] = {**dict(zip(names, shares, strict=True)), "discount": discount}
    loader = GearLoader(dataset, goals=goals, seed=seed, **OPTIONS)
    segments, drawn = loader.segments_at(step), loader.goals_at(step)
    plain = GearLoader(dataset, seed=seed, **OPTIONS)
    assert plain.batch_at(step).segments.tolist() == loader.batch_at(step).segments.tolist()
    named = zip(segments.episodes, segments.starts, drawn.episodes, drawn.starts, strict=True)
    for (episode, start, other, goal), chance in zip(named, drawn.probability, strict=True):
        expected = law(goals, int(episode), int(start))[int(other), int(goal)]
        assert chance == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("goals", [MIXED, {"future": 1.0}, {"future": 1.0, "discount": 0.5}])
def test_frequencies(dataset: Dataset, goals: dict[str, Any]) -> None:
    """Chi-square over the goals of one segment at significance 1e-4; the seed is fixed."""
    loader = GearLoader(dataset, goals=goals, seed=1, **OPTIONS | {"batch_size": 60_000})
    segments, drawn = loader.segments_at(0), loader.goals_at(0)
    chosen = (segments.episodes == 2) & (segments.starts == 1)
    seen = Counter(zip(drawn.episodes[chosen].tolist(), drawn.starts[chosen].tolist(), strict=True))
    expected = law(goals, 2, 1)
    assert set(seen) == set(expected)
    counts = np.array([seen[goal] for goal in expected])
    assert p_value(counts, np.array(list(expected.values())) * counts.sum()) > 1e-4


@pytest.mark.parametrize("frames", [False, True])
def test_goals_are_states_of_the_dataset(dataset: Dataset, tmp_path: Path, frames: bool) -> None:
    """Prepared as the states are, whatever block or rank they are made in."""
    options: dict[str, Any] = {**OPTIONS, "goals": MIXED, "normalize_states": not frames}
    if frames:
        dataset = make_dataset(tmp_path, LENGTHS, columns=image_columns(sum(LENGTHS), (4, 5)))
        options["frame_stack"] = 2
    loader = GearLoader(dataset, **options)
    whole = GearLoader(dataset, **options | {"batch_size": 4000, "context_length": 1}).batch_at(0)
    states = {tuple(name): whole.states[i, 0] for i, name in enumerate(whole.segments.tolist())}
    worlds = (World(rank=rank, nodes=(0, 0)) for rank in range(2))
    ranks = [GearLoader(dataset, table=loader.table, world=w, **options) for w in worlds]
    for step in range(5):
        batch, drawn = next(loader), loader.goals_at(step)
        assert batch.goals is not None and batch.goals is batch["goals"]
        for slot, name in enumerate(zip(drawn.episodes, drawn.starts, strict=True)):
            assert torch.equal(batch.goals[slot, 0], states[name])
        assert torch.equal(loader.batch_at(step)["goals"], batch.goals)
        assert torch.equal(torch.cat([next(rank)["goals"] for rank in ranks]), batch.goals)
    assert "goals" not in batch.model_inputs()


def test_who_may_ask_for_goals(dataset: Dataset, tmp_path: Path) -> None:
    for goals, words in (
        ({"futur": 1.0}, "goals.futur"),
        ({}, "must not be all 0"),
        ({"future": 1.0, "discount": 1.0}, "goals.discount: .* less than 1"),
        ("future", "goals: "),
    ):
        with one_error("LOADER_OPTION", words):
            GearLoader(dataset, goals=goals, **OPTIONS)  # type: ignore[arg-type]
    for name, value in (("placement", "disk"), ("sharding", "shard"), ("extra_columns", ["goals"])):
        more: dict[str, Any] = {name: value}
        with one_error("LOADER_OPTION", "goals"):
            GearLoader(dataset, goals=MIXED, **OPTIONS, **more)
    with one_error("LOADER_OPTION", "engine='auto' with goals"):
        check_options(torch.device("cuda"), **LEFT, batch_size=8, engine="on", goals=MIXED)
    loader, plain = (GearLoader(dataset, goals=g, **OPTIONS) for g in (MIXED, None))
    with one_error("LOADER_STATE", "goals is"):
        plain.load_state_dict(loader.state_dict())
    plain.load_state_dict({k: v for k, v in plain.state_dict().items() if k != "goals"})
    loader.load_state_dict(loader.state_dict())
    with one_error("LOADER_OPTION", "goals=None"):
        plain.goals_at(0)
    assert next(plain).goals is None
