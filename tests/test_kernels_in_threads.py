"""The kernels with their blocks and threads, on the CPU: how the work is shared, in any order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gear_offline.kernels import adamw as kernels_adamw
from gear_offline.kernels.adamw import DeviceAdamW, Update, enqueue_together
from gear_offline.kernels.gather import Padding
from gear_offline.kernels.select import DeviceSelect
from gear_offline.sampling import make_sampler
from gear_offline.tables.table import Table, build_table
from tests.kernels_on_cpu import ThreadedKernels, compile_threads, gpu_gather, on_cpu
from tests.sampling_support import facts, prioritized
from tests.segment_oracle import MemoryTable, cpu_gather

LENGTHS = [4, 1, 30, 7, 19, 2, 23, 11]
SPAN = 5
SHAPES = [(1, "float32", 7), (3, "float32", 40), (40, "float64", 9), (3, "float32", 600)]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ThreadedKernels:
    return compile_threads(tmp_path_factory.mktemp("threads"), "sample")


@pytest.fixture(scope="module")
def optimizer(tmp_path_factory: pytest.TempPathFactory) -> ThreadedKernels:
    return compile_threads(tmp_path_factory.mktemp("threads"), "adamw")


def table_of(width: int, rewards: str = "float32") -> Table:
    total, generator = sum(LENGTHS), np.random.default_rng(width)
    columns: dict[str, Any] = {
        "observations": generator.normal(size=(total, width)).astype(np.float32),
        "actions": generator.normal(size=(total, 2)).astype(np.float32),
        "rewards": generator.normal(size=total).astype(rewards),
    }
    return build_table(MemoryTable(columns, LENGTHS), context_length=SPAN)


def bits(windows: Any) -> list[bytes]:
    tensors = [*windows.buffers, windows.timesteps, windows.attention_mask, windows.segments]
    return [tensor.numpy().tobytes() for tensor in tensors]


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("name", ["uniform_steps", "shuffled_epochs", "prioritized"])
def test_fills(kernels: ThreadedKernels, name: str, padding: Padding) -> None:
    """Of every kernel: 16 or 32 lanes a task, and a warp for many segments."""
    kernels.launched.clear()
    for width, rewards, batch in SHAPES:
        table = table_of(width, rewards)
        law, twin = (make_sampler(name, facts(LENGTHS)) for _ in range(2))
        gather = cpu_gather(table, context_length=SPAN, padding=padding)
        with on_cpu(kernels):
            engine = gpu_gather(table, law, seed=9, padding=padding, rank_batch=batch,
                                  context_length=SPAN)  # fmt: skip
            drawn = twin.sample(9, 2**33 - 1, 2, batch)
            assert bits(engine.draw_and_gather(2**33 - 1, 2)) == bits(gather.gather(drawn))
            fill = engine.static(chances=name == "prioritized")
            fill.set_step(2**32 - 1)
            for step in range(2**32 - 1, 2**32 + 1):
                fill.enqueue()
                drawn = twin.sample(9, step, 1, batch)[0]
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
    table = build_table(MemoryTable(columns, LENGTHS), context_length=SPAN, **options)
    law = make_sampler("uniform_steps", facts(LENGTHS))
    gather = cpu_gather(table, context_length=SPAN, padding=padding)
    with on_cpu(kernels):
        engine = gpu_gather(table, law, seed=9, padding=padding, rank_batch=30,
                              context_length=SPAN)  # fmt: skip
        drawn = law.sample(9, 5, 2, 30)
        assert bits(engine.draw_and_gather(5, 2)) == bits(gather.gather(drawn))
    pieces = engine._job["group"]["pieces"][0, : len(table.groups)]
    assert (pieces.max() > 3) == (kind == "wide")
    assert (engine._job["group"]["history"].max() == 2) == (kind == "stacks")


def test_named_segments_that_are_not_in_the_table(kernels: ThreadedKernels) -> None:
    table = table_of(3)
    with on_cpu(kernels):
        law = make_sampler("uniform_steps", facts(LENGTHS))
        engine = gpu_gather(table, law, seed=9, rank_batch=4, context_length=SPAN)
        pairs = [(0, 0), (0, 99), (9**9, 0), (-1, 0), (1, -(2**62))]
        named = torch.tensor([[*pair, SPAN, -1] for pair in pairs])
        windows = engine.allocate((5,))
        engine.gather_into(windows, named)
    assert windows.attention_mask.sum(1).tolist() == [4, 0, 0, 0, 0]
    assert all(bool((buffer[1:] == 0).all()) for buffer in windows.buffers)
    assert int(engine._ticket[1]) > 1


@pytest.mark.parametrize("count", [1, 64, 3000, 8193])
@pytest.mark.parametrize("episodes", [1, 16, 300, 3000])
def test_updates(kernels: ThreadedKernels, count: int, episodes: int) -> None:
    """Masses, sums and draws after updates with many repeated names, refused ones among them."""
    lengths = np.array([1 + (7 * e) % 29 for e in range(episodes)], dtype=np.int64)
    generator = np.random.default_rng(count)
    law, twin = prioritized(lengths, alpha=0.7), prioritized(lengths, alpha=0.7)
    with on_cpu(kernels) as device:
        tree = law.on_device(device)
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
            twin.update(names, losses)
            assert (tree.updates, tree.refused) == (turn + 1, 2 * (turn + 1))
            assert np.array_equal(law.masses, twin.masses)
            sums = [level.clone() for level in tree._levels]
            tree.add_up()
            assert all(torch.equal(a, b) for a, b in zip(sums, tree._levels, strict=True))
        select = DeviceSelect(law.gpu, law.index.offsets, device=device, global_batch=500)
        found = select.segments(seed=3, first_step=1, steps=2)
    expected = twin.sample(3, 1, 2, 500)
    assert np.array_equal(found.episodes, expected.episodes)
    assert np.array_equal(found.starts, expected.starts)
    assert found.probability.tobytes() == expected.probability.tobytes()


@pytest.mark.parametrize("count", [1, 33, 1024, 3000])
def test_importance(kernels: ThreadedKernels, count: int) -> None:
    law = prioritized([50] * 100, beta=0.4, beta_steps=1000)
    chances = np.exp(np.random.default_rng(1).uniform(-25, 0, size=count))
    out, counter = torch.empty(count), torch.tensor([501])
    with on_cpu(kernels) as device:
        tree = law.on_device(device)
        tree.importance(torch.from_numpy(chances), counter=counter, beta=0.4, beta_steps=1000,
                        out=out)  # fmt: skip
    expected = law.importance(chances, step=500).astype(np.float32)
    np.testing.assert_array_max_ulp(out.numpy(), expected, maxulp=1)


class Beside:
    """Copies of tensors that begin `offset` elements after an address that loads like."""

    def __init__(self, offset: int) -> None:
        self._offset, self._buffers = offset, list[torch.Tensor]()

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        buffer = torch.full((self._offset + tensor.numel() + 1,), 7.0, dtype=tensor.dtype)
        self._buffers.append(buffer)
        found = buffer[self._offset : -1]
        found.copy_(tensor)
        return found

    def check(self) -> None:
        for buffer in self._buffers:
            assert (buffer[: self._offset] == 7).all() and buffer[-1] == 7, "written beside"


@pytest.mark.parametrize("shadowed", [False, True])
@pytest.mark.parametrize(
    ("sizes", "group"),
    [([1], 4), ([3, 7000, 128, 999], 4), ([20_001, 5], 7), ([1023, 1025, 4], 1)],
)
def test_adamw(
    optimizer: ThreadedKernels,
    monkeypatch: pytest.MonkeyPatch,
    sizes: list[int],
    group: int,
    shadowed: bool,
) -> None:
    """As PyTorch's, the same bits in any order and at any address, and counted once a step."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(kernels_adamw, "LEAST_GROUP", group)
    options: dict[str, Any] = {"betas": (0.9, 0.99), "weight_decay": 0.1}
    rates, results = torch.tensor([1e-3, 2e-3, 1e-2]), []
    # of gradients, weights, shadows: whole loads of everything, of some, of nothing
    for offsets in [(0, 0, 0), (1, 0, 0), (0, 1, 2), (3, 2, 1)]:
        beside = [Beside(offset) for offset in offsets]
        generator = torch.Generator().manual_seed(0)
        weights = [
            nn.Parameter(beside[1].place(torch.randn(size, generator=generator))) for size in sizes
        ]
        plain = [nn.Parameter(w.detach().clone()) for w in weights]
        shadows = (
            [nn.Parameter(beside[2].place(w.detach().bfloat16())) for w in weights]
            if shadowed
            else None
        )
        used = weights if shadows is None else shadows
        adamw = torch.optim.AdamW(plain, **options)
        index, row = (torch.zeros(1, dtype=torch.int64) for _ in range(2))
        window = torch.full((4, 2), -1.0)
        with on_cpu(optimizer):
            mine = DeviceAdamW(weights, rates, clip_norm=0.5, shadows=shadows, **options)
            for step, rate in enumerate(rates.tolist()):
                for parameter, other in zip(used, plain, strict=True):
                    drawn = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
                    parameter.grad = beside[0].place(drawn)
                    other.grad = drawn.float()
                norm = nn.utils.clip_grad_norm_(plain, 0.5)
                adamw.param_groups[0]["lr"] = rate
                adamw.step()
                mine.enqueue(torch.tensor(float(step)), index=index, row=row, window=window)
                assert (int(index), int(row)) == (step + 1, step + 1)
                assert window[step].tolist() == [step, pytest.approx(float(norm), rel=1e-5)]
        assert window[-1].tolist() == [-1, -1] and mine.steps.tolist() == [3.0] * len(sizes)
        for one, other in zip(weights, plain, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-7)
        for one, two in zip(weights, shadows or (), strict=False):
            assert torch.equal(one.detach().bfloat16(), two)
        for each in beside:
            each.check()
        results.append([*(w.detach().clone() for w in weights), *mine.first, *mine.second, window])
    for found in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], found, strict=True))


def test_norm_of_many_sums(optimizer: ThreadedKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than there are threads in a block, of pieces that few threads have a part of."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(kernels_adamw, "LEAST_GROUP", 1)
    monkeypatch.setattr(kernels_adamw, "PIECE", 30)
    weights = [nn.Parameter(torch.zeros(9000))]
    weights[0].grad = torch.randn(9000, generator=torch.Generator().manual_seed(0))
    place, window = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 2)
    row = place.clone()
    with on_cpu(optimizer):
        optimizer.launched.clear()
        mine = DeviceAdamW(
            weights, torch.zeros(1), betas=(0.5, 0.5), weight_decay=0.0, clip_norm=None
        )
        mine.enqueue(torch.tensor(2.0), index=place, row=row, window=window)
    assert optimizer.launched[0] == ("adamw_norm", 301)
    assert window[0].tolist() == [2.0, pytest.approx(float(weights[0].grad.norm()), rel=1e-6)]
    torch.testing.assert_close(mine.first[0], weights[0].grad / 2)
    assert int(place) == int(row) == 1 and (weights[0] == 0).all()


@pytest.mark.parametrize("count", [1, 3, 17])
def test_adamw_of_several_models_is_that_of_each(
    optimizer: ThreadedKernels, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Bit for bit, with rates, decay, limits, steps and rows of their own; 17 need two launches."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    sizes, results = [1500, 7], []
    for together in (False, True):
        generator = torch.Generator().manual_seed(0)
        models, updates = [], []
        with on_cpu(optimizer):
            for number in range(count):
                weights = [nn.Parameter(torch.randn(size, generator=generator)) for size in sizes]
                rates = torch.tensor([1e-3, 2e-3, 1e-2]) * (number + 1)
                limit = None if number % 2 else 0.5
                adamw = DeviceAdamW(
                    weights, rates, betas=(0.9, 0.99), weight_decay=0.1 * number, clip_norm=limit
                )
                places = [torch.full((1,), n, dtype=torch.int64) for n in (number % 2, number % 3)]
                window, loss = torch.full((4, 2), -1.0), torch.tensor(float(number))
                models.append((weights, adamw, window, places))
                updates.append(Update(adamw, loss, places[0], places[1], window))
            for _ in range(2):
                for number, size in enumerate(sizes):  # as stacked models give them: views
                    stacked = torch.randn(count, size, generator=generator)
                    for (weights, *_), drawn in zip(models, stacked, strict=True):
                        weights[number].grad = drawn if together else drawn.clone()
                if together:
                    enqueue_together(updates)
                    continue
                for each in updates:
                    each.adamw.enqueue(
                        each.loss, index=each.index, row=each.row, window=each.window
                    )
        results.append(
            [
                [*weights, *adamw.first, *adamw.second, adamw.steps, window, *places]
                for weights, adamw, window, places in models
            ]
        )
    for number, (alone, beside) in enumerate(zip(*results, strict=True)):
        assert all(torch.equal(a, b) for a, b in zip(alone, beside, strict=True)), number
