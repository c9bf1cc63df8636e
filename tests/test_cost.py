"""What a step costs: FLOPs against torch's own count, peaks by name, memory, replicas or shards."""

# mypy: disable-error-code="no-untyped-call"
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from gear_offline.config.files import RECIPES
from gear_offline.config.recipe import Recipe, load_recipe
from gear_offline.distributed.world import World
from gear_offline.models.decision_transformer import build_model
from gear_offline.training.cost import (
    CONTEXT_BYTES,
    USABLE,
    memory_bytes,
    named_peak,
    peak_tflops,
    step_flops,
)
from gear_offline.training.parallel import choose_parallel
from tests.model_support import make


@pytest.mark.parametrize(("layers", "width", "context"), [(1, 16, 4), (3, 32, 7)])
def test_the_formula_counts_what_torch_counts(layers: int, width: int, context: int) -> None:
    """All tokens through all blocks, forward and backward, attention unmasked."""
    segments = 2
    model = make(layers=layers, hidden_size=width, dropout=0.0)
    tokens = torch.randn(segments, 3 * context, width, requires_grad=True)
    # FLOPs of fused kernels on a CPU are not counted
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        hidden = tokens
        for block in model.encoder.h:
            hidden = block(hidden)
        hidden.sum().backward()
    found = step_flops(layers=layers, width=width, context=context, segments=segments)
    assert counter.get_total_flops() == pytest.approx(found, rel=1e-12)


def test_peaks_by_name() -> None:
    names = {"H200": 989.0, "H200 NVL": 835.5, "H100 80GB HBM3": 989.0, "H100 PCIe": 756.5}
    names |= {"A100-SXM4-80GB": 312.0, "L40S": 362.0}
    assert {name: named_peak(f"NVIDIA {name}") for name in names} == names
    assert named_peak("NVIDIA A10G") is named_peak("Tesla T4") is None
    assert peak_tflops(torch.device("cpu"), half=True) is None


@settings(max_examples=50)
@given(
    parameters=st.integers(1, 10**10),
    shards=st.integers(2, 512),
    half=st.booleans(),
    weights=st.sampled_from(["fp32", "bf16"]),
)
def test_shards_take_less_than_replicas(
    parameters: int, shards: int, half: bool, weights: str
) -> None:
    recipe = load_recipe("dt_1b", [f"train.weights={weights}"])
    options: dict[str, Any] = {"segments": 64, "half": half}
    whole = memory_bytes(recipe, parameters, **options)
    part = memory_bytes(recipe, parameters, shards=shards, **options)
    kept = memory_bytes(recipe, parameters, shards=shards, reshard=False, **options)
    assert part < kept and part <= whole
    assert kept - part == parameters * (2 if half else 4)


GPU, PARAMETERS = torch.device("cuda"), 10**8


def with_free(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    """One rank has so many bytes free, this one more."""
    monkeypatch.setattr(World, "gather", lambda self, value: [value, free])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * free, 2 * free))


def needed(recipe: Recipe, world: World, **options: Any) -> int:
    segments = recipe.loader.batch_size // world.size
    found = memory_bytes(recipe, PARAMETERS, segments=segments, half=True, **options)
    return int((found + CONTEXT_BYTES) / USABLE) + 1


def test_replicas_if_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, world = load_recipe("dt_87m"), World(nodes=(0, 0))
    choose: Any = choose_parallel
    assert choose(recipe, PARAMETERS, World(), GPU, half=True).kind == "alone"
    assert choose(recipe, PARAMETERS, world, torch.device("cpu"), half=True).kind == "ddp"
    enough = needed(recipe, world)
    for free, kind in ((enough, "ddp"), (enough - 2, "fsdp")):
        with_free(monkeypatch, free)
        found = choose(recipe, PARAMETERS, world, GPU, half=True)
        assert found.kind == kind and kind.upper() in found.reason
    for wanted in ("ddp", "fsdp"):
        asked = recipe.replace({"train.parallel": wanted})
        assert choose(asked, PARAMETERS, world, GPU, half=True).kind == wanted


def test_shards_keep_weights_if_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, world = load_recipe("dt_87m", ["train.parallel=fsdp"]), World(nodes=(0, 0, 0, 0))
    choose: Any = choose_parallel
    assert choose(recipe, PARAMETERS, world, torch.device("cpu"), half=True).reshard
    enough = needed(recipe, world, shards=4, reshard=False)
    for least, reshard in ((enough, False), (enough - 2, True)):
        with_free(monkeypatch, least)
        assert choose(recipe, PARAMETERS, world, GPU, half=True).reshard == reshard
        for option in ("on", "off"):
            forced = recipe.replace({"train.reshard": option})
            found = choose(forced, PARAMETERS, world, GPU, half=True)
            assert found.reshard == (option == "on") and "as the recipe says" in found.reason


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("dt_1m", 1e6), ("dt_15m", 15e6), ("dt_87m", 87e6), ("dt_200m", 200e6), ("dt_1b", 1.2e9)],
)
def test_recipes_have_the_size_of_their_name(name: str, parameters: float) -> None:
    recipe = load_recipe(name)
    options = recipe.model.model_dump(exclude={"kind"}) | {"max_timestep": 1000}
    with torch.device("meta"):
        model = build_model(state_dim=17, action_dim=6, **options)
    count = sum(p.numel() for p in model.parameters())
    assert count == pytest.approx(parameters, rel=0.1)
    assert recipe.model.hidden_size // recipe.model.heads == 128, "heads that attention is fast at"
    # the memory that the comment states: weights, gradients and moments, and what is kept
    text = (RECIPES / f"{name}.yaml").read_text()
    stated = re.search(r"formula: ([0-9.]+) GB of weights.* ([0-9.]+) GB kept", text)
    assert stated is not None
    state = memory_bytes(recipe, count, segments=0, half=True)
    kept = memory_bytes(recipe, 0, segments=recipe.loader.batch_size, half=True)
    assert state / 1e9 == pytest.approx(float(stated[1]), rel=0.1, abs=0.01)
    assert kept / 1e9 == pytest.approx(float(stated[2]), rel=0.05)
