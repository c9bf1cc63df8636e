"""How much of a global batch crosses nodes, exactly, from the shares of the nodes.

Shape legend: D nodes, n segments of a global batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def expected_excess(count: int, share: float, capacity: int) -> float:
    """Return E max(0, X - capacity) for X binomial with `count` draws of probability `share`.

    Summed over the mass function; beyond twelve deviations from the mean nothing is left that a
    double could hold.
    """
    if share <= 0.0 or capacity >= count:
        return 0.0
    if share >= 1.0:
        return float(count - capacity)
    deviation = math.sqrt(count * share * (1 - share))
    first = max(capacity + 1, int(count * share - 12 * deviation) - 12)
    last = min(count, int(count * share + 12 * deviation) + 12)
    if first > last:
        return 0.0
    k = np.arange(first, last + 1, dtype=np.float64)
    start = (
        math.lgamma(count + 1)
        - math.lgamma(first + 1)
        - math.lgamma(count - first + 1)
        + first * math.log(share)
        + (count - first) * math.log1p(-share)
    )
    ratios = np.log((count - k[:-1]) / (k[:-1] + 1)) + math.log(share) - math.log1p(-share)
    mass = np.exp(start + np.concatenate([[0.0], np.cumsum(ratios)]))
    return float((mass * (k - capacity)).sum())


def crossing_share(shares: Sequence[float], batch: int) -> float:
    """Return the expected share of a global batch that moves between nodes.

    A node works on ``batch / D`` segments; what is drawn beyond that from its shards moves, and
    nothing else does (`gear_offline.distributed.assignment`).

    Parameters
    ----------
    shares
        (D,), how often each node's shards are drawn from; they add up to 1.
    batch
        n.
    """
    capacity = batch // len(shares)
    return sum(expected_excess(batch, share, capacity) for share in shares) / batch


def allreduce_seconds(
    nbytes: float,
    *,
    nodes: int,
    gpus: int,
    bus_rate: float,
    node_rate: float,
    latency: float,
) -> float:
    """Return the seconds of averaging `nbytes` of gradients over all GPUs.

    Rings within a node (2 (G - 1) / G of the bytes over its links), and between nodes with the
    bytes spread over the node's cards (2 (D - 1) / D of them), one after the other.
    """
    inside = 2 * (gpus - 1) / gpus * nbytes / bus_rate
    between = 2 * (nodes - 1) / nodes * nbytes / node_rate if nodes > 1 else 0.0
    hops = (gpus > 1) + (nodes > 1) * math.ceil(math.log2(max(nodes, 2)))
    return inside + between + hops * latency
