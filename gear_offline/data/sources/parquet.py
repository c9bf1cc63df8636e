"""Parquet and Arrow files of one row a step, or an episode as Hugging Face's sets; by pyarrow.

Of an episode every column is a list over its steps; of vectors, a list of lists.

Shape legend: T steps of an episode, R steps of a group of rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from gear_offline.core.text import count_text
from gear_offline.core.types import Array, Int64Array
from gear_offline.data.dataset.scores import dataset_of_file
from gear_offline.data.sources.arrow_messages import MAGIC, read_batches
from gear_offline.data.sources.base import Piece, Source, SourceInfo, SourceRequest
from gear_offline.data.sources.columns import Kinds, row_kinds, split_names
from gear_offline.data.sources.flags import find_flags
from gear_offline.data.sources.flat import REQUIRED, find_columns, table_source
from gear_offline.data.sources.input_files import InputFile, misfit
from gear_offline.data.sources.row_marks import MARK, row_marks
from gear_offline.errors import InputError, package_needed, reading_errors

ARROW = (".arrow", ".feather")
BATCH_VALUES, BATCH_ROWS = 1 << 22, 1 << 20  # of a batch; run lengths make billions of few bytes
BATCH_TEXTS = 256  # values of any size: a dictionary may repeat a long one
MAX_UNPACKED_BYTES = 128 << 20  # at once, or else that much more than what is stored:
MAX_BATCH_RATIO, MAX_GROUP_RATIO = 8, 256  # a group of rows is read page by page
MAX_ROW_VALUES = 1 << 27
MAX_EPISODES = 1 << 24  # of a file; each takes some tens of bytes


def open_parquet(path: Path, request: SourceRequest) -> Source:
    """Open files of one row a step or an episode; reads how long they are."""
    path, paths = path.absolute(), request.shards or (path.absolute(),)
    form = "arrow" if paths[0].suffix.lower() in ARROW else "parquet"
    files = tuple(map(ArrowFile if form == "arrow" else ParquetFile, paths))
    file, inputs = Shards(files) if files[1:] else files[0], tuple(each.file for each in files)
    if not file.rows or len({*file.schema.names}) < len(file.schema.names):
        problem = "columns of one name" if file.rows else "no rows"
        remedy = "give a row for each step or episode, columns of different names"
        raise misfit(problem, path, remedy)
    types = {field.name: field.type for field in file.schema}
    by_step = _are_steps(types, request)
    arrays = {n: _array(file, n, dtype, by_step) for n, dtype in types.items()}
    if by_step:
        return table_source(arrays, request, inputs, where=path, format=f"{form}-rows")
    lists = _Lists(file, path, arrays, request)
    folders = (path.stem, path.parent.name, path.parent.parent.name)  # hopper-medium-v2/train/
    info: dict[str, Any] = {"attributes": {"left_out": lists.left_out}, "files": inputs}
    info |= {"reference_name": next(filter(None, map(dataset_of_file, folders)), None)}
    return Source(
        [Piece(read=lists.read, steps=int(lists.bounds[-1]))],
        lists.find_kinds(),
        lengths=lists.lengths,
        info=SourceInfo(uri=request.uri, format=form, rule="rows", **info),
    )


def _are_steps(types: Mapping[str, Any], request: SourceRequest) -> bool:
    """Tell from the Arrow types of columns whether rows are steps, of an episode they are lists."""
    names = request.names
    numeric = {name for name, dtype in types.items() if is_numeric(dtype)}
    lists = {name for name in numeric if is_list(types[name])}
    nested = any(is_list(getattr(types[n], "storage_type", types[n]).value_type) for n in lists)
    rewards, flags = {names.get("rewards", "rewards")}, {*find_flags(types, names).values()}
    mark_names = {mark[2] for mark in map(MARK.fullmatch, row_marks(types)) if mark}
    signs = rewards & types.keys() or (set[str]() if nested else flags or mark_names)
    signs |= {n for name in REQUIRED for n in split_names(names.get(name, name))}
    rule_columns = {mark[2] for mark in MARK.finditer(request.rule or "")} & types.keys()
    return bool(rule_columns - lists or signs & (numeric - lists)) or not lists


class _Lists:
    """Reads steps of columns that hold an episode's in each row."""

    def __init__(
        self, file: Table, path: Path, arrays: Mapping[str, Any], request: SourceRequest
    ) -> None:
        if file.rows > MAX_EPISODES:
            raise misfit(f"{file.rows:,} episodes", path, f"give files of at most {MAX_EPISODES:,}")
        required, optional = REQUIRED[::-1], ("rewards",)
        stored, left_out = find_columns(arrays, request, required, optional, where=str(path))
        types = {field.name: field.type for field in file.schema}
        # of one value an episode
        self._once = {n for n, dtype in types.items() if is_numeric(dtype) and not is_list(dtype)}
        self.left_out = {n: why for n, why in left_out.items() if n not in self._once}
        self._file, self._path, self._first = file, path, stored[0]
        self._observed = split_names(request.names.get(REQUIRED[0], REQUIRED[0]))
        self._flags = {*find_flags(types, request.names).values()}
        self.lengths = np.zeros(file.rows, np.int64)
        for row, values in file.batches(stored[0]):
            self.lengths[row : row + len(values)] = counts = _lengths(values)
            if not counts.all():
                raise misfit("an episode without steps", path, "leave its row out")
        self.bounds = np.cumsum([0, *self.lengths])
        self._columns = {name: Column(file, name) for name in (*stored, *sorted(self._once))}

    def find_kinds(self) -> Kinds:
        """Return dtype and step shape of the columns, by their first steps."""
        kinds = row_kinds({name: self.read(name, 0, 1) for name in self._columns})
        for column in self._columns.values():
            column.close()
        return kinds

    def read(self, name: str, start: int, stop: int) -> Array:
        """Return steps ``[start, stop)`` of a column."""
        bounds, path = self.bounds, self._path
        first = int(np.searchsorted(bounds, start, side="right")) - 1
        last = int(np.searchsorted(bounds, stop))
        with self._file.reading():
            values, ends = self._columns[name].read(first, last), bounds[first + 1 : last + 1] - 1
            lengths, begin = self.lengths[first:last], int(bounds[first])
            if name in self._once:
                each = step_rows(values, name, path)
                if name in self._flags:
                    return np.isin(np.arange(start, stop), ends[each != 0])
                return each.repeat(lengths)[start - begin : stop - begin]
            counts, steps = _lengths(values), values.flatten()
            if name in self._observed and np.array_equal(counts, lengths + 1):
                steps = steps.take(np.delete(np.arange(len(steps)), np.cumsum(counts) - 1))
            elif not np.array_equal(counts, lengths):
                problem = f"its lists are not as long as those of {self._first}"
                raise misfit(problem, f"{path}: {name}", "give every column one value a step")
            return step_rows(steps[start - begin : stop - begin], name, path)


def _array(file: Table, name: str, dtype: Any, by_step: bool) -> SimpleNamespace:
    """Return a column as `find_columns` takes it: of one row a step, or lists of an episode."""
    is_text = re.match("(dictionary<values=)?(large_)?string", str(dtype))
    column, first = Column(file, name), np.empty(1, str if is_text else object)
    if is_numeric(dtype) and (by_step or is_list(dtype)):
        first = column.rows(0, 1) if by_step else np.empty(1, "f4")
    column.close()
    shape, text = (file.rows, *first.shape[1:]), f"type {dtype}"
    if text.startswith("type struct"):
        text += f" (write table.flatten(), whose columns are {name}.FIELD)"
    return SimpleNamespace(type_name=text, read=column.rows, shape=shape, dtype=first.dtype)


class ParquetFile:
    """A file of which columns are read in batches of rows."""

    def __init__(self, path: Path) -> None:
        with package_needed("parquet is read by pyarrow", "parquet"):
            import pyarrow.parquet
        self.where, self.file = path, InputFile.find(path)
        self._open = pyarrow.parquet.ParquetFile
        self.reading = partial(reading_errors, "parquet", path)  # of whatever pyarrow raises
        with self.reading(), self.file.open() as raw, self._open(raw) as opened:
            self.schema, metadata = opened.schema_arrow, opened.metadata
            groups = [metadata.row_group(n) for n in range(metadata.num_row_groups)]
            self.firsts = np.cumsum([0, *(group.num_rows for group in groups)])
            self.rows = int(self.firsts[-1])
            # of each column the values of a row, before anything is decoded
            self.widths, self.texts = dict[str, int](), set[str]()
            for group in groups if self.rows else ():
                for chunk in map(group.column, range(group.num_columns)):
                    name, values = chunk.path_in_schema, chunk.num_values // max(group.num_rows, 1)
                    if chunk.physical_type == "BYTE_ARRAY":
                        values = max(values, BATCH_VALUES // BATCH_TEXTS)
                        self.texts.add(name)
                    self.widths[name] = max(self.widths.get(name, 1), values)
                    claimed, stored = chunk.total_uncompressed_size, chunk.total_compressed_size
                    if claimed > max(MAX_UNPACKED_BYTES, MAX_GROUP_RATIO * stored):
                        raise _too_much(claimed, stored, f"{path}: {name}")

    def batches(self, name: str, row: int = 0) -> Iterator[tuple[int, Any]]:
        """Yield a column as Arrow arrays with their first rows, from the group of `row` on."""
        leaves = (n for n in self.widths if n == name or n.startswith(f"{name}."))
        width = max((self.widths[leaf] for leaf in leaves), default=1)
        if width > MAX_ROW_VALUES:
            problem, remedy = f"a row of {width:,} values", "write long episodes as several rows"
            raise InputError("SOURCE_UNSAFE", problem, f"{self.where}: {name}", remedy)
        group = int(np.searchsorted(self.firsts[1:-1], row, side="right"))
        first, size = int(self.firsts[group]), max(1, min(BATCH_VALUES // width, BATCH_ROWS))
        numbers = range(group, len(self.firsts) - 1)
        options = {"read_dictionary": [name] if name in self.texts else []}  # each is kept once
        with self.reading(), self.file.open() as raw, self._open(raw, **options) as opened:
            for batch in opened.iter_batches(size, numbers, [name], use_threads=False):
                yield first, batch.column(name)
                first += len(batch)


class ArrowFile(ParquetFile):
    """A file, or a stream, of Arrow's batches of rows: Feather's, Hugging Face's on disk."""

    def __init__(self, path: Path) -> None:
        with package_needed("arrow files are read by pyarrow", "parquet"):
            import pyarrow.ipc
        self.where, self.file, self._ipc = path, InputFile.find(path), pyarrow.ipc
        self.reading = partial(reading_errors, "arrow", path)
        with self.reading(), self.file.open() as raw:
            batches = read_batches(raw, self.file.identity[2])
            self.schema, _ = self._open_batches(raw)
        rows = [batch for batch in batches if not batch.is_dictionary]
        self.rows = sum(batch.rows for batch in rows)
        dictionaries = [batch for batch in batches if batch.is_dictionary]  # all are kept
        for group in (*([batch] for batch in rows), dictionaries):
            claimed, stored = (sum(getattr(b, n) for b in group) for n in ("claimed", "stored"))
            if claimed > max(MAX_UNPACKED_BYTES, MAX_BATCH_RATIO * stored):
                raise _too_much(claimed, stored, path)

    def batches(self, name: str, row: int = 0) -> Iterator[tuple[int, Any]]:
        """Yield a column as Arrow arrays with their first rows, from the first one on."""
        first = 0
        with self.reading(), self.file.open() as raw:
            for batch in self._open_batches(raw, self.schema.names.index(name))[1]:
                batch.validate(full=True)
                yield first, batch.column(name)
                first += len(batch)

    def _open_batches(self, raw: Any, *fields: int) -> tuple[Any, Iterable[Any]]:
        """Return the schema, and the batches of some fields or all."""
        raw.seek(0)
        is_file = raw.read(len(MAGIC)) == MAGIC
        raw.seek(0)
        options = self._ipc.IpcReadOptions(included_fields=[*fields])
        if is_file:
            file = self._ipc.open_file(raw, options=options)
            return file.schema, map(file.get_batch, range(file.num_record_batches))
        stream = self._ipc.open_stream(raw, options=options)
        return stream.schema, stream


class Shards:
    """Files of one table: the rows of each go on where those of the one before end."""

    def __init__(self, files: Sequence[ParquetFile]) -> None:
        self.where, self.reading = files[0].where.parent, files[0].reading
        self.schema, self._files = files[0].schema, files
        self._firsts = np.cumsum([0, *(file.rows for file in files)]).tolist()
        self.rows: int = self._firsts[-1]

    def batches(self, name: str, row: int = 0) -> Iterator[tuple[int, Any]]:
        """Yield a column as Arrow arrays with their first rows, from about `row` on."""
        for file, (start, stop) in zip(self._files, pairwise(self._firsts), strict=True):
            for first, values in file.batches(name, max(row - start, 0)) if row < stop else ():
                yield start + first, values


Table = ParquetFile | Shards


def _too_much(claimed: int, stored: int, where: Path | str) -> InputError:
    problem = f"{stored:,} bytes unpack to {claimed:,} at once"
    remedy = "write smaller batches: max_chunksize=10_000 of Arrow, row_group_size of parquet"
    return InputError("SOURCE_UNSAFE", problem, str(where), remedy)


class Column:
    """Rows of a column of a file, decoded forwards; a read of earlier ones begins again."""

    def __init__(self, file: Table, name: str) -> None:
        self.file, self.name = file, name
        self.close()

    def close(self) -> None:
        """Close the file and drop what was decoded; a read opens it again."""
        self._batches: Iterator[tuple[int, Any]] = iter(())
        self._batch: tuple[int, Any] = (self.file.rows, ())

    def read(self, start: int, stop: int) -> Any:
        """Return rows ``[start, stop)``, at least one, as an Arrow array."""
        import pyarrow

        arrays = self._read_arrays(start, stop)
        return arrays[0] if len(arrays) == 1 else pyarrow.concat_arrays(arrays)

    def _read_arrays(self, start: int, stop: int) -> list[Any]:
        if start < self._batch[0]:
            self._batches = self.file.batches(self.name, start)
            self._batch = next(self._batches)
        arrays = []
        while True:
            first, values = self._batch
            if start < first + len(values):
                arrays.append(values[max(start - first, 0) : stop - first])
            if stop <= first + len(values):
                break
            self._batch = next(self._batches)
        if stop == self.file.rows:  # a folder may have thousands of files
            self.close()
        return arrays

    def rows(self, start: int, stop: int) -> Array:
        """Return (stop - start, *step shape) of a column of one row a step."""
        arrays = self._read_arrays(start, stop)
        blocks = [step_rows(array, self.name, self.file.where) for array in arrays]
        return blocks[0] if len(blocks) == 1 else np.concatenate(blocks)


def step_rows(values: Any, name: str, path: Path) -> Array:
    """Return (R, *step shape) of an Arrow array with a number, a list of them, or text a step."""
    where, remedy = f"{path}: {name}", "give every step a number, or as many as the others"
    from pyarrow.types import is_floating

    steps, shape = len(values), list[int]()
    while is_list(values.type):
        dtype, values = values.type, getattr(values, "storage", values)  # of extension types
        widths = _lengths(values)
        if values.null_count or (widths != widths[0]).any() or not widths[0]:
            raise misfit("steps are missing, empty or of different widths", where, remedy)
        shape += getattr(dtype, "shape", [int(widths[0])])  # a tensor is stored as one list
        if (order := getattr(dtype, "permutation", None)) and order != sorted(order):
            raise misfit("a tensor with its axes in another order", where, remedy)
        values = values.flatten()
    if values.null_count and not is_floating(values.type):  # those become NaN
        raise misfit(f"{count_text(values.null_count, 'value')} missing (null)", where, remedy)
    texts = getattr(values, "dictionary", None)  # each of which is decoded once
    rows: Array = (values if texts is None else values.indices).to_numpy(zero_copy_only=False)
    rows = rows if texts is None else texts.to_numpy(zero_copy_only=False)[rows]
    return rows.reshape(steps, *shape)


def _lengths(lists: Any) -> Int64Array:
    import pyarrow.compute

    counts = pyarrow.compute.list_value_length(lists).fill_null(0)
    return np.asarray(counts.to_numpy(zero_copy_only=False), np.int64)


def is_list(dtype: Any) -> bool:
    """Tell a list's Arrow type."""
    from pyarrow import types

    dtype = getattr(dtype, "storage_type", dtype)
    return any(f(dtype) for f in (types.is_list, types.is_large_list, types.is_fixed_size_list))


def is_numeric(dtype: Any) -> bool:
    """Tell the Arrow type of a number or bool, or of lists of them."""
    from pyarrow import types

    while is_list(dtype):
        dtype = getattr(dtype, "storage_type", dtype).value_type
    return any(f(dtype) for f in (types.is_integer, types.is_floating, types.is_boolean))
