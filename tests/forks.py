"""Python programs in forks of a process that has imported everything: they begin at once.

That process is multiprocessing's fork server.  It computes nothing, so it has no threads.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from ctypes import CDLL, get_errno
from multiprocessing import forkserver, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from subprocess import CompletedProcess, TimeoutExpired
from types import SimpleNamespace
from typing import Any

import pytest

from gear_offline.core import plots
from gear_offline.core.workers import _serve
from tests.support import ROOT, no_picture

_NEW_NETWORK, _NEW_MOUNTS = 0x40000000, 0x00020000  # CLONE_NEWNET, CLONE_NEWNS
SERVER: Any = get_context("forkserver")
SERVER.set_forkserver_preload(["gear_offline.cli.main", "gear_offline.runs.loop", "tests.forks"])


def begin_server() -> None:
    """Start the fork server if it does not run: what it imports is found in the checkout."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, map(str, (ROOT, *sys.path)))))
        patch.setenv("OMP_NUM_THREADS", "1")
        forkserver.ensure_running()


def run_forked(
    *words: str | Path, count: int = 1, variables: Mapping[str, str] = {}, timeout: float = 180.0
) -> CompletedProcess[str]:
    """Run ``-m module`` or a script `count` times side by side, in the root of the checkout.

    Each is told its number as RANK.  The exit status is that of the first one that failed.
    """
    begin_server()
    with tempfile.TemporaryDirectory() as folder:
        shared, texts = {**os.environ, **variables}, [Path(folder, name) for name in ("out", "err")]
        programs = [
            SERVER.Process(target=_run, args=([*map(str, words)], shared | {"RANK": str(n)}, texts))
            for n in range(count)
        ]
        for program in programs:
            program.start()
        deadline = time.monotonic() + timeout
        for program in programs:
            program.join(max(0.0, deadline - time.monotonic()))
            program.kill()
            program.join()
        status = next(filter(None, (program.exitcode for program in programs)), 0)
        return CompletedProcess(words, status, *(text.read_text() for text in texts))


class ForkedWorker:
    """What `gear_offline.core.workers` asks of `subprocess.Popen`: its process is a fork."""

    def __init__(self, words: Sequence[str], *, env: dict[str, str], **_: Any) -> None:
        begin_server()
        with Connection(os.dup(int(words[-2]))) as connection:
            self._process = SERVER.Process(target=_work, args=(connection, env))
            self._process.start()
        self.pid, self.kill = self._process.pid, self._process.kill

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutExpired("worker", timeout or 0)
        return int(self._process.exitcode)


class ForkedNode:
    """A program in a fork with the network of a namespace, and shared memory of its own.

    The names of what it leaves there are written to the file that its variable LEFT names.
    """

    def __init__(
        self, namespace: str, words: Sequence[str], variables: Mapping[str, str], said: Path
    ) -> None:
        begin_server()
        self._process = SERVER.Process(target=_run_on, args=(namespace, words, variables, said))
        self._process.start()
        self.kill = self._process.kill

    def poll(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise TimeoutExpired("node", timeout)
        return code


def _run_on(namespace: str, words: Sequence[str], variables: Mapping[str, str], said: Path) -> None:
    system = CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as opened:
        failed = system.setns(opened.fileno(), _NEW_NETWORK) or system.unshare(_NEW_MOUNTS)
    if failed:
        raise OSError(get_errno(), os.strerror(get_errno()))
    subprocess.run(["mount", "--make-rslave", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "shm", "/dev/shm"], check=True)
    try:
        _run(words, variables, [said, said])
    finally:
        Path(variables["LEFT"]).write_text("\n".join(os.listdir("/dev/shm")))


def fork_workers(patch: pytest.MonkeyPatch) -> None:
    """Begin worker processes as forks."""
    stand_in = SimpleNamespace(Popen=ForkedWorker, DEVNULL=None, TimeoutExpired=TimeoutExpired)
    patch.setattr("gear_offline.core.workers.subprocess", stand_in)


def _work(connection: Connection[Any, Any], variables: Mapping[str, str]) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(variables)
    plots.draw = no_picture
    _serve(connection)


def _run(words: Sequence[str], variables: Mapping[str, str], texts: Sequence[Path]) -> None:
    for number, text in enumerate(texts, 1):
        os.dup2(os.open(text, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(variables)
    plots.draw = no_picture
    os.chdir(ROOT)
    if words[0] == "-m":
        sys.argv = list(words[1:])
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(words)
        runpy.run_path(words[0], run_name="__main__")
