"""Measure the gain of each kernel of our own: training steps/s of the paper's model without it.

Each row trains as ``train paper`` does, one compiled CUDA graph a step in bfloat16, with one part
replaced by PyTorch's: AdamW and clipping by ``torch.optim.AdamW(fused=True, capturable=True)`` and
``clip_grad_norm_``, attention by ``scaled_dot_product_attention``, the weights' gradients by a
product of cuBLAS each, as inductor compiles them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.common import Call, alternate, hopper_like, need_cuda
from benchmarks.train import OURS, paper_learner
from gear_offline.kernels.adamw import Update
from gear_offline.training import gradients, graph
from gear_offline.training.stack import make_step

ALL = "all of ours"
OPTIONS = OURS["one graph, compiled, bf16"]


def run(*, quick: bool = False) -> dict[str, Any]:
    """Measure; about two minutes, most of them compiling."""
    need_cuda()
    calls: dict[str, Call] = {}
    with hopper_like(quick=quick) as data:
        ways: dict[str, AbstractContextManager[Any]] = {
            ALL: nullcontext(),
            "PyTorch's AdamW and clipping": patch.object(graph, "enqueue_together", TorchUpdates()),
            "PyTorch's attention": patch("gear_offline.models.blocks.supports_packed", _never),
            "cuBLAS's weight gradients": patch.object(
                gradients, "compile_options", lambda: {"combo_kernels": True}
            ),
        }
        for name, way in ways.items():
            torch.compiler.reset()  # what is compiled already has the part in it
            with way:
                step = make_step([paper_learner(data.dataset, OPTIONS)])
                step.run()
            calls[name] = step.run
        turns = 3 if quick else 7
        seconds = alternate(calls, turns=turns, seconds=1.0)
    rows = [{"name": name, "steps_per_second": 1 / seconds[name]} for name in ways]
    for row in rows:
        row["gain"] = seconds[str(row["name"])] / seconds[ALL]
    return {"base": ALL, "results": rows}


def _never(*values: object, **options: object) -> bool:
    return False


class TorchUpdates:
    """AdamW and clipping as a captured step does them without kernels of our own."""

    def __init__(self) -> None:
        self._made: Any = None

    def __call__(self, updates: Sequence[Update]) -> None:
        """Clip and update one model, as `enqueue_together` does; write the metrics, and count."""
        [update] = updates
        [group] = update.groups
        parameters = group._parameters
        assert group._shadows is None, "weights in float32, as the paper's recipe has them"
        if self._made is None:
            self._made = torch.optim.AdamW(
                parameters, lr=1e-4, weight_decay=1e-4, fused=True, capturable=True
            )
        norm = torch.nn.utils.clip_grad_norm_(parameters, 0.25)
        self._made.step()
        row = update.row.clamp(max=len(update.window) - 1)
        update.window.index_copy_(0, row, torch.stack([update.loss, norm.float()])[None])
        update.index.add_(1)
        update.row.add_(1)
