"""What a person sees: plain lines without a terminal, a bar with one, nothing when quiet."""

from __future__ import annotations

import os
import pty
import signal
import sys
from contextlib import suppress
from types import SimpleNamespace

import pytest

from gear_offline.core.interruption import Aborted, StopRequest
from gear_offline.core.progress import progress
from gear_offline.runs.training_display import TrainingDisplay


def show(*, quiet: bool = False) -> None:
    with TrainingDisplay("tiny", steps=2000, done=1000, quiet=quiet) as display:
        display.step(1500)
        display.log(1500, 0.125)
        display.evaluating()
        display.evaluating(3.0)
        display.score("return 41")
        display.say("step 1,500: asked [3,600]")
        display.step(2000)
        display.log(2000, 0.0625)


def test_plain_lines(capfd: pytest.CaptureFixture[str]) -> None:
    show()
    said = capfd.readouterr()
    assert said.out == ""
    lines = said.err.splitlines()
    assert lines[0] == "step 1,500: asked [3,600]"
    assert lines[1].startswith("step 2,000 of 2,000  loss 0.0625  ")
    assert lines[1].endswith("return 41")
    assert len(lines) == 2, "a line now and then, not one a log entry"


def test_quiet(capfd: pytest.CaptureFixture[str]) -> None:
    show(quiet=True)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("columns", [100, 80, 60])
def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """The bar gives way to the numbers; on a narrow terminal it is left out."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    leader, follower = pty.openpty()
    with os.fdopen(follower, "w") as terminal, monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", terminal)
        show()
    said = ""
    with suppress(OSError):  # Linux's way of saying that the other end is closed
        while part := os.read(leader, 1 << 16).decode():
            said += part
    os.close(leader)
    for part in ("step 1,500: asked [3,600]", "1000/2000", "2000/2000", "loss 0.0625"):
        assert part in said
    assert "return 41" in said
    assert ("\u2501" in said) == (columns >= 80)
    assert "\x1b[1A" not in said, "all on one line"


def test_an_evaluation_after_the_last_step_leaves_the_speed_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its seconds were taken off those of the steps before it: 0.0 steps/s, or far too many."""
    clock = [0.0]
    monkeypatch.setattr("gear_offline.runs.training_display.time.monotonic", lambda: clock[0])
    display = TrainingDisplay("tiny", steps=100, done=0, quiet=True)
    said = []
    display._bar = SimpleNamespace(update=lambda _, **new: said.append(new.get("facts")))  # type: ignore[assignment]
    display._task = None  # type: ignore[assignment]
    clock[0] = 10.0
    display.log(100, 0.5)
    display.evaluating()
    clock[0] = 16.0
    display.evaluating(6.0)
    display.score("return 41")
    assert said[0] == "loss 0.5  10.0 steps/s"
    assert said[-1] == "loss 0.5  10.0 steps/s  return 41"


def test_the_first_signal_is_a_request_the_second_is_final() -> None:
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signal_name == "SIGTERM"
        with pytest.raises(Aborted), stop.abortable():
            pytest.fail("what can be aborted does not begin after a request")
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    with StopRequest() as stop, pytest.raises(Aborted), stop.abortable():
        os.kill(os.getpid(), signal.SIGINT)


def test_progress_shows_bytes_with_a_unit_and_counts_with_their_noun(
    capfd: pytest.CaptureFixture[str],
) -> None:
    for total, unit in ((3 << 20, "bytes"), (1, "episodes")):
        with progress(total, "work", unit=unit) as advance:
            advance(total)
    first, second = capfd.readouterr().err.splitlines()
    assert first.startswith("work: 3.0 MiB in ") and second.startswith("work: 1 episode in ")


def test_bar_shows_bytes_with_a_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    leader, follower = pty.openpty()
    with os.fdopen(follower, "w") as terminal, monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", terminal)
        with progress(3 << 20, "work", unit="bytes") as advance:
            advance(3 << 20)
    said = ""
    with suppress(OSError):  # Linux's way of saying that the other end is closed
        while part := os.read(leader, 1 << 16).decode():
            said += part
    os.close(leader)
    assert "3.0/3.0 MiB" in said and "3145728" not in said
