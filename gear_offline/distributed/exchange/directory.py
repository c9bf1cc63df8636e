"""Who holds which episode, and where: what the ranks tell each other when an exchange opens.

Shape legend: E episodes, S stores, T entries (an episode at a rank), m reads.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gear_offline.distributed.exchange.contract import Int64Array, Reads, Shelf
from gear_offline.distributed.exchange.work_requests import PAIR
from gear_offline.errors import GearError, InputError

Regions = Sequence[Sequence[tuple[int, int]]]  # (address, key) of each store, for each piece


@dataclass(frozen=True, kw_only=True, eq=False)
class Notice:
    """What one rank holds, as it tells the others.

    Attributes
    ----------
    pieces
        (e,) int64 episodes of each piece.
    regions
        For each piece and store, address and key for remote reads; empty without RDMA.
    """

    pieces: tuple[Int64Array, ...]
    regions: tuple[tuple[tuple[int, int], ...], ...] = ()

    def to_bytes(self) -> bytes:
        runs = [_runs(episodes) for episodes in self.pieces]
        return json.dumps({"pieces": runs, "regions": self.regions}).encode()

    @classmethod
    def from_bytes(cls, data: bytes, *, stores: int, episodes: int) -> Notice:
        """Parse what a peer sent; raises ``ValueError`` on anything odd."""
        raw = json.loads(data)
        pieces = []
        for runs in raw["pieces"]:
            table = np.asarray(runs, dtype=np.int64).reshape(-1, 2)
            if (
                (table[:, 1] < 1).any()
                or (table < 0).any()
                or table.sum(1).max(initial=0) > episodes
            ):
                raise ValueError("a run of episodes is outside the dataset")
            pieces.append(
                np.concatenate([np.empty(0, np.int64), *(np.arange(f, f + n) for f, n in table)])
            )
        regions = tuple(
            tuple((int(address), int(key)) for address, key in piece) for piece in raw["regions"]
        )
        if regions and (len(regions) != len(pieces) or {len(r) for r in regions} != {stores}):
            raise ValueError("regions and pieces differ in number")
        if any(not 0 <= v < 1 << 63 for piece in regions for pair in piece for v in pair):
            raise ValueError("an address or a key is out of range")
        return cls(pieces=tuple(pieces), regions=regions)


def _runs(episodes: Int64Array) -> list[list[int]]:
    """Return ``[first, count]`` of the runs of consecutive numbers."""
    if not len(episodes):
        return []
    cuts = np.flatnonzero(np.diff(episodes) != 1) + 1
    firsts = np.concatenate([[0], cuts])
    counts = np.diff(np.concatenate([firsts, [len(episodes)]]))
    return [[int(episodes[f]), int(n)] for f, n in zip(firsts, counts, strict=True)]


class Directory:
    """All entries, with a look-up that costs a few nanoseconds a read.

    Parameters
    ----------
    shelf
        Of this rank, for the lengths and stores.
    notices
        Of every rank, by rank.

    Attributes
    ----------
    owner, piece, first, length
        (T + 1,) int64: rank, number of its piece, row of the episode's first step there, and steps.
        The last entry stands for "nobody".
    regions
        S arrays (T + 1,) of `PAIR`: address of the episode's first row, and key, for RDMA.
    longest
        Steps of the longest episode.
    """

    def __init__(self, shelf: Shelf, notices: Sequence[Notice]) -> None:
        self._episodes = len(shelf.lengths)
        columns: dict[str, list[Int64Array]] = {
            name: [] for name in ("owner", "piece", "first", "length", "episode")
        }
        regions: list[list[Int64Array]] = [[] for _ in shelf.row_bytes]
        for rank, notice in enumerate(notices):
            for number, episodes in enumerate(notice.pieces):
                lengths = shelf.lengths[episodes]
                first = np.cumsum(lengths) - lengths
                columns["owner"].append(np.full(len(episodes), rank, np.int64))
                columns["piece"].append(np.full(len(episodes), number, np.int64))
                columns["first"].append(first)
                columns["length"].append(lengths)
                columns["episode"].append(episodes)
                for store, row_bytes in enumerate(shelf.row_bytes if notice.regions else ()):
                    base, word = notice.regions[number][store]
                    keys = np.full(len(episodes), word & 0xFFFF_FFFF, np.int64)
                    regions[store].append(np.stack([base + first * row_bytes, keys], axis=1))
        nobody = [np.full(1, -1, np.int64)]
        self.owner, self.piece, self.first, self.length, episode = (
            np.concatenate(columns[name] + nobody) for name in columns
        )
        nowhere = np.zeros((1, 2), np.int64)
        self.regions = [np.concatenate([*p, nowhere]).view(PAIR)[:, 0] for p in regions]
        self.longest = int(shelf.lengths.max(initial=0))
        count = len(self.owner) - 1
        self._home = np.full(self._episodes, count, dtype=np.int64)
        self._home[episode[:count][::-1]] = np.arange(count)[::-1]  # the lowest rank's entry
        names = self.owner[:count] * self._episodes + episode[:count]
        self._order = np.argsort(names, kind="stable")
        self._names = names[self._order]

    def find(self, reads: Reads, destination_rows: int | None) -> Int64Array:
        """Return the (m,) entries that `reads` ask for, checked against what is held.

        Parameters
        ----------
        reads
            m reads.
        destination_rows
            Rows of the reader's destination; ``None`` if that is not known here.

        Raises
        ------
        InputError
            ``EXCHANGE_RANGE``
        """
        if not len(reads):
            return np.empty(0, np.int64)
        # Few calls: each costs as much as a hundred reads.  What is wrong is looked for only then.
        stop, last = reads.starts + reads.steps, reads.rows + reads.steps
        signs = reads.episodes | reads.starts | reads.rows
        signs |= reads.steps - 1
        if int(signs.min()) < 0:
            self._refuse(reads, destination_rows)
        try:
            found = self._home.take(reads.episodes)
        except IndexError:
            self._refuse(reads, destination_rows)
            raise
        if (self.owner.take(found) != reads.owners).any():
            # Episodes that several ranks hold, or a wrong owner.
            other = self.owner.take(found) != reads.owners
            found[other] = self._search(reads.owners[other], reads.episodes[other])
        if (stop > self.length.take(found)).any():  # nobody's entry has length -1
            raise self._outside(reads, stop > self.length.take(found))
        if destination_rows is not None and int(last.max()) > destination_rows:
            self._refuse(reads, destination_rows)
        return found

    def _refuse(self, reads: Reads, destination_rows: int | None) -> None:
        """Raise ``EXCHANGE_RANGE`` for reads that are wrong whatever their owners hold."""
        episodes, steps = reads.episodes, reads.steps
        bad = (episodes < 0) | (episodes >= self._episodes) | (reads.starts < 0) | (steps < 1)
        if bad.any():
            raise self._outside(reads, bad)
        if destination_rows is not None:
            bad = (reads.rows < 0) | (reads.rows + steps > destination_rows)
            if bad.any():
                raise self._outside(reads, bad, f"a destination of {destination_rows} rows")

    def _search(self, owners: Int64Array, episodes: Int64Array) -> Int64Array:
        count = len(self._names)
        if not count:
            return np.zeros(len(owners), np.int64)
        names = owners * self._episodes + episodes
        at = np.minimum(np.searchsorted(self._names, names), count - 1)
        return np.where(self._names[at] == names, self._order[at], count)

    def _outside(
        self, reads: Reads, bad: npt.NDArray[np.bool_], of: str = "what its owner holds"
    ) -> InputError:
        at = int(np.flatnonzero(bad)[0])
        values = {name: int(getattr(reads, name)[at]) for name in ("owners", "episodes", "starts")}
        return InputError(
            "EXCHANGE_RANGE",
            f"a read of {int(reads.steps[at])} steps from {values['starts']} of episode "
            f"{values['episodes']} at rank {values['owners']} into row {int(reads.rows[at])} is "
            f"outside {of}",
            remedy="read segments of episodes that the owner holds, cut at the episode's end",
        )


def exchange_notices(mesh: Any, shelf: Shelf, own: Notice) -> Directory:
    """Tell all peers of `mesh` what this rank holds; return what all hold.

    Raises
    ------
    GearError
        ``EXCHANGE_PEER`` if a peer says nothing usable or has another table.
    """
    header = json.dumps([list(shelf.row_bytes), len(shelf.lengths), int(shelf.lengths.sum())])
    found = mesh.gather("notice", header.encode() + b"\n" + own.to_bytes())
    notices = []
    for rank, data in enumerate(found):
        theirs, _, body = data.partition(b"\n")
        try:
            if theirs.decode() != header:
                raise ValueError(f"it has another table: {theirs.decode()!r}, not {header!r}")
            stores, episodes = len(shelf.row_bytes), len(shelf.lengths)
            notices.append(Notice.from_bytes(body, stores=stores, episodes=episodes))
        except (ValueError, KeyError, TypeError) as error:
            raise GearError(
                "EXCHANGE_PEER",
                f"rank {rank} described what it holds in a way that cannot be used: {error}",
                where=mesh.name_of(rank),
                remedy="run the same version over the same dataset on every node",
            ) from error
    return Directory(shelf, notices)


def own_notice(shelf: Shelf, regions: Regions = ()) -> Notice:
    """Return what this rank tells the others."""
    return Notice(pieces=tuple(shelf.episodes), regions=tuple(tuple(piece) for piece in regions))
