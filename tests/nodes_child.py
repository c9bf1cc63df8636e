"""One rank of a run, which once is killed.

Environment: ``KILL`` "RANK STEP": that rank kills itself when it has done the step for the first
time, of which a file in ``FOLDER`` tells.
"""

import faulthandler
import os
import signal
import sys
from pathlib import Path

from gear_offline.cli.main import main
from gear_offline.training.learner import Learner


def kill_once(rank: int, step: int) -> None:
    """Make this process end itself when it has done `step`, if no other one did."""
    advance, mark = Learner.advance, Path(os.environ["FOLDER"]) / "killed"

    def dangerous(self: Learner) -> None:
        advance(self)
        if self.step == step and self.world.rank == rank and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    Learner.advance = dangerous  # type: ignore[method-assign]


if __name__ == "__main__":
    faulthandler.dump_traceback_later(200, exit=True)  # shows where a rank hangs
    if "KILL" in os.environ:
        kill_once(*map(int, os.environ["KILL"].split()))
    sys.exit(main(sys.argv[1:]))
