"""Ring buffers that were saved: which rows are filled, and which of them is the oldest.

A library stores three numbers beside the arrays: the next row to write, the count of filled rows
(or a flag that all are), and the capacity.  Examples are tianshou (``_index``, ``_size``,
``maxsize``), Stable-Baselines3 (``pos``, ``full``, ``buffer_size``), TD3 and CORL (``ptr``,
``size``, ``max_size``).  Others are rlpd (``_insert_index``), DrQ (``idx``), TorchRL (``_cursor``)
and rlkit (``_top``).

Shape legend: N rows that are stored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from gear_offline.core.types import Array
from gear_offline.data.sources.columns import read_rows
from gear_offline.data.sources.input_files import misfit

COMMON = ("index", "idx", "position", "top", "head")  # also of other things: more stands beside
NEXT = r"((next|write|insert(ion)?|add|store|cur(rent)?)_?)?"
NEXT += r"(ptr|pointer|pos(ition)?|idx|index|cursor|top|head)"
FILLED = r"((current|num|n)_)?(size|len(gth)?|count|filled|stored|items|transitions|in_buffer)"
FULL, ROOM = r"(is_)?full", r"(max|buffer|memory|replay)\w*(size|len(gth)?|capacity)|capacity"
UNCLEAR = "save the filled rows alone, the oldest first, or without these numbers"


class Ring(NamedTuple):
    """The rows of a buffer in the order of time: `filled` ones from `oldest` on."""

    rows: int
    oldest: int
    filled: int
    evidence: str

    @classmethod
    def find(cls, numbers: Mapping[str, Any], rows: int, where: str) -> Ring | None:
        """Read the numbers beside arrays of N `rows`; ``None`` if none tell of a ring."""
        stored_names = {n.split("/")[-1].lstrip("_").lower(): n for n in sorted(numbers)}
        names = list[str]()
        for pattern in (NEXT, FILLED, FULL, ROOM):
            fits = [name for key, name in stored_names.items() if re.fullmatch(pattern, key)]
            names.append(min(fits, key=lambda name: (name in COMMON, name), default=""))
        after, filled, full, room = names
        is_common = after in COMMON and not (full or room)
        if not after or is_common:
            return None
        values = [_to_integer(numbers.get(name)) for name in names]
        evidence = ", ".join(f"{n} {v}" for n, v in zip(names, values, strict=True) if n)
        index, count = values[0], values[1]
        is_other = not 0 < (index or 0) < rows or (after != "ptr" and values[3] != rows)
        if is_other and not (filled or full):
            return None  # else it is not known how many rows are filled
        if full:
            count = rows if values[2] else index
        capacity = values[3] if room else None
        has_gone_round = count == rows and capacity in (rows, None)
        if index is None or count is None or not 0 < count <= rows:
            raise misfit(f"{rows:,} rows, and a ring of {evidence}", where, UNCLEAR)
        if index % rows != 0 and index != count and not has_gone_round:
            raise misfit(f"{rows:,} rows, and a ring of {evidence}", where, UNCLEAR)
        return cls(rows, index % rows if has_gone_round else 0, count, evidence)

    def notes(self) -> list[str]:
        """Describe the rows that are left out or moved."""
        notes = list[str]()
        if self.filled < self.rows:
            finding = f"{self.filled:,} of {self.rows:,} rows are filled"
            notes.append(f"{finding} ({self.evidence}): the others are left out")
        if self.oldest:
            notes.append(f"a ring ({self.evidence}): row {self.oldest:,} is the oldest, and first")
        return notes

    def column(self, stored: Any) -> Any:
        """Return a column in the order of time, as what has its shape and ``read``."""
        facts = {**vars(stored)} if isinstance(stored, SimpleNamespace) else {}
        facts |= {n: getattr(stored, n, None) for n in ("dtype", "preferred_rows")}
        read = partial(self._read, stored)
        return SimpleNamespace(**facts | {"shape": (self.filled, *stored.shape[1:]), "read": read})

    def _read(self, stored: Any, start: int, stop: int) -> Array:
        turn = self.rows - self.oldest  # row at which it goes on with the first one stored
        spans = [(max(start, 0), min(stop, turn), self.oldest), (max(start, turn), stop, -turn)]
        rows = [read_rows(stored, a + shift, b + shift) for a, b, shift in spans if a < b]
        return rows[0] if len(rows) == 1 else np.concatenate(rows)


def _to_integer(value: Any) -> int | None:
    number = np.asarray(value)
    return int(number.item()) if number.size == 1 and number.dtype.kind in "biu" else None
