"""Sources: columns by row range, and the ends of episodes.

A reader of a format is a function that returns a `Source`; `uri.open_source` calls it.  It gives

1. pieces: for each run of rows (a file, a group, an episode) a function that reads some of them;
2. columns: dtype and step shape by the format's own name, which becomes a legal one here;
3. ends: lengths of the episodes and which terminated, as `split_episodes` finds them from flags;
4. info: format, rule, files, and ``attributes`` with ``left_out`` and ``warnings``.
It loads no whole file, and drops, reorders or repeats no row.

Shape legend: N rows (steps), E episodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gear_offline.core.files import Closing
from gear_offline.core.text import texts
from gear_offline.core.types import Array, BoolArray
from gear_offline.data.dataset.schema import ColumnSpec, EpisodeIndex, TableSpec
from gear_offline.data.dataset.scores import ReferenceScores
from gear_offline.data.sources.columns import Kinds, kinds_of, legal_names, read_rows
from gear_offline.data.sources.flags import SCALARS
from gear_offline.data.sources.input_files import InputFile, misfit
from gear_offline.errors import reading_errors

READ_BYTES = 8 << 20  # a read of about this size amortises the call
DIFFERS = "give every step the same shape and dtype; if the source has changed, open it again"


class KeptVideo(NamedTuple):
    """Frames that stay in videos: a column holds their references (`data.dataset.pictures`)."""

    dtype: np.dtype[Any]  # of a frame
    shape: tuple[int, ...]
    files: tuple[InputFile, ...]  # by their numbers
    resized: bool  # to the shape


@dataclass(frozen=True, kw_only=True)
class SourceInfo:
    """The origin of data; goes into the manifest."""

    uri: str  # what the user asked for; of a path its last name
    format: str  # of the reader: "d4rl", "minari", ...
    rule: str  # that split the episodes: "terminals|timeouts"
    environment_id: str | None = None  # of Gymnasium
    environment_options: Mapping[str, Any] = field(default_factory=dict)  # it is made with
    scores: ReferenceScores | None = None  # that the source itself says
    reference_name: str | None = None  # D4RL's, if the environment does not tell the scores
    files: tuple[InputFile, ...] = ()  # to digest, in order
    videos: Mapping[str, KeptVideo] = field(default_factory=dict)  # by the format's own column
    edges: tuple[Array, ...] = ()  # ids of the first and the last row, where a rule reads ids
    # small JSON-able facts; "warnings" is a list of lines for the user's eyes
    attributes: Mapping[str, Any] = field(default_factory=dict)

    def with_facts(self, **facts: Any) -> SourceInfo:
        """Return it with more, or other, attributes."""
        return replace(self, attributes={**self.attributes, **facts})


def read_scores(facts: Mapping[str, Any], name: str) -> ReferenceScores | None:
    """Return the reference scores of a source's own facts, as Minari calls them."""
    with suppress(KeyError, TypeError, ValueError):
        low, high = (float(facts[f"ref_{end}_score"]) for end in ("min", "max"))
        return ReferenceScores(name=name, minimum=low, maximum=high) if low < high else None
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
        steps = next(iter(columns.values())).shape[0]
        return cls(read=lambda name, *rows: read_rows(columns[name], *rows), steps=steps)


class SourceRequest(NamedTuple):
    """A user's request: a source, a boundary rule, names of columns, a robomimic filter key."""

    uri: str
    rule: str | None
    names: Mapping[str, str]
    key: str | None = None
    partial: bool = False  # what it lacks is made by a function
    shards: tuple[Path, ...] = ()  # files of one table, in order
    keeps_videos: bool = False  # a column of frames holds references to them
    resize: tuple[int, int] | None = None  # height and width of decoded frames


class Source(Closing):
    """Columns over episodes, read by row range; made by a reader from pieces in their order.

    `terminated` are episodes that the environment ended at their last step.  `truncated` are those
    that were cut, by a time limit or the end of the file.  None is both: termination wins.
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
        rows = [columns[n][1] for n in ("observations", "actions") if n in columns]
        single = len(rows) == 2 and all(len(shape) > 1 == shape[0] for shape in rows)
        columns = {  # a reward or flag of shape (1,) is one number; of one environment is no axis
            name: (dtype, shape[shape[:1] == (1,) and (name in SCALARS or single) :])
            for name, (dtype, shape) in columns.items()
        }
        names = legal_names(columns)
        self._origins = {name: stored for stored, name in names.items()}
        self.stored_names = [*columns]  # the format's own
        self.usual = usual or {}
        self._pieces = tuple(pieces)
        self._firsts = np.cumsum([0, *(piece.steps for piece in pieces)], dtype=np.int64)
        self._preferred = preferred or {}
        # rows up to which all columns are read before any goes on
        self.breaks = self._firsts if by_piece else self._firsts[:0]
        lengths = [piece.steps for piece in pieces] if lengths is None else lengths
        self.episodes = EpisodeIndex(lengths=np.asarray(lengths, np.int64))
        flags = np.broadcast_to(terminated, self.episodes.episodes)
        self.terminated: BoolArray = np.array(flags, np.bool_)
        either = True if truncated is None else np.asarray(truncated, np.bool_)
        self.truncated: BoolArray = ~self.terminated & either
        steps, episodes = self.episodes.steps, self.episodes.episodes
        specs = [ColumnSpec(name=names[n], dtype=d, shape=s) for n, (d, s) in columns.items()]
        self.spec = TableSpec(columns=tuple(specs), steps=steps, episodes=episodes)
        self.info = info
        self.where = info.files[0].path if len(info.files) == 1 else info.uri
        self.warn(*["an axis of one environment is left out"] * single)
        changes = [(stored, name) for stored, name in names.items() if stored != name]
        self.warn(*(f"{stored!r} is the column {name}" for stored, name in changes))

    def derive(
        self,
        pieces: Sequence[Piece],
        columns: Kinds | None = None,
        episodes: Any = ...,
        **options: Any,
    ) -> Source:
        """Return a source of other rows or columns of some `episodes` of this one."""
        defaults = {
            "lengths": self.episodes.lengths[episodes],
            "terminated": self.terminated[episodes],
            "truncated": self.truncated[episodes],
            "info": self.info,
            "preferred": {c.name: self.preferred_rows(c.name) for c in self.spec},
        }
        return Source(pieces, kinds_of(self) if columns is None else columns, **defaults | options)

    def warn(self, *notes: str) -> None:
        """Add warnings to those that there are, each once."""
        if notes:
            before = texts(self.info.attributes.get("warnings"))
            self.info = self.info.with_facts(warnings=[*dict.fromkeys([*before, *notes])])

    def read(self, column: str, start: int, stop: int) -> Array:
        """Return rows ``[start, stop)`` of `column`, (stop - start, *shape), native dtype."""
        if not 0 <= start <= stop <= self.spec.steps:
            raise IndexError(f"rows [{start}, {stop}) of {self.spec.steps}")
        spec, stored = self.spec[column], self._origins[column]
        index = int(np.searchsorted(self._firsts, start, side="right")) - 1
        blocks = [np.empty((0, *spec.shape), spec.dtype)] if start == stop else []
        while start < stop:
            piece, first = self._pieces[index], int(self._firsts[index])
            end, shift = min(first + piece.steps, stop), piece.first - first
            # Nothing that a library raises of foreign bytes is an error of ours.
            with reading_errors(self.info.format, self.where) if self.info.files else nullcontext():
                rows = piece.read(stored, start + shift, end + shift)
            fits = rows.size == (end - start) * prod(spec.shape)
            if not fits or not np.can_cast(rows.dtype, spec.dtype):
                problem = f"a step is {rows.dtype} {rows.shape[1:]}, "
                problem += f"another {spec.dtype} {spec.shape}"
                raise misfit(problem, f"{self.where}: {column}", DIFFERS)
            blocks.append(rows.astype(spec.dtype, copy=False).reshape(end - start, *spec.shape))
            start, index = end, index + 1
        return blocks[0] if len(blocks) == 1 else np.concatenate(blocks)

    def column(self, name: str) -> Any:
        """Return a column as what has its ``shape`` and ``read(start, stop)``."""
        shape = (self.spec.steps, *self.spec[name].shape)
        return SimpleNamespace(shape=shape, read=partial(self.read, name))

    def find_column(self, stored: str) -> str:
        """Return the column, or group of columns, that the format calls `stored`."""
        columns = {origin: name for name, origin in self._origins.items()}
        return columns.get(stored) or legal_names([stored])[stored]

    def preferred_rows(self, column: str) -> int:
        """Rows per read that suit the storage (a multiple of its chunks); at least 1."""
        preferred = self._preferred.get(self._origins[column])
        return preferred or max(1, READ_BYTES // self.spec[column].step_bytes)

    def close(self) -> None:
        """Close the source."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.info.uri!r}, rule {self.info.rule}: {self.spec})"
