"""Training steps a second of the paper's model on hopper-like data, and the usual ways beside it.

Every row trains the same sizes (128 wide, 3 layers, windows of 20, batches of 64, dropout 0.1) with
AdamW, warm-up and clipping.  "released, our loader" is the released class run step by step with
batches from GearLoader; "the usual way" draws batches by the paper's procedure in NumPy, copies
them with ``.to("cuda")`` and runs the released class.  Wall time around many steps, the GPU waited
for at both ends; the figure is the median of the turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from gear_offline.bench import loader_peers
from gear_offline.bench.loader import CONTEXT, EPISODES, STEPS, _hopper_like
from gear_offline.config.recipe import load_recipe
from gear_offline.core.progress import progress
from gear_offline.dataset.dataset import Dataset
from gear_offline.errors import UnavailableError
from gear_offline.loaders.loader import GearLoader
from gear_offline.models.checks import trainable_parameters
from gear_offline.models.loss import action_loss
from gear_offline.training.learner import Learner
from gear_offline.training.training_model import ModelSizes

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
    if not torch.cuda.is_available():
        raise UnavailableError(
            "DEVICE", "this benchmark needs a CUDA device", remedy="run it on a machine with a GPU"
        )
    steps, episodes = (STEPS // 10, EPISODES // 10) if quick else (STEPS, EPISODES)
    turns = 3 if quick else 5
    rows: dict[str, float] = {}
    begun: dict[str, float] = {}
    with _hopper_like(steps, episodes) as (dataset, data):
        makers: dict[str, Callable[[], Callable[[], object]]] = {
            name: (lambda options=options: paper_learner(dataset, options).advance)  # type: ignore[misc]
            for name, options in OURS.items()
        }
        makers["released, our loader"] = lambda: _released(_our_batches(dataset))
        makers[BASE] = lambda: _released(_usual_batches(data))
        with progress(len(makers), "train", unit="rows") as advance:
            for name, make in makers.items():
                started = time.perf_counter()
                call = make()
                call()
                torch.cuda.synchronize()
                begun[name] = time.perf_counter() - started
                rows[name] = step_seconds(call, turns=turns)
                advance(1)
    return {
        "gpu": torch.cuda.get_device_name(),
        "base": BASE,
        "results": [
            {
                "name": name,
                "steps_per_second": 1 / seconds,
                "milliseconds": seconds * 1e3,
                "first_step_seconds": begun[name],
                "ratio": rows[BASE] / seconds,
            }
            for name, seconds in rows.items()
        ],
    }


def table(document: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Return a header and one row a way of training."""
    rows: list[tuple[Any, ...]] = [
        ("", "steps/s", "ms a step", "s to the first step", f"x {document['base']}")
    ]
    for row in document["results"]:
        rows.append(
            (
                row["name"],
                f"{row['steps_per_second']:,.0f}",
                f"{row['milliseconds']:.3f}",
                f"{row['first_step_seconds']:.1f}",
                f"{row['ratio']:.1f}",
            )
        )
    return rows


def step_seconds(call: Callable[[], object], *, turns: int) -> float:
    """Return the median seconds of a call; a turn lasts about a second."""
    for _ in range(20):
        call()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(20):
        call()
    torch.cuda.synchronize()
    calls = max(10, int(20 / (time.perf_counter() - begin)))
    found = []
    for _ in range(turns):
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - begin) / calls)
    return statistics.median(found)


def paper_learner(dataset: Dataset, options: tuple[str, ...]) -> Learner:
    """Return a learner of the paper's model on the GPU, with overrides of its recipe."""
    overrides = ("data.path=unused", "train.device=cuda", "train.log_every=1000000", *options)
    recipe = load_recipe("paper", overrides)
    states, actions = (dataset.spec[c].shape[0] for c in ("observations", "actions"))
    sizes = ModelSizes(state_dim=states, action_dim=actions, discrete=False)
    return Learner(recipe, sizes, dataset, torch.device("cuda"))


def _our_batches(dataset: Dataset) -> Callable[[], dict[str, torch.Tensor]]:
    loader = GearLoader(
        dataset, batch_size=BATCH, context_length=CONTEXT, padding="left", device="cuda"
    )
    return lambda: next(loader).model_inputs()


def _usual_batches(data: Any) -> Callable[[], dict[str, torch.Tensor]]:
    sample: Any = loader_peers.original_procedure(data, BATCH, CONTEXT)
    names = ("states", "actions", "rewards", "returns_to_go", "timesteps", "attention_mask")

    def batch() -> dict[str, torch.Tensor]:
        return dict(zip(names, (tensor.to("cuda") for tensor in sample()), strict=True))

    return batch


def _released(batches: Callable[[], dict[str, torch.Tensor]]) -> Callable[[], object]:
    from transformers import DecisionTransformerConfig, DecisionTransformerModel

    config = DecisionTransformerConfig(
        state_dim=11, act_dim=3, hidden_size=128, n_layer=3, n_head=1, max_ep_len=1000
    )
    released: Any = DecisionTransformerModel(config)
    model = released.to("cuda").train()
    parameters = trainable_parameters(model)
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, weight_decay=1e-4)

    def step() -> None:
        batch = batches()
        predicted = model(**batch).action_preds
        loss = action_loss(predicted, batch["actions"], batch["attention_mask"])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, 0.25)
        optimizer.step()

    return step
