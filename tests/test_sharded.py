"""Datasets spread over nodes: who holds what, and together one stream, whatever the world is."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gear_offline.batches.sampling import make_sampler
from gear_offline.data.dataset.dataset import Dataset
from gear_offline.distributed.sharding import Assigner, share_shards
from gear_offline.distributed.world import World
from gear_offline.errors import GearError, InputError
from gear_offline.loaders import rows
from gear_offline.loaders.feedback import LossFeedback
from gear_offline.loaders.loader import GearLoader
from gear_offline.loaders.static_batch import SegmentWriter, StaticBatch
from tests.image_support import image_columns
from tests.kernels_on_cpu import gpu_gather, on_cpu
from tests.one_process import OneProcess, global_digest, open_ranks, row_digests
from tests.support import Patch, failing_code, make_dataset

LENGTHS = [9, 3, 14, 1, 7, 5, 22, 2, 6, 11, 4, 8, 13, 10, 3, 6]
BATCH = 24
OPTIONS: dict[str, Any] = {"batch_size": BATCH, "context_length": 6, "seed": 5, "device": "cpu"}
# Nodes of the ranks: each alone, pairs, and unequal ones.
PLACES = {
    "replicate": [tuple(range(size)) for size in (1, 2, 3, 4, 8)],
    "shard": [
        *((0, 1), (0, 1, 1), (0, 1, 2), (0, 0, 1, 1), (0, 1, 2, 3), (0, 0, 0, 1, 1, 1, 2, 2)),
        tuple(range(8)),
    ],
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_dataset(tmp_path_factory.mktemp("shards"), LENGTHS, shard_bytes=900)


@pytest.fixture(scope="module")
def frames(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    columns, folder = image_columns(sum(LENGTHS), (4, 5)), tmp_path_factory.mktemp("frames")
    return make_dataset(folder, LENGTHS, columns=columns, shard_bytes=300)


@pytest.fixture(scope="module", autouse=True)
def short_blocks() -> Iterator[None]:
    """Four steps are made at a time, so that worlds change within blocks and between them."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("CPU_LIMITS", "GPU_LIMITS"):
            patch.setattr(rows, name, getattr(rows, name)._replace(segments=4 * BATCH))
        yield


@settings(max_examples=30)
@given(
    data=st.data(),
    images=st.booleans(),
    selection=st.sampled_from(["uniform_steps", "shuffled_epochs", "uniform_episodes", "d3rlpy"]),
    span=st.integers(1, 9),
    padding=st.sampled_from(["left", "right"]),
    stack=st.integers(1, 4),
    normalize=st.booleans(),
)
def test_the_stream_is_that_of_one_process(
    dataset: Dataset, frames: Dataset, data: st.DataObject, images: bool, stack: int,
    normalize: bool, span: int, **more: Any,
) -> None:  # fmt: skip
    """Worlds change after any step; each goes on from the state that the last one left."""
    source = frames if images else dataset
    assert len(source.manifest.shards) >= 8, "a shard for each of eight nodes"
    options = (
        OPTIONS | more | {"context_length": span, "extra_columns": () if images else ("terminals",)}
    )
    options |= {"frame_stack": stack} if images else {"normalize_states": normalize}
    if options["selection"] == "d3rlpy":
        options["padding"] = "left"  # as it cuts windows
    alone, state = GearLoader(source, **options), dict[str, Any]()
    for _ in range(data.draw(st.integers(1, 3))):
        sharding = data.draw(st.sampled_from(sorted(PLACES)))
        nodes = data.draw(st.sampled_from(PLACES[sharding]))
        with ExitStack() as opened:
            ranks = open_ranks(source, nodes, sharding, **options)
            for loader in ranks:
                opened.callback(loader.close)
                if state:
                    loader.load_state_dict(state)
            for skipped in data.draw(st.lists(st.sampled_from([0, 0, 0, 1, 20]), min_size=1)):
                for each in (alone, *ranks):
                    each.skip(skipped)
                slots = [loader.slots_at(loader.step) for loader in ranks]
                found = global_digest(slots, [row_digests(next(loader)) for loader in ranks])
                assert found == global_digest([range(BATCH)], [row_digests(next(alone))])
            state = alone.state_dict()
            assert all(loader.state_dict() == state for loader in ranks)


def test_a_strategy_that_learns_is_one_for_all_worlds(dataset: Dataset, monkeypatch: Patch) -> None:
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


@pytest.mark.parametrize("in_stream", [False, True])
def test_a_captured_step_reads_rows_of_other_nodes(
    dataset: Dataset, kernels: Any, monkeypatch: Patch, in_stream: bool
) -> None:
    """Segments and rows are there before each replay, over many turns of the rings."""
    monkeypatch.setattr(torch.cuda, "Event", Mock)  # which has come whenever it is asked
    monkeypatch.setattr(OneProcess, "in_stream", in_stream)
    alone, batches = GearLoader(dataset, **OPTIONS), list[tuple[GearLoader, StaticBatch]]()
    with on_cpu(kernels):
        for rank in open_ranks(dataset, (0, 1), "shard", **OPTIONS):
            segments: Any = rank.rows.segments
            engine = gpu_gather(
                rank.rows.memory,
                rank_batch=rank.rank_batch,
                context_length=rank.context_length,
                offsets=dataset.episodes.offsets,
                local=segments.ring.share.nodes == rank.world.node,
            )
            if in_stream:  # rows land in memory of their own
                engine.land_in([torch.from_numpy(rows) for rows in segments._exchange.landing])
            writer = SegmentWriter(segments, rank.rows.block_steps, World())
            batches.append((rank, StaticBatch(engine, padding="right", step=5, writer=writer)))
        for steps in (range(5, 30), range(2, 4), range(100, 110)):
            for _, batch in batches:
                batch.set_step(steps[0])
            for step in steps:
                expected = alone.batch_at(step)
                for _, batch in batches:
                    batch.prepare()
                for rank, batch in batches:
                    batch.begin()
                    slots = torch.from_numpy(rank.slots_at(step))
                    assert torch.equal(batch.batch.segments, expected.segments[slots])
                    assert torch.equal(batch.batch.states, expected.states[slots])


def test_a_broken_exchange_is_closed_and_says_nothing_more(
    dataset: Dataset, monkeypatch: Patch
) -> None:
    """Closing raised the error again, and left connections and threads behind."""
    rank, _ = open_ranks(dataset, (0, 1), "shard", **OPTIONS)
    closed: list[str] = []

    def lost(self: OneProcess, step: int) -> None:
        raise GearError("RANK_LOST", "rank 1 is gone")

    monkeypatch.setattr(OneProcess, "wait", lost)
    monkeypatch.setattr(OneProcess, "close", lambda self: closed.append("closed"))
    assert failing_code(lambda: next(rank)) == "RANK_LOST"
    rank.close()
    assert closed == ["closed"]


@pytest.mark.parametrize("selection", ["uniform_steps", "return_weighted"])
def test_little_crosses_nodes(dataset: Dataset, selection: str) -> None:
    """Also where half of the episodes have ten times the weight of the others."""
    options = OPTIONS | {"batch_size": 2048, "selection": selection}
    ranks: list[Any] = open_ranks(dataset, (0, 1), "shard", **options)
    taken = [rank.rows.segments.draw(step, 1).landing for step in range(20) for rank in ranks]
    weight = make_sampler(selection, dataset).episode_weight
    assert weight is not None
    nodes = ranks[0].rows.segments.ring.share.nodes
    share = max(weight[nodes == node].sum() for node in (0, 1)) / weight.sum()
    counts = [shard.episodes for shard in dataset.manifest.shards]
    heaviest = max(part.sum() for part in np.split(weight, np.cumsum(counts)[:-1])) / weight.sum()
    assert share <= max(0.6, heaviest + 1e-9), "nodes have about equal shares of the draws"
    far = np.mean(np.concatenate(taken) >= 0)
    assert far < share - 0.5 + 0.02, "what exceeds an equal share, and some chance"


@given(weights=st.lists(st.integers(0, 100), min_size=1, max_size=30), nodes=st.integers(1, 6))
def test_shards_are_shared_equally(weights: list[int], nodes: int) -> None:
    if len(weights) < nodes:
        with pytest.raises(InputError, match="cannot be shared"):
            share_shards(weights, nodes)
        return
    owners = share_shards(weights, nodes)
    sums = [sum(w for w, o in zip(weights, owners, strict=True) if o == n) for n in range(nodes)]
    assert set(owners.tolist()) == set(range(nodes)), "nobody goes without"
    assert owners.tolist() == share_shards(weights, nodes).tolist()
    best = max(max(weights), sum(weights) / nodes)
    assert max(sums) <= (4 / 3) * best + max(weights) / 3 + 1e-6


def test_what_is_never_drawn_is_shared_by_size() -> None:
    weights, sizes = [8, 0, 0, 4, 0, 4, 0], [10, 30, 10, 10, 10, 10, 10]
    owners = share_shards(weights, 2, sizes=sizes)
    drawn = [sum(w for w, o in zip(weights, owners, strict=True) if o == n) for n in range(2)]
    held = [sum(s for s, o in zip(sizes, owners, strict=True) if o == n) for n in range(2)]
    assert drawn == [8, 8] and max(held) - min(held) <= 30
    assert set(share_shards([5, 0, 0], 3, sizes=[1, 1, 1]).tolist()) == {0, 1, 2}


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


@settings(max_examples=300)
@given(batches())
def test_equal_shares_with_the_least_movement(batch: tuple[list[int], list[list[int]]]) -> None:
    nodes, homes = batch
    held = np.array(homes, np.int64).reshape(len(homes), -1)
    assigner, share = Assigner(nodes, held.shape[1]), held.shape[1] // len(nodes)
    slots, moves = (of_places[:, assigner.places] for of_places in assigner.assign(held))
    assert slots.shape == moves.shape == (len(homes), len(nodes), share)
    for row, ranks, far in zip(held, slots, moves, strict=True):
        assert sorted(ranks.flatten().tolist()) == list(range(len(row)))
        assert (far == (row[ranks] != np.array(nodes)[:, None])).all()
        room = {node: share * nodes.count(node) for node in nodes}
        excess = sum(max(0, int((row == node).sum()) - room[node]) for node in room)
        assert far.sum() == excess, "only what exceeds a node's share moves"
        for node in room:  # of a node's ranks none reads more than one segment more than another
            reads = [int(far[rank].sum()) for rank, of in enumerate(nodes) if of == node]
            assert max(reads) - min(reads) <= 1
