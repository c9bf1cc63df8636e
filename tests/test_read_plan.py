"""The plan of the disk tier against dictionaries, and what it must never do."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gear_offline.tables.read_plan import GOLDEN_RATIO, Job, Needs, ReadPlan

STEPS, SPAN = 60, 4  # of the table; K


@cache
def low_of(step: int, batch: int) -> list[int]:
    """Return the first steps of the windows of a step; a pure function."""
    return [int(n) for n in np.random.default_rng(step).integers(0, STEPS, batch)]


def make(batch: int, slots: int, depth: int, horizon: int, chunk: int) -> ReadPlan:
    def needs(first_step: int, steps: int) -> Needs:
        low = np.array([low_of(s, batch) for s in range(first_step, first_step + steps)]).ravel()
        real = np.minimum(SPAN, STEPS - low)
        return Needs(episode=low // 5, low=low, real=real, chunk=low // chunk, before=low % 3)

    return ReadPlan(needs, batch=batch, slots=slots, depth=depth, horizon=horizon)


def extend(plan: ReadPlan) -> None:
    while (wanted := plan.wanted()) is not None:
        generation, first_step, steps = wanted
        plan.extend(generation, plan.select(first_step, steps))


@dataclass
class Oracle:
    """The rule in words: a chunk is read when its next window is due and missing.

    It gives all its windows of the horizon that are missing, those of a first read only up to a
    point that differs from chunk to chunk, as far as there is room.  Windows that are due take the
    room of those that are needed last.  Several chunks are read together, those needed soonest;
    what they give is known before any of them takes room.
    """

    batch: int
    slots: int
    depth: int
    horizon: int
    chunk: int
    base: int = 0
    start: int = 0
    held: dict[int, bool] = field(default_factory=dict)  # reference to whether it has arrived

    def low(self, reference: int) -> int:
        return low_of(reference // self.batch, self.batch)[reference % self.batch]

    def next_job(self, most: int) -> tuple[list[int], list[int]] | None:
        due = range(self.base, self.base + self.depth)
        missing = [q for q in due if q not in self.held]
        chunks = list(dict.fromkeys(self.low(q) // self.chunk for q in missing))[:most]
        wanted = [self.wanted(chunk) for chunk in chunks]
        found, begun = list[int](), list[int]()
        for chunk, mine in zip(chunks, wanted, strict=True):
            admitted = self.admit(mine, due)
            if not admitted:
                break
            found += admitted
            begun.append(chunk)
        return (begun, sorted(found)) if found else None

    def wanted(self, chunk: int) -> list[int]:
        mine = [
            q
            for q in range(self.base, self.base + self.horizon)
            if q not in self.held and self.low(q) // self.chunk == chunk
        ]
        end = self.start + int(self.horizon * (chunk * GOLDEN_RATIO % 1.0))
        return [q for q in mine if q < end] if mine[0] < end else mine

    def admit(self, mine: list[int], due: range) -> list[int]:
        room = self.slots - len(self.held)
        urgent = [q for q in mine if q in due]
        if len(urgent) <= room:
            mine = mine[:room]
        else:
            mine = urgent
            while len(mine) > self.slots - len(self.held):
                last = max((q for q, here in self.held.items() if here), default=-1)
                if last > max(mine[-1], urgent[0]):
                    del self.held[last]  # Belady: what is needed last goes
                else:
                    mine.pop()
        self.held |= dict.fromkeys(mine, False)
        return mine

    def move(self, step: int) -> None:
        self.base = step * self.batch
        self.held = {q: here for q, here in self.held.items() if q >= self.base}


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 5),
    room=st.integers(0, 30),
    depth=st.integers(0, 12),
    further=st.integers(0, 60),
    chunk=st.integers(1, 25),
    most=st.integers(1, 5),
    choices=st.lists(st.integers(0, 3), min_size=20, max_size=80),
)
def test_jobs_are_those_of_the_oracle(
    batch: int, room: int, depth: int, further: int, chunk: int, most: int, choices: list[int]
) -> None:
    slots, depth = 2 * batch + room, batch + min(depth, batch + room)
    horizon = depth + further
    plan = make(batch, slots, depth, horizon, chunk)
    oracle = Oracle(batch, slots, depth, horizon, chunk)
    step, content = 0, dict[int, int]()  # slot to the reference that was read into it
    extend(plan)
    for choice in choices:
        if choice == 0 and (found := plan.ready_windows(step, 1)) is not None:
            expected = [step * batch + i for i in range(batch)]
            assert [content[slot] for slot in found.slots.tolist()] == expected
            assert found.low.tolist() == low_of(step, batch)
            assert found.episode.tolist() == [low // 5 for low in low_of(step, batch)]
            step += 1
            plan.move(step)
            oracle.move(step)
            extend(plan)
        job, expected_job = plan.next_job(most), oracle.next_job(most)
        assert (job is None) == (expected_job is None)
        if job is not None and expected_job is not None:
            assert (job.chunks.tolist(), sorted(job.references.tolist())) == expected_job
            assert job.places.low.tolist() == sorted(oracle.low(q) for q in expected_job[1])
            at = job.places
            parts = (at.slots, job.references, at.low, at.real, at.before)
            for slot, reference, low, real, before in zip(
                *(p.tolist() for p in parts), strict=True
            ):
                assert oracle.low(reference) == low
                assert (real, before) == (min(SPAN, STEPS - low), low % 3)
                content[slot] = reference
            plan.finish(job)
            oracle.held |= dict.fromkeys(job.references.tolist(), True)
        # No slot holds two windows that are waited for.
        waited = {q for q, here in oracle.held.items() if here}
        assert waited <= set(content.values())


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
    step, under_way = 0, list[Job]()
    for wanted in [*moves, 1000]:
        if wanted != step:
            plan.move(wanted)
        for step in range(wanted, wanted + 3):
            for _ in range(10_000):
                extend(plan)
                while len(under_way) < parallel and (job := plan.next_job(most)) is not None:
                    under_way.append(job)
                if plan.ready_windows(step, 1) is not None:
                    break
                assert under_way, "nothing is being read and the step is not there"
                plan.finish(under_way.pop(0))
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
