"""Zarr stores, as Diffusion Policy's replay buffers: a folder or a zip; read by the zarr package.

A column is an array, called as it is below ``data``; ``meta/episode_ends`` has the rows behind the
last ones of episodes.
"""

from __future__ import annotations

import warnings
import zipfile
from collections.abc import Mapping
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from gear_offline.data.sources.base import READ_BYTES, Source, SourceRequest
from gear_offline.data.sources.columns import can_be_column
from gear_offline.data.sources.flat import single_values, table_source
from gear_offline.data.sources.input_files import InputFile, by_number
from gear_offline.errors import InputError, package_needed

MAX_CHUNKS, MAX_BYTES = 1 << 22, 512 << 20  # of a chunk, or of all that are not there
MAX_HEADER_BYTES, MAX_FACT_CHARS = 16 << 20, 500
ROOTS = (".zgroup", "zarr.json")
HEADERS = (".zarray", ".zattrs", ".zmetadata", *ROOTS)
SAFE = "store numbers in chunks of about 1 MiB"
USUAL = {"actions": "action", "rewards": "reward", "observations": "state"}


def is_store(path: Path) -> bool:
    """Tell a folder that is a store."""
    return any((path / name).is_file() for name in ROOTS)


def open_zarr(path: Path, request: SourceRequest) -> Source:
    """Open a store of arrays of one row a step."""
    with package_needed("zarr stores are read by the zarr package", "zarr"):
        import zarr
    path = path.absolute()
    paths = sorted(path.rglob("*"), key=by_number) if path.is_dir() else [path]
    files = tuple(InputFile.find(item) for item in paths if not item.is_dir())
    archive = None if path.is_dir() else zipfile.ZipFile(path)
    sizes = {str(file.path.relative_to(path)): file.identity[2] for file in files}
    if archive:
        sizes = {entry.filename: entry.file_size for entry in archive.infolist()}
    store: Any = zarr.storage.ZipStore(path, mode="r") if archive else path
    headers = [name for name in sizes if name.split("/")[-1] in HEADERS]
    if not {*ROOTS} & {*headers}:
        raise InputError("SOURCE_READ", "no zarr store", str(path), "unpack a zip of anything else")
    for name in headers:
        if sizes[name] > MAX_HEADER_BYTES:
            raise InputError("SOURCE_UNSAFE", f"a header of {sizes[name]:,} bytes", name, SAFE)
    nodes = sorted({n.rpartition("/")[0] for n in headers if n.endswith((".zarray", "zarr.json"))})
    with warnings.catch_warnings(action="ignore"):
        group = zarr.open_group(store, mode="r", use_consolidated=False)
        stored = {name: _rows(sizes, group, name) for name in filter(None, nodes)}
    arrays = {name.removeprefix("data/"): array for name, array in stored.items() if array}
    ends = next((name for name in arrays if name.split("/")[-1] == "episode_ends"), None)
    rule = request.rule or (ends and f"ends:{ends}")
    usual = {n: name for n, name in USUAL.items() if name in arrays and n not in arrays}
    how = request._replace(names={**usual, **request.names})
    root_facts = {n: v for n, v in group.attrs.items() if isinstance(v, int | float | str)}
    short = {n: v for n, v in root_facts.items() if len(str(v)) <= MAX_FACT_CHARS}
    single = ((n, arrays[n]) for n in single_values(arrays) if arrays[n].dtype.kind in "biu")
    numbers = short | {n: array.read().item() for n, array in single}
    info: dict[str, Any] = {"where": path, "format": "zarr", "facts": {"attributes": numbers}}
    source = table_source(arrays, how, files, numbers=numbers, rule=rule, **info)
    source.usual = usual
    empty = [f"{a.missing:,} of {n}" for n, a in arrays.items() if n in source.spec and a.missing]
    finding = f"chunks that are not stored read as the fill value: {', '.join(empty)}"
    source.warn(*[finding] * bool(empty))
    return source


def _rows(sizes: Mapping[str, int], group: Any, name: str) -> SimpleNamespace | None:
    """Return an array as `table_source` takes it, with the number of chunks that are not there.

    `sizes` are the bytes of each file of the store.
    """
    from gear_offline.data.sources.zarr_codecs import CodecNotRead, bound_codecs

    try:
        array = group[name]
        if not hasattr(array, "shape"):
            return None  # a group
        bounded = bound_codecs(array.metadata)
    except ValueError as error:
        if not isinstance(error, CodecNotRead) and type(error).__name__ != "UnknownCodecError":
            raise
        return SimpleNamespace(shape=None, dtype=None, type_name=str(error), missing=0)
    dtype, shape, rows, missing = np.dtype(array.dtype), array.shards or array.chunks, 1, 0
    if can_be_column(array.shape, dtype):
        size, sides = prod(shape) * dtype.itemsize, (shape, array.chunks)
        grid, inner_grid = (
            [-(-n // c) for n, c in zip(array.shape, side, strict=True)] for side in sides
        )
        rows, is_safe = max(READ_BYTES // size, 1) * shape[0], prod(inner_grid) <= MAX_CHUNKS
        most = 2 * size + 4096 + 32 * prod(shape) // prod(array.chunks)  # with an index of parts
        largest = 0
        for cell in np.ndindex(*grid) if is_safe else ():
            stored = sizes.get(f"{array.path}/{array.metadata.encode_chunk_key(cell)}")
            missing += stored is None
            largest = max(largest, stored or 0)
        if not is_safe or largest > most or size * max(missing, 1) > MAX_BYTES:
            problem = f"an array {array.shape} in {prod(grid):,} chunks {shape}, {missing:,}"
            problem += f" missing, at most {largest:,} bytes stored of one,"
            raise InputError("SOURCE_UNSAFE", f"{problem} is not accepted", array.path, SAFE)
    array = type(array).from_dict(array.store_path, bounded)
    native = dtype.newbyteorder("=")
    facts = {"shape": array.shape, "dtype": dtype, "type_name": f"type {dtype}", "missing": missing}
    return SimpleNamespace(
        read=lambda *bounds: np.asarray(array[slice(*bounds) if bounds else ...], native),
        preferred_rows=rows,
        **facts,
    )
