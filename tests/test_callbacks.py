"""Callbacks of a run: what they are told, how they end it, what becomes of their errors."""

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import gear_offline as go
from gear_offline.errors import GearError
from gear_offline.runs.loop import TrainingInterrupted
from gear_offline.training.metrics import read_records
from tests.support import one_error
from tests.training_support import learnt, tiny_recipe

DOOR: Any = go

pytestmark = pytest.mark.usefixtures("no_plots")


class Diary(go.Callback):
    """Writes down what it is told."""

    def __init__(self, stop_at: tuple[str, int] = ("", 0)) -> None:
        self.stop_at, self.told, self.errors = stop_at, list[tuple[str, int]](), list[Any]()

    def _note(self, what: str, step: int) -> bool:
        self.told.append((what, step))
        return self.stop_at == (what, step)

    def on_log(self, run: go.Run, step: int, values: Mapping[str, float]) -> bool:
        assert values["loss"] == read_records(run.path / "metrics.jsonl")[-1]["loss"]
        return self._note("log", step)

    def on_evaluation(self, run: go.Run, step: int, record: Mapping[str, Any]) -> bool:
        assert run.last is not None and run.last.mean_return == record["return"]
        return self._note("evaluation", step)

    def on_checkpoint(self, run: go.Run, step: int, path: Path) -> bool:
        assert (path / "model.safetensors").is_file() and path.parent.parent == run.path
        return self._note("checkpoint", step)

    def on_end(self, run: go.Run, error: BaseException | None) -> None:
        assert error is not None or (run.path / "summary.json").is_file()
        self.errors.append(error)

    def steps(self, what: str) -> list[int]:
        return [step for name, step in self.told if name == what]


@pytest.mark.parametrize("mode", ["on", "off"])
def test_callbacks_are_told_what_happens_and_disturb_nothing(
    mode: str, whole: Path, data: Path, tmp_path: Path
) -> None:
    diary, silent = Diary(), go.Callback()
    recipe = tiny_recipe(data, f"evaluate.background={mode}")
    run = go.train(recipe, out=tmp_path / "run", callbacks=[silent, diary], quiet=True)
    assert diary.steps("log") == [3, 6, 9, 12, 15, 18, 20]
    assert diary.steps("evaluation") == [7, 14, 20]
    assert diary.steps("checkpoint")[-1] == 20 and {5, 10} <= set(diary.steps("checkpoint"))
    assert diary.errors == [None]
    assert learnt(run.path)["model"] == learnt(whole)["model"]


@pytest.mark.parametrize("event", [("log", 6), ("evaluation", 7), ("checkpoint", 5)])
def test_a_callback_ends_the_run_which_can_go_on(
    event: tuple[str, int], whole: Path, data: Path, tmp_path: Path
) -> None:
    diary, recipe = Diary(stop_at=event), tiny_recipe(data, "evaluate.background=off")
    run = go.train(recipe, out=tmp_path / "run", callbacks=[diary], quiet=True)
    assert event[1] <= run.steps < 20 and diary.errors == [None]
    assert (run.path / "checkpoints" / f"step-{run.steps:08d}").is_dir()
    again = go.train(recipe, out=run, resume=True, quiet=True)
    assert again.steps == 20
    assert learnt(again.path)["model"] == learnt(whole)["model"]


def test_an_exception_of_a_callback_ends_the_run_with_one_error(data: Path, tmp_path: Path) -> None:
    class Broken(go.Callback):
        def on_log(self, run: go.Run, step: int, values: Mapping[str, float]) -> None:
            raise OSError(f"no network at step {step}\nno second line")

    class BrokenEnd(go.Callback):
        def on_end(self, run: go.Run, error: BaseException | None) -> None:
            raise KeyError("end")

    diary, out = Diary(), tmp_path / "run"
    broken = [Broken(), BrokenEnd(), diary]
    with one_error("CALLBACK") as caught:
        go.train(tiny_recipe(data), out=out, callbacks=broken, quiet=True)
    assert caught.value.where == "Broken.on_log"
    assert "OSError: no network at step 3;" in caught.value.message.replace(" (Broken.on_log)", "")
    assert isinstance(caught.value.__cause__, OSError)
    assert diary.errors == [caught.value]
    with pytest.raises(GearError, match=r"BrokenEnd\.on_end"):
        go.train(tiny_recipe(data), out=out, resume=True, callbacks=[BrokenEnd()], quiet=True)
    assert go.open_run(out).steps == 20


def test_the_end_by_a_signal_is_told(data: Path, tmp_path: Path) -> None:
    class Killer(go.Callback):
        def on_log(self, run: go.Run, step: int, values: Mapping[str, float]) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    diary = Diary()
    with pytest.raises(TrainingInterrupted) as caught:
        go.train(tiny_recipe(data), out=tmp_path / "run", callbacks=[Killer(), diary], quiet=True)
    assert diary.errors == [caught.value]


@pytest.mark.parametrize("given", [go.Callback, print, [object()], "on_log"])
def test_what_is_no_callback_is_refused(given: Any, tmp_path: Path) -> None:
    with pytest.raises(go.InputError, match="is no callback"):
        DOOR.train("smoke", out=tmp_path / "run", callbacks=given)
    assert not (tmp_path / "run").exists()
