"""Worker processes: each does one job at a time and may talk with its caller meanwhile.

A worker is a fresh interpreter (``python -m gear_offline.core.workers``), so that neither threads
of the caller nor scripts without a ``__main__`` guard matter.  It has a session of its own, which
Ctrl-C in a terminal does not reach, and dies with its caller.  What it prints is kept for the error
that tells how it died.

A `Pool` does many jobs: in such processes, or as tasks of Ray, which no other module knows.
"""

from __future__ import annotations

import ctypes
import errno
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from importlib import import_module
from itertools import count
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from gear_offline import __version__
from gear_offline.core.files import REMEDIES, Closing
from gear_offline.core.parts import admit_digests, get_admitted
from gear_offline.core.text import first_line
from gear_offline.errors import GearError, UnavailableError, package_needed

LOST = "WORKER_LOST"
RETRIES = 3  # of a task of Ray whose node or process is lost
_REMEDIES = REMEDIES | {  # where a process cannot be started
    errno.EAGAIN: "allow more processes: ulimit -u $(ulimit -Hu)",
    errno.ENOENT: "name a folder for temporary files: TMPDIR=FOLDER",
}
END_SECONDS = 2.0  # at most, from a worker's last message to its end
_PR_SET_PDEATHSIG = 1


class Caller:
    """A job's link to its caller, its first argument.  A task of Ray has no connection."""

    def __init__(self, connection: Connection[Any, Any] | None = None) -> None:
        self._connection = connection
        self.kept: list[Any] = []  # messages of a task of Ray, which go with its value

    def send(self, message: Any) -> None:
        """Tell something before the job ends; `Worker.receive` returns it."""
        if self._connection is None:
            self.kept.append(message)
        else:
            self._connection.send_bytes(pickle.dumps((False, message)))

    def receive(self) -> Any:
        """Wait for a message of `Worker.send`; the end of the caller ends the process."""
        if self._connection is None:
            raise GearError("INTERNAL", "nothing can be sent to a task of Ray while it works")
        try:
            return self._connection.recv()
        except EOFError:
            sys.exit(0)


class Worker(Closing):
    """A process that does jobs; a context manager.

    `threads` are those of torch and the numerical libraries in it; None leaves that to them.
    `remedy` is said where memory may have run out.
    """

    def __init__(self, *, threads: int | None = 1, remedy: str = "use fewer workers") -> None:
        self._remedy = f"memory may have run out: {remedy}"
        with ExitStack() as undo:
            try:
                # Its modules are found where ours are, and nowhere else: -P leaves the folder out
                # that we stand in.  What is no text, `import` passes by.
                folders = [each or os.getcwd() for each in sys.path if isinstance(each, str)]
                variables = {"PYTHONPATH": os.pathsep.join(folders)}
                if threads is not None:
                    variables["OMP_NUM_THREADS"] = str(threads)
                # readable, for `multiprocessing.connection.wait`, when `receive` need not wait
                self.connection, child_end = Pipe()
                undo.enter_context(self.connection)
                with child_end:
                    self._output = undo.enter_context(tempfile.TemporaryFile())
                    arguments = [str(child_end.fileno()), str(os.getpid())]
                    self._process = subprocess.Popen(
                        [sys.executable, "-P", "-m", "gear_offline.core.workers", *arguments],
                        stdin=subprocess.DEVNULL,
                        stdout=self._output,
                        stderr=self._output,
                        env={**os.environ, **variables},
                        pass_fds=[child_end.fileno()],
                        start_new_session=True,
                    )
            except OSError as error:
                problem = f"a worker process cannot be started: {error.strerror or error}"
                remedy = _REMEDIES.get(error.errno or 0, self._remedy)
                raise GearError(LOST, problem, remedy=remedy) from error
            undo.pop_all()
        self.pid = self._process.pid
        self.busy = False  # whether a job was started and its result has not been received

    def start(self, function: str, *arguments: Any) -> None:
        """Begin a job: ``module:function``, called with a `Caller` and `arguments`."""
        assert not self.busy, "one job at a time"
        self.busy = True
        self.send((function, arguments, get_admitted()))

    def send(self, message: Any) -> None:
        """Send to the running job, which takes it with `Caller.receive`."""
        try:
            self.connection.send_bytes(pickle.dumps(message))  # `send` takes twice as long
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
        """End the process, even in the middle of a job."""
        self._process.kill()
        self._process.wait()
        self.connection.close()
        self._output.close()

    def _lost(self) -> GearError:
        self.busy = False
        with suppress(subprocess.TimeoutExpired):  # it says why, then ends; or may live on
            self._process.wait(END_SECONDS)
        self._process.kill()
        code = self._process.wait()
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").strip().splitlines()
        how, remedy = f"exit code {code}", self._remedy
        if code < 0:
            how = f"killed by {signal.Signals(-code).name}"
        elif lines:
            at = [line.strip() for line in lines if line.startswith('  File "')][-1:]
            how = ", at ".join([f"{how}: {lines[-1]}", *at])
            remedy = remedy if "MemoryError" in lines[-1] else "mend what it says"
        return GearError(LOST, f"a worker process has ended ({how})", remedy=remedy)


class Pool(Closing):
    """Does jobs side by side, up to `workers` at a time; a context manager.

    `on_message` gets what they send before their ends.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._numbers = count()
        self._running: dict[Any, int] = {}  # whatever does a job -> the job's number
        self.on_message: Callable[[Any], object] = lambda message: None

    @property
    def has_room(self) -> bool:
        """True if one more job may begin."""
        return len(self._running) < self.workers

    def submit(self, function: str, *arguments: Any) -> int:
        """Begin a job, ``module:function`` as of `Worker.start`; return its number."""
        number = next(self._numbers)
        self._running[self._begin(function, arguments)] = number
        return number

    def wait(self, seconds: float | None = None) -> list[tuple[int, Any]]:
        """Wait until something comes; return the numbers and values of jobs that have ended.

        In place of a value stands the `GearError` of a job that failed: ``WORKER_LOST`` where its
        process is gone.
        """
        return [(self._running.pop(key), value) for key, value in self._collect(seconds)]

    def run(
        self,
        function: str,
        jobs: Iterable[Sequence[Any]],
        *,
        on_message: Callable[[Any], object] = lambda message: None,
    ) -> Iterator[Any]:
        """Yield the values of jobs in their order; the first error that comes is raised.

        `jobs` are the arguments of each, read as there is room; `on_message` gets what they send.
        """
        self.on_message, waiting, expected = on_message, iter(jobs), deque[int]()
        early: dict[int, Any] = {}  # values that jobs before theirs are waited for
        try:
            while True:
                while self.has_room and (arguments := next(waiting, None)) is not None:
                    expected.append(self.submit(function, *arguments))
                if not expected:
                    return
                for number, value in self.wait():
                    if isinstance(value, GearError):
                        raise value
                    early[number] = value
                while expected and expected[0] in early:
                    yield early.pop(expected.popleft())
        finally:
            self.abandon()  # nobody waits for what they do

    @abstractmethod
    def interrupt(self) -> None:
        """Ask the jobs that run to end, which they tell."""

    @abstractmethod
    def abandon(self) -> None:
        """End the jobs that run, whatever they are doing."""

    @abstractmethod
    def _begin(self, function: str, arguments: tuple[Any, ...]) -> Any: ...

    @abstractmethod
    def _collect(self, seconds: float | None) -> Iterator[tuple[Any, Any]]: ...


class WorkerPool(Pool):
    """A pool of processes here, started when there is work, each with `threads` as of `Worker`."""

    def __init__(self, workers: int, *, threads: int | None = 1) -> None:
        super().__init__(workers)
        self._threads = threads
        self._idle: list[Worker] = []

    def _begin(self, function: str, arguments: tuple[Any, ...]) -> Worker:
        worker = self._idle.pop() if self._idle else Worker(threads=self._threads)
        try:
            worker.start(function, *arguments)
        except GearError:
            worker.close()
            raise
        return worker

    def _collect(self, seconds: float | None) -> Iterator[tuple[Worker, Any]]:
        workers = {worker.connection: worker for worker in self._running}
        for connection in wait(list(workers), seconds):
            worker = workers[connection]
            try:
                value = worker.receive()
            except GearError as error:
                value = error
            if worker.busy:
                self.on_message(value)
                continue
            if isinstance(value, GearError) and value.code == LOST:
                worker.close()
            else:
                self._idle.append(worker)
            yield worker, value

    def interrupt(self) -> None:
        for worker in self._running:
            worker.interrupt()

    def abandon(self) -> None:
        for worker in self._running:
            worker.close()
        self._running.clear()

    def close(self) -> None:
        self.abandon()
        for worker in self._idle:
            worker.close()
        self._idle.clear()


class RayPool(Pool):
    """A pool of tasks on a Ray cluster, each with its share of CPUs and GPUs.

    A task whose node is lost is done again on another one.  Tasks work in the directory of this
    process, which has to be on a file system that all nodes share; what they send comes with their
    values.

    `address` is ``"auto"`` or ``"HOST:PORT"``; this machine is one of the cluster's nodes (else
    ``UNAVAILABLE``).  `workers` are tasks at a time, 1: as many as there are CPUs.  `cpus` and
    `gpus` are those of all nodes together, `node_cpus` those of the smallest one that has any.
    """

    def __init__(self, address: str, workers: int = 1) -> None:
        with package_needed("Ray is not installed", "ray"):
            import ray
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
        super().__init__(workers)
        self._ray: Any = ray
        self._on_node = NodeAffinitySchedulingStrategy
        self._is_ours = not ray.is_initialized()
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        before = signal.getsignal(signal.SIGTERM)
        try:
            if self._is_ours:
                self._ray.init(address, log_to_driver=False, logging_level="error")
        except Exception as error:  # of many classes
            problem, remedy = f"no Ray cluster: {first_line(error)}", "start one: ray start --head"
            raise UnavailableError("UNAVAILABLE", problem, address, remedy) from error
        finally:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, before)  # Ray takes it for itself
        self._nodes = [node for node in self._ray.nodes() if node["Alive"]]
        cpus, gpus = ([int(n["Resources"].get(k, 0)) for n in self._nodes] for k in ("CPU", "GPU"))
        self.cpus, self.gpus = max(1, sum(cpus)), sum(gpus)  # nodes may be added when tasks wait
        self.node_cpus = min(filter(None, cpus), default=1)
        self.share(workers if workers > 1 else self.cpus)

    def device(self, name: str) -> str:
        """Return ``"cuda"`` or ``"cpu"`` for a device's name, or ``"auto"``, on these nodes."""
        if name.startswith("cuda") and not self.gpus:
            problem = f"{name} was asked for, and no node has a GPU"
            raise UnavailableError("DEVICE", problem, "Ray", "use device=auto or cpu")
        return "cuda" if self.gpus and name != "cpu" else "cpu"

    def share(self, workers: int, *, cpus: int = 1, device: str = "cpu") -> None:
        """Let up to `workers` tasks run at a time, each with so many CPUs and its share of GPUs."""
        self.workers = workers
        gpus = min(1, self.gpus / workers) if device == "cuda" else 0
        self._options = {"num_cpus": min(cpus, self.node_cpus), "num_gpus": gpus}

    def check(self, folder: Path) -> None:
        """Refuse nodes that do not see the `folder` as it is here; ``SYSTEM``."""
        with ExitStack() as stack:
            token = folder.absolute()
            with suppress(OSError):  # a folder that is only read has to be there, no more
                probe = tempfile.NamedTemporaryFile(dir=token, prefix=".seen-")  # noqa: SIM115
                token = Path(stack.enter_context(probe).name)
            looks = [
                self._remote(
                    (f"{__name__}:look_at", (token,), {}),
                    num_cpus=0,
                    scheduling_strategy=self._on_node(node["NodeID"], soft=False),
                )
                for node in self._nodes
            ]
            for node, look in zip(self._nodes, looks, strict=True):
                answer = self._value(look)
                if answer != __version__:
                    is_error = isinstance(answer, GearError)
                    why = answer.problem if is_error else f"gear-offline {answer}"
                    host = node["NodeManagerHostname"]
                    problem = f"node {host} does not see this one's {folder}: {why}"
                    remedy = "work in a folder that all nodes share, with one gear-offline"
                    raise UnavailableError("SYSTEM", problem, remedy=remedy)

    def _remote(self, job: tuple[Any, ...], **options: Any) -> Any:
        task = self._ray.remote(max_retries=RETRIES, **options)(_do_in_ray)
        return task.remote(os.getcwd(), pickle.dumps(job))

    def _begin(self, function: str, arguments: tuple[Any, ...]) -> Any:
        return self._remote((function, arguments, get_admitted()), **self._options)

    def _collect(self, seconds: float | None) -> Iterator[tuple[Any, Any]]:
        ready, _ = self._ray.wait(list(self._running), num_returns=1, timeout=seconds)
        for task in ready:
            yield task, self._value(task)

    def _value(self, task: Any) -> Any:
        try:
            messages, answer = self._ray.get(task)
        except self._ray.exceptions.RayError as error:
            remedy = "look at Ray's logs: memory may have run out"
            return GearError(LOST, f"a task of Ray has ended: {first_line(error)}", remedy=remedy)
        for message in messages:
            self.on_message(message)
        return pickle.loads(answer)[1]

    def interrupt(self) -> None:
        for task in self._running:
            self._ray.cancel(task)  # SIGINT, for one that runs

    def abandon(self) -> None:
        for task in self._running:
            self._ray.cancel(task, force=True)
        if self._running:
            self._ray.wait(list(self._running), num_returns=len(self._running), timeout=10)
        self._running.clear()

    def close(self) -> None:
        """End the tasks, and leave the cluster."""
        self.abandon()
        if self._is_ours:
            self._ray.shutdown()


def look_at(caller: Caller, token: Path) -> str:
    """Return the version here, if a new file of the caller is visible."""
    token.stat()
    return __version__


def _do_in_ray(folder: str, request: bytes) -> tuple[list[Any], bytes]:
    os.chdir(folder)
    caller = Caller()
    return caller.kept, _answer(caller, request)


def _serve(connection: Connection[Any, Any]) -> None:
    """Do jobs until the caller closes its end."""
    caller = Caller(connection)
    while True:
        try:
            request = connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(_answer(caller, request))


def _answer(caller: Caller, request: bytes) -> bytes:
    """Do a job; return True, for its end, and its value or its `GearError`."""
    try:
        name, arguments, digests = pickle.loads(request)  # from our own caller only
        admit_digests(digests)
        module, _, function = name.partition(":")
        return pickle.dumps((True, getattr(import_module(module), function)(caller, *arguments)))
    except GearError as error:
        if error.__cause__ is not None:  # for --debug
            error.add_note("".join(traceback.format_exception(error.__cause__)))
        return pickle.dumps((True, error))
    except Exception as error:
        last = traceback.format_exception_only(error)[-1].strip()
        internal = GearError("INTERNAL", f"a worker process failed: {last}")
        internal.add_note("".join(traceback.format_exception(error)))
        return pickle.dumps((True, internal))


def _die_with_parent(parent: int) -> None:
    """Have the kernel (Linux) kill this process with its parent; idle ones see the pipe's end."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call above
        sys.exit(1)


if __name__ == "__main__":
    _die_with_parent(int(sys.argv[2]))
    with Connection(int(sys.argv[1])) as _connection:
        _serve(_connection)
