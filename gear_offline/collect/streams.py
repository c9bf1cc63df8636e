"""Random streams that depend on names only: not on the order or the process of the work.

Every episode and every search direction has its own stream, addressed by the user's seed and a
path of integers.  So the data are the same for any number of processes and environments.
"""

from __future__ import annotations

import numpy as np

# First element of a path: what the stream is for.
TRAIN, EVALUATE, RECORD = 1, 2, 3


def stream(seed: int, *path: int) -> np.random.Generator:
    """Return the generator at `path`; equal arguments give equal draws."""
    return np.random.Generator(np.random.PCG64(_sequence(seed, path)))


def reset_seed(seed: int, *path: int) -> int:
    """Return the 31-bit seed for an environment's reset at `path`."""
    return int(_sequence(seed, path).generate_state(1)[0] >> 1)


def _sequence(seed: int, path: tuple[int, ...]) -> np.random.SeedSequence:
    # As a spawn key, unlike as entropy, a path differs from the same path with a 0 at its end.
    return np.random.SeedSequence(seed, spawn_key=path)
