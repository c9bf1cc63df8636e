"""Edits of a source on its way to shards: names, shifted rows, a function, chosen episodes.

Shape legend: E episodes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import prod
from typing import Any

import numpy as np

from gear_offline.core.text import texts
from gear_offline.core.types import Int64Array
from gear_offline.data.dataset.dataset import HISTORIES
from gear_offline.data.dataset.schema import (
    REWARDS,
    ColumnSpec,
    EpisodeIndex,
    TableSpec,
    check_whole,
)
from gear_offline.data.dataset.shard import RESERVED_NAMES
from gear_offline.data.sources import open_source
from gear_offline.data.sources.base import KeptVideo, Source, SourceInfo
from gear_offline.data.sources.columns import split_names
from gear_offline.data.sources.combine import adapt_columns, pick_episodes, with_columns
from gear_offline.data.sources.edit import (
    MAPS,
    EpisodeFunction,
    episode_values,
    find_function,
    keep_episodes,
    map_episodes,
    shift_source,
)
from gear_offline.data.sources.flags import PADDED
from gear_offline.data.sources.flat import REQUIRED
from gear_offline.data.sources.reader import EpisodeReader
from gear_offline.errors import InputError

MAX_WIDTH = 2 << 20  # numbers a step: the statistics of each take 90 bytes of a manifest


@dataclass(frozen=True, kw_only=True)
class Edits:
    """The edits of a conversion, in this order; a worker makes the same."""

    rule: str | None = None  # where episodes end; None: as the source says
    keeps_videos: bool = False  # a column of frames holds references to them
    resize: tuple[int, int] | None = None  # height and width of decoded frames
    reader: str | EpisodeReader | None = None  # of a format of the user's own, or its name
    columns: tuple[str, ...] | None = None  # to keep, by their new names; None: all
    names: tuple[tuple[str, str], ...] = ()  # the new one of columns, and what makes them
    rename: tuple[tuple[str, str], ...] = ()  # of those renamed by themselves: old, new
    shift: tuple[tuple[str, int], ...] = ()  # rows that a column is stored too late
    function: str | EpisodeFunction | None = None  # of episodes, or its name
    where: str | None = None  # expression that chooses episodes; None: all
    histories: str | None = None  # column that numbers the histories of episodes
    chosen: bytes | None = None  # (n,) int64, once calculated: the shifted that stay, in order
    discrete: tuple[str, ...] = ()  # columns of whole numbers that are stored as int32
    options: tuple[str, ...] = ()  # a line of each that chooses columns or ends, for the manifest

    @classmethod
    def parse(
        cls, columns: Sequence[str] | None, rename: Mapping[str, str] | None, **others: Any
    ) -> Edits:
        """Read `columns` and `rename` of `convert`; `others` are fields."""
        chosen = {name: others[name] for name in ("rule", "discrete", "histories")}
        options, rename = tuple(options_text(columns=columns, **chosen)), rename or {}
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
            options=options,
            **others,
        )

    def open(self, path: str | os.PathLike[str]) -> Source:
        """Open a source by this rule under these names."""
        columns = self.columns
        groups = {*REQUIRED} if columns is None else {name.split("/")[0] for name in columns}
        # other columns may be named, or made, in place of observations
        partial = self.function is not None or REQUIRED[0] not in groups
        options: Any = {"rule": self.rule, "reader": self.reader, "partial": partial}
        options |= {"keeps_videos": self.keeps_videos, "resize": self.resize}
        return open_source(path, names=dict(self.names), **options)

    def name_hidden(self, source: Source) -> Edits:
        """Name the chosen columns that a source leaves out, or takes apart, unless asked for."""
        facts, stored = source.info.attributes, {column.name for column in source.spec}
        origins = [split_names(of) for of in facts.get("columns_from", {}).values()]
        hidden = {*facts.get("left_out", ()), *chain(*origins)} - stored
        names = ((name, name) for name in sorted(hidden.intersection(self.columns or ())))
        return replace(self, names=(*self.names, *names))

    def find_histories(self, source: Source) -> Edits:
        """Take the histories that a source has, unless others are named, or their column goes."""
        facts = source.info.attributes
        of_file = facts.get("attributes")
        name = {**(of_file if isinstance(of_file, Mapping) else {}), **facts}.get(HISTORIES)
        if isinstance(name, str):
            name = {origin: new for new, origin in self.names}.get(name, name)
        if self.histories is not None or not isinstance(name, str) or name not in source.spec:
            return self
        if self.columns is None or name in self.columns:
            return replace(self, histories=name)
        source.warn(f"histories are left out with the column {name}, which tells them")
        return self

    def name_columns(self, source: Source) -> Source:
        """Return an open source under these names."""
        return adapt_columns(with_columns(source, dict(self.names)))

    def shift_rows(self, source: Source) -> Source:
        """Return the source with its columns shifted."""
        return shift_source(source, dict(self.shift))

    def choose_episodes(self, source: Source, shifted: Source) -> Edits:
        """Calculate which of the `shifted` episodes of a source stay, histories side by side."""
        if self.where is None and self.histories is None:
            return self
        most = max(dict(self.shift).values(), default=0)
        numbers = np.flatnonzero(source.episodes.lengths > most)
        mapped = replace(self, where=None).edit_episodes(shifted)
        mask, order = np.ones(len(numbers), bool), np.arange(len(numbers))
        if self.where is not None:
            mask = keep_episodes(self.where, mapped, numbers)
        if self.histories is not None:
            histories = number_histories(mapped, self.histories, self.discrete)
            check_whole(histories, mask, f"where {(self.where or '')[:200]}")
            order = EpisodeIndex(shifted.episodes.lengths, histories).order
        if notes := texts(mapped.info.attributes.get("warnings")):
            shifted.warn(*notes)
        chosen = order[mask[order]]
        is_same = self.where is None and bool((np.diff(chosen) == 1).all())
        return replace(self, chosen=None if is_same else chosen.astype(np.int64).tobytes())

    @property
    def chosen_episodes(self) -> Int64Array | None:
        """(n,) which of the shifted episodes stay, in their order; None: all."""
        return None if self.chosen is None else np.frombuffer(self.chosen, np.int64)

    def pick_episodes(self, shifted: Source) -> Source:
        """Return the chosen of `shifted` episodes."""
        numbers = self.chosen_episodes
        return shifted if numbers is None else pick_episodes(shifted, numbers)

    def edit_episodes(self, shifted: Source) -> Source:
        """Return the chosen of `shifted` episodes, as the function changes them."""
        picked, numbers = self.pick_episodes(shifted), self.chosen_episodes
        if self.function is None or not picked.spec.episodes:
            return picked
        numbers = np.arange(picked.spec.episodes) if numbers is None else numbers
        return map_episodes(picked, find_function(self.function, MAPS)[0], numbers.tolist())

    def pick_columns(self, source: Source) -> tuple[ColumnSpec, ...]:
        """Return the columns to keep as they are stored."""
        spec, uri, names = source.spec, source.info.uri, self.columns
        if spec.episodes < 1 or spec.steps < 1:
            raise InputError("SOURCE_LAYOUT", "the source has no episodes", where=uri)
        # A name that no column has stands for those below it: observations, observations/camera.
        below = {n: [c.name for c in spec if c.name.startswith(f"{n}/")] for n in names or ()}
        groups = [[spec[n].name] if n in spec or not group else group for n, group in below.items()]
        stored = {REWARDS, self.histories, *chain(*groups)}
        picked = tuple(c for c in spec if names is None or c.name in stored)
        for column in picked:
            if column.name.casefold() in RESERVED_NAMES:
                problem = f"the name {column.name!r} is reserved for the shards' own tensors"
                raise InputError("COLUMN", problem, uri, "rename the column, or leave it out")
            if column.name == REWARDS and (prod(column.shape) != 1 or column.dtype.kind == "c"):
                problem = f"rewards are {column.dtype} of per-step shape {column.shape}"
                raise InputError("COLUMN", problem, uri, f"store one real number per step{PADDED}")
        if (width := sum(prod(c.shape) for c in picked)) > MAX_WIDTH:
            widest = max(picked, key=lambda c: prod(c.shape)).name
            problem = f"{width:,} numbers a step, more than {MAX_WIDTH:,}"
            remedy = "leave out wide columns, or make LeRobot's frames smaller by --resize"
            remedy += ", or leave them in their videos by --video keep"
            raise InputError("COLUMN", problem, f"column {widest}", remedy)
        table = TableSpec(columns=picked, steps=1, episodes=1)
        floats = [name for name in self.discrete if table[name].dtype.kind == "f"]
        return tuple(replace(c, dtype=np.dtype("i4")) if c.name in floats else c for c in picked)

    def check_frames(self, source: Source, stored: Sequence[ColumnSpec]) -> None:
        """Refuse a size of frames where none are decoded."""
        sizes = {column.shape[:2] for column in stored if len(column.shape) == 3}
        if self.resize and not self.keeps_videos and self.resize not in sizes:
            problem = "no column has frames that are decoded, so none is resized"
            raise InputError("USAGE", problem, source.info.uri, "name cameras by --columns")

    def find_videos(self, source: Source, stored: Sequence[ColumnSpec]) -> dict[str, KeptVideo]:
        """Return the frames that stay in videos by their column; refuse what would hide them."""
        kept, videos = source.info.videos, dict[str, KeptVideo]()
        made_of = source.info.attributes.get("columns_from", {})
        for name in (column.name for column in stored) if self.keeps_videos else ():
            group = max((n for n in made_of if f"{name}/".startswith(f"{n}/")), key=len, default="")
            origins = split_names(made_of.get(group, "") + name.removeprefix(group))
            if len(origins) == 1 and origins[0] in kept:
                videos[name] = kept[origins[0]]
            elif not kept.keys().isdisjoint(origins):
                problem, remedy = "frames in videos stand alone", "take each camera by itself"
                raise InputError("USAGE", problem, f"column {name}", remedy)
        if self.keeps_videos and (not videos or self.function is not None):
            problem = "no column has frames that could stay in videos"
            if videos:
                problem = "a map function would get no frames, which stay in videos"
            remedy = "--video keep is for cameras of one LeRobot dataset, without --map"
            raise InputError("USAGE", problem, source.info.uri, remedy)
        others = {*chain(*(video.files for video in kept.values() if video not in videos.values()))}
        files = tuple(file for file in source.info.files if file not in others)
        source.info = replace(source.info, files=files)
        return videos

    def describe(self, source: Source, stored: Sequence[ColumnSpec]) -> SourceInfo:
        """Return the source's facts with these edits, and without those of other columns."""
        info = source.info
        notes = [f"rename {before} to {after}" for before, after in self.rename]
        notes += [f"shift {name} by {by}" for name, by in self.shift if by]
        notes += ["resize frames to {} x {}".format(*self.resize)] if self.resize else []
        if self.function is not None:
            notes.append(f"map {find_function(self.function, MAPS)[1]}")
        if self.where is not None:
            counts = info.attributes["picked"]  # 9 of 10 episodes
            notes.append(f"where {' '.join(self.where.split())}: {counts}")
        if notes:
            info = info.with_facts(edits=[*texts(info.attributes.get("edits")), *notes])
        if self.histories is not None:
            info = info.with_facts(**{HISTORIES: self.histories})
        if self.options:
            info = info.with_facts(options=[*self.options])
        if self.columns is None:
            return info
        names = dict(self.names)
        origins = {n for c in stored for n in (c.name, *split_names(names.get(c.name, c.name)))}
        pattern = re.compile(r"(?:.*: )?column (\S+): |.* is the column (\S+)$")
        matches = [(note, pattern.match(note)) for note in info.attributes.get("warnings", ())]
        notes = [note for note, match in matches if not match or (match[1] or match[2]) in origins]
        return info.with_facts(warnings=notes, left_out={})


def number_histories(source: Source, column: str, discrete: Sequence[str]) -> Int64Array:
    """Return (E,) int64 the number that a column gives to the history of each episode."""
    spec, where = source.spec[column], f"column {column}"
    if prod(spec.shape) != 1 or not (spec.dtype.kind in "iub" or column in discrete):
        problem = f"{spec.dtype} {spec.shape} a step is not the whole number of a history"
        remedy = f"give one number a step; of floats add it to --discrete: {column}"
        raise InputError("COLUMN", problem, where, remedy)
    with np.errstate(invalid="ignore"):  # NaN, which is refused when it is written
        return episode_values(source, column).astype(np.int64)


def options_text(**options: str | Sequence[str] | None) -> list[str]:
    """Return in lines what options choose of a source, as the manifest records them."""
    texts = {k: v if isinstance(v, str) else ", ".join(sorted(v or ())) for k, v in options.items()}
    return [f"{name} {text}" for name, text in texts.items() if text]
