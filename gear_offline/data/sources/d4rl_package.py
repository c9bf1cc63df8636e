"""Datasets of D4RL through its own package, where that is installed.

It has the server's addresses, and names that no table here has.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from gear_offline.core.text import first_line, say
from gear_offline.data.dataset.schema import is_storable
from gear_offline.data.dataset.shard import byte_view, digest
from gear_offline.data.sources.base import Source, SourceRequest
from gear_offline.data.sources.d4rl import find_place
from gear_offline.data.sources.flat import table_source
from gear_offline.data.sources.reader import YIELDED


def open_d4rl_package(name: str, request: SourceRequest) -> Source | None:
    """Open what an environment's `get_dataset` returns; None if its file is here, or it fails."""
    file = find_place(name)
    stored = None if file and file.is_file() else _get_dataset(name)
    if stored is None:
        return None
    rows = {str(name): np.asarray(values) for name, values in sorted(stored.items())}
    arrays = {
        name: SimpleNamespace(
            shape=values.shape,
            dtype=values.dtype if is_storable(values.dtype) else None,
            type_name=str(values.dtype),
            rows=values,
        )
        for name, values in rows.items()
    }
    columns = {n: values for n, values in rows.items() if is_storable(values.dtype)}
    digests = (f"{n} {digest(byte_view(np.ascontiguousarray(r)))}" for n, r in columns.items())
    facts = {
        "metadata": {n: values for n, values in rows.items() if n.startswith("metadata/")},
        YIELDED: f"xxh3-128:{digest(' '.join(digests).encode())}",
    }
    where = f"{name} of the d4rl package"
    info: dict[str, Any] = {"where": where, "format": "hdf5", "facts": facts}
    return table_source(arrays, request, (), lambda array: array.rows, **info)


def _get_dataset(name: str) -> Mapping[str, Any] | None:
    """Return the arrays of a dataset by name, flat; None, and a line, where the package fails."""
    try:
        with warnings.catch_warnings(action="ignore"):
            import d4rl  # noqa: F401 - it registers its environments
            import gym

            environment = gym.make(name)
            try:
                return dict(environment.get_dataset())
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
