"""Updates that ranks share: places, parts, and the same weights as one rank that does all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gear_offline.kernels.adamw import PIECE, DeviceAdamW, cut
from gear_offline.optimizer import Optimizer
from gear_offline.rank_gradients import RankGradients
from gear_offline.rank_update import LEAST_PARAMETERS, LINE, Layout, RankUpdate, shares_update
from gear_offline.recipe_sections import OptimizerSettings
from gear_offline.world import World
from tests.kernels_on_cpu import ThreadedKernels, compile_threads, on_cpu
from tests.test_captured_ranks import batch_of
from tests.wire import Wire

OPTIONS: dict[str, Any] = {"betas": (0.9, 0.99), "weight_decay": 0.1, "clip_norm": 0.5}
RATES = [1e-3, 2e-3, 1e-2]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ThreadedKernels:
    return compile_threads(tmp_path_factory.mktemp("threads"), "adamw")


@given(sizes=st.lists(st.integers(1, 5 * PIECE), min_size=1, max_size=6), ranks=st.integers(2, 9))
def test_parts_are_all_there_is_once(sizes: list[int], ranks: int) -> None:
    layout = Layout.make(sizes, ranks)
    seen = [np.zeros(size, int) for size in sizes]
    for rank in range(ranks):
        within = layout.within(rank)
        for tensor, begin, count in cut(sizes, within).tolist():
            seen[tensor][begin : begin + count] += 1
            place = layout.begins[tensor] + begin
            assert 0 < count <= PIECE and begin % LINE == place % LINE == 0
            assert rank * layout.part <= place <= place + count <= (rank + 1) * layout.part
    assert all((part == 1).all() for part in seen)
    assert layout.part * ranks < sum(sizes) + LINE * (len(sizes) + ranks)


def test_tensors_of_a_layout_do_not_overlap() -> None:
    tensors = [torch.zeros(3, 5), torch.zeros(()), torch.zeros(200), torch.zeros(2, 1, 4)]
    layout = Layout.make([t.numel() for t in tensors], 3)
    flat = layout.zeros(tensors[0])
    for number, view in enumerate(layout.views(flat, tensors), start=1):
        assert (view == 0).all() and view.is_contiguous()
        view.fill_(number)
    assert flat.sum() == 15 + 2 + 600 + 32 and flat.numel() % (3 * LINE) == 0


def test_large_models_of_one_node_share() -> None:
    assert shares_update(LEAST_PARAMETERS, ranks=2, nodes=1)
    assert not shares_update(LEAST_PARAMETERS - 1, ranks=2, nodes=1)
    assert not shares_update(LEAST_PARAMETERS, ranks=2, nodes=2)
    assert not shares_update(LEAST_PARAMETERS, ranks=1, nodes=1)


def drawn(sizes: list[int], seed: int) -> list[Tensor]:
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=source) for size in sizes]


def passing(weights: list[Any], gradients: list[Tensor]) -> Callable[..., Tensor]:
    """Return a pass that gives these gradients times what is asked for."""

    def run(_: Any, *, valid_steps: float, weight: Callable[[], Tensor]) -> Tensor:
        total = sum((w * g.to(w.dtype)).sum() for w, g in zip(weights, gradients, strict=True))
        total.backward((weight() / valid_steps).to(total.dtype))
        return weight()

    return run


@pytest.mark.parametrize("shadowed", [False, True])
@pytest.mark.parametrize(
    ("ranks", "sizes"), [(2, [3, 7000, 128, 999]), (3, [20_001, 5]), (4, [70, 1]), (3, [9000])]
)
def test_shared_updates_are_those_of_one(
    kernels: ThreadedKernels,
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    sizes: list[int],
    shadowed: bool,
) -> None:
    """Sums of gradients, clipping by the norm of all, moments, metrics; a part may be empty.

    What a rank gets of others' gradients is NaN, and of their moments too old.
    """
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    kind = torch.bfloat16 if shadowed else torch.float32
    plain = [nn.Parameter(weight) for weight in drawn(sizes, 0)]
    adamw = torch.optim.AdamW(plain, betas=OPTIONS["betas"], weight_decay=0.1)
    norms = []
    given = [[drawn(sizes, 1 + step * ranks + rank) for rank in range(ranks)] for step in range(3)]
    for step, rate in enumerate(RATES):
        for number, parameter in enumerate(plain):
            each = [g[number].to(kind) * torch.tensor(1 / ranks).to(kind) for g in given[step]]
            parameter.grad = torch.stack(each).sum(0).float()
        norms.append(float(nn.utils.clip_grad_norm_(plain, OPTIONS["clip_norm"])))
        adamw.param_groups[0]["lr"] = rate
        adamw.step()
    wire = Wire(ranks, nodes=1)
    found: list[Any] = [None] * ranks

    def work(rank: int, world: World) -> None:
        weights = [nn.Parameter(weight) for weight in drawn(sizes, 0)]
        shadows = [nn.Parameter(w.detach().bfloat16()) for w in weights] if shadowed else None
        used: list[Any] = weights if shadows is None else shadows
        update = RankUpdate(weights, shadows, world)
        mine = DeviceAdamW(weights, torch.tensor(RATES), shadows=shadows, part=update, **OPTIONS)
        exchange = RankGradients(used, world=world, divisor=1.0, update=update).exchange
        index, row = (torch.zeros(1, dtype=torch.int64) for _ in range(2))
        window = torch.full((4, 2), -1.0)
        for step in range(3):
            for weight in used:
                weight.grad = None
            loss = exchange(passing(used, given[step][rank]), batch_of(torch.ones(1, 1)))
            mine.enqueue(loss, index=index, row=row, window=window)
        assert int(index) == int(row) == 3
        update.collect()
        states = [torch.cat([s.ravel() for s in some]) for some in (mine.first, mine.second)]
        found[rank] = (weights, used, *states, window, mine.steps)

    with on_cpu(kernels):
        wire.run(work)
    moments = [
        torch.cat([adamw.state[p][k].ravel() for p in plain]) for k in ("exp_avg", "exp_avg_sq")
    ]
    for weights, used, first, second, window, steps in found:
        for one, other, computed in zip(weights, plain, used, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-7)
            assert torch.equal(computed, one.to(kind))
        torch.testing.assert_close(first, moments[0], rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(second, moments[1], rtol=1e-5, atol=1e-9)
        torch.testing.assert_close(window[:3, 1], torch.tensor(norms), rtol=1e-5, atol=0.0)
        assert window[:3, 0].tolist() == [1.0] * 3 and steps.tolist() == [3.0] * len(sizes)
        for one, other in zip((first, second, window), found[0][2:5], strict=True):
            assert torch.equal(one, other), "the same bits on every rank"


def test_an_optimizer_collects_once_a_step(
    kernels: ThreadedKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what others updated since; and again after other tensors were loaded."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr("gear_offline.rank_update.LEAST_PARAMETERS", 1)
    wire = Wire(2, nodes=1)

    def work(rank: int, world: World) -> None:
        net = nn.Linear(30, 20)
        with torch.no_grad():
            net.weight.fill_(1.0), net.bias.fill_(1.0)
        optimizer = Optimizer(
            net, OptimizerSettings(warmup_steps=1), steps=9, captured=True, world=world
        )
        assert optimizer.ranks is not None and net.weight.tolist()[0][0] == 1.0
        place, window = torch.zeros(1, dtype=torch.int64), torch.zeros(9, 2)
        row = place.clone()
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.finish_on_device(torch.zeros(()), index=place, row=row, window=window)
        own = [value.clone() for value in optimizer.state().values() if value.ndim]
        assert all((p < 1.0).all() for p in net.parameters()), "weights are there at once"
        assert not all((moment != 0).all() for moment in own), "moments are not"
        before = len(wire.launched[rank])
        optimizer.collect(1)
        assert all((m != 0).all() for m in optimizer.state().values() if m.ndim)
        once = len(wire.launched[rank])
        optimizer.collect(1)
        assert len(wire.launched[rank]) == once > before
        optimizer.load_state(optimizer.state())
        optimizer.collect(1)
        assert len(wire.launched[rank]) > once

    with on_cpu(kernels):
        wire.run(work)
