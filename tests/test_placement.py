"""Placement: the choice of episodes, budgets, and addresses that lead to each episode's bytes."""

from __future__ import annotations

import gc
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gear_offline.errors import GearError, InputError
from gear_offline.tables import placement as module
from gear_offline.tables.pinning import Pinned, pin, same_memory
from gear_offline.tables.placement import HBM, HOST, place_in, place_table
from gear_offline.tables.placement_plan import HBM_SHARE, Placement, plan_episodes
from gear_offline.tables.table import Table, build_table
from tests.segment_oracle import MemoryTable
from tests.support import failing_code
from tests.test_table import columns

CPU = torch.device("cpu")
LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=9)


class FakeRuntime:
    """Counts registrations; the device sees host memory at its own address."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.registered: dict[int, int] = {}

    def register(self, address: int, nbytes: int) -> int:
        if not self.status:
            assert address not in self.registered
            self.registered[address] = nbytes
        return self.status

    def device_address(self, address: int) -> int:
        return address

    def unregister(self, address: int) -> None:
        del self.registered[address]

    def describe(self, status: int) -> str:
        return "cudaErrorOutOfMemory" if status == 2 else f"error {status}"


class FakeMemory:
    """Device memory that is ordinary memory, so that addresses can be followed."""

    def __init__(self, free: int = 1 << 30, status: int = 0) -> None:
        self.free = free
        self.runtime = FakeRuntime(status)
        self.allocated: list[int] = []
        self.uploads = 0

    def free_bytes(self) -> int:
        return self.free

    def allocate(self, nbytes: int) -> tuple[int, Any]:
        self.allocated.append(nbytes)
        spare = np.full(nbytes + 256, 0xAB, dtype=np.uint8)
        buffer = spare[-spare.ctypes.data % 256 :][:nbytes]
        return buffer.ctypes.data, buffer

    def upload(self, buffer: Any, begin: int, rows: npt.NDArray[Any]) -> None:
        flat = rows.reshape(-1).view(np.uint8)
        buffer[begin : begin + flat.size] = flat
        self.uploads += 1

    def pin(self, rows: npt.NDArray[Any]) -> Pinned:
        return pin(rows, self.runtime)


def make_table(lengths: list[int]) -> Table:
    steps = sum(lengths)
    data = columns(steps)
    data["infos/qpos"] = np.random.default_rng(2).normal(size=(steps, 2))
    data["frames"] = np.random.default_rng(3).integers(0, 256, (steps, 7), dtype=np.uint8)
    return build_table(
        MemoryTable(data, lengths),
        context_length=3,
        extra_columns=["infos/qpos", "frames"],
    )


def placed(table: Table, memory: FakeMemory, **options: Any) -> module.PlacedTable:
    choices: dict[str, Any] = {"placement": "auto", "hbm_budget": None, "episode_weight": None}
    return place_in(memory, table, device=CPU, **(choices | options))


@given(
    lengths=LENGTHS,
    placement=st.sampled_from(["auto", "auto", "hbm", "host"]),
    budget=st.one_of(st.none(), st.integers(0, 6000)),
    weight_seed=st.one_of(st.none(), st.integers(0, 5)),
    staging=st.sampled_from([1, 300, 64 << 20]),
)
def test_addresses_lead_to_the_rows_of_every_episode_within_the_budget(
    lengths: list[int],
    placement: Placement,
    budget: int | None,
    weight_seed: int | None,
    staging: int,
) -> None:
    table, memory = make_table(lengths), FakeMemory()
    weights = None
    if weight_seed is not None:
        weights = np.random.default_rng(weight_seed).integers(0, 4, len(lengths)).astype(float)
    before, module.STAGING_BYTES = module.STAGING_BYTES, staging
    try:
        found = placed(
            table, memory, placement=placement, hbm_budget=budget, episode_weight=weights
        )
    except GearError as error:
        assert error.code == "HBM_SHORT" and placement == "hbm" and budget is not None
        return
    finally:
        module.STAGING_BYTES = before
    if placement != "host" and budget is not None:
        assert sum(memory.allocated) <= budget
    offsets = table.episodes.offsets
    total = 0
    for group, source in zip(found.groups, table.groups, strict=True):
        assert source.rows is not None
        assert (group.group.width, group.group.dtype) == (source.width, source.dtype)
        assert group.row_bytes == source.rows.strides[0]
        assert group.addresses.dtype == np.int64 and group.tiers.dtype == np.uint8
        if group.row_bytes % 16 == 0:
            assert not (group.addresses % 16).any()
        for e, length in enumerate(lengths):
            expected = source.rows[3 + offsets[e] : 3 + offsets[e + 1]]
            bytes_there = same_memory(int(group.addresses[e]), length * group.row_bytes)
            assert bytes_there.tobytes() == expected.tobytes()
        total += sum(lengths) * group.row_bytes
        assert (group.tiers == found.groups[0].tiers).all()
    tiers = found.groups[0].tiers
    assert found.hbm_bytes + found.host_bytes == total
    assert {"hbm": (tiers == HBM).all(), "host": (tiers == HOST).all(), "auto": True}[placement]
    assert found.reason.startswith(f"placement {placement}: ") and "\n" not in found.reason
    # Only what is read from host memory is registered, and closing lets go of it.
    assert bool(memory.runtime.registered) == bool(found.host_bytes)
    found.close()
    found.close()
    assert not memory.runtime.registered


@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=8),
    seed=st.integers(0, 9),
    budget=st.integers(0, 60),
)
def test_the_choice_is_the_knapsack_rule_by_density(
    sizes: list[int], seed: int, budget: int
) -> None:
    weights = np.random.default_rng(seed).integers(0, 9, len(sizes)).astype(np.float64)
    plan = plan_episodes(np.array(sizes, dtype=np.int64), weights, budget)
    assert plan.hbm_bytes == sum(s for s, c in zip(sizes, plan.in_hbm, strict=True) if c)
    assert plan.hbm_bytes <= budget and plan.hbm_bytes + plan.host_bytes == sum(sizes)
    left = budget - plan.hbm_bytes
    assert all(c or s > left for s, c in zip(sizes, plan.in_hbm, strict=True))  # nothing more fits
    best = max(
        float(weights[list(subset)].sum())
        for count in range(len(sizes) + 1)
        for subset in combinations(range(len(sizes)), count)
        if sum(sizes[i] for i in subset) <= budget
    )
    assert float(weights[plan.in_hbm].sum()) >= best - weights.max()
    if sum(sizes) <= budget:
        assert plan.in_hbm.all() and plan.hbm_share == (1.0 if weights.sum() else 0.0)


def test_uniform_steps_take_a_prefix_and_weights_the_hottest() -> None:
    lengths = [5, 3, 9, 1, 4]
    table = make_table(lengths)
    row_bytes = sum(s.width * s.dtype.itemsize for s in table.groups)
    memory = FakeMemory()
    spare = module.ALIGNMENT_BYTES * len(table.groups)
    found = placed(table, memory, hbm_budget=8 * row_bytes + spare)
    assert found.groups[0].tiers.tolist() == [HBM, HBM, HOST, HOST, HOST]
    assert memory.uploads == len(table.groups)
    assert "2 of 5 episodes, 36% of accesses" in found.reason
    hot = placed(
        table, memory, hbm_budget=9 * row_bytes + spare, episode_weight=[0, 0, 100, 0.1, 0]
    )
    assert hot.groups[0].tiers.tolist() == [HOST, HOST, HBM, HOST, HOST]
    assert hot.hbm_bytes == 9 * row_bytes


def test_the_default_budget_leaves_memory_for_training() -> None:
    table = make_table([5, 5])
    need = sum(s.width * s.dtype.itemsize for s in table.groups) * 10
    enough = int((need + 256 * len(table.groups)) / HBM_SHARE) + 1
    whole = placed(table, FakeMemory(enough))
    assert whole.host_bytes == 0 and "60% of" in whole.reason
    assert placed(table, FakeMemory(enough - 100)).host_bytes > 0
    assert placed(table, FakeMemory(enough - 100), placement="hbm").host_bytes == 0


def test_pinned_memory_is_shared_and_outlives_the_first_user() -> None:
    table, memory = make_table([4, 4]), FakeMemory()
    one = placed(table, memory, placement="host")
    two = placed(table, memory, placement="host")
    assert len(memory.runtime.registered) == len(table.groups)
    assert (one.groups[0].addresses == two.groups[0].addresses).all()
    one.close()
    assert len(memory.runtime.registered) == len(table.groups)
    del two
    gc.collect()
    assert not memory.runtime.registered


def test_tables_in_memory_of_one_process_share_no_page() -> None:
    """Otherwise registering the second of two small tables would fail."""
    pages: set[int] = set()
    kept = [make_table([2]) for _ in range(4)]
    for group in (s for t in kept for s in t.groups):
        assert group.rows is not None
        begin, end = group.rows.ctypes.data, group.rows.ctypes.data + group.rows.nbytes
        mine = set(range(begin // 4096, -(-end // 4096)))
        assert begin % 4096 == 0 and not mine & pages
        pages |= mine


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    table = make_table([4, 4])

    def code(memory: FakeMemory | None = None, **options: Any) -> str:
        return failing_code(lambda: placed(table, memory or FakeMemory(), **options))

    assert code(placement="disk") == "PLACEMENT"
    assert code(hbm_budget=-1) == "PLACEMENT"
    for weights in ([1.0], [1.0, -1.0], [1.0, np.nan]):
        assert code(episode_weight=weights) == "EPISODE_WEIGHT"
    assert code(placement="hbm", hbm_budget=100) == "HBM_SHORT"
    assert code(FakeMemory(free=100), placement="hbm") == "HBM_SHORT"
    monkeypatch.setattr("resource.getrlimit", lambda kind: (-1, -1))
    assert code(FakeMemory(status=2), placement="host") == "HOST_PIN"
    assert code(FakeMemory(status=712), placement="host") == "HOST_PIN"
    monkeypatch.setattr("resource.getrlimit", lambda kind: (64, 64))
    assert code(FakeMemory(status=2), placement="host") == "MEMLOCK_LIMIT"


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_without_a_gpu_the_error_says_so() -> None:
    assert failing_code(lambda: place_table(make_table([3]), device="cpu", placement="host")) == (
        "CUDA_RUNTIME"
    )


def test_no_episode_is_an_input_error_not_a_crash() -> None:
    with pytest.raises(InputError):
        placed(make_table([3]), FakeMemory(), episode_weight=[])
