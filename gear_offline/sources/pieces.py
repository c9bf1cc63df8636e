"""Sources made of parts of others: several joined to one, or some episodes of one.

Rows stay where they are: a piece names a run of rows of a source, and a read goes to the pieces
that it touches.

Shape legend: N rows, E episodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gear_offline.core.closing import Closing
from gear_offline.core.text import count_text
from gear_offline.dataset.schema import BoolArray, ColumnSpec, EpisodeIndex, TableSpec
from gear_offline.dataset.source_facts import left_out_of, warnings_of
from gear_offline.errors import InputError
from gear_offline.sources.base import Source, SourceInfo, check_open, source_text

MOST_NAMED = 20  # parts that a joined source describes one by one


class Rows(Protocol):
    """What a piece reads from; a `Source`, or arrays."""

    def read(self, column: str, start: int, stop: int) -> npt.NDArray[Any]:
        """Return rows ``[start, stop)`` of `column`."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Piece:
    """Rows ``[first, first + steps)`` of `rows`."""

    rows: Rows
    first: int
    steps: int


class PieceSource(Closing):
    """A `Source` over pieces; see `gear_offline.sources.base.Source`.

    Parameters
    ----------
    pieces
        In the order of the table; their steps add up to N.
    columns
        Columns that every piece has.
    lengths, terminated, truncated
        Of the episodes, (E,).
    info
        Provenance.
    preferred
        Rows per read by column; others are read about 8 MiB at a time.
    owned
        Sources to close.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        columns: Iterable[ColumnSpec],
        *,
        lengths: npt.ArrayLike,
        terminated: npt.ArrayLike,
        truncated: npt.ArrayLike,
        info: SourceInfo,
        preferred: dict[str, int] | None = None,
        owned: Sequence[Source] = (),
    ) -> None:
        self._pieces = tuple(pieces)
        self._firsts = np.cumsum([0, *(piece.steps for piece in pieces)], dtype=np.int64)
        self._preferred = preferred or {}
        self._owned = owned
        self.episodes = EpisodeIndex(lengths=np.asarray(lengths, np.int64))
        self.terminated: BoolArray = np.asarray(terminated, np.bool_)
        self.truncated: BoolArray = np.asarray(truncated, np.bool_)
        self.spec = TableSpec(
            columns=tuple(columns), steps=self.episodes.steps, episodes=self.episodes.episodes
        )
        self.info = info

    def __repr__(self) -> str:
        return source_text(self)

    def read(self, column: str, start: int, stop: int) -> npt.NDArray[Any]:
        """Return rows ``[start, stop)`` of `column`, (stop - start, *shape), native dtype."""
        if not 0 <= start <= stop <= self.spec.steps:
            raise IndexError(f"rows [{start}, {stop}) of {self.spec.steps}")
        spec = self.spec[column]
        rows = np.empty((stop - start, *spec.shape), spec.dtype)
        index = int(np.searchsorted(self._firsts, start, side="right")) - 1
        at = start
        while at < stop:
            piece, first = self._pieces[index], int(self._firsts[index])
            end = min(first + piece.steps, stop)
            shift = piece.first - first
            rows[at - start : end - start] = piece.rows.read(column, at + shift, end + shift)
            at, index = end, index + 1
        return rows

    def preferred_rows(self, column: str) -> int:
        """Rows per read that suit the storage; at least 1."""
        return self._preferred.get(column) or max(1, (8 << 20) // self.spec[column].step_bytes)

    def close(self) -> None:
        """Close the sources that belong to this one."""
        for source in self._owned:
            source.close()


def pick_episodes(source: Source, which: npt.ArrayLike) -> PieceSource:
    """Return a source of some of a source's episodes.

    Parameters
    ----------
    source
        An open source; closed with the result.
    which
        Numbers of episodes in the order wanted, each at most once, or (E,) bool: which to keep.

    Raises
    ------
    InputError
        ``EPISODE_CHOICE`` if that names none, one twice, or one that the source does not have;
        ``SOURCE_UNKNOWN`` if the source is not an open one.
    """
    check_open(source)
    chosen = chosen_episodes(which, source.episodes.episodes)
    offsets = source.episodes.offsets
    # Episodes that follow each other are one piece: fewer and longer reads.
    breaks = np.flatnonzero(np.diff(chosen) != 1) + 1
    pieces = []
    for run in np.split(chosen, breaks):
        first, last = int(offsets[run[0]]), int(offsets[run[-1] + 1])
        pieces.append(Piece(rows=source, first=first, steps=last - first))
    picked = f"{chosen.size:,} of {count_text(source.episodes.episodes, 'episode')}"
    attributes = {**source.info.attributes, "picked": picked}
    return PieceSource(
        pieces,
        source.spec,
        lengths=source.episodes.lengths[chosen],
        terminated=source.terminated[chosen],
        truncated=source.truncated[chosen],
        info=replace(source.info, attributes=attributes, locator=""),
        preferred={c.name: source.preferred_rows(c.name) for c in source.spec},
        owned=(source,),
    )


def chosen_episodes(which: npt.ArrayLike, episodes: int) -> npt.NDArray[np.int64]:
    """Return the numbers of chosen episodes, int64; `which` as `pick_episodes` takes it.

    Raises
    ------
    InputError
        ``EPISODE_CHOICE``
    """
    given = np.atleast_1d(np.asarray(which))
    if given.dtype == np.bool_ and given.shape == (episodes,):
        given = np.flatnonzero(given)
    if not given.size or given.ndim != 1 or given.dtype.kind not in "iu":
        what = "none is chosen" if not given.size else f"{given.dtype} of shape {given.shape}"
    elif given.min() < 0 or given.max() >= episodes:
        what = f"{given.min()} to {given.max()} are asked for, there are 0 to {episodes - 1}"
    elif np.unique(given).size < given.size:
        what = "one is named twice"
    else:
        return given.astype(np.int64)
    raise InputError(
        "EPISODE_CHOICE",
        f"not a choice of episodes: {what}",
        remedy=f"give numbers from 0 to {episodes - 1}, each once, or {episodes} bools",
    )


def join_sources(sources: Iterable[Source], *, uri: str = "") -> PieceSource:
    """Return one source over the episodes of several, one after the other.

    Columns that not all have are left out.  Columns of different dtype or shape are refused.

    Parameters
    ----------
    sources
        At least one; closed with the result.
    uri
        Name for the provenance; default the names of the parts.

    Raises
    ------
    InputError
        ``SOURCE_JOIN``; ``SOURCE_UNKNOWN`` if one of them is not an open source.
    """
    if not isinstance(sources, Iterable):
        what = f"a {type(sources).__name__} is given"
        raise InputError("SOURCE_JOIN", what, where="sources", remedy="give a list of open sources")
    sources = tuple(sources)
    for source in sources:
        check_open(source)
    if not sources:
        raise InputError("SOURCE_JOIN", "no source to join", remedy="give at least one")
    columns, left_out = _common_columns(sources)
    infos = [source.info for source in sources]
    known = all(len(info.opened) == len(info.files) for info in infos)
    return PieceSource(
        [Piece(rows=source, first=0, steps=source.spec.steps) for source in sources],
        columns,
        lengths=np.concatenate([source.episodes.lengths for source in sources]),
        terminated=np.concatenate([source.terminated for source in sources]),
        truncated=np.concatenate([source.truncated for source in sources]),
        info=SourceInfo(
            uri=uri or _some_text([info.uri for info in infos]),
            format=_same([info.format for info in infos]) or "joined",
            rule=_same([info.rule for info in infos]) or "that of each part",
            environment_id=_same([info.environment_id for info in infos]),
            reference_name=_same([info.reference_name for info in infos]),
            files=tuple(file for info in infos for file in info.files),
            opened=tuple(one for info in infos for one in info.opened) if known else (),
            attributes=_joint_attributes(sources, left_out),
        ),
        preferred={c.name: max(s.preferred_rows(c.name) for s in sources) for c in columns},
        owned=sources,
    )


def _common_columns(sources: Sequence[Source]) -> tuple[list[ColumnSpec], dict[str, str]]:
    """Return the columns that all have, and why others are left out."""
    found: list[ColumnSpec] = []
    left_out: dict[str, str] = {}
    names = [{column.name for column in source.spec} for source in sources]
    common = set.intersection(*names)
    for name in sorted(set.union(*names) - common):
        without = next(s for s, has in zip(sources, names, strict=True) if name not in has)
        left_out[name] = f"{without.info.uri} does not have it"
    first = sources[0]
    for column in first.spec:
        if column.name not in common:
            continue
        for other in sources:
            mine = other.spec[column.name]
            if mine != column:
                raise InputError(
                    "SOURCE_JOIN",
                    f"column {column.name} is {mine.dtype} {mine.shape} in {other.info.uri} and "
                    f"{column.dtype} {column.shape} in {first.info.uri}",
                    remedy="join sources whose columns have the same dtype and shape",
                )
        found.append(column)
    return found, left_out


def _joint_attributes(sources: Sequence[Source], left_out: dict[str, str]) -> dict[str, Any]:
    warnings = [
        f"{source.info.uri}: {text}"
        for source in sources
        for text in warnings_of(source.info.attributes)
    ]
    for key in ("environment_id", "reference_name"):
        names = {getattr(source.info, key) for source in sources}
        if len(names) > 1:
            known = ", ".join(sorted(str(name) for name in names))
            warnings.append(f"the parts differ in {key.replace('_', ' ')}: {known}")
    parts = [
        f"{source.info.uri}: {count_text(source.spec.episodes, 'episode')}, "
        f"{count_text(source.spec.steps, 'step')}; {source.info.rule}"
        for source in sources[:MOST_NAMED]
    ]
    for source in sources:
        for name, why in left_out_of(source.info.attributes)[0].items():
            left_out.setdefault(name, why)
    return {
        "parts": len(sources),
        "part": {str(index): text for index, text in enumerate(parts)},
        "left_out": left_out,
        "warnings": warnings[:MOST_NAMED]
        + ([f"and {len(warnings) - MOST_NAMED} more"] if len(warnings) > MOST_NAMED else []),
    }


def _same(values: Sequence[str | None]) -> str | None:
    return values[0] if len(set(values)) == 1 else None


def _some_text(names: Sequence[str], most: int = 3) -> str:
    text = " + ".join(names[:most])
    return text if len(names) <= most else f"{text} + {len(names) - most} more"
