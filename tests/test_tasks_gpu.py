"""Several tasks on a GPU: the CPU's batches bit for bit, and steps captured with their tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gear_offline.dataset.dataset import Dataset
from gear_offline.loaders.batch import Batch
from gear_offline.loaders.loader import GearLoader
from gear_offline.sampling import Schedule, TaskPart, make_sampler, mix_tasks
from gear_offline.training.learner import Learner
from tests.gpu_support import NEEDS_CUPY, ON_GPU
from tests.task_support import join, make_discrete, make_learner, make_parts, tasks_recipe

pytestmark = [*ON_GPU, NEEDS_CUPY]
STEPS = 40
EXACT = ("model.dropout=0.0", "train.precision=fp32", "train.device=cuda", "train.log_every=100")
TOLERANCE: Any = {"rtol": 2e-4, "atol": 1e-6}


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Dataset]:
    return make_parts(tmp_path_factory.mktemp("tasks"))


def same(one: Batch, other: Batch) -> None:
    mine, theirs = one.model_inputs(), other.model_inputs()
    assert list(mine) == list(theirs) and "tasks" in mine
    for name, tensor in (mine | {"segments": one.segments}).items():
        expected = (theirs | {"segments": other.segments})[name]
        left, right = tensor.cpu().contiguous(), expected.cpu().contiguous()
        assert left.dtype == right.dtype and left.shape == right.shape, name
        assert left.numpy().tobytes() == right.numpy().tobytes(), name


@pytest.mark.parametrize("placement", ["hbm", "host"])
@pytest.mark.parametrize("weights", [None, (1.0, 5.0, 0.5)])
@pytest.mark.parametrize("scheduled", [False, True])
def test_batches_are_the_cpus(
    parts: dict[str, Dataset],
    placement: Any,
    weights: tuple[float, ...] | None,
    scheduled: bool,
) -> None:
    joint = join(parts)
    selection: Any = "uniform_steps"
    if weights is not None:
        strategies = ["uniform_steps", "return_weighted", "uniform_episodes"]
        selection = mix_tasks(
            [
                TaskPart(
                    name=task.name,
                    sampler=make_sampler(name, task.dataset),
                    weight=weight,
                )
                for task, name, weight in zip(joint.tasks, strategies, weights, strict=True)
            ],
            Schedule([0, 9], [[1.0, 0.0, 0.5], [0.2, 1.0, 0.0]]) if scheduled else None,
        )
    options: dict[str, Any] = {
        "batch_size": 33,
        "context_length": 8,
        "seed": 5,
        "selection": selection,
    }
    gpu = GearLoader(joint, device="cuda", engine="on", placement=placement, **options)
    cpu = GearLoader(joint, device="cpu", **options)
    assert gpu.engine is not None
    for step in (0, 1, 7, 1000):
        same(gpu.batch_at(step), cpu.batch_at(step))
    batches = gpu.static_batch()
    graph = torch.cuda.CUDAGraph()
    batches.prepare()
    batches.enqueue()
    seen = torch.zeros(33, dtype=torch.int64, device="cuda")
    _ = batches.batch.tasks
    batches.set_step(3)
    with torch.cuda.graph(graph):
        batches.enqueue()
        tasks = batches.batch.tasks
        assert tasks is not None
        seen.copy_(tasks)
    batches.set_step(3)
    for step in (3, 4, 5):
        batches.prepare()
        graph.replay()
        expected = cpu.batch_at(step).tasks
        assert expected is not None
        assert seen.cpu().tolist() == expected.tolist(), f"step {step}"
        same(batches.batch, cpu.batch_at(step))


def losses(some: Learner) -> Any:
    for _ in range(STEPS):
        some.advance()
    return some.window.rows[: some.window.filled].cpu().numpy().copy()


@pytest.mark.parametrize("discrete", [False, True])
def test_captured_steps_are_single_ones(
    parts: dict[str, Dataset], tmp_path: Path, discrete: bool
) -> None:
    chosen = make_discrete(tmp_path, {"few": 2, "more": 5}) if discrete else parts
    recipe = tasks_recipe(chosen, *EXACT, f"train.steps={STEPS}")
    graph = make_learner(recipe.replace({"train.graph": "on"}), "cuda")
    single = make_learner(recipe.replace({"train.graph": "off"}), "cuda")
    assert not graph.graph_reason and single.graph_reason
    mine, theirs = losses(graph), losses(single)
    assert mine[-1, 0] < mine[0, 0]
    np.testing.assert_allclose(mine, theirs, **TOLERANCE)
    on_cpu = make_learner(recipe.replace({"train.device": "cpu"}))
    np.testing.assert_allclose(mine[:10], losses(on_cpu)[:10], rtol=2e-3, atol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # of inductor
def test_compiled_steps_learn_the_same(parts: dict[str, Dataset]) -> None:
    recipe = tasks_recipe(parts, *EXACT, f"train.steps={STEPS}").replace({"train.graph": "on"})
    plain = losses(make_learner(recipe.replace({"train.compile": "off"}), "cuda"))
    compiled = losses(make_learner(recipe.replace({"train.compile": "on"}), "cuda"))
    np.testing.assert_allclose(compiled, plain, rtol=1e-3, atol=1e-5)
