"""Zarr stores, as Diffusion Policy's replay buffers: a folder or a zip; read by the zarr package.

A column is an array, called as it is below ``data``; ``meta/episode_ends`` has the rows behind the
last ones of episodes.
"""

from __future__ import annotations

import warnings
import zipfile
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from gear_offline.errors import InputError, package_needed
from gear_offline.sources.base import READ_BYTES, Asked, Source
from gear_offline.sources.columns import can_be_column
from gear_offline.sources.flat import table_source
from gear_offline.sources.input_files import InputFile, by_number

MAX_CHUNKS, MAX_BYTES = 1 << 22, 512 << 20  # of a chunk, or of all that are not there
SAFE = "store numbers, without pickles or shards of blosc, in chunks of about 1 MiB"
USUAL = {"actions": "action", "rewards": "reward", "observations": "state"}


def open_zarr(path: Path, asked: Asked) -> Source:
    """Open a store of arrays of one row a step."""
    with package_needed("zarr stores are read by the zarr package", "zarr"):
        import zarr
    path = path.absolute()
    places = sorted(path.rglob("*"), key=by_number) if path.is_dir() else [path]
    files = tuple(InputFile.find(place) for place in places if not place.is_dir())
    archive = None if path.is_dir() else zipfile.ZipFile(path)
    names = archive.namelist() if archive else [str(place.relative_to(path)) for place in places]
    root: Any = zipfile.Path(archive) if archive else path
    store: Any = zarr.storage.ZipStore(path, mode="r") if archive else path
    nodes = sorted({n.rpartition("/")[0] for n in names if n.endswith((".zarray", "zarr.json"))})
    if not {".zgroup", "zarr.json"} & {*names}:
        raise InputError("SOURCE_READ", "no zarr store", str(path), "unpack a zip of anything else")
    with warnings.catch_warnings(action="ignore"):
        group = zarr.open_group(store, mode="r", use_consolidated=False)
        stored = {name: _rows(root, group, name) for name in filter(None, nodes)}
    arrays = {name.removeprefix("data/"): array for name, array in stored.items() if array}
    ends = next((name for name in arrays if name.split("/")[-1] == "episode_ends"), None)
    rule = asked.rule or (ends and f"ends:{ends}")
    usual = {new: old for new, old in USUAL.items() if old in arrays and new not in arrays}
    how = asked._replace(names={**usual, **asked.names})
    facts: dict[str, Any] = {"where": path, "format": "zarr", "rule": rule}
    source = table_source(arrays, how, files, lambda rows: rows, **facts)
    source.usual = usual
    empty = [f"{a.missing:,} of {n}" for n, a in arrays.items() if n in source.spec and a.missing]
    what = f"chunks that are not stored read as the fill value: {', '.join(empty)}"
    source.warn(*[what] * bool(empty))
    return source


def _rows(root: Any, group: Any, name: str) -> SimpleNamespace | None:
    """Return an array as `table_source` takes it, with the number of chunks that are not there."""
    try:
        array = group[name]
    except ValueError as error:
        if type(error).__name__ != "UnknownCodecError":
            raise
        return SimpleNamespace(shape=None, dtype=None, type_name=str(error), missing=0)
    if not hasattr(array, "shape"):
        return None  # a group
    dtype, shape, rows, missing = np.dtype(array.dtype), array.shards or array.chunks, 1, 0
    if can_be_column(array.shape, dtype):
        size, codecs = prod(shape) * dtype.itemsize, str(array.metadata.to_dict()).lower()
        grid = [-(-n // c) for n, c in zip(array.shape, shape, strict=True)]
        rows, is_blosc = max(READ_BYTES // size, 1) * shape[0], "blosc" in codecs
        is_safe = prod(grid) <= MAX_CHUNKS and "pickle" not in codecs  # which runs what it loads
        is_safe &= not (is_blosc and array.shards)
        for place in np.ndindex(*grid) if is_safe else ():
            chunk = root / array.path / array.metadata.encode_chunk_key(place)
            missing += not chunk.exists()
            if is_blosc and chunk.exists():  # it reads on behind the end of one that is cut short
                with chunk.open("rb") as file:
                    if int.from_bytes(file.read(16)[12:], "little") != file.seek(0, 2):
                        raise ValueError(f"a chunk of {array.path} is cut short")
        if not is_safe or size * max(missing, 1) > MAX_BYTES:
            what = f"an array {array.shape} in {prod(grid):,} chunks {shape}, {missing:,} missing,"
            raise InputError("SOURCE_UNSAFE", f"{what} is not accepted", array.path, SAFE)
    return SimpleNamespace(
        read=lambda start, stop: np.asarray(array[start:stop], dtype.newbyteorder("=")),
        shape=array.shape,
        dtype=dtype,
        type_name=f"type {dtype}",
        missing=missing,
        preferred_rows=rows,
    )
