"""Datasets of D4RL through its own package, where that is installed.

It has the server's addresses, and names that no table here has.
"""

from __future__ import annotations

import re
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np

from gear_offline.core.text import first_line, say
from gear_offline.core.types import Array
from gear_offline.data.dataset.schema import is_storable
from gear_offline.data.dataset.shard import byte_view, digest
from gear_offline.data.sources.base import Source, SourceRequest
from gear_offline.data.sources.d4rl import find_place
from gear_offline.data.sources.flat import table_source
from gear_offline.data.sources.reader import YIELDED


def open_d4rl_package(name: str, request: SourceRequest) -> Source | None:
    """Open what an environment's `get_dataset` returns; None if its file is here, or it fails."""
    file = find_place(name)
    is_plain = re.fullmatch(r"[\w.-]+", name)  # gym would import the MODULE of MODULE:NAME
    stored = None if (file and file.is_file()) or not is_plain else _get_dataset(name)
    if stored is None:
        return None
    arrays, digests = dict[str, Any](), list[str]()
    for column, rows in sorted(stored.items()):
        dtype = rows.dtype if is_storable(rows.dtype) else None
        facts: dict[str, Any] = {"shape": rows.shape, "type_name": str(rows.dtype)}
        arrays[column] = SimpleNamespace(rows=rows, dtype=dtype, **facts)
        if dtype is not None:
            digests.append(f"{column} {digest(byte_view(np.ascontiguousarray(rows)))}")
    metadata = {n: rows for n, rows in stored.items() if n.startswith("metadata/")}
    facts = {"metadata": metadata, YIELDED: f"xxh3-128:{digest(' '.join(digests).encode())}"}
    where = f"{name} of the d4rl package"
    info: dict[str, Any] = {"where": where, "format": "hdf5", "facts": facts}
    return table_source(arrays, request, (), lambda array: array.rows, **info)


def _get_dataset(name: str) -> dict[str, Array] | None:
    """Return the arrays of a dataset by name, flat; None, and a line, where the package fails."""
    try:
        with warnings.catch_warnings(action="ignore"):
            import d4rl  # noqa: F401 - it registers its environments
            import gym

            environment = gym.make(name)
            try:
                stored = environment.get_dataset().items()
                return {str(column): np.asarray(rows) for column, rows in stored}
            finally:
                environment.close()
    except ModuleNotFoundError as error:
        if error.name in ("d4rl", "gym"):
            return None
        problem: BaseException = error
    except (Exception, SystemExit) as error:  # whatever simulators and downloads raise
        problem = error
    say(f"the d4rl package gives no {name}: {type(problem).__name__}: {first_line(problem)}")
    return None
