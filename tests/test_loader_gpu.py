"""The loader on a GPU: the bits of the CPU's batches, for every sampler, tier, side and task."""

import gc
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gear_offline.batches.sampling import (
    CumulativeWeights,
    PartWeights,
    Sampler,
    TaskPart,
    make_sampler,
    mix_tasks,
)
from gear_offline.batches.tables.shared import is_known
from gear_offline.batches.tables.table import TableOptions
from gear_offline.data.dataset.schema import EpisodeIndex
from gear_offline.errors import UnavailableError
from gear_offline.kernels.gather import Padding
from gear_offline.kernels.gather_gpu import GpuGather
from gear_offline.loaders import static_batch
from gear_offline.loaders.feedback import DeviceFeedback, LossFeedback
from gear_offline.loaders.loader import GearLoader
from tests.gpu_support import NEEDS_CUPY, ON_GPU, capture, same, take
from tests.image_support import image_columns
from tests.one_process import open_ranks
from tests.sampling_support import CASES, IDS, prioritized
from tests.support import hopper_columns, make_dataset, one_error
from tests.task_support import join, make_parts

pytestmark = [*ON_GPU, NEEDS_CUPY]
LENGTHS = [4, 1, 30, 7, 19, 2, 60]
CUDA = torch.device("cuda", 0)
SIDES = pytest.mark.parametrize("padding", ["right", "left"])
TIERS = pytest.mark.parametrize("tier", ["hbm", "host", "both"])


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Any:
    columns = hopper_columns(sum(LENGTHS))
    columns["rewards"] = np.abs(columns["rewards"])  # `weighted` draws by them
    return make_dataset(tmp_path_factory.mktemp("gpu"), LENGTHS, columns=columns)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Any:
    columns = image_columns(sum(LENGTHS), (84, 84))
    return make_dataset(tmp_path_factory.mktemp("frames"), LENGTHS, columns=columns)


def loaders(dataset: Any, tier: str = "auto", **options: Any) -> tuple[GearLoader, GearLoader]:
    """Return the loader under test, whose rows are in that tier, and one on the CPU.

    In tier hbm it comes first and reads the rows itself; else it places those of the CPU's table.
    """
    options = {"batch_size": 33, "context_length": 8, "seed": 2**63 + 5, **options}
    make: Any = partial(GearLoader, dataset, device="cuda", engine="on", **options)
    straight = make(placement=tier) if tier == "hbm" else None
    cpu = GearLoader(dataset, device="cpu", **options)
    half = cpu.rows.memory.row_bytes * dataset.episodes.steps // 2
    where: dict[str, Any] = {"hbm_budget": half} if tier == "both" else {"placement": tier}
    return straight or make(**where), cpu


def check(gpu: GearLoader, cpu: GearLoader, *, blocks: int, captured: int = 0) -> None:
    """Compare steps one after another, any step, and those that a captured graph takes."""
    for _ in range(blocks):
        same(next(gpu), next(cpu))
    same(gpu.batch_at(2**40), cpu.batch_at(2**40))
    assert gpu.state_dict() == cpu.state_dict()
    if captured:
        batches, first = gpu.static_batch(), 2**33 - 2  # the step's high word changes on the way
        graph = capture(batches)
        batches.set_step(first)
        for step in range(first, first + captured):
            batches.prepare()
            graph.replay()
            if step < first + 4 or step % 100 < 3:
                same(batches.batch, cpu.batch_at(step))


@TIERS
@SIDES
@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
def test_batches_are_those_of_the_cpu(
    dataset: Any, name: str, options: dict[str, Any], padding: Padding, tier: str
) -> None:
    """Drawn by the GPU or the host, many steps in a block, and many segments in a step."""
    for size in (5,) if name == "min_dt" else (33, 70_000):
        shape: dict[str, Any] = {"batch_size": size, "normalize_states": True}
        one, other = (make_sampler(name, dataset, context_length=8, **options) for _ in "ab")
        shape["padding"] = one.padding or padding
        (gpu, _), (_, cpu) = (loaders(dataset, tier, selection=s, **shape) for s in (one, other))
        long = name in ("uniform_steps", "fifo") and size == 33  # more than one block of steps
        static = not one.cuts_windows and (one.gpu is not None or name == "fifo")
        blocks = 700 if long else 60 if size < 70_000 else 1
        check(gpu, cpu, blocks=blocks, captured=static * (1100 if long else 4))


def later(facts: Any, episodes: Any, steps: Any, draws: Any) -> Any:
    """A law of goals of one's own: up to four steps ahead."""
    last = facts.episodes.lengths[episodes] - 1
    return np.minimum(steps + (5 * draws[:, 1]).astype(int), last)


SHARES = {"current": 0.1, "future": 0.5, "final": 0.1, "random": 0.3, "discount": 0.9}


@TIERS
@pytest.mark.parametrize("goals", [SHARES, {"kind": later}], ids=["shares", "law"])
@pytest.mark.parametrize("selection", ["uniform_steps", "prioritized"])
def test_goals(dataset: Any, tier: str, selection: str, goals: dict[str, Any]) -> None:
    """Drawn by the host and gathered by the GPU, with the segments of a loader without."""
    options: dict[str, Any] = {"selection": selection, "normalize_states": True}
    gpu, cpu = loaders(dataset, tier, **options, goals=goals)
    plain, _ = loaders(dataset, tier, **options)
    batch = gpu.batch_at(0)
    assert batch.goals is not None and batch.goals.device.type == "cuda"
    for step in range(5):
        assert torch.equal(gpu.batch_at(step).segments, plain.batch_at(step).segments)
    learns = selection == "prioritized"
    check(gpu, cpu, blocks=3 if learns else 700, captured=0 if learns else 4)
    if learns:
        with pytest.raises(UnavailableError, match="hears of losses"):
            gpu.static_batch()


@TIERS
@SIDES
@pytest.mark.parametrize("selection", ["uniform_steps", "min_dt", "prioritized"])
@pytest.mark.parametrize("more", [{}, {"goals": SHARES}], ids=["chunks", "and goals"])
def test_chunks_of_actions(
    dataset: Any, tier: str, padding: Padding, selection: str, more: dict[str, Any]
) -> None:
    """Gathered behind the windows of a loader without; repeated behind an episode's end."""
    sampler = make_sampler(selection, dataset, context_length=8)
    shape: dict[str, Any] = {"chunk": 50, "padding": sampler.padding or padding, **more}
    shape["batch_size"] = 5 if selection == "min_dt" else 33
    gpu, cpu = loaders(dataset, tier, selection=selection, **shape)
    assert gpu.engine is not None
    assert gpu.engine.draws is (sampler.gpu is not None and not more)
    static = gpu.engine.draws or selection == "uniform_steps"
    check(gpu, cpu, blocks=60, captured=300 * static)
    off = GearLoader(dataset, device="cuda", engine="off", context_length=8, seed=2**63 + 5,
                     selection=selection, **shape)  # fmt: skip
    same(off.batch_at(7), cpu.batch_at(7))


@pytest.mark.parametrize("dtype", ["f2", "f8", "i4", "u1", "?"])
def test_chunks_of_actions_that_are_cast(tmp_path: Path, dtype: str) -> None:
    columns = hopper_columns(sum(LENGTHS))
    columns["actions"] = (abs(columns["actions"]) * 9).astype(dtype)
    gpu, cpu = loaders(make_dataset(tmp_path, LENGTHS, columns=columns), chunk=700)
    check(gpu, cpu, blocks=3, captured=5)


@pytest.mark.parametrize("ahead", [True, False])
def test_chunks_travel_ahead(dataset: Any, ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static_batch, "AHEAD_BYTES", 0)
    gpu, cpu = loaders(dataset, "host", chunk=50)
    batches = gpu.static_batch(ahead=ahead)
    assert batches.ahead is ahead and not gpu.hand_over(batches), "several fills are made anew"
    for step in range(200):
        batches.prepare()
        batches.enqueue()
        same(batches.batch, cpu.batch_at(step))


@TIERS
@SIDES
@pytest.mark.parametrize("stack", [2, 4])
def test_stacks_of_frames(images: Any, padding: Padding, tier: str, stack: int) -> None:
    gpu, cpu = loaders(images, tier, padding=padding, frame_stack=stack)
    check(gpu, cpu, blocks=60)
    off = GearLoader(images, batch_size=33, context_length=8, seed=2**63 + 5, padding=padding,
                     frame_stack=stack, device="cuda", engine="off")  # fmt: skip
    same(next(off), cpu.batch_at(0))


@SIDES
@TIERS
def test_several_columns_of_observations(tmp_path: Path, padding: Padding, tier: str) -> None:
    steps, generator = sum(LENGTHS), np.random.default_rng(0)
    columns = image_columns(steps, (36, 40, 3))
    columns["camera"] = columns.pop("observations")
    columns["depth"] = generator.random((steps, 3, 24, 20))  # floats of 64 bits are cast
    columns["state"] = generator.normal(3.0, 2.0, (steps, 4)).astype(np.float32)
    data = make_dataset(tmp_path, LENGTHS, columns=columns)
    names: dict[str, Any] = {"observations": ["camera", "state", "depth"], "frame_stack": 2}
    gpu, cpu = loaders(data, tier, padding=padding, normalize_states=True, **names)
    assert set(next(cpu.__copy__()).states) == {"camera", "state", "depth"}
    check(gpu, cpu, blocks=3, captured=5)


@pytest.mark.parametrize("tier", ["hbm", "host"])
@pytest.mark.parametrize("weights", [None, (1.0, 5.0, 0.5)])
@pytest.mark.parametrize("scheduled", [False, True])
def test_several_tasks(
    tmp_path: Path, tier: str, weights: tuple[float, ...] | None, scheduled: bool
) -> None:
    joint = join(make_parts(tmp_path))
    selection: Any = "uniform_steps"
    if weights is not None:
        names = ("uniform_steps", "return_weighted", "uniform_episodes")
        parts = [
            TaskPart(name=task.name, sampler=make_sampler(name, task.dataset), weight=weight)
            for task, name, weight in zip(joint.tasks, names, weights, strict=True)
        ]
        points = PartWeights([0, 9], [[1.0, 0.0, 0.5], [0.2, 1.0, 0.0]])
        selection = mix_tasks(parts, points if scheduled else None)
    gpu, cpu = loaders(joint, tier, selection=selection)
    assert "tasks" in gpu.batch_at(0).model_inputs()
    check(gpu, cpu, blocks=20, captured=4)


@pytest.mark.parametrize("selection", ["uniform_steps", "fifo"])
@pytest.mark.parametrize("ahead", [True, False])
def test_a_graph_takes_the_next_step_at_each_replay(
    dataset: Any, ahead: bool, selection: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(static_batch, "AHEAD_BYTES", 0)
    gpu, cpu = loaders(dataset, "host", selection=selection)
    batches = gpu.static_batch(ahead=ahead)
    assert batches.ahead is ahead
    for _ in range(3):
        batches.enqueue()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batches.begin(timed=True)
        busy = torch.ones(1 << 22, device="cuda").sin().sum()  # something to do meanwhile
        batches.end(timed=True)
    batches.set_step(100)
    for step in range(100, 1200):
        batches.prepare()
        graph.replay()
        if step % 50 == 0:
            same(batches.batch, cpu.batch_at(step))
    assert torch.isfinite(busy)
    if ahead:
        assert 0 < batches.waited_seconds() < 1


@pytest.mark.parametrize("selection", ["uniform_steps", "shuffled_epochs", "fifo"])
@pytest.mark.parametrize("ahead", [True, False])
def test_a_graph_goes_on_with_data_that_have_grown(
    tmp_path: Path, ahead: bool, selection: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(static_batch, "AHEAD_BYTES", 0)
    tier = "host" if ahead else "hbm"
    small, large = (make_dataset(tmp_path / n, LENGTHS[: int(n)]) for n in ("5", "7"))
    gpu, _ = loaders(small, tier, selection=selection)
    batches = gpu.static_batch(ahead=ahead, live=True)
    graph = capture(batches)
    batches.set_step(0)
    for dataset, steps in ((small, range(40)), (large, range(40, 1200))):
        loader, cpu = loaders(dataset, tier, selection=selection, start_step=steps[0])
        assert loader.hand_over(batches)
        for step in steps:
            batches.prepare()
            graph.replay()
            if step % 7 == 0:
                same(batches.batch, cpu.batch_at(step))
    assert not gpu.hand_over(gpu.static_batch()), "not a live one"


@SIDES
@pytest.mark.parametrize("span", [1, 8, 40])
def test_many_short_windows(dataset: Any, padding: Padding, span: int) -> None:
    for count in (70_001, 300_000):
        gpu, cpu = loaders(dataset, batch_size=count, padding=padding, context_length=span)
        same(gpu.batch_at(1), cpu.batch_at(1))


def test_without_an_engine_batches_are_copied_and_a_static_one_is_refused(dataset: Any) -> None:
    off = GearLoader(dataset, batch_size=33, context_length=8, seed=2**63 + 5, device="cuda",
                     engine="off")  # fmt: skip
    assert off.engine is None
    with one_error("DEVICE", "the GPU does not gather") as caught:
        off.static_batch()
    assert "engine='on'" in caught.value.remedy
    gpu, _ = loaders(dataset)
    same(next(off), next(gpu))


def test_rows_that_the_gpu_holds_are_given_back(tmp_path: Path) -> None:
    """The host has none of them, and a second loader reads no data and takes no GPU memory."""
    own = make_dataset(tmp_path, LENGTHS)
    options: dict[str, Any] = {"batch_size": 33, "context_length": 8, "device": "cuda"}
    options["placement"] = "hbm"
    first: Any = GearLoader(own, **options)
    gc.collect()
    assert not is_known(own, TableOptions(context_length=8))
    assert all(len(each.group.rows) == 0 for each in first.rows.memory.groups)
    second = GearLoader(own, **options, seed=3)
    assert second.rows.memory is first.rows.memory


def test_threads_that_have_not_used_the_gpu_before(dataset: Any) -> None:
    """A thread's first call is a launch: with memory from torch's cache nothing else is called."""
    gpu, cpu = loaders(dataset)
    expected = [cpu.batch_at(step) for step in range(3)]
    same(gpu.batch_at(0), expected[0])
    for batch in expected:
        with ThreadPoolExecutor(1) as pool:
            same(pool.submit(next, gpu).result(), batch)


@pytest.mark.parametrize("placement", ["hbm", "host"])
@SIDES
def test_rows_of_other_nodes_are_read_where_they_landed(
    tmp_path: Path, placement: str, padding: Padding
) -> None:
    """Two nodes in one process: blocks of steps, and captured ones."""
    parts = make_dataset(tmp_path, LENGTHS * 3, shard_bytes=1500)
    options: dict[str, Any] = {"batch_size": 40, "context_length": 6, "padding": padding}
    whole = GearLoader(parts, device="cpu", world=None, **options)
    options |= {"device": "cuda", "engine": "on", "placement": placement}
    ranks = open_ranks(parts, (0, 1), "shard", **options)
    for step in range(120):
        expected = whole.batch_at(step)
        for rank in ranks:
            same(next(rank), take(expected, rank.slots_at(step)))
    captured = []
    for rank in ranks:
        batches, graph = rank.static_batch(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            batches.enqueue()
        captured.append((rank, batches, graph))
    for _, batches, _ in captured:
        batches.set_step(7)
    for step in range(7, 300):
        expected = whole.batch_at(step)
        for rank, batches, graph in captured:
            batches.prepare()
            graph.replay()
            same(batches.batch, take(expected, rank.slots_at(step)))


# draws and priorities ----------------------------------------------------------------------


def draws_alone(sampler: Sampler, count: int, **options: int) -> GpuGather:
    """A gather of no columns."""
    offsets = sampler.index.offsets
    shape: dict[str, Any] = {"context_length": 1, "rank_batch": count, **options}
    return GpuGather([], offsets, device=CUDA, draw=sampler.gpu, **shape)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_nothing_waits_for_the_gpu() -> None:
    sampler = prioritized([50] * 1000)
    tree = sampler.on_device(CUDA)
    drawing = draws_alone(sampler, 20_000)
    losses = torch.rand(20_000, device=CUDA)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for count in (64, 20_000):
            names = drawing.draw_and_gather(3, 1).segments
            tree.update(names[0, :count], losses[:count])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert tree.updates == 2 and tree.total == int(tree.masses.sum())


def test_beyond_2_to_the_24_and_over_twelve_orders_of_magnitude() -> None:
    count = (1 << 24) + 5
    weights = np.ones(count)
    weights[count // 2 :] = 1e-12
    weights[-3:] = [1e7, 0.0, 0.0]

    sampler = CumulativeWeights(EpisodeIndex(np.ones(count, np.int64)), weights)
    names = draws_alone(sampler, 100_000, seed=11).draw_and_gather(0, 1).segments
    expected = sampler.sample(11, 0, 1, 100_000).episodes
    assert np.array_equal(names[..., 0].cpu().numpy(), expected)


def test_feedback_in_a_graph(dataset: Any) -> None:
    """Select, gather, weigh and update, replayed: batches and masses are those of the CPU."""
    gpu, cpu = loaders(dataset, selection="prioritized:beta_steps=20")
    batches = gpu.static_batch(ahead=True)
    feedback, host = DeviceFeedback(gpu, batches), LossFeedback(cpu)

    def losses_of(batch: Any) -> torch.Tensor:
        names: torch.Tensor = batch.segments
        return (names[:, 0] * 7 + names[:, 1] * 3 + 1).remainder(23) / 8

    def step() -> None:
        batches.begin()
        feedback.importance()
        feedback.update(batches.batch, losses_of(batches.batch))
        batches.end()

    with feedback.pause_updates():
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    batches.set_step(0)
    for _ in range(100):
        graph.replay()
        batch = next(cpu)
        same(batches.batch, batch)
        np.testing.assert_array_max_ulp(
            feedback._weights.cpu().numpy(), host.importance().numpy(), maxulp=1
        )
        host.update(batch, losses_of(batch))
    assert gpu.loss_sampler is not None and cpu.loss_sampler is not None
    assert gpu.loss_sampler.updates == cpu.loss_sampler.updates == 100
    mine, theirs = gpu.loss_sampler.state(), cpu.loss_sampler.state()
    assert {k: v.tobytes() for k, v in mine.items()} == {k: v.tobytes() for k, v in theirs.items()}


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_feedback_of_batches_that_are_launched(dataset: Any) -> None:
    """Weights and masses of the CPU; only the first update and the 65th wait for the GPU."""
    gpu, cpu = loaders(dataset, selection="prioritized:beta_steps=20")
    feedback, exact, host = LossFeedback(gpu), LossFeedback(gpu, exact=True), LossFeedback(cpu)
    for step in range(70):
        batch, other = next(gpu), next(cpu)
        expected = host.importance()
        assert torch.equal(exact.importance().cpu(), expected)
        losses = (batch.segments * batch.segments.new_tensor([7, 3])).sum(1).remainder(23) / 8
        values = losses.cpu()
        torch.cuda.set_sync_debug_mode("default" if step % 64 == 0 else "error")
        try:
            weights = feedback.importance()
            feedback.update(batch, losses)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        same(batch, other)
        np.testing.assert_array_max_ulp(weights.cpu().numpy(), expected.numpy(), maxulp=1)
        host.update(other, values)
    assert gpu.loss_sampler is not None and cpu.loss_sampler is not None
    mine, theirs = gpu.loss_sampler.state(), cpu.loss_sampler.state()
    assert {k: v.tobytes() for k, v in mine.items()} == {k: v.tobytes() for k, v in theirs.items()}
