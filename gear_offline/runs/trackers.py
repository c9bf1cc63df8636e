"""Trackers: a run's metrics, evaluations and recipe in TensorBoard, CSV, trackio, MLflow and W&B.

Each says how far it has come with a run.  When it is opened, the records it lacks are sent from
the files of the run.  So a resumed run goes on in it without a gap and without a step twice, and
`sync` only opens and closes it.
"""

from __future__ import annotations

import contextvars
import csv
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, Protocol

from gear_offline.artifacts.json_lines import AppendedFile, read_records
from gear_offline.artifacts.records import EvaluationReport, MetricsRecord
from gear_offline.config.arguments import check_arguments
from gear_offline.config.files import flat
from gear_offline.config.recipe import load_recipe
from gear_offline.config.sections import TrainSettings
from gear_offline.core.files import write_file
from gear_offline.core.parts import calling_part, find_part
from gear_offline.core.text import first_line, quote, say, told_apart
from gear_offline.errors import InputError
from gear_offline.runs.callbacks import Callback
from gear_offline.runs.checks import TRACKERS, check_trackers
from gear_offline.runs.directory import RunDirectory
from gear_offline.runs.run import Run, open_run

FILES: dict[str, tuple[str, Any]] = {  # kind of a value: its file, and what is a line of it
    "train": ("metrics.jsonl", MetricsRecord),
    "evaluate": ("evaluations.jsonl", EvaluationReport),
}
VALIDATION = "validation/"  # before the names of losses in a line of metrics


class Tracker(Protocol):
    """A display of a run's values: a class that ``train.trackers`` names.

    It is made with the run and a project.

    It goes on with a run that it has, and shows the recipe.  `last_steps` has the largest step
    of each kind when it is opened: later ones are sent once, and evaluations that had failed.
    """

    last_steps: dict[str, int]

    def send(self, step: int, values: dict[str, float]) -> None:
        """Show values of one kind by name: ``train/loss``, ``evaluate/return``."""

    def close(self) -> None:
        """Wait for what is under way."""


class TensorBoard:
    """Scalars in a new file of the run's ``tensorboard``; what is there already goes on.

    torch's SummaryWriter writes in a thread, whose errors end nothing and appear as tracebacks.
    """

    def __init__(self, run: Run, project: str) -> None:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        folder = run.path / "tensorboard"
        folder.mkdir(exist_ok=True)
        self.last_steps: dict[str, int] = {}
        board, last = EventAccumulator(str(folder), {"scalars": 0}), run.steps
        for tag in board.Reload().Tags()["scalars"]:
            series, stored = tag.partition("/")[0], (scalar.step for scalar in board.Scalars(tag))
            steps = (step for step in stored if step <= last)  # later ones are hidden below
            self.last_steps[series] = max([self.last_steps.get(series, 0), *steps])
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        newest = max((file.name for file in folder.glob("*.tfevents.*")), default="")
        self._file = AppendedFile(folder / max(name, f"{newest}.1"))  # clocks may go back
        self._records = RecordWriter(self._file)
        # The start of a session hides the events of the steps that are about to be repeated.
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._write(file_version="brain.Event:2")
        self._write(step=last + 1, session_log=start)

    def send(self, step: int, values: dict[str, float]) -> None:
        value = self._summary.Value
        scalars = [value(tag=name, simple_value=number) for name, number in values.items()]
        self._write(step=step, summary=self._summary(value=scalars))  # all of a line, or none

    def _write(self, **content: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **content).SerializeToString())

    def close(self) -> None:
        self._file.close()


class CSV:
    """Rows of step, name and value in the run's ``scalars.csv``."""

    HEAD = ("step", "name", "value")

    def __init__(self, run: Run, project: str) -> None:
        path, last = run.path / "scalars.csv", run.steps
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]  # without a line that a kill has cut
        rows = [row for row in csv.DictReader(StringIO(whole)) if int(row["step"]) <= last]
        write_file(path, self._lines([self.HEAD, *(row.values() for row in rows)]))
        self.last_steps = {row["name"].partition("/")[0]: int(row["step"]) for row in rows}
        self._file = AppendedFile(path)

    def send(self, step: int, values: dict[str, float]) -> None:
        self._file.write(self._lines((step, name, repr(value)) for name, value in values.items()))

    def _lines(self, rows: Iterable[Iterable[Any]]) -> bytes:
        csv.writer(text := StringIO(), lineterminator="\n").writerows(rows)
        return text.getvalue().encode()

    def close(self) -> None:
        self._file.close()


class Trackio:
    """A run in trackio's database on this machine, written by a thread of trackio."""

    def __init__(self, run: Run, project: str) -> None:
        import trackio
        from trackio.sqlite_storage import SQLiteStorage

        name, config = f"{run.name}-{_run_id(run)}", run.recipe.to_dict()
        options = {"auto_log_cpu": False, "auto_log_gpu": False, "embed": False}
        with redirect_stdout(StringIO()):  # our stdout is for results
            # In a context of its own, else it would end what another run has begun there.
            self._run = contextvars.copy_context().run(
                lambda: trackio.init(project, name=name, config=config, resume="allow", **options)
            )
        rows = SQLiteStorage.get_logs(project, name, run_id=self._run.id)
        rows.sort(key=lambda row: row["step"])
        self.last_steps = {key.partition("/")[0]: row["step"] for row in rows for key in row}

    def send(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def close(self) -> None:
        with redirect_stdout(StringIO()):
            self._run.finish()


class MLflow:
    """A run of MLflow, on the server or in the database of MLFLOW_TRACKING_URI."""

    def __init__(self, run: Run, project: str) -> None:
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._client, self._metric = MlflowClient(), Metric
        experiment = self._client.get_experiment_by_name(project)
        place = experiment.experiment_id if experiment else self._client.create_experiment(project)
        key, name = "gear_offline.id", _run_id(run)
        known = self._client.search_runs([place], f"tags.`{key}` = '{name}'")
        tags: dict[str, Any] = {key: name}
        found = known[0] if known else self._client.create_run(place, tags=tags, run_name=run.name)
        self._id: str = found.info.run_id
        self.last_steps: dict[str, int] = {}
        options = flat(run.recipe.to_dict())
        if not known:
            params = [Param(name, str(value)[:500]) for name, value in options.items()]
            self._client.log_batch(self._id, params=params[:100])
            self._client.log_batch(self._id, params=params[100:])
        for name in found.data.metrics:
            series = name.partition("/")[0]
            steps = [metric.step for metric in self._client.get_metric_history(self._id, name)]
            self.last_steps[series] = max([self.last_steps.get(series, 0), *steps])

    def send(self, step: int, values: dict[str, float]) -> None:
        now = int(time.time() * 1000)
        clean = {re.sub(r"[^\w\-. :/]", "_", name): value for name, value in values.items()}
        metrics = [self._metric(name, value, now, step) for name, value in clean.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._id)


class WandB:
    """A run of Weights & Biases; offline it lies in the run's ``wandb``, for ``wandb sync``."""

    def __init__(self, run: Run, project: str) -> None:
        import wandb

        self._run = wandb.init(
            project=project,
            id=_run_id(run),
            name=run.name,
            dir=run.path,
            config=run.recipe.to_dict(),
            resume="allow",
            reinit="create_new",  # another run of this process goes on
            settings=wandb.Settings(console="off"),
        )
        for series in FILES:  # W&B's own steps must rise, but evaluations may come late
            self._run.define_metric(f"{series}/*", step_metric=f"{series}/step")
        self._run.define_metric(f"{VALIDATION}*", step_metric="train/step")
        self.last_steps = {series: self._run.summary.get(f"{series}/step", 0) for series in FILES}
        if self._run.offline:  # it cannot go on there; so the newest one holds the whole run
            now = Path(self._run.dir).parent
            for folder in set(now.parent.glob("offline-run-*")) - {now}:
                shutil.rmtree(folder, ignore_errors=True)

    def send(self, step: int, values: dict[str, float]) -> None:
        series = next(iter(values)).partition("/")[0]
        self._run.log({f"{series}/step": step, **values})

    def close(self) -> None:
        self._run.finish()


class Tracking(Callback):
    """Tells a tracker what happens; one that fails is given up, and training goes on."""

    def __init__(self, name: str, project: str) -> None:
        self.name, self._project = name, project
        self._tracker: Tracker | None = None
        self._failed = set[tuple[str, int]]()  # evaluations, which may be played again

    def open(self, run: Run) -> None:
        """Open the tracker and send what it lacks of the run's files."""
        self._tracker = find_part(TRACKERS, self.name)(run, self._project)
        for series, (file, line) in FILES.items():
            for record in read_records(run.path / file):
                line.model_validate(record)  # refuses what is no such line
                note = self._failed.add if record.get("error") else self._failed.discard
                note((series, record["step"]))
                self._show(series, record["step"], record)

    def _show(self, series: str, step: int, record: Mapping[str, Any]) -> None:
        """Send a line, but none of a step that a resumed run does again."""
        values, tracker = _values(series, record), self._tracker
        if tracker is None or not values:
            return
        if (series, step) in self._failed or step > tracker.last_steps.get(series, 0):
            tracker.send(step, values)

    def close(self) -> None:
        if self._tracker is not None:
            self._tracker.close()

    def on_begin(self, run: Run) -> None:
        self._try(run, self.open, run)

    def on_log(self, run: Run, step: int, values: Mapping[str, float]) -> None:
        self._try(run, self._show, "train", step, values)

    def on_evaluation(self, run: Run, step: int, record: Mapping[str, Any]) -> None:
        self._try(run, self._show, "evaluate", step, record)

    def on_end(self, run: Run, error: BaseException | None) -> None:
        self._try(run, self.close)

    def _try(self, run: Run, act: Callable[..., None], *words: Any) -> None:
        try:
            act(*words)
        except (Exception, SystemExit) as error:
            self._tracker = None
            problem = f"{self.name} failed and is told no more ({first_line(error)})"
            later = f"`gear-offline sync {quote(run.path)} --tracker {self.name}` sends the rest"
            say(f"warning: {problem}; training goes on; {later}")


def trackings(settings: TrainSettings) -> list[Tracking]:
    return [Tracking(name, settings.project) for name in dict.fromkeys(settings.trackers)]


@check_arguments()
def sync(
    run: Run | str | os.PathLike[str], tracker: str | None = None, *, project: str | None = None
) -> None:
    """Send what a run has logged to a tracker, as far as it is not there yet.

    Parameters
    ----------
    run
        Run directory; nobody may be training in it.
    tracker
        ``"tensorboard"``, ``"csv"``, ``"trackio"``, ``"mlflow"`` or ``"wandb"``; default: those of
        the run's recipe.
    project
        Where trackio, MLflow and W&B show it; default: the recipe's.

    Raises
    ------
    InputError
        ``RUN_NOT_FOUND``, ``RUN_LOCKED``, ``RUN_DAMAGED``; ``RECIPE``, ``USAGE``: no such tracker.
    UnavailableError
        ``PACKAGE_MISSING``.

    Examples
    --------
    `runs/tiny` is what the example of `gear_offline.train` makes.

    >>> import gear_offline as go
    >>> go.sync("runs/tiny", "tensorboard")
    """
    run, options = open_run(run), {"train.trackers": tracker, "train.project": project}
    changes = {option: value for option, value in options.items() if value is not None}
    settings = load_recipe(run.recipe, changes).train
    if not settings.trackers:
        raise InputError("USAGE", "the recipe names no tracker", str(run.path), "give --tracker")
    check_trackers(settings.trackers)
    with RunDirectory(run.path, resume=True):
        for tracking in trackings(settings):
            with calling_part(TRACKERS, "sending to it", tracking.name):
                tracking.open(run)
                tracking.close()


def _values(series: str, record: Mapping[str, Any]) -> dict[str, float]:
    """Name the numbers of a line; none of an evaluation that failed."""
    values = {name: value for name, value in record.items() if name != "step"}
    if series == "evaluate":
        tasks, values = record.get("tasks") or {}, {}
        for prefix, result in (("", record), *((f"{name}/", task) for name, task in tasks.items())):
            values[f"{prefix}return"] = result.get("return")
            values[f"{prefix}score"] = result.get("normalized_score")
            targets = () if result.get("condition") == "nothing" else result.get("targets", ())
            names = told_apart([target["target"] for target in targets])
            for target, name in zip(targets, names, strict=True):
                label = name.replace(",", "")
                values[f"{prefix}return_{label}"] = target.get("return")
                values[f"{prefix}score_{label}"] = target.get("normalized_score")
    numbers = {n: v for n, v in values.items() if type(v) in (int, float) and abs(v) < float("inf")}
    prefix = f"{series}/"
    return {n if n.startswith(VALIDATION) else prefix + n: v for n, v in numbers.items()}


def _run_id(run: Run) -> str:
    """Return the run's id, unique among runs of its name anywhere; create it when missing."""
    path = run.path / "id"
    if not path.exists():
        write_file(path, secrets.token_hex(4).encode())
    return path.read_text().strip()
