"""Minari's arrow and parquet storages: one directory with one file for each episode.

A file has T + 1 rows; in its last row only the observation (and the infos) mean something, the
rest is padding.

Shape legend: E episodes, T steps of one episode.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gear_offline.core.text import count_text
from gear_offline.dataset.schema import ColumnSpec
from gear_offline.errors import InputError, UnavailableError
from gear_offline.sources.minari import Leaf, jpeg_error, layout_error
from gear_offline.sources.minari_metadata import MinariMetadata, SpaceLeaf

_FLAGS = ("rewards", "terminations", "truncations")


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise UnavailableError(
            "PYARROW_MISSING",
            "this Minari dataset is stored as arrow or parquet, which needs pyarrow",
            remedy="pip install 'gear-offline[minari]'",
        ) from error
    return pyarrow


class ArrowStorage:
    """Reads ``<episode>/part-0.arrow`` or ``.parquet``; see `minari.Storage`."""

    def __init__(self, metadata: MinariMetadata) -> None:
        self._pa = _pyarrow()
        self._metadata = metadata
        for column in ("observations", "actions"):
            if column not in metadata.spaces:
                raise layout_error(metadata, f"metadata.json does not tell the space of {column}")
        self.left_out: dict[str, str] = {}
        self.warnings: list[str] = []
        self._cached: tuple[tuple[int, str], Any] | None = None
        self._closed = False
        parts = _episode_files(metadata)
        lengths, finals = [], []
        kept = []
        for part in parts:
            flags = self._table(part, "terminations")
            if flags.num_rows > 1:
                kept.append(part)
                lengths.append(flags.num_rows - 1)
                finals.append(bool(flags.column(0)[flags.num_rows - 2].as_py()))
        if len(kept) < len(parts):
            self.warnings.append(
                f"{count_text(len(parts) - len(kept), 'episode')} without steps left out"
            )
        if not kept:
            raise layout_error(metadata, "the dataset has no steps")
        self._parts = kept
        self.files: tuple[Path, ...] = tuple(kept)
        self.lengths = np.array(lengths, dtype=np.int64)
        self.terminated = np.array(finals, dtype=np.bool_)
        self.leaves = self._find_leaves()

    def _find_leaves(self) -> list[Leaf]:
        """Return the columns that the first episode and the spaces give."""
        spaces = self._metadata.spaces
        observations = self._space_leaves("observations", spaces["observations"])
        leaves = observations + self._space_leaves("actions", spaces["actions"])
        leaves.append(self._leaf(("rewards",), ()))
        for leaf in observations:
            name = "next_" + leaf.spec.name
            spec = ColumnSpec(name=name, dtype=leaf.spec.dtype, shape=leaf.spec.shape)
            leaves.append(Leaf(spec=spec, path=leaf.path, offset=1))
        leaves += [self._leaf((name,), ()) for name in ("terminations", "truncations")]
        return leaves + self._info_leaves()

    def _space_leaves(self, column: str, spaces: tuple[SpaceLeaf, ...]) -> list[Leaf]:
        found = []
        schema = self._schema(self._parts[0])
        for space in spaces:
            name = "/".join((column, *space.keys))
            if space.is_image and self._type(schema, (column, *space.keys)) == self._pa.binary():
                raise jpeg_error(self._metadata, name)
            if space.shape is None:
                self.left_out[name] = f"{space.kind} space"
            else:
                found.append(self._leaf((column, *space.keys), space.shape))
        return found

    def _leaf(self, path: tuple[str, ...], shape: tuple[int, ...]) -> Leaf:
        values = self._decode(0, path, shape)
        return Leaf(
            spec=ColumnSpec(name="/".join(path), dtype=values.dtype, shape=shape), path=path
        )

    def _info_leaves(self) -> list[Leaf]:
        """Return the numeric infos of the first episode that every episode has alike."""
        schema = self._schema(self._parts[0])
        if "infos" not in schema.names:
            return []
        found: dict[str, Leaf] = {}
        for path, field in _fields(schema.field("infos"), ()):
            encoded = (field.metadata or {}).get(b"shape", b"")
            shape = tuple(int(n) for n in encoded.decode().split(",") if n)
            name = "/".join(("infos", *path))
            try:
                found[name] = self._leaf(("infos", *path), shape)
            except InputError as error:
                self.left_out[name] = error.what
        types = {name: self._type(schema, leaf.path) for name, leaf in found.items()}
        for part in self._parts[1:]:
            schema = self._schema(part)
            for name in [
                n for n, leaf in found.items() if self._type(schema, leaf.path) != types[n]
            ]:
                del found[name]
                self.left_out[name] = "differs between episodes"
        return list(found.values())

    def _type(self, schema: Any, path: tuple[str, ...]) -> Any:
        """Return the arrow type at `path` of an episode's schema, ``None`` if it is not there."""
        if path[0] not in schema.names:
            return None
        kind = schema.field(path[0]).type
        for key in path[1:]:
            index = kind.get_field_index(key) if self._pa.types.is_struct(kind) else -1
            if index < 0:
                return None
            kind = kind.field(index).type
        return kind

    def read(self, leaf: Leaf, episode: int, start: int, stop: int) -> npt.NDArray[Any]:
        """Return steps ``[start, stop)`` of an episode, (stop - start, *shape)."""
        if self._closed:
            raise ValueError(f"{self._metadata.data_path} is closed")
        rows = self._decode(episode, leaf.path, leaf.spec.shape)
        if rows.dtype != leaf.spec.dtype or rows.shape[0] != self.lengths[episode] + 1:
            raise layout_error(
                self._metadata,
                f"{leaf.spec.name} is {rows.dtype} with {rows.shape[0]} rows",
                where=str(self._parts[episode]),
            )
        return rows[start + leaf.offset : stop + leaf.offset]

    def _decode(
        self, episode: int, path: tuple[str, ...], shape: tuple[int, ...]
    ) -> npt.NDArray[Any]:
        """Return all T + 1 stored rows of a leaf, (T + 1, *shape)."""
        types = self._pa.types
        key = (episode, path[0])
        if self._cached is None or self._cached[0] != key:
            self._cached = (key, self._table(self._parts[episode], path[0]).column(0))
        column = self._cached[1].combine_chunks()
        where = f"{self._parts[episode]}: {'/'.join(path)}"
        try:
            for part in path[1:]:
                column = column.field(part)
            rows = len(column)
            if types.is_fixed_size_list(column.type):
                column = column.flatten()
            if not (
                types.is_integer(column.type)
                or types.is_floating(column.type)
                or types.is_boolean(column.type)
            ):
                raise TypeError(f"type {column.type} is not numeric")
            if column.null_count:
                raise ValueError(f"{column.null_count} values are null")
            values: npt.NDArray[Any] = column.to_numpy(zero_copy_only=False)
            return values.reshape(rows, *shape)
        except (self._pa.ArrowException, KeyError, ValueError, TypeError) as error:
            raise layout_error(self._metadata, f"not usable: {error}", where=where) from error

    def _schema(self, part: Path) -> Any:
        """Return the arrow schema of an episode's file."""
        return self._open(part, None)

    def _table(self, part: Path, column: str) -> Any:
        """Return one top-level column of an episode's file, fully validated."""
        table = self._open(part, column)
        if table.column_names != [column]:
            raise layout_error(self._metadata, f"no column {column!r}", where=str(part))
        return table

    def _open(self, part: Path, column: str | None) -> Any:
        """Return the schema, or the table of the top-level column `column`."""
        pa = self._pa
        try:
            with pa.OSFile(str(part), "rb") as file:
                if self._metadata.data_format == "parquet":
                    parquet = pa.parquet.ParquetFile(file)
                    if column is None:
                        return parquet.schema_arrow
                    table = parquet.read(columns=[column], use_threads=False)
                else:
                    schema = pa.ipc.open_file(file).schema
                    if column is None:
                        return schema
                    options = pa.ipc.IpcReadOptions(
                        use_threads=False, included_fields=[schema.names.index(column)]
                    )
                    table = pa.ipc.open_file(file, options=options).read_all()
                table.validate(full=True)
                return table
        except (pa.ArrowException, OSError, ValueError, KeyError) as error:
            raise layout_error(self._metadata, f"not readable: {error}", where=str(part)) from error

    def close(self) -> None:
        """Drop what is cached; reading afterwards raises ValueError."""
        self._cached = None
        self._closed = True


def _fields(field: Any, path: tuple[str, ...]) -> list[tuple[tuple[str, ...], Any]]:
    """Return the leaves below a struct field with their paths."""
    import pyarrow

    if not pyarrow.types.is_struct(field.type):
        return [(path, field)]
    found = []
    for index in range(field.type.num_fields):
        below = field.type.field(index)
        found += _fields(below, (*path, below.name))
    return found


def _episode_files(metadata: MinariMetadata) -> list[Path]:
    """Return the file of each episode, in numeric order."""
    suffix = f".{metadata.data_format}"
    found: list[Path] = []
    directories = [p for p in metadata.data_path.iterdir() if p.is_dir() and p.name.isdecimal()]
    for directory in sorted(directories, key=lambda p: int(p.name)):
        parts = [p for p in directory.iterdir() if p.suffix == suffix and p.is_file()]
        if len(parts) != 1:
            raise layout_error(
                metadata, f"{len(parts)} {suffix} files where one is expected", where=directory.name
            )
        found.append(parts[0])
    return found
