"""One rank of a run in tests: trains, and once is killed."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from pathlib import Path

from gear_offline.config.recipe import load_recipe
from gear_offline.runs.loop import train
from gear_offline.training.learner import Learner


def main(recipe: str, out: str, steps: str, kill_at: str) -> None:
    advance, mark = Learner.advance, Path(out).with_suffix(".killed")

    def dangerous(self: Learner) -> None:
        advance(self)
        due = self.step == int(kill_at) and os.environ["RANK"] == "1"
        if due and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    Learner.advance = dangerous  # type: ignore[method-assign]
    train(load_recipe(recipe, [f"train.steps={steps}"]), out=Path(out), resume=True)


if __name__ == "__main__":
    faulthandler.dump_traceback_later(150, exit=True)  # shows where a rank hangs
    main(*sys.argv[1:])
