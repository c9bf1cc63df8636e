"""What the ranks do in tests of the exchange: functions that run inside `exchange_team` processes.

Each takes its player first; each returns what the test compares.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt

from gear_offline.distributed.exchange import Piece, Shelf
from gear_offline.errors import GearError
from tests.exchange_team import SECRET, Failure, Player, ReadRow, World, reads_of

Steps = Sequence[Sequence[ReadRow]]


def buffers(world: World, rows: int) -> list[npt.NDArray[np.uint8]]:
    return [np.full((rows, n), 255, np.uint8) for n in world.row_bytes]


def run_steps(
    player: Player,
    world: World,
    steps: Steps,
    rows: int,
    ahead: int = 1,
    backwards: bool = False,
    options: dict[str, Any] | None = None,
) -> list[list[bytes]]:
    """Post `steps` up to `ahead` at a time, wait for each; return the destinations' bytes."""
    with player.open(world.shelf(player.rank), **(options or {})) as exchange:
        targets = [buffers(world, rows) for _ in steps]
        for first in range(0, len(steps), ahead):
            batch = list(range(first, min(first + ahead, len(steps))))
            for step in batch:
                exchange.post(step, reads_of(steps[step]), exchange.register(targets[step]))
            for step in reversed(batch) if backwards else batch:
                exchange.wait(step)
    return [[buffer.tobytes() for buffer in target] for target in targets]


def overlapped(player: Player, world: World, steps: Steps, rows: int, ahead: int) -> list[Any]:
    """Always keep `ahead` steps posted, with one destination a slot, used again and again."""
    found = []
    with player.open(world.shelf(player.rank), depth=ahead) as exchange:
        slots = [buffers(world, rows) for _ in range(ahead)]
        targets = [exchange.register(slot) for slot in slots]
        for step in range(len(steps) + ahead):
            if step >= ahead:
                exchange.wait(step - ahead)
                found.append([b.tobytes() for b in slots[step % ahead]])
            if step < len(steps):
                for buffer in slots[step % ahead]:
                    buffer[:] = 255
                exchange.post(step, reads_of(steps[step]), targets[step % ahead])
    return found


def misuse(player: Player, world: World, rows: int) -> list[str]:
    """Do what the contract forbids, one after the other; return the codes."""
    codes = []

    def refused(call: Any) -> None:
        try:
            call()
            codes.append("nothing")
        except GearError as error:
            codes.append(error.code)

    exchange = player.open(world.shelf(player.rank), depth=2)
    target = exchange.register(buffers(world, rows))
    none = reads_of([])
    refused(lambda: exchange.wait(0))
    exchange.post(3, none, target)
    refused(lambda: exchange.post(3, none, target))
    refused(lambda: exchange.post(2, none, target))
    exchange.post(5, none, target)
    refused(lambda: exchange.post(6, none, target))
    exchange.wait(5)
    refused(lambda: exchange.wait(5))
    exchange.wait(3)
    refused(lambda: exchange.register([np.zeros((rows, 3), np.float64)]))
    exchange.close()
    exchange.close()
    refused(lambda: exchange.post(9, none, target))
    refused(lambda: exchange.wait(5))
    refused(lambda: exchange.register(buffers(world, rows)))
    return codes


def wrong_read(player: Player, world: World, steps: Steps, rows: int, read: ReadRow) -> Any:
    """Post reads of which one is wrong; then a good step.

    Returns the error's code, and the rows of the good step, or why that could not be.
    """
    exchange = player.open(world.shelf(player.rank))
    wrong, right = buffers(world, rows), buffers(world, rows)
    code = "nothing"
    try:
        exchange.post(0, reads_of([*steps[0], read]), exchange.register(wrong))
    except GearError as error:
        code = error.code
    try:
        if code == "nothing":
            exchange.wait(0)
        exchange.post(1, reads_of(steps[0]), exchange.register(right))
        exchange.wait(1)
    except GearError as error:
        exchange.close()
        return code, error.code, str(error)
    exchange.close()
    return code, [buffer.tobytes() for buffer in right], ""


def faulty(
    player: Player, world: World, steps: Steps, rows: int, seconds: float, role: str, who: int
) -> Any:
    """Post a first step; then rank `who` fails in its `role`, and the rest goes on for a while.

    Returns the error of the rest, or ``None``, and the time of it; where reads are one-sided, some
    more steps may succeed before the news comes.
    """
    exchange = player.open(world.shelf(player.rank), seconds=seconds)
    target = exchange.register(buffers(world, rows))
    if player.rank == who:
        exchange.post(0, reads_of(steps[0]), target)
        exchange.wait(0)
        if role == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif role == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif role == "late":
            time.sleep(seconds * 2)
            exchange.close()
            return None
        else:  # leaves by an exception
            with exchange:
                raise ValueError("the trainer failed")
    begin = time.monotonic()
    try:
        for step in range(60 if role in ("killed", "left") else 2):
            exchange.post(step, reads_of(steps[min(step, 1)]), target)
            exchange.wait(step)
            if step > 1:
                time.sleep(seconds / 60)
    except GearError as error:
        again = ""
        try:
            exchange.wait(step)
        except GearError as second:
            again = second.code
        elapsed = time.monotonic() - begin
        exchange.close()
        return Failure(error.code, str(error), again), elapsed
    elapsed = time.monotonic() - begin
    exchange.close()
    return None, elapsed


def resources_after(player: Player, world: World, steps: Steps, rows: int, times: int) -> Any:
    """Open and close a few times; return what is left before and after."""
    run_steps(player, world, steps, rows)  # what is loaded once is loaded now
    before = _resting(player)
    for _ in range(times):
        run_steps(player, world, steps, rows)
    return before, _resting(player)


def _resting(player: Player) -> dict[str, int]:
    """Return what this rank holds once the others, whose things are counted too, have closed.

    Gloo gives back the connections of exchanges that ended in errors only at their timeout.
    """
    time.sleep(1.0)
    found, same = player.resources(), 0
    deadline = time.monotonic() + 20
    while same < 5 and time.monotonic() < deadline:
        time.sleep(0.2)
        now = player.resources()
        found, same = now, same + 1 if now == found else 0
    return found


def close_early(player: Player, world: World, seconds: float) -> float:
    """Rank 0 closes at once, the others a little later; return how long closing took."""
    exchange = player.open(world.shelf(player.rank), seconds=seconds)
    if player.rank:
        time.sleep(0.3)
    begin = time.monotonic()
    exchange.close()
    return time.monotonic() - begin


def timeout_of_wait(player: Player, world: World, steps: Steps, rows: int) -> Any:
    """Rank 1 posts a second late: a short wait of the others fails, in time."""
    exchange = player.open(world.shelf(player.rank), seconds=20)
    target = exchange.register(buffers(world, rows))
    if player.rank == 1:
        time.sleep(1.0)
    begin = time.monotonic()
    try:
        exchange.post(0, reads_of(steps[0]), target)
        exchange.wait(0, timeout=timedelta(seconds=0.4))
    except GearError as error:
        elapsed = time.monotonic() - begin
        exchange.close()
        return error.code, str(error), elapsed
    exchange.close()
    return "", "", time.monotonic() - begin


def posted_by_objects(player: Player, world: World, steps: Steps, rows: int) -> Any:
    """As `run_steps`, with the poster that needs nothing but pyverbs' own objects."""
    from importlib import import_module

    from gear_offline.distributed.exchange.work_requests import ObjectPoster

    verbs: Any = import_module("gear_offline.distributed.exchange.verbs")
    kept, verbs.make_poster = verbs.make_poster, ObjectPoster
    try:
        return run_steps(player, world, steps, rows)
    finally:
        verbs.make_poster = kept


def attack(player: Player, world: World, steps: Steps, rows: int, how: str) -> Any:
    """Rank 0 tries what it must not be able to do to rank 1; returns its error, and rank 1's rows.

    It has gone through the front door: it knows the secret, the addresses and the keys.
    """
    shelf = world.shelf(player.rank)
    exchange: Any = player.open(shelf, seconds=20)
    target = exchange.register(buffers(world, rows))
    before = [memory.bytes.copy() for piece in shelf.memory for memory in piece]
    if how == "stale key" and player.rank == 1:
        for region in exchange._endpoint._regions:
            region.close()
        exchange._endpoint._regions.clear()
    exchange._mesh.gather("ready")
    code = ""
    if player.rank == 0:
        directory = exchange._directory
        if how == "out of range":
            directory.length[:] += 1 << 20
        if how == "write":
            exchange._poster = WritePoster(exchange._poster)
        try:
            exchange.post(0, reads_of(steps[0]), target)
            exchange.wait(0)
        except GearError as error:
            code = error.code
    exchange._mesh.gather("done")
    same = all(
        np.array_equal(memory.bytes, kept)
        for memory, kept in zip((m for p in shelf.memory for m in p), before, strict=True)
    )
    exchange.close()
    return code, same


class WritePoster:
    """Turns reads into RDMA writes."""

    def __init__(self, poster: Any) -> None:
        self._poster = poster

    def post(self, qp: Any, first: int, count: int) -> None:
        for number in range(count):
            opcode = first + number * 128 + 28
            ctypes.c_uint32.from_address(opcode).value = 0  # IBV_WR_RDMA_WRITE
        self._poster.post(qp, first, count)
        for number in range(count):
            ctypes.c_uint32.from_address(first + number * 128 + 28).value = 4


def wrong_secret(player: Player, world: World, who: int) -> Any:
    """Rank `who` has another secret than the rest."""
    secret = SECRET if player.rank != who else b"something else of enough length"
    try:
        player.open(world.shelf(player.rank), seconds=3, secret=secret).close()
    except GearError as error:
        return error.code, str(error)
    return "", ""


def run_steps_on_gpu(
    player: Player, world: World, steps: Steps, rows: int, ahead: int, mixed: bool
) -> list[list[bytes]]:
    """As `run_steps`, with rows and destinations on the GPU; `mixed`: every other piece is not."""
    import torch

    host = world.shelf(player.rank)
    pieces = [
        Piece(
            episodes=episodes,
            rows=tuple(
                m.bytes if mixed and number % 2 else torch.from_numpy(m.bytes).cuda()
                for m in memory
            ),
        )
        for number, (episodes, memory) in enumerate(zip(host.episodes, host.memory, strict=True))
    ]
    shelf = Shelf(lengths=world.lengths, row_bytes=world.row_bytes, pieces=pieces)
    targets = [[torch.from_numpy(b).cuda() for b in buffers(world, rows)] for _ in steps]
    with player.open(shelf) as exchange:
        for first in range(0, len(steps), ahead):
            batch = list(range(first, min(first + ahead, len(steps))))
            for step in batch:
                exchange.post(step, reads_of(steps[step]), exchange.register(targets[step]))
            for step in batch:
                exchange.wait(step)
    return [[buffer.cpu().numpy().tobytes() for buffer in target] for target in targets]


def before_the_cut(
    player: Player, world: World, steps: Steps, rows: int, interfaces: Sequence[str]
) -> list[bytes]:
    """Open between nodes, do a step, and keep the exchange; returns its rows."""
    exchange = player.open(world.shelf(player.rank), interface=interfaces[player.rank])
    target = buffers(world, rows)
    player.memory["exchange"] = exchange
    player.memory["target"] = exchange.register(target)
    exchange.post(0, reads_of(steps[0]), player.memory["target"])
    exchange.wait(0)
    return [buffer.tobytes() for buffer in target]


def after_the_cut(player: Player, steps: Steps, seconds: float) -> tuple[str, str, float, float]:
    """Go on; returns the error's code and text, when it came, and how long closing took."""
    exchange: Any = player.memory["exchange"]
    begin = time.monotonic()
    code = text = ""
    try:
        exchange.post(1, reads_of(steps[0]), player.memory["target"])
        exchange.wait(1, timeout=timedelta(seconds=seconds))
    except GearError as error:
        code, text = error.code, str(error)
    elapsed = time.monotonic() - begin
    exchange.close()
    return code, text, elapsed, time.monotonic() - begin - elapsed
