"""What the GPU is told of a sampler: one of three ways to draw a segment.

A sampler describes itself by one of these, or has none: then the host draws ahead of use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gear_offline.kernels.search import GuidedSearch

if TYPE_CHECKING:
    import torch

    from gear_offline.kernels.priorities import DevicePriorities


@dataclass(frozen=True, eq=False)
class CumulativeWeights:
    """An episode by its weight, then any start in it.

    Attributes
    ----------
    search
        In the cumulative masses of the episodes, which end at ``2**64``.
    """

    search: GuidedSearch


@dataclass(frozen=True)
class KeyedPermutation:
    """Every start once an epoch, in an order of the epoch's own."""


@dataclass(frozen=True, eq=False)
class PriorityTree:
    """A start by its mass.

    Attributes
    ----------
    on_device
        Moves the masses to a GPU, where they are drawn from and updated from then on.
    """

    on_device: Callable[[torch.device], DevicePriorities]


Draw = CumulativeWeights | KeyedPermutation | PriorityTree
