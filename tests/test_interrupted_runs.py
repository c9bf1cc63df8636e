"""Ctrl-C and SIGTERM end whatever trains with exit code 130, as they end other commands."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from gear_offline.cli.main import main
from gear_offline.sweep.results import steps_done
from tests.training_support import tiny_recipe

LONG = ("train.steps=1000000", "evaluate.episodes=0", "train.checkpoint_every=1000000")


@pytest.fixture
def recipe(data: Path, tmp_path: Path) -> Path:
    """A recipe that nothing but a signal ends."""
    place = tmp_path / "long.yaml"
    place.write_text(tiny_recipe(data, *LONG).to_yaml())
    return place


def interrupted(words: list[str], number: int, *runs: Path) -> int:
    """Return how a command ends that gets a signal when each of `runs` has written its metrics."""
    over = threading.Event()

    def interrupt() -> None:
        end = time.monotonic() + 120
        while not over.is_set() and time.monotonic() < end:
            if all(steps_done(run) for run in runs):
                break
            time.sleep(0.02)
        if not over.is_set():
            os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        return main(words)
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize(("parallel", "number"), [(1, signal.SIGTERM), (2, signal.SIGINT)])
def test_a_sweep_that_is_stopped_ends_with_130(
    parallel: int, number: int, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "sweep"
    words = ["sweep", str(recipe), "--seeds", "2", "--out", str(out), "--quiet"]
    begun = [out / "runs" / f"s{seed}" for seed in range(parallel)]
    assert interrupted([*words, "--parallel", str(parallel)], number, *begun) == 130
    said = capsys.readouterr().err
    assert "error" not in said and "the same command goes on" in said
    assert all(list((run / "checkpoints").glob("step-*")) for run in begun)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_ends_with_130(
    number: int, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    words = ["train", str(recipe), "--out", str(run), "--quiet"]
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    assert interrupted(words, number, run) == 130
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before
    assert list((run / "checkpoints").glob("step-*"))
    assert "a checkpoint is saved" in capsys.readouterr().err
