"""Run a piece of work in a forked child: what it said, how long it took, how much memory it used.

A fork costs milliseconds where a new interpreter costs half a second, so thousands of children are
affordable.  The process that forks must have no threads of its own: run it as a program.
"""

from __future__ import annotations

import gc
import importlib
import io
import os
import resource
import select
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

HANG_SECONDS = 5.0  # of processor time: tests share the machine with others
GIVE_UP_SECONDS = 60.0
PEAK_BYTES = 512 << 20
_RUNAWAY_BYTES = 4 << 30  # address space of a child: a bomb must not take the machine along


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a child.

    Attributes
    ----------
    status
        Exit code, or the negative number of the signal that ended it.
    hung
        Whether it had to be killed after the time limit.
    seconds
        Processor time, of its own children too.
    peak_bytes
        Largest resident memory, the parent's pages that it shares included.
    stdout, stderr
        What it wrote.
    """

    status: int
    hung: bool
    seconds: float
    peak_bytes: int
    stdout: str
    stderr: str


def prepare(*modules: str) -> None:
    """Import what the children will need, so that a fork costs milliseconds.

    The first command that a process runs imports pydantic and more; `recipes ls` makes it do so.
    """
    for module in ("cli.main", "convert", "dataset.inspect", "config.recipe", *modules):
        importlib.import_module(f"gear_offline.{module}")
    import typer.main

    from gear_offline.cli import main as cli

    # Typer builds the command anew at each call, which is half of a child's time.
    built = typer.main.get_command(cli.app)
    setattr(cli, "app", built.main)  # noqa: B010
    with redirect_stdout(io.StringIO()):
        cli.main(["recipes", "ls"])
    gc.collect()
    gc.freeze()  # a child's collections would copy every page of the parent's objects


def command_line(arguments: Sequence[str]) -> Callable[[], int]:
    """Return work that runs the command line with `arguments`."""

    def work() -> int:
        from gear_offline.cli.main import main

        return main(list(arguments))

    return work


def run_forked(
    work: Callable[[], int],
    *,
    scratch: Path,
    give_up_seconds: float = GIVE_UP_SECONDS,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Outcome:
    """Run `work` in a child and wait for it.

    Parameters
    ----------
    work
        Returns the exit code.
    scratch
        Existing folder for what the child writes to stdout and stderr.
    give_up_seconds
        Then the child is killed.
    folder
        Current directory of the child.
    environment
        Variables to set in the child.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    outputs = [scratch / f"{os.getpid()}.stdout", scratch / f"{os.getpid()}.stderr"]
    child = os.fork()
    if child == 0:
        _child(work, outputs, folder, environment or {})
    handle = os.pidfd_open(child)
    try:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        hung = not poll.poll(give_up_seconds * 1000)
        if hung:
            os.kill(child, signal.SIGKILL)
        _, status, usage = os.wait4(child, 0)
    finally:
        os.close(handle)
    stdout, stderr = (path.read_text("utf-8", "replace") for path in outputs)
    for path in outputs:
        path.unlink()
    return Outcome(
        status=os.waitstatus_to_exitcode(status),
        hung=hung,
        seconds=usage.ru_utime + usage.ru_stime,
        peak_bytes=usage.ru_maxrss * 1024,
        stdout=stdout,
        stderr=stderr,
    )


def _child(
    work: Callable[[], int],
    outputs: Sequence[Path],
    folder: Path | None,
    environment: Mapping[str, str],
) -> None:
    code = 99
    try:
        for number, path in zip((1, 2), outputs, strict=True):
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(handle, number)
            os.close(handle)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (_RUNAWAY_BYTES, _RUNAWAY_BYTES))
        os.environ.update(environment)
        if folder is not None:
            os.chdir(folder)
        code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def error_code(outcome: Outcome) -> str:
    """Return the code of the one error line of a child that refused its input, else ``""``."""
    lines = outcome.stderr.splitlines()
    if outcome.status != 2 or len(lines) != 1 or not lines[0].startswith("error["):
        return ""
    return lines[0].removeprefix("error[").partition("]")[0]


def problem(outcome: Outcome) -> str:
    """Return what is wrong with how a child ended, ``""`` for done or refused in one line."""
    if outcome.hung or outcome.seconds > HANG_SECONDS:
        return f"took {outcome.seconds:.1f} s{' and hung' if outcome.hung else ''}"
    if outcome.status < 0:
        return f"died of {signal.Signals(-outcome.status).name}"
    if outcome.peak_bytes > PEAK_BYTES:
        return f"used {outcome.peak_bytes >> 20} MiB"
    if outcome.status == 0:
        return ""
    if outcome.status != 2:
        return f"exit code {outcome.status}: {outcome.stderr[-300:]}"
    if not error_code(outcome):
        return f"not one error line: {outcome.stderr[-300:]}"
    return ""
