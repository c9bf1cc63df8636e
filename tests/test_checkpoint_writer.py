"""Saving beside training: what is written is the instant of the call, errors end the run."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gear_offline.config.recipe import load_recipe
from gear_offline.errors import GearError
from gear_offline.runs.trainer import train
from gear_offline.training import checkpoint_saving, checkpoint_writer
from gear_offline.training.checkpoint import TrainingState, read_checkpoint
from gear_offline.training.checkpoint_folder import list_checkpoints
from gear_offline.training.checkpoint_saving import write_checkpoint
from gear_offline.training.checkpoint_writer import CheckpointWriter, Prune
from gear_offline.training.metrics import read_records
from gear_offline.training.snapshot import Snapshot
from gear_offline.training.tensor_file import write_tensors
from tests.support import failing_code
from tests.training_support import learnt, tiny_data, tiny_recipe

RECIPE = load_recipe("smoke")
STAYS = Prune(keep=2, best=None)


def state(step: int, tensors: Mapping[str, Tensor]) -> TrainingState:
    return TrainingState(
        step=step,
        recipe=RECIPE,
        tensors=tensors,
        loader={"step": step, "seed": 0},
        state_mean=None,
        state_std=None,
        seconds=1.0,
    )


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[CheckpointWriter]:
    made = CheckpointWriter(tmp_path / "checkpoints", beside=True, before=lambda: None)
    yield made
    made.close()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Hold the writer before its first byte until the event is set."""
    gate, write = threading.Event(), write_tensors

    def held(*arguments: Any, **options: Any) -> Any:
        assert gate.wait(30)
        return write(*arguments, **options)

    monkeypatch.setattr(checkpoint_saving, "write_tensors", held)
    return gate


def test_a_snapshot_stays_as_it_was() -> None:
    tensors = {"a": torch.arange(6.0).reshape(2, 3).T, "b": torch.tensor(3)}
    snapshot = Snapshot(tensors)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor.fill_(9)
    found = snapshot.wait()
    assert snapshot.place == "host" and found.keys() == tensors.keys()
    assert all(torch.equal(found[name], before[name]) for name in before)


def test_the_weights_of_the_call_are_written(
    writer: CheckpointWriter, slow: threading.Event
) -> None:
    weights, moments = {"w": torch.ones(3)}, {"optimizer/m": torch.full((2,), 5.0)}
    writer.save("{}", weights, state(4, moments), STAYS)
    weights["w"].fill_(7)  # training goes on
    moments["optimizer/m"].fill_(7)
    assert writer.has(4) and not writer.is_there(4) and not writer.has(5)
    slow.set()
    writer.wait()
    assert writer.is_there(4)
    found = read_checkpoint(writer.path(4))
    assert torch.equal(found.model["w"], torch.ones(3))
    assert torch.equal(found.state.tensors["optimizer/m"], torch.full((2,), 5.0))


def test_one_save_at_a_time(writer: CheckpointWriter, slow: threading.Event) -> None:
    """The second save returns only when the first one is on the disk."""
    writer.save("{}", {"w": torch.ones(3)}, state(1, {}), STAYS)
    threading.Timer(0.2, slow.set).start()
    with writer.holding():
        writer.save("{}", {"w": torch.ones(3)}, state(2, {}), STAYS)
    assert writer.is_there(1) and writer.held_seconds > 0.1
    for step in (3, 4):
        writer.save("{}", {"w": torch.ones(3)}, state(step, {}), Prune(keep=1, best=2, pinned=[3]))
    writer.prune(Prune(keep=1, best=3))
    writer.wait()
    assert [step for step, _ in list_checkpoints(writer.path(1).parent)] == [3, 4]
    assert (writer.path(1).parent / "best").resolve() == writer.path(3).resolve()


@pytest.mark.parametrize(
    ("number", "code"),
    [(errno.ENOSPC, "OUTPUT_WRITE"), (errno.EIO, "OUTPUT_WRITE"), (errno.EROFS, "OUTPUT_WRITE")],
)
@pytest.mark.parametrize("beside", ["async", "sync"])
def test_an_error_of_the_writer_ends_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: str, beside: str
) -> None:
    write, calls = write_tensors, []

    def refuse(*arguments: Any, **options: Any) -> Any:
        calls.append(threading.current_thread())
        if len(calls) > 2:  # two files a checkpoint
            raise OSError(number, os.strerror(number))
        return write(*arguments, **options)

    monkeypatch.setattr(checkpoint_saving, "write_tensors", refuse)
    recipe = tiny_recipe(tiny_data(tmp_path), "evaluate.episodes=0", f"train.save={beside}")
    run = tmp_path / "run"
    assert failing_code(lambda: train(recipe, out=run, quiet=True)) == code
    assert [step for step, _ in list_checkpoints(run / "checkpoints")] == [5]
    assert not list((run / "checkpoints").glob(".*")), "nothing half written stays"
    assert (calls[0] is threading.main_thread()) == (beside == "sync")
    assert "gear-checkpoints" not in [thread.name for thread in threading.enumerate()]
    monkeypatch.setattr(checkpoint_saving, "write_tensors", write)
    train(recipe, out=run, resume=True, quiet=True)
    assert list_checkpoints(run / "checkpoints")[-1][0] == 20


def test_both_ways_save_the_same_and_tell_how_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gear_offline.runs.report.write_report", lambda run: run)
    data, write = tiny_data(tmp_path), write_checkpoint

    def slowly(*arguments: Any, **options: Any) -> Path:
        time.sleep(0.05)
        return write(*arguments, **options)

    monkeypatch.setattr(checkpoint_writer, "write_checkpoint", slowly)
    runs = {
        how: train(tiny_recipe(data, f"train.save={how}"), out=tmp_path / how, quiet=True)
        for how in ("sync", "async")
    }
    assert learnt(runs["sync"])["training"] == learnt(runs["async"])["training"]
    assert learnt(runs["sync"])["model"] == learnt(runs["async"])["model"]
    for run in runs.values():
        shares = [record["save_wait_share"] for record in read_records(run / "metrics.jsonl")]
        assert all(0 <= share <= 1 for share in shares) and max(shares) > 0
        assert 0 < json.loads((run / "summary.json").read_text())["save_wait_share"] <= 1


def test_the_last_save_holds_up_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gear_offline.runs.report.write_report", lambda run: run)
    write = write_checkpoint

    def slowly(*arguments: Any, **options: Any) -> Path:
        time.sleep(0.2)
        return write(*arguments, **options)

    monkeypatch.setattr(checkpoint_writer, "write_checkpoint", slowly)
    options = ("train.save=sync", "train.checkpoint_every=100", "evaluate.episodes=0")
    data, run = tiny_data(tmp_path), tmp_path / "run"
    for steps in (4, 5):  # the second time one step is left, and no time between steps
        recipe = tiny_recipe(data, *options, f"train.steps={steps}")
        train(recipe, out=run, resume=steps == 5, quiet=True)
        assert json.loads((run / "summary.json").read_text())["save_wait_share"] == 0


def test_the_end_of_a_run_waits_for_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = write_checkpoint

    def slowly(*arguments: Any, **options: Any) -> Path:
        time.sleep(0.3)
        return write(*arguments, **options)

    monkeypatch.setattr(checkpoint_writer, "write_checkpoint", slowly)
    recipe = tiny_recipe(tiny_data(tmp_path), "evaluate.episodes=0", "train.steps=5")
    run = train(recipe, out=tmp_path / "run", quiet=True)
    assert read_checkpoint(run / "checkpoints" / "step-00000005").state.step == 5


def test_an_error_of_the_last_save_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Path:
        raise GearError("OUTPUT_WRITE", "no space left")

    monkeypatch.setattr(checkpoint_writer, "write_checkpoint", refuse)
    recipe = tiny_recipe(tiny_data(tmp_path), "evaluate.episodes=0", "train.steps=5")
    code = failing_code(lambda: train(recipe, out=tmp_path / "run", quiet=True))
    assert code == "OUTPUT_WRITE" and not (tmp_path / "run" / "summary.json").exists()
