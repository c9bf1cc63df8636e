"""Updates that ranks share: places, parts, and the same weights as one rank that does all."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gear_offline.config.recipe import load_recipe
from gear_offline.config.sections import OptimizerSettings
from gear_offline.distributed.world import World
from gear_offline.kernels.adamw import PIECE, DeviceAdamW, cut
from gear_offline.runs.preparation import ModelSizes
from gear_offline.training.learner import Learner
from gear_offline.training.optimizer import Optimizer
from gear_offline.training.rank_gradients import RankGradients
from gear_offline.training.rank_update import LEAST_LEFT, LINE, Layout, RankUpdate, shares_update
from tests.kernels_on_cpu import ThreadedKernels, compile_threads, on_cpu
from tests.support import make_dataset
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
    assert shares_update(2 * LEAST_LEFT, ranks=2, nodes=1)
    assert not shares_update(2 * LEAST_LEFT - 2, ranks=2, nodes=1)
    assert shares_update(4 * LEAST_LEFT // 3 + 1, ranks=4, nodes=1)
    assert not shares_update(2 * LEAST_LEFT, ranks=2, nodes=2)
    assert not shares_update(2 * LEAST_LEFT, ranks=1, nodes=1)


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
    ("ranks", "sizes"),
    [
        (2, [3, 7000, 128, 999]),
        (3, [20_001, 5]),
        (4, [70, 1]),
        (3, [9000]),
        # parts of unlike numbers of pieces, but of as many sums
        (2, [*[64] * 40, 2560]),
        (5, [*[17] * 90, 30_000, 1, 5000]),
    ],
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
        update.collect_weights()
        update.collect_moments()
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


def shared_optimizer(
    seed: int, world: World, *, half: bool
) -> tuple[nn.Module, nn.Module, Optimizer]:
    """Return a model, what computes, and the optimiser that updates both."""
    net: Any = nn.Linear(30, 20)
    source = torch.Generator().manual_seed(seed)  # threads share torch's own one
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=source))
    working: Any = copy.deepcopy(net).to(torch.bfloat16) if half else net
    optimizer = Optimizer(
        net,
        OptimizerSettings(warmup_steps=1),
        steps=9,
        captured=True,
        world=world,
        working=working if half else None,
    )
    assert optimizer.ranks is not None
    return net, working, optimizer


def one_step(working: nn.Module, optimizer: Optimizer, step: int) -> None:
    """Update by gradients that are the same on all ranks, as if they were added up."""
    place, window = torch.full((1,), step, dtype=torch.int64), torch.zeros(9, 2)
    source = torch.Generator().manual_seed(step)
    for parameter in working.parameters():
        drawn = torch.randn(parameter.shape, generator=source)
        parameter.grad = drawn.to(parameter.dtype)
    optimizer.finish_on_device(torch.zeros(()), index=place, row=place.clone(), window=window)


@pytest.fixture
def sharing(kernels: ThreadedKernels, monkeypatch: pytest.MonkeyPatch) -> Iterator[Wire]:
    """Two ranks that share the update of any model."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr("gear_offline.training.rank_update.LEAST_LEFT", 1)
    with on_cpu(kernels):
        yield Wire(2, nodes=1)


def test_an_optimizer_collects_once_a_step(sharing: Wire) -> None:
    """Only what others have updated since, and moments only where they are asked for."""

    def work(rank: int, world: World) -> None:
        net, _, optimizer = shared_optimizer(0, world, half=False)
        one_step(net, optimizer, 0)
        moments = [value for value in optimizer.state().values() if value.ndim]
        assert not all((moment != 0).all() for moment in moments), "a part is"

        def exchanges(step: int, *, moments: bool) -> int:
            before = len(sharing.launched[rank])
            optimizer.collect(step, moments=moments)
            return len(sharing.launched[rank]) - before

        assert exchanges(1, moments=False) == 0, "weights that compute are there at once"
        assert exchanges(1, moments=True) == 2 and all((m != 0).all() for m in moments)
        assert exchanges(1, moments=True) == 0 and exchanges(2, moments=True) == 2
        optimizer.load_state(optimizer.state())
        assert exchanges(2, moments=True) == 2

    sharing.run(work)


def test_ranks_go_on_from_what_the_first_one_saves(sharing: Wire) -> None:
    """Bit for bit: all of its weights and moments, of which it updated a part."""
    saved: dict[str, Tensor] = {}
    ready = threading.Event()

    def work(rank: int, world: World) -> None:
        net, working, optimizer = shared_optimizer(0, world, half=True)
        for step in range(3):
            one_step(working, optimizer, step)
        optimizer.collect(3, moments=False)
        for one, shadow in zip(net.parameters(), working.parameters(), strict=True):
            assert torch.equal(one.bfloat16(), shadow)
        optimizer.collect(3, moments=True)
        if rank == 0:
            saved.update({k: v.clone() for k, v in (optimizer.state() | net.state_dict()).items()})
            ready.set()
        assert ready.wait(20)
        resumed, again, other = shared_optimizer(1, world, half=True)
        resumed.load_state_dict({k: saved[k] for k in resumed.state_dict()})
        other.refresh()
        other.load_state({k: v for k, v in saved.items() if k.startswith("optimizer/")})
        for some, mine in ((working, optimizer), (again, other)):
            one_step(some, mine, 3)
            mine.collect(4, moments=True)
        for one, two in zip(working.parameters(), again.parameters(), strict=True):
            assert torch.equal(one, two)
        for name, value in (optimizer.state() | net.state_dict()).items():
            assert torch.equal(value, (other.state() | resumed.state_dict())[name]), name

    sharing.run(work)


def test_a_learner_collects_before_anybody_reads(tmp_path: Path) -> None:
    """As ranks that share the update do; True stands for moments."""
    asked: list[bool] = []

    class Ranks:
        def collect_weights(self) -> None:
            asked.append(False)

        def collect_moments(self) -> None:
            asked.append(True)

    dataset = make_dataset(tmp_path, [30, 20])
    options = [f"data.path={dataset.path}", "train.device=cpu", "model.max_timestep=30"]
    recipe = load_recipe("smoke", options)
    states, actions = (dataset.spec[c].shape[0] for c in ("observations", "actions"))
    sizes = ModelSizes(state_dim=states, action_dim=actions, discrete=False)
    learner = Learner(recipe, sizes, dataset, torch.device("cpu"))
    learner.optimizer.ranks = cast(RankUpdate, Ranks())
    learner.advance()
    learner.prepare_policy()
    assert asked == [False]
    learner.weights()
    assert asked == [False], "they are there"
    learner.tensors()
    assert asked == [False, True]
    learner.advance()
    learner.tensors()
    assert asked == [False, True] * 2
    learner.advance()
    learner.weights()
    assert asked == [*[False, True] * 2, False]
    learner.close()
