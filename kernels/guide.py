"""Where to begin the search for the episode of a step.

Shape legend: E episodes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def guide(offsets: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], int]:
    """Return the episode of every ``1 << shift``-th step, one entry more, and the shift.

    The episode of step `i` lies in ``guide[i >> shift] .. guide[(i >> shift) + 1]``; about 16
    entries an episode leave one or two candidates.
    """
    episodes, steps = offsets.size - 1, int(offsets[-1])
    shift = max((steps // min(16 * episodes, steps)).bit_length() - 1, 0)
    firsts = np.arange(((steps - 1) >> shift) + 1, dtype=np.int64) << shift
    found = np.searchsorted(offsets, firsts, side="right") - 1
    return np.concatenate([found, [episodes - 1]]).astype(np.int64), shift
