"""Kill short trainings, over and over: ``python -m tests.trust.kill_cycles``.

Each cycle trains in a new session with checkpoints on their way and processes that evaluate
beside, and is killed with SIGKILL at a random instant, the trainer alone or the whole process
group.  No process, no shared memory, no semaphore and, with ``--device cuda``, no GPU memory may
stay.  Prints one JSON document.

``--parallel N`` shares the cycles out to N processes, and these to the GPUs (all, or those of
``CUDA_VISIBLE_DEVICES``).  What belongs to the machine as a whole is compared once, before the
first cycle and after the last: in between others' objects come and go.  On a GPU one cycle in ten
compiles its model, which takes longest and starts torch's processes for that.

A trainer dies with the process that began it, and that with this program; SIGTERM and SIGINT end
everything and print what is known so far.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from gear_offline.core.processes import die_with_parent
from gear_offline.core.progress import progress
from gear_offline.training.checkpoint_folder import list_checkpoints
from tests.trust.leaks import new_objects, session_processes, system_objects, wait_until_gone

GPU_SLACK_BYTES = 64 << 20  # what a driver may keep of its own, on each GPU
BEGIN_SECONDS = 90.0  # for the first checkpoint of a cycle
GONE_SECONDS = 70.0  # torch's compilers look once a minute, should they miss their parent's end
COMPILED_SHARE = 0.1  # of the cycles on a GPU
SETTLE_SECONDS = 10.0  # drivers give memory back a little after the process has gone


class Stopped(BaseException):
    """SIGTERM or SIGINT came."""


@dataclass(frozen=True)
class Cycle:
    """One cycle to run: the trainer lives for `seconds` after its first checkpoint."""

    number: int
    seconds: float
    compiled: bool = False


@dataclass
class Found:
    """What the cycles said that have ended, and the sessions of which processes may be left."""

    cycles: list[dict[str, Any]] = field(default_factory=list)
    sessions: set[int] = field(default_factory=set)
    descriptors_left: int = 0
    stopped: bool = False


def smi(query: str, *options: str) -> list[str]:
    """Return a line for each GPU, as the driver says."""
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", *options]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def gpus_to_use(device: str) -> list[str]:
    """Return the GPUs that the trainings are spread over; none on a CPU."""
    if device != "cuda":
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return [name.strip() for name in visible.split(",") if name.strip()] or smi("index")


def gpu_bytes(gpus: Sequence[str]) -> list[int]:
    """Return the memory in use on each of these GPUs."""
    return [int(mib) << 20 for mib in smi("memory.used", f"--id={','.join(gpus)}")] if gpus else []


def train_for_ever(data: Path, run: Path, device: str, *, compiled: bool) -> None:
    """Train the tiny recipe with a save every two steps and evaluations beside."""
    from gear_offline.runs.trainer import train
    from tests.training_support import register_importable, tiny_recipe

    register_importable()
    recipe = tiny_recipe(
        *(data, "train.steps=100000", "train.checkpoint_every=2", "train.evaluate_every=2"),
        *("evaluate.beside=on", "evaluate.workers=2", f"train.device={device}"),
        f"train.compile={'on' if compiled else 'off'}",
    )
    train(recipe, out=run, quiet=True)


def begin(folder: Path, cycle: Cycle, device: str, pipe: int) -> int:
    """Fork a trainer with a session of its own; return its id."""
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        try:
            os.close(pipe)
            die_with_parent(parent)
            os.setsid()
            data, run = folder / "dataset", folder / f"run-{cycle.number}"
            train_for_ever(data, run, device, compiled=cycle.compiled)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return child


def run_cycle(folder: Path, cycle: Cycle, device: str, pipe: int) -> dict[str, Any]:
    """Run one cycle; return what was killed and what stayed."""
    checkpoints = folder / f"run-{cycle.number}" / "checkpoints"
    child = begin(folder, cycle, device, pipe)
    tell(pipe, {"begun": child})
    deadline, ended = time.monotonic() + BEGIN_SECONDS, 0
    while not list_checkpoints(checkpoints) and time.monotonic() < deadline and not ended:
        time.sleep(0.005)
        ended, _ = os.waitpid(child, os.WNOHANG)
    if not ended:
        time.sleep(cycle.seconds)
        ended, _ = os.waitpid(child, os.WNOHANG)
    processes = len(session_processes(child))
    killed = time.monotonic()
    if not ended:
        (os.killpg if cycle.number % 2 else os.kill)(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return {
        "session": child,
        "ended_by_itself": bool(ended),
        "killed": processes,
        "gone": wait_until_gone(child, seconds=GONE_SECONDS),
        "gone_seconds": time.monotonic() - killed,
        "checkpoints": len(list_checkpoints(checkpoints)),
    }


def tell(pipe: int, message: dict[str, Any]) -> None:
    """Send a line; short ones of several processes do not mix (PIPE_BUF)."""
    os.write(pipe, json.dumps(message).encode() + b"\n")


def work(folder: Path, share: Sequence[Cycle], device: str, gpu: str | None, pipe: int) -> None:
    """Run a worker's share of the cycles, one after another."""
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # CUDA looks at it when a trainer first uses it
    descriptors = len(os.listdir("/proc/self/fd"))
    for cycle in share:
        tell(pipe, run_cycle(folder, cycle, device, pipe))
    tell(pipe, {"descriptors": len(os.listdir("/proc/self/fd")) - descriptors})


def start_worker(
    folder: Path, share: Sequence[Cycle], device: str, gpu: str | None, pipe: tuple[int, int]
) -> int:
    """Fork a worker; return its id."""
    parent = os.getpid()
    worker = os.fork()
    if worker == 0:
        code = 1
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            die_with_parent(parent)
            os.close(pipe[0])
            work(folder, share, device, gpu, pipe[1])
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return worker


def run_all(
    folder: Path, cycles: Sequence[Cycle], device: str, parallel: int, found: Found
) -> None:
    """Run cycles in so many workers and note in `found` what they say, until all have ended."""
    pipe = os.pipe()
    gpus: list[str | None] = [*gpus_to_use(device)] or [None]
    workers: list[int] = []
    try:
        for number in range(min(parallel, len(cycles))):
            gpu = gpus[number % len(gpus)]
            workers.append(start_worker(folder, cycles[number::parallel], device, gpu, pipe))
        os.close(pipe[1])
        with os.fdopen(pipe[0]) as lines, progress(len(cycles), "kills", unit="cycles") as advance:
            for message in map(json.loads, lines):
                if "begun" in message:
                    found.sessions.add(message["begun"])
                elif "descriptors" in message:
                    found.descriptors_left += message["descriptors"]
                else:
                    found.cycles.append(message)
                    if message["gone"]:  # its number may be another program's from now on
                        found.sessions.discard(message["session"])
                    advance(1)
    except Stopped:
        found.stopped = True
        for worker in workers:
            os.kill(worker, signal.SIGKILL)  # not waited for yet, so the number is still theirs
    end_sessions(found.sessions)
    for worker in workers:
        os.waitpid(worker, 0)


def end_sessions(sessions: Collection[int]) -> None:
    """Kill every process of these sessions and wait a little until they are gone."""
    for session in sessions:
        for process in session_processes(session):
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue
    for session in sessions:
        wait_until_gone(session, seconds=1.0)


def stop(number: int, frame: FrameType | None) -> None:
    """Handle SIGTERM and SIGINT: further ones change nothing."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise Stopped


@contextmanager
def stoppable() -> Iterator[None]:
    """Let SIGTERM and SIGINT raise `Stopped`."""
    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def settled_gpu_bytes(gpus: Sequence[str]) -> list[int]:
    """Return the memory in use on each of these GPUs once it stays what it is."""
    deadline, now = time.monotonic() + SETTLE_SECONDS, gpu_bytes(gpus)
    while gpus and time.monotonic() < deadline:
        time.sleep(0.5)
        before, now = now, gpu_bytes(gpus)
        if before == now:
            break
    return now


def summary(found: Found) -> dict[str, Any]:
    """Return what the cycles said, in figures."""
    cycles = found.cycles
    return {
        "checkpoints_written": sum(cycle["checkpoints"] for cycle in cycles),
        "without_checkpoint": sum(not cycle["checkpoints"] for cycle in cycles),
        "processes_killed": sum(cycle["killed"] for cycle in cycles),
        "ended_by_themselves": sum(cycle["ended_by_itself"] for cycle in cycles),
        "processes_left": sum(not cycle["gone"] for cycle in cycles),
        "slowest_seconds_until_gone": max((cycle["gone_seconds"] for cycle in cycles), default=0.0),
        "descriptors_left": found.descriptors_left,
    }


def run(cycles: int, *, device: str = "cpu", parallel: int = 1, seed: int = 3) -> dict[str, Any]:
    """Run the cycles and return the document; fewer of them if a signal stops it."""
    from gear_offline.runs import trainer  # noqa: F401 - trainers start with these imported
    from tests.training_support import tiny_data

    generator = random.Random(seed)
    gpus = gpus_to_use(device)
    share = COMPILED_SHARE if gpus else 0.0
    wanted = [
        Cycle(number, generator.uniform(0, 1.5), generator.random() < share)
        for number in range(cycles)
    ]
    with tempfile.TemporaryDirectory(prefix="gear-cycles-") as temporary, stoppable():
        folder, found = Path(temporary), Found()
        os.rename(tiny_data(folder), folder / "dataset")
        # What a first use of the machine leaves for good, on each GPU.
        first = [Cycle(-1 - number, 1.0) for number in range(len(gpus) or 1)]
        run_all(folder, first, device, len(first), warm := Found())
        before, gpu, began = system_objects(), settled_gpu_bytes(gpus), time.monotonic()
        if not warm.stopped:
            run_all(folder, wanted, device, parallel, found)
        seconds = time.monotonic() - began
        time.sleep(0.5)
        more = [now - then for now, then in zip(settled_gpu_bytes(gpus), gpu, strict=True)]
        return {
            "cycles": len(found.cycles),
            "cycles_asked": cycles,
            "stopped": warm.stopped or found.stopped,
            "parallel": parallel,
            "device": device,
            "gpus": len(gpus),
            "compiled": sum(cycle.compiled for cycle in wanted),
            "seconds": round(seconds, 1),
            **summary(found),
            "objects_left": new_objects(before),
            "gpu_bytes_more": max(more, default=None),
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cycles", type=int, default=100)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--parallel", type=int, default=1, help="cycles at a time")
    arguments = parser.parse_args()
    document = run(arguments.cycles, device=arguments.device, parallel=arguments.parallel)
    print(json.dumps(document, indent=1))
    kept = (document["gpu_bytes_more"] or 0) > GPU_SLACK_BYTES
    missing = document["cycles"] < document["cycles_asked"]
    left = ("processes_left", "objects_left", "descriptors_left")
    broken = (*left, "ended_by_themselves", "without_checkpoint")
    return 1 if kept or missing or any(document[key] for key in broken) else 0


if __name__ == "__main__":
    sys.exit(main())
