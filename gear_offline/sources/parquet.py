"""Parquet files of one row an episode, as Hugging Face's Decision Transformer sets; by pyarrow.

Every column is a list over the steps of an episode; of vectors, a list of lists.

Shape legend: T steps of an episode, R steps of a group of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from gear_offline.core.text import count_text
from gear_offline.core.types import Array, Int64Array
from gear_offline.dataset.scores import dataset_of_file
from gear_offline.errors import InputError, package_needed
from gear_offline.sources.base import (
    Asked,
    InputFile,
    Piece,
    Source,
    SourceInfo,
    damage_told,
    kinds_of_rows,
    misfit,
    some_names,
    split_names,
)
from gear_offline.sources.flat import NO_REWARDS, REQUIRED


def open_parquet(path: Path, asked: Asked) -> Source:
    """Open a file of one row an episode; reads how long they are."""
    path, names = path.absolute(), asked.names
    file = ParquetFile(path)
    types = {field.name: field.type for field in file.schema}
    lists = [name for name, kind in types.items() if is_list(kind) and is_numeric(kind)]
    needed = [part for name in REQUIRED for part in split_names(names.get(name, name))]
    rewards = names.get("rewards", "rewards")
    for name in [*needed, *({rewards} & types.keys())]:
        if name not in lists:
            remedy = f"needed are lists over the steps of an episode; found: {some_names(lists)}; "
            remedy += f"other names: --rename NAME={name}"
            what = f"no column {name!r} of one list an episode"
            raise InputError("COLUMN", what, str(path), remedy)
    stored = list(dict.fromkeys([*needed, *lists]))
    numbers = [number for number, rows in enumerate(file.rows) if rows]
    groups = {number: _lengths(file.column(number, needed[0])) for number in numbers}
    lengths = np.concatenate([np.zeros(0, np.int64), *groups.values()])
    if not lengths.all() or not lengths.size:
        what = "an episode without steps" if lengths.size else "no episodes"
        raise misfit(what, path, "give a file with one row an episode, which has one step at least")
    recent: dict[str, tuple[int, Array]] = {}  # of each column the group that was read last

    def read(group: int, name: str, start: int, stop: int) -> Array:
        if recent.get(name, (-1,))[0] != group:
            values = file.column(group, name)
            if not np.array_equal(_lengths(values), groups[group]):
                what = f"its lists are not as long as those of {needed[0]}"
                raise misfit(what, f"{path}: {name}", "give every column one value a step")
            recent[name] = group, step_rows(values.flatten(), name, path)
        return recent[name][1][start:stop]

    first = {name: read(numbers[0], name, 0, 1) for name in stored}
    left_out = {n: f"no list of numbers ({k})" for n, k in types.items() if n not in lists}
    folders = (path.stem, path.parent.name, path.parent.parent.name)  # hopper-medium-v2/train/
    return Source(
        [Piece(read=partial(read, n), steps=int(steps.sum())) for n, steps in groups.items()],
        kinds_of_rows(first),
        lengths=lengths,
        info=SourceInfo(
            uri=asked.uri,
            format="parquet",
            rule="rows",
            reference_name=next((d for f in folders if (d := dataset_of_file(f))), None),
            files=(file.file,),
            attributes={
                "left_out": left_out,
                "warnings": [] if rewards in lists else [NO_REWARDS],
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
        with package_needed("parquet is read by pyarrow", "parquet"):
            import pyarrow
            import pyarrow.parquet
        errors = (pyarrow.ArrowException, OSError, ValueError, KeyError)
        with (
            damage_told("parquet", self.file.path, errors),
            self.file.open() as raw,
            pyarrow.parquet.ParquetFile(raw) as opened,
        ):
            yield opened


def step_rows(values: Any, name: str, path: Path) -> Array:
    """Return (R, *step shape) of an Arrow array with a number, or a list of them, for each step."""

    where, remedy = f"{path}: {name}", "give every step a number, or as many as the others"
    steps, shape = len(values), []
    while is_list(values.type):
        widths = _lengths(values)
        if values.null_count or (widths != widths[0]).any() or not widths[0]:
            raise misfit("steps are missing, empty or of different widths", where, remedy)
        shape.append(int(widths[0]))
        values = values.flatten()
    if values.null_count:
        raise misfit(f"{count_text(values.null_count, 'value')} missing (null)", where, remedy)
    rows: Array = values.to_numpy(zero_copy_only=False).reshape(steps, *shape)
    return rows


def _lengths(lists: Any) -> Int64Array:
    import pyarrow.compute

    counts = pyarrow.compute.list_value_length(lists).fill_null(0)
    return np.asarray(counts.to_numpy(zero_copy_only=False), np.int64)


def is_list(kind: Any) -> bool:
    """Whether an Arrow type is one of lists."""
    from pyarrow import types

    kind = getattr(kind, "storage_type", kind)
    return any(f(kind) for f in (types.is_list, types.is_large_list, types.is_fixed_size_list))


def is_numeric(kind: Any) -> bool:
    """Whether an Arrow type is a number or bool, or lists of them."""
    from pyarrow import types

    while is_list(kind):
        kind = getattr(kind, "storage_type", kind).value_type
    return any(f(kind) for f in (types.is_integer, types.is_floating, types.is_boolean))
