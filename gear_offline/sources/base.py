"""What every source format offers: columns by row range, and where its episodes end.

A source never loads a whole file.  Opening it finds the ends of its episodes; rows are read on
demand.  Row `i` of a source is step `i` of the converted dataset: sources neither drop nor reorder
rows.

Shape legend: N rows (steps), E episodes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
import numpy.typing as npt

from gear_offline.core.files import FileIdentity, open_regular
from gear_offline.core.text import count_text
from gear_offline.core.types import Array, BoolArray
from gear_offline.dataset.schema import ColumnSpec, EpisodeIndex, TableSpec, is_column_name
from gear_offline.errors import InputError

READ_BYTES = 8 << 20  # a read of about this size amortises the call
MAX_NAME_CHARS = 200


@dataclass(frozen=True, kw_only=True)
class SourceInfo:
    """Where the data came from; goes into the manifest.

    Attributes
    ----------
    uri
        What the user asked for (no machine paths beyond the file's own name).
    format
        Reader that understood it, e.g. ``"d4rl"``, ``"minari"``, ``"hdf5"``.
    rule
        Boundary rule that split the episodes, e.g. ``"terminals|timeouts"``.
    environment_id
        Gymnasium id of the environment, ``None`` when the source does not say.
    reference_name
        D4RL dataset or environment name whose reference scores apply, ``None`` when unknown.
    files
        Files to digest, in order.
    opened
        Identities of `files` from before they were opened; empty where they are not known.
    attributes
        Small JSON-able facts of the source (algorithm, versions, mean return, ...);
        ``attributes["warnings"]`` is a list of strings for the user's eyes.
    """

    uri: str
    format: str
    rule: str
    environment_id: str | None = None
    reference_name: str | None = None
    files: tuple[Path, ...] = ()
    opened: tuple[FileIdentity, ...] = ()
    attributes: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class Source(Protocol):
    """A readable collection of episodes.

    Attributes
    ----------
    info
        Provenance.
    spec
        Columns, N and E.
    episodes
        Episode index over the rows, in file order.
    terminated
        (E,) bool; the environment ended the episode at its last step.
    truncated
        (E,) bool; the episode was cut: a time limit, or the end of the file.  Never true where
        `terminated` is: termination wins when a row bears both flags.
    """

    info: SourceInfo
    spec: TableSpec
    episodes: EpisodeIndex
    terminated: BoolArray
    truncated: BoolArray

    def read(self, column: str, start: int, stop: int) -> Array:
        """Return rows ``[start, stop)`` of `column`, (stop - start, *shape), native dtype."""
        ...

    def preferred_rows(self, column: str) -> int:
        """Rows per read that suit the storage (a multiple of its chunks); at least 1."""
        return max(1, READ_BYTES // self.spec[column].step_bytes)

    def close(self) -> None:
        """Release files; closing twice is fine."""
        return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.info.uri!r}: "
            f"{count_text(self.spec.episodes, 'episode')}, {count_text(self.spec.steps, 'step')}, "
            f"rule {self.info.rule}, columns {', '.join(c.name for c in self.spec)})"
        )


def iter_episodes(source: Source) -> Iterator[dict[str, Array]]:
    """Yield each episode of `source` as ``{column: (T, *shape)}``, one at a time."""
    offsets = source.episodes.offsets
    for start, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        yield {c.name: source.read(c.name, start, stop) for c in source.spec}


@dataclass(frozen=True, kw_only=True, eq=False)
class Piece:
    """Rows ``[first, first + steps)`` of what ``read(column, start, stop)`` gives."""

    read: Callable[[str, int, int], Array]
    first: int = 0
    steps: int


class PieceSource(Source):
    """A `Source` over pieces in the order of the table: arrays, a file's columns, other sources.

    `preferred` are rows per read by column; `owned` are sources to close with this one.
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
        preferred: Mapping[str, int] | None = None,
        owned: Sequence[Source] = (),
    ) -> None:
        self._pieces = tuple(pieces)
        self._firsts = np.cumsum([0, *(piece.steps for piece in pieces)], dtype=np.int64)
        self._preferred = preferred or {}
        self._owned = owned
        self.episodes = EpisodeIndex(lengths=np.asarray(lengths, np.int64))
        self.terminated: BoolArray = np.ascontiguousarray(terminated, np.bool_)
        self.truncated: BoolArray = np.ascontiguousarray(truncated, np.bool_)
        self.spec = TableSpec(
            columns=tuple(columns), steps=self.episodes.steps, episodes=self.episodes.episodes
        )
        self.info = info

    def read(self, column: str, start: int, stop: int) -> Array:
        """Return rows ``[start, stop)`` of `column`, (stop - start, *shape), native dtype."""
        if not 0 <= start <= stop <= self.spec.steps:
            raise IndexError(f"rows [{start}, {stop}) of {self.spec.steps}")
        spec = self.spec[column]
        index = int(np.searchsorted(self._firsts, start, side="right")) - 1
        if start < stop <= self._firsts[index + 1]:  # one piece: no copy
            shift = self._pieces[index].first - int(self._firsts[index])
            rows = self._pieces[index].read(column, start + shift, stop + shift)
            return rows.astype(spec.dtype, copy=False)
        rows = np.empty((stop - start, *spec.shape), spec.dtype)
        at = start
        while at < stop:
            piece, first = self._pieces[index], int(self._firsts[index])
            end, shift = min(first + piece.steps, stop), piece.first - first
            rows[at - start : end - start] = piece.read(column, at + shift, end + shift)
            at, index = end, index + 1
        return rows

    def preferred_rows(self, column: str) -> int:
        """Rows per read that suit the storage; at least 1."""
        return self._preferred.get(column) or super().preferred_rows(column)

    def close(self) -> None:
        """Close the sources that belong to this one."""
        for source in self._owned:
            source.close()


def warnings_about(names: Mapping[str, str]) -> list[str]:
    """Return what a user should know of columns whose names in the source are others."""
    return [f"{old!r} is the column {new}" for old, new in names.items() if old != new]


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


def open_file(path: Path) -> int:
    """Open a file from outside for reading, regular files only; return its descriptor."""
    try:
        return open_regular(path)
    except OSError as error:
        raise InputError(
            "SOURCE_READ",
            f"the file cannot be read: {error.strerror or error}",
            where=str(path),
            remedy="check the path, its permissions and those of its folder, and the disk",
        ) from error


def changed_error(name: str) -> InputError:
    """Return the error for a file that is not the one that was opened."""
    return InputError(
        "SOURCE_CHANGED",
        "the source changed while it was converted",
        where=name,
        remedy="convert again once nothing writes to it",
    )
