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


def interrupted(words: list[str], number: int, runs: list[Path]) -> int:
    """Return how a command ends that gets a signal when each of `runs` has written its metrics."""
    over = threading.Event()

    def interrupt() -> None:
        end = time.monotonic() + 120
        while not all(steps_done(run) for run in runs) and time.monotonic() < end:
            if over.wait(0.02):
                return
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        return main(words)
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize(
    ("command", "number", "runs", "said"),
    [
        ("train", signal.SIGINT, [""], "a checkpoint is saved"),
        ("train", signal.SIGTERM, [""], "a checkpoint is saved"),
        ("sweep --seeds 2 --parallel 1", signal.SIGTERM, ["runs/s0"], "same command goes on"),
        ("sweep --seeds 2 --parallel 2", signal.SIGINT, ["runs/s0", "runs/s1"], "same command"),
    ],
)
def test_what_trains_and_is_stopped_ends_with_130(
    command: str,
    number: int,
    runs: list[str],
    said: str,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe, out = tmp_path / "long.yaml", tmp_path / "out"
    recipe.write_text(tiny_recipe(data, *LONG).to_yaml())
    begun = [out / name for name in runs]
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    name, *options = command.split()
    words = [name, str(recipe), "--out", str(out), "--quiet", *options]
    assert interrupted(words, number, begun) == 130
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before
    assert all(list((run / "checkpoints").glob("step-*")) for run in begun)
    error = capsys.readouterr().err
    assert said in error and "error" not in error
