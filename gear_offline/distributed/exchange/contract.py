"""What every transport does, and the tables that it is given.

A rank holds whole episodes (`Shelf`).  The assignment, which every rank computes alike, says who
reads which segment from whom (`Reads`).  A transport copies those rows, byte for byte, into
buffers of the reader (`Destination`).

Shape legend: E episodes of the dataset, S stores of a table, M reads of a step by all ranks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from gear_offline.distributed.exchange.memory import RowMemory
from gear_offline.errors import GearError, InputError

Int64Array = npt.NDArray[np.int64]

TIMEOUT = timedelta(seconds=60)
DEPTH = 8  # steps posted and not yet waited for, unless told otherwise


class Exchange(Protocol):
    """Moves rows between ranks.

    All ranks open, post the same steps in the same order, and close.  Steps that are posted run in
    the background; they may be waited for in any order, each once.  After an error the exchange is
    broken: every later call but `close` raises that error again.

    Attributes
    ----------
    name
        ``"collective"`` or ``"verbs"``.
    rank, world
        This rank, and how many there are.
    """

    name: str
    rank: int
    world: int

    def register(self, buffers: Sequence[Any]) -> Destination:
        """Make memory of the caller known as a place where rows may land.

        Parameters
        ----------
        buffers
            One C-contiguous, writable array or tensor for each store, ``(rows, ...)`` with the
            store's bytes a row, in host memory or on the GPU.  They stay alive until `close`.

        Raises
        ------
        InputError
            ``EXCHANGE_BUFFER``
        GearError
            ``EXCHANGE_MEMORY`` if the memory cannot be registered.
        """
        ...

    def post(self, step: int, reads: Reads, destination: Destination) -> None:
        """Begin the reads of `step`; does not wait for them.

        Rows of the destination that no read names are left alone.  The destination must not be
        touched before `wait` has returned.  A step whose reads are outside what their owners hold
        is refused as if it had not been posted; a read outside the destination may break the
        exchange.

        Parameters
        ----------
        step
            Greater than that of the previous call.
        reads
            Of all ranks, the same on every rank.
        destination
            From `register` of this exchange.

        Raises
        ------
        InputError
            ``EXCHANGE_STEP``, ``EXCHANGE_RANGE`` (a read outside what its owner holds, or outside
            the destination).
        GearError
            ``EXCHANGE_PEER``, ``EXCHANGE_CLOSED``
        """
        ...

    def wait(self, step: int, *, timeout: timedelta | None = None) -> None:
        """Return when all rows of `step` have landed; on a GPU, in the order of its current stream.

        Raises
        ------
        InputError
            ``EXCHANGE_STEP`` if `step` is not posted, or was waited for already.
        GearError
            ``EXCHANGE_TIMEOUT`` or ``EXCHANGE_PEER``, naming the peer, at most `timeout` (by
            default that of the exchange) after the call.
        """
        ...

    def close(self) -> None:
        """Finish what is posted, wait for the peers to close too, and give all back.

        Waits no longer than the exchange's timeout and raises nothing.  May be called again.
        """
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Close; after an exception, tell the peers instead of waiting for them."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Reads:
    """The reads of one step, of all ranks, ordered by reader and then by owner.

    Attributes
    ----------
    readers, owners
        (M,) int64: the rank that needs the rows, and one that holds them (it may be the same).
    episodes, starts, steps
        (M,) int64: the segment; `steps` rows, cut at the end of the episode by the caller.
    rows
        (M,) int64: row of the reader's destination where the first one lands.
    """

    readers: Int64Array
    owners: Int64Array
    episodes: Int64Array
    starts: Int64Array
    steps: Int64Array
    rows: Int64Array

    @classmethod
    def of(
        cls,
        *,
        readers: npt.ArrayLike,
        owners: npt.ArrayLike,
        episodes: npt.ArrayLike,
        starts: npt.ArrayLike,
        steps: npt.ArrayLike,
        rows: npt.ArrayLike,
    ) -> Self:
        """Build from reads in any order; the order of equals is kept.

        Parameters
        ----------
        readers, owners, episodes, starts, steps, rows
            (n,) whole numbers each, what the attributes of these names say of every read.

        Raises
        ------
        InputError
            ``EXCHANGE_RANGE`` if the arrays differ in length.
        """
        given = (readers, owners, episodes, starts, steps, rows)
        columns = [np.asarray(values, dtype=np.int64).reshape(-1) for values in given]
        if len({len(column) for column in columns}) > 1:
            raise InputError(
                "EXCHANGE_RANGE",
                f"the columns of the reads differ in length: {[len(c) for c in columns]}",
                remedy="give one value a read in each",
            )
        readers_, owners_ = columns[0], columns[1]
        same = readers_[1:] == readers_[:-1]
        ordered = (readers_[1:] > readers_[:-1]) | (same & (owners_[1:] >= owners_[:-1]))
        if not ordered.all():
            order = np.lexsort((owners_, readers_))
            columns = [column[order] for column in columns]
        return cls(**dict(zip([f.name for f in fields(cls)], columns, strict=True)))

    def __len__(self) -> int:
        return len(self.readers)

    def check(self, world: int) -> None:
        """Refuse readers that are no rank of `world`, with ``EXCHANGE_RANGE``."""
        if len(self) and not 0 <= self.readers[0] <= self.readers[-1] < world:  # they ascend
            raise InputError(
                "EXCHANGE_RANGE",
                f"readers are {self.readers[0]} to {self.readers[-1]} of {world} ranks",
                remedy="name readers by their rank in the exchange",
            )

    def made_by(self, rank: int) -> Reads:
        """Return the reads that `rank` makes; views."""
        first = bisect_left(self.readers, rank)
        return self._at(slice(first, bisect_left(self.readers, rank + 1, first)))

    def served_by(self, rank: int) -> Reads:
        """Return the reads of what `rank` holds, in the order of their readers."""
        return self._at(np.flatnonzero(self.owners == rank))

    def _at(self, index: Any) -> Reads:
        return Reads(  # written out: this is on the path of every step
            readers=self.readers[index],
            owners=self.owners[index],
            episodes=self.episodes[index],
            starts=self.starts[index],
            steps=self.steps[index],
            rows=self.rows[index],
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Piece:
    """Whole episodes that lie back to back in memory.

    Attributes
    ----------
    episodes
        (e,) int64, ascending: which ones, in the order of their rows.
    rows
        One array or tensor for each store, ``(n, ...)`` C-contiguous, n the steps of the episodes.
    """

    episodes: Int64Array
    rows: tuple[Any, ...]


class Shelf:
    """What one rank holds of a table, and the shape of the whole.

    Parameters
    ----------
    lengths
        (E,) int64 steps of every episode of the dataset, the same on every rank.
    row_bytes
        Bytes of one row of each store, the same on every rank.
    pieces
        What this rank holds; may be empty.  Their memory must not move or change while an exchange
        over it is open.

    Raises
    ------
    InputError
        ``EXCHANGE_SHELF`` if the parts contradict each other.
    """

    def __init__(
        self, *, lengths: npt.ArrayLike, row_bytes: Sequence[int], pieces: Sequence[Piece] = ()
    ) -> None:
        self.lengths: Int64Array = np.asarray(lengths, dtype=np.int64).reshape(-1)
        self.row_bytes = tuple(int(n) for n in row_bytes)
        if not self.row_bytes or min(self.row_bytes) < 1:
            raise _odd(f"a row cannot have {list(self.row_bytes)} bytes")
        self.episodes = [np.asarray(p.episodes, dtype=np.int64).reshape(-1) for p in pieces]
        self.memory = [self._checked(n, piece) for n, piece in enumerate(pieces)]
        held = np.concatenate([*self.episodes, np.empty(0, np.int64)])
        if len(np.unique(held)) != len(held):
            raise _odd("an episode lies in two pieces of one rank")

    def _checked(self, number: int, piece: Piece) -> tuple[RowMemory, ...]:
        episodes = self.episodes[number]
        where = f"piece {number}"
        if len(piece.rows) != len(self.row_bytes):
            raise _odd(f"{len(piece.rows)} arrays for {len(self.row_bytes)} stores", where)
        if episodes.size and (episodes[0] < 0 or episodes[-1] >= len(self.lengths)):
            raise _odd(f"it names episodes outside 0..{len(self.lengths) - 1}", where)
        if (np.diff(episodes) <= 0).any():
            raise _odd("its episodes are not ascending", where)
        steps = int(self.lengths[episodes].sum())
        found = []
        for rows, row_bytes in zip(piece.rows, self.row_bytes, strict=True):
            memory = RowMemory(rows, row_bytes=row_bytes, where=where)
            if memory.count != steps:
                raise _odd(f"{memory.count} rows for {steps} steps", where)
            found.append(memory)
        return tuple(found)


@dataclass(frozen=True, kw_only=True, eq=False)
class Destination:
    """Registered memory where rows land; made by `Exchange.register`.

    Attributes
    ----------
    memory
        One for each store, all with the same number of rows.
    keys
        What the transport needs besides.
    """

    memory: tuple[RowMemory, ...]
    keys: tuple[Any, ...] = ()

    @property
    def rows(self) -> int:
        """Rows that fit."""
        return self.memory[0].count

    @classmethod
    def of(cls, buffers: Sequence[Any], row_bytes: Sequence[int]) -> Self:
        """Check buffers against the stores' `row_bytes`; ``EXCHANGE_BUFFER`` if they do not fit."""
        if len(buffers) != len(row_bytes):
            raise InputError(
                "EXCHANGE_BUFFER",
                f"{len(buffers)} buffers for {len(row_bytes)} stores",
                remedy="give one buffer for each store of the table",
            )
        memory = tuple(
            RowMemory(b, row_bytes=n, where=f"buffer {i}", writable=True)
            for i, (b, n) in enumerate(zip(buffers, row_bytes, strict=True))
        )
        if len({m.count for m in memory}) > 1:
            raise InputError(
                "EXCHANGE_BUFFER",
                f"buffers of one destination differ in rows: {[m.count for m in memory]}",
                remedy="give every store the same number of rows",
            )
        return cls(memory=memory)


class Ledger:
    """Which steps are posted and not yet waited for; shared by the transports.

    Parameters
    ----------
    depth
        Most steps that may be posted and not yet waited for.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.last = -1
        self.open: dict[int, Any] = {}
        self.error: GearError | None = None
        self.closed = False

    def check(self) -> None:
        """Raise what broke the exchange, or ``EXCHANGE_CLOSED``."""
        if self.closed:
            raise GearError("EXCHANGE_CLOSED", "the exchange is closed", remedy="open a new one")
        if self.error is not None:
            raise self.error

    def begin(self, step: int) -> None:
        """Refuse a step that cannot be posted now."""
        self.check()
        if step <= self.last:
            raise InputError(
                "EXCHANGE_STEP",
                f"step {step} is posted after step {self.last}",
                remedy="post each step once, in ascending order",
            )
        if len(self.open) >= self.depth:
            raise InputError(
                "EXCHANGE_STEP",
                f"{self.depth} steps are posted and not waited for",
                where=f"step {step}",
                remedy="wait for the oldest first, or open the exchange with a larger depth",
            )

    def posted(self, step: int, work: Any) -> None:
        self.last = step
        self.open[step] = work

    def work_of(self, step: int) -> Any:
        """Return the work of a posted step."""
        self.check()
        if step not in self.open:
            raise InputError(
                "EXCHANGE_STEP",
                f"step {step} is not posted, or was waited for already",
                remedy="post it first, and wait once",
            )
        return self.open[step]

    def fail(self, error: GearError) -> GearError:
        """Remember the first error; returns it."""
        if self.error is None:
            self.error = error
        return self.error


def _odd(what: str, where: str = "") -> InputError:
    return InputError(
        "EXCHANGE_SHELF", what, where=where, remedy="describe whole episodes, rows back to back"
    )
