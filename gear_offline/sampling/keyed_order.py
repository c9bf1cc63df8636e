"""Random orders of an endless row of epochs, without memory."""

from __future__ import annotations

import numpy as np

from gear_offline.core.types import Int64Array, UInt64Array
from gear_offline.kernels.draws import bounded, draws

EPOCH_STREAM = 3  # of random numbers of a seed: keys of an epoch's order
ROUNDS = 8
MULTIPLIERS = (np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53))
_SHIFT = np.uint64(33)


def places(
    first_step: int, steps: int, count: int, *, size: int
) -> tuple[int, Int64Array, Int64Array]:
    """Return the first slot's epoch; each slot's epoch above it and place in it, (steps, count)."""
    first_epoch, place = divmod(int(first_step) * int(count), int(size))  # NumPy's overflow
    slots = np.arange(steps * count, dtype=np.uint64).reshape(steps, count)
    ahead = slots + np.uint64(place)  # place and size may be near 2^63
    epochs, at = np.divmod(ahead, np.uint64(size))
    return first_epoch, epochs.astype(np.int64), at.astype(np.int64)


class KeyedOrder:
    """Orders of ``[0, size)``, one an epoch: a function from places to things, without memory.

    A Feistel network over the smallest power of two that holds `size`, walked along its cycle until
    it lands below `size` (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002),
    then rotated by a random amount.  The rotation makes each thing exactly as likely as any other
    in every place.  The network makes the order; its round function is MurmurHash3's 64-bit
    finaliser.  An epoch has one block of numbers: its first key, the odd difference from each
    round's key to the next, and the rotation.  `size` is in ``[1, 2**63)``.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        bits = max((size - 1).bit_length(), 2)
        self._right = np.uint64(bits // 2)
        self._masks = (
            np.uint64((1 << (bits - bits // 2)) - 1),  # left half
            np.uint64((1 << (bits // 2)) - 1),  # right half
        )

    def __call__(
        self, seed: int, first_epoch: int, epochs: Int64Array, at: Int64Array
    ) -> Int64Array:
        """Return the things in places `at` of `epochs` from `first_epoch` on, all of one shape."""
        rows = epochs.reshape(-1)
        first, second = draws(
            seed=seed,
            stream=EPOCH_STREAM,
            first_step=first_epoch % (1 << 63),
            steps=int(rows.max(initial=0)) + 1,
            count=2,
        )
        further = second[:, :1] | np.uint64(1)
        rounds = np.arange(ROUNDS, dtype=np.uint64)
        keys = np.asarray(first[:, :1] + further * rounds, dtype=np.uint64)
        size = np.uint64(self.size)
        things = self._network(at.reshape(-1).view(np.uint64), keys, rows)
        walking = np.flatnonzero(things >= size)
        while walking.size:
            things[walking] = self._network(things[walking], keys, rows[walking])
            walking = walking[things[walking] >= size]
        things += bounded(first[:, 1], self.size).view(np.uint64)[rows]
        things -= size * (things >= size)
        return things.view(np.int64).reshape(at.shape)

    def _network(self, values: UInt64Array, keys: UInt64Array, rows: Int64Array) -> UInt64Array:
        """Return the image of (n,) values under the keys of their epochs, (epochs, ROUNDS)."""
        halves = [values >> self._right, values & self._masks[1]]
        for number in range(ROUNDS):
            key = keys[0, number] if len(keys) == 1 else keys[rows, number]
            side = number % 2
            halves[side] ^= _mixed(halves[1 - side] ^ key) & self._masks[side]
        return np.asarray(halves[0] << self._right | halves[1])


def _mixed(values: UInt64Array) -> UInt64Array:
    """Apply the finaliser to the values, in place."""
    for multiplier in MULTIPLIERS:
        values ^= values >> _SHIFT
        values *= multiplier
    values ^= values >> _SHIFT
    return values
