"""Others that choose by weight, called as their samplers do.

Shape legend: N items, n draws or updates of a call.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Calls = dict[str, Callable[[], object]]


def torchrl_calls(weights: Array, chosen: Array, draws: int) -> Calls:
    """Return a draw and an update of TorchRL's tree; nothing where it is not installed.

    A draw is what `torchrl.data.PrioritizedSampler.sample` does with its tree: the sum, uniform
    numbers below it, the search, and the weights of what was found.

    Parameters
    ----------
    weights
        (N,) float64.
    chosen
        (n,) int64, of the update.
    draws
        Of a call.
    """
    try:
        from torchrl._torchrl import SumSegmentTreeFp64
    except ImportError:
        return {}
    tree = SumSegmentTreeFp64(weights.size)
    tree[np.arange(weights.size)] = weights
    generator, values = np.random.default_rng(1), weights[chosen]
    changes = itertools.cycle((values[::-1].copy(), values))

    def draw() -> object:
        found = tree.scan_lower_bound(generator.uniform(0.0, tree.query(0, weights.size), draws))
        return tree[found]

    def update() -> None:
        tree[chosen] = next(changes)

    return {"TorchRL: draw": draw, "TorchRL: update": update}
