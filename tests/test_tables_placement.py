"""Placement: the choice of episodes, budgets, and addresses that lead to each episode's bytes."""

import ctypes
import gc
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gear_offline.batches.tables import placement as module
from gear_offline.batches.tables.placement import (
    ALIGNMENT_BYTES,
    HBM_SHARE,
    HOST,
    PlacedTable,
    deal_out,
    place_table,
)
from gear_offline.batches.tables.table import Table
from gear_offline.data.dataset.schema import EpisodeIndex
from gear_offline.errors import GearError
from tests.placement_support import FakeMemory, make_table, place_all
from tests.support import failing_code, one_error

lengths_of = st.lists(st.integers(1, 9), min_size=1, max_size=9)
budgets = st.one_of(st.none(), st.integers(0, 6000))
weight_seeds = st.one_of(st.none(), st.integers(0, 5))


def weights_of(seed: int | None, lengths: list[int]) -> npt.NDArray[np.float64] | None:
    if seed is None:
        return None
    return np.random.default_rng(seed).integers(0, 4, len(lengths)).astype(float)


def assert_addresses_lead_to_the_rows(result: PlacedTable, table: Table) -> None:
    offsets, margin = table.episodes.offsets, table.margin
    for addressed, source in zip(result.groups, table.groups, strict=True):
        assert (addressed.group.width, addressed.group.dtype) == (source.width, source.dtype)
        if source.row_bytes % 16 == 0:
            assert not (addressed.addresses % 16).any()
        for episode, length in enumerate(table.episodes.lengths.tolist()):
            expected = source.rows[margin + offsets[episode] : margin + offsets[episode + 1]]
            address = int(addressed.addresses[episode])
            assert ctypes.string_at(address, length * source.row_bytes) == expected.tobytes()


@given(
    lengths=lengths_of,
    placement=st.sampled_from(["auto", "auto", "hbm", "host"]),
    budget=budgets,
    weight_seed=weight_seeds,
    staging=st.sampled_from([1, 300, 64 << 20]),
)
def test_one_gpu_reads_every_episode_within_its_budget(
    lengths: list[int], placement: Any, budget: int | None, weight_seed: int | None, staging: int
) -> None:
    table, memory = make_table(lengths), FakeMemory()
    weight = weights_of(weight_seed, lengths)
    options: dict[str, Any] = {"hbm_budget": budget, "episode_weight": weight}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "STAGING_BYTES", staging)
        try:
            result = place_table(table, memory, placement=placement, **options)
        except GearError as error:
            assert error.code == "MEMORY" and placement == "hbm" and budget is not None
            return
    if placement != "host" and budget is not None:
        assert memory.allocated <= budget
    assert_addresses_lead_to_the_rows(result, table)
    assert placement == "auto" or (result.owners == (HOST if placement == "host" else 0)).all()
    assert result.reason.startswith(f"placement {placement}: ") and "\n" not in result.reason
    # Only what is read from host memory is registered and kept, and let go of with the table.
    assert bool(memory.registered) == result.reads_host
    assert all(bool(g.group.rows.size) == result.reads_host for g in result.groups)
    del result
    assert not memory.registered and memory.waits == 1


@given(lengths=lengths_of, first=st.integers(1, 9), budget=budgets)
def test_a_table_that_has_grown_uploads_only_what_is_new(
    lengths: list[int], first: int, budget: int | None
) -> None:
    table, memory = make_table(lengths), FakeMemory()
    steps = sum(lengths[:first])
    rows = [np.concatenate([g.rows[: steps + table.margin], 0 * g.rows[: table.margin]])
            for g in table.groups]  # fmt: skip
    smaller = Table(
        episodes=EpisodeIndex(table.episodes.lengths[:first]),
        margin=table.margin,
        groups=tuple(replace(g, rows=own) for g, own in zip(table.groups, rows, strict=True)),
    )
    before = place_table(smaller, memory)
    there = memory.allocated
    result = place_table(table, memory, hbm_budget=budget, before=before)
    assert_addresses_lead_to_the_rows(result, table)
    new = sum(lengths[first:]) * table.row_bytes
    if budget is None:
        assert memory.allocated - there <= new + ALIGNMENT_BYTES * len(table.groups)
    del before
    assert_addresses_lead_to_the_rows(result, table)


@settings(max_examples=40)
@given(
    lengths=lengths_of,
    nodes=st.sampled_from([[0, 0], [0, 0, 0, 0], [0, 0, 1, 1], [0, 1], [0, 0, 1]]),
    budget=budgets,
    weight_seed=weight_seeds,
)
def test_every_gpu_of_a_node_reads_every_episode(
    lengths: list[int], nodes: list[int], budget: int | None, weight_seed: int | None
) -> None:
    table, memories = make_table(lengths), [FakeMemory() for _ in nodes]
    options = {"hbm_budget": budget, "episode_weight": weights_of(weight_seed, lengths)}
    results = place_all(table, memories, nodes, **options)
    for result, memory in zip(results, memories, strict=True):
        assert isinstance(result, PlacedTable), result
        assert_addresses_lead_to_the_rows(result, table)
        if budget is not None and budget >= ALIGNMENT_BYTES * len(table.groups):
            assert memory.allocated <= budget


def test_nodes_may_decide_differently() -> None:
    """Memory of one node holds all, that of the other does not: no rank waits for a call that
    others do not make."""
    table = make_table([50, 90, 30])
    need = table.row_bytes * 170
    memories = [FakeMemory(free) for free in (need, need, 1 << 30, 1 << 30)]
    results = place_all(table, memories, [0, 0, 1, 1])
    tight, roomy = results[:2], results[2:]
    assert all(isinstance(r, PlacedTable) and {0, 1} <= set(r.owners) for r in tight)
    assert all(isinstance(r, PlacedTable) and r.hbm_bytes == need for r in roomy)


def test_a_gpu_that_fails_is_told_to_all_and_hangs_nobody() -> None:
    table = make_table([5, 9, 3])
    memories = [FakeMemory(), FakeMemory(refuse="malloc"), FakeMemory(), FakeMemory()]
    results = place_all(table, memories, [0, 0, 1, 1], placement="peer")
    codes = [result.code if isinstance(result, GearError) else "" for result in results]
    assert codes == ["RANK_FAILED", "MEMORY", "RANK_FAILED", "RANK_FAILED"]
    unlinked = [FakeMemory(refuse="ipcOpenMemHandle") for _ in range(2)]
    results = place_all(table, unlinked, [0, 0], placement="peer")
    assert [r.code for r in results if isinstance(r, GearError)] == ["DEVICE", "DEVICE"]


@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=8),
    seed=st.integers(0, 9),
    budget=st.integers(0, 60),
    gpus=st.integers(1, 3),
)
def test_the_knapsack_rule_by_density(sizes: list[int], seed: int, budget: int, gpus: int) -> None:
    weights = np.random.default_rng(seed).integers(0, 9, len(sizes)).astype(np.float64)
    owners = deal_out(np.array(sizes), weights, budget, gpus)
    taken = np.bincount(owners + 1, sizes, gpus + 1)[1:]
    assert (taken <= budget).all()
    if gpus > 1:
        return
    assert all(o == 0 or s > budget - taken[0] for s, o in zip(sizes, owners, strict=True))
    best = max(
        float(weights[list(subset)].sum())
        for count in range(len(sizes) + 1)
        for subset in combinations(range(len(sizes)), count)
        if sum(sizes[i] for i in subset) <= budget
    )
    assert float(weights[owners == 0].sum()) >= best - weights.max()


def test_the_default_budget_leaves_memory_for_training() -> None:
    table = make_table([5, 5])
    enough = int((table.row_bytes * 10 + 256 * len(table.groups)) / HBM_SHARE) + 1
    assert not place_table(table, FakeMemory(enough)).reads_host
    assert place_table(table, FakeMemory(enough - 100)).reads_host
    assert not place_table(table, FakeMemory(enough - 100), placement="hbm").reads_host


def test_auto_parts_only_what_does_not_fit_and_peer_copies_nothing() -> None:
    table = make_table([5, 9, 3])
    sizes = [n * table.row_bytes for n in (5, 9, 3)]
    for result in place_all(table, [FakeMemory() for _ in range(3)], [0, 0, 0]):
        assert isinstance(result, PlacedTable) and result.hbm_bytes == sum(sizes)
    budget = 9 * table.row_bytes + 256 * len(table.groups)
    memories = [FakeMemory() for _ in range(3)]
    for result in place_all(table, memories, [0, 0, 0], hbm_budget=budget):
        assert isinstance(result, PlacedTable) and set(result.owners) == {0, 1, 2}
        assert "over 3 GPUs" in result.reason
    memories = [FakeMemory() for _ in range(3)]
    results = place_all(table, memories, [0, 0, 0], placement="peer")  # there is room for copies
    held = [result.hbm_bytes for result in results if isinstance(result, PlacedTable)]
    assert sorted(held) == sorted(sizes)


def test_pinned_memory_is_shared_and_outlives_the_first_user() -> None:
    table, memory = make_table([4, 4]), FakeMemory()
    one = place_table(table, memory, placement="host")
    two = place_table(table, memory, placement="host")
    assert len(memory.registered) == len(table.groups)
    assert (one.groups[0].addresses == two.groups[0].addresses).all()
    del one
    gc.collect()
    assert len(memory.registered) == len(table.groups)
    del two
    gc.collect()
    assert not memory.registered


def test_tables_in_memory_of_one_process_share_no_page() -> None:
    """Otherwise registering the second of two small tables would fail."""
    pages: set[int] = set()
    kept = [make_table([2]) for _ in range(4)]
    for group in (group for table in kept for group in table.groups):
        begin, end = group.rows.ctypes.data, group.rows.ctypes.data + group.rows.nbytes
        own = set(range(begin // 4096, -(-end // 4096)))
        assert begin % 4096 == 0 and not own & pages
        pages |= own


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    table = make_table([4, 4])

    def code(memory: FakeMemory | None = None, **options: Any) -> str:
        return failing_code(lambda: place_table(table, memory or FakeMemory(), **options))

    assert code(placement="peer") == "LOADER_OPTION"
    assert code(placement="hbm", hbm_budget=100) == "MEMORY"
    assert code(FakeMemory(free=100), placement="hbm") == "MEMORY"
    monkeypatch.setattr("resource.getrlimit", lambda kind: (64, 64))
    with one_error("MEMORY", "the limit of this process is 64 B"):
        place_table(table, FakeMemory(refuse="hostRegister"), placement="host")
    codes = {
        result.code if isinstance(result, GearError) else ""
        for result in place_all(table, [FakeMemory()] * 3, [0, 0, 1], placement="peer")
    }
    assert codes == {"LOADER_OPTION"}, "every node needs several GPUs: all ranks hear of it"
