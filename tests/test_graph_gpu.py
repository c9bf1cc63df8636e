"""Ways of a step on a GPU learn the same: one graph, launched one by one, compiled, in 16 bits."""

# mypy: disable-error-code="no-untyped-call"

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gear_offline.config.recipe import load_recipe
from gear_offline.data.dataset.dataset import open_dataset
from gear_offline.kernels.relu_linear import relu_linear
from gear_offline.loaders import static_batch
from gear_offline.models.base import ModelSizes
from gear_offline.models.encoders import InputColumn
from gear_offline.training.learner import Learner
from gear_offline.training.model import data_sizes
from tests.gpu_support import INDUCTOR, NEEDS_CUPY, ON_GPU, STEPS, losses
from tests.image_support import image_columns
from tests.support import last_words, make_dataset
from tests.task_support import make_discrete, make_learner, make_parts, tasks_recipe

pytestmark = [*ON_GPU, NEEDS_CUPY]
# Kernels of the optimiser differ (capturable or not): last bits, which 60 steps spread.
TOLERANCE: Any = {"rtol": 2e-4, "atol": 1e-6}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("graph"), [30, 7, 44, 12]).path


SMALL = ("model.hidden_size=32", "model.layers=2")
WIDE = ("model.hidden_size=256", "model.layers=2", "model.heads=4", "model.dropout=0")
DEEP = ("model.hidden_size=256", "model.layers=6", "model.heads=4", "model.dropout=0")


def learner(
    path: Path, *overrides: str, model: tuple[str, ...] = SMALL, sizes: ModelSizes | None = None
) -> Learner:
    settings = [
        *(*model, "loader.context_length=8", "loader.batch_size=16"),
        *("optimizer.warmup_steps=5", "optimizer.schedule=cosine"),
        *(f"train.steps={STEPS}", f"data.path={path}", "train.device=cuda", "train.log_every=100"),
    ]
    recipe = load_recipe("paper", last_words(*settings, *overrides))
    dataset = open_dataset(path)
    torch.manual_seed(0)
    if sizes is None:
        states, actions = (dataset.spec[c].shape[:1] for c in ("observations", "actions"))
        sizes = ModelSizes(state_dim=states[0], action_dim=actions[0], discrete=False)
    return Learner(recipe, sizes, dataset, torch.device("cuda"))


EXACT = ("model.dropout=0.0", "train.precision=fp32")


SKIP = "train.skip=[[0, 2], [10, 30], [40, 40]]"
LEARNS = ("selection.strategy=prioritized", "selection.beta_steps=30")


@pytest.mark.parametrize(
    ("options", "steps"),
    [((), STEPS), ((SKIP,), STEPS), ((SKIP, "loader.placement=host"), STEPS), (LEARNS, 15)],
)
def test_losses_are_those_of_single_launches(
    path: Path, options: tuple[str, ...], steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One graph a step, also where batches are skipped and where priorities are learned."""
    monkeypatch.setattr(static_batch, "AHEAD_BYTES", 0)  # from host memory: a step ahead
    graph, single = (learner(path, f"train.graph={g}", *EXACT, *options) for g in ("on", "off"))
    assert not graph.graph_reason and single.graph_reason
    np.testing.assert_allclose(losses(graph, steps), losses(single, steps), **TOLERANCE)
    assert graph.loader.state_dict() == single.loader.state_dict()
    for one, other in zip(graph.model.parameters(), single.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-5)
    for some in (graph, single):
        assert options != LEARNS or some.loader.loss_sampler.updates == steps  # type: ignore[union-attr]
    assert graph.report()["learning_rate"] == single.report()["learning_rate"]


@INDUCTOR
def test_compiled_and_half_precision_learn_the_same(path: Path) -> None:
    plain = losses(learner(path, "train.graph=on", "train.compile=off", *EXACT))
    compiled = losses(learner(path, "train.graph=on", "train.compile=on", *EXACT))
    np.testing.assert_allclose(compiled, plain, rtol=1e-3, atol=1e-5)
    options = ("train.graph=on", "train.compile=on", "train.precision=bf16", "model.dropout=0.0")
    half = losses(learner(path, *options))
    np.testing.assert_allclose(half[:, 0], plain[:, 0], rtol=3e-2)


def resumed(first: Learner, path: Path, *options: str) -> Learner:
    """Return another learner that goes on from a copy of the state of the first."""
    state: dict[str, Any] = {"step": first.step, "loader": first.loader.state_dict()}
    for name, tensors in (("model", first.model.state_dict()), ("tensors", first.tensors())):
        state[name] = {key: tensor.clone() for key, tensor in tensors.items()}
    second = learner(path, *options)  # draws random numbers, which are part of the state
    second.load(**state)
    return second


@pytest.mark.parametrize("selection", ["uniform_steps", "prioritized"])
def test_resuming_goes_on(path: Path, selection: str) -> None:
    """With dropout, and with priorities that were learned before."""
    options = ("train.graph=on", "train.precision=fp32", f"selection.strategy={selection}")
    expected, first = losses(learner(path, *options)), learner(path, *options)
    losses(first, 25)
    second = resumed(first, path, *options)
    np.testing.assert_allclose(losses(second, STEPS - 25), expected, **TOLERANCE)
    if second.loader.loss_sampler is not None:
        assert second.loader.loss_sampler.updates == STEPS


@INDUCTOR
def test_a_camera_beside_a_state_is_trained_on(tmp_path: Path) -> None:
    lengths = [30, 7, 44, 12]
    columns = image_columns(sum(lengths), (84, 84, 3))
    columns["camera"] = columns.pop("observations")
    columns["state"] = np.random.default_rng(0).normal(size=(sum(lengths), 5)).astype(np.float32)
    data = make_dataset(tmp_path, lengths, columns=columns)
    names = ("camera", "state")
    model = ("model.hidden_size=32", "model.layers=1", "model.action_tanh=false")
    fixed = (f"loader.observations=[{','.join(names)}]", "loader.frame_stack=2", *model)
    found = [
        losses(learner(data.path, *fixed, *options, sizes=data_sizes(data, names)))
        for options in (
            ("train.graph=on", *EXACT),
            ("train.graph=off", *EXACT),
            ("train.graph=on", "train.compile=on", "train.precision=bf16", "model.dropout=0.0"),
        )
    ]
    np.testing.assert_allclose(found[0][:20], found[1][:20], rtol=1e-2, atol=1e-4)
    np.testing.assert_allclose(found[2][:20, 0], found[0][:20, 0], rtol=5e-2)
    assert found[0][-1, 0] < found[0][0, 0]


@INDUCTOR
@pytest.mark.parametrize("encoder", ["cnn", "patch"])
@pytest.mark.parametrize("placement", ["hbm", "host"])
def test_frames_are_trained_on(
    encoder: str, placement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(static_batch, "AHEAD_BYTES", 0)  # from host memory: a step ahead
    lengths = [30, 7, 44, 12]
    frames = make_dataset(tmp_path, lengths, columns=image_columns(sum(lengths), (84, 84)))
    camera = InputColumn(name="", shape=(84, 84), frames="uint8")
    sizes = ModelSizes(state_dim=84 * 84, action_dim=4, discrete=True, columns=(camera,))

    model = ("model.hidden_size=32", "model.layers=1", "model.action_tanh=false")
    kind = ("loader.frame_stack=4", "loader.normalize_states=false", f"model.encoder={encoder}")
    fixed = (*kind, f"loader.placement={placement}", "optimizer.schedule=constant")

    def of_frames(*overrides: str) -> Learner:
        return learner(frames.path, *fixed, *overrides, model=model, sizes=sizes)

    captured = of_frames("train.graph=on", *EXACT)
    graph = losses(captured)
    assert captured.part is not None
    assert captured.part.batches.ahead is (placement == "host")
    assert 0 <= captured.report()["data_wait_share"] < 1
    single = losses(of_frames("train.graph=off", *EXACT))
    # Convolutions may round differently, and 60 steps spread that.
    np.testing.assert_allclose(graph[:20], single[:20], rtol=1e-2, atol=1e-4)
    half = losses(
        of_frames("train.graph=on", "train.compile=on", "train.precision=bf16", "model.dropout=0.0")
    )
    np.testing.assert_allclose(half[:20, 0], graph[:20, 0], rtol=5e-2)
    assert graph[-1, 0] < graph[0, 0]


def test_reports_begin_a_new_window(path: Path) -> None:
    some = learner(path, "train.graph=on", *EXACT)
    first = losses(some, 10)
    report = some.report()
    assert report["loss"] == pytest.approx(float(first[:, 0].mean()), rel=1e-5)
    assert 0 < report["data_wait_share"] < 1
    again = losses(some, 10)
    assert len(again) == 10 and not np.array_equal(again, first)


@pytest.mark.parametrize("discrete", [False, True])
def test_several_tasks(tmp_path: Path, discrete: bool) -> None:
    """Captured steps are single ones, and those of the CPU."""
    parts = make_discrete(tmp_path, {"few": 2, "more": 5}) if discrete else make_parts(tmp_path)
    recipe = tasks_recipe(
        parts, *EXACT, "train.device=cuda", "train.log_every=100", "train.steps=40"
    )
    graph, single = (
        make_learner(recipe.replace({"train.graph": g}), "cuda") for g in ("on", "off")
    )
    assert not graph.graph_reason and single.graph_reason
    mine = losses(graph, 40)
    assert mine[-1, 0] < mine[0, 0]
    np.testing.assert_allclose(mine, losses(single, 40), **TOLERANCE)
    on_cpu = make_learner(recipe.replace({"train.device": "cpu"}))
    np.testing.assert_allclose(mine[:10], losses(on_cpu, 10), rtol=2e-3, atol=1e-5)


@INDUCTOR
def test_compiled_steps_of_several_tasks_learn_the_same(tmp_path: Path) -> None:
    recipe = tasks_recipe(make_parts(tmp_path), *EXACT, "train.device=cuda", "train.log_every=100")
    ways = [recipe.replace({"train.graph": "on", "train.compile": way}) for way in ("off", "on")]
    plain, compiled = (losses(make_learner(way, "cuda"), 20) for way in ways)
    np.testing.assert_allclose(compiled, plain, rtol=1e-3, atol=1e-5)


def with_gradient(function: Any, *tensors: torch.Tensor) -> list[torch.Tensor]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    result = function(*leaves)
    weight = torch.linspace(-1, 1, result.numel(), device=result.device).view_as(result)
    (result.float() * weight).sum().backward()
    return [result.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=INDUCTOR)])
def test_relu_linear(compiled: bool) -> None:
    torch.manual_seed(0)
    rows, weight = torch.randn(300, 64, device="cuda"), torch.randn(64, 96, device="cuda") / 8
    bias = torch.randn(96, device="cuda")
    inputs = [tensor.bfloat16() for tensor in (rows, weight, bias)]
    function: Any = torch.compile(relu_linear) if compiled else relu_linear
    mine = with_gradient(function, *inputs)
    plain = with_gradient(
        lambda x, w, b: torch.relu(x @ w + b), *(tensor.float() for tensor in inputs)
    )
    for one, other in zip(mine, plain, strict=True):
        torch.testing.assert_close(one.float(), other, rtol=3e-2, atol=0.2)


def wide(path: Path, *options: str, model: tuple[str, ...] = WIDE) -> Any:
    return losses(learner(path, *options, model=model), 20)


@pytest.fixture(scope="module")
def plain(path: Path) -> Any:
    return wide(path, "train.precision=fp32", "train.graph=off")


def compiled(*options: str) -> Any:
    return pytest.param((*options, "train.compile=on"), marks=INDUCTOR)


@pytest.mark.parametrize(
    "options",
    [
        ("train.weights=bf16", "train.graph=on"),
        ("train.weights=bf16", "train.graph=off"),
        compiled("train.weights=bf16", "train.graph=on"),
        ("train.weights=fp32", "train.graph=on"),
        ("train.accumulate=4", "train.recompute=true"),
        compiled("train.recompute=true", "train.weights=bf16"),
        ("train.precision=fp8", "train.weights=bf16", "train.graph=on"),
        ("train.precision=fp8", "train.accumulate=4", "train.recompute=true"),
        compiled("train.precision=fp8", "train.weights=bf16", "train.graph=on"),
    ],
)
def test_ways_of_a_step_learn_alike(path: Path, plain: Any, options: tuple[str, ...]) -> None:
    found = wide(path, *options)
    # bfloat16 rounds to 3 digits; the losses of a random model lie near 0.4
    np.testing.assert_allclose(found[:, 0], plain[:, 0], rtol=2e-2, atol=2e-3)
    np.testing.assert_allclose(found[:, 1], plain[:, 1], rtol=1e-1, atol=1e-2)


def test_captured_steps_with_goals_learn_the_same(path: Path) -> None:
    ways = ("train.graph=off", "train.graph=on")
    plain, captured = (wide(path, "loader.goals.future=1", "train.precision=fp32", w) for w in ways)
    np.testing.assert_allclose(captured, plain, rtol=1e-3, atol=1e-5)


@INDUCTOR
def test_a_deep_model_compiled_in_parts_learns_the_same(path: Path) -> None:
    plain = wide(path, "train.precision=fp32", "train.graph=off", model=DEEP)
    options = ("train.weights=bf16", "train.graph=on", "train.compile=on")
    np.testing.assert_allclose(wide(path, *options, model=DEEP)[:, 0], plain[:, 0], rtol=2e-2)
