"""The files of a run as others read them: typed, regular files only, one error if damaged."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gear_offline.core.files import read_regular
from gear_offline.core.text import first_line
from gear_offline.dataset.scores import ReferenceScores
from gear_offline.errors import InputError
from gear_offline.training.metrics import read_records

MOST_BYTES = 64 << 20  # of a summary or an evaluation


class _Record(BaseModel):
    model_config = ConfigDict(allow_inf_nan=False, frozen=True, populate_by_name=True)


class MetricsRecord(_Record):
    """A line of ``metrics.jsonl``."""

    step: int
    loss: float | None = None


class TargetRecord(_Record):
    """What one asked return led to."""

    target: float
    mean_return: float = Field(alias="return")
    ci95: tuple[float | None, float | None] = (None, None)
    normalized_score: float | None = None
    returns: tuple[float, ...] = ()


class TaskRecord(_Record):
    """What was achieved in one environment."""

    environment: str = ""
    mean_return: float | None = Field(None, alias="return")
    normalized_score: float | None = None
    scale: str | None = None
    reference: ReferenceScores | None = None
    seed: int | None = None
    goals: bool = False
    targets: tuple[TargetRecord, ...] = ()


class EvaluationRecord(TaskRecord):
    """A line of ``evaluations.jsonl``, or ``evaluation.json``; several tasks stand in `tasks`."""

    step: int | None = None
    run: str | None = None
    confidence: str = ""
    error: str | None = None
    staleness_steps: int = 0
    staleness_seconds: float = 0.0
    tasks: dict[str, TaskRecord] = {}
    videos: tuple[str, ...] = ()  # of the first episodes, seen from the run directory

    @property
    def ranking(self) -> float | None:
        """What evaluations are compared by: their return, of several tasks the mean score."""
        return self.normalized_score if self.mean_return is None else self.mean_return


class RunSummary(_Record):
    """What others read of ``summary.json``."""

    steps: int


R = TypeVar("R", bound=_Record)


def read_lines(path: Path, kind: type[R]) -> list[R]:
    """Return the records of a JSON-lines file, without a torn last line; [] when missing."""
    try:
        return [kind.model_validate(line) for line in read_records(path)]
    except ValidationError as error:
        raise _damaged(path, error) from error


def read_document(path: Path, kind: type[R]) -> R | None:
    """Return the content of a JSON file; None when missing."""
    try:
        return kind.model_validate_json(read_regular(path, most=MOST_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise _damaged(path, error) from error


def read_summary(run: Path) -> RunSummary | None:
    """Return the summary of a run directory; None without one that can be read."""
    with suppress(InputError):  # it is written anew
        return read_document(run / "summary.json", RunSummary)
    return None


def _damaged(path: Path, error: Exception) -> InputError:
    what = f"the file is damaged: {first_line(error)}"
    return InputError("RUN_DAMAGED", what, str(path), "remove the file")
