"""Errors of torch in one run of a sweep: it ends alone, unless the GPU is lost to the process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gear_offline.config.recipe import Recipe
from gear_offline.errors import GearError, InputError
from gear_offline.runs.errors import in_words, is_gpu_lost
from gear_offline.runs.trainer import train
from gear_offline.runs.training_run import TrainingInterrupted
from gear_offline.sweep.results import steps_done
from gear_offline.sweep.stack import StackTurns
from gear_offline.sweep.turns import Turns
from gear_offline.training.learner import Learner
from gear_offline.training.stack import Stack
from tests.sweep_support import grid, in_turns, name_points, run_sweep
from tests.training_support import learnt, tiny_recipe

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nGPU 0 has")
ILLEGAL = torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nsee")


class OutOfResources(Exception):
    """As Triton's, which is no RuntimeError."""

    __module__ = "triton.runtime.errors"


@pytest.fixture(autouse=True)
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gear_offline.runs.report.write_report", lambda run: run)


@pytest.fixture(scope="module")
def recipes(data: Path) -> list[Recipe]:
    return grid(tiny_recipe(data, "evaluate.episodes=0", "model.dropout=0"), {}, seeds=[0, 1, 2])


def break_step(
    patch: pytest.MonkeyPatch, error: BaseException, *, seed: int | None = 1, after: int = 8
) -> None:
    """Have steps after the first `after` raise `error`, in the run of `seed` or in each."""
    take = Learner.take

    def broken(self: Learner) -> Any:
        if seed in (None, self.recipe.seed) and self.step == after:
            raise error
        return take(self)

    patch.setattr(Learner, "take", broken)


def lose_gpu(patch: pytest.MonkeyPatch) -> None:
    for module in ("runs.errors", "sweep.run"):
        patch.setattr(f"gear_offline.{module}.is_gpu_lost", lambda device: True)


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (NO_MEMORY, "MEMORY", "CUDA out of memory. Tried to allocate 2 GiB. (one)"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "MEMORY", "DefaultCPU"),
        (RuntimeError("Triton Error [CUDA]: out of memory"), "MEMORY", "Triton Error"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"), "MEMORY", "CUBLAS"),
        (MemoryError(), "MEMORY", "no reason given"),
        (RuntimeError("\nbackend failed:\nlong"), "RUN_FAILED", "RuntimeError: backend failed:"),
        (OutOfResources("shared memory"), "RUN_FAILED", "OutOfResources: shared memory"),
        (ILLEGAL, "RUN_FAILED", "AcceleratorError: CUDA error: an illegal memory access"),
        (OSError(28, "No space left on device"), "OUTPUT_WRITE", "(folder)"),
    ],
)
def test_what_ends_one_run_is_its_error(error: Exception, code: str, words: str) -> None:
    with pytest.raises(GearError) as caught, in_words("one", Path("folder"), CPU):
        raise error
    assert caught.value.code == code and words in str(caught.value)
    assert "long" not in str(caught.value), "one line"


@pytest.mark.parametrize(
    "error",
    [
        KeyboardInterrupt(),
        TrainingInterrupted("TRAIN_INTERRUPTED", "stopped"),
        InputError("RUN_RECIPE", "another one"),
        AssertionError("a defect of ours"),
    ],
)
def test_other_errors_are_not_touched(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, in_words("one", Path("folder"), CPU):
        raise error
    assert caught.value is error


def test_memory_that_ran_out_in_a_capture_is_told_as_that() -> None:
    """Ending the capture fails as well, and that is what torch raises."""
    with pytest.raises(GearError) as caught, in_words("one", Path("folder"), CPU):
        try:
            raise NO_MEMORY
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")
    assert caught.value.code == "MEMORY"


def test_a_gpu_is_lost_if_it_still_fails_after_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", asked.append)
    assert not is_gpu_lost(CPU) and not asked
    assert not is_gpu_lost(CUDA) and asked == [CUDA]
    with pytest.raises(GearError), in_words("one", Path("folder"), CUDA):
        raise ILLEGAL

    def fails(device: torch.device) -> None:
        raise ILLEGAL

    monkeypatch.setattr(torch.cuda, "synchronize", fails)
    assert is_gpu_lost(CUDA)
    with pytest.raises(torch.AcceleratorError), in_words("one", Path("folder"), CUDA):
        raise ILLEGAL


@pytest.mark.parametrize("error", [NO_MEMORY, RuntimeError("backend failed")])
def test_a_run_ends_alone_and_goes_on_later(
    recipes: list[Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    points = name_points(recipes)
    with monkeypatch.context() as patch:
        break_step(patch, error)
        ended = in_turns(Turns, points, tmp_path, parallel=3)
    codes = {name: error and error.code for name, error in ended.items()}
    code = "MEMORY" if error is NO_MEMORY else "RUN_FAILED"
    assert codes == {"s0": None, "s1": code, "s2": None}
    assert steps_done(tmp_path / "s1") == 6
    assert in_turns(Turns, points[1:2], tmp_path, parallel=3) == {"s1": None}
    alone = train(recipes[1], out=tmp_path / "alone", quiet=True)
    assert learnt(tmp_path / "s1") == learnt(alone)


def test_a_run_that_cannot_be_closed_ends_by_its_first_error(
    recipes: list[Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Learner) -> None:
        raise RuntimeError("cannot be closed")

    break_step(monkeypatch, NO_MEMORY)
    close = Learner.close
    monkeypatch.setattr(Learner, "close", lambda self: (fails if self.step == 8 else close)(self))
    ended = in_turns(Turns, name_points(recipes), tmp_path, parallel=3)
    assert [error and error.code for error in ended.values()].count("MEMORY") == 1
    assert list(ended.values()).count(None) == 2


def test_an_error_of_a_stack_ends_its_runs_and_no_others(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tiny_recipe(data, "evaluate.episodes=0", "model.dropout=0")
    points = name_points(grid(base, {"model.hidden_size": [8, 16]}, seeds=[0, 1]))
    gradients = Stack._gradients

    def broken(self: Stack, batch: Any) -> Any:
        if self.learners[0].recipe.model.hidden_size == 16 and self.learners[0].step == 8:
            raise NO_MEMORY
        return gradients(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(Stack, "_gradients", broken)
        ended = in_turns(StackTurns, points, tmp_path, parallel=4)
    codes = {name: error and (error.code, error.where) for name, error in ended.items()}
    assert codes == {
        "hidden_size=8,s0": None,
        "hidden_size=8,s1": None,
        "hidden_size=16,s0": ("MEMORY", "hidden_size=16,s0"),
        "hidden_size=16,s1": ("MEMORY", "hidden_size=16,s1"),
    }
    assert set(in_turns(StackTurns, points[2:], tmp_path, parallel=4).values()) == {None}
    assert [steps_done(tmp_path / point.name) for point in points] == [20] * 4


def test_nothing_goes_on_after_the_gpu_is_lost_and_a_later_call_does(
    recipes: list[Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "sweep"
    with monkeypatch.context() as patch:
        break_step(patch, ILLEGAL, after=18)
        lose_gpu(patch)
        with pytest.raises(GearError) as caught:
            run_sweep(recipes, out, mode="serial")
    assert caught.value.code == "GPU_LOST" and caught.value.where == str(out)
    assert "illegal memory access was encountered (" in str(caught.value)
    assert not (out / "failures.jsonl").exists(), "no run is blamed"
    assert [steps_done(out / "runs" / f"s{seed}") for seed in (0, 1, 2)] == [20, 18, 0]
    results = run_sweep(recipes, out, mode="serial")
    assert [(r.status, r.error, r.steps) for r in results] == [("complete", None, 20)] * 3
