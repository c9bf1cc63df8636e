"""Jobs for tests of worker processes."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from gear_offline.core.workers import Caller, Worker
from gear_offline.errors import InputError


def add(caller: Caller, *numbers: int) -> int:
    print("printed by a job")
    return sum(numbers)


def count_down(caller: Caller, start: int) -> str:
    for number in range(start, 0, -1):
        caller.send(number)
    return "lift-off"


def listen(caller: Caller) -> Any:
    return caller.receive()


def fail(caller: Caller, how: str) -> Any:
    if how == "input":
        raise InputError("COLUMN", "not a column", where="here", remedy="name one")
    if how == "other":
        raise KeyError("no such key")
    if how == "result":
        return lambda: None  # cannot be pickled
    if how == "exit":
        print("last words", file=sys.stderr)
        os._exit(3)
    if how == "leave":
        sys.exit("last words")
    return os.kill(os.getpid(), signal.SIGKILL)


def threads(caller: Caller) -> str | None:
    return os.environ.get("OMP_NUM_THREADS")


def sleep(caller: Caller, begun: Path | None = None) -> None:
    caller.send(os.getpid())
    if begun is not None:
        begun.touch()
    for _ in range(6000):  # Ray interrupts what is in Python, no long sleep
        time.sleep(0.1)


if __name__ == "__main__":  # a program whose worker is at work when it is killed
    worker = Worker()
    worker.start("tests.worker_jobs:sleep")
    print(worker.receive(), flush=True)
    time.sleep(600)
