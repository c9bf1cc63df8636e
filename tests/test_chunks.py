"""Chunks of actions: against loops and LeRobot's rule by hand, in every tier; who may ask."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gear_offline.batches.sampling import make_sampler
from gear_offline.batches.tables.table import TableOptions, build_table
from gear_offline.config.recipe import load_recipe
from gear_offline.data.dataset.schema import EpisodeIndex
from gear_offline.loaders.batch import Batch
from gear_offline.loaders.chunks import Chunks
from gear_offline.loaders.loader import GearLoader
from gear_offline.loaders.rows import DiskRows
from gear_offline.loaders.static_batch import StaticBatch
from tests.gpu_support import same
from tests.image_support import image_columns
from tests.kernels_on_cpu import gpu_gather, on_cpu
from tests.one_process import open_ranks
from tests.sampling_support import CASES, IDS
from tests.segment_oracle import MemoryTable, all_segments, bits, cpu_gather
from tests.support import hopper_columns, make_dataset, one_error
from tests.task_support import join, make_parts
from tests.test_gather import GATHERS, device
from tests.test_histories import convert_histories, follow

LENGTHS = [6, 1, 9, 3, 40]
SIZE = 7  # of chunks
OPTIONS: dict[str, Any] = {"batch_size": 8, "context_length": 3, "chunk": SIZE, "device": "cpu"}
KINDS: dict[str, Any] = {  # of actions: of vectors, numbers, several dimensions, choices
    **{f"vector {t}": ((3,), t) for t in ("f2", "f4", "f8")},
    **{"number": ((), "f4"), "matrix": ((2, 3), "f8"), "wide": ((300,), "f4")},
    **{"choice": ((), "i4"), "choices": ((2,), "u1"), "flag": ((1,), "?")},
}
Steps = list[tuple[int, int]]  # episode and step of it


def columns_of(lengths: Sequence[int], kind: str = "vector f4") -> dict[str, Any]:
    shape, dtype = KINDS[kind]
    values = np.random.default_rng(3).normal(size=(sum(lengths), *shape)) * 50
    values = values if np.dtype(dtype).kind == "f" else abs(values) % 9
    return hopper_columns(sum(lengths)) | {"actions": values.astype(dtype)}


def check(found: Any, mask: Any, lasts: Steps, actions: Any, lengths: Sequence[int]) -> None:
    """Compare chunks (n, C, ...) with loops over an episode, from its steps `lasts` on."""
    assert found.shape[:2] == mask.shape == (len(lasts), mask.shape[1])
    assert mask.dtype == torch.int64
    firsts = np.cumsum([0, *lengths])
    for i, (episode, step) in enumerate(lasts):
        for k in range(mask.shape[1]):
            row = firsts[episode] + min(step + k, lengths[episode] - 1)
            expected = torch.as_tensor(actions[row]).to(found.dtype).reshape(found.shape[2:])
            assert torch.equal(found[i, k], expected)
            assert mask[i, k] == (step + k < lengths[episode])


def check_batch(batch: Batch, data: Any, histories: Sequence[int] | None = None) -> None:
    """Compare a batch's chunks with loops over the data."""
    lengths, lasts = data.episodes.lengths.tolist(), Steps()
    numbers = range(len(lengths)) if histories is None else histories
    for (episode, start), mask in zip(batch.segments.tolist(), batch.attention_mask, strict=True):
        lasts.append(follow(lengths, numbers, episode, start)[int(mask.sum()) - 1])
    found = batch.chunk_actions
    assert found is batch["chunk_actions"] and batch.chunk_mask is batch["chunk_mask"]
    assert found is not None and found.dtype == batch.actions.dtype
    assert found.shape == (len(lasts), SIZE, *batch.actions.shape[2:])
    check(found, batch.chunk_mask, lasts, data.column("actions"), lengths)


@pytest.mark.parametrize("kind", GATHERS)
@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=8),
    actions=st.sampled_from([*KINDS]),
    size=st.integers(1, 40) | st.just(500),
)
def test_gathers_repeat_the_last_row(
    kernels: Any, kind: str, lengths: list[int], actions: str, size: int
) -> None:
    """From each step of a table, by the CPU and by the kernels of the GPU."""
    columns, segments = columns_of(lengths, actions), all_segments(lengths)
    table = build_table(MemoryTable(columns, lengths), TableOptions(context_length=2, chunk=size))
    expected = cpu_gather(table, size, repeat=True).gather(segments)
    steps = [*zip(segments.episodes.tolist(), segments.starts.tolist(), strict=True)]
    values = expected.tensors()["actions"]
    check(values, expected.attention_mask, steps, columns["actions"], lengths)
    if kind != "cpu":
        with device(kind, kernels) as place:
            options: dict[str, Any] = {"context_length": size, "rank_batch": 1, "repeat": True}
            assert bits(gpu_gather(table, device=place, **options).gather(segments)) == bits(
                expected
            )


@given(
    episodes=st.lists(st.tuples(st.integers(1, 7), st.integers(0, 3)), min_size=1, max_size=9),
    span=st.integers(1, 40),
)
def test_a_chunk_begins_at_the_last_step_of_its_window(
    episodes: list[tuple[int, int]], span: int
) -> None:
    """Of the episode of that step, wherever its history lies."""
    lengths, numbers = map(list, zip(*episodes, strict=True))
    segments = all_segments(lengths)
    names = [*zip(segments.episodes.tolist(), segments.starts.tolist(), strict=True)]
    for histories in (None, numbers):
        index = EpisodeIndex(np.array(lengths), histories and np.array(histories))  # type: ignore[arg-type]
        drawn = Chunks(index, span, 5).draw(0, segments[None])[0]
        of = histories or range(len(lengths))
        lasts = [follow(lengths, of, *name)[:span][-1] for name in names]
        assert lasts == [*zip(drawn.episodes.tolist(), drawn.starts.tolist(), strict=True)]


def test_chunks_are_those_of_lerobot(tmp_path: Path) -> None:
    """Windows of one step, for which LeRobot clamps indices to an episode and marks the others.

    As `LeRobotDataset._get_query_indices` does, with ``delta_timestamps={"action": [0, 1 / fps,
    ...]}``.
    """
    data = make_dataset(tmp_path, LENGTHS)
    actions, firsts = data.column("actions"), np.cumsum([0, *LENGTHS])
    loader = GearLoader(data, **OPTIONS | {"context_length": 1})
    for _ in range(30):
        batch = next(loader)
        assert batch.chunk_actions is not None and batch.chunk_mask is not None
        for i, (episode, step) in enumerate(batch.segments.tolist()):
            begin, end, index = firsts[episode], firsts[episode + 1], firsts[episode] + step
            query = [max(begin, min(end - 1, index + delta)) for delta in range(SIZE)]
            is_pad = [(index + d < begin) | (index + d >= end) for d in range(SIZE)]
            np.testing.assert_array_equal(batch.chunk_actions[i].numpy(), actions[query])
            assert (~batch.chunk_mask[i].bool()).tolist() == is_pad


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_tier_gives_the_chunks_of_the_data(tmp_path: Path, kind: str, padding: Any) -> None:
    """From memory, from disk and in ranks; all else is as without, and so it is for a resumed one.

    On a GPU: tests/test_loader_gpu.py, on several tests/test_tables_gpu.py.
    """
    data = make_dataset(tmp_path, LENGTHS, columns=columns_of(LENGTHS, kind), shard_bytes=2000)
    options = OPTIONS | {"padding": padding, "seed": 5}
    loader, ahead = GearLoader(data, **options), GearLoader(data, **options)
    disk = GearLoader(data, placement="disk", host_budget="8MiB", **options)
    assert isinstance(disk.rows, DiskRows)
    worlds = [open_ranks(data, nodes, "auto", **options) for nodes in ((0, 0), (0, 1))]
    plain = GearLoader(data, **options | {"chunk": None})
    for step in range(20):
        batch, without = next(loader), plain.batch_at(step)
        check_batch(batch, data)
        assert without.chunk_actions is None and {*batch} - {*without} == {*batch.extras}
        assert all(torch.equal(batch[name], without[name]) for name in without)
        same(next(disk), batch)
        same(disk.batch_at(step), batch)
        for ranks in worlds:
            parts = [next(rank) for rank in ranks]
            for name in batch:
                assert torch.equal(torch.cat([part[name] for part in parts]), batch[name])
    ahead.load_state_dict(disk.state_dict())
    same(next(ahead), next(loader))
    with one_error("LOADER_STATE", "chunk is None here and 7"):
        plain.load_state_dict(disk.state_dict())
    for each in (disk, *worlds[0], *worlds[1]):
        each.close()


@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
def test_every_strategy(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    """Also of those that cut windows short, within an episode."""
    columns = columns_of(LENGTHS)
    columns["rewards"] = np.abs(columns["rewards"])  # `weighted` draws by them
    data = make_dataset(tmp_path, LENGTHS, columns=columns)
    sampler = make_sampler(name, data, context_length=4, **options)
    padding: Any = sampler.padding or "right"
    shape = OPTIONS | {"batch_size": 5, "context_length": 4, "padding": padding}
    for batch, _ in zip(GearLoader(data, selection=sampler, **shape), range(8), strict=False):
        check_batch(batch, data)


@pytest.mark.parametrize("place", ["auto", "disk"])
@pytest.mark.parametrize("padding", ["right", "left"])
def test_over_histories_a_chunk_ends_with_its_episode(
    tmp_path: Path, place: Any, padding: Any
) -> None:
    data = convert_histories(tmp_path / "data")
    budget = "8MiB" if place == "disk" else None
    shape = OPTIONS | {"context_length": 12, "padding": padding, "span": "history"}
    loader = GearLoader(data, placement=place, host_budget=budget, **shape)
    assert data.histories is not None
    for batch, _ in zip(loader, range(20), strict=False):
        check_batch(batch, data, data.histories.tolist())
    loader.close()


def test_beside_frames_goals_and_tasks(tmp_path: Path) -> None:
    frames = image_columns(sum(LENGTHS), (20, 24))
    images = make_dataset(tmp_path / "images", LENGTHS, columns=frames)
    shape = OPTIONS | {"frame_stack": 4}
    batch = GearLoader(images, **shape).batch_at(3)
    check_batch(batch, images)
    assert torch.equal(
        batch.states, GearLoader(images, **shape | {"chunk": None}).batch_at(3).states
    )
    vectors = make_dataset(tmp_path / "vectors", LENGTHS)
    goals = {"future": 1.0}
    batch = GearLoader(vectors, **OPTIONS, goals=goals).batch_at(3)
    check_batch(batch, vectors)
    without = GearLoader(vectors, **OPTIONS | {"chunk": None}, goals=goals).batch_at(3)
    assert batch.goals is not None and without.goals is not None
    assert torch.equal(batch.goals, without.goals)
    parts = make_parts(tmp_path / "tasks")
    joint = join(parts)
    batch = GearLoader(joint, **OPTIONS | {"batch_size": 60}).batch_at(0)
    assert batch.tasks is not None and batch.chunk_mask is not None
    widest, seen = batch.actions.shape[-1], 0
    for number, data in enumerate(parts.values()):
        here = batch.part(batch.tasks == number)
        width, seen = data.spec["actions"].shape[0], seen + len(here.segments)
        here.segments[:, 0] -= int(joint.first_episodes[number])
        assert here.chunk_actions is not None and here.chunk_actions.shape[-1] == widest
        assert not here.chunk_actions[..., width:].any(), "narrower tasks are filled up with zeros"
        steps = (here.segments[:, 1] + here.attention_mask.sum(1) - 1).tolist()
        lasts = [*zip(here.segments[:, 0].tolist(), steps, strict=True)]
        lengths = data.episodes.lengths.tolist()
        cut = here.chunk_actions[..., :width]
        check(cut, here.chunk_mask, lasts, data.column("actions"), lengths)
    assert seen == 60


class Writer:
    """Writes segments and where their chunks begin, one step ahead of the fill."""

    ring = 2

    def __init__(self, loader: GearLoader, chunks: Chunks) -> None:
        self.loader, self.chunks = loader, chunks

    def write(self, fills: Any, step: int) -> None:
        segments = self.loader.segments_at(step)[None]
        for fill, each in zip(fills, (segments, self.chunks.draw(step, segments)), strict=True):
            fill.write(step, each)


def test_a_batch_that_stays_has_chunks(kernels: Any, tmp_path: Path) -> None:
    """Filled in place by the GPU's kernels, for CUDA graphs; large ones travel ahead."""
    data = make_dataset(tmp_path, LENGTHS)
    loader = GearLoader(data, **OPTIONS)
    table, chunks = loader.rows.memory, Chunks(data.episodes, 3, SIZE)
    writer: Any = Writer(loader, chunks)
    with on_cpu(kernels):
        engine, rows = (gpu_gather(table, context_length=k, rank_batch=8, repeat=k == SIZE)
                        for k in (3, SIZE))  # fmt: skip
        batches = StaticBatch(
            engine, padding="right", step=3, writer=writer, seconds=[(chunks, rows)], live=False
        )
        for step in range(3, 9):
            batches.prepare()
            batches.enqueue()
            same(batches.batch.contiguous(), loader.batch_at(step))


def test_who_may_not_ask(tmp_path: Path) -> None:
    data = make_dataset(tmp_path, LENGTHS)
    with one_error("LOADER_OPTION", "sharding='shard' is not usable.*with chunk"):
        GearLoader(data, sharding="shard", **OPTIONS)
    with one_error("LOADER_OPTION", "chunk"):
        GearLoader(data, **OPTIONS | {"chunk": 0})
    with one_error("LOADER_OPTION", "of actions in memory.*host_budget"):
        GearLoader(data, placement="disk", host_budget=1000, **OPTIONS)
    columns = hopper_columns(sum(LENGTHS)) | {"chunk_mask": np.ones(sum(LENGTHS))}
    named = make_dataset(tmp_path / "named", LENGTHS, columns=columns)
    with one_error("LOADER_OPTION", "no extra_columns called"):
        GearLoader(named, extra_columns=["chunk_mask"], **OPTIONS)
    for kind in ("decision_transformer", "mlp", "iql", "decoupled"):
        with one_error("RECIPE", f"loader.chunk=7 is no use to model.kind={kind}.*FILE.py"):
            load_recipe("paper", {"loader.chunk": SIZE, "model.kind": kind})
