"""The GPU engine with its kernels on the CPU: batches of several tasks, weights that change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gear_offline.loaders.static_batch import StaticBatch
from gear_offline.sampling import Sampler, TaskPart, make_sampler, mix_tasks
from gear_offline.tables.joint import JointDataset
from gear_offline.tables.table import build_table
from tests.kernels_on_cpu import compile_kernels, gpu_gather, on_cpu
from tests.segment_oracle import cpu_gather
from tests.task_support import join, make_parts

SPAN, BATCH, STEPS = 5, 9, 12


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return compile_kernels(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def joint(tmp_path_factory: pytest.TempPathFactory) -> JointDataset:
    folder: Path = tmp_path_factory.mktemp("joint")
    return join(make_parts(folder))


def law_of(joint: JointDataset) -> Sampler:
    names = ("uniform_steps", "return_weighted", "uniform_episodes")
    laws = [
        TaskPart(
            name=task.name,
            sampler=make_sampler(name, task.dataset),
            weight=weight,
        )
        for task, name, weight in zip(joint.tasks, names, (1.0, 4.0, 0.5), strict=True)
    ]
    return mix_tasks(laws)


def test_batches_name_the_tasks_of_the_cpus_segments(library: Any, joint: JointDataset) -> None:
    law = law_of(joint)
    table = build_table(joint, context_length=SPAN)
    gather = cpu_gather(table, context_length=SPAN)
    bounds = torch.from_numpy(joint.first_episodes[1:-1].copy())
    seen: set[int] = set()
    with on_cpu(library):
        engine = gpu_gather(
            table, law, seed=3, rank_batch=BATCH, context_length=SPAN, padding="right"
        )
        batches = StaticBatch(engine, padding="right", step=0, ahead=False, task_bounds=bounds)
        for step in range(STEPS):
            batches.begin()
            batch = batches.batch  # the same memory in each step
            drawn = law.sample(3, step, 1, BATCH)[0]
            assert batch.segments[:, 0].tolist() == drawn.episodes.tolist()
            windows = gather.gather(drawn)
            for mine, theirs in zip(
                (batch.states, batch.actions, batch.returns_to_go, batch.timesteps),
                (*(windows.tensors()[n] for n in ("states", "actions", "returns_to_go")),
                 windows.timesteps),
                strict=True,
            ):  # fmt: skip
                assert mine.numpy().tobytes() == theirs.contiguous().numpy().tobytes()
            tasks = np.searchsorted(joint.first_episodes, drawn.episodes, side="right") - 1
            assert batch.tasks is not None and batch.tasks.tolist() == tasks.tolist()
            seen |= set(tasks.tolist())
            batches.end()
    assert seen == {0, 1, 2}
