"""What a person sees of long work: a line on a terminal, plain lines elsewhere."""

import os
import pty
import re
import signal
import sys
import time
from contextlib import suppress

import pytest

from gear_offline.core.interruption import Aborted, StopRequest
from gear_offline.core.progress import Progress
from tests.support import Captured, Patch


def work(*, quiet: bool = False) -> None:
    with Progress("tiny", total=2000, done=1000, quiet=quiet) as progress:
        progress.update(1500, loss="0.125")
        with progress.pause("evaluating"):
            time.sleep(0.3)
        progress.say("step 1,500: asked [3,600]")
        progress.update(2000, loss="0.0625", normalized="41")


def test_in_a_file_lines_come_now_and_then(capfd: Captured) -> None:
    work(quiet=True)
    assert capfd.readouterr() == ("", "")
    work()
    said = capfd.readouterr()
    assert said.out == ""
    pause, line, end = said.err.splitlines()
    assert pause == "tiny: 1,500 of 2,000 steps, evaluating"
    assert line == "step 1,500: asked [3,600]"
    assert end.startswith("tiny: 1,000 steps in 0.")
    assert end.endswith("loss 0.0625  normalized 41")


@pytest.fixture
def clock(monkeypatch: Patch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr("gear_offline.core.progress.time.monotonic", lambda: now[0])
    return now


def test_a_line_every_ten_seconds(capfd: Captured, clock: list[float]) -> None:
    with Progress("tiny", total=400) as progress:
        for step in range(400):
            clock[0] = step / 10
            progress.update(step)
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 4  # after 10, 20 and 30 seconds, and at the end
    assert lines[1] == "tiny: 200 of 400 steps  0:00:20 left  10 steps/s"


def test_a_pause_and_what_comes_before_the_first_step_do_not_count_for_the_rate(
    capfd: Captured, clock: list[float]
) -> None:
    with Progress("tiny", total=200, done=50) as progress:
        with progress.pause("opening"):
            clock[0] = 30.0
        clock[0] = 90.0  # a model is compiled
        progress.update(51)
        with progress.pause("evaluating"):
            clock[0] = 96.0
        clock[0] = 101.0
        progress.update(101)
    first, last = capfd.readouterr().err.splitlines()[1:4:2]
    assert first == "tiny: 51 of 200 steps"
    assert last.endswith("0:00:10 left  10 steps/s")


def test_a_daemon_has_no_stderr_and_stdout_is_for_results(
    capfd: Captured, monkeypatch: Patch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", None)
        work()
    assert capfd.readouterr() == ("", "")


def shown_on_a_terminal(monkeypatch: Patch, columns: int) -> str:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    leader, follower = pty.openpty()
    with os.fdopen(follower, "w") as terminal, monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", terminal)
        work()
    shown = ""
    with suppress(OSError):  # Linux's way of saying that the other end is closed
        while part := os.read(leader, 1 << 16).decode():
            shown += part
    os.close(leader)
    return shown


@pytest.mark.parametrize("columns", [120, 80, 60, 20])
def test_on_a_terminal_one_line_that_fits(monkeypatch: Patch, columns: int) -> None:
    shown = shown_on_a_terminal(monkeypatch, columns)
    assert "step 1,500: asked [3,600]" in shown
    assert ("2,000 of 2,000 steps" in shown) == (columns >= 60)
    if columns in (120, 20):  # between them it hangs on the length of the rate
        assert ("normalized 41" in shown) == ("\u2501" in shown) == (columns == 120)
    assert "\x1b[1A" not in shown, "all on one line"
    assert "\x1b[33m" not in shown, "yellow cannot be read on white"
    drawn = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in re.split("[\r\n]", shown)]
    assert all(len(line) <= columns for line in drawn if "asked" not in line)


def test_bytes_have_a_unit_and_counts_their_noun(capfd: Captured) -> None:
    for total, unit, shown in ((3 << 20, "bytes", "3.0 MiB"), (1, "episodes", "1 episode")):
        with Progress("work", total=total, unit=unit) as progress:
            progress.advance(total)
        assert capfd.readouterr().err.startswith(f"work: {shown} in ")


def test_the_first_signal_is_a_request_the_second_is_final() -> None:
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signal_name == "SIGTERM"
        with pytest.raises(Aborted), stop.abortable():
            pytest.fail("what can be aborted does not begin after a request")
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGHUP)  # a shell and its terminal both send it
    ignored = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.signal_name is None, "nohup"
    signal.signal(signal.SIGHUP, ignored)
    with StopRequest() as stop, pytest.raises(Aborted), stop.abortable():
        os.kill(os.getpid(), signal.SIGINT)
