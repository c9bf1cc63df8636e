"""One batch of segments, as a model takes it.

Shape legend: B segments, K steps of a window, S and A per-step shapes of states and actions; with
`frame_stack` above 1, S is (frames of a stack, *frame).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Batch:
    """Segments with their padding.  Padded positions are zeros in every field, but for stacks of
    frames: those of padded steps repeat frames of the window, for stacks share memory.

    Attributes
    ----------
    states
        ``(B, K, *S)`` float32; uint8 for images.  Stacks of frames are a view in which a frame
        appears several times: call `contiguous` before writing to it.
    actions
        ``(B, K, *A)`` float32, or int64 for discrete actions (``(B, K)`` for one action a step).
    rewards
        ``(B, K, 1)`` float32.
    returns_to_go
        ``(B, K, 1)`` float32, own reward included, over the rest of the whole episode.
    timesteps
        ``(B, K)`` int64, step within the episode.
    attention_mask
        ``(B, K)`` int64, 1 on real steps.
    segments
        ``(B, 2)`` int64: episode, start.
    padding
        Side on which the padding is.
    extras
        Further columns, ``(B, K, *shape)`` in their source dtype.
    """

    states: Tensor
    actions: Tensor
    rewards: Tensor
    returns_to_go: Tensor
    timesteps: Tensor
    attention_mask: Tensor
    segments: Tensor
    padding: Literal["right", "left"] = field(default="right", kw_only=True)
    extras: Mapping[str, Tensor] = field(default_factory=dict, kw_only=True)

    def __len__(self) -> int:
        """Return B."""
        return len(self.segments)

    @property
    def device(self) -> torch.device:
        return self.segments.device

    def model_inputs(self) -> dict[str, Tensor]:
        """Return the keyword arguments of the Hugging Face Decision Transformer."""
        return {
            "states": self.states,
            "actions": self.actions,
            "rewards": self.rewards,
            "returns_to_go": self.returns_to_go,
            "timesteps": self.timesteps,
            "attention_mask": self.attention_mask,
        }

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """Return the batch on `device`; tensors that are there already are not copied."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """Return a copy in page-locked memory, for asynchronous copies to a GPU."""
        # Stacks share memory, which a copy with the same strides could not be written to.
        return self._map(lambda tensor: tensor.contiguous().pin_memory())

    def contiguous(self) -> Batch:
        """Return the batch with every tensor contiguous, copying only those that are not."""
        return self._map(lambda tensor: tensor.contiguous())

    def _map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        return Batch(
            **{name: change(tensor) for name, tensor in self.model_inputs().items()},
            segments=change(self.segments),
            padding=self.padding,
            extras={name: change(tensor) for name, tensor in self.extras.items()},
        )
