"""A table that grows in place, with its dataset."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gear_offline.core.types import Array
from gear_offline.dataset.dataset import Dataset
from gear_offline.tables.shared import fits_in_memory
from gear_offline.tables.table import Table, TableOptions, build_table, private_rows

SPARE = 2  # memory is asked for so many times over; what is not used takes none


class GrowingTable:
    """Rows of a dataset at each of its sizes, in the same memory as long as they fit there.

    Rows stay where they are: only the margin behind those of a table before becomes rows.
    """

    def __init__(self) -> None:
        self._memory: list[Array] = []  # of each group, larger than it is now
        self._shards = 0  # whose rows are there
        self._placed: dict[tuple[Any, ...], Any] = {}  # copies of them on GPUs

    def table(self, dataset: Dataset, loader: Mapping[str, Any]) -> Table | None:
        """Return the table of a loader with these options; None where rows may stay on disk."""
        options = TableOptions.of(loader)
        if not fits_in_memory(dataset, loader, options):
            return None
        memory, self._memory = iter(self._memory), []

        def allocate(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
            rows = next(memory, np.empty((0, *shape[1:]), dtype))
            if len(rows) < shape[0]:
                larger = private_rows((SPARE * shape[0], *shape[1:]), dtype)
                larger[: len(rows)] = rows
                rows = larger
            self._memory.append(rows)
            return rows[: shape[0]]

        table = build_table(dataset, options, allocate=allocate, filled_shards=self._shards)
        table.outgrown.update(self._placed)
        self._shards, self._placed = len(dataset.manifest.shards), table.placed
        return table
