"""One rank of a run on several nodes: trains, writes down each batch, and once is killed.

Environment: ``RECORD`` a directory for ``PID.jsonl`` files; ``KILL`` "RANK STEP": that rank kills
itself when it has done the step for the first time; ``PAUSE`` seconds before a batch.
"""

import faulthandler
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from gear_offline.cli.main import main
from gear_offline.loaders.batch import Batch
from gear_offline.loaders.loader import GearLoader
from gear_offline.training.learner import Learner
from tests.one_process import row_digests


def record_batches(folder: Path, pause: float) -> None:
    """Make every loader of this process write down what it hands out, before it is used."""
    original = GearLoader.__next__
    stream = (folder / f"{os.getpid()}.jsonl").open("a")

    def recorded(self: GearLoader) -> Batch:
        time.sleep(pause)
        step = self.step
        slots = self.slots_at(step).tolist()
        batch = original(self)
        line: dict[str, Any] = {"step": step, "world": self.world.size, "slots": slots}
        line |= {"rank": self.world.rank, "rows": row_digests(batch), "time": time.time()}
        stream.write(json.dumps(line) + "\n")
        stream.flush()
        return batch

    GearLoader.__next__ = recorded  # type: ignore[method-assign]


def kill_once(rank: int, step: int) -> None:
    """Make this process end itself when it has done `step`, if no other one did."""
    advance, mark = Learner.advance, Path(os.environ["RECORD"]) / "killed"

    def dangerous(self: Learner) -> None:
        advance(self)
        if self.step == step and self.world.rank == rank and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    Learner.advance = dangerous  # type: ignore[method-assign]


if __name__ == "__main__":
    faulthandler.dump_traceback_later(200, exit=True)  # shows where a rank hangs
    record_batches(Path(os.environ["RECORD"]), float(os.environ.get("PAUSE", "0")))
    if "KILL" in os.environ:
        kill_once(*map(int, os.environ["KILL"].split()))
    sys.exit(main(sys.argv[1:]))
