"""What a source is: columns by row range, and where its episodes end.

A reader of a format is a function that returns a `Source`; `uri.open_source` calls it.  It gives

1. pieces: for each run of rows (a file, a group, an episode) a function that reads some of them;
2. columns: dtype and step shape by the format's own name, which becomes a legal one here;
3. ends: lengths of the episodes and which terminated, as `split_episodes` finds them from flags;
4. info: format, rule, files, and ``attributes`` with ``left_out`` and ``warnings``.
5. It loads no whole file, and drops, reorders or repeats no row.

Shape legend: N rows (steps), E episodes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from io import FileIO
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gear_offline.core.closing import Closing
from gear_offline.core.files import FileIdentity, file_identity, open_regular
from gear_offline.core.text import texts
from gear_offline.core.types import Array, BoolArray
from gear_offline.dataset.schema import (
    ColumnSpec,
    EpisodeIndex,
    TableSpec,
    is_column_name,
    is_step_shape,
)
from gear_offline.dataset.scores import ReferenceScores
from gear_offline.errors import GearError, InputError
from gear_offline.sources.episode_ends import SCALARS

READ_BYTES = 8 << 20  # a read of about this size amortises the call
MAX_NAME_CHARS = 200
APART = "files are missing, damaged, out of order or of several sources: get them again"
DIFFERS = "give every step the same shape and dtype; if the source has changed, open it again"

Kinds = Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]  # dtype and step shape by column


@dataclass(frozen=True, kw_only=True)
class SourceInfo:
    """Where the data came from; goes into the manifest."""

    uri: str  # what the user asked for; of a path its last name
    format: str  # of the reader: "d4rl", "minari", ...
    rule: str  # that split the episodes: "terminals|timeouts"
    environment_id: str | None = None  # of Gymnasium
    environment_options: Mapping[str, Any] = field(default_factory=dict)  # it is made with
    scores: ReferenceScores | None = None  # that the source itself says
    reference_name: str | None = None  # D4RL's, if the environment does not tell the scores
    files: tuple[InputFile, ...] = ()  # to digest, in order
    # small JSON-able facts; "warnings" is a list of lines for the user's eyes
    attributes: Mapping[str, Any] = field(default_factory=dict)

    def with_facts(self, **facts: Any) -> SourceInfo:
        """Return it with more, or other, attributes."""
        return replace(self, attributes={**self.attributes, **facts})


def own_scores(facts: Mapping[str, Any], name: str) -> ReferenceScores | None:
    """Return the reference scores of a source's own facts, as Minari calls them."""
    try:
        low, high = (float(facts[f"ref_{end}_score"]) for end in ("min", "max"))
        return ReferenceScores(name=name, minimum=low, maximum=high) if low < high else None
    except (KeyError, TypeError, ValueError):
        return None


@dataclass(frozen=True, kw_only=True, eq=False)
class Piece:
    """Rows ``[first, first + steps)`` of what ``read(column, start, stop)`` gives."""

    read: Callable[[str, int, int], Array]
    first: int = 0
    steps: int

    @classmethod
    def of(cls, columns: Mapping[str, Any]) -> Piece:
        """Return all rows of columns: arrays, or what has a shape and ``read(start, stop)``."""

        def read(column: str, start: int, stop: int) -> Array:
            rows = columns[column]
            return rows[start:stop] if isinstance(rows, np.ndarray) else rows.read(start, stop)

        return cls(read=read, steps=next(iter(columns.values())).shape[0])


class Asked(NamedTuple):
    """What a user asks of a source: a boundary rule, names of columns, a robomimic filter key."""

    uri: str
    rule: str | None
    names: Mapping[str, str]
    key: str | None = None
    partial: bool = False  # what it lacks is made by a function


class Source(Closing):
    """Columns over episodes, read by row range; made by a reader from pieces in their order.

    `terminated` are episodes that the environment ended at their last step, `truncated` those that
    were cut, by a time limit or the end of the file; none is both: termination wins.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],  # all N rows
        columns: Kinds,  # by the format's own names, in the order of the table
        *,
        lengths: npt.ArrayLike | None = None,  # (E,), default: each piece is an episode
        terminated: npt.ArrayLike = False,  # (E,)
        truncated: npt.ArrayLike | None = None,  # (E,), default: what is not terminated
        info: SourceInfo,
        preferred: Mapping[str, int] | None = None,  # rows a read that suit the storage
        usual: Mapping[str, str] | None = None,  # made of others unless these are asked for
        by_piece: bool = False,  # a read loads a piece: all its columns come before the next one
    ) -> None:
        columns = {  # a reward or flag of shape (1,) is one number
            name: (dtype, () if name in SCALARS and shape == (1,) else shape)
            for name, (dtype, shape) in columns.items()
        }
        names = legal_names(columns)
        self._stored = {new: old for old, new in names.items()}
        self.stored_names = [*columns]  # the format's own
        self.usual = usual or {}
        self._pieces = tuple(pieces)
        self._firsts = np.cumsum([0, *(piece.steps for piece in pieces)], dtype=np.int64)
        self._preferred = preferred or {}
        # rows up to which all columns are read before any goes on
        self.breaks = self._firsts if by_piece else self._firsts[:0]
        steps = [piece.steps for piece in pieces] if lengths is None else lengths
        self.episodes = EpisodeIndex(lengths=np.asarray(steps, np.int64))
        flags = np.broadcast_to(terminated, self.episodes.episodes)
        self.terminated: BoolArray = np.array(flags, np.bool_)
        either = True if truncated is None else np.asarray(truncated, np.bool_)
        self.truncated: BoolArray = ~self.terminated & either
        self.spec = TableSpec(
            columns=tuple(
                ColumnSpec(name=names[name], dtype=dtype, shape=shape)
                for name, (dtype, shape) in columns.items()
            ),
            steps=self.episodes.steps,
            episodes=self.episodes.episodes,
        )
        renamed = [f"{old!r} is the column {new}" for old, new in names.items() if old != new]
        self.info = info
        files = self.info.files
        self.where = files[0].path if len(files) == 1 else self.info.uri
        if renamed:
            self.warn(*renamed)

    def derived(
        self, pieces: Sequence[Piece], columns: Kinds, chosen: Any = slice(None), **options: Any
    ) -> Source:
        """Return a source of other rows or columns of the `chosen` of its episodes."""
        return Source(
            pieces,
            columns,
            lengths=self.episodes.lengths[chosen],
            terminated=self.terminated[chosen],
            truncated=self.truncated[chosen],
            **{"info": self.info, **options},
        )

    def warn(self, *notes: str) -> None:
        """Put warnings behind those that there are."""
        before = texts(self.info.attributes.get("warnings"))
        if notes:
            self.info = self.info.with_facts(warnings=[*dict.fromkeys([*before, *notes])])

    def read(self, column: str, start: int, stop: int) -> Array:
        """Return rows ``[start, stop)`` of `column`, (stop - start, *shape), native dtype."""
        if not 0 <= start <= stop <= self.spec.steps:
            raise IndexError(f"rows [{start}, {stop}) of {self.spec.steps}")
        spec, name = self.spec[column], self._stored[column]
        index = int(np.searchsorted(self._firsts, start, side="right")) - 1
        parts = [np.empty((0, *spec.shape), spec.dtype)] if start == stop else []
        while start < stop:
            piece, first = self._pieces[index], int(self._firsts[index])
            end, shift = min(first + piece.steps, stop), piece.first - first
            # Nothing that a library raises of foreign bytes is an error of ours.
            told = damage_told(self.info.format, self.where) if self.info.files else nullcontext()
            with told:
                rows = piece.read(name, start + shift, end + shift)
            fits = rows.size == (end - start) * prod(spec.shape)
            if not fits or not np.can_cast(rows.dtype, spec.dtype):
                what = f"a step is {rows.dtype} {rows.shape[1:]}, another {spec.dtype} {spec.shape}"
                raise misfit(what, f"{self.where}: {column}", DIFFERS)
            parts.append(rows.astype(spec.dtype, copy=False).reshape(end - start, *spec.shape))
            start, index = end, index + 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def column(self, name: str) -> Any:
        """Return a column as what has its ``shape`` and ``read(start, stop)``."""
        shape = (self.spec.steps, *self.spec[name].shape)
        return SimpleNamespace(shape=shape, read=partial(self.read, name))

    def named(self, stored: str) -> str:
        """Return the column, or group of columns, that the format calls `stored`."""
        columns = {old: new for new, old in self._stored.items()}
        return columns.get(stored) or legal_names([stored])[stored]

    def preferred_rows(self, column: str) -> int:
        """Rows per read that suit the storage (a multiple of its chunks); at least 1."""
        preferred = self._preferred.get(self._stored[column])
        return preferred or max(1, READ_BYTES // self.spec[column].step_bytes)

    def close(self) -> None:
        """Close the source; what its readers keep open goes with them."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.info.uri!r}, rule {self.info.rule}: {self.spec})"


# files from outside, and what is wrong with them ------------------------------------------------


@dataclass(frozen=True)
class InputFile:
    """A file from outside, and what tells whether it is still the one that was opened."""

    path: Path
    identity: FileIdentity

    @classmethod
    def find(cls, path: Path) -> InputFile:
        """Return the regular file at `path` as it is now."""
        with _open(path) as file:
            return cls(path, file_identity(file.fileno()))

    def open(self) -> FileIO:
        """Open it for reading; refuse another one (``SOURCE_CHANGED``)."""
        file = _open(self.path)
        if file_identity(file.fileno()) != self.identity:
            file.close()
            raise changed_error(self.path.name)
        return file


def _open(path: Path) -> FileIO:
    try:
        return os.fdopen(open_regular(path), "rb", buffering=0)
    except OSError as error:
        what = f"the file cannot be read: {error.strerror or error}"
        raise InputError("SOURCE_READ", what, str(path), "check path and permissions") from error


def by_number(path: Path) -> list[tuple[int, int, str]]:
    """Return a key that sorts ``part_2`` before ``part_10``, of a file or folders and a file."""
    parts = re.split(r"([0-9]+)", str(path))
    return [(1, int(p), p) if p.isdigit() and p.isascii() else (0, 0, p) for p in parts]


def files_in(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    """Return the files of some suffixes right in a folder, ``part_2`` before ``part_10``."""
    files = (p for p in folder.iterdir() if p.suffix.lower() in suffixes and p.is_file())
    return sorted((p for p in files if not p.name.startswith(".")), key=by_number)


@contextmanager
def damage_told(kind: str, where: Path | str) -> Iterator[None]:
    """Turn whatever a library raises of a foreign file into one error (``SOURCE_READ``)."""
    try:
        yield
    except GearError:
        raise
    except Exception as error:
        said = " ".join(str(error).split())[:200] or type(error).__name__
        what = f"not a readable {kind} file: {said}"
        remedy = "it is damaged, cut short or of another format: get it again"
        raise InputError("SOURCE_READ", what, str(where), remedy) from error


def changed_error(name: str) -> InputError:
    """Return the error for a source that is not the one that was opened."""
    what, remedy = "the source changed while it was converted", "convert again once nothing writes"
    return InputError("SOURCE_CHANGED", what, where=name, remedy=f"{remedy} to it")


def misfit(what: str, where: Path | str = "", remedy: str = APART) -> InputError:
    """Return the error for what is readable and makes no trajectories."""
    return InputError("SOURCE_LAYOUT", what, where=str(where), remedy=remedy)


# columns and their names ----------------------------------------------------------------------


def kinds_of(source: Any) -> Kinds:
    """Return what the columns of a source or dataset are."""
    return {column.name: (column.dtype, column.shape) for column in source.spec}


def kinds_of_rows(columns: Mapping[str, Any]) -> Kinds:
    """Return what columns are, given (N, *shape) arrays or what has their dtype and shape."""
    return {n: (rows.dtype.newbyteorder("="), rows.shape[1:]) for n, rows in columns.items()}


def can_be_column(shape: tuple[int, ...] | None, dtype: np.dtype[Any] | None) -> bool:
    """Whether an array is one of numbers or bools, with a row for each step."""
    if not shape or dtype is None or dtype.kind not in "biufc":
        return False
    return is_step_shape(shape[1:], dtype.itemsize)


def legal_names(names: Iterable[str]) -> dict[str, str]:
    """Return for each name the column's: ``_`` for what no column may have, a number if taken."""
    columns: dict[str, str] = {}
    taken: set[str] = set()
    for name in sorted(names, key=lambda n: not is_column_name(n)):  # legal ones stay
        parts = (re.sub(r"[^A-Za-z0-9_.\-]", "_", part) for part in name.split("/"))
        legal = "/".join(re.sub(r"^[.\-]|^$", "_", part) for part in parts)
        legal = re.sub(r"\.\.+", ".", legal)[:MAX_NAME_CHARS].rstrip("/")
        number, unique = 2, legal
        while unique.casefold() in taken:
            number, unique = number + 1, f"{legal[: MAX_NAME_CHARS - 10]}_{number}"
        taken.add(unique.casefold())
        columns[name] = unique
    return columns


def split_names(text: str) -> list[str]:
    """Return the columns that ``"a + b"`` names."""
    return [part.strip().strip("/") for part in text.split("+")]


def names_after(stored: Iterable[str], names: Mapping[str, str]) -> set[str]:
    """Return what columns are called once the user's `names` are given."""
    taken = {part for old in names.values() for part in split_names(old)}
    return {*stored} - taken | {*names}


def common_columns(
    parts: Iterable[tuple[str, Kinds]],
    needed: Container[str] | None = None,
    *,
    where: Path | str = "",
    remedy: str,
) -> tuple[Kinds, dict[str, str]]:
    """Return the columns that all named parts have alike, what is left out and why.

    One that is `needed`, by its name up to the first ``/``, default each, is refused instead.
    """
    (first, kinds), *others = parts
    left_out: dict[str, str] = {}
    for part, own in others:
        for name in {**kinds, **own} if own != kinds else ():
            if name in left_out or kinds.get(name) == own.get(name):
                continue
            here, was = (
                "{} {}".format(*of[name]) if name in of else "missing" for of in (own, kinds)
            )
            left_out[name] = f"{here} in {part}, {was} in {first}"
            if needed is None or name.split("/")[0] in needed:
                raise misfit(f"column {name} is {left_out[name]}", where, remedy)
    return {name: kind for name, kind in kinds.items() if name not in left_out}, left_out


def some_names(names: Iterable[str], limit: int = 12) -> str:
    """Return the first names of many, for a message."""
    listed = sorted(names)
    return ", ".join(listed[:limit]) + (", ..." if len(listed) > limit else "") or "nothing"
