"""What gathers read: columns in groups whose rows lie side by side; how values become a batch's.

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
    """One field of a batch inside the rows of a column group.

    Attributes
    ----------
    name
        ``"states"``, ``"actions"``, ``"rewards"``, ``"returns_to_go"``, or ``"extras/"`` and the
        name of a further column.
    dtype
        dtype in the batch; what the gather casts to when the group's dtype differs.
    shape
        Shape of one step in the batch.
    offset
        First element in the group's row.
    mean, divisor
        float64, the step's shape: what the gather normalises with; ``None`` when the rows hold
        final values.
    history
        Earlier steps that each step of a batch is shown with (`frame_stack` - 1): the windows of
        the field's group have so many rows more, in front.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int = 0
    mean: Float64Array | None = None
    divisor: Float64Array | None = None
    history: int = 0

    @property
    def width(self) -> int:
        """Elements of one step."""
        return prod(self.shape)


@dataclass(frozen=True, kw_only=True, eq=False)
class ColumnGroup:
    """Rows over steps that hold one or several fields.

    Attributes
    ----------
    fields
        What a row holds.
    rows
        ``(M + N + M, W)``; step ``i`` is row ``M + i``, margins are zero.
    """

    fields: tuple[Field, ...]
    rows: Array

    @property
    def width(self) -> int:
        """W, elements of a row."""
        return int(self.rows.shape[1])

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the rows in memory."""
        return self.rows.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes from one step to the next."""
        return self.width * self.dtype.itemsize

    @property
    def final_dtype(self) -> np.dtype[Any]:
        """dtype of the fields in a batch; a group whose dtype differs holds one field."""
        return self.fields[0].dtype

    @property
    def is_final(self) -> bool:
        """Whether the rows hold the batch's values, so that a gather only copies."""
        return self.dtype == self.final_dtype and self.fields[0].mean is None

    @property
    def history(self) -> int:
        """Rows in front of a window's own; only of a field that stands alone."""
        return self.fields[0].history


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupAddresses:
    """Where the GPU finds the rows of a column group.

    Attributes
    ----------
    group
        Fields, dtype and width; its rows may be empty.
    addresses
        (E,) int64, device-visible address of each episode's first row.
    landing
        Device-visible address of the first landing row, if there are any.
    """

    group: ColumnGroup
    addresses: Int64Array
    landing: int = 0


def convert(values: Array, field: Field) -> Array:
    """Return `values` (..., *shape) normalised if `field` asks for it, and cast to its dtype.

    Normalisation is computed in float64 and rounded once, so the result does not depend on where
    it happens.  Values beyond float32 become infinite.
    """
    with np.errstate(over="ignore"):
        if field.mean is not None and field.divisor is not None:
            values = (values.astype(np.float64) - field.mean) / field.divisor
        return values.astype(field.dtype, copy=False)
