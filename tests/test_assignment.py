"""Assignments against a maximum flow and against loops; any world size, any ownership."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gear_offline.distributed.assignment import ANYWHERE, Assigner


def maximum_flow(edges: dict[tuple[str, str], int]) -> int:
    """Edmonds and Karp, from "s" to "t"; independent of how assignments are computed."""
    capacity = dict(edges)
    near: dict[str, set[str]] = {}
    for one, other in edges:
        near.setdefault(one, set()).add(other)
        near.setdefault(other, set()).add(one)
        capacity.setdefault((other, one), 0)
    total = 0
    while True:
        came: dict[str, str] = {"s": ""}
        queue = deque(["s"])
        while queue and "t" not in came:
            here = queue.popleft()
            for there in near.get(here, ()):
                if there not in came and capacity[here, there] > 0:
                    came[there] = here
                    queue.append(there)
        if "t" not in came:
            return total
        path, here = [], "t"
        while came[here]:
            path.append((came[here], here))
            here = came[here]
        width = min(capacity[edge] for edge in path)
        for one, other in path:
            capacity[one, other] -= width
            capacity[other, one] += width
        total += width


def most_at_home(rank_homes: list[int], node_homes: list[int], nodes: list[int]) -> tuple[int, int]:
    """Return how many segments can stay in their node, and how many with their rank."""
    share = len(rank_homes) // len(nodes)
    by_node: dict[tuple[str, str], int] = {}
    by_rank: dict[tuple[str, str], int] = {}
    for slot, (rank, node) in enumerate(zip(rank_homes, node_homes, strict=True)):
        by_node["s", f"x{slot}"] = by_rank["s", f"x{slot}"] = 1
        for other in range(len(nodes)):
            if node in (ANYWHERE, nodes[other]):
                by_node[f"x{slot}", f"r{other}"] = 1
                if rank in (ANYWHERE, other):
                    by_rank[f"x{slot}", f"r{other}"] = 1
    for rank in range(len(nodes)):
        by_node[f"r{rank}", "t"] = by_rank[f"r{rank}", "t"] = share
    return maximum_flow(by_node), maximum_flow(by_rank)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """Return homes by rank, homes by node, and nodes of ranks; skewed, replicated, empty owners."""
    nodes = draw(st.lists(st.integers(0, 2), min_size=1, max_size=5))
    share = draw(st.integers(0, 4))
    popular = draw(st.lists(st.integers(ANYWHERE, len(nodes) - 1), min_size=1, max_size=3))
    by_rank, by_node = [], []
    for _ in range(share * len(nodes)):
        home = draw(st.sampled_from(popular))
        of_node = draw(st.booleans())
        by_node.append(ANYWHERE if home == ANYWHERE else nodes[home])
        by_rank.append(ANYWHERE if of_node else home)
    return by_rank, by_node, nodes


@settings(max_examples=300, deadline=None)
@given(batches())
def test_partition_with_minimal_movement(batch: tuple[list[int], list[int], list[int]]) -> None:
    by_rank, by_node, nodes = batch
    assigner = Assigner(torch.tensor(nodes))
    homes = torch.tensor(by_rank, dtype=torch.int64), torch.tensor(by_node, dtype=torch.int64)
    found = assigner.assign(*homes)
    share = len(by_rank) // len(nodes)
    assert found.slots.shape == (len(nodes), share)
    assert sorted(found.slots.flatten().tolist()) == list(range(len(by_rank)))
    for rank, slots in enumerate(found.slots.tolist()):
        assert slots == sorted(slots)
        assert found.ranks[slots].tolist() == [rank] * share
    far, near = assigner.moved(found, *homes).tolist()
    in_node, at_home = most_at_home(by_rank, by_node, nodes)
    assert far == len(by_rank) - in_node
    assert far + near == len(by_rank) - at_home


def naive(by_rank: list[int], by_node: list[int], nodes: list[int]) -> list[int]:
    """The passes of the docstring, slot by slot."""
    share = len(by_rank) // len(nodes)
    free, found = [share] * len(nodes), [-1] * len(by_rank)
    for slot, home in enumerate(by_rank):
        if home >= 0 and free[home]:
            found[slot], free[home] = home, free[home] - 1
    for turn in ("equally near", "exceeding", "left"):
        for slot, node in enumerate(by_node):
            near = turn != "left"
            if found[slot] >= 0 or (near and node < 0):
                continue
            if turn == "equally near" and by_rank[slot] >= 0:
                continue
            for rank in range(len(nodes)):
                if free[rank] and (not near or nodes[rank] == node):
                    found[slot], free[rank] = rank, free[rank] - 1
                    break
    return found


@settings(max_examples=200, deadline=None)
@given(batches())
def test_order_is_that_of_the_passes(batch: tuple[list[int], list[int], list[int]]) -> None:
    by_rank, by_node, nodes = batch
    homes = torch.tensor(by_rank, dtype=torch.int64), torch.tensor(by_node, dtype=torch.int64)
    assert Assigner(torch.tensor(nodes)).assign(*homes).ranks.tolist() == naive(*batch)


@given(nodes=st.lists(st.integers(0, 3), min_size=1, max_size=6), data=st.data())
def test_steps_are_assigned_as_one_by_one(nodes: list[int], data: st.DataObject) -> None:
    steps, n = data.draw(st.integers(1, 5)), len(nodes) * data.draw(st.integers(1, 6))
    home = st.integers(ANYWHERE, max(nodes))
    rows = st.lists(st.lists(home, min_size=n, max_size=n), min_size=steps, max_size=steps)
    homes, assigner = torch.tensor(data.draw(rows)), Assigner(torch.tensor(nodes))
    anywhere = torch.full((n,), ANYWHERE)
    single = [assigner.assign(anywhere, row).slots for row in homes]
    assert torch.equal(assigner.assign_steps(homes), torch.stack(single))


def test_share_that_moves_is_that_of_the_law() -> None:
    """With equal owners ``sqrt(B / 2 pi)`` of B segments a rank exceed its share."""
    ranks, share, steps = 8, 1024, 50
    generator = np.random.default_rng(0)
    assigner = Assigner(torch.arange(ranks))
    moved = 0
    for _ in range(steps):
        homes = torch.from_numpy(generator.integers(0, ranks, ranks * share))
        moved += int(assigner.moved(assigner.assign(homes, homes), homes, homes)[0])
    measured = moved / steps / ranks / share
    expected = (1 - 1 / ranks) ** 0.5 / (2 * np.pi * share) ** 0.5
    assert measured == pytest.approx(expected, rel=0.05)
    assert measured <= 0.013


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="run on a machine with a CUDA device")
def test_gpu_assigns_alike_in_a_graph() -> None:
    generator = np.random.default_rng(1)
    nodes = torch.tensor([0, 0, 1, 1, 2, 2, 2])
    on_cpu, on_gpu = Assigner(nodes), Assigner(nodes, device="cuda")
    by_rank = torch.from_numpy(generator.integers(-1, 7, 7 * 300))
    by_node = torch.where(by_rank < 0, by_rank, nodes[by_rank])
    inputs = by_rank.cuda(), by_node.cuda()
    on_gpu.assign(*inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # fails if anything waits for the GPU
        found = on_gpu.assign(*inputs)
    by_rank = torch.from_numpy(generator.integers(-1, 7, 7 * 300)) // 2
    by_node = torch.where(by_rank < 0, by_rank, nodes[by_rank])
    inputs[0].copy_(by_rank)
    inputs[1].copy_(by_node)
    graph.replay()
    assert torch.equal(found.ranks.cpu(), on_cpu.assign(by_rank, by_node).ranks)
