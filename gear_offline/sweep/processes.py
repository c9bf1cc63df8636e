"""The runs of a sweep in processes: each trains one run after another, all read one table."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from gear_offline.config.recipe import Recipe
from gear_offline.core.interruption import StopRequest
from gear_offline.errors import GearError
from gear_offline.loaders.recipes import loader_options
from gear_offline.runs.training_run import TrainingInterrupted
from gear_offline.sampling.base import own_strategies
from gear_offline.sweep.display import SweepDisplay
from gear_offline.sweep.points import SweepPoint
from gear_offline.sweep.results import steps_done
from gear_offline.tables.joint import TableData
from gear_offline.tables.shared import SharedTables

POLL_SECONDS = 0.2
USELESS = ("SWEEP_WORKER", "GPU_LOST")  # after these errors a process trains nothing more


class Worker:
    """A process that trains; see `gear_offline.sweep.worker`.

    Parameters
    ----------
    tables
        Tables that it takes rather than read them again.
    threads
        Of the numerical libraries; None leaves it to them.
    """

    def __init__(self, tables: dict[str, dict[str, int]], *, threads: int | None) -> None:
        # Its modules are to be found where ours were, as with multiprocessing's spawn.
        variables = {"PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)}
        if threads is not None:
            variables["OMP_NUM_THREADS"] = str(threads)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        self._process = subprocess.Popen(
            [sys.executable, "-m", "gear_offline.sweep.worker", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, **variables},
            start_new_session=True,  # Ctrl-C reaches it through us, once
        )
        self.point: SweepPoint | None = None
        self._received, self._asked = b"", False
        self._send({"tables": tables, "strategies": own_strategies()})

    @property
    def output(self) -> int:
        """Descriptor that can be read when there is an answer."""
        assert self._process.stdout is not None, "made with a pipe"
        return self._process.stdout.fileno()

    def start(self, point: SweepPoint, recipe: Recipe, path: Path) -> None:
        """Have it train a run."""
        self.point = point
        self._send({"recipe": recipe.to_dict(), "path": str(path)})

    def answer(self) -> GearError | None:
        """Read the answer that is there: None if the run is complete.

        Raises
        ------
        BlockingIOError
            If it is not whole yet.
        """
        part = os.read(self.output, 1 << 16)
        self._received += part
        if part and not part.endswith(b"\n"):
            raise BlockingIOError
        line, self._received = self._received, b""
        if not part:
            return self._lost()
        found = json.loads(line)
        if not found:
            return None
        kind = TrainingInterrupted if found["code"] == "TRAIN_INTERRUPTED" else GearError
        return kind(found["code"], found["what"], where=found["where"], remedy=found["remedy"])

    @property
    def is_lost(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    def interrupt(self) -> None:
        """Ask for a checkpoint and an end."""
        self._asked = True
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            with suppress(OSError):  # a request that was never read
                if pipe is not None:
                    pipe.close()

    def _send(self, value: Any) -> None:
        assert self._process.stdin is not None, "made with a pipe"
        with suppress(BrokenPipeError):  # `answer` tells how it ended
            self._process.stdin.write(json.dumps(value).encode() + b"\n")
            self._process.stdin.flush()

    def _lost(self) -> GearError:
        code = self._process.wait()
        if self._asked and code == -signal.SIGTERM:
            return TrainingInterrupted("TRAIN_INTERRUPTED", "stopped before its first step")
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        how = f"exit code {code}" + (f": {lines[-1]}" if lines else "")
        if code < 0:
            how = f"killed by {signal.Signals(-code).name}"
        return GearError(
            "SWEEP_WORKER",
            f"the process that trained it has ended ({how})",
            where="" if self.point is None else self.point.name,
            remedy="run the sweep again: it goes on from the last checkpoint",
        )


class Processes:
    """Runs the points of a sweep in processes.

    Parameters
    ----------
    parallel
        Processes.
    threads
        Of the numerical libraries in each; None leaves it to them.
    share
        Gives a run's recipe its share of the machine.
    place
        Gives the run directory of a point.
    display
        Is told where runs stand.
    """

    def __init__(
        self,
        *,
        parallel: int,
        threads: int | None,
        share: Callable[[Recipe], Recipe],
        place: Callable[[SweepPoint], Path],
        display: SweepDisplay,
    ) -> None:
        self._parallel, self._threads, self._share = parallel, threads, share
        self._place, self._display = place, display
        self._workers: list[Worker] = []
        self._stop = StopRequest()

    def complete(
        self,
        points: Sequence[SweepPoint],
        ended: Callable[[SweepPoint, GearError | None], None],
        *,
        tables: SharedTables,
    ) -> None:
        """Run all points; `ended` is told of each how it ended.

        Raises
        ------
        TrainingInterrupted
            ``TRAIN_INTERRUPTED`` after Ctrl-C or SIGTERM; what the runs have done is saved.
        """
        waiting, handles = deque(points), tables.handles()
        asked = False
        with self._stop:
            try:
                while waiting or self._busy():
                    if self._stop.signal_name is None:
                        self._start(waiting, handles)
                    elif not asked:
                        asked = True
                        for worker in self._busy():
                            worker.interrupt()
                    self._listen(ended)
                    if asked and not self._busy():
                        break
            finally:
                for worker in self._workers:
                    worker.close()
        if asked:
            name = self._stop.signal_name
            raise TrainingInterrupted("TRAIN_INTERRUPTED", f"stopped by {name}")

    def _busy(self) -> list[Worker]:
        return [worker for worker in self._workers if worker.point is not None]

    def _start(self, waiting: deque[SweepPoint], handles: dict[str, dict[str, int]]) -> None:
        while waiting and len(self._busy()) < self._parallel:
            idle = next((worker for worker in self._workers if worker.point is None), None)
            if idle is None:
                idle = Worker(handles, threads=self._threads)
                self._workers.append(idle)
            point = waiting.popleft()
            idle.start(point, self._share(point.recipe), self._place(point))

    def _listen(self, ended: Callable[[SweepPoint, GearError | None], None]) -> None:
        busy = self._busy()
        ready, _, _ = select.select([worker.output for worker in busy], [], [], POLL_SECONDS)
        for worker in busy:
            point = worker.point
            assert point is not None, "a busy worker"
            self._display.step(point.name, steps_done(self._place(point)))
            if worker.output not in ready:
                continue
            try:
                error = worker.answer()
            except BlockingIOError:
                continue
            worker.point = None
            if worker.is_lost or (error is not None and error.code in USELESS):
                worker.close()
                self._workers.remove(worker)
            if not isinstance(error, TrainingInterrupted):
                ended(point, error)


def build_tables(
    points: Sequence[SweepPoint], datasets: Callable[[SweepPoint], TableData]
) -> SharedTables:
    """Return the tables of the points, in shared memory, as far as they fit there.

    A run whose table is not among them reads one of its own.
    """
    tables = SharedTables(publish=True)
    for point in points:
        with suppress(GearError):  # the run itself says what is wrong
            dataset = datasets(point)
            tables.table(dataset, loader_options(point.recipe, dataset))
    return tables
