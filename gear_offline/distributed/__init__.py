"""Ranks and nodes of a run, the shards of each node, and rows that come from other nodes.

`world` has the ranks and their small messages, `sharding` gives shards to nodes and segments to
ranks.  `exchange` brings rows of other nodes into landing memory, by collectives of torch or by
RDMA reads (`rdma`, which does not import torch).
"""

from __future__ import annotations

import os

from gear_offline.errors import InputError

# Environment variable: the network interface of this node for everything that crosses nodes.
INTERFACE_VARIABLE = "GEAR_OFFLINE_INTERFACE"


def read_rank_and_size() -> tuple[int, int]:
    """Read this process's number and their count: RANK and WORLD_SIZE, as torchrun sets them.

    A variable that is no number, too large, or set without the other one is ``USAGE``.
    """
    rank, size = environment_number("RANK", 0), environment_number("WORLD_SIZE", 1)
    if rank is None and (size or 1) > 1:
        raise _variable_error("WORLD_SIZE", "and RANK is not set")
    if (rank or 0) >= (size or 1):
        raise _variable_error("RANK", f"and WORLD_SIZE is {size or 'not set'}")
    return rank or 0, size or 1


def is_first_process() -> bool:
    """Return true in the process that writes and prints, among those that torchrun started."""
    return read_rank_and_size()[0] == 0


def check_meeting_place() -> None:
    """Refuse (``USAGE``) variables without the address at which a launcher's processes meet."""
    if not os.environ.get("MASTER_ADDR", "").strip():
        raise _variable_error("MASTER_ADDR", "and has to name a host")
    if (environment_number("MASTER_PORT", 1) or 1 << 16) >= 1 << 16:
        raise _variable_error("MASTER_PORT", "and has to be a number from 1 to 65535")


def environment_number(name: str, least: int) -> int | None:
    """Return the whole number in an environment variable; None where it is unset or empty."""
    text = os.environ.get(name, "").strip()
    if text and not (text.isascii() and text.isdecimal() and least <= int(text) < 1 << 31):
        raise _variable_error(name, f"and has to be a whole number from {least} on")
    return int(text) if text else None


def _variable_error(name: str, why: str) -> InputError:
    value = os.environ.get(name)
    problem = f"the environment variable {name} is {'not set' if value is None else repr(value)}"
    remedy = "start several processes with torchrun, or unset WORLD_SIZE, RANK and LOCAL_RANK to "
    return InputError("USAGE", f"{problem}, {why}", remedy=f"{remedy}work in this process alone")
