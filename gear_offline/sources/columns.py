"""A source whose columns have other names, or are put together of several.

Shape legend: N rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from gear_offline.core.closing import Closing
from gear_offline.core.text import count_text
from gear_offline.dataset.schema import ColumnSpec, TableSpec
from gear_offline.errors import InputError
from gear_offline.sources.base import Source, source_text

Parts = Mapping[str, tuple[str, ...]]  # column: those of the source that it is made of


def parse_names(names: Mapping[str, str] | None) -> Parts:
    """Return the parts of ``{"observations": "a + b"}``.

    Raises
    ------
    InputError
        ``CONVERT_OPTION`` if that is not a mapping of text.
    """
    if names is not None and not (
        isinstance(names, Mapping) and all(isinstance(old, str) for old in names.values())
    ):
        raise InputError(
            "CONVERT_OPTION",
            f"names={names!r} is not usable",
            remedy='give a mapping: {"observations": "obs"}',
        )
    return {
        new: tuple(part.strip() for part in old.split("+")) for new, old in (names or {}).items()
    }


def names_in_file(parts: Parts) -> tuple[dict[str, str], Parts]:
    """Return what a reader of HDF5 files renames, and what is put together after that."""
    before: dict[str, str] = {}
    after: dict[str, tuple[str, ...]] = {}
    for new, olds in parts.items():
        if len(olds) == 1:
            before[new] = olds[0]
        else:  # as leaves of the new column, which the reader takes for it
            after[new] = tuple(f"{new}/{index}" for index in range(len(olds)))
            before |= dict(zip(after[new], olds, strict=True))
    return before, after


def with_columns(source: Source, parts: Parts, given: Mapping[str, str] | None = None) -> Source:
    """Return `source` with the columns `parts` in front of those that it does not use up.

    `given` are the names that the user knows, by those that a reader gave instead.

    Raises
    ------
    InputError
        ``COLUMN_MISSING``; ``CONVERT_OPTION`` for parts that do not make one column.  The source
        is closed then.
    """
    if not parts:
        return source
    try:
        return ColumnsSource(source, parts, given or {})
    except BaseException:
        source.close()
        raise


class ColumnsSource(Closing):
    """A `Source` over another one; see `gear_offline.sources.base.Source`.

    A column of several parts has their elements side by side: (N, sum of their widths).
    """

    def __init__(self, source: Source, parts: Parts, given: Mapping[str, str]) -> None:
        self._source = source
        used = {name for olds in parts.values() for name in olds}
        rest = [c for c in source.spec if c.name not in used and c.name not in parts]
        self._parts = {c.name: (c.name,) for c in rest} | dict(parts)
        made = [_column(source, new, olds, given) for new, olds in parts.items()]
        self.spec = TableSpec(
            columns=(*made, *rest), steps=source.spec.steps, episodes=source.spec.episodes
        )
        self.episodes = source.episodes
        self.terminated, self.truncated = source.terminated, source.truncated
        made_of = {new: " + ".join(olds) for new, olds in parts.items()}
        attributes = {**source.info.attributes, "columns_from": made_of}
        self.info = replace(source.info, attributes=attributes)

    def __repr__(self) -> str:
        return source_text(self)

    def read(self, column: str, start: int, stop: int) -> npt.NDArray[Any]:
        """Return rows ``[start, stop)`` of `column`, (stop - start, *shape), native dtype."""
        olds = self._parts[column]
        if len(olds) == 1:
            return self._source.read(olds[0], start, stop)
        rows = [self._source.read(old, start, stop).reshape(stop - start, -1) for old in olds]
        return np.concatenate(rows, axis=1)

    def preferred_rows(self, column: str) -> int:
        """Rows per read that suit the storage; at least 1."""
        return min(self._source.preferred_rows(old) for old in self._parts[column])

    def close(self) -> None:
        """Close the source."""
        self._source.close()


def _column(
    source: Source, new: str, olds: tuple[str, ...], given: Mapping[str, str]
) -> ColumnSpec:
    for old in olds if len(olds) > 1 else ():
        below = [c.name.removeprefix(old) for c in source.spec if c.name.startswith(f"{old}/")]
        if below and old not in source.spec:
            name = given.get(old, old)
            raise InputError(
                "CONVERT_OPTION",
                f"{name} is a group of {count_text(len(below), 'column')}",
                where=f"column {new}",
                remedy=f"name its parts: {'+'.join(name + part for part in below)}",
            )
    specs = [source.spec[old] for old in olds]
    if len(specs) == 1:
        return replace(specs[0], name=new)
    first = specs[0]
    odd = next((s for s in specs if len(s.shape) > 1 or s.dtype != first.dtype), None)
    if odd is not None:
        names = [given.get(s.name, s.name) for s in (odd, first)]
        raise InputError(
            "CONVERT_OPTION",
            f"{names[0]} is {odd.dtype} {odd.shape} a step, {names[1]} {first.dtype} "
            f"{first.shape}: they do not make one column",
            where=f"column {new}",
            remedy="put vectors and numbers of one dtype together",
        )
    width = sum(s.shape[0] if s.shape else 1 for s in specs)
    return ColumnSpec(name=new, dtype=first.dtype, shape=(width,))
