"""Parquet files of one row an episode, as Hugging Face's Decision Transformer sets; by pyarrow.

Every column is a list over the steps of an episode; of vectors, a list of lists.

Shape legend: T steps of an episode, R steps of a group of rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from gear_offline.core.text import count_text
from gear_offline.core.types import Array, Int64Array
from gear_offline.dataset.scores import dataset_of_file
from gear_offline.errors import InputError, UnavailableError
from gear_offline.sources.base import (
    InputFile,
    Kinds,
    Piece,
    Source,
    SourceInfo,
    damage_told,
    renamed,
    some_names,
)
from gear_offline.sources.episode_ends import FLAGS, SCALARS, TERMINAL_FLAGS

REQUIRED = ("observations", "actions", "rewards")


def open_parquet(path: Path, *, uri: str, names: Mapping[str, str]) -> Source:
    """Open a file of one row an episode; reads rewards and flags."""
    path = path.absolute()
    file = _Episodes(path, names)
    flags = [flag for flag in FLAGS if flag in file.stored]
    groups: list[tuple[int, Int64Array]] = []
    terminated: list[bool] = []
    for number in range(len(file.opened.rows)):
        lengths = file.lengths(number)
        if not lengths.size:
            continue
        groups.append((number, lengths))
        flag = next((name for name in flags if name in TERMINAL_FLAGS), None)
        if flag:
            rows = file.rows(number, lengths, flag, 0, int(lengths.sum()))
            terminated += (rows[np.cumsum(lengths) - 1] != 0).tolist()
        else:
            terminated += [False] * lengths.size
    if not groups:
        raise file.error("SOURCE_LAYOUT", "no episodes", "give a file with one row an episode")
    number, lengths = groups[0]
    first = {name: file.rows(number, lengths, name, 0, int(lengths.sum())) for name in file.stored}
    kinds: Kinds = {name: (rows.dtype, rows.shape[1:]) for name, rows in first.items()}
    file.kinds = kinds
    folders = (path.stem, path.parent.name, path.parent.parent.name)  # hopper-medium-v2/train/
    return Source(
        [
            Piece(read=partial(file.rows, number, lengths), steps=int(lengths.sum()))
            for number, lengths in groups
        ],
        kinds,
        lengths=np.concatenate([lengths for _, lengths in groups]),
        terminated=terminated,
        info=SourceInfo(
            uri=uri,
            format="parquet",
            rule="rows",
            reference_name=next((d for f in folders if (d := dataset_of_file(f))), None),
            files=(file.opened.file,),
            attributes={
                "left_out": file.left_out,
                "warnings": [] if flags else ["no flags: every episode counts as truncated"],
            },
        ),
    )


class ParquetFile:
    """A file of which columns are read by group of rows."""

    def __init__(self, path: Path) -> None:
        self.file = InputFile.find(path)
        with self._opened() as opened:
            groups = range(opened.num_row_groups)
            self.rows = [int(opened.metadata.row_group(number).num_rows) for number in groups]
            self.schema = opened.schema_arrow

    def column(self, group: int, name: str) -> Any:
        """Return a column of a group of rows as an Arrow array."""
        with self._opened() as opened:
            read = opened.read_row_group(group, columns=[name]).column(name).combine_chunks()
            return getattr(read, "storage", read)  # of extension types, as datasets.Array2D

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        """Open the file; of what pyarrow raises of a damaged one make one error."""
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as error:
            what = f"parquet is read by pyarrow: {error}"
            remedy = "pip install 'gear-offline[parquet]'"
            raise UnavailableError("PACKAGE_MISSING", what, remedy=remedy) from error
        errors = (pyarrow.ArrowException, OSError, ValueError, KeyError)
        with (
            damage_told("parquet", self.file.path, errors),
            self.file.open() as raw,
            pyarrow.parquet.ParquetFile(raw) as opened,
        ):
            yield opened


class _Episodes:
    """Reads a column of a group of rows; of each column the group that was read last is kept."""

    def __init__(self, path: Path, names: Mapping[str, str]) -> None:
        self.opened = ParquetFile(path)
        self.kinds: Kinds = {}
        self.left_out: dict[str, str] = {}
        self._recent: dict[str, tuple[int, Array]] = {}
        columns: dict[str, str] = {}
        for field in self.opened.schema:
            if is_list(field.type) and is_numeric(field.type):
                columns[field.name] = field.name
            else:
                self.left_out[field.name] = f"no list of numbers ({field.type})"
        self.stored = renamed(columns, names, path)
        for name in REQUIRED:
            if name not in self.stored:
                remedy = "needed are lists over the steps of an episode; found: "
                remedy += f"{some_names(self.stored)}; other names: --columns {name}=NAME,..."
                what = f"no column {name!r} of one list an episode"
                raise self.error("COLUMN", what, remedy)
        order = [*REQUIRED, *(n for n in self.stored if n not in REQUIRED)]
        self.stored = {name: self.stored[name] for name in order}

    def error(self, code: str, what: str, remedy: str, name: str = "") -> InputError:
        """Return an error of the file, or of a column in it."""
        path = self.opened.file.path
        return InputError(code, what, where=f"{path}: {name}" if name else str(path), remedy=remedy)

    def lengths(self, group: int) -> Int64Array:
        """Return the steps of each episode of a group of rows."""
        lists = self.opened.column(group, self.stored["rewards"])
        lengths = _lengths(lists)
        if lists.null_count or (lengths < 1).any():
            what = f"an episode without steps in group {group} of rows"
            raise self.error("SOURCE_LAYOUT", what, "take it out of the file", "rewards")
        return lengths

    def rows(self, group: int, lengths: Int64Array, name: str, start: int, stop: int) -> Array:
        """Return rows ``[start, stop)`` of the R of a group, whose episodes have `lengths`."""
        if self._recent.get(name, (-1,))[0] != group:
            lists = self.opened.column(group, self.stored[name])
            if lists.null_count or not np.array_equal(_lengths(lists), lengths):
                what = "its lists are not as long as those of rewards"
                raise self.error("SOURCE_LAYOUT", what, "give every column one value a step", name)
            rows = step_rows(lists.flatten(), name, self.opened.file.path, self.kinds.get(name))
            self._recent[name] = group, rows
        return self._recent[name][1][start:stop]


def step_rows(
    values: Any,
    name: str,
    path: Path,
    wanted: tuple[np.dtype[Any], tuple[int, ...]] | None = None,
) -> Array:
    """Return (R, *step shape) of an Arrow array with a number, or a list of them, for each step."""

    def misfit(what: str) -> InputError:
        remedy = "give every step a number, or as many as the others"
        return InputError("SOURCE_LAYOUT", what, where=f"{path}: {name}", remedy=remedy)

    steps, shape = len(values), []
    while is_list(values.type):
        widths = _lengths(values)
        if values.null_count or (widths != widths[0]).any() or not widths[0]:
            raise misfit("steps are missing, empty or of different widths")
        shape.append(int(widths[0]))
        values = values.flatten()
    if values.null_count:
        raise misfit(f"{count_text(values.null_count, 'value')} missing (null)")
    if name in SCALARS and shape == [1]:
        shape = []
    if name in SCALARS and shape:
        raise misfit(f"a step has shape {tuple(shape)} where one number is expected")
    rows: Array = values.to_numpy(zero_copy_only=False).reshape(steps, *shape)
    if wanted and (rows.dtype, rows.shape[1:]) != wanted:
        raise misfit(f"a step has shape {rows.shape[1:]}, before it was {wanted[1]}")
    return rows


def _lengths(lists: Any) -> Int64Array:
    import pyarrow.compute

    counts = pyarrow.compute.list_value_length(lists).fill_null(0)
    return np.asarray(counts.to_numpy(zero_copy_only=False), np.int64)


def is_list(kind: Any) -> bool:
    """Whether an Arrow type is one of lists."""
    from pyarrow import types

    kind = getattr(kind, "storage_type", kind)
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def is_numeric(kind: Any) -> bool:
    """Whether an Arrow type is a number or bool, or lists of them."""
    from pyarrow import types

    while is_list(kind):
        kind = getattr(kind, "storage_type", kind).value_type
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))
