"""Philox 4x32-10: random numbers that are a pure function of (seed, stream, step, slot).

The generator of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3"
(SC 2011), vectorised over NumPy.  It has no state: number ``i`` is computed from ``i``, so any
device and any chunking gives the same numbers.

How this project uses it (the same on every device):

- key     = (low, high 32 bits of the seed)
- counter = (slot, stream, low, high 32 bits of the step); stream 0 is selection
- one block of four words serves one slot of one step: words 0 (low) and 1 (high) make the first
  64-bit draw, words 2 and 3 the second
- an integer in ``[0, n)`` is ``floor(draw * n / 2**64)``; see `bounded` for its bias
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt

UInt32Array = npt.NDArray[np.uint32]
UInt64Array = npt.NDArray[np.uint64]
Int64Array = npt.NDArray[np.int64]

ROUNDS = 10
MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
WEYL = (0x9E3779B9, 0xBB67AE85)  # added to the key after each round
LANES = 8192  # blocks computed together: about 400 KiB of working set

_MASK32 = np.uint64(0xFFFFFFFF)
_SHIFT32 = np.uint64(32)
_LOW = 0 if sys.byteorder == "little" else 1  # where the low word of a uint64 lies


def philox4x32(
    counter: tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike, npt.ArrayLike],
    key: tuple[int, int],
    *,
    rounds: int = ROUNDS,
) -> tuple[UInt32Array, UInt32Array, UInt32Array, UInt32Array]:
    """Return the four output words of each counter.

    Parameters
    ----------
    counter
        Four arrays of 32-bit values that broadcast to one shape ``S``.
    key
        Two 32-bit integers.
    rounds
        Ten as everywhere here, or fewer where that is a generator of its own.

    Returns
    -------
    tuple
        Four arrays of shape ``S``, uint32.
    """
    words = np.broadcast_arrays(*(np.asarray(word, dtype=np.uint32) for word in counter))
    c0, c1, c2, c3 = (word.reshape(-1) for word in words)
    out = [np.empty(c0.size, dtype=np.uint32) for _ in range(4)]
    for begin in range(0, c0.size, LANES):
        part = slice(begin, begin + LANES)
        block = _rounds(c0[part], c1[part], c2[part], c3[part], key, rounds)
        for target, word in zip(out, block, strict=True):
            target[part] = word & _MASK32
    w0, w1, w2, w3 = (word.reshape(words[0].shape) for word in out)
    return w0, w1, w2, w3


def _rounds(
    c0: UInt32Array,
    c1: UInt32Array | np.uint32,
    c2: UInt32Array,
    c3: UInt32Array | np.uint32,
    key: tuple[int, int],
    rounds: int = ROUNDS,
) -> tuple[UInt64Array, UInt64Array, UInt64Array, UInt64Array]:
    """Return the output words of (n,) counters as uint64 whose low halves are the words.

    The high halves of words 0 and 2 are zero, those of words 1 and 3 are left-overs: they are the
    multiplicands, kept as uint64 with zero high halves, and the last products.  Products are read
    as pairs of 32-bit words, so that a round is two multiplications and four xors.
    """
    left, right = c0.astype(np.uint64), c2.astype(np.uint64)
    left32, right32 = left.view(np.uint32)[_LOW::2], right.view(np.uint32)[_LOW::2]
    one, three = c1, c3
    # Two pairs of buffers: a round reads the low words of the previous products.
    buffers = [(np.empty_like(left), np.empty_like(left)) for _ in range(2)]
    for turn in range(rounds):
        key_left = np.uint32((key[0] + turn * WEYL[0]) & 0xFFFFFFFF)
        key_right = np.uint32((key[1] + turn * WEYL[1]) & 0xFFFFFFFF)
        product_left, product_right = buffers[turn % 2]
        np.multiply(left, MULTIPLIERS[0], out=product_left)
        np.multiply(right, MULTIPLIERS[1], out=product_right)
        words_left, words_right = product_left.view(np.uint32), product_right.view(np.uint32)
        np.bitwise_xor(words_right[1 - _LOW :: 2], one, out=left32)
        np.bitwise_xor(left32, key_left, out=left32)
        np.bitwise_xor(words_left[1 - _LOW :: 2], three, out=right32)
        np.bitwise_xor(right32, key_right, out=right32)
        one, three = words_right[_LOW::2], words_left[_LOW::2]
    return left, product_right, right, product_left


def draws(
    *, seed: int, stream: int, first_step: int, steps: int, count: int
) -> tuple[UInt64Array, UInt64Array]:
    """Return the two 64-bit draws of `count` slots of `steps` consecutive steps.

    Parameters
    ----------
    seed
        In ``[0, 2**64)``.
    stream
        In ``[0, 2**32)``; separates uses of one seed.
    first_step, steps
        Steps ``first_step .. first_step + steps - 1``, all in ``[0, 2**64)``.
    count
        Slots, at most ``2**32``.

    Returns
    -------
    tuple
        Two arrays (steps, count) uint64, each uniform over ``[0, 2**64)``.
    """
    seed, first_step = int(seed), int(first_step)  # NumPy's would overflow
    key = (seed & 0xFFFFFFFF, seed >> 32)
    first = np.empty((steps, count), dtype=np.uint64)
    second = np.empty_like(first)
    at_once = max(LANES // count, 1)  # whole steps where they are small, else parts of one
    for row in range(0, steps, at_once):
        numbers = np.arange(row, min(row + at_once, steps), dtype=np.uint64)
        numbers += np.uint64(first_step)
        low = (numbers & _MASK32).astype(np.uint32)
        high = (numbers >> _SHIFT32).astype(np.uint32)
        for slot in range(0, count, LANES):
            slots = np.arange(slot, min(slot + LANES, count), dtype=np.uint32)
            block = _rounds(
                np.tile(slots, low.size),
                np.uint32(stream),
                np.repeat(low, slots.size),
                np.repeat(high, slots.size),
                key,
            )
            place = (slice(row, row + low.size), slice(slot, slot + slots.size))
            shape = (low.size, slots.size)
            first[place] = (block[0] | block[1] << _SHIFT32).reshape(shape)
            second[place] = (block[2] | block[3] << _SHIFT32).reshape(shape)
    return first, second


def bounded(draw: UInt64Array, n: int | Int64Array) -> Int64Array:
    """Map uniform 64-bit draws to ``[0, n)``: the high 64 bits of the 128-bit ``draw * n``.

    Each value is the image of ``floor(2**64 / n)`` or ``ceil(2**64 / n)`` draws, so its probability
    differs from ``1 / n`` by less than ``2**-64``, a relative error below ``n / 2**64`` (6e-8 for
    2**40 steps).  Nothing is rejected: a slot costs the same whatever it draws, on any device.

    Parameters
    ----------
    draw
        uint64, any shape.
    n
        Number of values, in ``[1, 2**63)``; one for all or an array that broadcasts.

    Returns
    -------
    ndarray
        int64, the broadcast shape.
    """
    size: npt.NDArray[Any] = np.asarray(n).astype(np.uint64)
    high, low = draw >> _SHIFT32, draw & _MASK32
    if size.max(initial=0) <= _MASK32:
        # high * n + 2^32 - 1 stays below 2^64, so two multiplications do.
        result = (high * size + (low * size >> _SHIFT32)) >> _SHIFT32
    else:
        size_high, size_low = size >> _SHIFT32, size & _MASK32
        middle = high * size_low + (low * size_low >> _SHIFT32)
        carried = low * size_high + (middle & _MASK32)
        result = high * size_high + (middle >> _SHIFT32) + (carried >> _SHIFT32)
    return np.asarray(result).view(np.int64)
