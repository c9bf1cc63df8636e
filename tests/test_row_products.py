"""Sums over rows in one launch: the operator against NumPy, the pass against unchanged graphs."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

from gear_offline.config.recipe import load_recipe
from gear_offline.distributed.world import World
from gear_offline.kernels.row_products import Job, align, is_supported, row_products, split_jobs
from gear_offline.loaders.batch import join_batches
from gear_offline.models.base import Losses, ModelSizes
from gear_offline.models.stacked import MappedModels, StackedModels
from gear_offline.training import row_sums
from gear_offline.training.gradients import GradientPass
from gear_offline.training.model import recipe_model
from tests.gpu_support import INDUCTOR, ON_GPU
from tests.test_stacked_models import ACTIONS, LONGEST, STATES, STEPS, make_batch

DEVICES = ["cpu", pytest.param("cuda", marks=ON_GPU)]
# is it a product, groups, rows of each, M, N, is it transposed, are sums wanted
SUMS = [
    (1, 1, 700, 128, 72, 0, 1),
    (1, 1, 3000, 130, 3, 1, 1),
    (1, 2, 520, 64, 64, 1, 0),
    (1, 3, 129, 11, 5, 0, 1),
    (0, 1, 600, 128, 128, 0, 1),
    (0, 2, 300, 72, 72, 0, 0),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", DEVICES)
def test_sums_are_those_of_numpy(device: str, dtype: torch.dtype) -> None:
    """All of one call, and the same bits when it is called again."""
    assert is_supported(torch.device(device)) == (device == "cuda")
    generator = torch.Generator().manual_seed(0)
    tensors: list[Tensor] = []
    jobs: list[int] = []
    expected: list[tuple[int, Any]] = []
    size = 0
    for is_product, groups, rows, m, n, is_transposed, is_summed in SUMS:
        left = torch.randn(groups, rows, m, generator=generator)
        left = left.to(dtype) if is_product else left
        right = torch.randn(groups, rows, n, generator=generator).to(dtype)
        x, y = left.double().numpy(), right.double().numpy()
        form = (
            ("grm,grn->gnm" if is_transposed else "grm,grn->gmn") if is_product else "grn,grn->gn"
        )
        result, sums = np.einsum(form, x, y), y.sum(1)
        places = size, size + align(result.size) if is_summed else -1
        expected += [(places[0], result)] + [(places[1], sums)] * is_summed
        size += align(result.size) + align(sums.size) * is_summed
        jobs += Job(is_product, len(tensors), len(tensors) + 1, groups, is_transposed, *places)
        tensors += [left.to(device), right.to(device)]
    found, again = (row_products(tensors, jobs, size).cpu() for _ in range(2))
    for place, values in expected:
        part = found[place : place + values.size]
        assert torch.equal(part, again[place : place + values.size])
        error = np.abs(part.double().numpy() - values.ravel()).max()
        assert error < 1e-5 * np.abs(values).max()


def backend(rewrite: Callable[[torch.fx.Graph], None]) -> Any:
    """Return a backend that rewrites a step's graphs and runs them in plain torch."""

    def compiler(module: torch.fx.GraphModule, inputs: Any) -> Any:
        rewrite(module.graph)
        module.recompile()
        return make_boxed_func(module.forward)

    return aot_autograd(
        fw_compiler=compiler,
        bw_compiler=compiler,
        decompositions=select_decomp_table(),
        partition_fn=min_cut_rematerialization_partition,
    )


def step_gradients(
    kind: str, count: int, rewrite: Callable[[torch.fx.Graph], None], *, recompute: bool = False
) -> Any:
    """Return the gradients of one compiled step with bfloat16 products, of some models."""
    options = ("model.dropout=0", "model.hidden_size=32", "model.layers=1")
    recipe = load_recipe("paper", ("data.path=unused", f"model.kind={kind}", *options))
    recipe = recipe.replace({"model.max_timestep": LONGEST, "loader.context_length": STEPS})
    sizes = ModelSizes(state_dim=STATES, action_dim=ACTIONS, discrete=False)
    torch.manual_seed(0)
    models: list[Any] = [recipe_model(recipe, sizes).train() for _ in range(count)]
    batch = join_batches([make_batch(seed, 32) for seed in range(count)])
    compiled = partial(torch.compile, dynamic=False, backend=backend(rewrite))
    torch.compiler.reset()
    if count == 1:
        model = models[0]
        if recompute:
            model.recompute()
        step = GradientPass(Losses(model), World(), precision=torch.bfloat16)
        step._loss = compiled(step._rank_loss)
        step(batch)
    else:
        stack = StackedModels if kind == "decision_transformer" else MappedModels
        model = stack(models, precision=torch.bfloat16)
        each = compiled(model.losses)(batch)
        each.backward(torch.ones_like(each))
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@INDUCTOR
@pytest.mark.parametrize(
    ("kind", "count", "products"),
    [
        ("decision_transformer", 1, 5),
        ("recomputed", 1, 5),
        ("decision_transformer", 3, 6),
        ("decoupled", 1, 7),
        ("mlp", 2, 2),
    ],
)
def test_gradients_are_those_of_the_unchanged_graph(
    kind: str, count: int, products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for one rounding to 16 bits, which the operator saves."""
    monkeypatch.setattr(row_sums, "is_supported", lambda device: True)
    found: list[int] = []

    def rewrite(graph: torch.fx.Graph) -> None:
        row_sums.group_row_sums(graph)
        found.extend(
            sum(job.is_product for job in split_jobs(node.args[1]))
            for node in graph.nodes
            if node.target == torch.ops.gear_offline.row_products.default
        )

    recompute = kind == "recomputed"
    kind = "decision_transformer" if recompute else kind
    expected = step_gradients(kind, count, lambda graph: None, recompute=recompute)
    gradients = step_gradients(kind, count, rewrite, recompute=recompute)
    assert found == [products]
    assert list(gradients) == list(expected)
    for name, gradient in gradients.items():
        assert gradient.dtype == torch.float32 and gradient.shape == expected[name].shape
        error = (gradient - expected[name]).abs().max()
        assert error <= 2**-8 * expected[name].abs().max(), name
