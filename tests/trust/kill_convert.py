"""Kill conversions with SIGKILL: ``python -m tests.trust.kill_convert``.

Before every system call that changes the disk, in turn, and then at random instants with one worker
and with several.  Afterwards a reader must see the old state or the new one, a second conversion
must succeed and sweep what was left, and no process or shared memory may stay.
"""

import argparse
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy.ma  # noqa: F401 - else every child imports it

from gear_offline.data.convert.conversion import convert
from gear_offline.data.dataset.dataset import open_dataset
from gear_offline.errors import InputError
from tests.support import hopper_columns, write_hdf5
from tests.trust.kills import Judged, begin, is_gone, program, status_of

CALLS = {os: ("open", "pwrite", "fsync", "mkdir", "rename", "unlink", "rmdir")}
EPISODES, LENGTH, SHARD_BYTES = 4, 25, 3300  # two shards


def start(source: Path, target: Path, *, workers: int = 1, kill_at: int = 0) -> int:
    """Begin a conversion in a fork with a session of its own; return the fork."""

    def work() -> None:
        os.setsid()
        options: dict[str, Any] = {"shard_bytes": SHARD_BYTES, "workers": workers}
        convert(source, target, overwrite=True, quiet=True, **options)

    return begin(work, CALLS, kill_at=kill_at)


class Places:
    """Makes conversions in new folders below `folder`, and judges what is left of them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count, self.broken = folder, 0, list[str]()
        self.seen: Counter[str] = Counter()
        self.sources = {"old": folder / "old.hdf5", "new": folder / "new.hdf5"}
        self._wanted = {}
        for seed, (name, path) in enumerate(self.sources.items()):
            write_hdf5(path, episodes=EPISODES, length=LENGTH, seed=seed)
            columns = hopper_columns(EPISODES * LENGTH, seed=seed)
            self._wanted[columns["observations"].tobytes()] = name
        status_of(start(self.sources["old"], folder / "old"))

    def kill(self, *, overwrite: bool, kill: Callable[[int], None], **options: Any) -> int:
        """Convert, ``kill(child)``, look, convert again, look; return the killed one's status."""
        self.count += 1
        target = self.folder / str(self.count) / "d"
        target.parent.mkdir()
        if overwrite:
            shutil.copytree(self.folder / "old", target)
        child = start(self.sources["new"], target, **options)
        kill(child)
        status, gone = status_of(child), is_gone(child, session=True)
        after = self._state(target)
        self.seen[after] += 1
        # Between the two renames of an overwrite there is one instant without; it is repaired.
        allowed = {"old", "absent", "new"} if overwrite else {"absent", "new"}
        again = status_of(start(self.sources["new"], target))
        final = self._state(target), sorted(os.listdir(target.parent))
        right = gone and after in allowed and (status != 0 or after == "new")
        if not right or (again, final) != (0, ("new", ["d"])):
            self.broken.append(f"{self.count}: {status}, {after}, {gone}; {again}, {final}")
        return status

    def _state(self, target: Path) -> str:
        try:
            rows = open_dataset(target).column("observations").tobytes()
        except InputError as error:
            return "absent" if error.code == "DATASET_NOT_FOUND" else error.code
        return self._wanted.get(rows, "mixed")


def kill_at_calls(places: Places) -> int:
    """Kill before each call that changes the disk; return how many there are."""
    points = 0
    for overwrite in (False, True):
        kill_at = status = 1
        absent = places.seen["absent"]
        while status != 0:
            status = places.kill(overwrite=overwrite, kill=lambda child: None, kill_at=kill_at)
            kill_at += 1
        points += kill_at
    if places.seen["absent"] != absent + 1:
        places.broken.append(
            f"overwriting: absent {places.seen['absent'] - absent} times, not once"
        )
    return points


def kill_at_random(places: Places, kills: int, *, workers: int, seed: int) -> None:
    """Kill `kills` conversions, alone or with their process group."""
    generator, duration, killed, attempts = random.Random(f"{seed} {workers}"), 0.0, 0, 0
    while killed < kills:
        attempts += 1
        wait = generator.uniform(0, 1.1 * duration) if duration else None
        began = time.monotonic()
        send = os.killpg if attempts % 4 < 2 else os.kill
        status = places.kill(
            overwrite=attempts % 2 == 1, kill=partial(kill_after, wait, send), workers=workers
        )
        if status == 0:
            duration = max(0.02, 0.5 * duration + 0.15 * (time.monotonic() - began))
        killed += status == -signal.SIGKILL


def kill_after(seconds: float | None, send: Callable[[int, int], None], child: int) -> None:
    if seconds is not None:
        time.sleep(seconds)
        with suppress(ProcessLookupError):  # the group is not there yet
            send(child, signal.SIGKILL)


def judge(options: argparse.Namespace, folder: Path) -> Judged:
    places = Places(folder)
    points = kill_at_calls(places)
    for workers in options.workers:
        kill_at_random(places, options.kills, workers=workers, seed=options.seed)
    return {"points": points, "seen_after": dict(places.seen)}, places.broken


if __name__ == "__main__":
    program(__doc__, judge, kills=320, workers=[1, 4], seed=0)  # so many of each of `workers`
