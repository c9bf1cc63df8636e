"""How the ranks of a run meet: in a corner of the store that no earlier start has written to.

``torchrun`` may keep its store when it starts the ranks again, with the addresses of the dead in
it, and its agents do not count restarts alike: an agent whose ranks were stopped because those of
another node failed does not count that.  So rank 0 makes up a name and tells it to whoever asks
anew.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch.distributed as dist

from gear_offline.errors import GearError

POLL_SECONDS = 0.002


def private_store(store: Any, *, rank: int, size: int, timeout: float) -> Any:
    """Return a part of the store that only the ranks of this start share.

    Parameters
    ----------
    store
        That of ``torchrun``; all ranks reach it.
    rank, size
        Of this process, and how many there are.
    timeout
        Seconds for all to come.

    Raises
    ------
    GearError
        ``RANK_LOST``, naming who did not come.
    """
    untyped: Any = dist
    name = _invite(store, size, timeout) if rank == 0 else _ask(store, rank, timeout)
    return untyped.PrefixStore(f"gear-offline/{name}", store)


def _ask(store: Any, rank: int, timeout: float) -> str:
    """Return the name that rank 0 gives as the answer to a number nobody has used before."""
    number = os.urandom(8).hex()
    store.set(f"gear-offline/here/{rank}", number)
    deadline = time.monotonic() + timeout
    while not store.check([f"gear-offline/name/{number}"]):
        if time.monotonic() > deadline:
            raise _absent([0], timeout)
        time.sleep(POLL_SECONDS)
    name = str(store.get(f"gear-offline/name/{number}").decode())
    store.set(f"gear-offline/{name}/{rank}", b"1")
    return name


def _invite(store: Any, size: int, timeout: float) -> str:
    """Make up a name, answer every number that turns up, and return it when all have it."""
    name = os.urandom(8).hex()
    answered: dict[int, bytes] = {}  # also numbers of the dead, until the living write theirs
    missing = list(range(1, size))
    deadline = time.monotonic() + timeout
    while missing:
        for rank in missing:
            key = f"gear-offline/here/{rank}"
            if store.check([key]) and (number := store.get(key)) != answered.get(rank):
                store.set(f"gear-offline/name/{number.decode()}", name)
                answered[rank] = number
        missing = [r for r in missing if not store.check([f"gear-offline/{name}/{r}"])]
        if missing and time.monotonic() > deadline:
            raise _absent(missing, timeout)
        time.sleep(POLL_SECONDS if missing else 0.0)
    return name


def _absent(ranks: list[int], timeout: float) -> GearError:
    names = ", ".join(map(str, ranks))
    return GearError(
        "RANK_LOST",
        f"rank {names} did not join within {timeout:g} s",
        remedy="look at the messages of that rank and at the network to its node; train.timeout "
        "says how long to wait",
    )
