"""One stream of global batches for every world size, whenever the world size changes."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gear_offline.distributed.exchange
from gear_offline.dataset.dataset import Dataset, open_dataset
from gear_offline.distributed.reads import NodeRows
from gear_offline.distributed.world import World
from gear_offline.loaders import rows
from gear_offline.loaders.feedback import LossFeedback
from gear_offline.loaders.loader import GearLoader
from gear_offline.loaders.rows import RowOpener
from gear_offline.tables.table import build_table
from tests.one_process import OneProcess, global_digest, row_digests
from tests.support import make_dataset

LENGTHS = [9, 3, 14, 1, 7, 5, 22, 2, 6, 11, 4, 8, 13, 10, 3, 6]
BATCH, STEPS, SEED = 24, 12, 5
SIZES = (1, 2, 3, 4, 8)
OPTIONS: dict[str, Any] = {
    "batch_size": BATCH,
    "context_length": 6,
    "seed": SEED,
    "device": "cpu",
    "normalize_states": True,
    "extra_columns": ("terminals",),
}
# Nodes of the ranks: each alone, pairs, and unequal ones.
PLACES = {
    "replicate": [tuple(range(size)) for size in SIZES],
    "shard": [(0, 1), (0, 1, 1), (0, 1, 2), (0, 0, 1, 1), (0, 1, 2, 3), (0, 0, 0, 1, 1, 1, 2, 2)],
}
PLACES["shard"].append(tuple(range(8)))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    path = make_dataset(tmp_path_factory.mktemp("elastic"), LENGTHS, shard_bytes=900).path
    found = open_dataset(Path(path))
    assert len(found.manifest.shards) >= 8, "a shard for each of eight nodes"
    return found


@pytest.fixture(scope="module", autouse=True)
def short_blocks() -> Iterator[None]:
    """Four steps are made at a time, so that worlds change within blocks and between them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "BLOCK_SEGMENTS", 4 * BATCH)
        yield


@pytest.fixture(scope="module", params=["uniform_steps", "shuffled_epochs"])
def strategy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def expected(dataset: Dataset, strategy: str) -> list[str]:
    """The digest of each step from one process."""
    loader = GearLoader(dataset, selection=strategy, **OPTIONS)
    found = [global_digest([range(BATCH)], [row_digests(next(loader))]) for _ in range(STEPS)]
    assert len(set(found)) == STEPS
    return found


def open_ranks(
    dataset: Dataset, nodes: tuple[int, ...], sharding: str, **options: Any
) -> list[GearLoader]:
    """Return the loader of every rank of a world."""
    held_by: dict[int, NodeRows] = {}
    loaders = []
    for rank in range(len(nodes)):

        def open_exchange(
            node_rows: NodeRows, landing: Any, world: World, *, rank: int = rank, **_: Any
        ) -> OneProcess:
            held_by[rank] = node_rows
            return OneProcess(rank, held_by, landing)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gear_offline.distributed.exchange, "open_exchange", open_exchange)
            # Ranks of one node would share a table in memory, by words between processes.
            patch.setattr(World, "gather", lambda self, value: [value] * self.size)
            patch.setattr(RowOpener, "_build", private_table)
            world = World(rank=rank, nodes=nodes)
            loaders.append(GearLoader(dataset, world=world, sharding=sharding, **options))  # type: ignore[arg-type]
    return loaders


def private_table(opener: RowOpener, ring: Any) -> Any:
    given: dict[str, Any] = {}
    if ring is not None:
        given["shards"] = ring.share.shards.tolist()
        given["landing_rows"] = ring.rows * len(opener.world.members)
    return build_table(opener.data, opener.options, **given)


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_the_stream_is_that_of_one_process(
    dataset: Dataset, strategy: str, expected: list[str], data: st.DataObject
) -> None:
    """World sizes change after any step; each goes on from the state that the last one left."""
    changes = data.draw(st.lists(st.integers(1, STEPS - 1), max_size=3, unique=True).map(sorted))
    state: dict[str, Any] | None = None
    found: list[str] = []
    for last in [*changes, STEPS]:
        sharding = data.draw(st.sampled_from(sorted(PLACES)))
        nodes = data.draw(st.sampled_from(PLACES[sharding]))
        with ExitStack() as stack:
            ranks = open_ranks(dataset, nodes, sharding, selection=strategy, **OPTIONS)
            for loader in ranks:
                stack.callback(loader.close)
                if state is not None:
                    loader.load_state_dict(state)
            while len(found) < last:
                slots = [loader.slots_at(loader.step) for loader in ranks]
                batches = [row_digests(next(loader)) for loader in ranks]
                found.append(global_digest(slots, batches))
            states = [loader.state_dict() for loader in ranks]
            assert all(other == states[0] for other in states)
            state = states[0]
    assert found == expected


def test_a_strategy_that_learns_is_one_for_all_worlds(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses of all ranks reach every rank; their weights are those of the slots they have."""
    options = OPTIONS | {"selection": "prioritized"}
    alone = GearLoader(dataset, **options)
    ranks = open_ranks(dataset, (0, 1, 1), "shard", **options)
    uniform = []
    for step in range(6):
        slots = [loader.slots_at(step) for loader in ranks]
        expected, batches = next(alone), [next(loader) for loader in ranks]
        found = global_digest(slots, [row_digests(batch) for batch in batches])
        assert found == global_digest([range(BATCH)], [row_digests(expected)])
        weights = LossFeedback(alone).importance()
        for mine, loader in zip(slots, ranks, strict=True):
            assert torch.equal(LossFeedback(loader).importance(), weights[torch.from_numpy(mine)])
        uniform.append(bool((weights == 1).all()))
        told = [[batch.segments.sum(1).float() % 7 for batch in batches]]
        told.append([batch.segments for batch in batches])
        monkeypatch.setattr(World, "gather_tensor", lambda _, own, told=told: told[own.dim() - 1])
        for loader, batch, losses in zip(ranks, batches, told[0], strict=True):
            LossFeedback(loader).update(batch, losses)
        assert alone.loss_sampler is not None
        losses = expected.segments.sum(1).float() % 7
        alone.loss_sampler.update(expected.segments.numpy(), losses.numpy())
    assert uniform == [True] + [False] * 5, "priorities have an effect"
    states = [loader.state_dict() for loader in (alone, *ranks)]
    assert all(state == states[0] for state in states)
    for loader in ranks:
        loader.close()
