"""Training steps a second of the paper's model on hopper-like data, and the usual ways beside it.

Every row trains the same sizes (128 wide, 3 layers, windows of 20, batches of 64, dropout 0.1) with
AdamW, warm-up and clipping.  "released, our loader" is the released class run step by step with
batches from GearLoader; "the usual way" draws batches by the paper's procedure in NumPy, copies
them with ``.to("cuda")`` and runs the released class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import CONTEXT, Call, Data, alternate, hopper_like, need_cuda, timed
from benchmarks.loader_peers import original_procedure
from gear_offline.config.recipe import load_recipe
from gear_offline.data.dataset.dataset import Dataset
from gear_offline.loaders.loader import GearLoader
from gear_offline.models.decision_transformer import trainable_parameters
from gear_offline.models.loss import mean_loss, step_losses
from gear_offline.training.learner import Learner
from gear_offline.training.model import data_sizes
from gear_offline.training.stack import make_step

BATCH = 64
OURS = {
    "one graph, compiled, bf16": ("train.graph=on", "train.compile=on", "train.precision=bf16"),
    "one graph, bf16": ("train.graph=on", "train.compile=off", "train.precision=bf16"),
    "one graph, fp32": ("train.graph=on", "train.compile=off", "train.precision=fp32"),
    "step by step, bf16": ("train.graph=off", "train.precision=bf16"),
}
BASE = "the usual way"


def run(*, quick: bool = False) -> dict[str, Any]:
    """Measure; about two minutes, most of them compiling and the slow peers."""
    need_cuda()
    rows = []
    with hopper_like(quick=quick) as data:
        makers: dict[str, Callable[[], Call]] = {
            name: lambda options=options: make_step([paper_learner(data.dataset, options)]).run  # type: ignore[misc]
            for name, options in OURS.items()
        }
        makers["released, our loader"] = lambda: _released(_our_batches(data.dataset))
        makers[BASE] = lambda: _released(_usual_batches(data))
        for name, make in makers.items():
            calls: list[Call] = []
            first = timed(lambda: calls.append(make()))  # noqa: B023
            first += timed(calls[0])
            seconds = alternate({name: calls[0]}, turns=3 if quick else 5, seconds=1.0, label=name)
            row = {"name": name, "milliseconds": seconds[name] * 1e3, "first_step_seconds": first}
            rows.append(row | {"steps_per_second": 1 / seconds[name]})
    for row in rows:
        row["ratio"] = rows[-1]["milliseconds"] / row["milliseconds"]  # type: ignore[operator]
    return {"base": BASE, "results": rows}


def paper_learner(dataset: Dataset, options: tuple[str, ...], *, seed: int = 0) -> Learner:
    """Return a learner of the paper's model on the GPU, with overrides of its recipe."""
    fixed = ("data.path=unused", "train.device=cuda", "train.log_every=1000000", f"seed={seed}")
    recipe = load_recipe("paper", (*fixed, *options))
    return Learner(recipe, data_sizes(dataset), dataset, torch.device("cuda"))


def _our_batches(dataset: Dataset) -> Callable[[], dict[str, Tensor]]:
    loader = GearLoader(
        dataset, batch_size=BATCH, context_length=CONTEXT, padding="left", device="cuda"
    )
    return lambda: next(loader).model_inputs()


def _usual_batches(data: Data) -> Callable[[], dict[str, Tensor]]:
    sample: Any = original_procedure(data, BATCH, CONTEXT)
    names = ("states", "actions", "rewards", "returns_to_go", "timesteps", "attention_mask")
    return lambda: {name: tensor.to("cuda") for name, tensor in zip(names, sample(), strict=True)}


def _released(batches: Callable[[], dict[str, Tensor]]) -> Call:
    from transformers import DecisionTransformerConfig, DecisionTransformerModel

    config = DecisionTransformerConfig(
        state_dim=11, act_dim=3, hidden_size=128, n_layer=3, n_head=1, max_ep_len=1000
    )
    released: Any = DecisionTransformerModel(config)
    model = released.to("cuda").train()
    parameters = trainable_parameters(model)
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, weight_decay=1e-4)
    return partial(take_step, model, optimizer, parameters, batches)


def take_step(
    model: Any,
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[Tensor],
    batches: Callable[[], dict[str, Tensor]],
) -> None:
    """Take a step of a model with the released class's arguments."""
    batch = batches()
    losses = step_losses(model(**batch).action_preds, batch["actions"])
    loss = mean_loss(losses, batch["attention_mask"])
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(parameters, 0.25)
    optimizer.step()
