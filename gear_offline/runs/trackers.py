"""Trackers: a run's metrics, evaluations and recipe in TensorBoard, trackio and Weights & Biases.

Each says how far it has come with a run.  What it lacks is sent from the files of the run when it
is opened, so a resumed run goes on in it without a gap and without a step twice, and `sync` only
opens and closes it.  While a run trains, a tracker is a callback like any other (`Tracking`).
"""

from __future__ import annotations

import contextvars
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, Protocol

from gear_offline.config.sections import TrainSettings
from gear_offline.core.files import write_file
from gear_offline.core.text import first_line
from gear_offline.progress import say
from gear_offline.runs.callbacks import Callback
from gear_offline.runs.checks import check_trackers
from gear_offline.runs.directory import RunDirectory
from gear_offline.runs.run import Run, open_run
from gear_offline.training.metrics import GrowingFile, read_records

__all__ = ["sync"]

TRAIN, EVALUATE = "train", "evaluate"  # how names begin: train/loss, evaluate/return_3600
Values = dict[str, float]


class Tracker(Protocol):
    """Shows a run; `told` has the last step of ``train`` and ``evaluate`` that is in it."""

    told: dict[str, int]

    def __init__(self, run: Run, project: str) -> None: ...

    def send(self, step: int, values: Values) -> None:
        """Show values of a step, whose names begin with ``train/`` or ``evaluate/``."""

    def close(self) -> None:
        """Bring to the end what is under way."""


class TensorBoard:
    """Scalars in a new file of the run's ``tensorboard``; what is there already goes on.

    torch's SummaryWriter writes in a thread, whose errors end nothing and appear as tracebacks.
    """

    def __init__(self, run: Run, project: str) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        folder = run.path / "tensorboard"
        folder.mkdir(exist_ok=True)
        shown = any(folder.iterdir())
        self.told = last_steps((kind, step) for kind, step, _ in lines(run) if shown)
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = GrowingFile(folder / name)
        self._records = RecordWriter(self._file)
        # The start of a session hides the events of the steps that are about to be repeated.
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._write(file_version="brain.Event:2")
        self._write(step=run.steps + 1, session_log=start)

    def send(self, step: int, values: Values) -> None:
        """Write an event a value, with one system call each."""
        for name, value in values.items():
            scalar = self._summary.Value(tag=name, simple_value=value)
            self._write(step=step, summary=self._summary(value=[scalar]))

    def _write(self, **content: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **content).SerializeToString())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Trackio:
    """A run of trackio, in its database on this machine; its dashboard: ``trackio show``."""

    def __init__(self, run: Run, project: str) -> None:
        import trackio
        from trackio.sqlite_storage import SQLiteStorage

        name = f"{run.name}-{run_id(run)}"
        own = {"auto_log_cpu": False, "auto_log_gpu": False, "embed": False}
        config = run.recipe.to_dict()
        with redirect_stdout(StringIO()):  # our stdout is for results
            # In a context of its own, else it would end what another run has begun there.
            self._run = contextvars.copy_context().run(
                lambda: trackio.init(project, name=name, config=config, resume="allow", **own)
            )
        rows = SQLiteStorage.get_logs(project, name, run_id=self._run.id)
        self.told = last_steps((key.partition("/")[0], row["step"]) for row in rows for key in row)

    def send(self, step: int, values: Values) -> None:
        """Hand it to trackio's thread."""
        self._run.log(values, step=step)

    def close(self) -> None:
        """Wait for trackio's thread."""
        with redirect_stdout(StringIO()):
            self._run.finish()


class WandB:
    """A run of Weights & Biases; offline it lies in the run's ``wandb``, for ``wandb sync``."""

    def __init__(self, run: Run, project: str) -> None:
        import wandb

        self._run = wandb.init(
            project=project,
            id=run_id(run),
            name=run.name,
            dir=run.path,
            config=run.recipe.to_dict(),
            resume="allow",
            reinit="create_new",  # another run of this process goes on
            settings=wandb.Settings(console="off"),
        )
        # Its own steps must rise, but evaluations in the background come late.
        for kind in (TRAIN, EVALUATE):
            self._run.define_metric(f"{kind}/*", step_metric=f"{kind}/step")
        self.told = {kind: self._run.summary.get(f"{kind}/step", 0) for kind in (TRAIN, EVALUATE)}
        if self._run.offline:  # it cannot go on there; so the newest one holds the whole run
            now = Path(self._run.dir).parent
            for old in set(now.parent.glob("offline-run-*")) - {now}:
                shutil.rmtree(old, ignore_errors=True)

    def send(self, step: int, values: Values) -> None:
        """Hand it to W&B's process."""
        kind = next(iter(values)).partition("/")[0]
        self._run.log({f"{kind}/step": step, **values})

    def close(self) -> None:
        """Wait for W&B's process."""
        self._run.finish()


TRACKERS: dict[str, type[Tracker]] = {
    "tensorboard": TensorBoard,
    "trackio": Trackio,
    "wandb": WandB,
}


class Tracking(Callback):
    """Tells a tracker what happens; one that fails is given up, and training goes on."""

    def __init__(self, name: str, project: str) -> None:
        self._name, self._project = name, project
        self._tracker: Tracker | None = None

    def on_begin(self, run: Run) -> None:
        """Open it."""
        with self._giving_up(run):
            self._tracker = opened(run, self._name, self._project)

    def on_log(self, run: Run, step: int, values: Mapping[str, float]) -> None:
        """Send a line of metrics."""
        self._show(run, TRAIN, step, training_values(values))

    def on_evaluation(self, run: Run, step: int, record: Mapping[str, Any]) -> None:
        """Send what was achieved."""
        self._show(run, EVALUATE, step, evaluation_values(record))

    def _show(self, run: Run, kind: str, step: int, values: Values) -> None:
        if self._tracker is not None:
            with self._giving_up(run):
                show(self._tracker, kind, step, values)

    def on_end(self, run: Run, error: BaseException | None) -> None:
        """Close it."""
        if self._tracker is not None:
            with self._giving_up(run):
                self._tracker.close()

    @contextmanager
    def _giving_up(self, run: Run) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._tracker = None
            what = f"{self._name} failed and is told no more ({first_line(error)})"
            later = f"`gear-offline sync {run.path} --tracker {self._name}` sends the rest"
            say(f"warning: {what}; training goes on; {later}")


def trackings(settings: TrainSettings) -> list[Callback]:
    """Return callbacks that tell the trackers of a recipe."""
    return [Tracking(name, settings.project) for name in dict.fromkeys(settings.trackers)]


def opened(run: Run, name: str, project: str) -> Tracker:
    """Open a tracker and send what it lacks of the run's files."""
    tracker = TRACKERS[name](run, project)
    for line in lines(run):
        show(tracker, *line)
    return tracker


def show(tracker: Tracker, kind: str, step: int, values: Values) -> None:
    """Send values, but none of a step that a resumed run does again."""
    if values and step > tracker.told.get(kind, 0):
        tracker.send(step, values)


def sync(
    run: Run | str | os.PathLike[str], tracker: str | None = None, *, project: str | None = None
) -> None:
    """Send what a run has logged to a tracker, as far as it is not there yet.

    Parameters
    ----------
    run
        Run directory; nobody may be training in it.
    tracker
        ``"tensorboard"``, ``"trackio"`` or ``"wandb"``; default: those of the run's recipe.
    project
        Where trackio and W&B show it; default: the recipe's.

    Raises
    ------
    InputError
        ``RUN_NOT_FOUND``, ``RUN_LOCKED``, ``RUN_DAMAGED``; ``RECIPE`` for another tracker.
    UnavailableError
        ``PACKAGE_MISSING``.

    Examples
    --------
    `runs/tiny` is what the example of `gear_offline.train` makes.

    >>> import gear_offline as go
    >>> go.sync("runs/tiny", "tensorboard")
    """
    run = open_run(run)
    asked = {"train.trackers": tracker, "train.project": project}
    changes = {option: value for option, value in asked.items() if value is not None}
    settings = run.recipe.replace(changes).train
    check_trackers(settings.trackers)
    with RunDirectory(run.path, resume=True):
        for name in dict.fromkeys(settings.trackers):
            opened(run, name, settings.project).close()


def lines(run: Run) -> Iterator[tuple[str, int, Values]]:
    """Yield the lines of a run's files: kind, step and what a tracker shows of it."""
    for record in read_records(run.path / "metrics.jsonl"):
        yield TRAIN, record["step"], training_values(record)
    for record in read_records(run.path / "evaluations.jsonl"):
        yield EVALUATE, record["step"], evaluation_values(record)


def training_values(record: Mapping[str, float | None]) -> Values:
    """Name the numbers of a line of metrics."""
    return {f"train/{k}": v for k, v in record.items() if k != "step" and v is not None}


def evaluation_values(record: Mapping[str, Any]) -> Values:
    """Name the numbers of an evaluation; none of one that failed."""
    values: Values = {}
    for name, found in {"": record, **record.get("tasks", {})}.items():
        prefix = f"evaluate/{name}/" if name else "evaluate/"
        for target in found.get("targets", ()):
            for number in ("return", "normalized_score"):
                if target.get(number) is not None:
                    values[f"{prefix}{number}_{target['target']:g}"] = target[number]
    if record.get("tasks") and record.get("normalized_score") is not None:
        values["evaluate/normalized_score"] = record["normalized_score"]
    return values


def last_steps(shown: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Return the last step of each kind."""
    last: dict[str, int] = {}
    for kind, step in shown:
        last[kind] = max(step, last.get(kind, step))
    return last


def run_id(run: Run) -> str:
    """Return what tells a run from others of its name, also elsewhere; made when missing."""
    path = run.path / "id"
    if not path.exists():
        write_file(path, secrets.token_hex(4).encode())
    return path.read_text().strip()
