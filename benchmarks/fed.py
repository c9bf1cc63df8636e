"""Training steps a second of the paper's model on a CPU, fed by GearLoader and by Reverb.

Our class, 128 wide, 3 layers, float32, batches of 64 windows of 20, in one process that takes the
batches too; "one batch" is never replaced.  Reverb's server is a process of its own, as its users
have it, and its `TrajectoryDataset` runs here, with the settings that train fastest.  That takes a
Python with both: dm-reverb's TensorFlow wants NumPy 1.26, with which this benchmark runs too.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.common import (
    ACTION_DIM,
    CONTEXT,
    STATE_DIM,
    Call,
    Data,
    Served,
    alternate,
    hopper_like,
)
from benchmarks.loader_peers import write_steps
from benchmarks.train import BATCH, take_step
from gear_offline.core.text import say
from gear_offline.loaders.loader import GearLoader
from gear_offline.models.decision_transformer import build_model, trainable_parameters

Inputs = dict[str, Tensor]
BASE = "one batch"


def run(*, quick: bool = False) -> dict[str, Any]:
    """Measure; about three minutes."""
    model = build_model(state_dim=STATE_DIM, action_dim=ACTION_DIM, max_timestep=1000).train()
    parameters = trainable_parameters(model)
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, weight_decay=1e-4)
    step = partial(take_step, partial(model, padding="right", only_actions=True))
    step = partial(step, optimizer, parameters)
    with hopper_like(quick=quick) as data:
        loader = GearLoader(data.dataset, batch_size=BATCH, context_length=CONTEXT, device="cpu")
        batch = next(loader).model_inputs()
        calls: dict[str, Call] = {
            BASE: partial(step, lambda: batch),
            "GearLoader": partial(step, lambda: next(loader).model_inputs()),
            "GearLoader, batches alone": lambda: next(loader).model_inputs(),
        }
        try:
            batches, server = _reverb(data, step)
        except ImportError as error:
            say(f"skipped Reverb: {error}")
        else:
            calls["Reverb"] = Served(partial(step, batches), (server,))
            calls["Reverb, batches alone"] = Served(batches, (server,))
        seconds = alternate(calls, turns=3 if quick else 9, seconds=0.2 if quick else 2.0)
    rows = [{"name": name, "per_second": 1 / taken} for name, taken in seconds.items()]
    for row in rows:
        if "alone" not in str(row["name"]):
            row["share_of_one_batch"] = seconds[BASE] / seconds[str(row["name"])]
    return {"threads": torch.get_num_threads(), "results": rows}


def _reverb(
    data: Data, step: Callable[[Callable[[], Inputs]], None]
) -> tuple[Callable[[], Inputs], int]:
    """Return batches of a new server, by the settings that train fastest, and its process."""
    from benchmarks.reverb_reader import fastest_batches

    path = write_steps(data)
    command = [sys.executable, "-m", "benchmarks.reverb_reader", str(path), str(CONTEXT)]
    pipe = subprocess.PIPE
    server = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    assert server.stdout is not None
    address = server.stdout.readline().strip()
    with np.load(path) as file:
        columns = {name: file[name] for name in file.files if name != "ends"}
    mask = torch.ones((BATCH, CONTEXT), dtype=torch.int64)

    def inputs(sample: Any) -> Inputs:
        fields = {name: torch.tensor(array) for name, array in sample.data.items()}
        return fields | {"attention_mask": mask}

    def train(sample: Any) -> None:
        step(lambda: inputs(sample))

    batches = fastest_batches(address, columns, BATCH, CONTEXT, train)
    return lambda: inputs(next(batches)), server.pid
