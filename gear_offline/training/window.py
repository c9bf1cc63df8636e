"""Measurements since the last report: losses, gradient norms, and the uses of time.

Shape legend: n steps since the last report.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from gear_offline.distributed.world import World
from gear_offline.errors import GearError


class ReportWindow:
    """The steps since the last report: loss and gradient norm of each, and their time."""

    def __init__(self, most: int, device: torch.device, parts: int = 0) -> None:
        self.rows = torch.zeros(most, 2, device=device)  # the first `filled` are in use
        # of several losses, each; the last row is that of steps behind the window
        self.parts = torch.zeros(most + 1, parts, device=device)
        self.filled = 0
        self.timed = 0  # of these, done by this process: fewer where a run was resumed
        self.busy_seconds = self._began = 0.0
        self.wait_seconds = 0.0  # of the busy ones: for batches
        self._all_busy_seconds = self._all_wait_seconds = 0.0  # of what was reported

    def start(self) -> None:
        self._began = time.perf_counter()

    def note_wait(self) -> None:
        """Count the time since `start` as waiting, too."""
        self.wait_seconds += time.perf_counter() - self._began

    def stop(self) -> None:
        """Count the time since `start`."""
        self.busy_seconds += time.perf_counter() - self._began

    def count(self, *loss_and_norm: Tensor) -> None:
        """Count a step, and write its row unless what was launched does."""
        for column, value in enumerate(loss_and_norm):
            self.rows[self.filled, column] = value
        self.filled += 1
        self.timed += 1

    def check(self, last: int, name: str, *, newest: bool = False) -> None:
        """Refuse losses and norms that are not finite, of steps up to `last`, or of that alone."""
        rows = self.rows[: self.filled][-1 if newest else None :]
        wrong = (~torch.isfinite(rows)).nonzero()
        if wrong.numel() == 0:
            return
        row, column = (int(v) for v in wrong[0])
        step, kind = last - (len(rows) - 1 - row), "gradient norm" if column else "loss"
        problem = f"the {kind} of step {step} is {float(rows[row, column])}"
        remedy = "lower optimizer.learning_rate, or look for outliers with `gear-offline inspect`; "
        remedy += "go on from a checkpoint before that step, if there is one"
        raise GearError("LOSS_NONFINITE", problem, name, remedy)

    def of_all(self, world: World) -> Tensor:
        """Return (n, 2 + P), losses, norms and parts of the global batches; a rank has its part."""
        rows = torch.cat([self.rows[: self.filled], self.parts[: self.filled]], dim=1)
        world.sum_into(rows)
        return rows / world.size

    def load(self, rows: Tensor) -> None:
        """Go on behind the steps of another process."""
        self.filled = len(rows)
        self.rows[: self.filled], self.parts[: self.filled] = rows[:, :2], rows[:, 2:]

    @property
    def wait_share(self) -> float:
        """Share of the time of all steps reported so far that went by waiting for batches."""
        return self._all_wait_seconds / self._all_busy_seconds if self._all_busy_seconds else 0.0

    def begin(self) -> None:
        """Begin anew, after a report."""
        self._all_busy_seconds += self.busy_seconds
        self._all_wait_seconds += self.wait_seconds
        self.filled = self.timed = 0
        self.busy_seconds = self.wait_seconds = 0.0
