"""Datasets spread over nodes: who holds what, and together the global batch, row for row."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gear_offline.dataset.dataset import Dataset, open_dataset
from gear_offline.distributed.reads import NodeRows
from gear_offline.distributed.sharding import Assigner, shard_weights, share_shards, take_share
from gear_offline.distributed.world import World
from gear_offline.errors import GearError, InputError
from gear_offline.kernels.gather import Padding
from gear_offline.loaders.rows import choose_share
from gear_offline.loaders.segments import Ring, ShardedSegments, node_rows
from gear_offline.loaders.static_batch import BlockNames, StaticBatch
from gear_offline.sampling import make_sampler
from gear_offline.sampling.base import Stream
from gear_offline.tables.table import TableOptions, build_table
from tests.image_support import image_columns
from tests.kernels_on_cpu import gpu_gather, on_cpu
from tests.one_process import OneProcess
from tests.segment_oracle import bits, cpu_gather
from tests.support import failing_code, make_dataset

LENGTHS = [9, 3, 14, 1, 7, 5, 22, 2, 6, 11, 4, 8]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    path = make_dataset(tmp_path_factory.mktemp("shards"), LENGTHS, shard_bytes=1500).path
    found = open_dataset(Path(path))
    assert len(found.manifest.shards) >= 4
    return found


@pytest.fixture(scope="module")
def frames(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    columns = image_columns(sum(LENGTHS), (4, 5))
    folder = tmp_path_factory.mktemp("frames")
    path = make_dataset(folder, LENGTHS, columns=columns, shard_bytes=900).path
    found = open_dataset(Path(path))
    assert len(found.manifest.shards) >= 3
    return found


class Rank:
    """What a loader's `Rows` are of one rank, all ranks in one process."""

    def __init__(
        self,
        dataset: Dataset,
        nodes: tuple[int, ...],
        rank: int,
        held: dict[int, NodeRows],
        *,
        sampler: Any,
        batch_size: int,
        span: int,
        padding: Padding = "right",
        block_steps: int = 3,
        stack: int = 1,
        normalize: bool = False,
        engine: bool = False,
    ) -> None:
        owners = share_shards(shard_weights(dataset), len(set(nodes)))
        share, world = take_share(dataset, owners, nodes[rank]), World(rank=rank, nodes=nodes)
        members = [other for other, node in enumerate(nodes) if node == nodes[rank]]
        width = world.rank_batch(batch_size)
        stream = Stream(
            selection=sampler, seed=7, global_batch=batch_size, first_slot=0, rank_batch=width
        )
        self.block_steps = block_steps
        ring = Ring(
            share=share,
            steps=block_steps,
            rank_batch=width,
            context_length=span,
            history=stack - 1,
            place=members.index(rank),
        )
        table = build_table(
            dataset,
            TableOptions(context_length=span, frame_stack=stack, normalize_states=normalize),
            shards=share.shards.tolist(),
            landing_rows=ring.rows * len(members),
        )
        held[rank] = node_rows(table, share)
        self.exchange: Any = OneProcess(rank, held, ring.of(table))
        self.segments = ShardedSegments(
            stream, world, self.exchange, ring, padding, ring.first_row(table)
        )
        whole: dict[str, Any] = {
            "offsets": dataset.episodes.offsets,
            "local": share.nodes == nodes[rank],
        }
        self.take, self.release = self.segments.take, self.segments.release
        if engine:
            self.gpu = gpu_gather(
                table, rank_batch=width, context_length=span, padding=padding, **whole
            )
            self.gather: Any = self.gpu.gather
        else:
            self.gather = cpu_gather(table, span, padding, **whole).gather


def ranks_of(dataset: Dataset, nodes: tuple[int, ...], **options: Any) -> list[Any]:
    held: dict[int, NodeRows] = {}
    return [Rank(dataset, nodes, rank, held, **options) for rank in range(len(nodes))]


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_ranks_get_the_global_batch(
    dataset: Dataset, frames: Dataset, library: Any, data: st.DataObject
) -> None:
    """Histories travel with their windows; blocks may come in any order."""
    nodes = data.draw(st.sampled_from([(0, 1), (0, 0, 1, 1), (0, 1, 2), (0, 1, 1, 2), (0,)]))
    images, engine = data.draw(st.booleans()), data.draw(st.booleans())
    name = data.draw(st.sampled_from(["uniform_steps", "uniform_episodes", "d3rlpy"]))
    span = data.draw(st.integers(1, 9))
    padding: Padding = data.draw(st.sampled_from(["left", "right"]))
    source, stack = (frames, data.draw(st.integers(1, 4))) if images else (dataset, 1)
    normalize = not images and data.draw(st.booleans())
    sampler = make_sampler(name, source, context_length=span)
    batch_size = len(nodes) * data.draw(st.integers(1, 9))
    options: dict[str, Any] = {"sampler": sampler, "batch_size": batch_size, "span": span}
    options |= {"padding": padding, "stack": stack, "normalize": normalize, "engine": engine}
    whole = build_table(
        source, TableOptions(context_length=span, frame_stack=stack, normalize_states=normalize)
    )
    gather = cpu_gather(whole, span, padding)
    with on_cpu(library) if engine else nullcontext():
        ranks = ranks_of(source, nodes, **options)
        for first, steps in ((0, 3), (3, 3), (20, 1), (6, 2), (8, 2), (10, 2), (12, 2)):
            expected = gather.gather(sampler.sample(7, first, steps, batch_size))
            seen = []
            for rank in ranks:
                windows = rank.gather(*rank.take(first, steps))
                rank.release()
                slots = np.stack([rank.segments.slots_at(first + s) for s in range(steps)])
                own = expected.map(lambda t, at=slots: t[np.arange(len(at))[:, None], at])  # type: ignore[misc]
                assert bits(windows) == bits(own)
                seen.append(slots)
            assert (np.sort(np.concatenate(seen, 1)) == np.arange(batch_size)).all()
        for rank in ranks:
            rank.segments.close()


class Event:
    """A CUDA event that has come as soon as it is recorded."""

    def record(self, stream: Any) -> None:
        self.recorded = True

    def query(self) -> bool:
        return self.recorded

    def synchronize(self) -> None:
        assert self.recorded


def test_a_captured_step_reads_rows_of_other_nodes(
    dataset: Dataset, library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names and rows are there before each replay, over many turns of the rings."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    sampler = make_sampler("uniform_steps", dataset)
    options: dict[str, Any] = {"sampler": sampler, "batch_size": 10, "span": 4, "engine": True}
    gather = cpu_gather(build_table(dataset, TableOptions(context_length=4)), 4)
    with on_cpu(library):
        ranks = ranks_of(dataset, (0, 1), **options)
        batches = [
            StaticBatch(
                rank.gpu,
                padding="right",
                step=5,
                names=BlockNames(rank.segments, rank.block_steps, World()),
            )
            for rank in ranks
        ]
        for steps in (range(5, 30), range(2, 4), range(100, 110)):
            for batch in batches:
                batch.set_step(steps[0])
            for step in steps:
                expected = gather.gather(sampler.sample(7, step, 1, 10)[0])
                for batch in batches:
                    batch.prepare()
                for rank, batch in zip(ranks, batches, strict=True):
                    batch.begin()
                    slots = torch.from_numpy(rank.segments.slots_at(step))
                    assert torch.equal(batch.batch.segments, expected.segments[slots])
                    states = expected.tensors()["states"][slots]
                    assert torch.equal(batch.batch.states, states)


def test_a_broken_exchange_is_closed_and_says_nothing_more(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing raised the error again, and left connections and threads behind."""
    sampler = make_sampler("uniform_steps", dataset)
    rank, _ = ranks_of(dataset, (0, 1), sampler=sampler, batch_size=8, span=4)
    closed: list[str] = []

    def lost(self: OneProcess, step: int) -> None:
        raise GearError("RANK_LOST", "rank 1 is gone")

    monkeypatch.setattr(OneProcess, "wait", lost)
    monkeypatch.setattr(OneProcess, "close", lambda self: closed.append("closed"))
    assert failing_code(lambda: rank.take(0, 2)) == "RANK_LOST"
    rank.segments.close()
    assert closed == ["closed"]


def test_little_crosses_nodes(dataset: Dataset) -> None:
    sampler = make_sampler("uniform_steps", dataset)
    ranks = ranks_of(dataset, (0, 1), sampler=sampler, batch_size=2048, span=4)
    taken = [rank.segments.take(step, 1)[1] for step in range(20) for rank in ranks]
    owners, weights = share_shards(shard_weights(dataset), 2), shard_weights(dataset)
    share = max(weights[owners == node].sum() for node in (0, 1)) / weights.sum()
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


def test_skewed_samplers_share_their_probability(dataset: Dataset) -> None:
    """Ten times the weight on half of the episodes: little crosses nodes all the same."""
    sampler = make_sampler("return_weighted", dataset)
    weight = sampler.episode_weight
    assert weight is not None and weight.max() > 2 * weight.min()
    world = World(rank=1, nodes=(0, 1))
    share = choose_share(dataset, sampler, world, TableOptions(context_length=4), "shard")
    assert share is not None
    equal = weight[share.nodes == 1].sum() / weight.sum()
    by_steps = take_share(dataset, share_shards(shard_weights(dataset), 2), 1)
    assert abs(equal - 0.5) < abs(weight[by_steps.nodes == 1].sum() / weight.sum() - 0.5)


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
    slots, moves = Assigner(nodes, held.shape[1]).assign(held)
    share = held.shape[1] // len(nodes)
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


def test_share_that_moves_is_that_of_chance() -> None:
    """With equal owners ``sqrt(B / 2 pi)`` of B segments a rank exceed its share."""
    ranks, share, steps = 8, 1024, 50
    homes = np.random.default_rng(0).integers(0, ranks, (steps, ranks * share))
    moved = Assigner(range(ranks), ranks * share).assign(homes)[1].mean()
    assert moved == pytest.approx((1 - 1 / ranks) ** 0.5 / (2 * np.pi * share) ** 0.5, rel=0.05)
