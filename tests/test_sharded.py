"""Datasets spread over nodes: together the ranks get the global batch, row for row."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gear_offline.dataset.dataset import Dataset, open_dataset
from gear_offline.distributed.reads import Held
from gear_offline.distributed.sharding import shard_weights, share_shards, take_share
from gear_offline.distributed.world import World
from gear_offline.errors import GearError, InputError
from gear_offline.kernels.gather import CpuGather, Padding, Windows
from gear_offline.loaders.sharded import ShardedBatches, held_rows, landing_memory
from gear_offline.loaders.spread_choice import choose_share
from gear_offline.sampling import Segments, make_sampler
from gear_offline.tables.table import build_table
from tests.image_support import image_columns
from tests.one_process import OneProcess
from tests.segment_oracle import cpu_gather
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


def spread(dataset: Dataset, nodes: tuple[int, ...], **options: Any) -> list[ShardedBatches]:
    """Return the batches of every rank."""
    owners = share_shards(shard_weights(dataset), len(set(nodes)))
    parts: list[Any] = []
    held: dict[int, Held] = {}
    table_options = {k: options.pop(k) for k in ("normalize_states", "frame_stack") if k in options}
    for rank, node in enumerate(nodes):
        share = take_share(dataset, owners, node)
        table = build_table(
            dataset,
            shards=share.shards.tolist(),
            context_length=options["context_length"],
            **table_options,
        )
        parts.append((rank, share, table))
        held[rank] = held_rows(table, share)
    found = []
    for rank, share, table in parts:
        gather = cpu_gather(table, options["context_length"], options["padding"])
        segments = 3 * options["batch_size"] // len(nodes)
        landing = landing_memory(table, context_length=options["context_length"], segments=segments)
        exchange: Any = OneProcess(rank, held, landing)
        found.append(
            ShardedBatches(
                world=World(rank=rank, nodes=nodes),
                share=share,
                table=table,
                gather=gather.fill,
                exchange=exchange,
                landing=landing,
                **options,
            )
        )
    return found


def rows_of(windows: Windows, segments: Segments | None = None) -> Counter[Any]:
    """Return how often each window occurs, as bytes of all its fields."""
    tensors = [*windows.buffers, windows.timesteps, windows.attention_mask, windows.segments]
    count = windows.segments.numel() // 2
    flat = [t.reshape(count, -1).contiguous().numpy() for t in tensors]
    return Counter(tuple(f[i].tobytes() for f in flat) for i in range(count))


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_ranks_get_the_global_batch(dataset: Dataset, data: st.DataObject) -> None:
    nodes = data.draw(st.sampled_from([(0, 1), (0, 0, 1, 1), (0, 1, 2), (0, 1, 1, 2), (0,)]))
    law = data.draw(st.sampled_from(["uniform_steps", "uniform_episodes", "d3rlpy"]))
    span = data.draw(st.integers(1, 9))
    options: dict[str, Any] = {
        "selection": make_sampler(law, dataset, context_length=span),
        "seed": data.draw(st.integers(0, 99)),
        "batch_size": len(nodes) * data.draw(st.integers(1, 9)),
        "context_length": span,
        "padding": data.draw(st.sampled_from(["left", "right"])),
        "normalize_states": data.draw(st.booleans()),
    }
    ranks = spread(dataset, nodes, **options)
    whole = build_table(
        dataset,
        context_length=options["context_length"],
        normalize_states=options["normalize_states"],
    )
    gather = cpu_gather(whole, options["context_length"], options["padding"])
    steps = data.draw(st.integers(1, 3))
    firsts = data.draw(st.sampled_from([(0, steps), (5, 5 + steps, 2)]))
    compare(ranks, gather, firsts, steps, options)


def compare(
    ranks: list[ShardedBatches],
    gather: CpuGather,
    firsts: tuple[int, ...],
    steps: int,
    options: dict[str, Any],
) -> None:
    """Ask for blocks of steps; together the ranks must get what `gather` finds in the whole."""
    for first in firsts:
        found = [rank.windows(first, steps) for rank in ranks]
        drawn = options["selection"].sample(options["seed"], first, steps, options["batch_size"])
        for step in range(steps):
            expected = rows_of(gather.fill(drawn[step]))
            got: Counter[Any] = Counter()
            for windows in found:
                assert windows.segments.shape[:2] == (steps, options["batch_size"] // len(ranks))
                got += rows_of(
                    Windows(
                        buffers=tuple(b[step] for b in windows.buffers),
                        fields=windows.fields,
                        timesteps=windows.timesteps[step],
                        attention_mask=windows.attention_mask[step],
                        segments=windows.segments[step],
                    )
                )
            assert got == expected
    for rank in ranks:
        rank.close()


@settings(max_examples=25)
@given(data=st.data())
def test_stacks_of_frames_come_whole(frames: Dataset, data: st.DataObject) -> None:
    """Rows before a window travel with it, and none of another episode."""
    nodes = data.draw(st.sampled_from([(0, 1), (0, 1, 2), (0, 0, 1)]))
    span, stack = data.draw(st.integers(1, 6)), data.draw(st.integers(2, 5))
    padding: Padding = data.draw(st.sampled_from(["left", "right"]))
    options: dict[str, Any] = {
        "selection": make_sampler("uniform_steps", frames),
        "seed": data.draw(st.integers(0, 99)),
        "batch_size": len(nodes) * data.draw(st.integers(1, 9)),
        "context_length": span,
        "padding": padding,
        "frame_stack": stack,
    }
    ranks = spread(frames, nodes, **options)
    whole = build_table(frames, context_length=span, frame_stack=stack)
    gather = cpu_gather(whole, context_length=span, padding=padding)
    compare(ranks, gather, (0, 2), 2, options)


def test_a_broken_exchange_is_closed_and_says_nothing_more(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing raised the error again, and left connections and threads behind."""
    law = make_sampler("uniform_steps", dataset)
    options: dict[str, Any] = {"selection": law, "seed": 0, "batch_size": 8, "padding": "right"}
    rank, _ = spread(dataset, (0, 1), context_length=4, normalize_states=False, **options)
    closed: list[str] = []

    def lost(self: OneProcess, step: int, **_: Any) -> None:
        raise GearError("RANK_LOST", "rank 1 is gone")

    monkeypatch.setattr(OneProcess, "wait", lost)
    monkeypatch.setattr(OneProcess, "close", lambda self: closed.append("closed"))
    assert failing_code(lambda: rank.windows(0, 2)) == "RANK_LOST"
    rank.close()
    assert closed == ["closed"]


def test_little_crosses_nodes(dataset: Dataset) -> None:
    options: dict[str, Any] = {"selection": make_sampler("uniform_steps", dataset), "seed": 1}
    ranks = spread(dataset, (0, 1), batch_size=2048, context_length=4, padding="right", **options)
    for step in range(20):
        for rank in ranks:
            rank.windows(step, 1)
    owners = share_shards(shard_weights(dataset), 2)
    weights = shard_weights(dataset)
    share = max(weights[owners == node].sum() for node in (0, 1)) / weights.sum()
    far = sum(rank.far_segments for rank in ranks) / sum(rank.read_segments for rank in ranks)
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


def test_skewed_laws_share_their_probability(
    dataset: Dataset, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ten times the weight on half of the episodes: little crosses nodes all the same."""
    law = make_sampler("return_weighted", dataset)
    weight = law.episode_weight
    assert weight is not None and weight.max() > 2 * weight.min()
    share = choose_share(
        dataset, World(rank=1, nodes=(0, 1)), "shard", law,
        context_length=4, normalize_states=False, extra_columns=(),
    )  # fmt: skip
    assert share is not None
    equal = weight[share.nodes == 1].sum() / weight.sum()
    by_steps = take_share(dataset, share_shards(shard_weights(dataset), 2), 1)
    assert abs(equal - 0.5) < abs(weight[by_steps.nodes == 1].sum() / weight.sum() - 0.5)
