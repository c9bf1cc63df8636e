"""How the runs of a sweep share a machine, and why."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from gear_offline.errors import InputError, UnavailableError
from gear_offline.sweep_points import SweepPoint

Mode = Literal["auto", "streams", "processes", "serial"]
MODES = ("auto", "streams", "processes", "serial")
STREAMS = 8  # runs of the paper's size: more of them are no faster together, see docs/sweeps.md
GPU_PROCESSES = 4


@dataclass(frozen=True, kw_only=True)
class Choice:
    """How runs are run.

    Attributes
    ----------
    mode
        ``"streams"``, ``"processes"`` or ``"serial"``.
    parallel
        Runs at a time.
    threads
        CPU threads of each run whose recipe does not say; None leaves it to torch.
    reason
        The decision in one line.
    """

    mode: str
    parallel: int
    threads: int | None
    reason: str


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
        ``DEVICE`` for streams without a GPU.
    """
    if mode not in MODES:
        raise InputError("USAGE", f"mode {mode!r} is not known", remedy=f"use {', '.join(MODES)}")
    if parallel is not None and parallel < 1:
        raise InputError("USAGE", f"{parallel} runs at a time", remedy="give a number from 1")
    if mode == "streams" and device.type != "cuda":
        raise UnavailableError(
            "DEVICE", "streams need a CUDA device", remedy="use mode auto, processes or serial"
        )
    cores, count = len(os.sched_getaffinity(0)), len(points)
    reason = "as asked for"
    if mode == "auto":
        mode, reason = _automatic(points, device, cores, parallel)
    if mode == "serial":
        return Choice(mode=mode, parallel=1, threads=None, reason=reason)
    if mode == "streams":
        parallel = min(count, parallel or STREAMS)
        return Choice(mode=mode, parallel=parallel, threads=None, reason=reason)
    parallel = min(count, parallel or (cores if device.type == "cpu" else GPU_PROCESSES))
    threads = threads or max(1, cores // parallel)
    return Choice(mode=mode, parallel=parallel, threads=threads, reason=reason)


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
    return "streams", "the steps of small models leave a GPU room for each other's"
