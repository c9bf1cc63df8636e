"""The work of a sweep: its trials that are not complete, and how each moves and ends.

What ends one of several runs is its own error, so that the others go on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from gear_offline.artifacts.records import read_evaluations
from gear_offline.batches.tables.joint import TableData
from gear_offline.core.files import write_error
from gear_offline.core.progress import Progress
from gear_offline.core.text import first_line, quote
from gear_offline.errors import GearError, is_out_of_memory
from gear_offline.evaluation.environments import Pack
from gear_offline.sweep.results import is_played, steps_done
from gear_offline.sweep.trials import Trial


@dataclass(frozen=True, kw_only=True)
class Work:
    """The trials that a scheduler trains, its means, and its progress."""

    trials: Sequence[Trial]  # that are not complete
    folder: Path  # each trial is trained into ``folder/NAME``
    device: torch.device
    parallel: int  # trials at a time; in this process, of a stack
    threads: int | None  # of a trial in a process of its own
    environments: tuple[Pack, ...] = ()  # that other processes have to learn
    datasets: Mapping[str, TableData]  # by `Recipe.data_key`, opened and checked
    progress: Progress  # of all trials together
    steps: dict[str, int]  # done, by trial, also of complete ones
    failures: dict[str, str]  # "CODE: what was wrong" by trial

    def note_steps(self, trial: Trial, steps: int) -> None:
        """Note where a trial stands; cheap enough for every few steps."""
        self.steps[trial.name] = steps
        self.progress.update(sum(self.steps.values()))

    def end(self, trial: Trial, error: GearError | None) -> None:
        """Note how a trial has ended; raise ``DEVICE``, after which nothing can go on."""
        if error is not None and error.code == "DEVICE":
            raise error
        path, steps, how = self.folder / trial.name, trial.recipe.train.steps, "complete"
        if reports := read_evaluations(path):
            how += f"; step {reports[-1].step:,}: {reports[-1].summary()[1]}"
        elif not is_played(trial.recipe, path):
            how = "all steps are done, evaluations are left"
        if error is not None:
            how = self.failures[trial.name] = f"{error.code}: {error.message}"
        self.progress.say(f"{trial.name}: {how}")
        self.note_steps(trial, steps if error is None else steps_done(path))


@contextmanager
def run_errors(name: str, path: Path, device: torch.device) -> Iterator[None]:
    """Turn whatever ends one of several runs into a `GearError`, so that the others can go on.

    ``DEVICE`` says that they cannot: after some errors of CUDA (an illegal address, a failed
    launch) each further call of the process fails too.
    """
    try:
        yield
    except OSError as error:
        raise write_error(error, str(path)) from error
    except Exception as error:
        first = first_line(error)
        is_told = isinstance(error, GearError)
        if getattr(error, "code", "MODEL") == "MODEL" and _is_lost(device):
            problem = f"the GPU does nothing more for this process after {type(error).__name__}"
            remedy = "the same command goes on from the newest checkpoints"
            raise GearError("DEVICE", f"{problem}: {first}", name, remedy) from error
        if is_told:
            raise
        if is_out_of_memory(error):
            remedy = "fewer runs at a time (sweep --parallel), or a smaller model or batch"
            raise GearError("MEMORY", f"out of memory: {first}", name, remedy) from error
        remedy = f"`gear-offline train {quote(path)} --resume --debug` shows where"
        raise GearError("INTERNAL", f"{type(error).__name__}: {first}", name, remedy) from error


def _is_lost(device: torch.device) -> bool:
    """Return true if a GPU does nothing more for this process; asked after an error."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # such errors come again with each call, others do not
    except RuntimeError:
        return True
    return False
