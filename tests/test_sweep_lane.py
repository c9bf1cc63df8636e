"""A lane without a GPU: what it launches, when it looks, and how it counts time."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gear_offline.config.recipe import load_recipe
from gear_offline.errors import GearError
from gear_offline.loaders.batch import Batch
from gear_offline.models.decision_transformer import build_model
from gear_offline.runs.training_run import TrainingInterrupted
from gear_offline.sweep.lane import CHUNK, DEEP, Lane, TurnRun
from gear_offline.sweep.turns import Turns
from tests.sweep_support import name_points

STEPS, LOG, SAVE, EVALUATE = 100, 20, 50, 30


class Mark:
    """An event of a GPU that has done `gpu.done` of the steps launched."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu, self._behind = gpu, gpu.launched

    def query(self) -> bool:
        return self._gpu.done >= self._behind


class FakeGpu:
    """Steps launched and steps done."""

    launched = done = 0


class FakeRun:
    """A run whose steps are only counted."""

    def __init__(self, gpu: FakeGpu) -> None:
        settings = load_recipe("paper").replace(
            train__steps=STEPS,
            train__log_every=LOG,
            train__checkpoint_every=SAVE,
            train__evaluate_every=EVALUATE,
            optimizer__warmup_steps=1,
        )
        self.settings, self.gpu, self.looks = settings.train, gpu, list[int]()
        self.learner = SimpleNamespace(
            step=0, advance=self._advance, is_captured=True, graph_reason="", count_busy=self._count
        )
        self.busy_seconds = 0.0
        self.must_wait, self.is_settled, self.polls = False, True, 0

    steps_to_look = TurnRun.steps_to_look
    is_done = TurnRun.is_done

    def _advance(self) -> None:
        self.learner.step += 1
        self.gpu.launched += 1

    def _count(self, seconds: float) -> None:
        self.busy_seconds += seconds

    def look(self) -> None:
        assert self.gpu.done == self.gpu.launched, "numbers that are not there yet"
        self.looks.append(self.learner.step)

    def poll(self) -> None:
        self.polls += 1


@pytest.fixture
def gpu() -> FakeGpu:
    return FakeGpu()


@pytest.fixture
def lane(gpu: FakeGpu) -> Lane:
    lane = Lane(torch.device("cpu"))

    @contextmanager
    def nothing() -> Iterator[None]:
        yield

    track: Any = SimpleNamespace(
        alone=nothing, launching=nothing, mark=lambda: Mark(gpu), stream="a stream"
    )
    lane.track = track
    run: Any = FakeRun(gpu)
    (point,) = name_points([load_recipe("paper")])
    lane.start(point, run, ExitStack())
    return lane


def test_it_runs_ahead_by_a_bounded_number_of_steps(lane: Lane, gpu: FakeGpu) -> None:
    lane.run.settings = lane.run.settings.model_copy(update={"log_every": 1000})
    lane.run.settings = lane.run.settings.model_copy(
        update={"checkpoint_every": 1000, "evaluate_every": None, "steps": 1000}
    )
    while lane.turn():
        assert gpu.launched <= DEEP * CHUNK
    assert gpu.launched == DEEP * CHUNK
    gpu.done = CHUNK
    assert lane.turn() and gpu.launched == (DEEP + 1) * CHUNK
    assert not lane.turn()


def test_it_looks_where_train_would_and_only_when_the_steps_are_done(
    lane: Lane, gpu: FakeGpu
) -> None:
    run: Any = lane.run
    turns = 0
    while not lane.is_finished:
        moved = lane.turn()
        if not moved:
            gpu.done = min(gpu.done + 3, gpu.launched)
        turns += 1
        assert turns < 1000
    assert gpu.launched == STEPS
    due = {s for s in range(1, STEPS + 1) if not (s % LOG and s % SAVE and s % EVALUATE)}
    assert run.looks == sorted({*due, STEPS})
    assert run.busy_seconds > 0.0, "the time in which the GPU worked is the run's"


def test_it_waits_for_room_among_evaluations_and_for_the_last_ones(
    lane: Lane, gpu: FakeGpu
) -> None:
    run: Any = lane.run

    def drain() -> None:
        while lane.turn() or gpu.done < gpu.launched:
            gpu.done = gpu.launched
            if run.learner.step == LOG and run.looks == [LOG]:
                return

    drain()
    assert run.looks == [LOG]
    run.must_wait = True
    for _ in range(20):
        lane.turn()
        gpu.done = gpu.launched
    assert run.looks == [LOG] and run.polls > 0, "its numbers are there, but no room"
    assert gpu.launched == EVALUATE
    run.must_wait, run.is_settled = False, False
    for _ in range(200):
        lane.turn()
        gpu.done = gpu.launched
    assert run.learner.step == STEPS and not lane.is_finished
    run.is_settled = True
    assert lane.is_finished


def test_captures_are_announced(lane: Lane) -> None:
    learner: Any = lane.run.learner
    assert not lane.will_capture
    learner.is_captured = False
    assert lane.will_capture
    learner.graph_reason = "CUDA graphs need a GPU"
    assert not lane.will_capture


class FailedSaves:
    """Of a run whose checkpoint could not be written."""

    def wait(self) -> None:
        raise GearError("OUTPUT_WRITE", "the disk is full", remedy="make room")


def turns_of(*lanes: Any) -> Any:
    """Return turns over these lanes, and a record of how their runs ended."""
    turns: Any = object.__new__(Turns)
    turns._lanes, turns._device = list(lanes), torch.device("cpu")
    turns._stop = SimpleNamespace(signal_name="SIGTERM")
    turns.told = []
    turns._ended = lambda point, error: turns.told.append((point.name, error and error.code))
    turns._abandon = lambda lane: None
    return turns


def test_a_save_that_failed_ends_its_own_run_only(lane: Lane) -> None:
    """All are waited for before a capture; no error of theirs is that of the run that captures."""
    waited = []
    run: Any = lane.run
    run.saves = FailedSaves()
    other: Any = SimpleNamespace(
        point="other",
        run=SimpleNamespace(saves=SimpleNamespace(wait=lambda: waited.append("other"))),
    )
    turns_of(lane, other)._settle_saves()
    assert waited == ["other"]


def test_an_interruption_goes_on_past_a_run_that_cannot_be_saved(lane: Lane) -> None:
    looked = []
    run: Any = lane.run
    run.path = Path("one")

    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def saved() -> None:
        looked.append("other")
        raise TrainingInterrupted("TRAIN_INTERRUPTED", "stopped")

    run.look, run.learner.step = full, 3
    points = name_points([load_recipe("paper").replace(seed=seed) for seed in (9, 10)])
    others: list[Any] = [
        SimpleNamespace(
            point=point,
            run=SimpleNamespace(path=Path("two"), look=saved, learner=SimpleNamespace(step=step)),
            alone=lane.alone,
            count_time=lambda: looked.append("counted"),
        )
        for point, step in zip(points, (5, 0), strict=True)
    ]
    turns = turns_of(lane, *others)
    with pytest.raises(TrainingInterrupted):
        turns._interrupt()
    assert looked == ["counted", "other", "counted"], "of a run without steps nothing is saved"
    assert [code for _, code in turns.told] == ["OUTPUT_WRITE"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler
def test_runs_of_one_shape_are_compiled_once() -> None:
    """Guards look at shapes and options, not at which model it is; another dropout is another."""
    versions = 0

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        nonlocal versions
        versions += 1
        return graph.forward

    for number, (dropout, expected) in enumerate([(0.1, 1)] * 9 + [(0.2, 2), (0.1, 2)]):
        torch.manual_seed(number)
        model = build_model(
            state_dim=3, action_dim=2, hidden_size=8, layers=1, context_length=2, dropout=dropout
        )
        loss = torch.compile(model.loss, dynamic=False, backend=backend)
        shape = (4, 2)
        batch = Batch(
            states=torch.randn(*shape, 3),
            actions=torch.randn(*shape, 2),
            rewards=torch.randn(*shape, 1),
            returns_to_go=torch.randn(*shape, 1),
            timesteps=torch.zeros(shape, dtype=torch.int64),
            attention_mask=torch.ones(shape, dtype=torch.int64),
            segments=torch.zeros(4, 2, dtype=torch.int64),
            padding="right",
            extras={},
        )
        loss(batch).backward()  # type: ignore[no-untyped-call]
        assert versions == expected
