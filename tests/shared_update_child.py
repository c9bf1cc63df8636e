"""One of several ranks that train with captured steps and share their updates.

With GPUs steps are CUDA graphs.  Without, what would be captured runs at each replay, and the
kernels' own text runs on the CPU: everything else, the collectives and their order among saves and
evaluations too, is the same.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from gear_offline.loaders.batch import Batch
from gear_offline.loaders.loader import GearLoader
from gear_offline.runs.trainer import train
from gear_offline.training import captured_part, captured_step, learner, rank_update
from tests.kernels_on_cpu import ThreadedKernels, on_cpu
from tests.training_support import register_environment, tiny_recipe


class Batches:
    """In place of batches that a GPU makes: those of the loader."""

    ahead = False
    batch: Batch

    def __init__(self, loader: GearLoader) -> None:
        self._loader = loader
        self.set_step(loader.step)

    def set_step(self, step: int) -> None:
        self._step, self.batch = step, self._loader.batch_at(step)

    def begin(self, *, timed: bool) -> None:
        self.batch = self._loader.batch_at(self._step)

    def end(self, *, timed: bool) -> None:
        self._step += 1


class Graph:
    """In place of a CUDA graph: does at each replay what was captured."""

    def __init__(self) -> None:
        self.replay: Callable[[], None] = lambda: None

    def reset(self) -> None:
        pass


def capture(graph: Graph, run: Any) -> None:
    def replay() -> None:
        run.__self__._optimizer.zero_gradients()  # a graph writes gradients, and adds to none
        run()

    graph.replay = replay


def warm_up(run: Callable[[], None], written: Iterable[Tensor], device: torch.device) -> None:
    """Run a step and undo what it did."""
    saved = [(tensor, tensor.detach().clone()) for tensor in written]
    run()
    with torch.no_grad():
        for tensor, before in saved:
            tensor.copy_(before)


def without_gpu(stack: ExitStack, kernels: str) -> None:
    """Leave CUDA's calls out, until `stack` ends."""
    put = mock.patch.object
    stack.enter_context(on_cpu(ThreadedKernels(ctypes.CDLL(kernels))))
    for module, name, value in (
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (torch.cuda, "synchronize", lambda: None),
        (torch.cuda, "CUDAGraph", Graph),
        (captured_part, "time_fill", lambda batches, step: 0.0),
        (captured_step, "capture", capture),
        (captured_step, "warm_up", warm_up),
        (captured_step, "wait_for_steps", lambda world: None),
        (learner, "why_not_captured", lambda *_, **__: ""),
        (GearLoader, "device_batches", lambda loader, **_: Batches(loader)),
        (GearLoader, "engine", SimpleNamespace(placed=SimpleNamespace(reason="a test"))),
    ):
        stack.enter_context(put(module, name, value, create=True))


def main(kernels: str, data: str, *runs: str) -> None:
    """Train each of `runs`, "OUT OPTION...", one after another."""
    register_environment()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(rank_update, "LEAST_LEFT", 1))
        stack.enter_context(
            mock.patch("gear_offline.runs.report.write_report", lambda run, **_: run)
        )
        if device == "cpu":
            without_gpu(stack, kernels)
        for run in runs:
            out, *options = run.split()
            recipe = tiny_recipe(Path(data), f"train.device={device}", *options)
            train(recipe, out=Path(out), resume=True, quiet=False)


if __name__ == "__main__":
    # shows where a rank hangs, and ends it
    faulthandler.dump_traceback_later(float(os.environ.get("CHILD_SECONDS", "100")), exit=True)
    main(*sys.argv[1:])
