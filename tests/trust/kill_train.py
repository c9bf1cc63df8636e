"""Kill a training run with SIGKILL, over and over: ``python -m tests.trust.kill_train``.

Half of the kills strike inside a call that changes files (where a checkpoint half saved would
show), half after a random time.  The run goes on with ``--resume`` until it is complete; weights,
moments, metrics and evaluations must then equal those of a run that nobody killed, bit for bit.
Everything is done in forked children of a process that never computes, so that each starts with
all imported and no threads.
"""

import argparse
import os
import random
import shutil
import signal
import sys
import time
from functools import partial
from pathlib import Path

import gear_offline.runs.evaluations
import gear_offline.runs.report
from gear_offline.runs.loop import train_run
from tests.training_support import (
    FakePool,
    learnt,
    register_environment,
    register_importable,
    tiny_data,
    tiny_recipe,
)
from tests.trust.kills import Judged, begin, program, status_of

CHANGES = {  # calls that change files
    os: ("fsync", "rename", "replace", "symlink", "truncate", "mkdir", "write"),
    shutil: ("rmtree",),
}


def start(data: Path, run: Path, *overrides: str, kill_at: int = 0) -> int:
    """Train in a child, from where the run stands; return the child."""
    recipe = tiny_recipe(data, *overrides)
    work = partial(train_run, recipe, out=run, resume=True, quiet=True)
    return begin(work, CHANGES, kill_at=kill_at)


def kill_many(data: Path, run: Path, *overrides: str, kills: int, seed: int) -> list[Path]:
    """Kill until `kills` have struck; return the runs, all of them complete."""
    generator, runs = random.Random(seed), [run]
    killed = 0
    while True:
        kill_at = generator.randint(1, 60) if killed < kills and killed % 2 else 0
        child = start(data, runs[-1], *overrides, kill_at=kill_at)
        if killed < kills and not kill_at:
            time.sleep(generator.uniform(0.0, 0.5))
            os.kill(child, signal.SIGKILL)
        status = status_of(child)
        if status == 0 and killed >= kills:
            return runs
        if status == 0:  # it was complete before the kill came: kill the next one in a new run
            runs.append(run.with_name(f"{run.name}-{killed}"))
        elif status != -signal.SIGKILL:
            sys.exit("a child failed")
        killed += 1


def judge(options: argparse.Namespace, folder: Path) -> Judged:
    gear_offline.runs.report.write_report = lambda run, **_: Path(run)
    data, broken = tiny_data(folder), list[str]()
    overrides: tuple[str, ...] = ()
    register_environment()
    if status_of(start(data, folder / "whole")) != 0:
        sys.exit("the run that nobody kills failed")
    whole = learnt(folder / "whole")
    if options.background:  # with evaluations under way, whose results come some steps later
        register_importable()
        overrides = ("evaluate.background=on", "train.keep_checkpoints=1")
        FakePool.delay = 4
        gear_offline.runs.evaluations.POLL_SECONDS = 0.0
        vars(gear_offline.runs.evaluations)["WorkerPool"] = FakePool
    runs = kill_many(data, folder / "killed", *overrides, kills=options.kills, seed=options.seed)
    for run in runs:
        result = learnt(run)
        if any(result[key] != whole[key] for key in whole if key != "recipe"):
            broken.append(f"{run.name} learnt something else")
        if list((run / "checkpoints").glob(".*")):
            broken.append(f"{run.name} keeps leftovers")
    return {"kills": options.kills, "runs": len(runs)}, broken


if __name__ == "__main__":
    program(__doc__, judge, kills=60, seed=11, background=False)
