"""Rows of other nodes read in the memory of their GPUs: addresses, and who may not."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gear_offline.batches.sampling import make_sampler
from gear_offline.batches.tables.placement import PlacedTable, Spread
from gear_offline.batches.tables.table import Table, TableOptions, build_table
from gear_offline.data.dataset.dataset import Dataset
from gear_offline.distributed.sharding import (
    shard_episodes,
    shard_weights,
    share_shards,
)
from gear_offline.distributed.world import World
from gear_offline.errors import GearError
from gear_offline.kernels.gather_gpu import GpuGather, StaticFill
from gear_offline.loaders.loader import GearLoader
from gear_offline.loaders.rows import RowOpener
from tests.kernels_on_cpu import on_cpu
from tests.one_process import private_table
from tests.placement_support import FakeMemory, place_all
from tests.support import make_dataset, one_error

LENGTHS = [9, 3, 14, 1, 7, 5, 22, 2, 6, 11, 4, 8, 13, 10, 3, 6]
SPAN, SEED = 6, 5
WORLDS = [(0, 1), (0, 1, 1), (0, 1, 0, 1), (0, 1, 2, 3), (0, 0, 0, 1, 1, 1, 2, 2)]
STRATEGIES = ["uniform_steps", "shuffled_epochs", "return_weighted"]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_dataset(tmp_path_factory.mktemp("shards"), LENGTHS, shard_bytes=900)


def parts(dataset: Dataset, nodes: tuple[int, ...], skew: bool) -> tuple[list[Table], Spread]:
    """Return the table of each rank, and where every episode is; with `skew` most on node 0."""
    owners = share_shards(shard_weights(dataset), max(nodes) + 1)
    if skew:
        owners[max(nodes) + 1 :] = 0
    options = TableOptions(context_length=SPAN, extra_columns=("terminals",))
    tables = [
        build_table(dataset, options, shards=np.flatnonzero(owners == node).tolist())
        for node in nodes
    ]
    spread = np.repeat(owners, shard_episodes(dataset))
    return tables, Spread(lengths=dataset.episodes.lengths, nodes=spread)


@settings(max_examples=12)
@given(
    nodes=st.sampled_from(WORLDS),
    batch=st.sampled_from([1, 3, 17, 40]),
    selection=st.sampled_from(STRATEGIES),
    skew=st.booleans(),
    step=st.integers(0, 1000),
)
def test_each_rank_draws_its_slots_and_reads_them_where_they_are(
    dataset: Dataset, kernels: Any, nodes: tuple[int, ...], batch: int, selection: str,
    skew: bool, step: int,
) -> None:  # fmt: skip
    """The rows and the segments are those of one process."""
    count, steps = batch * len(nodes), 3
    tables, spread = parts(dataset, nodes, skew)
    given = {"context_length": SPAN, "selection": selection, "seed": SEED, "device": "cpu"}
    alone = GearLoader(dataset, count, world=None, extra_columns=("terminals",), **given)  # type: ignore[arg-type]
    windows = alone.rows.windows(step, steps, ahead=False)
    expected = windows.tensors() | {"segments": windows.segments, "mask": windows.attention_mask}
    memories = [FakeMemory() for _ in nodes]
    placed = place_all(tables, memories, list(nodes), spread=spread, landing=True)
    for rank, result in enumerate(placed):
        assert isinstance(result, PlacedTable) and result.no_peers is None, result
        assert not result.reads_host and not memories[rank].registered, "nothing is pinned"
        with on_cpu(kernels) as device:
            engine = GpuGather(
                result.groups,
                dataset.episodes.offsets,
                device=device,
                context_length=SPAN,
                rank_batch=batch,
                draw=make_sampler(selection, dataset, context_length=SPAN).gpu,
                seed=SEED,
                first_slot=rank * batch,
                global_batch=count,
            )
            found = [engine.draw_and_gather(step, steps)]
            fill = StaticFill(engine)
            fill.set_step(step)
            for _ in range(steps):
                fill.enqueue()
                found.append(fill.windows.map(lambda tensor: tensor[None].clone()))
        blocks: list[Any] = [slice(None), *([n] for n in range(steps))]
        for block, mine in zip(blocks, found, strict=True):
            fields = mine.tensors() | {"segments": mine.segments, "mask": mine.attention_mask}
            for name, values in fields.items():
                mine_expected = expected[name][block, rank * batch : (rank + 1) * batch]
                assert torch.equal(values, mine_expected), name


@pytest.mark.parametrize("refuse", ["ipcOpenMemHandle", "room"])
def test_a_rank_that_cannot_is_a_reason_for_all(dataset: Dataset, refuse: str) -> None:
    """Each then reads its node's rows alone, and has landing rows for an exchange."""
    nodes = (0, 1, 1)
    tables, spread = parts(dataset, nodes, skew=False)
    memories = [FakeMemory(), FakeMemory(), FakeMemory()]
    if refuse == "room":
        memories[1] = FakeMemory(free=3000)
    else:
        memories[1] = FakeMemory(refuse=refuse)
    placed = place_all(tables, memories, list(nodes), spread=spread, landing=True)
    reasons = set()
    for result, table in zip(placed, tables, strict=True):
        assert isinstance(result, PlacedTable), result
        reasons.add(result.no_peers)
        assert len(result.groups[0].addresses) == table.episodes.episodes
        assert all(group.row_zero for group in result.groups)
    assert len(reasons) == 1 and "rank 1" in str(reasons.pop())


def test_a_gpu_without_room_for_what_is_shared_hangs_nobody(dataset: Dataset) -> None:
    tables, spread = parts(dataset, (0, 1), skew=False)
    memories = [FakeMemory(), FakeMemory(refuse="malloc")]
    results = place_all(tables, memories, [0, 1], spread=spread, landing=True)
    assert [each.code for each in results if isinstance(each, GearError)] == [
        "RANK_FAILED",
        "MEMORY",
    ]


@pytest.mark.parametrize(
    ("hosts", "code", "said"),
    [
        (["a 1", "a 2"], "EXCHANGE", "the ranks are on 2 hosts"),
        (["a 1", None], "EXCHANGE", "rank 1 has no GPU that gathers"),
        (["a 1", "a 1"], "EXCHANGE", "the CPU gathers"),
        ("grows", "EXCHANGE", "data that grow"),
        ("one fails", "RANK_FAILED", "rank 1 does not read"),
    ],
)
def test_ranks_take_the_road_together(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch, hosts: Any, code: str, said: str
) -> None:
    def gather(world: World, value: Any) -> list[Any]:
        if value is None:  # the host, without a GPU
            return hosts if isinstance(hosts, list) else ["a 1", "a 1"]
        if hosts == "one fails" and value == "the CPU gathers":
            return [None, value]
        return [value] * world.size

    monkeypatch.setattr(World, "gather", gather)
    monkeypatch.setattr(RowOpener, "_build", private_table)
    data = replace(dataset, admissions=1, frozen=True) if hosts == "grows" else dataset
    options: dict[str, Any] = {"context_length": SPAN, "device": "cpu", "exchange": "peer"}
    for rank in (0, 1):
        world = World(rank=rank, nodes=(0, 1))
        with one_error(code, said):
            GearLoader(data, 4, world=world, sharding="shard", **options)
