"""Kill a conversion with SIGKILL at every system call that changes the disk; report what is left.

Run as ``python -m tests.convert_kill_points FOLDER MODE``, MODE ``new`` or ``overwrite``; prints
one JSON document.  It forks, so it runs in a process of its own that has no threads.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gear_offline.convert import convert
from gear_offline.dataset.dataset import open_dataset
from gear_offline.errors import InputError
from tests.support import ArraySource, hopper_columns

CALLS = ("open", "pwrite", "fsync", "mkdir", "rename", "unlink", "rmdir")
LENGTHS = [4, 3]


def run(target: Path, *, seed: int, overwrite: bool = False) -> None:
    source = ArraySource(hopper_columns(sum(LENGTHS), seed=seed), LENGTHS)
    convert(source, target, shard_bytes=300, block_bytes=64, overwrite=overwrite, quiet=True)


def arm(kill_at: int) -> None:
    """Make this process kill itself before its `kill_at`-th call that changes the disk."""
    count = 0

    def wrap(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **options)

        return counted

    for name in CALLS:
        setattr(os, name, wrap(getattr(os, name)))


def child(work: Callable[[], None]) -> int:
    """Run `work` in a fork; return its exit status, negative for a signal."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def state(target: Path) -> str:
    """Return what a reader sees: "absent", or the seed of the data, or the error's code."""
    try:
        dataset = open_dataset(target)
    except InputError as error:
        return "absent" if error.code == "DATASET_NOT_FOUND" else error.code
    found = dataset.column("observations").tobytes()
    for seed in (1, 2):
        if found == hopper_columns(sum(LENGTHS), seed=seed)["observations"].tobytes():
            return f"seed {seed}"
    return "mixed"


def try_point(target: Path, kill_at: int, *, overwrite: bool) -> dict[str, Any]:
    """Convert, kill, look, convert again, look."""
    target.parent.mkdir()
    if overwrite and child(lambda: run(target, seed=1)) != 0:
        raise RuntimeError("the first conversion failed")

    def killed() -> None:
        arm(kill_at)
        run(target, seed=2, overwrite=overwrite)

    return {
        "status": child(killed),
        "after": state(target),
        "again": child(lambda: run(target, seed=2, overwrite=True)),
        "final": state(target),
        "names": sorted(os.listdir(target.parent)),
    }


def main() -> None:
    folder, mode = Path(sys.argv[1]), sys.argv[2]
    points: list[dict[str, Any]] = []
    while not points or points[-1]["status"] != 0:
        kill_at = len(points) + 1
        target = folder / f"{mode}-{kill_at}" / "d"
        points.append(try_point(target, kill_at, overwrite=mode != "new"))
    print(json.dumps(points))


if __name__ == "__main__":
    main()
