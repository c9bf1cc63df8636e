"""Random streams that depend on names only: not on the order or the process of the work.

Every episode and every search direction has its own stream, addressed by the user's seed and a
path of integers.  So the data are the same for any number of processes and environments.
"""

from __future__ import annotations

import numpy as np

# First element of a path: what the stream is for.
TRAIN, EVALUATE, RECORD, GATE = 1, 2, 3, 4


def stream(seed: int, *path: int) -> np.random.Generator:
    """Return the generator at `path`; equal arguments give equal draws."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, *path])))


def reset_seed(seed: int, *path: int) -> int:
    """Return the 31-bit seed for an environment's reset at `path`."""
    return int(np.random.SeedSequence([seed, *path]).generate_state(1)[0] >> 1)
