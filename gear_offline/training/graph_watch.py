"""Waiting for captured steps of several ranks, but not for ever.

NCCL's watchdog does not see the collectives of a CUDA graph: a GPU whose peers are gone waits in
its kernel without end, and so would the host at its next look at a loss.
"""

from __future__ import annotations

import os
import sys
import time

import torch

from gear_offline.core.text import show_error
from gear_offline.distributed.world import World

POLL_SECONDS = 100e-6


def wait_for_steps(world: World) -> None:
    """Return when the GPU has done what it was given.

    After `World.timeout` seconds the process ends with code 1 and ``RANK_LOST`` on stderr.  It
    cannot raise an error: neither the graph nor the process group can be closed while the GPU
    waits.
    """
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    deadline = time.monotonic() + world.timeout
    while not event.query():  # type: ignore[no-untyped-call]
        if time.monotonic() > deadline:
            show_error(
                "RANK_LOST",
                "another rank is gone or too slow, while the GPU added up gradients: waited "
                f"{world.timeout:g} s; torchrun --max-restarts goes on from the last checkpoint "
                "with --resume",
            )
            sys.stderr.flush()
            os._exit(1)
        time.sleep(POLL_SECONDS)
