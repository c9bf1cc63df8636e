"""Episodes a second that an actor appends, against `np.save` with fsync, Reverb and TorchRL.

- *append*, *save*: pieces of so many Hopper episodes of 400 steps, as `go.Appender` and as one new
  ``.npy`` file each, both on the disk when they return.
- *torchrl_memory*, *torchrl_memmap*: `ReplayBuffer.extend` of the same episodes, one call each,
  into `LazyTensorStorage` and `LazyMemmapStorage`; nothing of it is on the disk then.
- *reverb*: the same steps by Reverb's fastest writer into a server on this machine's memory; REVERB
  names a Python that has dm-reverb.
- *admit*: milliseconds from a look of the learner until a new piece is in its dataset.
- *batches*: of B = 64, K = 20 a second, alone and while four actors append without a pause.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

import gear_offline as go
from benchmarks.common import Call, timed
from gear_offline.data.dataset.growing import GrowingDataset

STEPS, ACTORS = 400, 4
BUFFER_STEPS = 1_000_000  # of TorchRL
NAMES = ("observations", "actions", "rewards")
PIECES = (1, 10, 100)  # episodes
ACTOR = "from benchmarks.insert import append_for_ever; append_for_ever({!r})"


def run(*, quick: bool = False) -> dict[str, Any]:
    """Measure; a few seconds, 200 MB of disk."""
    repeats, seconds = (5, 0.5) if quick else (30, 5.0)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="gear-benchmark-") as name:
        path, plain = Path(name, "dataset"), Path(name, "plain.npy")
        go.convert(go.from_episodes([episode(seed) for seed in range(100)]), path, quiet=True)
        appender = go.Appender(path)
        for size in PIECES:
            piece = [episode(seed) for seed in range(size)]
            calls: dict[str, Call] = {
                "append": partial(appender.append, piece),
                "save": partial(save, plain, piece),
            }
            calls |= torchrl(piece)
            if (child := reverb()) is not None:
                calls["reverb"] = partial(ask, child, size)
                calls["reverb"]()  # the first time the server starts
            times: dict[str, list[float]] = {key: [] for key in calls}
            for _ in range(repeats):  # in turn
                for key, call in calls.items():
                    times[key].append(timed(call))
            rates = {f"{key}_per_second": size / median(value) for key, value in times.items()}
            pairs = {key: zip(times["append"], times[key], strict=True) for key in calls}
            del pairs["append"]
            ratios = {f"of_{k}": median(peer / own for own, peer in v) for k, v in pairs.items()}
            rows.append({"episodes_a_piece": size, **rates, **ratios})
        with GrowingDataset(
            go.open_dataset(path, verify=False, admissions=0), quiet=True
        ) as growing:
            growing.admit(0)
            waits = []
            for step in range(1, repeats + 1):
                appender.append([episode(step)])
                waits.append(timed(partial(growing.admit, step)))
        loader = go.GearLoader(path, 64, context_length=20, device="cpu")
        alone = batches_per_second(loader, seconds)
        command = [sys.executable, "-c", ACTOR.format(str(path))]
        actors = [subprocess.Popen(command) for _ in range(ACTORS)]
        try:
            time.sleep(2.0)  # until they have begun
            with_actors = batches_per_second(loader, seconds)
        finally:
            for actor in actors:
                actor.kill()
                actor.wait()
    return {
        "results": rows,
        "admit_milliseconds": 1e3 * median(waits),
        "batches_per_second": {"alone": alone, f"beside {ACTORS} actors": with_actors},
    }


def episode(seed: int) -> dict[str, Any]:
    """Return an episode of Hopper's sizes."""
    generator = np.random.default_rng(seed)
    return {
        "observations": generator.normal(size=(STEPS, 11)).astype(np.float32),
        "actions": generator.uniform(-1, 1, (STEPS, 3)).astype(np.float32),
        "rewards": np.ones(STEPS, np.float32),
        "terminated": True,
    }


def torchrl(piece: list[dict[str, Any]]) -> dict[str, Call]:
    """Return functions that give a piece to TorchRL's buffers, if installed."""
    try:
        from tensordict import TensorDict
        from torchrl.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer
    except ImportError as error:
        print(f"no TorchRL: {error}", file=sys.stderr)
        return {}

    def extend(buffer: Any) -> None:
        for row in piece:
            columns = {name: row[name].reshape(STEPS, -1) for name in NAMES}
            columns["terminals"] = np.arange(STEPS)[:, None] == STEPS - 1
            tensors = {name: torch.from_numpy(rows) for name, rows in columns.items()}
            buffer.extend(TensorDict(tensors, batch_size=[STEPS]))

    kinds = {"torchrl_memory": LazyTensorStorage, "torchrl_memmap": LazyMemmapStorage}
    buffers = {key: ReplayBuffer(storage=kind(BUFFER_STEPS)) for key, kind in kinds.items()}
    for buffer in buffers.values():
        extend(buffer)  # which makes the memory
    return {key: partial(extend, buffer) for key, buffer in buffers.items()}


@cache
def reverb() -> subprocess.Popen[str] | None:
    """Start the inserter into Reverb, if an interpreter that has it is named."""
    if "REVERB" not in os.environ:
        print("no Reverb: REVERB names no Python that has it", file=sys.stderr)
        return None
    command = [os.environ["REVERB"], "-m", "benchmarks.reverb_writer", str(STEPS)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ask(child: subprocess.Popen[str], size: int) -> None:
    """Have so many episodes inserted."""
    assert child.stdin is not None and child.stdout is not None
    print(size, file=child.stdin, flush=True)
    float(child.stdout.readline())


def save(path: Path, piece: list[dict[str, Any]]) -> None:
    """Write the steps of a piece as one array, into a new file."""
    path.unlink(missing_ok=True)  # 4 % of the time
    columns = [[e[name].reshape(STEPS, -1) for name in NAMES] for e in piece]
    with open(path, "xb") as file:
        np.save(file, np.concatenate([np.concatenate(parts, 1) for parts in columns]))
        file.flush()
        os.fsync(file.fileno())


def batches_per_second(loader: go.GearLoader, seconds: float) -> float:
    """Return the batches a second that a loader gives."""
    next(loader)
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        next(loader)
        count += 1
    return count / (time.perf_counter() - began)


def append_for_ever(path: str) -> None:
    """Append an episode again and again, each in a piece of its own."""
    appender, row = go.Appender(path), episode(0)
    while True:
        appender.append([row])
