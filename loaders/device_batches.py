"""Batches as views of gathered windows; one that stays in GPU memory and is filled in place.

Shape legend: B segments, K steps of a window.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gear_offline.fields import EXTRA
from gear_offline.kernels.gather import Padding, Windows
from gear_offline.loaders.batch import Batch

if TYPE_CHECKING:
    from gear_offline.kernels.engine import StaticFill

# Fields of a `Batch` in its order: from the table, then from the windows.
_FIELDS = ("states", "actions", "rewards", "returns_to_go")
_NAMED = ("timesteps", "attention_mask", "segments")


def split(windows: Windows, padding: Padding) -> list[Batch]:
    """Return the batch of each step of windows (steps, B, K, ...); views, nothing is copied."""
    fields = {name: tensor.unbind(0) for name, tensor in windows.tensors().items()}
    fields |= {name: getattr(windows, name).unbind(0) for name in _NAMED}
    extras = [name for name in fields if name.startswith(EXTRA)]
    return [
        Batch(
            *(fields[name][step] for name in (*_FIELDS, *_NAMED)),
            padding=padding,
            extras={name.removeprefix(EXTRA): fields[name][step] for name in extras},
        )
        for step in range(len(windows.segments))
    ]


class DeviceBatches:
    """The next batch, made by the GPU on its own: for training steps captured as CUDA graphs.

    Attributes
    ----------
    batch
        Tensors that stay where they are; each `enqueue` overwrites them.
    """

    def __init__(self, fill: StaticFill, *, padding: Padding, step: int) -> None:
        self._fill = fill
        windows = fill.windows
        whole = Windows(
            buffers=tuple(buffer[None] for buffer in windows.buffers),
            fields=windows.fields,
            timesteps=windows.timesteps[None],
            attention_mask=windows.attention_mask[None],
            segments=windows.segments[None],
        )
        (self.batch,) = split(whole, padding)
        self.set_step(step)

    def set_step(self, step: int) -> None:
        """Make `step` the next one, in the order of torch's current stream."""
        self._fill.set_step(step)

    def enqueue(self) -> None:
        """Select and gather the next step into `batch`, and advance: one launch, no waiting.

        Runs on torch's current stream.  Captured in a CUDA graph, each replay takes one step more.
        """
        self._fill.enqueue()
