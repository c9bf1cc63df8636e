"""Philox 4x64-10, as `numpy.random.Philox`: numbers that are a pure function of their place.

Every use of a seed has a stream of its own: key = (seed, stream).  Slot `b` of step `t`, of `count`
slots a step, has the flat number ``f = t * count + b`` and takes numbers ``2 f`` and ``2 f + 1`` of
the stream.  So any device and any chunking gives the same; ``cuda/philox.cuh`` is this on the GPU.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.random.bit_generator import ISeedSequence

from gear_offline.core.types import Int64Array, UInt64Array

_MASK32 = np.uint64(0xFFFFFFFF)
_SHIFT32 = np.uint64(32)


class _Key(ISeedSequence):
    """Hands Philox its key: with ``key=`` it reads the system's entropy, a system call a batch."""

    def __init__(self, key: UInt64Array) -> None:
        self._key = key

    def generate_state(self, n_words: int, dtype: Any = np.uint64) -> UInt64Array:
        return self._key


def draws(
    *, seed: int, stream: int, first_step: int, steps: int, count: int
) -> tuple[UInt64Array, UInt64Array]:
    """Return the two numbers of each slot of consecutive steps: (steps, count), all 64 bits."""
    first = int(first_step) * int(count)  # NumPy's integers would overflow
    key = _Key(np.array([seed, stream], dtype=np.uint64))
    # A block of four numbers serves two slots.
    generator = np.random.Philox(key, counter=first // 2)  # type: ignore[arg-type]
    skipped = 2 * (first % 2)
    numbers = generator.random_raw(skipped + 2 * int(steps) * int(count))[skipped:]
    pairs = np.ascontiguousarray(numbers.reshape(-1, 2).T)
    return pairs[0].reshape(steps, count), pairs[1].reshape(steps, count)


def bounded(draw: UInt64Array, n: int | Int64Array) -> Int64Array:
    """Map uniform 64-bit draws to ``[0, n)``: the high 64 bits of the 128-bit ``draw * n``.

    Each value is the image of ``floor(2**64 / n)`` or ``ceil(2**64 / n)`` draws, so its probability
    differs from ``1 / n`` by less than ``2**-64``, a relative error below ``n / 2**64`` (6e-8 for
    2**40 steps).  Nothing is rejected: a slot costs the same whatever it draws, on any device.
    `n` is in ``[1, 2**63)``, one for all or an array of the draws' shape.
    """
    size = np.asarray(n, dtype=np.int64).view(np.uint64)
    result, low = draw >> _SHIFT32, draw & _MASK32  # in place from here on: temporaries cost most
    if size.max(initial=0) <= _MASK32:
        # high * n + 2^32 - 1 stays below 2^64, so two multiplications do.
        low *= size
        low >>= _SHIFT32
        result *= size
        result += low
        result >>= _SHIFT32
        return np.asarray(result.view(np.int64))
    size_high, size_low = size >> _SHIFT32, size & _MASK32
    middle = result * size_low + (low * size_low >> _SHIFT32)
    carried = low * size_high + (middle & _MASK32)
    result = result * size_high + (middle >> _SHIFT32) + (carried >> _SHIFT32)
    return np.asarray(result.view(np.int64))
