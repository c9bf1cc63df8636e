"""Saving while training goes on: what is written is the instant of the call, errors end the run."""

import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors.torch import save_file

from gear_offline.errors import GearError
from gear_offline.models.decision_transformer import build_model
from gear_offline.runs.loop import train_run
from gear_offline.training import saving
from gear_offline.training.checkpoint import Keep, list_checkpoints, read_checkpoint
from gear_offline.training.saving import Saver
from tests.checkpoint_support import StandIn
from tests.support import failing_code
from tests.training_support import tiny_data, tiny_recipe

pytestmark = pytest.mark.usefixtures("no_reports")


@pytest.fixture
def stand_in() -> StandIn:
    model = build_model(state_dim=3, action_dim=2, hidden_size=8, layers=1, max_timestep=9)
    return StandIn(model, {"optimizer/m": torch.full((2,), 5.0), "t": torch.ones(2, 3).T})


@pytest.fixture
def saver(tmp_path: Path, stand_in: StandIn) -> Iterator[Saver]:
    made = Saver(stand_in.learner, tmp_path / "checkpoints")
    yield made
    made.close()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Hold the writer before its first byte until the event is set."""
    event, write = threading.Event(), save_file

    def held(*arguments: Any, **options: Any) -> Any:
        assert event.wait(30)
        return write(*arguments, **options)

    monkeypatch.setattr(safetensors.torch, "save_file", held)
    return event


def test_the_state_of_the_call_is_written(
    saver: Saver, stand_in: StandIn, gate: threading.Event
) -> None:
    stand_in.step = 4
    moments, weight = stand_in.tensors(), next(stand_in.model.parameters())
    expected = weight.detach().clone()
    saver.save(seconds=2.5, keep=Keep(newest=2))
    with torch.no_grad():  # training goes on
        weight.fill_(7)
        moments["optimizer/m"].fill_(7)
    assert saver.has(4) and not saver.path(4).exists() and not saver.has(5)
    gate.set()
    saver.wait()
    saved = read_checkpoint(saver.path(4))
    assert (saved.state.seconds, saved.state.loader) == (2.5, {"step": 4})
    name = next(iter(stand_in.model.state_dict()))
    assert torch.equal(saved.weights()[name], expected)
    assert torch.equal(saved.tensors()["optimizer/m"], torch.full((2,), 5.0))


def test_one_save_at_a_time(saver: Saver, stand_in: StandIn, gate: threading.Event) -> None:
    """The second save returns only when the first one is on the disk."""
    stand_in.step = 1
    saver.save(seconds=1.0, keep=Keep(newest=2))
    threading.Timer(0.2, gate.set).start()
    stand_in.step = 2
    saver.save(seconds=1.0, keep=Keep(newest=2))
    assert saver.path(1).is_dir() and saver.stalled_seconds > 0.1
    for step in (3, 4):
        stand_in.step = step
        saver.save(seconds=1.0, keep=Keep(newest=1, best=2, pinned=(3,)))
    saver.save(seconds=1.0, keep=Keep(newest=1, best=3))  # is there: prunes
    saver.wait()
    folder = saver.path(1).parent
    assert [step for step, _ in list_checkpoints(folder)] == [3, 4]
    assert (folder / "best").resolve() == saver.path(3).resolve()


def test_a_limit_of_file_size_is_an_error_of_the_disk(saver: Saver) -> None:
    """The system says it to the safetensors library, which says it as text."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        saver.save(seconds=1.0, keep=Keep(newest=1))
        with pytest.raises(GearError, match="no space left") as caught:
            saver.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.code == "OUTPUT_WRITE"
    assert os.listdir(saver.path(0).parent) == []


def test_an_error_of_the_last_save_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Path:
        raise GearError("OUTPUT_WRITE", "no space left")

    monkeypatch.setattr(saving, "write_checkpoint", refuse)
    recipe = tiny_recipe(tiny_data(tmp_path), "evaluate.episodes=0", "train.steps=5")
    code = failing_code(lambda: train_run(recipe, out=tmp_path / "run", quiet=True))
    assert code == "OUTPUT_WRITE" and not (tmp_path / "run" / "summary.json").exists()
