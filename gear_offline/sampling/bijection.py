"""A keyed order of N things: a function from places to things and back that needs no memory.

A Feistel network over the smallest power of two that holds N, walked along its cycle until it
lands below N, then rotated by a random amount.  The rotation makes each thing exactly as likely
as any other in every place; the network makes the order.  A new epoch has new keys.

The construction is that of Black and Rogaway, "Ciphers with arbitrary finite domains" (CT-RSA
2002); the round function is the 64-bit finaliser of MurmurHash3.
"""

from __future__ import annotations

import numpy as np

from gear_offline.dataset.schema import Int64Array
from gear_offline.kernels.philox import UInt64Array, bounded, draws
from gear_offline.sampling.base import EPOCH_STREAM

ROUNDS = 8
MULTIPLIERS = (np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53))
_SHIFT = np.uint64(33)


class KeyedOrder:
    """Orders of ``[0, size)``, one an epoch.

    Parameters
    ----------
    size
        N, in ``[1, 2**63)``.
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
        self, *, seed: int, first_epoch: int, epochs: Int64Array, places: Int64Array
    ) -> Int64Array:
        """Return what lies in each place.

        Parameters
        ----------
        seed
            In ``[0, 2**64)``.
        first_epoch
            Epochs are counted from here, modulo ``2**63``.
        epochs, places
            int64 of one shape: epoch above `first_epoch`, and place in ``[0, N)``.

        Returns
        -------
        ndarray
            int64, the same shape: in ``[0, N)``, each once an epoch.
        """
        shape = places.shape
        flat, rows = places.reshape(-1).astype(np.uint64), epochs.reshape(-1)
        keys, second = draws(
            seed=seed,
            stream=EPOCH_STREAM,
            first_step=first_epoch % (1 << 63),
            steps=int(rows.max(initial=0)) + 1,
            count=ROUNDS,
        )
        size = np.uint64(self.size)
        found = self._network(flat, keys, rows)
        walking = np.flatnonzero(found >= size)
        while walking.size:
            found[walking] = self._network(found[walking], keys, rows[walking])
            walking = walking[found[walking] >= size]
        found += bounded(second[:, 0], self.size).astype(np.uint64)[rows]
        found -= size * (found >= size)
        return found.view(np.int64).reshape(shape)

    def _network(self, values: UInt64Array, keys: UInt64Array, rows: Int64Array) -> UInt64Array:
        """Return the image of (n,) values under the keys of their epochs, (epochs, ROUNDS)."""
        halves = [values >> self._right, values & self._masks[1]]
        one = len(keys) == 1
        for turn in range(ROUNDS):
            key = keys[0, turn] if one else keys[rows, turn]
            side = turn % 2
            halves[side] ^= _mixed(halves[1 - side] ^ key) & self._masks[side]
        return np.asarray(halves[0] << self._right | halves[1])


def _mixed(values: UInt64Array) -> UInt64Array:
    """Return the finaliser's value; overwrites `values`."""
    for multiplier in MULTIPLIERS:
        values ^= values >> _SHIFT
        values *= multiplier
    values ^= values >> _SHIFT
    return values
