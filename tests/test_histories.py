"""Windows over the ends of episodes: against loops over random histories, in every tier."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gear_offline as go
from gear_offline.batches.sampling import make_sampler
from gear_offline.batches.tables.placement import place_table
from gear_offline.batches.tables.table import TableOptions, build_table, span_index
from gear_offline.data.dataset.dataset import Dataset, view_episodes
from gear_offline.kernels.gather import Windows
from gear_offline.kernels.gather_gpu import GpuGather
from gear_offline.loaders.batch import Batch
from gear_offline.loaders.loader import GearLoader
from gear_offline.runs.loop import TrainingInterrupted
from tests.gpu_support import NEEDS_CUPY, NEEDS_GPU
from tests.kernels_on_cpu import gpu_gather
from tests.one_process import open_ranks, row_digests
from tests.placement_support import FakeMemory
from tests.sampling_support import CASES, CONTEXT, IDS, facts, p_value
from tests.segment_oracle import MemoryTable, all_segments, bits, cpu_gather
from tests.support import Captured, hopper_columns, one_error
from tests.test_gather import GATHERS, device
from tests.test_growing import episodes, grow, recipe_of
from tests.test_resume import interrupted_in
from tests.training_support import learnt

LENGTHS = [6, 1, 9, 4, 20, 3, 1, 12, 5]
HISTORIES = [7, -2, 7, 3, -2, 7, 3, 11, -2]  # of each, in no order
SPAN: Any = "history"
Rows = list[tuple[int, int]]  # episode and step of it


def follow(lengths: Sequence[int], numbers: Sequence[int], episode: int, start: int) -> Rows:
    """Return the steps of a history from a start on, to its end."""
    later = [e for e in range(episode, len(lengths)) if numbers[e] == numbers[episode]]
    return [(e, t) for e in later for t in range(lengths[e]) if e > episode or t >= start]


def check(values: Any, columns: Any, lengths: Sequence[int], numbers: Sequence[int], span: int,
          padding: str) -> None:  # fmt: skip
    """Compare windows with loops; `values` are fields by name, arrays (n, K, ...)."""
    firsts = np.cumsum([0, *lengths]).tolist()
    for i, (episode, start) in enumerate(values["segments"].tolist()):
        rows = follow(lengths, numbers, episode, start)[:span]
        low = 0 if padding == "right" else span - len(rows)
        inside = (np.arange(span) >= low) & (np.arange(span) < low + len(rows))
        assert (values["attention_mask"][i] == inside).all()
        assert not any(values[name][i, ~inside].any() for name in ("states", "timesteps"))
        for k, (e, t) in enumerate(rows, low):
            row = firsts[e] + t
            assert (values["states"][i, k] == columns["observations"][row]).all()
            assert (values["actions"][i, k] == columns["actions"][row]).all()
            assert values["timesteps"][i, k] == t
            rest = columns["rewards"][row : firsts[e] + lengths[e]].sum(dtype=np.float64)
            assert abs(values["returns_to_go"][i, k, 0] - rest) < 1e-5


def arrays(windows: Windows) -> dict[str, Any]:
    named = {n: getattr(windows, n) for n in ("timesteps", "attention_mask", "segments")}
    return {name: tensor.cpu().numpy() for name, tensor in (named | windows.tensors()).items()}


def in_memory(lengths: Sequence[int], numbers: Sequence[int], **shape: Any) -> MemoryTable:
    table = MemoryTable(hopper_columns(sum(lengths), seed=1), lengths, **shape)
    vars(table)["histories"] = np.array(numbers)
    return table


@pytest.mark.parametrize("kind", GATHERS)
@settings(max_examples=40)
@given(
    episodes=st.lists(st.tuples(st.integers(1, 7), st.integers(0, 3)), min_size=1, max_size=9),
    span=st.integers(1, 40),
    padding=st.sampled_from(["right", "left"]),
    pieces=st.integers(1, 3),
    budget=st.integers(0, 6000),
)
def test_windows_go_on_in_their_history(
    kernels: Any, kind: str, episodes: list[tuple[int, int]], span: int, padding: Any, pieces: int,
    budget: int,
) -> None:  # fmt: skip
    """From anywhere in memory; the rows of a history lie side by side, also parted over tiers."""
    lengths, numbers = map(list, zip(*episodes, strict=True))
    data = in_memory(lengths, numbers, pieces=pieces)
    options = TableOptions(context_length=span, span="history")
    table, index, segments = build_table(data, options), span_index(data, options), all_segments
    named: dict[str, Any] = {"offsets": index.offsets, "reach": index.reach}
    expected = cpu_gather(table, span, padding, **named).gather(segments(lengths))
    check(arrays(expected), data.columns, lengths, numbers, span, padding)
    if kind == "cpu":
        return
    options_of: dict[str, Any] = {"context_length": span, "padding": padding, "rank_batch": 3}
    with device(kind, kernels) as place:
        windows = gpu_gather(table, device=place, **options_of, **named).gather(segments(lengths))
        assert bits(windows) == bits(expected)
        sampler = make_sampler("uniform_steps", facts(lengths))
        drawn = gpu_gather(table, sampler, device=place, seed=3, **options_of, **named)
        by_host = cpu_gather(table, span, padding, **named).gather(sampler.sample(3, 5, 4, 3))
        assert bits(drawn.draw_and_gather(5, 4)) == bits(by_host)
        if kind == "text":
            placed = place_table(table, FakeMemory(), hbm_budget=budget)
            cpu = torch.device("cpu")
            parted = GpuGather(placed.groups, device=cpu, keep=placed, **options_of, **named)
            assert bits(parted.gather(segments(lengths))) == bits(expected)


def convert_histories(path: Path, level: bool = False, **options: Any) -> Dataset:
    read = episodes(LENGTHS, 0)
    for number, episode in enumerate(read) if level else ():
        episode["level"] = np.full(LENGTHS[number], number % 4)
    go.convert(go.from_episodes(read, history=HISTORIES), path, quiet=True, **options)
    return go.open_dataset(path)


def make_loader(data: Any, **options: Any) -> GearLoader:
    defaults: dict[str, Any] = {"batch_size": 12, "context_length": 15, "device": "cpu"}
    return GearLoader(data, **defaults | {"span": SPAN} | options)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Seven shards, in which histories are cut."""
    return convert_histories(
        tmp_path_factory.mktemp("histories") / "data", level=True, shard_bytes=900
    )


def columns_of(data: Dataset) -> dict[str, Any]:
    return {name: data.column(name) for name in ("observations", "actions", "rewards", "history")}


def check_batch(batch: Batch, data: Dataset, numbers: Any = None) -> None:
    """Compare a batch with loops over the data."""
    numbers = data.column("history")[data.episodes.offsets[:-1]] if numbers is None else numbers
    values: Any = {name: value.numpy() for name, value in {**batch}.items()}
    values |= {"timesteps": batch.timesteps.numpy(), "segments": batch.segments.numpy()}
    lengths, span = data.episodes.lengths.tolist(), batch.timesteps.shape[1]
    check(values, columns_of(data), lengths, numbers.tolist(), span, batch.padding)
    starts = (batch.timesteps == 0) & (batch.attention_mask == 1)
    assert torch.equal(batch.episode_starts, starts) and batch.episode_starts.dtype == torch.bool


def test_conversion_keeps_the_order_in_a_history_and_lays_it_side_by_side(
    data: Dataset, tmp_path: Path, capsys: Captured
) -> None:
    read = episodes(LENGTHS, 0)
    order = sorted(range(len(LENGTHS)), key=lambda e: (HISTORIES.index(HISTORIES[e]), e))
    assert order != sorted(order) and len(data.manifest.shards) > 3
    assert data.episodes.lengths.tolist() == [LENGTHS[e] for e in order]
    assert data.histories is not None
    assert data.histories.tolist() == [HISTORIES[e] for e in order]
    for number, episode in enumerate(order):
        for name in ("observations", "rewards", "terminals"):
            assert np.array_equal(data[number][name], read[episode][name])
    again = tmp_path / "again"
    go.convert(data.path, again, where="history != 7", shard_bytes=600, workers=2, quiet=True)
    kept = go.open_dataset(again)
    assert kept.histories is not None and kept.history_column == "history"
    assert kept.histories.tolist() == [HISTORIES[e] for e in order if HISTORIES[e] != 7]
    renamed = tmp_path / "renamed"
    go.convert(data.path, renamed, rename={"history": "learner"})
    assert "; histories by learner" in "".join(capsys.readouterr())
    assert go.open_dataset(renamed).history_column == "learner"
    without = go.convert(
        data.path, tmp_path / "named", columns=["observations", "actions"], quiet=True
    )
    assert go.open_dataset(tmp_path / "named").histories is None  # the column is gone
    assert "histories are left out" in str(without.source.attributes["warnings"])


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("span", [1, 15, 4096])
def test_batches_of_every_tier_and_world_are_those_of_loops(
    data: Dataset, span: int, padding: Any
) -> None:
    """Histories that are held out leave gaps in the files."""
    assert data.histories is not None
    for source in (data, view_episodes(data, np.flatnonzero(data.histories != -2))):
        options: dict[str, Any] = {"context_length": span, "padding": padding, "seed": 4}
        loader = make_loader(source, **options)
        batches = [next(loader) for _ in range(4)]
        with make_loader(source, placement="disk", **options) as on_disk:
            for batch in batches:
                check_batch(batch, source)
                assert row_digests(next(on_disk)) == row_digests(batch)
            assert row_digests(on_disk.batch_at(2)) == row_digests(batches[2])
        for nodes in ((0, 0, 0), (0, 1, 1)):
            ranks = open_ranks(source, nodes, "replicate", **options_of(loader))
            parts = [row_digests(next(rank)) for rank in ranks]
            assert [row for part in parts for row in part] == row_digests(batches[0])


def options_of(loader: GearLoader) -> dict[str, Any]:
    names = ("context_length", "padding", "span", "batch_size")
    given = {name: getattr(loader._options, name) for name in names}
    return given | {"seed": loader.seed, "device": "cpu"}


@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
def test_every_strategy_draws_the_starts_that_it_draws_in_episodes(
    data: Dataset, name: str, options: dict[str, Any]
) -> None:
    """Whose law others test; only what follows a start is more."""
    options = options | ({"column": "level"} if "column" in options else {})
    selection = {"strategy": name, **options}
    padding = "left" if name in ("d3rlpy", "original", "huggingface") else "right"
    more: dict[str, Any] = {"selection": selection, "padding": padding, "batch_size": 6}
    wide = make_loader(data, context_length=CONTEXT, **more)
    narrow = make_loader(data, context_length=CONTEXT, **more, span="episode")
    for _ in range(3):
        one, other = next(wide), next(narrow)
        assert torch.equal(one.segments, other.segments)
        for i in range(6):
            steps, short = (each.timesteps[i][each.attention_mask[i] == 1] for each in (one, other))
            assert torch.equal(steps[: len(short)], short)


def test_every_start_of_a_history_counts(data: Dataset) -> None:
    """Also those in the last K steps of episodes, and of histories."""
    loader = make_loader(data, batch_size=512, context_length=8)
    counts = np.zeros(data.spec.steps)
    for _ in range(40):
        episodes, starts = next(loader).segments.numpy().T
        np.add.at(counts, data.episodes.offsets[episodes] + starts, 1)
    assert p_value(counts, np.full(len(counts), counts.sum() / len(counts))) > 1e-4


def test_a_saved_position_goes_on_and_belongs_to_its_span(data: Dataset) -> None:
    loader = make_loader(data)
    next(loader)
    state, following = loader.state_dict(), next(loader)
    again = make_loader(data)
    again.load_state_dict(state)
    assert row_digests(next(again)) == row_digests(following)
    plain = make_loader(data, span="episode")
    with one_error("LOADER_STATE", "span"):
        plain.load_state_dict(state)
    before = plain.state_dict()
    del before["span"]  # as it was saved before there were histories
    plain.load_state_dict(before)


def test_appended_episodes_go_on_in_their_histories(tmp_path: Path) -> None:
    """What was there reaches into what has come, wherever that lies."""
    path = tmp_path / "grows"
    data = convert_histories(path)
    for number, history in enumerate([3, 7, 99, 7]):
        go.Appender(path, history=history).append(episodes([4 + number, 2], number))
    grow(path, 1)
    grown = go.open_dataset(path)
    assert grown.histories is not None
    assert grown.histories[len(data) :].tolist() == [3, 3, 7, 7, 99, 99, 7, 7]
    batch = next(make_loader(grown, batch_size=200, context_length=60))
    check_batch(batch, grown)
    with one_error("LOADER_OPTION", "convert the dataset again"):
        make_loader(grown, placement="disk")
    changes = episodes([5], 9)
    changes[0]["history"] = np.array([3, 3, 7, 7, 7])
    go.Appender(path).append(changes)
    grow(path, 2)
    assert len(go.open_dataset(path)) == len(grown) and list((path / "refused").iterdir())


class Actor(go.Callback):
    """Appends an episode to one history after the other, whenever the run logs."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_log(self, run: go.Run, step: int, values: Any) -> None:
        go.Appender(self.path, history=[3, 7, -2][step % 2]).append(episodes([5 + step], step))


@pytest.mark.usefixtures("no_reports")
def test_a_learner_reads_histories_while_they_grow(tmp_path: Path) -> None:
    """The same again from its lines, and from any place; longer windows than episodes."""
    path = tmp_path / "grows"
    convert_histories(path)
    longer = ("loader.context_length=50", "model.max_timestep=60")
    recipe = recipe_of(path, "loader.span=history", *longer)
    run = go.train(recipe, out=tmp_path / "run", callbacks=[Actor(path)], quiet=True)
    assert len(go.open_dataset(path)) > len(LENGTHS)
    replays, resumed = recipe.replace({"data.replay": True}), tmp_path / "resumed"
    with interrupted_in(7), pytest.raises(TrainingInterrupted):
        go.train(replays, out=resumed, quiet=True)
    go.train(replays, out=resumed, resume=True, quiet=True)
    assert learnt(resumed)["model"] == learnt(run.path)["model"]
    cut = go.train(replays.replace({"loader.span": "episode"}), out=tmp_path / "cut", quiet=True)
    assert learnt(cut.path)["model"] != learnt(run.path)["model"]


def test_whole_histories_are_held_out(data: Dataset) -> None:
    for share in ("30%", "60%"):
        kept, held = go.split(data, share)
        assert kept.histories is not None and held.histories is not None
        assert not {*kept.histories.tolist()} & {*held.histories.tolist()}
    with one_error("SELECTION", "of history"):
        go.split(data, "50%", by="level")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"goals": {"future": 1.0}}, "goals are states of one episode"),
    ({"frame_stack": 2}, "frames would be of two"),
    ({"sharding": "shard"}, "nodes would have parts of one"),
]


@pytest.mark.parametrize(("options", "reason"), REFUSED)
def test_what_is_of_one_episode_is_refused(
    data: Dataset, options: dict[str, Any], reason: str
) -> None:
    with one_error("LOADER_OPTION", reason):
        make_loader(data, **options)


def test_histories_are_told_by_whole_numbers_that_stay(tmp_path: Path) -> None:
    def make(**columns: Any) -> Any:
        read = episodes([3, 4, 2], 0)
        for name, rows in columns.items():
            for episode, value in zip(read, rows, strict=True):
                length = len(episode["rewards"])
                episode[name] = np.broadcast_to(np.asarray(value, np.float32), length).copy()
        return go.from_episodes(read)

    out = tmp_path / "out"
    given: dict[str, Any] = {"histories": "learner", "quiet": True}
    with one_error("LOADER_OPTION", "no histories"):
        go.convert(make(), tmp_path / "none", quiet=True)
        make_loader(go.open_dataset(tmp_path / "none"))
    with one_error("COLUMN", "no column 'learner'"):
        go.convert(make(), out, **given)
    with one_error("COLUMN", "add it to discrete"):
        go.convert(make(learner=[1, 0, 1]), out, **given)
    with one_error("USAGE", "changes in episode 1"):
        go.convert(make(learner=[1, [0, 0, 1, 1], 1]), out, discrete=["learner"], **given)
    with one_error("COLUMN", "other than whole numbers"):
        go.convert(make(learner=[1, np.nan, 1]), out, discrete=["learner"], **given)
    with one_error("SELECTION", "1 of 2 episodes of history 1"):
        go.convert(make(learner=[1, 0, 1]), out, discrete=["learner"], where="length > 2", **given)
    with one_error("SOURCE_LAYOUT", "one an episode"):
        go.from_episodes(episodes([3, 4], 0), history=[1])
    go.convert(make(learner=[1, 0, 1]), out, discrete=["learner"], **given)
    assert go.open_dataset(out).episodes.lengths.tolist() == [3, 2, 4]
    go.convert(make(), tmp_path / "plain", quiet=True)
    with one_error("USAGE", "no histories"):
        go.Appender(tmp_path / "plain", history=1)


@pytest.mark.gpu
@NEEDS_GPU
@NEEDS_CUPY
@pytest.mark.parametrize("where", ["hbm", "host", "auto"])
def test_a_gpu_gathers_the_same_windows(data: Dataset, where: Any) -> None:
    """From its memory, from the host's, from both; drawn there or by the host; filled in place."""
    for strategy in ("uniform_steps", "shuffled_epochs", "d3rlpy"):
        padding: Any = "left" if strategy == "d3rlpy" else "right"
        options: dict[str, Any] = {"context_length": 40, "selection": strategy, "padding": padding}
        budget = 2200 if where == "auto" else None  # of 4.3 KiB
        on_gpu = {"device": "cuda", "engine": "on", "placement": where, "hbm_budget": budget}
        loader, expected = make_loader(data, **options, **on_gpu), make_loader(data, **options)
        assert where != "auto" or "pinned host" in str(loader.engine and loader.engine.reason)
        static = loader.static_batch()
        for _ in range(3):
            batch = next(expected)
            assert row_digests(next(loader).to("cpu")) == row_digests(batch)
            static.prepare()
            static.enqueue()
            assert row_digests(static.batch.to("cpu")) == row_digests(batch)
