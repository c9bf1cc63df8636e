"""Columns in memory, arranged so that a segment is one contiguous read.

A table holds what batches are cut from: states, actions, rewards, returns-to-go and any further
columns, over all steps of all episodes.  Two layouts of the four fields:

``records``
    The float32 fields of one step lie side by side in one row, padded to a multiple of 16 bytes.
    A segment is one copy.  Tensors of a batch are strided views of those rows.
``columns``
    Every field has its own rows.  A segment is one copy per field, and the tensors of a batch are
    contiguous.

Both give the same bits.  A field that is wide (more than `PACKED_BYTES` a step as float32) or has
more than one dimension a step, such as images, stands alone in its source dtype in either layout,
and so do discrete actions and extra columns.

Before the first and after the last step lie `margin` rows of zeros, so that a window of that many
steps may begin or end outside the table.

Shape legend: N steps, E episodes, W elements of a row, M margin.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from gear_offline.errors import InputError
from gear_offline.fields import (
    ACTIONS,
    EXTRA,
    REWARDS,
    STATES,
    Array,
    Field,
    TableSource,
    convert,
    returns_field,
    standard_fields,
    to_float32,
)
from gear_offline.schema import ColumnSpec, EpisodeIndex

Layout = Literal["auto", "records", "columns"]
Mode = Literal["read", "mmap"]

PACKED_BYTES = 1024  # fields up to this many bytes a step are stored as float32
RECORD_ALIGNMENT_BYTES = 16
CHUNK_BYTES = 64 << 20  # how much of a column is read at a time


@dataclass(frozen=True, kw_only=True, eq=False)
class Store:
    """Rows over steps that hold one or several fields.

    Attributes
    ----------
    fields
        What a row holds.
    rows
        ``(M + N + M, W)`` owned array whose step ``i`` is row ``M + i``, margins zero; or ``None``.
    pieces
        Arrays ``(n, W)`` that cover the steps in order (mapped shards), each holding whole
        episodes; empty when `rows` is given.
    firsts
        int64, first step of each piece.
    """

    fields: tuple[Field, ...]
    rows: Array | None = None
    pieces: tuple[Array, ...] = ()
    firsts: npt.NDArray[np.int64] | None = None

    @property
    def width(self) -> int:
        rows = self.pieces[0] if self.rows is None else self.rows
        return int(rows.shape[1])

    @property
    def dtype(self) -> np.dtype[Any]:
        return (self.pieces[0] if self.rows is None else self.rows).dtype

    @property
    def final_dtype(self) -> np.dtype[Any]:
        """dtype of the fields in a batch; a store whose dtype differs holds one field."""
        return self.fields[0].dtype

    @property
    def is_final(self) -> bool:
        """Whether the rows hold the batch's values, so that a gather only copies."""
        return self.dtype == self.final_dtype and self.fields[0].mean is None


@dataclass(frozen=True, kw_only=True, eq=False)
class Table:
    """All stores of a dataset.

    Attributes
    ----------
    episodes
        Episode index over the N steps.
    stores
        Each field is in exactly one.
    margin
        Rows of zeros on either side of the owned stores; windows up to this long can be cut.
    layout
        ``"records"`` or ``"columns"``.
    """

    episodes: EpisodeIndex
    stores: tuple[Store, ...]
    margin: int
    layout: Literal["records", "columns"]

    @property
    def owned_bytes(self) -> int:
        """Bytes of process memory: ``(N + 2 M) * row bytes`` over the owned stores."""
        return sum(store.rows.nbytes for store in self.stores if store.rows is not None)

    @property
    def mapped_bytes(self) -> int:
        """Bytes of mapped files that the stores refer to."""
        return sum(piece.nbytes for store in self.stores for piece in store.pieces)


def build_table(
    source: TableSource,
    *,
    context_length: int,
    gamma: float = 1.0,
    returns_scale: float = 1.0,
    normalize_states: bool = False,
    layout: Layout = "auto",
    mode: Mode = "read",
    extra_columns: Sequence[str] = (),
) -> Table:
    """Read (or map) the columns of `source` and derive the returns-to-go.

    Memory, exactly: with ``layout="records"`` the packed fields cost ``ceil16(4 * (S + A + 2))``
    bytes a step; with ``"columns"`` 4 bytes an element; fields that stand alone and extra columns
    keep their source dtype; each store has ``2 * context_length`` more rows.  With ``mode="mmap"``
    only the returns-to-go (4 bytes a step) are in memory.

    Parameters
    ----------
    source
        A dataset.
    context_length
        Longest window that will be cut, K.
    gamma, returns_scale
        ``returns_to_go[t] = sum_{k >= t} gamma**(k - t) r_k / returns_scale`` over the rest of the
        episode, summed from its end in float64, rounded once to float32.
    normalize_states
        ``(x - mean) / (std + 1e-6)`` with the source's statistics, in float64, rounded once to
        float32.
    layout
        ``"auto"`` takes ``"records"``, or ``"columns"`` for mapped files.
    mode
        ``"read"`` copies the columns into memory of this process; ``"mmap"`` leaves them in the
        files and casts when gathering.
    extra_columns
        Further columns, kept in their source dtype bit for bit.

    Raises
    ------
    InputError
        ``COLUMN_MISSING``, ``COLUMN_KIND`` (a column that cannot be that field),
        ``EXTRA_COLUMN`` (named twice or a standard field), ``NORMALIZE_IMAGES``, ``CAST_OVERFLOW``
        (a value too large for float32), ``LAYOUT`` (records of mapped files).
    """
    if layout == "records" and mode == "mmap":
        raise InputError(
            "LAYOUT",
            "mapped files cannot be arranged as records",
            remedy="use mode='read' for layout='records', or layout='columns' for mode='mmap'",
        )
    if layout == "auto":
        layout = "records" if mode == "read" else "columns"
    fields = standard_fields(source, normalize_states=normalize_states)
    taken = [STATES, ACTIONS, REWARDS, *extra_columns]
    if len(set(taken)) != len(taken):
        raise InputError(
            "EXTRA_COLUMN",
            f"extra columns {list(extra_columns)} repeat a column or a standard field",
            remedy="name each further column once; observations, actions, rewards are always there",
        )
    builder = _Builder(source, context_length)
    returns = returns_to_go(source, gamma=gamma, scale=returns_scale)
    if mode == "mmap":
        stores = [builder.mapped(column, field) for column, field in fields.items()]
        stores.append(builder.owned({None: returns_field()}, returns))
    else:
        stores = builder.standard(fields, returns, together=layout == "records")
    for column in extra_columns:
        spec = source.spec[column]
        field = Field(name=EXTRA + column, dtype=spec.dtype, shape=spec.shape)
        stores.append((builder.mapped if mode == "mmap" else builder.alone)(column, field))
    return Table(
        episodes=source.episodes, stores=tuple(stores), margin=context_length, layout=layout
    )


def returns_to_go(source: TableSource, *, gamma: float, scale: float) -> npt.NDArray[np.float32]:
    """Return (N, 1) float32 returns-to-go; `build_table` states the formula."""
    offsets = source.episodes.offsets.tolist()
    out = np.empty((source.episodes.steps, 1), dtype=np.float32)
    itemsize = source.spec[REWARDS].step_bytes
    for first, last in _whole_episodes(offsets, max(CHUNK_BYTES // itemsize, 1)):
        base = offsets[first]
        rewards = source.read(REWARDS, base, offsets[last], check=source.verified)
        rewards = rewards.astype(np.float64).reshape(-1)
        finite = bool(np.isfinite(rewards).all())
        for start, stop in zip(offsets[first:last], offsets[first + 1 : last + 1], strict=True):
            back = rewards[start - base : stop - base][::-1]  # a view: overwritten from the end
            if gamma == 1.0:
                with np.errstate(over="ignore"):
                    np.cumsum(back, out=back)
            else:
                back[:] = list(accumulate(back.tolist(), lambda rest, r: r + gamma * rest))
        out[base : offsets[last], 0] = to_float32(rewards / scale, REWARDS, base, finite=finite)
    return out


def _whole_episodes(offsets: list[int], steps: int) -> Iterator[tuple[int, int]]:
    """Yield runs of episodes ``[first, last)`` of about `steps` steps, at least one episode."""
    first = 0
    for last in range(1, len(offsets)):
        if offsets[last] - offsets[first] >= steps or last == len(offsets) - 1:
            yield first, last
            first = last


def _is_packed(spec: ColumnSpec, field: Field) -> bool:
    return len(spec.shape) <= 1 and field.dtype == np.float32 and 4 * field.width <= PACKED_BYTES


@dataclass(frozen=True)
class _Builder:
    """Makes stores of one source; rows are read in chunks, so only the result is held."""

    source: TableSource
    margin: int

    def _chunks(self, column: str) -> Iterator[tuple[int, Array]]:
        spec, total = self.source.spec[column], self.source.episodes.steps
        rows = max(CHUNK_BYTES // spec.step_bytes, 1)
        for start in range(0, total, rows):
            stop = min(start + rows, total)
            yield start, self.source.read(column, start, stop, check=self.source.verified)

    def _zeros(self, width: int, dtype: np.dtype[Any]) -> Array:
        """Return (M + N + M, width) zeros whose rows are aligned to their own size."""
        count = self.source.episodes.steps + 2 * self.margin
        spare = np.zeros(count * width * dtype.itemsize + 64, dtype=np.uint8)
        begin = -spare.ctypes.data % 64
        used = spare[begin : begin + count * width * dtype.itemsize]
        return used.view(dtype).reshape(count, width)

    def standard(
        self, fields: Mapping[str, Field], returns: Array, *, together: bool
    ) -> list[Store]:
        """Return the stores of the fields that every batch has; `together` makes records."""
        packed: dict[str | None, Field] = {
            c: f for c, f in fields.items() if _is_packed(self.source.spec[c], f)
        }
        packed[None] = returns_field()
        groups = [packed] if together else [{column: field} for column, field in packed.items()]
        stores = [self.owned(group, returns) for group in groups]
        return stores + [self.alone(c, f) for c, f in fields.items() if c not in packed]

    def owned(self, group: Mapping[str | None, Field], returns: Array) -> Store:
        """Return one float32 store of several fields; column ``None`` is the returns-to-go."""
        placed: dict[str | None, Field] = {}
        width = 0
        for column, field in group.items():
            placed[column] = replace(field, offset=width, mean=None, divisor=None)
            width += field.width
        if len(group) > 1:
            unit = RECORD_ALIGNMENT_BYTES // 4
            width = -(-width // unit) * unit
        rows = self._zeros(width, np.dtype(np.float32))
        steps = rows[self.margin : self.margin + self.source.episodes.steps]
        for column, field in group.items():
            place = slice(placed[column].offset, placed[column].offset + field.width)
            if column is None:
                steps[:, place] = returns
                continue
            for start, values in self._chunks(column):
                values = values.reshape(len(values), *field.shape)
                if field.mean is None:
                    values = to_float32(values, column, start)
                final = convert(values, field).reshape(len(values), -1)
                steps[start : start + len(values), place] = final
        return Store(fields=tuple(placed.values()), rows=rows)

    def alone(self, column: str, field: Field) -> Store:
        """Return a store of one column in its source dtype."""
        spec = self.source.spec[column]
        rows = self._zeros(prod(spec.shape), spec.dtype)
        for start, values in self._chunks(column):
            at = self.margin + start
            rows[at : at + len(values)] = values.reshape(len(values), -1)
        return Store(fields=(field,), rows=rows)

    def mapped(self, column: str, field: Field) -> Store:
        """Return a store over the mapped shards of one column."""
        arrays = self.source.column(column, mode="mmap")
        pieces = tuple(np.asarray(array).reshape(len(array), -1) for array in arrays)
        lengths = np.array([0, *(len(piece) for piece in pieces[:-1])], dtype=np.int64)
        return Store(fields=(field,), pieces=pieces, firsts=np.cumsum(lengths))
