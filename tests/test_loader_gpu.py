"""The loader on a GPU: the bits of the CPU's batches, for every tier, side and sampler."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from gear_offline.errors import UnavailableError
from gear_offline.kernels.gather import Padding
from gear_offline.loaders import static_batch
from gear_offline.loaders.batch import Batch
from gear_offline.loaders.loader import GearLoader
from tests.gpu_support import NEEDS_CUPY, ON_GPU, same
from tests.image_support import image_columns
from tests.support import make_dataset
from tests.test_elastic import open_ranks

pytestmark = [*ON_GPU, NEEDS_CUPY]
LENGTHS = [4, 1, 30, 7, 19, 2, 60]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_dataset(tmp_path_factory.mktemp("gpu"), LENGTHS)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Any:
    columns = image_columns(sum(LENGTHS), (84, 84))
    return make_dataset(tmp_path_factory.mktemp("frames"), LENGTHS, columns=columns)


def loaders(dataset: Any, **options: Any) -> tuple[GearLoader, GearLoader]:
    special = {name: options.pop(name) for name in ("placement", "hbm_budget") if name in options}
    options = {"batch_size": 33, "context_length": 8, "seed": 2**63 + 5, **options}
    gpu = GearLoader(dataset, device="cuda", engine="on", **special, **options)
    return gpu, GearLoader(dataset, device="cpu", **options)


def half_of(dataset: Any) -> int:
    table = GearLoader(dataset, batch_size=1, device="cpu").table
    return table.row_bytes * sum(LENGTHS) // 2


@pytest.mark.parametrize(
    "selection", ["uniform_steps", "return_weighted", "shuffled_epochs", "fifo"]
)
@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("tier", ["hbm", "host", "both"])
def test_batches_are_those_of_the_cpu(
    dataset: Any, selection: str, padding: Padding, tier: str
) -> None:
    """Blocks of steps, any step, and batches of captured graphs, drawn by the GPU or the host."""
    where = {"hbm_budget": half_of(dataset)} if tier == "both" else {"placement": tier}
    options: dict[str, Any] = {"selection": selection, "padding": padding, "normalize_states": True}
    gpu, cpu = loaders(dataset, **options, **where)
    for _ in range(700):  # more than one block of steps
        same(next(gpu), next(cpu))
    same(gpu.batch_at(2**40), cpu.batch_at(2**40))
    assert gpu.state_dict() == cpu.state_dict()
    batches = gpu.static_batch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batches.enqueue()
    batches.set_step(2**33 - 2)  # the step's high word changes on the way
    for step in range(2**33 - 2, 2**33 + 1100):
        batches.prepare()
        graph.replay()
        if step % 100 < 3:
            same(batches.batch, cpu.batch_at(step))


@pytest.mark.parametrize("tier", ["hbm", "host", "both"])
@pytest.mark.parametrize("selection", ["uniform_steps", "prioritized"])
def test_goals(dataset: Any, tier: str, selection: str) -> None:
    """Drawn by the host and gathered by the GPU, with the segments of a loader without."""
    where = {"hbm_budget": half_of(dataset)} if tier == "both" else {"placement": tier}
    goals = {"current": 0.1, "future": 0.5, "final": 0.1, "random": 0.3, "discount": 0.9}
    options: dict[str, Any] = {"selection": selection, "normalize_states": True}
    gpu, cpu = loaders(dataset, **options, **where, goals=goals)
    (plain, _), device = loaders(dataset, **options, **where), torch.device("cuda")
    for _ in range(3 if selection == "prioritized" else 700):
        batch = next(gpu)
        assert batch.goals is not None and batch.goals.device.type == device.type
        same(batch, next(cpu))
        assert torch.equal(batch.segments, next(plain).segments)
    assert gpu.state_dict() == cpu.state_dict()
    with pytest.raises(UnavailableError, match="the host draws goals"):
        gpu.static_batch()


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("tier", ["hbm", "host", "both"])
@pytest.mark.parametrize("stack", [2, 4])
def test_stacks_of_frames(images: Any, padding: Padding, tier: str, stack: int) -> None:
    where = {"hbm_budget": half_of(images)} if tier == "both" else {"placement": tier}
    gpu, cpu = loaders(images, padding=padding, frame_stack=stack, **where)
    for _ in range(60):
        same(next(gpu), next(cpu))
    off = GearLoader(images, batch_size=33, context_length=8, seed=2**63 + 5, padding=padding,
                     frame_stack=stack, device="cuda", engine="off")  # fmt: skip
    same(next(off), cpu.batch_at(0))


@pytest.mark.parametrize("selection", ["uniform_steps", "fifo"])
@pytest.mark.parametrize("ahead", [True, False])
def test_a_graph_takes_the_next_step_at_each_replay(
    dataset: Any, ahead: bool, selection: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(static_batch, "AHEAD_BYTES", 0)
    gpu, cpu = loaders(dataset, placement="host", selection=selection)
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
    where = {"placement": "host" if ahead else "hbm", "selection": selection}
    small, large = (make_dataset(tmp_path / n, LENGTHS[: int(n)]) for n in ("5", "7"))
    gpu, _ = loaders(small, **where)
    batches = gpu.static_batch(ahead=ahead, live=True)
    for _ in range(3):
        batches.enqueue()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batches.enqueue()
    batches.set_step(0)
    for dataset, steps in ((small, range(40)), (large, range(40, 1200))):
        loader, cpu = loaders(dataset, start_step=steps[0], **where)
        assert loader.hand_over(batches)
        for step in steps:
            batches.prepare()
            graph.replay()
            if step % 7 == 0:
                same(batches.batch, cpu.batch_at(step))
    assert not gpu.hand_over(gpu.static_batch()), "not a live one"


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("span", [1, 8, 40])
def test_many_short_windows(dataset: Any, padding: Padding, span: int) -> None:
    for count in (70_001, 300_000):
        gpu, cpu = loaders(dataset, batch_size=count, padding=padding, context_length=span)
        same(gpu.batch_at(1), cpu.batch_at(1))


def test_without_an_engine_batches_are_copied_and_a_static_one_is_refused(dataset: Any) -> None:
    off = GearLoader(dataset, batch_size=33, context_length=8, seed=2**63 + 5, device="cuda",
                     engine="off")  # fmt: skip
    assert off.engine is None
    with pytest.raises(UnavailableError, match="the GPU does not gather") as caught:
        off.static_batch()
    assert caught.value.code == "DEVICE" and "engine='on'" in caught.value.remedy
    gpu, _ = loaders(dataset)
    same(next(off), next(gpu))


def test_rows_that_the_gpu_holds_are_given_back(dataset: Any) -> None:
    """The host's table was kept for life."""
    gpu, cpu = loaders(dataset, placement="hbm")
    assert gpu.table.owned_bytes == 0 < cpu.table.owned_bytes
    both, _ = loaders(dataset, hbm_budget=half_of(dataset))
    assert both.table.owned_bytes == cpu.table.owned_bytes


def test_threads_that_have_not_used_the_gpu_before(dataset: Any) -> None:
    """A thread's first call is a launch: with memory from torch's cache nothing else is called."""
    gpu, cpu = loaders(dataset)
    expected = [cpu.batch_at(step) for step in range(3)]
    same(gpu.batch_at(0), expected[0])
    for batch in expected:
        with ThreadPoolExecutor(1) as pool:
            same(pool.submit(next, gpu).result(), batch)


@pytest.mark.parametrize("placement", ["hbm", "host"])
@pytest.mark.parametrize("padding", ["right", "left"])
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
    assert all(rank.rows.segments.far_segments for rank in ranks)  # type: ignore[union-attr]


def take(batch: Batch, slots: Any) -> Batch:
    """Return some slots of a batch."""
    return batch._map(lambda tensor: tensor[torch.from_numpy(slots)])
