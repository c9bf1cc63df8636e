"""Small valid files that fuzzing starts from; most of their bytes are structure, few are data."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import h5py
import numpy as np

from tests.hdf5_files import table

ROWS = 12


def hdf5_seeds() -> dict[str, bytes]:
    """Return D4RL and generic HDF5 files in the storage forms that the library knows."""
    plain: dict[str, Any] = {}
    makers: dict[str, tuple[Callable[[h5py.File], None], dict[str, Any]]] = {
        "contiguous": (lambda f: _fill(f, **plain), {}),
        "gzip": (lambda f: _fill(f, chunks=True, compression="gzip"), {}),
        "shuffle-fletcher": (lambda f: _fill(f, chunks=True, shuffle=True, fletcher32=True), {}),
        "lzf": (lambda f: _fill(f, chunks=True, compression="lzf"), {}),
        "latest": (lambda f: _fill(f, chunks=True, compression="gzip"), {"libver": "latest"}),
        "latest-compact": (_many, {"libver": "latest"}),
        "user-block": (lambda f: _fill(f, **plain), {"userblock_size": 512}),
        "resizable": (_resizable, {"libver": "latest"}),
        "tracked-order": (lambda f: _fill(f, **plain), {"track_order": True}),
        "flags": (_flags, {}),
    }
    return {name: _file(make, options) for name, (make, options) in makers.items()}


def _file(make: Callable[[h5py.File], None], options: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    with h5py.File(buffer, "w", **options) as file:
        make(file)
    return buffer.getvalue()


def _columns() -> dict[str, Any]:
    found = table(ROWS, observations=2, actions=1)
    found["terminals"] = np.arange(ROWS) % 5 == 4
    found["timeouts"] = np.arange(ROWS) % 5 == 2
    return found


def _fill(file: h5py.File, **options: Any) -> None:
    for name, values in _columns().items():
        chunked = "chunks" in options and values.ndim
        file.create_dataset(name, data=values, **(options if chunked else {}))
    file.attrs["env_id"] = "Hopper-v5"
    file["metadata/algorithm"] = "text"


def _many(file: h5py.File) -> None:
    """Many links and attributes: fractal heaps and version-2 B-trees."""
    _fill(file)
    for index in range(20):
        file[f"infos/extra_{index}"] = np.zeros(ROWS, "f2")
        file.attrs[f"attribute_{index}"] = index


def _resizable(file: h5py.File) -> None:
    """One of each chunk index of the newest format: extensible array, fixed array, B-tree."""
    for index, (name, values) in enumerate(_columns().items()):
        most = (None, *values.shape[1:]) if index % 2 else (None,) * values.ndim
        file.create_dataset(name, data=values, maxshape=most, chunks=(4, *values.shape[1:]))


def _flags(file: h5py.File) -> None:
    """The generic layout, big-endian, with flags of other kinds."""
    for name in ("observations", "actions", "rewards"):
        file[name] = _columns()[name].astype(">f8")
    file["terminations"] = (np.arange(ROWS) % 3 == 2).astype(">i2")
    file["truncations"] = np.zeros((ROWS, 1), "f4")


def minari_seed() -> tuple[bytes, bytes]:
    """Return ``metadata.json`` and ``main_data.hdf5`` of a tiny Minari dataset."""
    box = {"type": "Box", "dtype": "float32", "shape": [2], "low": [-1, -1], "high": [1, 1]}
    metadata = {
        "dataset_id": "tiny/test-v0",
        "data_format": "hdf5",
        "total_episodes": 2,
        "total_steps": 6,
        "observation_space": json.dumps(box),
        "action_space": json.dumps(box),
        "env_spec": json.dumps({"id": "Hopper-v5"}),
    }

    def make(file: h5py.File) -> None:
        for episode in range(2):
            group = file.create_group(f"episode_{episode}")
            group["observations"] = np.zeros((4, 2), "f4")
            group["actions"] = np.zeros((3, 2), "f4")
            group["rewards"] = np.arange(3.0)
            group["terminations"] = np.array([False, False, True])
            group["truncations"] = np.zeros(3, bool)
            group["infos/speed"] = np.zeros(4)
            group.attrs["seed"] = 3

    return json.dumps(metadata).encode(), _file(make, {})
