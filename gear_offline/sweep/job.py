"""What the schedulers of a sweep have in common: their job, and errors that end one run alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from gear_offline.config.recipe import Recipe
from gear_offline.config.tasks import data_key
from gear_offline.core.files import write_error
from gear_offline.core.text import first_line
from gear_offline.errors import GearError, is_out_of_memory
from gear_offline.sweep.trials import Trial
from gear_offline.tables.joint import TableData


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a scheduler is to train, and how.

    Attributes
    ----------
    trials, folder
        Each trial is trained into ``folder/NAME``.
    device, parallel
        Where, and how many at a time.
    threads
        Of a trial in a process of its own.
    exact
        Stack none on a GPU: each run has the bits that it has alone.
    datasets
        By `data_key`, opened and checked.
    moved
        Is told of a trial's steps done.
    ended
        Is told of each trial how it ended, but of those that were interrupted.
    """

    trials: Sequence[Trial]
    folder: Path
    device: torch.device
    parallel: int
    threads: int | None
    exact: bool
    datasets: Mapping[str, TableData]
    moved: Callable[[Trial, int], None]
    ended: Callable[[Trial, GearError | None], None]

    def dataset(self, recipe: Recipe) -> TableData:
        """Return the data of a recipe."""
        return self.datasets[data_key(recipe)]

    def end(self, trial: Trial, error: GearError | None) -> None:
        """Tell how a trial has ended; raise ``DEVICE``, after which nothing can go on."""
        if error is not None and error.code == "DEVICE":
            raise error
        self.ended(trial, error)


@contextmanager
def run_errors(name: str, path: Path, device: torch.device) -> Iterator[None]:
    """Turn whatever ends one of several runs into a `GearError`, so that the others can go on.

    ``DEVICE`` says that they cannot: after some errors of CUDA (an illegal address, a failed
    launch) each further call of the process fails too.
    """
    try:
        yield
    except GearError:
        raise
    except OSError as error:
        raise write_error(error, str(path)) from error
    except Exception as error:
        first = first_line(error)
        if _is_lost(device):
            raise GearError(
                "DEVICE",
                f"the GPU does nothing more for this process after {type(error).__name__}: {first}",
                where=name,
                remedy="the same command goes on from the newest checkpoints",
            ) from error
        if any(is_out_of_memory(cause) for cause in _with_contexts(error)):
            remedy = "fewer runs at a time (sweep --parallel), or a smaller model or batch"
            raise GearError("MEMORY", f"out of memory: {first}", name, remedy) from error
        remedy = f"`gear-offline train {path} --resume --debug` repeats it alone and shows where"
        raise GearError("INTERNAL", f"{type(error).__name__}: {first}", name, remedy) from error


def _is_lost(device: torch.device) -> bool:
    """Return whether a GPU does nothing more for this process; asked after an error."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)  # such errors come again with each call, others do not
    except RuntimeError:
        return True
    return False


def _with_contexts(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and those that were being handled: a failed capture hides why it failed."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
