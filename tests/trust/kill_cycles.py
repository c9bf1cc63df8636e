"""Kill short trainings, over and over: ``python -m tests.trust.kill_cycles``.

Each cycle trains in a new session with checkpoints on their way and processes that evaluate
beside, and is killed with SIGKILL at a random instant, the trainer alone or the whole process
group.  No process, no shared memory, no semaphore and, with ``--device cuda``, no GPU memory may
stay.  Prints one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gear_offline.checkpoint_folder import list_checkpoints
from tests.trust.leaks import new_objects, session_processes, system_objects, wait_until_gone

GPU_SLACK_BYTES = 64 << 20  # what a driver may keep of its own


def gpu_bytes() -> int:
    """Return the memory in use on the first GPU, as the driver says."""
    found = subprocess.run(
        ["nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(found.stdout.strip()) << 20


def train_for_ever(data: Path, run: Path, device: str) -> None:
    """Train the tiny recipe with a save every two steps and evaluations beside."""
    from gear_offline.trainer import train
    from tests.training_support import register_importable, tiny_recipe

    register_importable()
    recipe = tiny_recipe(
        *(data, "train.steps=100000", "train.checkpoint_every=2", "train.evaluate_every=2"),
        *("evaluate.beside=on", "evaluate.workers=2", f"train.device={device}"),
    )
    train(recipe, out=run, quiet=True)


def cycle(folder: Path, number: int, seconds: float, device: str) -> tuple[bool, int, int]:
    """Run one cycle: (everything is gone, checkpoints that were written, processes killed)."""
    run, data = folder / f"run-{number}", folder / "dataset"
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            train_for_ever(data, run, device)
        finally:
            os._exit(1)
    deadline = time.monotonic() + 60
    while not list_checkpoints(run / "checkpoints") and time.monotonic() < deadline:
        time.sleep(0.002)
    time.sleep(seconds)
    processes = len(session_processes(child))
    (os.killpg if number % 2 else os.kill)(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return wait_until_gone(child), len(list_checkpoints(run / "checkpoints")), processes


def run(cycles: int, *, device: str = "cpu", seed: int = 3) -> dict[str, Any]:
    from gear_offline import evaluate, trainer  # noqa: F401 - children start with these imported
    from tests.training_support import tiny_data

    generator = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="gear-cycles-") as temporary:
        folder = Path(temporary)
        data = tiny_data(folder)
        os.rename(data, folder / "dataset")
        cycle(folder, -1, 1.0, device)  # what a first use of the machine leaves for good
        before, gpu = system_objects(), gpu_bytes() if device == "cuda" else 0
        descriptors = len(os.listdir("/proc/self/fd"))
        found = [cycle(folder, i, generator.uniform(0, 1.5), device) for i in range(cycles)]
        time.sleep(0.5)
        return {
            "cycles": cycles,
            "device": device,
            "checkpoints_written": sum(count for _, count, _ in found),
            "processes_killed": sum(count for _, _, count in found),
            "processes_left": sum(not gone for gone, _, _ in found),
            "objects_left": new_objects(before),
            "descriptors_left": len(os.listdir("/proc/self/fd")) - descriptors,
            "gpu_bytes_more": gpu_bytes() - gpu if device == "cuda" else None,
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cycles", type=int, default=100)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    arguments = parser.parse_args()
    document = run(arguments.cycles, device=arguments.device)
    print(json.dumps(document, indent=1))
    kept = (document["gpu_bytes_more"] or 0) > GPU_SLACK_BYTES
    left = ("processes_left", "objects_left", "descriptors_left")
    return 1 if kept or any(document[key] for key in left) else 0


if __name__ == "__main__":
    sys.exit(main())
