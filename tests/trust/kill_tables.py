"""Kill processes that share a table: ``python -m tests.trust.kill_tables``.

In each cycle one process makes a block of host memory and another attaches to it; both are killed
with SIGKILL, one after the other or as a process group.  No name, no segment, no process and no
memory may stay.  Prints one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from gear_offline.tables.host_memory import HostBlock, HostHandle
from tests.trust.leaks import new_objects, system_objects, wait_until_gone

BLOCK_BYTES = 64 << 20


def shared_bytes() -> int:
    """Return the machine's shared memory in use."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("Shmem:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("/proc/meminfo has no Shmem")


def hold(writer: int) -> None:
    """Make a block, let a child attach to it, say so, and wait to be killed."""
    os.setsid()
    block = HostBlock.create(BLOCK_BYTES)
    block.allocate((BLOCK_BYTES,), np.dtype(np.uint8))[:] = 1
    handle = json.dumps(block.handle().to_json())
    if os.fork() == 0:
        other = HostBlock.attach(HostHandle.from_json(json.loads(handle)))
        other.allocate((BLOCK_BYTES,), np.dtype(np.uint8))[0] = 2
        os.write(writer, f"{os.getpid()}\n".encode())
    signal.pause()


def cycle(*, group: bool) -> bool:
    """Run one cycle; return whether every process is gone."""
    reader, writer = os.pipe()
    owner = os.fork()
    if owner == 0:
        try:
            hold(writer)
        finally:
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        other = int(pipe.readline())
        if group:
            os.killpg(owner, signal.SIGKILL)
        else:
            os.kill(owner, signal.SIGKILL)
            os.kill(other, signal.SIGKILL)
    os.waitpid(owner, 0)
    return wait_until_gone(owner)


def run(cycles: int) -> dict[str, Any]:
    before, held = system_objects(), shared_bytes()
    descriptors = len(os.listdir("/proc/self/fd"))
    stayed = sum(not cycle(group=bool(number % 2)) for number in range(cycles))
    time.sleep(0.2)
    # Others share the machine: what counts is that nothing of the size of a block stays a cycle.
    kept = shared_bytes() - held
    return {
        "cycles": cycles,
        "block_bytes": BLOCK_BYTES,
        "processes_left": stayed,
        "objects_left": new_objects(before),
        "descriptors_left": len(os.listdir("/proc/self/fd")) - descriptors,
        "shared_bytes_more": kept,
        "memory_left": kept > BLOCK_BYTES * max(cycles // 10, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cycles", type=int, default=100)
    document = run(parser.parse_args().cycles)
    print(json.dumps(document, indent=1))
    left = ("processes_left", "objects_left", "descriptors_left", "memory_left")
    return 1 if any(document[key] for key in left) else 0


if __name__ == "__main__":
    sys.exit(main())
