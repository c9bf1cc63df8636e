"""What makes large models fast, on a GPU: attention of short windows, products with a ReLU, and
bfloat16 weights; each against the plain way."""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gear_offline.config.recipe import load_recipe
from gear_offline.dataset.dataset import open_dataset
from gear_offline.kernels.relu_linear import relu_linear
from gear_offline.kernels.short_attention import (
    packed_attention,
    packed_attention_reference,
    supports_packed,
)
from gear_offline.training.learner import Learner
from gear_offline.training.model import ModelSizes
from tests.gpu_support import BF16, INDUCTOR, NEEDS_CUPY, ON_GPU
from tests.support import make_dataset

pytestmark = [*ON_GPU, NEEDS_CUPY]
STEPS = 20


def with_gradient(function: Any, *tensors: torch.Tensor) -> list[torch.Tensor]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    result = function(*leaves)
    weight = torch.linspace(-1, 1, result.numel(), device=result.device).view_as(result)
    (result.float() * weight).sum().backward()
    return [result.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize(
    ("windows", "tokens", "heads", "head"),
    [(9, 60, 2, 128), (3, 1, 1, 16), (2, 128, 3, 64), (5, 33, 4, 32), (2, 100, 1, 128)],
)
def test_packed_attention(windows: int, tokens: int, heads: int, head: int) -> None:
    assert supports_packed(torch.device("cuda"), torch.bfloat16, tokens=tokens, head=head)
    torch.manual_seed(0)
    packed = torch.randn(windows, tokens, 3 * heads * head, device="cuda").bfloat16()
    scale = head**-0.5
    mine = with_gradient(lambda x: packed_attention(x, heads, scale), packed)
    plain = with_gradient(lambda x: packed_attention_reference(x, heads, scale), packed.float())
    for one, other in zip(mine, plain, strict=True):
        torch.testing.assert_close(one.float(), other, **BF16)


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


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("large"), [30, 7, 44, 12]).path


def losses(path: Path, *overrides: str) -> torch.Tensor:
    settings = [
        *("model.hidden_size=256", "model.layers=2", "model.heads=4", "model.dropout=0"),
        *("loader.context_length=8", "loader.batch_size=16", "optimizer.warmup_steps=5"),
        *(f"train.steps={STEPS}", f"data.path={path}", "train.device=cuda", "train.log_every=100"),
    ]
    recipe = load_recipe("paper", [*settings, *overrides])
    dataset = open_dataset(path)
    states, actions = (dataset.spec[c].shape[0] for c in ("observations", "actions"))
    torch.manual_seed(0)
    sizes = ModelSizes(state_dim=states, action_dim=actions, discrete=False)
    some = Learner(recipe, sizes, dataset, torch.device("cuda"))
    for _ in range(STEPS):
        some.advance()
    return some._window[:STEPS].clone()


@pytest.fixture(scope="module")
def plain(path: Path) -> torch.Tensor:
    return losses(path, "train.precision=fp32", "train.graph=off")


def compiled(*options: str) -> Any:
    return pytest.param((*options, "train.compile=on"), marks=INDUCTOR)


@pytest.mark.parametrize(
    "options",
    [
        ("train.weights=bf16", "train.graph=on"),
        ("train.weights=bf16", "train.graph=off"),
        compiled("train.weights=bf16", "train.graph=on"),
        compiled("train.weights=bf16", "train.graph=on", "model.layers=6"),
        ("train.weights=fp32", "train.graph=on"),
        ("train.accumulate=4", "train.recompute=true"),
        compiled("train.recompute=true", "train.weights=bf16"),
    ],
)
def test_ways_of_a_step_learn_alike(
    path: Path, plain: torch.Tensor, options: tuple[str, ...]
) -> None:
    if "model.layers=6" in options:
        plain = losses(path, "train.precision=fp32", "train.graph=off", "model.layers=6")
    found = losses(path, *options)
    # bfloat16 rounds to 3 digits; the losses of a random model lie near 0.4
    torch.testing.assert_close(found[:, 0], plain[:, 0], rtol=2e-2, atol=2e-3)
    torch.testing.assert_close(found[:, 1], plain[:, 1], rtol=1e-1, atol=1e-2)
