"""Tables over several GPUs: addresses lead to the rows on every GPU, and reads are as predicted."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gear_offline.sampling import make_sampler
from gear_offline.tables.peer_placement import (
    HBM_COST,
    HOST_COST,
    PEER,
    PEER_COST,
    place_over_peers,
    place_with,
    plan_node,
)
from gear_offline.tables.pinning import same_memory
from gear_offline.tables.placement import HBM, HOST, PlacedTable
from gear_offline.tables.table import Table
from tests.support import failing_code
from tests.test_placement import CPU, LENGTHS, FakeMemory, make_table


class SharedFake(FakeMemory):
    """A GPU of this process: handles are addresses."""

    def allocate_shared(self, nbytes: int) -> tuple[int, Any, Any]:
        address, buffer = self.allocate(nbytes)
        return address, buffer, address

    def open_shared(self, handle: Any) -> tuple[int, Any]:
        return int(handle), None


class Turns:
    """GPUs that are run one after the other, several times, until all words are known."""

    def __init__(self, index: int, count: int, known: list[list[Any]]) -> None:
        self.index, self.count, self._known, self._at = index, count, known, 0

    def gather(self, value: Any) -> list[Any]:
        if self._at == len(self._known):
            self._known.append([None] * self.count)
        words = self._known[self._at]
        self._at += 1
        words[self.index] = value
        if None in words:
            raise Waiting
        return words


class Waiting(Exception):
    """Another GPU must come first."""


def place_all(table: Table, gpus: int, place: Any = place_over_peers, **options: Any) -> Any:
    """Return the placed table of every GPU, and their memories."""
    memories = [SharedFake() for _ in range(gpus)]
    known: list[list[Any]] = []
    placed: list[PlacedTable | None] = [None] * gpus
    choices: dict[str, Any] = {"placement": "auto", "hbm_budget": None, "episode_weight": None}
    kept: dict[int, list[Any]] = {g: [] for g in range(gpus)}
    for _ in range(8):
        for gpu in range(gpus):
            memory = memories[gpu] = SharedFake()
            # The same memory each time: what was told to the others must stay true.
            made = iter(list(kept[gpu]))

            def allocate(
                nbytes: int, gpu: int = gpu, made: Any = made, memory: SharedFake = memory
            ) -> tuple[int, Any, Any]:
                found = next(made, None)
                if found is None:
                    found = SharedFake.allocate_shared(memory, nbytes)
                    kept[gpu].append(found)
                memory.allocated = [nbytes]
                return found

            memory.allocate_shared = allocate  # type: ignore[method-assign]
            try:
                placed[gpu] = place(
                    memory, Turns(gpu, gpus, known), table, device=CPU, **(choices | options)
                )
            except Waiting:
                placed[gpu] = None
        if all(p is not None for p in placed):
            return placed, memories
    raise AssertionError("the GPUs wait for each other")


@settings(max_examples=60, deadline=None)
@given(
    lengths=LENGTHS,
    gpus=st.integers(1, 4),
    budget=st.one_of(st.none(), st.integers(0, 6000)),
    weight_seed=st.one_of(st.none(), st.integers(0, 5)),
)
def test_addresses_lead_to_the_rows_on_every_gpu(
    lengths: list[int], gpus: int, budget: int | None, weight_seed: int | None
) -> None:
    table = make_table(lengths)
    weights = None
    if weight_seed is not None:
        weights = np.random.default_rng(weight_seed).integers(0, 4, len(lengths)).astype(float)
    placed, memories = place_all(table, gpus, hbm_budget=budget, episode_weight=weights)
    row_bytes = sum(s.width * s.dtype.itemsize for s in table.groups)
    for found, memory in zip(placed, memories, strict=True):
        for group, source in zip(found.groups, table.groups, strict=True):
            assert source.rows is not None
            for e, length in enumerate(lengths):
                begin = 3 + table.episodes.offsets[e]
                expected = source.rows[begin : begin + length]
                there = same_memory(int(group.addresses[e]), length * group.row_bytes)
                assert there.tobytes() == expected.tobytes()
        parts = found.hbm_bytes, found.peer_bytes, found.host_bytes
        assert sum(parts) == sum(lengths) * row_bytes
        tiers = found.groups[0].tiers
        sizes = np.array(lengths) * row_bytes
        assert parts == tuple(int(sizes[tiers == t].sum()) for t in (HBM, PEER, HOST))
        if budget is not None and budget >= 256 * len(table.groups):
            assert sum(memory.allocated) <= budget
        assert bool(memory.runtime.registered) == bool(found.host_bytes)


def cost(plan: Any, sizes: npt.NDArray[Any], weights: npt.NDArray[Any], gpus: int) -> float:
    own, peer, host = plan.shares
    return own * HBM_COST + peer * PEER_COST + host * HOST_COST  # type: ignore[no-any-return]


@given(
    count=st.integers(2, 300),
    gpus=st.integers(2, 8),
    fraction=st.floats(0.0, 2.0),
    skew=st.floats(0.0, 3.0),
    seed=st.integers(0, 99),
)
def test_plan_keeps_its_budget_and_beats_simpler_ones(
    count: int, gpus: int, fraction: float, skew: float, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    sizes = generator.integers(90, 110, count)
    weights = sizes * generator.permutation(np.arange(1, count + 1) ** -skew)
    budget = int(sizes.sum() * fraction / gpus)
    plan = plan_node(sizes, weights, budget, gpus)
    for gpu in range(gpus):
        assert sizes[plan.held_by(gpu)].sum() <= budget
    held = np.stack([plan.held_by(gpu) for gpu in range(gpus)]).sum(0)
    assert (held[plan.tiers == HBM] == gpus).all()
    assert (held[plan.tiers == PEER] == 1).all() and (held[plan.tiers == HOST] == 0).all()
    assert sum(plan.shares) == pytest.approx(1.0)
    # No worse than one kind of choice alone, but for a few episodes that did not fit any more.
    order = np.argsort(-weights / sizes, kind="stable")
    spare = (gpus + 1) * weights.max() / weights.sum() * HOST_COST
    spread_cost = ((gpus - 1) * PEER_COST + HBM_COST) / gpus
    for room, price in ((budget, HBM_COST), (budget * gpus, spread_cost)):
        reached = np.cumsum(sizes[order]) <= room
        share = weights[order][reached].sum() / weights.sum()
        assert cost(plan, sizes, weights, gpus) <= share * price + (1 - share) * HOST_COST + spare


def test_predicted_reads_are_those_of_the_law() -> None:
    lengths = np.random.default_rng(0).integers(5, 40, 200)
    table_index = make_table([int(n) for n in lengths]).episodes
    plan = plan_node(lengths * 64, lengths.astype(float), int(lengths.sum() * 64 * 0.2), 4)
    assert {HBM, PEER, HOST} >= set(plan.tiers.tolist()) >= {PEER, HOST}
    law = make_sampler("uniform_steps", table_index)
    drawn = law.sample(1, 0, 1, 200_000)[0].episodes
    tiers = plan.tiers[drawn]
    counts = [np.mean(plan.held_by(g)[drawn]) for g in range(4)]
    own, peer, host = plan.shares
    assert np.mean(counts) == pytest.approx(own, abs=0.005)
    assert max(counts) - min(counts) < 0.02, "GPUs hold like shares"
    assert np.mean(tiers == HOST) == pytest.approx(host, abs=0.005)
    assert own + peer + host == pytest.approx(1.0)


def test_auto_parts_only_what_does_not_fit() -> None:
    table = make_table([5, 9, 3])
    placed, _ = place_all(table, 3, place_with)
    assert all(p.peer_bytes == p.host_bytes == 0 for p in placed)
    assert placed[0].reason.startswith("placement auto: all ")
    row_bytes = sum(s.width * s.dtype.itemsize for s in table.groups)
    budget = 9 * row_bytes + 256 * len(table.groups)
    placed, _ = place_all(table, 3, place_with, hbm_budget=budget)
    assert all(p.peer_bytes and not p.host_bytes for p in placed)
    assert "over 3 GPUs" in placed[0].reason and "from peers" in placed[0].reason
    placed, _ = place_all(table, 3, place_with, placement="peer")  # room for copies, none asked for
    sizes = [n * row_bytes for n in (5, 9, 3)]
    assert sorted(p.hbm_bytes for p in placed) == sorted(sizes)
    assert all(p.hbm_bytes + p.peer_bytes == sum(sizes) for p in placed)
    code = failing_code(lambda: place_all(table, 3, place_with, placement="peer", hbm_budget=999))
    assert code == "HBM_SHORT"
    alone = failing_code(lambda: place_all(table, 1, place_with, placement="peer"))
    assert alone == "PLACEMENT"
