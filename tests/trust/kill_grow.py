"""Kill learners and actors of growing data with SIGKILL: ``python -m tests.trust.kill_grow``.

A learner that is resumed after each kill trains while actors append episodes, each with a number of
its own in its rewards.  Half of the kills strike inside a call that changes files, half after a
random time.  Then each episode that was admitted is there once and whole, none that was appended is
lost, and a run that replays the admissions learns the same weights.  Prints one JSON document.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import gear_offline as go
import gear_offline.runs.report
from gear_offline.dataset.growing import GrowingDataset
from gear_offline.runs.loop import train
from tests.training_support import ACTION_DIM, STATE_DIM, learnt, tiny_recipe
from tests.trust.kills import begin, finish, status_of

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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="of learners, and of actors")
    parser.add_argument("--seed", type=int, default=5)
    arguments = parser.parse_args()
    gear_offline.runs.report.write_report = lambda run, **_: Path(run)
    generator, began, broken = random.Random(arguments.seed), time.monotonic(), list[str]()
    killed = {"learner": 0, "actor": 0}
    with tempfile.TemporaryDirectory(prefix="gear-kill-") as temporary:
        data, told = Path(temporary) / "data", Path(temporary) / "told"
        first = [episode for number in range(FIRST) for episode in episodes(number)]
        go.convert(go.from_episodes(first), data, quiet=True)
        often = ["data.admit_every=1", "train.checkpoint_every=3", "evaluate.episodes=0"]
        often.append(f"model.max_timestep={LONGEST}")
        recipe = tiny_recipe(data, *often, f"train.steps={4 * arguments.kills}")
        run, next_number = Path(temporary) / "run", 1000

        def learner(kill_at: int) -> int:
            work = partial(train, recipe, out=run, resume=True, quiet=True)
            return begin(work, CHANGES, kill_at=kill_at)

        def actor(kill_at: int) -> int:
            return begin(partial(act, data, next_number, told), CHANGES, kill_at=kill_at)

        while killed["learner"] < arguments.kills:
            inside = killed["learner"] % 2
            children = {
                "actor": actor(generator.randint(1, 60) if inside else 0),
                "learner": learner(generator.randint(1, 120) if inside else 0),
            }
            next_number += 1000
            time.sleep(generator.uniform(0.05, 0.6))
            for name, child in children.items():
                os.kill(child, signal.SIGKILL)
                status = status_of(child)
                if status == -signal.SIGKILL:
                    killed[name] += 1
                elif name == "learner" and status == 0:  # complete: longer
                    recipe = recipe.replace({"train.steps": recipe.train.steps + 100})
                elif status > 0:
                    sys.exit(f"a {name} failed")
        if status_of(learner(0)) != 0:
            sys.exit("the last learner failed")
        with GrowingDataset(data, quiet=True) as growing:  # what is left
            dataset = growing.admit(1 << 40)
        numbers = [float(episode["rewards"][0]) for episode in dataset[len(first) :]]
        if len(set(numbers)) != len(numbers):
            broken.append("an episode was admitted twice")
        whole = {int(line) for line in told.read_text().split()}
        if missing := whole - {int(number) for number in numbers}:
            broken.append(f"appended and lost: {sorted(missing)[:5]}")
        for place, episode in enumerate(dataset[len(first) :]):
            number = int(episode["rewards"][0])
            wanted = episodes(number)[round(4 * (numbers[place] - number))]
            if any(not np.array_equal(episode[name], wanted[name]) for name in episode):
                broken.append(f"episode {number} has changed")
        left = sorted(p.name for p in (data / "incoming").iterdir())
        broken += [f"left: {name}" for name in left]
        train(recipe.replace({"data.replay": True}), out=run.with_name("again"), quiet=True)
        if learnt(run.with_name("again"))["model"] != learnt(run)["model"]:
            broken.append("the replayed run learnt something else")
    figures = {"admissions": growing.admissions, "episodes": len(numbers)}
    return finish(began, broken, kills=killed, **figures)


if __name__ == "__main__":
    sys.exit(main())
