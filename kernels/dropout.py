"""What kernels draw their dropout from, and how they and the CPU say which numbers stay.

No mask is stored: forward and backward draw it from Philox 4x32-7, Triton's and NumPy's.  A block
of four words decides on four neighbours; a number is kept if its word is at least
``dropout * 2**32``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gear_offline.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # builds of torch for CPUs do not bring it
    triton = None

ROUNDS = 7  # the fewest with which Philox 4x32 passes BigCrush (Salmon et al. 2011, table 2)


def dropped_words(dropout: float) -> int:
    """Return how many of the ``2**32`` words drop a number."""
    return min(round(dropout * 2**32), 2**32 - 1)


def check_dropout(dropout: float) -> None:
    """Raise `InputError` (``MODEL_INPUT``) for a probability that is not in [0, 1)."""
    if not 0.0 <= dropout < 1.0:
        raise InputError("MODEL_INPUT", f"dropout is {dropout}", remedy="take one in [0, 1)")


def in_a_row(seeds: Tensor | None) -> Tensor | None:
    """Return seeds as the kernels read them, one after another."""
    return None if seeds is None else seeds.contiguous()


def kept_numbers(counter: tuple[Any, ...], seed: int, dropout: float) -> npt.NDArray[np.bool_]:
    """Say which numbers stay, as `kept` does: four for each block of words, on a last axis.

    Parameters
    ----------
    counter
        Of Philox: four integers or arrays of them that broadcast.
    seed
        64 bits, the key.
    dropout
        Probability of losing a number, in [0, 1).
    """
    return np.stack(philox4x32(counter, seed), axis=-1) >= dropped_words(dropout)


def philox4x32(counter: tuple[Any, ...], seed: int) -> list[npt.NDArray[np.uint64]]:
    """Return the four words, below 2^32, of Philox 4x32-7 for each counter of four words."""
    low = np.uint64(0xFFFFFFFF)
    a, b, c, d = (np.asarray(word, dtype=np.uint64) for word in counter)
    for number in range(ROUNDS):
        left, right = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        keys = (seed + 0x9E3779B9 * number, (seed >> 32) + 0xBB67AE85 * number)
        one, other = (np.uint64(key & 0xFFFFFFFF) for key in keys)
        a, b = right >> np.uint64(32) ^ b ^ one, right & low
        c, d = left >> np.uint64(32) ^ d ^ other, left & low
    return list(np.broadcast_arrays(a, b, c, d))


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def kept(  # type: ignore[no-untyped-def]
        seed, fours, second, third,
        DROPPED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """Say which numbers stay, (ROWS, BLOCK) bool; `fours`, (ROWS, BLOCK // 4), are blocks."""
        a, b, c, d = tl.philox(seed, fours, second, third, 0, n_rounds=7)
        # Words become bits before they are put side by side: that is less to move.
        even = tl.join(a >= DROPPED, c >= DROPPED)
        odd = tl.join(b >= DROPPED, d >= DROPPED)
        return tl.reshape(tl.join(even, odd), (ROWS, BLOCK))
