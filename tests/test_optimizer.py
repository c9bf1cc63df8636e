"""Clipping, AdamW and the learning rate: PyTorch's, and the kernel's own text on CPU threads.

`tests.kernels_on_cpu` runs the kernel's blocks and threads; the same steps on a GPU are at the end.
"""

# mypy: disable-error-code="no-untyped-call"
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gear_offline.config.sections import OptimizerSettings
from gear_offline.kernels import adamw as adamw_module
from gear_offline.kernels.adamw import (
    KINDS,
    DeviceAdamW,
    Schedule,
    Update,
    enqueue_together,
    laid_out_alike,
)
from gear_offline.training.optimizer import Optimizer
from tests.gpu_support import NEEDS_CUPY, NEEDS_GPU
from tests.kernels_on_cpu import Kernels, on_cpu
from tests.model_support import assert_same_state
from tests.support import Patch, one_error

# One rounding more or less in each operation, over a few steps.
CLOSE: Any = {"rtol": 2e-6, "atol": 2e-7}
SCHEDULE = Schedule(1e-2, warmup=2, steps=6, kind="linear")
OPTIONS: dict[str, Any] = {"betas": (0.9, 0.99), "weight_decay": 0.1, "clip_norm": 0.5}


def test_schedules() -> None:
    """``LambdaLR(lambda steps: min((steps + 1) / warmup_steps, 1))``, and then to near zero."""
    falling = [1 + math.cos(math.pi * k / 4) for k in range(4)]
    rates: list[tuple[Any, int, list[float]]] = [
        ("constant", 4, [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]),
        ("constant", 0, [2.0, 2.0]),
        ("linear", 2, [1.0, 2.0, 2.0, 1.5, 1.0, 0.5]),
        ("cosine", 2, [1.0, 2.0, *falling]),
    ]
    for kind, warmup, expected in rates:
        schedule = Schedule(2.0, warmup=warmup, steps=len(expected), kind=kind)
        assert [schedule.rate(n) for n in range(len(expected))] == pytest.approx(expected)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    found = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    found[0].bias.requires_grad_(False)
    return found


def steps_of(net: nn.Module, optimizer: Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        optimizer.zero_gradients()
        net(torch.full((5, 3), float(step))).square().mean().backward()
        optimizer.clip()
        optimizer.update(step)


def test_state_moves_to_another_optimizer_bit_for_bit() -> None:
    chosen = OptimizerSettings(warmup_steps=3)
    whole = network()
    steps_of(whole, Optimizer(whole, chosen, steps=9), 0, 9)
    first = network()
    optimizer = Optimizer(first, chosen, steps=9)
    steps_of(first, optimizer, 0, 4)
    saved = {name: tensor.clone() for name, tensor in optimizer.state().items()}
    assert "optimizer/exp_avg/0.weight" in saved
    assert not any("0.bias" in name for name in saved), "frozen parameters have no moments"
    second = network()
    second.load_state_dict(first.state_dict())
    resumed = Optimizer(second, chosen, steps=9)
    some = {name: saved[name] for name in saved if "1.bias" not in name}
    with pytest.raises(KeyError, match=r"1\.bias is missing"):
        resumed.load_state(some)
    resumed.load_state({**saved, "random/cpu": torch.zeros(1)})
    steps_of(second, resumed, 4, 9)
    assert_same_state(second, whole)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_steps_of_a_cpu_are_pytorchs_bit_for_bit(decay: float) -> None:
    """With two dtypes, and a parameter that gets no gradient in some steps."""
    chosen = OptimizerSettings(
        weight_decay=decay, betas=(0.8, 0.99), clip_norm=None, warmup_steps=3
    )
    source = torch.Generator().manual_seed(0)
    first = [torch.randn(shape, generator=source) for shape in [(), (7, 129), (3,), (64,)]]
    first.append(torch.randn(5, generator=source, dtype=torch.float64))
    own, theirs = (nn.ParameterList(nn.Parameter(w.clone()) for w in first) for _ in range(2))
    optimizer = Optimizer(own, chosen, steps=9)
    adamw = torch.optim.AdamW(theirs, betas=chosen.betas, weight_decay=decay, fused=True)
    for step in range(9):
        for number, (mine, plain) in enumerate(zip(own, theirs, strict=True)):
            drawn = torch.randn(plain.shape, generator=source, dtype=plain.dtype)
            mine.grad = plain.grad = None if (number, step % 3) == (2, 0) else drawn
        optimizer.update(step)
        adamw.param_groups[0]["lr"] = optimizer.rate(step)
        adamw.step()
    assert_same_state(own, theirs)
    for name, plain in theirs.named_parameters():
        for kind, value in adamw.state[plain].items():
            assert torch.equal(optimizer.state()[f"optimizer/{kind}/{name}"], value)


GROUPS: list[dict[str, Any]] = [  # of parameters 1 and 2, 3; what 0 and 4 have is the recipe's
    {"learning_rate": 3e-2, "weight_decay": 0.0, "clip_norm": None, "schedule": "cosine"},
    {"learning_rate": 1e-3, "betas": (0.5, 0.9), "clip_norm": 0.1, "warmup_steps": 0},
]


@pytest.mark.parametrize("where", ["cpu", "copy", "kernel", "copy and kernel"])
def test_groups_take_the_steps_of_pytorchs_groups(
    kernels: Kernels, monkeypatch: Patch, where: str
) -> None:
    """Each clipped by its own norm; what is noted is the norm of all gradients."""
    chosen, steps = OptimizerSettings(clip_norm=0.3, weight_decay=0.1, warmup_steps=2), 7
    source = torch.Generator().manual_seed(0)
    first = [torch.randn(shape, generator=source) for shape in [(), (7, 129), (3,), (64,), (2, 2)]]
    own, theirs = (nn.ParameterList(nn.Parameter(w.clone()) for w in first) for _ in range(2))
    copied = nn.ParameterList(w.bfloat16() for w in first) if "copy" in where else None
    members = [[0, 4], [1, 2], [3]]
    groups = [
        {"params": iter([own[n] for n in some]), **options}
        for some, options in zip(members[1:], GROUPS, strict=True)
    ]
    options = [chosen.model_dump() | more for more in ({}, *GROUPS)]
    adamw = torch.optim.AdamW(
        [
            {"params": [theirs[n] for n in some], "betas": one["betas"]}
            | {"weight_decay": one["weight_decay"]}
            for some, one in zip(members, options, strict=True)
        ]
    )
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with on_cpu(kernels):
        captured: Any = {"steps": steps, "captured": "kernel" in where, "working": copied}
        optimizer = Optimizer(own, chosen, groups=groups, **captured)
        for step in range(steps):
            for mine, plain in zip(own if copied is None else copied, theirs, strict=True):
                mine.grad = torch.randn(plain.shape, generator=source).to(mine)
                plain.grad = mine.grad.float().clone()
            gradients = torch.cat([plain.grad.flatten() for plain in theirs])
            for some, one, group in zip(members, options, adamw.param_groups, strict=True):
                limit = math.inf if one["clip_norm"] is None else one["clip_norm"]
                nn.utils.clip_grad_norm_([theirs[n] for n in some], limit)
                warm, rate = one["warmup_steps"], one["learning_rate"]
                group["lr"] = rate * min(1.0, (step + 1) / warm if warm else 1.0)
                if one["schedule"] == "cosine" and step >= warm:
                    group["lr"] = rate * (1 - math.cos(math.pi * (steps - step) / (steps - 2))) / 2
            adamw.step()
            window = torch.zeros(1, 2)
            if "kernel" in where:
                optimizer.finish(step, torch.tensor(0.0), window, 0)
            else:
                window[0, 1] = optimizer.clip()
                optimizer.update(step)
            assert float(window[0, 1]) == pytest.approx(float(gradients.norm()), rel=1e-5)
    for n, plain in enumerate(theirs):
        torch.testing.assert_close(own[n], plain, rtol=1e-5, atol=1e-6)
        if copied is not None:
            assert torch.equal(copied[n], own[n].bfloat16())
        for kind, value in adamw.state[plain].items():
            found = optimizer.state()[f"optimizer/{kind}/{n}"]
            torch.testing.assert_close(found, value, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("group", "told"),
    [
        ({"lr": 1e-3}, "group 2 of .*lr.*no such option.*learning_rate"),
        ({"learning_rate": -1.0}, "group 2 of .*learning_rate"),
        ({"params": [nn.Parameter(torch.zeros(1))]}, "group 2 .* a parameter that the model has n"),
        ({"params": "0.weight"}, "group 2 .* a parameter that the model has not"),
        ({"params": range(1)}, "group 2 .* 0.weight, as another group has"),
    ],
)
def test_groups_that_are_none_are_refused(group: dict[str, Any], told: str) -> None:
    net = network()
    groups = [{"params": [net[0].weight]}, {"params": [], **group}]
    if groups[1]["params"] == range(1):
        groups[1]["params"] = net[0].parameters()
    with one_error("MODEL", told):
        Optimizer(net, OptimizerSettings(), steps=9, groups=groups)


@pytest.mark.parametrize("limit", [None, 0.25, 1e9])
def test_clipping(limit: float | None) -> None:
    net = network()
    optimizer = Optimizer(net, OptimizerSettings(clip_norm=limit), steps=9)
    net(torch.full((5, 3), 9.0)).square().mean().backward()
    found = [p.grad for p in net.parameters() if p.grad is not None]
    norm = math.sqrt(sum(float(g.square().sum()) for g in found))
    assert float(optimizer.clip()) == pytest.approx(norm, rel=1e-5)
    after = math.sqrt(sum(float(g.square().sum()) for g in found))
    assert after == pytest.approx(min(norm, limit or math.inf), rel=1e-4)


@pytest.fixture
def launches(kernels: Kernels, monkeypatch: Patch) -> Iterator[Kernels]:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with on_cpu(kernels):
        yield kernels


class Placed:
    """Copies of tensors that begin `offset` elements after an address that loads like."""

    def __init__(self, offset: int) -> None:
        self._offset, self._buffers = offset, list[Tensor]()

    def place(self, tensor: Tensor) -> Tensor:
        buffer = tensor.new_full((self._offset + tensor.numel() + 1,), 7.0)
        self._buffers.append(buffer)
        buffer[self._offset : -1].copy_(tensor)
        return buffer[self._offset : -1]

    def check(self) -> None:
        for buffer in self._buffers:
            assert (buffer[: self._offset] == 7).all() and buffer[-1] == 7, "written beside"


def check_steps(
    sizes: list[int], *, shadowed: bool, device: str = "cpu", schedule: Schedule = SCHEDULE
) -> None:
    """As PyTorch's, the same bits in any order and at any address, and counted once a step."""
    results, steps = [], 4
    # of gradients, weights, shadows: whole loads of everything, of some, of nothing
    for offsets in [(0, 0, 0), (1, 0, 0), (0, 1, 2), (3, 2, 1)]:
        placed = [Placed(offset) for offset in offsets]
        source = torch.Generator().manual_seed(0)
        start = [torch.randn(size, generator=source).to(device) for size in sizes]
        weights = [nn.Parameter(placed[1].place(w)) for w in start]
        plain = [nn.Parameter(w.clone()) for w in start]
        shadows = None
        if shadowed:
            shadows = [nn.Parameter(placed[2].place(w.bfloat16())) for w in start]
        adamw = torch.optim.AdamW(plain, betas=(0.9, 0.99), weight_decay=0.1)
        index, row = (torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2))
        window = torch.full((steps, 2), -1.0, device=device)
        mine = DeviceAdamW(weights, schedule, shadows=shadows, **OPTIONS)
        for step in range(steps):
            for used, other in zip(shadows or weights, plain, strict=True):
                drawn = torch.randn(used.shape, generator=source).to(used)
                used.grad, other.grad = placed[0].place(drawn), drawn.float()
            norm = nn.utils.clip_grad_norm_(plain, 0.5)
            adamw.param_groups[0]["lr"] = schedule.rate(step)
            adamw.step()
            last = window[: steps - 1]  # the last step's row is not there
            loss = torch.tensor(float(step), device=device)
            enqueue_together([Update([mine], loss, index, row, last)])
            assert (int(index), int(row)) == (step + 1, step + 1)
            if step < len(last):
                assert window[step].tolist() == [step, pytest.approx(float(norm), rel=1e-5)]
        assert window[-1].tolist() == [-1, -1]
        for one, other in zip(weights, plain, strict=True):
            torch.testing.assert_close(one, other, **CLOSE)
        for state, parameter in zip(mine.states(), plain, strict=True):
            for kind, value in state.items():
                theirs = adamw.state[parameter][kind].to(value.device)
                torch.testing.assert_close(value, theirs, rtol=1e-5, atol=1e-9)
        for one, two in zip(weights, shadows or (), strict=False):
            assert torch.equal(one.detach().bfloat16(), two)
        for each in placed:
            each.check()
        results.append([*(w.detach().clone() for w in weights), *mine.first, *mine.second, window])
    for found in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], found, strict=True))


@pytest.mark.parametrize("shadowed", [False, True])
@pytest.mark.parametrize(
    ("sizes", "group"), [([1], 4), ([3, 7000, 128, 999], 4), ([20_001, 5], 7), ([1023, 1025, 4], 1)]
)
def test_steps_are_those_of_pytorch(
    launches: Kernels, monkeypatch: Patch, sizes: list[int], group: int, shadowed: bool
) -> None:
    monkeypatch.setattr(adamw_module, "LEAST_GROUP", group)
    check_steps(sizes, shadowed=shadowed)


def no_decay(weights: list[Tensor], schedule: Schedule, **options: Any) -> DeviceAdamW:
    usual: dict[str, Any] = {"betas": (0.5, 0.5), "weight_decay": 0.0, "clip_norm": None}
    return DeviceAdamW(weights, schedule, **(usual | options))


def take(adamw: DeviceAdamW, *, step: int = 0, loss: float = 0.0) -> list[float]:
    """Take a step; return the loss and the norm that it notes."""
    window, index = torch.zeros(1, 2), torch.tensor([step])
    row = torch.zeros(1, dtype=torch.int64)
    enqueue_together([Update([adamw], torch.tensor(loss), index, row, window)])
    return [float(value) for value in window[0]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("warmup", [0, 3])
def test_the_kernel_computes_the_rate_of_any_step(
    launches: Kernels, kind: Any, warmup: int
) -> None:
    """Of the last of 10^12 steps too: no memory grows with their number."""
    for steps in (9, 10**12):
        schedule = Schedule(0.25, warmup=warmup, steps=steps, kind=kind)
        for step in {0, 1, warmup, steps // 3, steps - 1}:
            weight = nn.Parameter(torch.zeros(1))
            weight.grad = torch.ones(1)
            take(no_decay([weight], schedule, betas=(0.0, 0.0)), step=step)
            rate = -float(weight.detach())
            assert rate == pytest.approx(schedule.rate(step), rel=1e-6, abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(bits=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=9))
def test_shadows_are_rounded_as_pytorch_rounds(kernels: Kernels, bits: list[int]) -> None:
    numbers = torch.from_numpy(np.array(bits, np.uint32).view(np.float32))
    weight, shadow = nn.Parameter(numbers.clone()), nn.Parameter(numbers.bfloat16() * 0)
    shadow.grad = torch.zeros_like(shadow)
    with pytest.MonkeyPatch.context() as patch, on_cpu(kernels):
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        take(no_decay([weight], Schedule(0.0), shadows=[shadow]))
    same: Any = {"rtol": 0.0, "atol": 0.0, "equal_nan": True}
    torch.testing.assert_close(shadow.detach(), weight.detach().bfloat16(), **same)


def test_norm_of_many_sums(launches: Kernels, monkeypatch: Patch) -> None:
    """More than there are threads in a block, of pieces that few threads have a part of."""
    monkeypatch.setattr(adamw_module, "LEAST_GROUP", 1)
    monkeypatch.setattr(adamw_module, "PIECE", 30)
    weight = nn.Parameter(torch.zeros(9000))
    weight.grad = torch.randn(9000, generator=torch.Generator().manual_seed(0))
    mine = no_decay([weight], Schedule(0.0))
    assert take(mine, loss=2.0) == [2.0, pytest.approx(float(weight.grad.norm()), rel=1e-6)]
    assert launches.launched[0] == ("adamw_norm", 301)
    torch.testing.assert_close(mine.first[0], weight.grad / 2)


@pytest.mark.parametrize("count", [1, 3, 17])
def test_several_models_take_the_steps_of_each(launches: Kernels, count: int) -> None:
    """Bit for bit, with rates, decay, limits, steps and rows of their own; 17 need two launches."""
    sizes, results = [1500, 7], []
    for together in (False, True):
        source = torch.Generator().manual_seed(0)
        models, updates = list[Any](), list[Update]()
        for number in range(count):
            weights = [nn.Parameter(torch.randn(size, generator=source)) for size in sizes]
            groups = [
                DeviceAdamW(
                    some,
                    Schedule(rate * (number + 1), warmup=number % 4),
                    betas=(0.9, 0.99),
                    weight_decay=0.1 * number,
                    clip_norm=None if number % 2 else 0.5,
                )
                for some, rate in ((weights[:1], 1e-3), (weights[1:], 1e-2))
            ]
            places = [torch.full((1,), n, dtype=torch.int64) for n in (number % 2, number % 3)]
            window, loss = torch.full((4, 2), -1.0), torch.tensor(float(number))
            models.append((weights, groups, window, *places))
            updates.append(Update(groups, loss, places[0], places[1], window))
        for _ in range(2):
            for number, size in enumerate(sizes):  # as stacked models give them: views
                stacked = torch.randn(count, size, generator=source)
                for (weights, *_), drawn in zip(models, stacked, strict=True):
                    weights[number].grad = drawn if together else drawn.clone()
            if together:
                enqueue_together(updates)
            else:
                for update in updates:
                    enqueue_together([update])
        results.append(
            [
                [*weights, *(t for g in groups for s in g.states() for t in s.values()), *rest]
                for weights, groups, *rest in models
            ]
        )
    for number, (alone, both) in enumerate(zip(*results, strict=True)):
        assert all(torch.equal(a, b) for a, b in zip(alone, both, strict=True)), number


def test_a_missing_gradient_is_refused(launches: Kernels) -> None:
    with one_error("MODEL", r"shape \(3, 2\)"):
        take(no_decay([nn.Parameter(torch.zeros(3, 2))], Schedule(1.0)))


def test_strides_of_single_elements_mean_nothing() -> None:
    plain = torch.empty(8, 1, 3, 3)
    assert laid_out_alike(plain, plain.contiguous(memory_format=torch.channels_last))
    wide = torch.empty(8, 2, 3, 3)
    assert not laid_out_alike(wide, wide.contiguous(memory_format=torch.channels_last))
    assert laid_out_alike(wide, torch.empty_like(wide))


@pytest.mark.gpu
@NEEDS_GPU
@NEEDS_CUPY
@pytest.mark.parametrize("shadowed", [False, True])
@pytest.mark.parametrize("sizes", [[1], [3, 70000, 128, 999], [4_000_001, 5]])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_on_a_gpu_are_those_of_pytorch(sizes: list[int], shadowed: bool, kind: Any) -> None:
    schedule = Schedule(1e-2, warmup=2, steps=6, kind=kind)
    check_steps(sizes, shadowed=shadowed, device="cuda", schedule=schedule)
