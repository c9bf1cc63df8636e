"""How the runs of a sweep share a machine, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from gear_offline.config.recipe import Recipe
from gear_offline.core.system import usable_cores
from gear_offline.errors import InputError, UnavailableError
from gear_offline.evaluation.background import MOST_WORKERS
from gear_offline.sweep.points import SweepPoint

Mode = Literal["auto", "streams", "stacked", "processes", "serial"]
MODES = ("auto", "streams", "stacked", "processes", "serial")
STREAMS = 8  # runs of the paper's size: more of them are no faster together, see docs/sweeps.md
STACKED = 16  # more of them need memory and are hardly faster
GPU_PROCESSES = 4


@dataclass(frozen=True, kw_only=True)
class Choice:
    """How runs are run.

    Attributes
    ----------
    mode
        ``"streams"``, ``"stacked"``, ``"processes"`` or ``"serial"``.
    parallel
        Runs at a time.
    threads
        CPU threads of each run whose recipe does not say; None leaves it to torch.
    evaluators
        Processes that evaluate beside each run whose recipe does not say.
    reason
        The decision in one line.
    """

    mode: str
    parallel: int
    threads: int | None
    evaluators: int | None
    reason: str

    def recipe(self, recipe: Recipe) -> Recipe:
        """Return a run's recipe with its share of the machine; none of it changes the result."""
        changes: dict[str, int] = {}
        if recipe.train.threads is None and self.threads is not None:
            changes["train__threads"] = self.threads
        evaluates = recipe.evaluate.episodes > 0 and recipe.evaluate.background != "off"
        if evaluates and recipe.evaluate.workers is None and self.evaluators is not None:
            changes["evaluate__workers"] = self.evaluators
        return recipe.replace(**changes) if changes else recipe


def choose(
    points: Sequence[SweepPoint],
    device: torch.device,
    *,
    mode: str,
    parallel: int | None,
    threads: int | None = None,
) -> Choice:
    """Decide how runs share the machine.

    Parameters
    ----------
    points
        Of the sweep.
    device
        Where all of them train.
    mode, parallel
        As asked for; ``"auto"`` and None leave it to this function.
    threads
        Those of the sweep's beginning, when it goes on.

    Raises
    ------
    InputError
        ``USAGE``
    UnavailableError
        ``DEVICE`` for streams without a GPU; ``UNAVAILABLE``.
    """
    if mode not in MODES:
        raise InputError("USAGE", f"mode {mode!r} is not known", remedy=f"use {', '.join(MODES)}")
    if parallel is not None and parallel < 1:
        raise InputError("USAGE", f"{parallel} runs at a time", remedy="give a number from 1")
    if mode == "streams" and device.type != "cuda":
        raise UnavailableError(
            "DEVICE", "streams need a CUDA device", remedy="use mode auto, processes or serial"
        )
    if mode == "stacked":
        from gear_offline.training.stack import check_stackable

        for point in points:
            check_stackable(point.recipe)
    cores, count = usable_cores(), len(points)
    reason = "as asked for"
    if mode == "auto":
        mode, reason = _automatic(points, device, cores, parallel)
    if mode == "serial":
        return Choice(mode=mode, parallel=1, threads=None, evaluators=None, reason=reason)
    if mode in ("streams", "stacked"):
        parallel = min(count, parallel or (STREAMS if mode == "streams" else STACKED))
        threads, spare = None, cores - 1
    else:
        parallel = min(count, parallel or (cores if device.type == "cpu" else GPU_PROCESSES))
        threads = threads or max(1, cores // parallel)
        spare = cores - parallel * threads
    evaluators = max(1, min(MOST_WORKERS, spare // parallel))
    return Choice(
        mode=mode, parallel=parallel, threads=threads, evaluators=evaluators, reason=reason
    )


def _automatic(
    points: Sequence[SweepPoint], device: torch.device, cores: int, parallel: int | None
) -> tuple[str, str]:
    if len(points) == 1 or parallel == 1:
        return "serial", "one run at a time"
    if device.type == "cpu":
        if cores == 1:
            return "serial", "one core"
        return "processes", f"{cores} cores"
    for point in points:
        loader, train = point.recipe.loader, point.recipe.train
        if train.graph == "off" or loader.engine == "off" or loader.placement == "disk":
            return "processes", f"the steps of {point.name} are not captured as CUDA graphs"
    reason = "the steps of small models leave a GPU room for each other's"
    return "streams", f"{reason}; --mode stacked is faster, but its dropout is not that of train"
