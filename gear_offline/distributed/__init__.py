"""Ranks and nodes of a run, which node holds which shards, and rows that come from other nodes.

`world` has the ranks and their small messages, `sharding` gives shards to nodes and segments to
ranks, and `exchange` brings rows of other nodes into landing memory: by collectives
of torch or by RDMA reads (`rdma`, which does not import torch).
"""

from __future__ import annotations

import os

# Environment variable: the network interface of this node for everything that crosses nodes.
INTERFACE_VARIABLE = "GEAR_OFFLINE_INTERFACE"


def is_first_process() -> bool:
    """Whether this is the process that writes and prints, among those that torchrun started."""
    return os.environ.get("RANK", "0") == "0"
