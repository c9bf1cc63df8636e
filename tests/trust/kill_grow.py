"""Kill learners and actors of growing data with SIGKILL: ``python -m tests.trust.kill_grow``.

A learner that is resumed after each kill trains while actors append episodes, each with a number of
its own in its rewards.  Half of the kills strike inside a call that changes files, half after a
random time.  Then each episode that was admitted is there once and whole, none that was appended is
lost, and a run that replays the admissions learns the same weights.
"""

import argparse
import os
import random
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import gear_offline as go
import gear_offline.runs.report
from gear_offline.config.recipe import Recipe
from gear_offline.data.dataset.growing import GrowingDataset
from gear_offline.runs.loop import train_run
from tests.training_support import ACTION_DIM, STATE_DIM, learnt, tiny_recipe
from tests.trust.kills import Judged, begin, program, status_of

CHANGES = {os: ("fsync", "rename", "replace", "link", "unlink", "ftruncate", "mkdir", "write")}
FIRST, LONGEST = 3, 6


def episodes(number: int) -> list[dict[str, Any]]:
    """Return one or two episodes of which every value is a function of `number`."""
    found: list[dict[str, Any]] = []
    for part in range(1 + number % 2):
        length = 1 + (number + part) % LONGEST
        columns = {
            "observations": np.full((length, STATE_DIM), number + part / 4, np.float32),
            "actions": np.full((length, ACTION_DIM), (number % 7) / 10, np.float32),
            "rewards": np.full(length, number + part / 4, np.float32),
        }
        found.append({**columns, "terminated": True})
    return found


def act(data: Path, first: int, told: Path) -> None:
    """Append pieces from number `first` on, without end; write down those that are durable."""
    appender = go.Appender(data)
    for number in range(first, first + 1000):
        appender.append(episodes(number))
        with open(told, "ab", buffering=0) as file:
            file.write(b"%d\n" % number)
        time.sleep(0.002)


def kill_many(data: Path, told: Path, recipe: Recipe, options: argparse.Namespace) -> Recipe:
    """Kill until `kills` learners are killed, and actors beside them; return the last recipe."""
    generator, killed, turn = random.Random(options.seed), 0, 0
    while killed < options.kills:
        turn += 1
        in_actor, in_learner = (generator.randint(1, n) * (killed % 2) for n in (60, 120))
        actor = begin(partial(act, data, 1000 * turn, told), CHANGES, kill_at=in_actor)
        learner = start(recipe, data.with_name("run"), kill_at=in_learner)
        time.sleep(generator.uniform(0.05, 0.6))
        for child in (actor, learner):
            os.kill(child, signal.SIGKILL)
            status = status_of(child)
            if status > 0:
                sys.exit(f"{'a learner' if child == learner else 'an actor'} failed")
            if child == learner and status == 0:  # complete: longer
                recipe = recipe.replace({"train.steps": recipe.train.steps + 100})
        killed += status == -signal.SIGKILL
    return recipe


def start(recipe: Recipe, run: Path, *, kill_at: int = 0) -> int:
    work = partial(train_run, recipe, out=run, resume=True, quiet=True)
    return begin(work, CHANGES, kill_at=kill_at)


def judge(options: argparse.Namespace, folder: Path) -> Judged:
    gear_offline.runs.report.write_report = lambda run, **_: Path(run)
    data, told, run, broken = folder / "data", folder / "told", folder / "run", list[str]()
    first = [episode for number in range(FIRST) for episode in episodes(number)]
    go.convert(go.from_episodes(first), data, quiet=True)
    often = ["data.admit_every=1", "train.checkpoint_every=3", "evaluate.episodes=0"]
    often.append(f"model.max_timestep={LONGEST}")
    recipe = tiny_recipe(data, *often, f"train.steps={4 * options.kills}")
    recipe = kill_many(data, told, recipe, options)
    if status_of(start(recipe, run)) != 0:
        sys.exit("the last learner failed")
    begun = go.open_dataset(data, verify=False, admissions=0)
    with GrowingDataset(begun, quiet=True) as growing:  # what is left
        dataset = growing.admit(1 << 40)
    grown = dataset[len(first) :]
    numbers = [float(episode["rewards"][0]) for episode in grown]
    if len(set(numbers)) != len(numbers):
        broken.append("an episode was admitted twice")
    if missing := {int(line) for line in told.read_text().split()} - set(map(int, numbers)):
        broken.append(f"appended and lost: {sorted(missing)[:5]}")
    for number, episode in zip(numbers, grown, strict=True):
        wanted = episodes(int(number))[round(4 * (number % 1))]
        if any(not np.array_equal(episode[name], wanted[name]) for name in episode):
            broken.append(f"episode {number} has changed")
    broken += [f"left: {path.name}" for path in (data / "incoming").iterdir()]
    train_run(recipe.replace({"data.replay": True}), out=folder / "again", quiet=True)
    if learnt(folder / "again")["model"] != learnt(run)["model"]:
        broken.append("the replayed run learnt something else")
    return {"admissions": growing.admissions, "episodes": len(numbers)}, broken


if __name__ == "__main__":
    program(__doc__, judge, kills=200, seed=5)
