"""What crosses nodes when segments go where they lie, against sending every segment to its slot.

A simulation of the law itself: global batches are drawn and assigned exactly as in training, and
the segments that leave their node are counted.  Nodes hold equal shares of bytes, or of
probability, of a dataset whose episodes are drawn with Zipf's law; a part of the probability may
be replicated on every node.  The peer is the usual way: a slot belongs to a rank, wherever its
segment lies.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import torch

from gear_offline.core.progress import progress
from gear_offline.distributed.assignment import ANYWHERE, Assigner
from gear_offline.distributed.sharding import share_shards

SHARDS = 4096
# (nodes, ranks of a node, segments a rank, Zipf exponent, equal shares of, replicated)
CASES = [
    *((8, 8, share, 0.0, "bytes", 0.0) for share in (16, 64, 256, 1024, 4096)),
    *((nodes, 8, 128, 0.0, "bytes", 0.0) for nodes in (2, 4, 16, 64)),
    (8, 1, 1024, 0.0, "bytes", 0.0),
    *((8, 8, 256, skew, of, 0.0) for skew in (0.5, 1.0) for of in ("bytes", "probability")),
    *((8, 8, 256, 0.5, "probability", part) for part in (0.05, 0.2)),
]


def run(*, quick: bool = False) -> dict[str, Any]:
    """Simulate; about two minutes on one core."""
    segments = 1 << (18 if quick else 22)  # of each case, at least four batches
    rows = []
    with progress(len(CASES), "traffic", unit="cases") as advance:
        for case in CASES[:6] if quick else CASES:
            rows.append(_case(*case, segments=segments))
            advance(1)
    return {"results": rows}


def table(document: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Return a header and one row a case."""
    header = ("nodes x ranks", "segments a rank", "skew", "equal", "copied")
    rows: list[tuple[Any, ...]] = [(*header, "crosses nodes", "usual way", "ms to assign")]
    for row in document["results"]:
        rows.append(
            (
                f"{row['nodes']} x {row['ranks_per_node']}",
                f"{row['segments_per_rank']:,}",
                f"{row['skew']:g}",
                row["equal_shares_of"],
                f"{row['replicated']:.0%}",
                f"{row['crossing']:.2%}",
                f"{row['usual_crossing']:.1%}",
                f"{row['assign_milliseconds']:.2f}",
            )
        )
    return rows


def _case(
    nodes: int,
    ranks_per_node: int,
    share: int,
    skew: float,
    equal: str,
    replicated: float,
    *,
    segments: int,
) -> dict[str, Any]:
    generator = np.random.default_rng(0)
    weights = generator.permutation(np.arange(1, SHARDS + 1) ** -skew)
    weights /= weights.sum()
    owners = share_shards(weights if equal == "probability" else np.ones(SHARDS), nodes)
    hottest = np.argsort(-weights)
    copied = hottest[: int(np.searchsorted(np.cumsum(weights[hottest]), replicated))]
    owners[copied] = ANYWHERE
    ranks, batch = nodes * ranks_per_node, nodes * ranks_per_node * share
    assigner = Assigner(torch.arange(ranks) // ranks_per_node)
    anyone = torch.full((batch,), ANYWHERE)
    moved = usual = 0
    steps, times = max(4, segments // batch), []
    for _ in range(steps):
        homes = torch.from_numpy(owners[generator.choice(SHARDS, batch, p=weights)])
        began = time.perf_counter()
        found = assigner.assign(anyone, homes)
        times.append(time.perf_counter() - began)
        moved += int(assigner.moved(found, anyone, homes)[0])
        slots = torch.arange(batch) // share // ranks_per_node
        usual += int(((homes >= 0) & (homes != slots)).sum())
    return {
        "nodes": nodes,
        "ranks_per_node": ranks_per_node,
        "segments_per_rank": share,
        "skew": skew,
        "equal_shares_of": equal,
        "replicated": replicated,
        "steps": steps,
        "crossing": moved / steps / batch,
        "usual_crossing": usual / steps / batch,
        "assign_milliseconds": statistics.median(times) * 1e3,
    }
