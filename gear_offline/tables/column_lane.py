"""Take a column from the source into its place in the rows of a group, a piece at a time.

Rows hold several fields, so a field is laid with a stride.  It is copied as one opaque item a row:
NumPy then makes one loop over the rows, where a two-dimensional copy would begin a loop of a few
elements in each of them.

Shape legend: n rows of a piece, W elements of the field.
"""

from __future__ import annotations

from math import prod
from typing import Any, Protocol

import numpy as np

from gear_offline.dataset.schema import ColumnSpec
from gear_offline.kernels.columns import Array, convert
from gear_offline.tables.fields import to_float32
from gear_offline.tables.host_memory import HostBlock, touch, write_through
from gear_offline.tables.page_filling import PageFiller
from gear_offline.tables.table import GroupPlan


class Reader(Protocol):
    """Reads the rows of a part of the source in their order."""

    def read(self, column: str, out: Array) -> None:
        """Fill C-contiguous `out`, (n, *shape) in the column's dtype, with its next n rows."""
        ...


class Scratch:
    """Memory of one thread that is used again for every piece and every shard."""

    def __init__(self) -> None:
        self._held: dict[str, Array] = {}

    def take(self, use: str, count: int, dtype: np.dtype[Any] | type[Any]) -> Array:
        """Return `count` elements, zeros at first; the next call for `use` gives the same ones."""
        held = self._held.get(use)
        if held is None or held.dtype != dtype or len(held) < count:
            held = self._held[use] = np.zeros(count, dtype)
        return held[:count]


class Rows:
    """Where the records of a piece are put together.

    In the group, whose pages are touched first.  Or, if a file holds the group, beside it: then
    pages are made of them; without a filler they are written through the file, or copied where
    enough threads write to it.

    Parameters
    ----------
    rows
        (N + M, W) rows of a group from step 0 on.
    count
        Most rows of a piece.
    block
        That holds `rows`, if one does.
    filler
        Of its pages.
    """

    def __init__(
        self,
        rows: Array,
        count: int,
        *,
        scratch: Scratch,
        use: str,
        block: HostBlock | None,
        filler: PageFiller | None = None,
    ) -> None:
        self._rows = rows
        self.row_bytes = rows.shape[1] * rows.itemsize
        self._block, self._filler = block, filler
        self.array = rows
        if block is not None:
            width = rows.shape[1]
            self.array = scratch.take(use, count * width, rows.dtype).reshape(count, width)

    def begin(self, start: int, stop: int) -> int:
        """Return the row of `array` where that of step `start` belongs."""
        if self._block is not None:
            return 0
        touch(self._rows[start:stop])
        return start

    def end(self, start: int, stop: int) -> None:
        """Take the rows of all fields as done."""
        if self._block is None:
            return
        target, done = self._rows[start:stop], self.array[: stop - start]
        if self._filler is not None:
            self._filler.fill(target, done)
        elif self._block.writers.acquire(blocking=False):
            try:
                write_through(self._block, target, done)
            finally:
                self._block.writers.release()
        else:
            touch(target)
            target[...] = done


class Lane:
    """The way of one float32 field: read, normalise, cast, lay.

    Parameters
    ----------
    spec
        Column of the source; ``None`` for the returns-to-go.
    plan
        ColumnGroup that the field belongs to.
    rows
        (n, W) rows as that plan says, into which the field is laid.
    """

    def __init__(
        self, spec: ColumnSpec | None, plan: GroupPlan, rows: Array, *, scratch: Scratch
    ) -> None:
        self._spec = spec
        self._field = plan.fields[None if spec is None else spec.name]
        self._scratch = scratch
        size = plan.dtype.itemsize
        self._item = np.dtype((np.void, size * self._field.width))
        self._places: Array = np.ndarray(
            (len(rows),),
            self._item,
            rows.data,
            offset=size * self._field.offset,
            strides=(rows.strides[0],),
        )

    def read(self, reader: Reader, count: int) -> Array:
        """Return the next rows of the column, (n, *shape), valid until the next read."""
        spec = self._spec
        assert spec is not None, "returns-to-go are not read"
        values = self._scratch.take(spec.name, count * prod(spec.shape), spec.dtype)
        values = values.reshape(count, *spec.shape)
        reader.read(spec.name, values)
        return values

    def final(self, values: Array, first_step: int) -> Array:
        """Return the batch's float32, C-contiguous: `values` themselves, or other memory.

        Raises
        ------
        InputError
            ``CAST_OVERFLOW``.
        """
        assert self._spec is not None, "returns-to-go are final"
        name, field = self._spec.name, self._field
        if field.mean is not None:
            return convert(values.reshape(len(values), *field.shape), field)
        if values.dtype == np.float32:
            return values
        rounded = self._scratch.take(f"{name}, final", values.size, np.float32)
        with np.errstate(over="ignore"):
            np.copyto(rounded, values.reshape(-1), casting="unsafe")
        # The costly question, which number was lost, is asked only where one may be.
        return rounded if np.isfinite(rounded).all() else to_float32(values, name, first_step)

    def items(self, values: Array) -> Array:
        """Return C-contiguous float32 values, n * W, as one opaque item a row, (n,)."""
        return values.reshape(-1).view(self._item)

    def lay(self, items: Array, at: int) -> None:
        """Write items into the rows from `at` on."""
        self._places[at : at + len(items)] = items
