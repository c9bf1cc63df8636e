"""Seeded streams for code of others, in place of Python's, NumPy's and torch's global generators.

An environment or a policy may draw from `random`, ``np.random`` or torch.  `Draws` gives each its
own streams, so that what it draws depends on nobody else, and leaves the caller's as they were.
"""

from __future__ import annotations

import random
import sys
import threading
from typing import Any

import numpy as np

_inside: list[Draws] = []  # those in each other


class Draws:
    """Streams that stand for the global generators inside; a context manager that is used often.

    They begin as after ``random.seed``, ``np.random.seed`` and ``torch.manual_seed`` (the CPU's);
    of two normal numbers that ``np.random`` makes at once, the second is lost at the end.
    The generators are the process's: in other threads than the main one they stay as they are.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed(seed)

    def seed(self, seed: int) -> None:
        """Begin anew."""
        bits: Any = np.random.MT19937()
        bits.state = np.random.RandomState(seed % 2**32).get_state(legacy=False)
        self._own: Any = random.Random(seed).getstate(), bits, None
        self._seed = seed
        self._callers: Any = None
        self._whole: Any = None  # the callers' state of `np.random`

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            if not _inside:  # it takes as long as a step
                self._whole = np.random.get_state(legacy=False)
            self._callers = self._exchange(self._own)
            _inside.append(self)

    def __exit__(self, *error: object) -> None:
        if self._callers is not None:
            _inside.remove(self)
            self._own, self._callers = self._exchange(self._callers), None
            if self._whole is not None:
                np.random.set_state(self._whole)  # the second normal number, too
                self._whole = None

    def _exchange(self, states: Any) -> Any:
        """Set the global generators to `states`; return theirs."""
        python, bits, torch_state = states
        numpy: Any = np.random
        torch: Any = sys.modules.get("torch")  # most environments do without
        before = random.getstate(), numpy.get_bit_generator(), torch and torch.get_rng_state()
        random.setstate(python)
        numpy.set_bit_generator(bits)
        if torch and torch_state is None:
            torch.default_generator.manual_seed(self._seed)
        elif torch:
            torch.set_rng_state(torch_state)
        return before
