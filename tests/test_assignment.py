"""Assignment of global batches to ranks: equal shares, and as little movement as can be."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gear_offline.distributed.sharding import Assigner


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], list[list[int]]]:
    """Return the nodes of ranks, and the homes of the segments of some steps; skewed, too."""
    ranks_of = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    nodes = [node for node, count in enumerate(ranks_of) for _ in range(count)]
    nodes = draw(st.permutations(nodes))
    count, steps = len(nodes) * draw(st.integers(0, 4)), draw(st.integers(1, 3))
    popular = draw(st.lists(st.integers(0, len(ranks_of) - 1), min_size=1, max_size=3))
    home = st.lists(st.sampled_from(popular), min_size=count, max_size=count)
    return nodes, draw(st.lists(home, min_size=steps, max_size=steps))


@settings(max_examples=300, deadline=None)
@given(batches())
def test_equal_shares_with_the_least_movement(batch: tuple[list[int], list[list[int]]]) -> None:
    nodes, homes = batch
    held = np.array(homes, np.int64).reshape(len(homes), -1)
    assigner = Assigner(nodes, held.shape[1])
    slots, moves = assigner.assign(held)
    share = held.shape[1] // len(nodes)
    assert slots.shape == moves.shape == (len(homes), len(nodes), share)
    for row, ranks, far, total in zip(held, slots, moves, assigner.moved(held), strict=True):
        assert sorted(ranks.flatten().tolist()) == list(range(len(row)))
        assert (far == (row[ranks] != np.array(nodes)[:, None])).all()
        room = {node: share * nodes.count(node) for node in nodes}
        excess = sum(max(0, int((row == node).sum()) - room[node]) for node in room)
        assert far.sum() == total == excess, "only what exceeds a node's share moves"
        for node in room:  # of a node's ranks none reads more than one segment more than another
            reads = [int(far[rank].sum()) for rank, of in enumerate(nodes) if of == node]
            assert max(reads) - min(reads) <= 1


def test_share_that_moves_is_that_of_chance() -> None:
    """With equal owners ``sqrt(B / 2 pi)`` of B segments a rank exceed its share."""
    ranks, share, steps = 8, 1024, 50
    homes = np.random.default_rng(0).integers(0, ranks, (steps, ranks * share))
    moved = Assigner(range(ranks), ranks * share).moved(homes).mean() / ranks / share
    assert moved == pytest.approx((1 - 1 / ranks) ** 0.5 / (2 * np.pi * share) ** 0.5, rel=0.05)
