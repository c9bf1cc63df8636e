"""The plan of the disk tier: every window comes, is the right one, and few chunks are read."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gear_offline.tables.read_plan import Job, Needs, ReadPlan

STEPS, SPAN = 60, 4  # of the table; K


@cache
def low_of(step: int, batch: int) -> list[int]:
    """Return the first steps of the windows of a step; a pure function."""
    return [int(n) for n in np.random.default_rng(step).integers(0, STEPS, batch)]


def make(batch: int, slots: int, depth: int, horizon: int, chunk: int) -> ReadPlan:
    def needs(first_step: int, steps: int) -> Needs:
        low = np.array([low_of(s, batch) for s in range(first_step, first_step + steps)]).ravel()
        real = np.minimum(SPAN, STEPS - low)
        return Needs(low=low, real=real, chunk=low // chunk, before=low % 3)

    return ReadPlan(needs, batch=batch, slots=slots, depth=depth, horizon=horizon)


def extend(plan: ReadPlan) -> None:
    while (wanted := plan.wanted()) is not None:
        generation, first_step, steps = wanted
        plan.extend(generation, plan.select(first_step, steps))


@settings(max_examples=40, deadline=None)
@given(
    batch=st.integers(1, 4),
    room=st.integers(0, 10),
    chunk=st.integers(1, 30),
    parallel=st.integers(1, 5),
    most=st.integers(1, 4),
    moves=st.lists(st.integers(0, 40), max_size=12),
)
def test_it_always_goes_on(
    batch: int, room: int, chunk: int, parallel: int, most: int, moves: list[int]
) -> None:
    """With several reads under way, across jumps to any step, with as little room as there is."""
    slots = 2 * batch + room
    plan = make(batch, slots, min(4 * batch, slots), 5 * slots, chunk)
    step, under_way, content = 0, list[Job](), dict[int, int]()  # slot to what was read into it
    for wanted in [*moves, 1000]:
        if wanted != step:
            plan.move(wanted)
        for step in range(wanted, wanted + 3):
            for _ in range(10_000):
                extend(plan)
                while len(under_way) < parallel and (job := plan.next_job(most)) is not None:
                    under_way.append(job)
                if (found := plan.ready_windows(step, 1)) is not None:
                    expected = [step * batch + i for i in range(batch)]
                    assert [content[slot] for slot in found.slots.tolist()] == expected
                    assert found.low.tolist() == low_of(step, batch)
                    break
                assert under_way, "nothing is being read and the step is not there"
                job, at = under_way[0], under_way.pop(0).places
                low = [low_of(q // batch, batch)[q % batch] for q in job.references.tolist()]
                assert (
                    at.low.tolist() == low and (at.real == np.minimum(SPAN, STEPS - at.low)).all()
                )
                content |= zip(at.slots.tolist(), job.references.tolist(), strict=True)
                plan.finish(job)
            else:
                pytest.fail("the step never came")
            plan.move(step + 1)
        step = wanted + 3


def test_a_selection_begun_before_a_jump_is_dropped() -> None:
    plan = make(2, 8, 4, 20, 10)
    wanted = plan.wanted()
    assert wanted is not None and plan.wanted() is None, "one at a time"
    old = plan.select(*wanted[1:])
    plan.move(500)
    plan.extend(wanted[0], old)
    assert plan.next_job(1) is None, "nothing is known of step 500 yet"
    extend(plan)
    job = plan.next_job(1)
    assert job is not None and job.references.min() >= 1000


def test_one_read_serves_all_windows_of_its_chunk() -> None:
    """Far fewer chunks are read than windows are used, about 2 S / n of them for each."""
    batch, slots, chunk = 4, 200, 10
    plan = make(batch, slots, 8, 340, chunk)
    jobs = 0
    for step in range(1000):
        while plan.ready_windows(step, 1) is None:
            extend(plan)
            job = plan.next_job(1)
            assert job is not None
            plan.finish(job)
            jobs += 1
        plan.move(step + 1)
    assert 4000 / jobs > 0.6 * 340 / 6
