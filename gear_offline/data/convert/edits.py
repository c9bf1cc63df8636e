"""Edits of a source on its way to shards: names, shifted rows, a function, chosen episodes.

Shape legend: E episodes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from gear_offline.core.text import count_text, texts
from gear_offline.core.types import BoolArray
from gear_offline.data.sources import open_source
from gear_offline.data.sources.base import Source
from gear_offline.data.sources.columns import split_names
from gear_offline.data.sources.combine import adapt_columns, with_columns
from gear_offline.data.sources.edit import (
    EpisodeFunction,
    edit_source,
    find_function,
    keep_episodes,
    shift_source,
)
from gear_offline.data.sources.flat import REQUIRED
from gear_offline.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Edits:
    """The changes of a source, in this order; a worker makes the same.

    Attributes
    ----------
    columns
        Columns to keep, by their new names; None: all.
    names
        Columns that get a name: the new and the old one of each.
    rename
        Those of them that were renamed by themselves: the old and the new one.
    shift
        Rows that a column is stored too late.
    function
        Function of episodes, or its name; None: none.
    where
        Expression that chooses episodes; None: all.
    chosen
        (E,) bool in bytes, once `where` was calculated: which of the shifted episodes stay.
    """

    columns: tuple[str, ...] | None = None
    names: tuple[tuple[str, str], ...] = ()
    rename: tuple[tuple[str, str], ...] = ()
    shift: tuple[tuple[str, int], ...] = ()
    function: str | EpisodeFunction | None = None
    where: str | None = None
    chosen: bytes | None = None

    @classmethod
    def parse(
        cls,
        columns: Sequence[str] | None,
        rename: Mapping[str, str],
        shift: Mapping[str, int],
        function: str | EpisodeFunction | None,
        where: str | None,
    ) -> Edits:
        """Read the options of `convert`."""
        columns = columns.split(",") if isinstance(columns, str) else columns
        words = [tuple(map(str.strip, name.partition("="))) for name in columns or ()]
        pairs = [(name.strip(), origin.strip()) for origin, name in rename.items()]
        pairs += [(name, origin) for name, equals, origin in words if equals]
        names = dict(pairs)
        kept_names = [name if name in names else rename.get(name, name) for name, _, _ in words]
        terms = [n for text in (*kept_names, *names, *names.values()) for n in split_names(text)]
        is_twice = len(names) < len(pairs) or len({*kept_names}) < len(kept_names)
        if is_twice or not all(terms) or (columns is not None and not columns):
            problem = f"{', '.join(columns or map('='.join, pairs))} gives a name twice, or none"
            raise InputError("USAGE", problem, remedy="write it like observations=obs,actions=act")
        return cls(
            columns=None if columns is None else tuple(kept_names),
            names=tuple(names.items()),
            rename=tuple(rename.items()),
            shift=tuple(shift.items()),
            function=function,
            where=where,
        )

    def open(self, path: str | os.PathLike[str], rule: str | None) -> Source:
        """Open a source under these names."""
        columns = self.columns
        groups = {*REQUIRED} if columns is None else {name.split("/")[0] for name in columns}
        # other columns may be named, or made, in place of observations
        partial = self.function is not None or REQUIRED[0] not in groups
        return open_source(path, rule=rule, names=dict(self.names), partial=partial)

    def name_hidden(self, source: Source) -> Edits:
        """Name the chosen columns that a source leaves out, or takes apart, unless asked for."""
        facts, stored = source.info.attributes, {column.name for column in source.spec}
        origins = [split_names(of) for of in facts.get("columns_from", {}).values()]
        hidden = {*facts.get("left_out", ()), *chain(*origins)} - stored
        names = ((name, name) for name in sorted(hidden.intersection(self.columns or ())))
        return replace(self, names=(*self.names, *names))

    def name_columns(self, source: Source) -> Source:
        """Return an open source under these names."""
        return adapt_columns(with_columns(source, dict(self.names)))

    def shift_rows(self, source: Source) -> Source:
        """Return the source with its columns shifted."""
        return shift_source(source, dict(self.shift))

    def choose_episodes(self, source: Source, shifted: Source) -> Edits:
        """Calculate which of the `shifted` episodes of a source stay."""
        if self.where is None:
            return self
        most = max(dict(self.shift).values(), default=0)
        numbers = np.flatnonzero(source.episodes.lengths > most)
        mapped = replace(self, where=None).edit_episodes(shifted)
        mask = keep_episodes(self.where, mapped, numbers)
        if notes := texts(mapped.info.attributes.get("warnings")):
            shifted.warn(*notes)
        return replace(self, chosen=mask.tobytes())

    def edit_episodes(self, shifted: Source) -> Source:
        """Return the chosen of `shifted` episodes, as the function changes them."""
        function = None if self.function is None else find_function(self.function)[0]
        return edit_source(shifted, function, self.chosen_episodes)

    @property
    def chosen_episodes(self) -> BoolArray | None:
        """(E,) which of the shifted episodes stay; None: all."""
        return None if self.chosen is None else np.frombuffer(self.chosen, np.bool_)

    def describe(self) -> list[str]:
        """Return a line of each edit, as the manifest records them."""
        notes = [f"rename {before} to {after}" for before, after in self.rename]
        notes += [f"shift {name} by {by}" for name, by in self.shift if by]
        if self.function is not None:
            notes.append(f"map {find_function(self.function)[1]}")
        if self.where is not None and (mask := self.chosen_episodes) is not None:
            counts = f"{mask.sum():,} of {count_text(mask.size, 'episode')}"
            notes.append(f"where {' '.join(self.where.split())}: {counts}")
        return notes


def options_text(**options: str | Sequence[str] | None) -> list[str]:
    """Return in lines what options choose of a source, as the manifest records them."""
    texts = {k: v if isinstance(v, str) else ", ".join(sorted(v or ())) for k, v in options.items()}
    return [f"{name} {text}" for name, text in texts.items() if text]
