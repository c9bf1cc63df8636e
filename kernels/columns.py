"""Columns that gathers read, in groups whose rows lie side by side, and their conversions.

Shape legend: N steps, M rows of zeros on either side, W elements of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from gear_offline.core.types import Array, Float64Array, Int64Array


@dataclass(frozen=True, kw_only=True, eq=False)
class Field:
    """One field of a batch inside the rows of a column group."""

    name: str  # "states", ..., or "extras/" and the name of a further column
    dtype: np.dtype[Any]  # in the batch; the gather casts to it where the group's differs
    shape: tuple[int, ...]  # of one step in the batch
    offset: int = 0  # first element in the group's row
    mean: Float64Array | None = None  # what the gather normalises with, of the step's shape;
    divisor: Float64Array | None = None  # None where the rows hold final values
    history: int = 0  # earlier steps that each step is shown with: so many rows more, in front

    @property
    def width(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, kw_only=True, eq=False)
class ColumnGroup:
    """Rows over steps that hold one or several fields: ``(M + N + M, W)``, margins are zero."""

    fields: tuple[Field, ...]
    rows: Array  # step i is row M + i

    @property
    def width(self) -> int:
        return int(self.rows.shape[1])

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.rows.dtype

    @property
    def row_bytes(self) -> int:
        return self.width * self.dtype.itemsize

    @property
    def final_dtype(self) -> np.dtype[Any]:
        """dtype of the fields in a batch; a group whose dtype differs holds one field."""
        return self.fields[0].dtype

    @property
    def is_final(self) -> bool:
        """True if the rows hold the batch's values, so that a gather only copies."""
        return self.dtype == self.final_dtype and self.fields[0].mean is None

    @property
    def history(self) -> int:
        """Rows in front of a window's own; only of a field that stands alone."""
        return self.fields[0].history


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupAddresses:
    """The addresses of a column group's rows for the GPU; the group's own rows may be empty."""

    group: ColumnGroup
    addresses: Int64Array  # (E,) of each episode's first row, as the device sees it
    row_zero: int = 0  # address that landing rows are counted from, if there are any


def final_values(values: Array, field: Field) -> Array:
    """Return `values` (..., *shape) normalised if `field` asks for it, and cast to its dtype.

    Normalisation is computed in float64 and rounded once, so the result does not depend on where
    it happens.  Values beyond float32 become infinite.
    """
    with np.errstate(over="ignore"):
        if field.mean is not None and field.divisor is not None:
            values = (values.astype(np.float64) - field.mean) / field.divisor
        return values.astype(field.dtype, copy=False)
