"""Gradients of several ranks, averaged inside a captured step by one all-reduce.

DistributedDataParallel keeps bookkeeping on the host between its buckets, which a CUDA graph would
not repeat.  Here what ranks add up is one run of memory: the gradients of all parameters, the loss
and the number of real steps, so that a step has one collective.  Loss and steps of bfloat16
gradients are another one, in float32.

Shape legend: P elements of all parameters, W ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from gear_offline.errors import GearError

if TYPE_CHECKING:
    from gear_offline.loaders.batch import Batch


class RankGradients:
    """Turns gradients of a rank's share into those of the global batch; without the host.

    A rank's loss must be its sum over real steps divided by `divisor`, the same on every rank.

    Parameters
    ----------
    parameters
        Those that gradients belong to, of one type, on one device.
    divisor
        Any positive number near that of real steps of a rank; it keeps sums in a common range.
    """

    def __init__(self, parameters: Sequence[Tensor], *, divisor: float) -> None:
        self._parameters, self.divisor = list(parameters), divisor

    def average(self, loss: Tensor, batch: Batch) -> Tensor:
        """Give every parameter the gradient of the global batch; return its loss, a scalar.

        Raises
        ------
        GearError
            ``GRADIENT_LAYOUT`` if a gradient is missing.
        """
        steps = (batch.attention_mask != 0).sum().float().reshape(1)
        facts = [loss.detach().float().reshape(1), steps]
        gradients = self._gradients()
        if gradients[0].dtype == torch.float32:
            flat = torch.cat([*gradients, *facts])  # (P + 2,)
            dist.all_reduce(flat)
            flat, sums = flat[:-2], flat[-2:]
        else:
            flat, sums = torch.cat(gradients), torch.cat(facts)
            dist.all_reduce(flat)
            dist.all_reduce(sums)
        factor = self.divisor / sums[1].clamp(min=1.0)
        flat.mul_(factor)
        begin = 0
        for parameter in self._parameters:
            end = begin + parameter.numel()
            parameter.grad = flat[begin:end].view_as(parameter)
            begin = end
        return sums[0] * factor

    def _gradients(self) -> list[Tensor]:
        found = []
        for number, parameter in enumerate(self._parameters):
            if parameter.grad is None:
                raise GearError(
                    "GRADIENT_LAYOUT",
                    f"parameter {number} of shape {tuple(parameter.shape)} has no gradient",
                    remedy="use train.graph=off",
                )
            found.append(parameter.grad.reshape(-1))
        return found
