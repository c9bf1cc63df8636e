"""Tables that several runs hold together: one in a process, or one in shared memory for several.

Loaders that are made inside `SharedTables.used` take a table that is there already, in host memory
and on the GPU, if it is of the same dataset and options; what they read from it is the same bits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gear_offline.dataset.shard import digest
from gear_offline.tables.host_memory import HostBlock, HostHandle
from gear_offline.tables.host_table import host_table
from gear_offline.tables.table import Table, build_table

if TYPE_CHECKING:
    from gear_offline.dataset.dataset import Dataset
    from gear_offline.tables.placement import PlacedTable

Handles = Mapping[str, Mapping[str, int]]


class SharedTables:
    """The tables of some runs.

    Parameters
    ----------
    handles
        Tables of another process, from its `handles`.
    publish
        Build tables in shared memory, so that other processes can take them.
    """

    def __init__(self, handles: Handles | None = None, *, publish: bool = False) -> None:
        self._handles, self._publish = dict(handles or {}), publish
        self._tables: dict[str, Table] = {}
        self._blocks: dict[str, HostBlock] = {}
        self._placed: dict[tuple[int, str, str], PlacedTable] = {}

    def table(self, dataset: Dataset, **options: Any) -> Table:
        """Return the table of a dataset, built once; options as `build_table`."""
        name = json.dumps(
            {
                "dataset": digest(dataset.manifest.encode()),
                "path": str(dataset.path),
                **options,
            },
            sort_keys=True,
        )
        if name not in self._tables:
            self._tables[name] = self._make(name, dataset, **options)
        return self._tables[name]

    def _make(self, name: str, dataset: Dataset, **options: Any) -> Table:
        if name in self._handles:
            share = HostHandle.from_json(self._handles[name])
            return host_table(dataset, share=share, **options)[0]
        if self._publish:
            found, self._blocks[name] = host_table(dataset, **options)
            return found
        return build_table(dataset, **options)

    def placed(
        self,
        table: Table,
        options: Any,
        make: Callable[[], PlacedTable],
        *,
        weights: npt.ArrayLike | None = None,
    ) -> PlacedTable:
        """Return a table that a GPU can read, made once for the same table, options and weights.

        How often episodes are drawn matters only where not all of them fit GPU memory.
        """
        if all(table is not known for known in self._tables.values()):
            return make()  # its identity may be used again when it is gone
        options = json.dumps(options, sort_keys=True, default=str)
        plain = (id(table), options, "")
        if plain in self._placed:
            return self._placed[plain]
        drawn = b"" if weights is None else np.ascontiguousarray(weights, np.float64).tobytes()
        key = (id(table), options, digest(drawn))
        if key not in self._placed:
            made = make()
            whole = made.hbm_bytes > 0 and made.host_bytes + made.peer_bytes == 0
            self._placed[plain if whole else key] = made
            return made
        return self._placed[key]

    def handles(self) -> dict[str, dict[str, int]]:
        """Return what other processes take the tables by, JSON-able."""
        return {name: block.handle().to_json() for name, block in self._blocks.items()}

    @contextmanager
    def used(self) -> Iterator[None]:
        """Let the loaders that are made in the body share these tables."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)


_current: ContextVar[SharedTables | None] = ContextVar("shared_tables", default=None)


def current_tables() -> SharedTables | None:
    """Return the tables in use here; None outside `SharedTables.used`."""
    return _current.get()
