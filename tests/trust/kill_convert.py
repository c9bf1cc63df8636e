"""Kill conversions with SIGKILL at random instants: ``python -m tests.trust.kill_convert``.

A conversion, with one worker or several, overwrites a dataset (or makes a new one) and is killed
alone or with its process group.  Then a reader must see the old state or the new one; a second
conversion must succeed and sweep what was left; and no process, shared memory or semaphore may
stay.  Prints one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import h5py

from gear_offline.dataset.dataset import open_dataset
from gear_offline.errors import InputError
from tests.support import hopper_columns
from tests.trust.forked import prepare
from tests.trust.leaks import new_objects, system_objects, wait_until_gone

EPISODES, LENGTH = 40, 25
SHARD_BYTES = 12_000  # eight shards


def write_source(path: Path, *, seed: int) -> None:
    columns = hopper_columns(EPISODES * LENGTH, seed=seed)
    columns["timeouts"][LENGTH - 1 :: LENGTH] = True
    with h5py.File(path, "w") as file:
        for name, values in columns.items():
            file[name] = values


def start(source: Path, target: Path, *, workers: int) -> int:
    """Begin a conversion in a child with a session of its own; return the child."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setsid()
            from gear_offline.convert import convert

            convert(
                str(source),
                target,
                shard_bytes=SHARD_BYTES,
                workers=workers,
                overwrite=True,
                quiet=True,
            )
            code = 0
        finally:
            os._exit(code)
    return child


def status_of(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def state(target: Path, wanted: dict[str, bytes]) -> str:
    """Return what a reader sees: "absent", the name of a whole dataset, or something wrong."""
    try:
        found = open_dataset(target).column("observations").tobytes()
    except InputError as error:
        return "absent" if error.code == "DATASET_NOT_FOUND" else f"error {error.code}"
    return next((name for name, content in wanted.items() if content == found), "mixed")


def kill_many(kills: int, *, workers: int, seed: int, folder: Path) -> dict[str, Any]:
    """Kill `kills` conversions; return figures and broken promises."""
    generator = random.Random(f"{seed} {workers}")
    sources = {"old": folder / "old.hdf5", "new": folder / "new.hdf5"}
    wanted = {}
    for number, (name, path) in enumerate(sources.items()):
        write_source(path, seed=number)
        columns = hopper_columns(EPISODES * LENGTH, seed=number)
        wanted[name] = columns["observations"].tobytes()
    before, began = system_objects(), time.monotonic()
    seen: Counter[str] = Counter()
    broken: list[str] = []
    killed = attempts = 0
    duration = 0.0
    while killed < kills:
        attempts += 1
        place = folder / f"{workers}-{attempts}"
        place.mkdir()
        overwrite = attempts % 2 == 1
        if overwrite:
            status_of(start(sources["old"], place / "d", workers=1))
        started = time.monotonic()
        child = start(sources["new"], place / "d", workers=workers)
        if duration:
            time.sleep(generator.uniform(0, 1.1 * duration))
            (os.killpg if _leads(child) and attempts % 4 < 2 else os.kill)(child, signal.SIGKILL)
        status = status_of(child)
        if status == 0:
            duration = max(0.02, 0.5 * duration + 0.3 * (time.monotonic() - started))
        killed += status == -signal.SIGKILL
        if not wait_until_gone(child):
            broken.append(f"attempt {attempts}: a process stayed")
        after = state(place / "d", wanted)
        seen[after] += 1
        allowed = {"old" if overwrite else "absent", "new"}
        if after not in allowed or (status == 0 and after != "new"):
            broken.append(f"attempt {attempts}: status {status}, {after}")
        if status_of(start(sources["new"], place / "d", workers=1)) != 0:
            broken.append(f"attempt {attempts}: the rerun failed")
        final, names = state(place / "d", wanted), sorted(os.listdir(place))
        if (final, names) != ("new", ["d"]):
            broken.append(f"attempt {attempts}: then {final}, {names}")
        if attempts % 50 == 0:
            print(f"{workers} workers: {killed} kills", file=sys.stderr, flush=True)
    broken += new_objects(before)
    return {
        "workers": workers,
        "kills": killed,
        "attempts": attempts,
        "seen_after": dict(seen),
        "seconds": round(time.monotonic() - began, 1),
        "broken": broken,
    }


def _leads(child: int) -> bool:
    """Return whether the child has its own process group yet."""
    try:
        return os.getpgid(child) == child
    except ProcessLookupError:
        return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=320, help="of each number of workers")
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    prepare("sources.hdf5")
    documents = []
    for workers in arguments.workers:
        with tempfile.TemporaryDirectory(prefix="gear-kill-") as temporary:
            documents.append(
                kill_many(
                    arguments.kills, workers=workers, seed=arguments.seed, folder=Path(temporary)
                )
            )
    print(json.dumps(documents, indent=1))
    return 1 if any(document["broken"] for document in documents) else 0


if __name__ == "__main__":
    sys.exit(main())
