"""Mixtures over tasks: the stated law exactly, each task's own, weights that change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gear_offline.dataset.schema import EpisodeIndex
from gear_offline.kernels.rules import MIXTURE, WEIGHTED_EPISODES, law_number
from gear_offline.sampling.base import Float64Array
from gear_offline.sampling.selection import Segments, Selection, make_selection
from gear_offline.sampling.tasks import TaskLaw, TaskMixture, TaskPoint, mix_tasks
from gear_offline.sampling.weighted import WeightedEpisodes
from tests.law_support import facts, p_value
from tests.support import failing_code

SIGNIFICANCE = 1e-6  # fixed seeds: what passes passes always
LENGTHS = [[3, 1, 4], [5, 2], [2, 2, 6, 1]]
LAWS: list[tuple[str, dict[str, Any]]] = [
    ("uniform_steps", {}),
    ("uniform_episodes", {}),
    ("return_weighted", {"rule": "rank"}),
]


def task_laws(
    laws: Sequence[tuple[str, dict[str, Any]]] = LAWS, weights: Sequence[float] = (1.0, 3.0, 2.0)
) -> list[TaskLaw]:
    found = []
    for number, ((name, options), weight) in enumerate(zip(laws, weights, strict=True)):
        data = facts(LENGTHS[number])
        law = make_selection(name, data, context_length=4, **options)
        task = f"task{number}"
        found.append(TaskLaw(name=task, index=data.episodes, selection=law, weight=weight))
    return found


def every_segment() -> Segments:
    """All (episode, start) of the joint table."""
    lengths = list(chain(*LENGTHS))
    pairs = [(e, s) for e, length in enumerate(lengths) for s in range(length)]
    episodes, starts = (np.array(column) for column in zip(*pairs, strict=True))
    return Segments(episodes=episodes, starts=starts, probability=np.zeros(len(pairs)))


def wanted(tasks: Sequence[TaskLaw], weights: Sequence[float]) -> list[float]:
    """The oracle: each task's own law, enumerated, times the task's share."""
    total = sum(Fraction(weight) for weight in weights)
    found: list[float] = []
    for task, weight in zip(tasks, weights, strict=True):
        pairs = [(e, s) for e in range(task.index.episodes) for s in range(task.index.lengths[e])]
        own = Segments(
            episodes=np.array([e for e, _ in pairs]),
            starts=np.array([s for _, s in pairs]),
            probability=np.zeros(len(pairs)),
        )
        law: Any = task.selection
        found += [float(Fraction(weight) / total) * p for p in law.density(own)]
    return found


@pytest.mark.parametrize("scheduled", [False, True])
def test_the_law_is_each_tasks_own_times_its_share(scheduled: bool) -> None:
    tasks, weights = task_laws(), (1.0, 3.0, 2.0)
    points = [TaskPoint(step=0, weights={t.name: t.weight for t in tasks})] if scheduled else []
    law: Any = mix_tasks(tasks, points)
    assert type(law).__name__ == ("TaskMixture" if scheduled else "WeightedTasks")
    exact = np.array(wanted(tasks, weights))
    assert exact.sum() == pytest.approx(1.0)
    named = every_segment()
    steps, count = 60, 500
    drawn = law.select_many(seed=7, first_step=0, steps=steps, count=count)
    if not scheduled:
        np.testing.assert_allclose(law.density(named), exact, rtol=1e-12)
    first = np.cumsum([0, *list(chain(*LENGTHS))])
    rows = first[drawn.episodes] + drawn.starts
    np.testing.assert_allclose(drawn.probability, exact[rows], rtol=1e-12)
    counts = np.bincount(rows.ravel(), minlength=exact.size)
    assert p_value(counts, exact * rows.size) > SIGNIFICANCE


def chosen(law: Selection, step: int, count: int = 4000) -> list[float]:
    """Shares of the tasks in a step."""
    bounds = np.cumsum([len(lengths) for lengths in LENGTHS])[:-1]
    episodes = law.select(seed=1, step=step, count=count).episodes
    shares = np.bincount(np.searchsorted(bounds, episodes, side="right"), minlength=3) / count
    return [float(share) for share in shares]


def test_weights_change_linearly_between_the_points_of_a_schedule() -> None:
    tasks = task_laws()
    points = [
        TaskPoint(step=0, weights={"task0": 1.0, "task1": 0.0, "task2": 0.0}),
        TaskPoint(step=100, weights={"task0": 0.0, "task1": 0.5, "task2": 0.5}),
    ]
    law = mix_tasks(tasks, points)
    assert chosen(law, 0) == [1.0, 0.0, 0.0]
    assert chosen(law, 50) == pytest.approx([0.5, 0.25, 0.25], abs=0.03)
    assert chosen(law, 100)[0] == 0.0 and chosen(law, 10**9)[0] == 0.0
    whole = law.select_many(seed=1, first_step=49, steps=3, count=32)
    for row in range(3):
        one = law.select(seed=1, step=49 + row, count=32)
        assert whole.episodes[row].tolist() == one.episodes.tolist()
        assert whole.probability[row].tolist() == one.probability.tolist()


@settings(max_examples=30, deadline=None)
@given(
    weights=st.lists(st.sampled_from([0.0, 1e-9, 0.5, 3.0, 1e12]), min_size=3, max_size=3).filter(
        lambda w: sum(w) > 0
    ),
    seed=st.integers(0, 2**63),
)
def test_any_weights_give_their_shares(weights: list[float], seed: int) -> None:
    law = mix_tasks(task_laws(weights=weights))
    assert isinstance(law, WeightedEpisodes), "the GPU draws laws of weighted episodes"
    bounds = np.cumsum([0, *(len(lengths) for lengths in LENGTHS)])
    shares = np.add.reduceat(law.episode_weight, bounds[:-1])
    np.testing.assert_allclose(shares, np.array(weights) / sum(weights), rtol=1e-9, atol=1e-18)
    drawn = law.select(seed=seed, step=0, count=64)
    tasks = np.searchsorted(bounds, drawn.episodes, side="right") - 1
    assert all(weights[task] > 0 for task in tasks)
    assert (drawn.starts < law.index.lengths[drawn.episodes]).all()


def test_the_gpu_has_kernels_for_weights_that_change_and_those_that_do_not() -> None:
    tasks = task_laws()
    points = [TaskPoint(step=0, weights={t.name: t.weight for t in tasks})]
    assert law_number(mix_tasks(tasks)) == WEIGHTED_EPISODES
    assert law_number(mix_tasks(tasks, points)) == MIXTURE
    other = task_laws([*LAWS[:2], ("stratified_return", {"strata": 2})])
    assert failing_code(lambda: law_number(mix_tasks(other))) == "ENGINE_SELECTION"


def test_one_task_has_the_draws_of_its_own_law() -> None:
    (task,) = task_laws(LAWS[:1], (0.3,))
    assert mix_tasks([task]) is task.selection


def test_options_say_all_and_laws_that_do_not_mix_are_refused() -> None:
    law = mix_tasks(task_laws())
    assert law.name == "tasks"
    assert [part["task"] for part in law.options["parts"]] == ["task0", "task1", "task2"]
    assert law.options["parts"][2]["strategy"] == "return_weighted"
    for name in ("shuffled_epochs", "fifo", "prioritized"):
        laws: list[tuple[str, dict[str, Any]]] = [("uniform_steps", {}), (name, {})]
        assert failing_code(partial(mix_tasks, task_laws(laws, (1.0, 1.0)))) == "TASK_STRATEGY"
    assert failing_code(lambda: mix_tasks(task_laws(weights=(0.0,) * 3))) == "SELECTION_OPTIONS"


def test_laws_of_other_kinds_are_drawn_part_by_part() -> None:
    laws: list[tuple[str, dict[str, Any]]] = [
        ("stratified_return", {"strata": 2}),
        ("uniform_steps", {}),
    ]
    tasks = task_laws(laws, (1.0, 1.0))
    law = mix_tasks(tasks)
    assert isinstance(law, TaskMixture)
    drawn = law.select_many(seed=3, first_step=0, steps=40, count=500)
    lengths = list(chain(*LENGTHS[:2]))
    first = np.cumsum([0, *lengths])
    rows = first[drawn.episodes] + drawn.starts
    exact = np.array(wanted(tasks, (1.0, 1.0)))
    np.testing.assert_allclose(drawn.probability, exact[rows], rtol=1e-12)
    counts = np.bincount(rows.ravel(), minlength=exact.size)
    assert p_value(counts, exact * rows.size) > SIGNIFICANCE
    assert EpisodeIndex(np.array(lengths)).steps == exact.size


class LastSteps(WeightedEpisodes):
    """A law on top of the package's that draws otherwise: only the last step of an episode."""

    name = "last_steps"

    def select_many(self, **range_: Any) -> Segments:
        drawn = super().select_many(**range_)
        return replace(
            drawn,
            starts=self.index.lengths[drawn.episodes] - 1,
            probability=self.thresholds.probability(drawn.episodes),
        )


class KnownLastSteps(LastSteps):
    def density(self, segments: Segments) -> Float64Array:
        last = segments.starts == self.index.lengths[segments.episodes] - 1
        return np.asarray(self.thresholds.probability(segments.episodes) * last)


def test_a_law_on_top_of_weighted_episodes_draws_as_it_does_alone() -> None:
    """The tasks drew any step of its episodes."""
    own, other = task_laws(LAWS[:2], (1.0, 1.0))
    weights = np.ones(own.index.episodes)
    unknown = replace(own, selection=LastSteps(own.index, weights))
    assert failing_code(lambda: mix_tasks([unknown, other])) == "TASK_STRATEGY"
    law = mix_tasks([replace(own, selection=KnownLastSteps(own.index, weights)), other])
    drawn = law.select(seed=1, step=0, count=500)
    mine = drawn.episodes < own.index.episodes
    assert (drawn.starts[mine] == own.index.lengths[drawn.episodes[mine]] - 1).all()
    np.testing.assert_allclose(drawn.probability[mine], 0.5 / own.index.episodes)
