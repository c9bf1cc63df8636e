"""Chunks of actions: against loops and LeRobot's rule by hand, in every tier; who may ask."""

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
from gear_offline.batches.tables.table import TableOptions, build_table
from gear_offline.config.recipe import load_recipe
from gear_offline.data.dataset.schema import EpisodeIndex
from gear_offline.loaders.batch import Batch
from gear_offline.loaders.chunks import Chunks
from gear_offline.loaders.loader import GearLoader
from gear_offline.loaders.rows import DiskRows
from gear_offline.loaders.static_batch import StaticBatch
from tests.gpu_support import NEEDS_CUPY, NEEDS_GPU, same
from tests.image_support import image_columns
from tests.kernels_on_cpu import gpu_gather, on_cpu
from tests.one_process import open_ranks
from tests.own_parts import ENVIRONMENT
from tests.sampling_support import CASES, IDS
from tests.segment_oracle import MemoryTable, all_segments, bits, cpu_gather
from tests.support import ROOT, Captured, hopper_columns, make_dataset, one_error
from tests.task_support import join, make_parts
from tests.test_docs import blocks
from tests.test_gather import GATHERS, device
from tests.test_growing import episodes, grow
from tests.test_histories import convert_histories, follow

LENGTHS = [6, 1, 9, 3, 40]
SIZE = 7  # of chunks
OPTIONS: dict[str, Any] = {"batch_size": 8, "context_length": 3, "chunk": SIZE, "device": "cpu"}
KINDS: dict[str, Any] = {  # of actions: of vectors, numbers, several dimensions, choices
    **{f"vector {t}": ((3,), t) for t in ("f2", "f4", "f8")},
    **{"number": ((), "f4"), "matrix": ((2, 3), "f8"), "wide": ((300,), "f4")},
    **{"choice": ((), "i4"), "choices": ((2,), "u1"), "flag": ((1,), "?")},
}
PLAIN = """
import gear_offline as go
from torch import nn


class Plain(go.SequenceModel):
    def __init__(self, facts, settings):
        super().__init__(facts, settings)
        self.map = nn.Linear(facts.state_dim, facts.action_dim)

    def predict(self, batch):
        return self.map(batch.states)
"""
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


def test_chunks_begin_at_every_step_as_the_page_says(tmp_path: Path) -> None:
    """By the strategy of the page; by others at none of the first K - 1 steps."""
    page = (ROOT / "docs" / "how-to" / "own-model.md").read_text()
    assert "loader.chunk=50 loader.context_length=10 selection.strategy=d3rlpy" in page
    data = make_dataset(tmp_path, [12] * 8)
    shares = {}
    for strategy, padding in (("d3rlpy", "left"), ("uniform_steps", "right")):
        shape: Any = OPTIONS | {"batch_size": 6000, "context_length": 5, "padding": padding}
        batch = next(GearLoader(data, selection=strategy, **shape))
        lasts = (batch.segments[:, 1] + batch.attention_mask.sum(1) - 1).numpy()
        shares[strategy] = np.bincount(lasts, minlength=12) / 500
    np.testing.assert_allclose(shares["d3rlpy"], 1, atol=0.2)
    np.testing.assert_allclose(shares["uniform_steps"], [0] * 4 + [1] * 7 + [5], atol=0.4)


def test_a_run_says_where_no_chunk_begins(
    tmp_path: Path, chunked: dict[str, Any], capsys: Captured
) -> None:
    by_last = {"selection.strategy": "d3rlpy", "loader.padding": "left"}
    cases: list[dict[str, Any]] = [{}, by_last, {"loader.context_length": 1}]
    said = []
    for number, more in enumerate(cases):
        options = chunked | {"evaluate.episodes": 0} | more
        go.train("smoke", options, out=tmp_path / f"run{number}")
        said.append("none of the first 3 steps" in capsys.readouterr().err)
    assert said == [True, False, False]


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


def test_of_data_that_grow(tmp_path: Path) -> None:
    """Episodes that go on in histories lie elsewhere than behind those before them."""
    path, shape = tmp_path / "grows", OPTIONS | {"context_length": 12, "batch_size": 200}
    before = GearLoader(convert_histories(path), span="history", **shape)
    for number, history in enumerate([3, 7, 99, 7]):
        go.Appender(path, history=history).append(episodes([4 + number, 2], number))
    grow(path, 1)
    grown = go.open_dataset(path)
    assert grown.histories is not None and len(grown) > len(before.dataset.episodes.lengths)
    check_batch(next(GearLoader(grown, span="history", **shape)), grown, grown.histories.tolist())
    check_batch(next(GearLoader(grown, **shape)), grown)


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
            engine,
            padding="right",
            step=3,
            writer=writer,
            extra_gathers=[(chunks, rows)],
            live=False,
        )
        for step in range(3, 9):
            batches.prepare()
            batches.enqueue()
            same(batches.batch.contiguous(), loader.batch_at(step))


GPU_CASES = [
    ("uniform_steps", {}),
    ("return_weighted", {"temperature": 0.5, "unit": "episodes"}),
    ("top_k", {"k": 2}),
    ("shuffled_epochs", {}),
    ("prioritized", {}),
]


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize(("name", "options"), GPU_CASES, ids=[name for name, _ in GPU_CASES])
def test_the_gpu_draws_where_chunks_begin(
    kernels: Any, tmp_path: Path, name: str, options: dict[str, Any], padding: Any
) -> None:
    """In blocks of steps, and in a batch that stays: those of the CPU."""
    data = make_dataset(tmp_path, LENGTHS)
    sampler = make_sampler(name, data, **options)
    loader = GearLoader(data, selection=sampler, seed=5, **OPTIONS | {"padding": padding})
    table, chunks = loader.rows.memory, Chunks(data.episodes, 3, SIZE)
    learns = name == "prioritized"
    with on_cpu(kernels):
        drawn: Any = {"selection": sampler, "seed": 5, "rank_batch": 8}
        engine = gpu_gather(table, context_length=3, padding=padding, **drawn)
        rows = gpu_gather(table, context_length=SIZE, repeat=True, behind=3, **drawn)
        extra = chunks.tensors(rows.draw_and_gather(2, 4))
        batches = StaticBatch(
            engine, padding=padding, step=2, learns=learns, extra_gathers=[(chunks, rows)]
        )
        for step in range(4):
            batches.enqueue()
            expected = loader.batch_at(2 + step)
            same(batches.batch.contiguous(), expected)
            for key, values in extra.items():
                assert torch.equal(values[step], expected[key])


def test_who_may_not_ask(tmp_path: Path) -> None:
    data = make_dataset(tmp_path, LENGTHS)
    with one_error("LOADER_OPTION", "sharding='shard' is not usable.*with chunk"):
        GearLoader(data, sharding="shard", **OPTIONS)
    with one_error("LOADER_OPTION", "chunk"):
        GearLoader(data, **OPTIONS | {"chunk": 0})
    least = list[int]()
    for size in (None, SIZE):
        with one_error("LOADER_OPTION", "too small to keep two batches") as refusal:
            GearLoader(data, placement="disk", host_budget=1000, **OPTIONS | {"chunk": size})
        least.append(int(refusal.value.remedy.split("at least ")[1].split()[0]))
    assert least[1] - least[0] == 3 * 4 * (sum(LENGTHS) + 2 * SIZE), "all actions are kept"
    with GearLoader(data, placement="disk", host_budget=least[1], **OPTIONS) as loader:
        check_batch(next(loader), data)
    columns = hopper_columns(sum(LENGTHS)) | {"chunk_mask": np.ones(sum(LENGTHS))}
    named = make_dataset(tmp_path / "named", LENGTHS, columns=columns)
    with one_error("LOADER_OPTION", "no extra_columns called"):
        GearLoader(named, extra_columns=["chunk_mask"], **OPTIONS)
    for kind in ("decision_transformer", "mlp", "iql", "decoupled"):
        with one_error("RECIPE", f"model.kind={kind} does not use loader.chunk=7.*FILE.py"):
            load_recipe("paper", {"loader.chunk": SIZE, "model.kind": kind})


@pytest.fixture
def chunked(tmp_path: Path) -> dict[str, Any]:
    """Options of a run of the page's model, on episodes in which each action tells its step."""
    page = blocks((ROOT / "docs" / "how-to" / "own-model.md").read_text(), "python")
    code = next(block for block in page if "class Chunked" in block)
    head = "import torch\nfrom torch import nn\nimport gear_offline as go\n\n\n"
    (tmp_path / "chunked.py").write_text(head + code)
    (tmp_path / "env.py").write_text(ENVIRONMENT)
    columns = hopper_columns(600, state_dim=3, action_dim=1)
    columns["actions"] = columns["observations"][:, :1] * 0.5
    data = make_dataset(tmp_path, [20] * 30, columns=columns, environment_id=None)
    options = {"data.path": str(data.path), "loader.chunk": 5, "loader.context_length": 4}
    options |= {"train.steps": 3, "train.device": "cpu", "loader.normalize_states": False}
    options |= {"model.kind": f"{tmp_path}/chunked.py:Chunked", "optimizer.weight_decay": 0.0}
    options |= {"optimizer.warmup_steps": 0, "optimizer.clip_norm": None}
    environment = {"evaluate.environment": f"{tmp_path}/env.py:Reach", "evaluate.episodes": 2}
    return options | environment | {"evaluate.targets": [0.0], "train.evaluate_every": None}


def test_the_model_of_the_page_learns_chunks_as_plain_torch(
    tmp_path: Path, chunked: dict[str, Any]
) -> None:
    first = go.train("smoke", chunked | {"train.steps": 1}, out=tmp_path / "first", quiet=True)
    state = first.policy(device="cpu").model.state_dict()
    init = {"train.init": str(first.path)}
    run = go.train("smoke", chunked | init, out=tmp_path / "run", quiet=True)
    weights = {name: value.clone().requires_grad_() for name, value in state.items()}
    optimizer = torch.optim.Adam(weights.values(), run.recipe.optimizer.learning_rate)
    data = go.open_dataset(chunked["data.path"])
    loader = GearLoader.from_recipe(run.recipe, {"train.init": None}, device="cpu")
    for batch, _ in zip(loader, range(3), strict=False):
        total, count = torch.zeros(()), 0
        for (episode, start), mask in zip(
            batch.segments.tolist(), batch.attention_mask, strict=True
        ):
            real = int(mask.sum())
            left, last = 20 - (start + real - 1), 20 * episode + start + real - 1
            seen = torch.from_numpy(data.column("observations")[last])
            hidden = torch.relu(weights["inner.weight"] @ seen + weights["inner.bias"])
            predicted = weights["outer.weight"] @ hidden + weights["outer.bias"]  # of one element
            rows = data.column("actions")[last : last + min(5, left), 0]
            errors = [abs(predicted[k] - float(row)) for k, row in enumerate(rows)]
            total, count = total + real * torch.stack(errors).mean(), count + real
        optimizer.zero_grad()
        loss: Any = total / count
        loss.backward()
        optimizer.step()
    for name, value in run.policy(device="cpu").model.state_dict().items():
        torch.testing.assert_close(value, weights[name].detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@NEEDS_GPU
@NEEDS_CUPY
@pytest.mark.parametrize("place", ["hbm", "host"])
def test_captured_steps_learn_chunks(tmp_path: Path, chunked: dict[str, Any], place: str) -> None:
    """Weights are those of steps that are launched one by one, and about those of a CPU."""
    chunked |= {"train.steps": 40, "train.precision": "fp32", "evaluate.episodes": 0}
    on_gpu = {"train.device": "cuda", "loader.engine": "on", "loader.placement": place}
    states = []
    for name, more in {
        "graph": on_gpu | {"train.graph": "on"},
        "eager": on_gpu | {"train.graph": "off"},
        "cpu": {},
    }.items():
        run = go.train("smoke", chunked | more, out=tmp_path / name, quiet=True)
        states.append(run.policy(device="cpu").model.state_dict())
    for name, value in states[0].items():
        torch.testing.assert_close(value, states[1][name], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(value, states[2][name], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("at_once", [None, 3])
def test_the_model_of_the_page_plays_its_predictions(
    tmp_path: Path, chunked: dict[str, Any], at_once: int | None
) -> None:
    """As in ACT: weights exp(-m i), where i = 0 is the oldest prediction of a step; or in turn."""
    file = tmp_path / "chunked.py"
    if at_once is not None:
        whole, turn = file.read_text(), "window.last(window.timesteps)[:, None] % n"
        assert f"age == {turn}" in (ROOT / "docs" / "how-to" / "own-model.md").read_text()
        chosen = f"(age == {turn})[..., None]".replace("% n", f"% {at_once}")
        head = whole[: whole.index("        weight = ")]
        file.write_text(f"{head}        return (actions * {chosen}).sum(1)\n")
    run = go.train("smoke", chunked | {"train.steps": 30}, out=tmp_path / "run", quiet=True)
    report = go.evaluate(run.path, episodes=2, device="cpu", quiet=True)
    assert report.targets[0].episodes == 2
    policy, seen = run.policy(device="cpu"), np.random.default_rng(0).normal(size=(12, 3))
    model, predictions = policy.model, []
    policy.reset(0.0)
    for step, state in enumerate(seen.astype(np.float32)):
        predictions.append(model.chunks(torch.from_numpy(state)).detach())
        of_step = [predictions[t][step - t] for t in range(max(0, step - 3), step + 1)]
        weights = np.exp(-0.01 * np.arange(len(of_step)))
        weights /= weights.sum()
        expected = sum(w * float(a) for w, a in zip(weights, of_step, strict=True))
        if at_once is not None:
            expected = float(predictions[step - step % at_once][step % at_once])
        assert float(policy.act(state[None])[0, 0]) == pytest.approx(expected, abs=1e-5)
        policy.observe_reward([0.0])


def test_the_model_of_the_page_plays_an_episode_by_its_own_predictions(
    tmp_path: Path, chunked: dict[str, Any]
) -> None:
    """What was predicted in the episode before is of that episode: chunks end with it."""
    data = convert_histories(tmp_path / "histories")
    options = {"data.path": str(data.path), "loader.span": "history", "loader.context_length": 9}
    options |= {"evaluate.environment": None, "evaluate.episodes": 0}
    run = go.train("smoke", chunked | options, out=tmp_path / "run", quiet=True)
    policies = [run.policy(device="cpu", memory=memory) for memory in (False, True)]
    for steps in (2, 3, 1, 6, 4):
        for policy in policies:
            policy.reset(0.0)
        for state in np.random.default_rng(steps).normal(size=(steps, 1, policies[0].state_dim)):
            alone, after = (policy.act(state) for policy in policies)
            np.testing.assert_allclose(after, alone, atol=1e-6)
            for policy in policies:
                policy.observe_reward([0.0])


def test_a_model_is_refused_that_does_not_use_them(tmp_path: Path, chunked: dict[str, Any]) -> None:
    text = (tmp_path / "chunked.py").read_text()
    (tmp_path / "other.py").write_text(text.replace("batch.chunk_actions).abs()", "0).abs()"))
    other = {"model.kind": f"{tmp_path}/other.py:Chunked"}
    with one_error("MODEL", "same for other batch.chunk_actions.*loader.chunk=null"):
        go.train("smoke", chunked | other, out=tmp_path / "other", quiet=True)
    huge = {"loader.chunk": 65_536, "loader.batch_size": 10**8}
    with one_error("MEMORY", "lower loader.chunk, loader.batch_size or"):
        go.train("smoke", chunked | huge, out=tmp_path / "huge", quiet=True)
    with one_error("MODEL", "Chunked"):
        go.train("smoke", chunked | {"loader.chunk": None}, out=tmp_path / "none", quiet=True)
    columns = hopper_columns(60) | {"chunk_actions": np.ones(60)}  # somebody's own
    named = make_dataset(tmp_path / "named", [20] * 3, columns=columns, environment_id=None)
    own: dict[str, Any] = {"data.path": str(named.path)}
    own |= {"loader.extra_columns": ["chunk_actions"]}
    own |= {"model.kind": f"{tmp_path}/plain.py:Plain", "evaluate.episodes": 0}
    own |= {"loader.chunk": None, "evaluate.environment": None}
    (tmp_path / "plain.py").write_text(PLAIN)
    go.train("smoke", chunked | own, out=tmp_path / "plain", quiet=True)
