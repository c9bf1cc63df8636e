"""The kernels with their blocks and threads, on the CPU: how the work is shared, in any order."""

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from gear_offline.kernels.gather import Padding
from gear_offline.kernels.gather_gpu import StaticFill
from gear_offline.kernels.select import DeviceSelect
from gear_offline.sampling import make_sampler
from gear_offline.tables.table import TableOptions, build_table
from tests.gpu_support import NEEDS_CUPY, ON_GPU
from tests.kernels_on_cpu import ThreadedKernels, compile_threads, gpu_gather, on_cpu
from tests.sampling_support import facts, prioritized
from tests.segment_oracle import MemoryTable, bits, cpu_gather, memory_table

LENGTHS = [4, 1, 30, 7, 19, 2, 23, 11]
SPAN = 5
SHAPES = [(1, "float32", 7), (3, "float32", 40), (40, "float64", 9), (3, "float32", 600)]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ThreadedKernels:
    return compile_threads(tmp_path_factory.mktemp("threads"), "sample")


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("name", ["uniform_steps", "shuffled_epochs", "prioritized"])
def test_fills(kernels: ThreadedKernels, name: str, padding: Padding) -> None:
    """Of every kernel: 16 or 32 lanes a task, and a warp for many segments."""
    kernels.launched.clear()
    for width, rewards, batch in SHAPES:
        table = memory_table(LENGTHS, SPAN, width=width, rewards=rewards)
        sampler, reference = (make_sampler(name, facts(LENGTHS)) for _ in range(2))
        gather = cpu_gather(table, context_length=SPAN, padding=padding)
        with on_cpu(kernels):
            engine = gpu_gather(table, sampler, seed=9, padding=padding, rank_batch=batch,
                                  context_length=SPAN)  # fmt: skip
            drawn = reference.sample(9, 2**33 - 1, 2, batch)
            assert bits(engine.draw_and_gather(2**33 - 1, 2)) == bits(gather.gather(drawn))
            fill = StaticFill(engine, chances=name == "prioritized")
            fill.set_step(2**32 - 1)
            for step in range(2**32 - 1, 2**32 + 1):
                fill.enqueue()
                drawn = reference.sample(9, step, 1, batch)[0]
                assert int(fill.counter) == step + 1, "the last block has counted, once"
                assert bits(fill.windows) == bits(gather.gather(drawn))
                if fill.chances is not None:
                    assert fill.chances.numpy().tobytes() == drawn.probability.tobytes()
    used = {kernel for kernel, _ in kernels.launched}
    source = "fill" if name == "uniform_steps" else "sample"
    assert used >= {f"{source}_{suffix}" for suffix in ("16", "32", "many")}
    assert max(blocks for _, blocks in kernels.launched) > 4


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("kind", ["wide", "bytes", "stacks"])
def test_long_windows_odd_widths_and_leads(
    kernels: ThreadedKernels, kind: str, padding: Padding
) -> None:
    """Windows in several pieces, copied and cast; words of one byte; rows in front of a window."""
    total, generator = sum(LENGTHS), np.random.default_rng(2)
    columns: dict[str, Any] = {
        "observations": generator.normal(size=(total, 700)).astype(np.float16),
        "actions": generator.normal(size=(total, 900)).astype(np.float32),
        "rewards": generator.normal(size=total),
        "frames": generator.integers(0, 256, size=(total, 5, 7), dtype=np.uint8),
    }
    options: dict[str, Any] = {}
    if kind == "bytes":
        columns["observations"] = columns["observations"][:, :3]
        columns["actions"] = generator.integers(0, 9, size=total).astype(np.int16)
        options["extra_columns"] = ["frames"]
    elif kind == "stacks":
        columns["observations"] = columns.pop("frames")
        columns["actions"] = columns["actions"][:, :2]
        options["frame_stack"] = 3
    table = build_table(MemoryTable(columns, LENGTHS), TableOptions(context_length=SPAN, **options))
    sampler = make_sampler("uniform_steps", facts(LENGTHS))
    gather = cpu_gather(table, context_length=SPAN, padding=padding)
    with on_cpu(kernels):
        engine = gpu_gather(table, sampler, seed=9, padding=padding, rank_batch=30,
                              context_length=SPAN)  # fmt: skip
        drawn = sampler.sample(9, 5, 2, 30)
        assert bits(engine.draw_and_gather(5, 2)) == bits(gather.gather(drawn))
    pieces = engine._job["group"]["pieces"][0, : len(table.groups)]
    assert (pieces.max() > 3) == (kind == "wide")
    assert (engine._job["group"]["history"].max() == 2) == (kind == "stacks")


@pytest.mark.parametrize("where", ["threads", pytest.param("gpu", marks=[*ON_GPU, NEEDS_CUPY])])
@pytest.mark.parametrize("count", [1, 64, 3000, 8193])
@pytest.mark.parametrize("episodes", [1, 16, 300, 3000])
def test_updates(kernels: ThreadedKernels, where: str, count: int, episodes: int) -> None:
    """Masses, sums and draws after updates with many repeated names, refused ones among them."""
    if where == "gpu":
        count, episodes = 25 * count, 7 * episodes
    lengths = np.array([1 + (7 * e) % 29 for e in range(episodes)], dtype=np.int64)
    generator = np.random.default_rng(count)
    sampler, reference = prioritized(lengths, alpha=0.7), prioritized(lengths, alpha=0.7)
    cuda = nullcontext(torch.device("cuda", 0))
    with on_cpu(kernels) if where == "threads" else cuda as device:
        tree = sampler.on_device(device)
        for turn in range(3):
            chosen = generator.integers(0, episodes, size=count)
            names = np.stack([chosen, generator.integers(0, lengths[chosen])], 1)
            losses = np.exp(generator.uniform(-30, 5, size=count)).astype(np.float32)
            bad, wrong = losses.copy(), names.copy()
            bad[-1] = [np.nan, np.inf, -1.0][turn]
            wrong[-1] = [episodes, 0] if turn else [0, -1]
            tree.update_from_host(names, bad)
            tree.update_from_host(wrong, losses)
            with tree.paused():
                tree.update_from_host(names, losses)
                tree.update_from_host(names, bad)  # and the next one is not refused for it
            tree.update_from_host(names, losses)
            reference.update(names, losses)
            assert (tree.updates, tree.refused) == (turn + 1, 2 * (turn + 1))
            assert np.array_equal(sampler.masses, reference.masses)
            sums = [level.clone() for level in tree._levels]
            tree.add_up()
            assert all(torch.equal(a, b) for a, b in zip(sums, tree._levels, strict=True))
        select = DeviceSelect(sampler.gpu, sampler.index.offsets, device=device, global_batch=500)
        found = select.segments(seed=3, first_step=1, steps=2)
    expected = reference.sample(3, 1, 2, 500)
    assert np.array_equal(found.episodes, expected.episodes)
    assert np.array_equal(found.starts, expected.starts)
    assert found.probability.tobytes() == expected.probability.tobytes()
