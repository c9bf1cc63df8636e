"""Batches as views of gathered windows; one that stays in GPU memory and is filled in place.

Shape legend: B segments, K steps of a window.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gear_offline.kernels.gather import Padding, Windows
from gear_offline.loaders.batch import Batch
from gear_offline.tables.fields import EXTRA

if TYPE_CHECKING:
    from gear_offline.kernels.gather_gpu import GpuGather, StaticFill

__all__ = ["DeviceBatches"]

# Fields of a `Batch` in its order: from the table, then from the windows.
_FIELDS = ("states", "actions", "rewards", "returns_to_go")
_NAMED = ("timesteps", "attention_mask", "segments")


def split(windows: Windows, padding: Padding, task_bounds: Tensor | None = None) -> list[Batch]:
    """Return the batch of each step of windows (steps, B, K, ...); views, nothing is copied."""
    fields = {name: tensor.unbind(0) for name, tensor in windows.tensors().items()}
    fields |= {name: getattr(windows, name).unbind(0) for name in _NAMED}
    extras = [name for name in fields if name.startswith(EXTRA)]
    return [
        Batch(
            *(fields[name][step] for name in (*_FIELDS, *_NAMED)),
            padding=padding,
            extras={name.removeprefix(EXTRA): fields[name][step] for name in extras},
            task_bounds=task_bounds,
        )
        for step in range(len(windows.segments))
    ]


AHEAD_BYTES = 8 << 20  # of a batch from host memory: smaller ones are there in no time
AHEAD_BLOCKS = 32  # they keep the bus busy and leave the multiprocessors to the model


class DeviceBatches:
    """The next batch, made by the GPU on its own: for training steps captured as CUDA graphs.

    A step calls `begin`, uses `batch`, and calls `end`.  With `ahead` the rows of the following
    step travel on a stream of their own meanwhile, into memory of their own, and `begin` copies
    them within GPU memory.

    Parameters
    ----------
    fill
        Of one step.
    padding
        Side of the padding.
    step
        The step to come.
    ahead
        Fetch a step ahead; pays where rows come from host memory.
    task_bounds
        As `gear_offline.loaders.batch.Batch`.
    windows
        Where `batch` lies, if `ahead`; otherwise it is where `fill` puts it.

    Attributes
    ----------
    batch
        Tensors that stay where they are; each `begin` overwrites them.
    ahead
        As given.
    """

    def __init__(
        self,
        fill: StaticFill,
        *,
        padding: Padding,
        step: int,
        ahead: bool = False,
        task_bounds: Tensor | None = None,
        windows: Windows | None = None,
    ) -> None:
        self._fill, self.ahead = fill, ahead
        self._windows = fill.windows
        if ahead:
            self._windows = _like(fill.windows) if windows is None else windows
        (self.batch,) = split(_lifted(self._windows), padding, task_bounds)
        self._stream: Any = None
        if ahead:
            device = self.batch.device
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._marks: list[Any] = [
                torch.cuda.Event(enable_timing=True, external=True)  # type: ignore[no-untyped-call]
                for _ in range(4)
            ]
        self.set_step(step)

    @property
    def chances(self) -> Tensor | None:
        """(B,) float64, the probability of each segment; None unless the selection learns."""
        return self._fill.chances

    @property
    def counter(self) -> Tensor:
        """(1,) int64 on the GPU, the step that the next `begin` takes."""
        return self._fill.counter

    def set_step(self, step: int) -> None:
        """Make `step` the next one, in the order of torch's current stream."""
        self._fill.set_step(step)
        if self.ahead:
            self._fill.enqueue()

    def begin(self, *, timed: bool = False) -> None:
        """Put the next step into `batch`, and advance: launches, no waiting.

        Runs on torch's current stream.  Captured in a CUDA graph, each replay takes one step more.
        """
        if not self.ahead:
            self._fill.enqueue()
            return
        self._mark(0, timed)
        for mine, theirs in zip(_tensors(self._windows), _tensors(self._fill.windows), strict=True):
            mine.copy_(theirs)
        self._mark(1, timed)
        self._stream.wait_stream(torch.cuda.current_stream(self.batch.device))
        with torch.cuda.stream(self._stream):
            self._fill.enqueue()

    def end(self, *, timed: bool = False) -> None:
        """Make torch's current stream wait for what travels ahead."""
        if not self.ahead:
            return
        self._mark(2, timed)
        torch.cuda.current_stream(self.batch.device).wait_stream(self._stream)
        self._mark(3, timed)

    def enqueue(self) -> None:
        """`begin` and `end`: for whoever has nothing to do meanwhile."""
        self.begin()
        self.end()

    def waited_seconds(self) -> float:
        """Return the GPU seconds that the last timed step, which is done, spent on its batch."""
        first, second, third, fourth = self._marks
        milliseconds: float = first.elapsed_time(second) + third.elapsed_time(fourth)
        return milliseconds / 1e3

    def _mark(self, number: int, timed: bool) -> None:
        if timed:
            self._marks[number].record()


def make_batches(
    engine: GpuGather,
    *,
    padding: Padding,
    step: int,
    ahead: bool,
    learns: bool = False,
    task_bounds: Tensor | None = None,
    windows: Windows | None = None,
) -> DeviceBatches:
    """Return the batches of an engine, a step ahead if asked for and where that pays.

    Those of a selection that learns are never ahead, and have probabilities.  They lie in
    `windows`, of the layout of `GpuGather.allocate`, if given.
    """
    fill = engine.static(chances=learns, windows=windows)
    batch_bytes = sum(buffer.nbytes for buffer in fill.windows.buffers)
    ahead = ahead and not learns
    ahead = ahead and engine.reads_host and batch_bytes >= AHEAD_BYTES
    if ahead:
        if windows is not None:  # what travels needs memory of its own
            fill = engine.static()
        fill.limit_blocks(AHEAD_BLOCKS)
    return DeviceBatches(
        fill, padding=padding, step=step, ahead=ahead, task_bounds=task_bounds, windows=windows
    )


def side_by_side(engine: GpuGather, count: int, padding: Padding) -> tuple[list[Windows], Batch]:
    """Return windows for `count` batches that lie one after another, and all as one batch."""
    size = engine.batch_size
    whole = engine.allocate((count * size,))
    parts = [_map(whole, lambda t, n=n: t[n * size : (n + 1) * size]) for n in range(count)]  # type: ignore[misc]
    (batch,) = split(_lifted(whole), padding)
    return parts, batch


def _tensors(windows: Windows) -> tuple[Tensor, ...]:
    return (*windows.buffers, *(getattr(windows, name) for name in _NAMED))


def _map(windows: Windows, change: Callable[[Tensor], Tensor]) -> Windows:
    return Windows(
        buffers=tuple(change(buffer) for buffer in windows.buffers),
        fields=windows.fields,
        timesteps=change(windows.timesteps),
        attention_mask=change(windows.attention_mask),
        segments=change(windows.segments),
    )


def _like(windows: Windows) -> Windows:
    return _map(windows, torch.empty_like)


def _lifted(windows: Windows) -> Windows:
    """Return the windows as those of one step, (1, B, K, ...)."""
    return _map(windows, lambda tensor: tensor[None])
