"""What tests on a GPU share: marks, captured batches, losses, and how near bfloat16 comes."""

import importlib.util
from typing import Any

import pytest
import torch

from gear_offline.loaders.batch import Batch
from tests.segment_oracle import same_bits
from tests.task_support import advance

NEEDS_GPU = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="run on a machine with a CUDA device"
)
ON_GPU = [pytest.mark.gpu, NEEDS_GPU]
NEEDS_CUPY = pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="needs CuPy")
ON_TWO_GPUS = [
    *(pytest.mark.gpu, pytest.mark.multi_gpu, NEEDS_CUPY),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="run on a machine with two GPUs"),
]
STEPS = 60  # of runs that are compared
INDUCTOR = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
# products of bfloat16 numbers, and their sums over some hundred: two or three of its last bits
BF16: Any = {"rtol": 3e-2, "atol": 3e-2}


def same(one: Batch, other: Batch) -> None:
    mine, theirs = ({**batch} | batch.model_inputs() for batch in (one, other))  # tasks, too
    assert list(mine) == list(theirs)
    for batch in (mine, theirs):  # of several columns each
        batch.update(states if isinstance(states := batch["states"], dict) else {})
        batch.pop("states") if isinstance(states, dict) else None
    for name, tensor in mine.items():
        assert same_bits(tensor.cpu().numpy(), theirs[name].cpu().numpy()), name


def take(batch: Batch, slots: Any) -> Batch:
    """Return some slots of a batch."""
    return batch.map(lambda tensor: tensor[torch.from_numpy(slots)])


def capture(batches: Any) -> torch.cuda.CUDAGraph:
    """Return the graph that fills a static batch with that of a step."""
    batches.prepare()
    batches.enqueue()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batches.enqueue()
    return graph


def losses(some: Any, steps: int = STEPS) -> Any:
    """Take steps of a learner; return the losses and norms of its window of metrics, (steps, 2)."""
    advance(some, steps)
    return some.window.rows[: some.window.filled].cpu().numpy().copy()
