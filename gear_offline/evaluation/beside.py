"""Evaluations that run beside training: worker processes play the checkpoints of their steps.

Every evaluation that is due is played, by one worker from beginning to end, so its returns are
those of playing it in place with the same device and number of threads.  Results are handed out in
the order of their steps.  When more are outstanding than allowed, the next one waits for room:
leaving evaluations out would make the result of a run depend on how fast its machine was.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gear_offline.core.processes import interrupts_kept_from_children
from gear_offline.errors import GearError
from gear_offline.evaluation.worker import PlayRequest, play_checkpoint

POLL_SECONDS = 0.05
SPARE = 2  # evaluations that may wait while all workers play


class WorkerLost(Exception):
    """A worker ended before its answer; the text says how."""


class Worker:
    """A process that plays; see `gear_offline.evaluation.worker`.

    Parameters
    ----------
    threads
        Of torch and the numerical libraries.

    Raises
    ------
    WorkerLost
        The system has no room for another process.
    """

    def __init__(self, *, threads: int) -> None:
        # Its modules are to be found where ours were, as with multiprocessing's spawn.
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        variables = {"PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        try:
            with interrupts_kept_from_children():  # the trainer decides
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "gear_offline.evaluation.worker", str(os.getpid())],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._errors,
                    env={**os.environ, **variables},
                )
        except OSError as error:
            self._errors.close()
            raise WorkerLost(f"it cannot be started: {error.strerror or error}") from error
        self.step: int | None = None
        self._received = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, request: PlayRequest) -> None:
        """Send a request; one at a time.

        Raises
        ------
        WorkerLost
        """
        assert self._process.stdin is not None, "made with a pipe"
        self.step = request.step
        try:
            self._process.stdin.write(json.dumps(asdict(request)).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._lost() from error

    def answer(self) -> dict[str, Any] | None:
        """Return the answer if it is there; does not wait.

        Raises
        ------
        WorkerLost
        """
        assert self._process.stdout is not None, "made with a pipe"
        pipe = self._process.stdout.fileno()
        while select.select([pipe], [], [], 0)[0]:
            part = os.read(pipe, 1 << 16)
            if not part:
                raise self._lost()
            self._received += part
            if part.endswith(b"\n"):
                line, self._received, self.step = self._received, b"", None
                found: dict[str, Any] = json.loads(line)
                return found
        return None

    def _lost(self) -> WorkerLost:
        code = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        if code < 0:
            return WorkerLost(f"killed by {signal.Signals(-code).name}")
        return WorkerLost(f"exit code {code}" + (f": {lines[-1]}" if lines else ""))

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            with suppress(OSError):  # a request that was never read
                if pipe is not None:
                    pipe.close()


@dataclass(kw_only=True, eq=False)
class Outstanding:
    """An evaluation whose result is not handed out yet.

    Attributes
    ----------
    request
        What to play.
    began
        `time.monotonic` when it was asked for.
    report
        The result, once it is there.
    """

    request: PlayRequest
    began: float
    report: dict[str, Any] | None = None
    sent: bool = field(default=False)


class EvaluationsBeside:
    """The evaluations of a run that are under way, and the processes that play them.

    Parameters
    ----------
    workers
        Most processes at a time; each is started when there is work for it.
    threads
        CPU threads of each.
    insist
        Raise when a worker is lost, rather than playing in this process from then on.
    say
        Is told once when a worker is lost.
    """

    def __init__(
        self, *, workers: int, threads: int, insist: bool, say: Callable[[str], None]
    ) -> None:
        self._most, self._threads = workers, threads
        self._insist, self._say = insist, say
        self._workers: list[Worker] = []
        self._outstanding: dict[int, Outstanding] = {}
        self._polled = 0.0
        self.lost = ""

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps whose evaluation is outstanding; their checkpoints must stay."""
        return tuple(self._outstanding)

    @property
    def is_full(self) -> bool:
        """Whether one more would have to wait."""
        return len(self._outstanding) >= self._most + SPARE

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes that are there."""
        return tuple(worker.pid for worker in self._workers)

    def submit(self, request: PlayRequest) -> None:
        """Have a checkpoint played as soon as it is on the disk and a worker is free."""
        self._outstanding[request.step] = Outstanding(request=request, began=time.monotonic())

    def poll(self) -> list[tuple[int, dict[str, Any], float]]:
        """Hand out what is done, in the order of steps: (step, document, seconds it took).

        Cheap enough for every step; does not wait, unless evaluations are played here since a
        worker was lost.

        Raises
        ------
        GearError
            The evaluation's own error; ``EVALUATION_WORKER`` if a worker is lost and `insist`.
        """
        now = time.monotonic()
        if not self._outstanding or now - self._polled < POLL_SECONDS:
            return []
        self._polled = now
        try:
            self._receive()
            self._send()
        except WorkerLost as error:
            self._give_up(str(error))
        if self.lost:
            self._play_here()
        done = []
        for step in sorted(self._outstanding):
            report = self._outstanding[step].report
            if report is None:
                break
            began = self._outstanding.pop(step).began
            done.append((step, report, time.monotonic() - began))
        return done

    def _receive(self) -> None:
        for worker in self._workers:
            if worker.step is None or (found := worker.answer()) is None:
                continue
            if "code" not in found:
                self._outstanding[found["step"]].report = found["report"]
                continue
            what, where, remedy = (found[key] for key in ("what", "where", "remedy"))
            if found["code"] not in ("RUN_DAMAGED", "RUN_NOT_FOUND"):
                raise GearError(found["code"], what, where=where, remedy=remedy)
            del self._outstanding[found["step"]]  # newer ones may be whole
            self._say(f"step {found['step']:,} cannot be evaluated: {what} ({where})")

    def _send(self) -> None:
        if self.lost:
            return
        for item in self._outstanding.values():
            if item.sent or not Path(item.request.checkpoint).is_dir():
                continue
            idle = next((worker for worker in self._workers if worker.step is None), None)
            if idle is None:
                if len(self._workers) >= self._most:
                    return
                idle = Worker(threads=self._threads)
                self._workers.append(idle)
            item.sent = True
            idle.ask(item.request)

    def _give_up(self, how: str) -> None:
        self.lost = how
        steps = [worker.step for worker in self._workers if worker.step is not None]
        self.close()
        if self._insist:
            raise GearError(
                "EVALUATION_WORKER",
                f"a process that evaluates beside training is gone ({how})",
                where=f"evaluation of step {min(steps, default=0)}",
                remedy="go on with --resume, which plays it again; evaluate.background=off plays "
                "in the training process",
            )
        self._say(
            f"a process that evaluates beside training is gone ({how}): from here on "
            "evaluations interrupt training"
        )

    def _play_here(self) -> None:
        for item in self._outstanding.values():
            if item.report is None and Path(item.request.checkpoint).is_dir():
                item.report = play_checkpoint(item.request)

    def close(self) -> None:
        """End the processes; what is outstanding is left to a resumed run."""
        for worker in self._workers:
            worker.close()
        self._workers.clear()

    def wait(self) -> None:
        """Sleep a moment, or until a worker says something."""
        time.sleep(POLL_SECONDS)
