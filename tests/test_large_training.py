"""Large models: micro-batches, recomputed blocks, bfloat16 weights and shards learn the same."""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import copy
import json
import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from gear_offline.config.files import RECIPES
from gear_offline.config.recipe import Recipe, load_recipe
from gear_offline.distributed.world import World
from gear_offline.errors import InputError
from gear_offline.loaders.batch import Batch
from gear_offline.models.checks import trainable_parameters
from gear_offline.models.decision_transformer import DecisionTransformer, build_model
from gear_offline.runs.trainer import train
from gear_offline.training.checkpoint_folder import list_checkpoints
from gear_offline.training.compilation import BLOCKWISE_FROM
from gear_offline.training.data_parallel import GradientPass, check_micro_batches, micro_batches
from gear_offline.training.learner import Learner
from gear_offline.training.metrics import read_records
from gear_offline.training.parallel import Parallel, choose_parallel, gathered_bytes, replica_bytes
from gear_offline.training.training_memory import (
    CONTEXT_BYTES,
    USABLE,
    kept_bytes,
    shard_bytes,
    state_bytes,
)
from tests.model_support import STEPS, WINDOWS, inputs, make, mask
from tests.support import make_dataset

ROOT = Path(__file__).resolve().parents[1]
RECIPE = """
name: large
data: {{path: {data}}}
model: {{hidden_size: 16, layers: 2, heads: 2, dropout: 0.0, action_tanh: false}}
loader: {{batch_size: 12, context_length: 6}}
optimizer: {{warmup_steps: 3}}
train: {{steps: 12, log_every: 2, checkpoint_every: 4, device: cpu, threads: 1}}
evaluate: {{episodes: 0}}
"""


def make_batch() -> Batch:
    fields: dict[str, Any] = inputs() | {"attention_mask": mask("right")}
    return Batch(**fields, segments=torch.zeros(WINDOWS, 2, dtype=torch.int64), padding="right")


def gradients(model: DecisionTransformer, batch: Batch, **options: Any) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    alone = GradientPass(model, World(), parallel=Parallel("alone"), **options)
    loss = alone(batch)
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
    model, batch = trained(), make_batch()
    whole = gradients(model, batch)
    parts = gradients(model, batch, accumulate=count)
    assert len(whole) == len(parts) > 10
    for one, other in zip(parts, whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
    means = torch.stack([model.loss(part).detach() for part in micro_batches(batch, count)])
    assert abs(float(means.mean() - whole[0])) > 1e-4


def test_micro_batches_of_padding_alone_count_nothing() -> None:
    batch = make_batch()
    real = batch.attention_mask.clone()
    real[: WINDOWS // 2] = 0
    fields: dict[str, Any] = batch.model_inputs() | {"attention_mask": real}
    some = Batch(**fields, segments=batch.segments, padding="right")
    model = trained()
    for one, other in zip(
        gradients(model, some, accumulate=2), gradients(model, some), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


@given(share=st.integers(1, 60), count=st.integers(1, 60), ranks=st.integers(1, 4))
def test_shares_that_cannot_be_cut_are_refused(share: int, count: int, ranks: int) -> None:
    world = World(nodes=(0,) * ranks)
    if share % count == 0:
        check_micro_batches(share * ranks, world, count)
        return
    with pytest.raises(InputError) as caught:
        check_micro_batches(share * ranks, world, count)
    assert caught.value.code == "LOADER_OPTION" and str(share) in str(caught.value)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_recomputing_changes_nothing(dropout: float) -> None:
    model, batch = trained(dropout=dropout), make_batch()
    found = []
    for recompute in (False, True):
        model.encoder.gradient_checkpointing = recompute
        torch.manual_seed(3)
        found.append(gradients(model, batch))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large")
    data = make_dataset(folder, [9, 30, 4, 17, 25]).path
    path = folder / "large.yaml"
    path.write_text(RECIPE.format(data=data))
    return path


@pytest.fixture(scope="module")
def alone(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(load_recipe(recipe), out=tmp_path_factory.mktemp("runs") / "alone", quiet=True)


def measured(run: Path) -> list[list[float]]:
    names = ("step", "loss", "gradient_norm", "learning_rate")
    return [[record[name] for name in names] for record in read_records(run / "metrics.jsonl")]


def weights(run: Path) -> dict[str, Tensor]:
    return load_file(list_checkpoints(run / "checkpoints")[-1][1] / "model.safetensors")


def test_a_run_says_how_fast_it_was(alone: Path) -> None:
    records = read_records(alone / "metrics.jsonl")
    assert all(record["tflops"] > 0 and "mfu" not in record for record in records)
    throughput = json.loads((alone / "summary.json").read_text())["throughput"]
    assert throughput["tflops"] > 0 and throughput["mfu"] is None
    assert "L h^2 n" in throughput["formula"]


def test_bfloat16_weights_learn_and_are_saved_in_float32(
    recipe: Path, alone: Path, tmp_path: Path
) -> None:
    """The checkpoint has the float32 weights, and a run resumed from it goes on bit for bit."""
    options = ["train.precision=bf16", "train.weights=bf16"]
    whole = train(load_recipe(recipe, options), out=tmp_path / "whole", quiet=True)
    for mine, theirs in zip(measured(whole), measured(alone), strict=True):
        assert mine == pytest.approx(theirs, rel=2e-2)
    assert {tensor.dtype for tensor in weights(whole).values()} == {torch.float32}
    narrow = [t for t in weights(whole).values() if torch.equal(t, t.bfloat16().float())]
    assert len(narrow) < len(weights(whole)) / 2, "updates were not rounded"
    for steps in (8, 12):
        some = load_recipe(recipe, [*options, f"train.steps={steps}"])
        halves = train(some, out=tmp_path / "halves", resume=True, quiet=True)
    assert measured(halves) == measured(whole)
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(halves)[name]), name


def test_bfloat16_weights_do_not_add_up_micro_batches(recipe: Path) -> None:
    options = ["train.precision=bf16", "train.weights=bf16", "train.accumulate=2"]
    some = learner(load_recipe(recipe, options))
    assert some.working is some.model and "coarsely" in some.precision_reason


def learner(recipe: Recipe) -> Learner:
    from gear_offline.dataset.dataset import open_dataset
    from gear_offline.training.training_model import ModelSizes

    dataset = open_dataset(str(recipe.data.path))
    states, actions = (dataset.spec[c].shape[0] for c in ("observations", "actions"))
    sizes = ModelSizes(state_dim=states, action_dim=actions, discrete=False)
    return Learner(recipe, sizes, dataset, torch.device("cpu"))


def test_strategies_that_learn_from_losses_need_whole_batches(recipe: Path) -> None:
    options = ["selection.strategy=prioritized", "train.accumulate=2"]
    with pytest.raises(InputError) as caught:
        learner(load_recipe(recipe, options))
    assert caught.value.code == "LOADER_OPTION" and "accumulate" in str(caught.value)


def test_replicas_if_they_fit(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    some, model = load_recipe(recipe), trained()
    world, gpu = World(nodes=(0, 0)), torch.device("cuda")
    assert choose_parallel(some, model, World(), gpu, half=True).kind == "alone"
    cpu = choose_parallel(some, model, world, torch.device("cpu"), half=True)
    assert cpu.kind == "ddp"
    needed = replica_bytes(some, model, world, half=True)
    monkeypatch.setattr(World, "gather", lambda self, value: [value, value - 1000])
    for free, kind in ((2 * needed, "ddp"), (needed, "fsdp")):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, free))
        found = choose_parallel(some, model, world, gpu, half=True)
        assert found.kind == kind and kind.upper() in found.reason
    for wanted in ("ddp", "fsdp"):
        asked = load_recipe(recipe, [f"train.parallel={wanted}"])
        assert choose_parallel(asked, model, world, gpu, half=True).kind == wanted


def test_shards_keep_weights_if_they_fit(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, model = load_recipe(recipe, ["train.parallel=fsdp"]), trained()
    world, gpu = World(nodes=(0, 0, 0, 0)), torch.device("cuda")
    assert choose_parallel(asked, model, world, torch.device("cpu"), half=True).reshard
    parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    needed = gathered_bytes(asked, parameters, ranks=4, half=True)
    enough = math.ceil(needed / USABLE)
    for least, reshard in ((enough, False), (enough - 2, True)):  # another rank has more
        monkeypatch.setattr(World, "gather", lambda self, _, free=least: [free + 1000, free])
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (enough, enough))
        found = choose_parallel(asked, model, world, gpu, half=True)
        assert found.sharded and found.reshard == reshard
        for option in ("on", "off"):
            forced = asked.replace(train__reshard=option)
            said = choose_parallel(forced, model, world, gpu, half=True)
            assert said.reshard == (option == "on") and "as the recipe says" in said.reason


@given(parameters=st.integers(1, 10**10), ranks=st.integers(2, 512), half=st.booleans())
def test_shards_are_a_part_of_a_replica(parameters: int, ranks: int, half: bool) -> None:
    whole = state_bytes(parameters, half=half)
    part = shard_bytes(parameters, ranks=ranks, half=half, gathered=False)
    kept = shard_bytes(parameters, ranks=ranks, half=half, gathered=True)
    assert part * ranks >= 16 * parameters > (part - 1) * ranks
    assert kept - part == parameters * (2 if half else 4)
    assert kept < whole


@settings(max_examples=50)
@given(accumulate=st.sampled_from([1, 2, 3, 6]), recompute=st.booleans(), half=st.booleans())
def test_what_saves_memory_saves_some_by_formula(
    accumulate: int, recompute: bool, half: bool
) -> None:
    plain = load_recipe("dt_1b", ["loader.batch_size=24"])
    frugal = plain.replace(train__accumulate=accumulate, train__recompute=recompute)
    model, world = trained(), World()
    most = replica_bytes(plain, model, world, half=half)
    found = replica_bytes(frugal, model, world, half=half)
    assert (found < most) == (accumulate > 1 or recompute)
    assert found > CONTEXT_BYTES


def test_parts_are_views_in_order() -> None:
    batch = make_batch()
    parts = list(micro_batches(batch, 3))
    assert [len(part) for part in parts] == [WINDOWS // 3] * 3
    assert torch.equal(torch.cat([part.timesteps for part in parts]), batch.timesteps)
    assert parts[0].states.data_ptr() == batch.states.data_ptr()
    assert batch.timesteps.shape == (WINDOWS, STEPS)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("dt_1m", 1e6), ("dt_15m", 15e6), ("dt_87m", 87e6), ("dt_200m", 200e6), ("dt_1b", 1.2e9)],
)
def test_recipes_have_the_size_of_their_name(name: str, parameters: float) -> None:
    recipe = load_recipe(name)
    options = recipe.model.model_dump() | {"max_timestep": 1000}
    with torch.device("meta"):
        model = build_model(state_dim=17, action_dim=6, **options)
    count = sum(p.numel() for p in model.parameters())
    assert count == pytest.approx(parameters, rel=0.1)
    assert recipe.model.hidden_size // recipe.model.heads == 128, "heads that attention is fast at"
    # the memory that the comment states, of weights, gradients and moments
    text = (RECIPES / f"{name}.yaml").read_text()
    stated = re.search(r"formula: ([0-9.]+) GB of weights.* ([0-9.]+) GB kept", text)
    assert stated is not None
    state = state_bytes(count, half=True) / 1e9
    kept = kept_bytes(
        tokens=3 * recipe.loader.batch_size * recipe.loader.context_length,
        layers=recipe.model.layers,
        width=recipe.model.hidden_size,
        half=True,
        recompute=False,
    )
    assert state == pytest.approx(float(stated[1]), rel=0.2)
    assert kept / 1e9 == pytest.approx(float(stated[2]), rel=0.3)


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
    for one, other in zip(
        gradients(model, batch, compiled=True), gradients(plain, batch), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
    assert counters["stats"]["unique_graphs"] == 3
    assert model.state_dict().keys() == plain.state_dict().keys()
    model.eval()
    acted = [some.eval()(**inputs(3), only_actions=True).action_preds for some in (model, plain)]
    assert torch.equal(*acted) and counters["stats"]["unique_graphs"] == 3
