"""The GPU engine against the CPU loader: the same bits, for every law, tier, side and dtype."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gear_offline.errors import InputError, UnavailableError
from gear_offline.kernels.gather import CpuGather, Padding
from gear_offline.loaders import device_batches
from gear_offline.loaders.batch import Batch
from gear_offline.loaders.loader import GearLoader
from gear_offline.sampling import Segments, make_sampler
from gear_offline.tables.table import Table, build_table
from tests.gpu_support import NEEDS_CUPY, ON_GPU
from tests.image_support import image_columns
from tests.segment_oracle import MemoryTable
from tests.support import make_dataset

pytestmark = [*ON_GPU, NEEDS_CUPY]
LENGTHS = [4, 1, 30, 7, 19, 2, 60]


def same(one: Batch, other: Batch) -> None:
    mine = one.model_inputs() | dict(one.extras) | {"segments": one.segments}
    theirs = other.model_inputs() | dict(other.extras) | {"segments": other.segments}
    assert list(mine) == list(theirs)
    for name, tensor in mine.items():
        left, right = tensor.cpu().contiguous(), theirs[name].cpu().contiguous()
        assert left.dtype == right.dtype and left.shape == right.shape, name
        assert left.numpy().tobytes() == right.numpy().tobytes(), name


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_dataset(tmp_path_factory.mktemp("gpu"), LENGTHS)


def loaders(dataset: Any, **options: Any) -> tuple[GearLoader, GearLoader]:
    special = {name: options.pop(name) for name in ("placement", "hbm_budget") if name in options}
    options = {"batch_size": 33, "context_length": 8, "seed": 2**63 + 5, **options}
    gpu = GearLoader(dataset, device="cuda", engine="on", **special, **options)
    assert gpu.engine is not None
    return gpu, GearLoader(dataset, device="cpu", **options)


@pytest.mark.parametrize(
    "law", ["uniform_steps", "uniform_episodes", "return_weighted", "top_percent"]
)
@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("placement", ["hbm", "host"])
def test_batches_are_those_of_the_cpu(
    dataset: Any, law: str, padding: Padding, placement: str
) -> None:
    options = {"selection": law, "padding": padding, "normalize_states": True}
    gpu, cpu = loaders(dataset, placement=placement, **options)
    for _ in range(700):  # more than one block of steps
        same(next(gpu), next(cpu))
    same(gpu.batch_at(2**40), cpu.batch_at(2**40))
    assert gpu.state_dict() == cpu.state_dict()


def test_both_tiers_in_one_launch(dataset: Any) -> None:
    bytes_a_step = GearLoader(dataset, batch_size=1, device="cpu").table.groups[0].width * 4
    budget = bytes_a_step * sum(LENGTHS) // 2
    gpu, cpu = loaders(dataset, hbm_budget=budget)
    assert gpu.engine is not None
    placed = gpu.engine.placed
    assert placed.hbm_bytes and placed.host_bytes
    for _ in range(50):
        same(next(gpu), next(cpu))


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("budget", [0, 2000])
@pytest.mark.parametrize("batched", [True, False])
def test_long_windows_by_the_copy_engine(
    dataset: Any, padding: Padding, budget: int, batched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gear_offline.kernels import copy_engine

    monkeypatch.setattr(copy_engine, "LEAST_BYTES", 8 * 4 * 4)  # some columns, not all
    options: dict[str, Any] = {"padding": padding, "hbm_budget": budget}
    gpu, cpu = loaders(dataset, **options)
    engine = gpu.engine
    assert engine is not None and engine.placed.host_bytes
    assert 0 < len(engine.long_stores) < len(engine.placed.groups)
    if not batched:
        assert engine._long._engine is not None
        monkeypatch.setattr(engine._long._engine, "_batch", None)
    for _ in range(300):
        same(next(gpu), next(cpu))
    segments = cpu.segments_at(5)
    expected, found = cpu._gather.fill(segments), engine.gather(segments)
    for mine, theirs in zip(found.buffers, expected.buffers, strict=True):
        assert mine.cpu().numpy().tobytes() == theirs.numpy().tobytes()


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("tier", ["hbm", "host", "both"])
@pytest.mark.parametrize("frame", [(84, 84), (7, 5), (4, 4, 3)])
@pytest.mark.parametrize("stack", [2, 4])
@pytest.mark.parametrize("copies", [True, False])
def test_stacks_of_frames(
    tmp_path: Path,
    padding: Padding,
    tier: str,
    frame: tuple[int, ...],
    stack: int,
    copies: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from gear_offline.kernels import copy_engine

    if copies:
        monkeypatch.setattr(copy_engine, "LEAST_BYTES", 8 * math.prod(frame))
    images = make_dataset(tmp_path, LENGTHS, columns=image_columns(sum(LENGTHS), frame))
    where = {"hbm_budget": 40 * math.prod(frame)} if tier == "both" else {"placement": tier}
    gpu, cpu = loaders(images, padding=padding, frame_stack=stack, **where)
    assert gpu.engine is not None
    assert bool(gpu.engine.long_stores) == (copies and tier != "hbm")
    for _ in range(60):
        one, other = next(gpu), next(cpu)
        same(one, other)
    assert one.states.shape == (33, 8, stack, *frame)
    assert one.states.stride(1) == one.states.stride(2) == math.prod(frame)  # a view
    batches = gpu.device_batches()
    for step in range(60, 64):
        batches.enqueue()
        same(batches.batch, cpu.batch_at(step))
    assert cpu.batch_at(0).pin_memory().states.is_pinned()
    off = GearLoader(images, batch_size=33, context_length=8, seed=2**63 + 5, padding=padding,
                     frame_stack=stack, device="cuda", engine="off")  # fmt: skip
    same(next(off), cpu.batch_at(0))


@pytest.mark.parametrize("dtype", ["float16", "float64", "int8", "uint16", "int64", "bool"])
@pytest.mark.parametrize("padding", ["right", "left"])
def test_every_dtype_is_cast_as_on_the_cpu(dtype: str, padding: Padding) -> None:
    from gear_offline.kernels.engine import DeviceEngine
    from gear_offline.tables.placement import place_table

    table = odd_table(dtype)
    segments = make_sampler("uniform_steps", table.episodes).sample(3, 9, 1, 257)[0]
    placed = place_table(table, device="cuda", placement="hbm")
    engine = DeviceEngine(
        placed,
        make_sampler("uniform_steps", table.episodes),
        seed=3,
        batch_size=257,
        context_length=6,
        padding=padding,
    )
    expected = CpuGather(table, context_length=6, padding=padding).fill(segments)
    for found in (engine.gather(segments), engine.fill(first_step=9, steps=1)):
        for mine, theirs in zip(found.buffers, expected.buffers, strict=True):
            assert mine.cpu().numpy().tobytes() == theirs.numpy().tobytes()
    with pytest.raises(InputError, match="outside the table"):
        engine.gather(
            Segments(episodes=np.array([0]), starts=np.array([99]), probability=np.ones(1))
        )
    wrong = torch.tensor([[0, 0, 9**9], [0, 99, 0]], device="cuda")
    windows = engine.allocate((3,))
    engine.gather_into(windows, wrong)
    assert windows.attention_mask.sum(1).tolist()[1:] == [0, 0]
    with pytest.raises(InputError, match="outside the table"):
        engine.check()
    engine.check()


def odd_table(dtype: str) -> Table:
    total, generator = sum(LENGTHS), np.random.default_rng(1)
    wide = generator.integers(0, 2 if dtype == "bool" else 100, size=(total, 300))
    columns = {
        "observations": (wide / 3 - 9).astype(dtype) if dtype[0] == "f" else wide.astype(dtype),
        "actions": generator.integers(0, 9, size=total).astype(np.int32),
        "rewards": generator.normal(size=total),
        "frames": generator.integers(0, 256, size=(total, 5, 7), dtype=np.uint8),
        "odd": wide[:, :3].astype(dtype),
    }
    return build_table(
        MemoryTable(columns, LENGTHS),
        context_length=6,
        normalize_states=True,
        extra_columns=["frames", "odd"],
    )


@pytest.mark.parametrize("ahead", [True, False])
def test_a_graph_takes_the_next_step_at_each_replay(
    dataset: Any, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_batches, "AHEAD_BYTES", 0)
    gpu, cpu = loaders(dataset, placement="host")
    batches = gpu.device_batches(ahead=ahead)
    assert batches.ahead is ahead
    for _ in range(3):
        batches.enqueue()
    batches.set_step(2**33 - 2)  # the step's high word changes on the way
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batches.begin(timed=True)
        busy = torch.ones(1 << 22, device="cuda").sin().sum()  # something to do meanwhile
        batches.end(timed=True)
    batches.set_step(2**33 - 2)
    for step in range(2**33 - 2, 2**33 + 3):
        graph.replay()
        same(batches.batch, cpu.batch_at(step))
    assert torch.isfinite(busy)
    if ahead:
        assert 0 < batches.waited_seconds() < 1


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("span", [1, 8, 40])
def test_many_short_windows(dataset: Any, padding: Padding, span: int) -> None:
    options = {"padding": padding, "context_length": span}
    for count in (70_001, 300_000):
        gpu, cpu = loaders(dataset, batch_size=count, **options)
        assert gpu.engine is not None
        same(gpu.batch_at(1), cpu.batch_at(1))


def test_without_an_engine_batches_are_copied_and_a_batch_on_the_gpu_is_refused(
    dataset: Any,
) -> None:
    off = GearLoader(dataset, batch_size=4, device="cuda", engine="off")
    assert off.engine is None
    with pytest.raises(UnavailableError, match="the GPU alone does not gather") as caught:
        off.device_batches()
    assert caught.value.code == "ENGINE_OFF" and "engine='on'" in caught.value.remedy
    gpu, _ = loaders(dataset, batch_size=20)
    same(next(GearLoader(dataset, batch_size=20, context_length=8, seed=2**63 + 5,
                         device="cuda", engine="off")), next(gpu))  # fmt: skip


def test_chosen_segments_that_a_weighted_law_never_draws(dataset: Any) -> None:
    """The kernel searches up to the last episode with a weight; naming segments knows them all."""
    law = make_sampler("top_k", dataset, k=1)
    gpu, cpu = loaders(dataset, selection=law)
    assert gpu.engine is not None and isinstance(cpu._gather, CpuGather)
    everything = make_sampler("uniform_steps", dataset).sample(1, 0, 1, 200)[0]
    found, expected = gpu.engine.gather(everything), cpu._gather.fill(everything)
    gpu.engine.check()
    for mine, theirs in zip(found.buffers, expected.buffers, strict=True):
        assert torch.equal(mine.cpu(), theirs)


def test_windows_of_given_lengths(dataset: Any) -> None:
    gpu, cpu = loaders(dataset, padding="left")
    law = make_sampler("d3rlpy", dataset, context_length=8)
    assert gpu.engine is not None and isinstance(cpu._gather, CpuGather)
    named = law.sample(0, 0, 1, 400)[0]
    found, expected = gpu.engine.gather(named), cpu._gather.fill(named)
    for mine, theirs in zip(found.buffers, expected.buffers, strict=True):
        assert torch.equal(mine.cpu(), theirs)
    assert torch.equal(found.attention_mask.cpu(), expected.attention_mask)


def test_threads_that_have_not_used_the_gpu_before(dataset: Any) -> None:
    """A thread's first call is a launch: with memory from torch's cache nothing else is called."""
    gpu, cpu = loaders(dataset)
    expected = [cpu.batch_at(step) for step in range(3)]
    same(gpu.batch_at(0), expected[0])
    for batch in expected:
        with ThreadPoolExecutor(1) as pool:
            same(pool.submit(next, gpu).result(), batch)
