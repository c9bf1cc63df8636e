"""Ways of a step that learn the same: micro-batches, recomputed and compiled blocks, bfloat16."""

# mypy: disable-error-code="no-untyped-call"
import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from gear_offline.artifacts.checkpoint import list_checkpoints
from gear_offline.config.recipe import load_recipe
from gear_offline.distributed.world import World
from gear_offline.loaders.batch import Batch
from gear_offline.models.base import Losses
from gear_offline.models.decision_transformer import DecisionTransformer, trainable_parameters
from gear_offline.runs.loop import train_run
from gear_offline.training.gradients import (
    BLOCKWISE_FROM,
    GradientPass,
    check_micro_batches,
    micro_batches,
)
from tests.model_support import WINDOWS, inputs, make, mask
from tests.ranks_support import DEEPER, ranks_recipe
from tests.support import make_dataset, one_error
from tests.task_support import advance, make_learner
from tests.training_support import measured


def make_batch(padded: int = 0) -> Batch:
    """Windows of unequal padding, so many of which are nothing else."""
    real = mask("right")
    real[:padded] = 0
    fields: dict[str, Any] = inputs() | {"attention_mask": real}
    return Batch(**fields, segments=torch.zeros(WINDOWS, 2, dtype=torch.int64), padding="right")


def gradients(model: DecisionTransformer, batch: Batch, **options: Any) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    loss = GradientPass(Losses(model), World(), **options)(batch)
    assert not loss.requires_grad
    return [loss, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def trained(**changes: Any) -> DecisionTransformer:
    model = make(**({"dropout": 0.0} | changes))
    trainable_parameters(model)
    model.train()
    return model


@pytest.mark.parametrize("count", [2, 3, 6])
def test_micro_batches_have_the_gradient_of_the_whole(count: int) -> None:
    """Padding is unequal, so the mean of the parts' own means would be another."""
    model = trained()
    for padded in (0, WINDOWS // 2):
        batch = make_batch(padded)
        whole = gradients(model, batch)
        parts = gradients(model, batch, accumulate=count)
        assert len(parts) > 10
        torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-7)
        means = torch.stack([model.loss(part).detach() for part in micro_batches(batch, count)])
        assert abs(float(means.mean() - whole[0])) > 1e-4
    with one_error("LOADER_OPTION", "a rank's 12 segments"):
        check_micro_batches(12, 5)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_recomputing_changes_nothing(dropout: float) -> None:
    model, batch = trained(dropout=dropout), make_batch()
    found = []
    for recompute in (False, True):
        model.recomputed = recompute
        torch.manual_seed(3)
        found.append(gradients(model, batch))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large")
    data = make_dataset(folder, [9, 30, 4, 17, 25]).path
    return ranks_recipe(folder / "large.yaml", data, *DEEPER, "train.steps=12")


@pytest.fixture(scope="module")
def alone(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_run(load_recipe(recipe), out=tmp_path_factory.mktemp("runs") / "alone", quiet=True)


def weights(run: Path) -> dict[str, Tensor]:
    return load_file(list_checkpoints(run / "checkpoints")[-1][1] / "model.safetensors")


def test_bfloat16_weights_learn_and_are_saved_in_float32(
    recipe: Path, alone: Path, tmp_path: Path
) -> None:
    """The checkpoint has the float32 weights, and a run resumed from it goes on bit for bit."""
    options = ["train.precision=bf16", "train.weights=bf16"]
    whole = train_run(load_recipe(recipe, options), out=tmp_path / "whole", quiet=True)
    for mine, theirs in zip(measured(whole), measured(alone), strict=True):
        assert mine == pytest.approx(theirs, rel=2e-2)
    assert {tensor.dtype for tensor in weights(whole).values()} == {torch.float32}
    narrow = [t for t in weights(whole).values() if torch.equal(t, t.bfloat16().float())]
    assert len(narrow) < len(weights(whole)) / 2, "updates were not rounded"
    for steps in (8, 12):
        some = load_recipe(recipe, [*options, f"train.steps={steps}"])
        halves = train_run(some, out=tmp_path / "halves", resume=True, quiet=True)
    assert measured(halves) == measured(whole)
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(halves)[name]), name


def test_a_device_without_8_bit_products_trains_without_and_says_so(recipe: Path) -> None:
    learner = make_learner(load_recipe(recipe, ["train.precision=fp8"]))
    assert (
        learner.precision_reason.startswith("float32")
        and "not in 8 bits" in learner.precision_reason
    )
    assert not any(block.eight_bits for block in learner.working.model.encoder.h)


def test_bfloat16_weights_do_not_add_up_micro_batches(recipe: Path) -> None:
    options = ["train.precision=bf16", "train.weights=bf16", "train.accumulate=2"]
    some = make_learner(load_recipe(recipe, options))
    assert some.working.model is some.model and "coarsely" in some.precision_reason


def test_strategies_that_learn_from_losses_need_whole_batches(recipe: Path) -> None:
    options = ["selection.strategy=prioritized", "train.accumulate=2"]
    with one_error("LOADER_OPTION", "accumulate"):
        make_learner(load_recipe(recipe, options))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's own, while it traces
def test_a_deep_model_is_compiled_in_three_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Embeddings, a block, and the last block, which keeps fewer tokens; acting stays eager."""
    model = trained(layers=BLOCKWISE_FROM)
    plain, batch = copy.deepcopy(model), make_batch()
    traced = partial(torch.compile, backend="eager")
    monkeypatch.setattr(torch, "compile", traced)
    torch.compiler.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    found, expected = gradients(model, batch, compiled=True), gradients(plain, batch)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    assert counters["stats"]["unique_graphs"] == 3
    assert model.state_dict().keys() == plain.state_dict().keys()
    model.eval()
    acted = [some.eval()(**inputs(3), only_actions=True).action_preds for some in (model, plain)]
    assert torch.equal(*acted) and counters["stats"]["unique_graphs"] == 3


@pytest.mark.parametrize("where", ["forward", "clip"])
def test_a_collective_that_fails_in_a_step_is_a_lost_rank(
    recipe: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FSDP collects weights in the forward pass and sums of norms while clipping: nobody else's."""
    some = make_learner(load_recipe(recipe))
    advance(some)

    def broken(*_: Any) -> Any:
        raise RuntimeError("[gloo/transport/tcp/pair.cc:538] Connection reset by peer [10.0.0.7]")

    if where == "forward":
        monkeypatch.setattr(GradientPass, "__call__", broken)
    else:
        monkeypatch.setattr(some.optimizer, "clip", broken)
    with pytest.raises(RuntimeError, match="gloo"):  # alone it is what it is
        advance(some)
    some.world = World(nodes=(0, 0))
    with one_error("RANK_LOST", r"another rank is gone .* Connection reset"):
        advance(some)


def test_any_dropout_below_one_trains(recipe: Path) -> None:
    for dropout in (0.9999999999999999, 0.99999):
        some = make_learner(load_recipe(recipe, [f"model.dropout={dropout!r}"]))
        advance(some)
        some.check()
