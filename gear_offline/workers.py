"""Worker processes: each does one job at a time and may talk with its caller meanwhile.

A worker is a fresh interpreter (``python -m gear_offline.workers``), so that neither threads
of the caller nor scripts without a ``__main__`` guard matter.  It has a session of its own, which
Ctrl-C in a terminal does not reach, and dies with its caller.  What it prints is kept for the error
that tells how it died.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from gear_offline.core.closing import Closing
from gear_offline.errors import GearError

LOST = "WORKER_LOST"
_PR_SET_PDEATHSIG = 1


class Caller:
    """What a job sees of who started it: its first argument."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection = connection

    def send(self, message: Any) -> None:
        """Tell something before the job ends; `Worker.receive` returns it."""
        self._connection.send((False, message))

    def receive(self) -> Any:
        """Wait for what `Worker.send` sends; the end of the caller ends the process."""
        try:
            return self._connection.recv()
        except EOFError:
            sys.exit(0)


class Worker(Closing):
    """A process that does jobs; a context manager.

    `threads` are those of torch and the numerical libraries in it; None leaves that to them.
    """

    def __init__(self, *, threads: int | None = 1) -> None:
        # Its modules are to be found where ours were, as with multiprocessing's spawn.
        variables = {"PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)}
        if threads is not None:
            variables["OMP_NUM_THREADS"] = str(threads)
        # readable, for `multiprocessing.connection.wait`, when `receive` does not have to wait
        self.connection, other = Pipe()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        arguments = [str(other.fileno()), str(os.getpid())]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "gear_offline.workers", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                env={**os.environ, **variables},
                pass_fds=[other.fileno()],
                start_new_session=True,
            )
        except OSError as error:
            self.connection.close()
            self._output.close()
            what = f"a worker process cannot be started: {error.strerror or error}"
            raise GearError(LOST, what, remedy="use fewer workers") from error
        finally:
            other.close()
        self.pid = self._process.pid
        self.busy = False  # whether a job was started and its result has not been received

    def start(self, function: str, *arguments: Any) -> None:
        """Begin a job: ``module:function``, called with a `Caller` and `arguments`."""
        assert not self.busy, "one job at a time"
        self.busy = True
        self.send((function, arguments))

    def send(self, message: Any) -> None:
        """Send to the running job, which takes it with `Caller.receive`."""
        try:
            self.connection.send(message)
        except ConnectionError as error:
            raise self._lost() from error

    def receive(self) -> Any:
        """Wait for a message of the job, or for its result: then `busy` is False.

        An error of the job is raised here with its class, as INTERNAL if it is none of ours;
        ``WORKER_LOST`` if the process has died.
        """
        try:
            ended, value = self.connection.recv()
        except (EOFError, ConnectionError) as error:
            raise self._lost() from error
        self.busy = not ended
        if ended and isinstance(value, GearError):
            raise value
        return value

    def interrupt(self) -> None:
        """Send SIGTERM, which ends the process where its job does not handle it."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self._process.kill()
        self._process.wait()
        self.connection.close()
        self._output.close()

    def _lost(self) -> GearError:
        self.busy = False
        self._process.kill()  # it may have closed its end and live on
        code = self._process.wait()
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").strip().splitlines()
        how = f"exit code {code}" + (f": {lines[-1]}" if lines else "")
        if code < 0:
            how = f"killed by {signal.Signals(-code).name}"
        remedy = "memory may have run out: use fewer workers"
        return GearError(LOST, f"a worker process has ended ({how})", remedy=remedy)


class WorkerPool(Closing):
    """Up to `workers` processes, started when there is work, that do job after job."""

    def __init__(self, workers: int) -> None:
        self._most = workers
        self._idle: list[Worker] = []

    def run(
        self,
        function: str,
        jobs: Iterable[Sequence[Any]],
        *,
        on_message: Callable[[Any], None] = lambda message: None,
    ) -> Iterator[Any]:
        """Yield the values of jobs in their order; the first error that comes is raised.

        Parameters
        ----------
        function
            ``module:function``.
        jobs
            The arguments of each, read as workers become free.
        on_message
            Is called with what a job sends while it works.
        """
        waiting = enumerate(jobs)
        running: dict[Any, tuple[Worker, int]] = {}
        early: dict[int, Any] = {}  # values that jobs before theirs are waited for
        expected = 0
        try:
            while True:
                while len(running) < self._most and (item := next(waiting, None)) is not None:
                    number, arguments = item
                    worker = self._idle.pop() if self._idle else Worker()
                    running[worker.connection] = worker, number
                    worker.start(function, *arguments)
                if not running:
                    return
                for connection in wait(list(running)):
                    worker, number = running[connection]
                    value = worker.receive()
                    if worker.busy:
                        on_message(value)
                        continue
                    del running[connection]
                    self._idle.append(worker)
                    early[number] = value
                while expected in early:
                    yield early.pop(expected)
                    expected += 1
        finally:
            for worker, _ in running.values():  # nobody waits for what they do
                worker.close()

    def close(self) -> None:
        """End the processes."""
        for worker in self._idle:
            worker.close()
        self._idle.clear()


def _serve(connection: Connection[Any, Any]) -> None:
    """Do jobs until the caller closes its end."""
    caller = Caller(connection)
    while True:
        try:
            request = connection.recv_bytes()
        except EOFError:
            return
        try:
            answer = _do(caller, request)
            connection.send((True, answer))
        except GearError as error:
            connection.send((True, error))
        except Exception as error:
            last = traceback.format_exception_only(error)[-1].strip()
            internal = GearError("INTERNAL", f"a worker process failed: {last}")
            internal.add_note("".join(traceback.format_exception(error)))
            connection.send((True, internal))


def _die_with_parent(parent: int) -> None:
    """Have the kernel (Linux) kill this process when its parent is gone.

    The workers of a killed program would stay while they work; idle ones see the pipe's end.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call above
        sys.exit(1)


def _do(caller: Caller, request: bytes) -> Any:
    name, arguments = pickle.loads(request)  # from our own caller only
    module, _, function = name.partition(":")
    return getattr(import_module(module), function)(caller, *arguments)


if __name__ == "__main__":
    _die_with_parent(int(sys.argv[2]))
    with Connection(int(sys.argv[1])) as _connection:
        _serve(_connection)
