"""One rank of `gear_offline.bench.recovery`: trains, and writes down when."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

BEGAN = time.time()  # before torch is imported


def main(folder: Path, kill_at: int) -> None:
    """Train the recipe in `folder`; rank 1 is killed after step `kill_at` of its first start."""
    rank = int(os.environ["RANK"])
    stream = (folder / f"{os.getpid()}.jsonl").open("a", buffering=1)

    def mark(what: str, step: int, at: float | None = None) -> None:
        line = {"what": what, "rank": rank, "step": step, "time": time.time() if at is None else at}
        stream.write(json.dumps(line) + "\n")

    mark("begin", 0, BEGAN)
    from gear_offline.config.recipe import load_recipe
    from gear_offline.runs.trainer import train
    from gear_offline.training.learner import Learner

    advance = Learner.advance
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    ready: list[int] = []

    def timed(self: Learner) -> None:
        if not ready:
            ready.append(self.step)
            mark("ready", self.step)
        advance(self)
        if self.device.type == "cuda":
            self.check()  # waits for the GPU
        mark("step", self.step)
        if first and rank == 1 and self.step == kill_at:
            mark("killed", self.step)
            os.kill(os.getpid(), signal.SIGKILL)

    Learner.advance = timed  # type: ignore[method-assign]
    try:
        train(load_recipe(str(folder / "recovery.yaml")), out=folder / "run", resume=True)
    except Exception:
        mark("error", 0)
        raise


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
