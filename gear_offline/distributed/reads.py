"""The inputs of an exchange of rows: the rows of each node and the reads of a block.

Shape legend: E episodes of the dataset, M reads of a block by all ranks, W values of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gear_offline.core.types import Int64Array


@dataclass(frozen=True, kw_only=True, eq=False)
class NodeRows:
    """The rows that this rank's node holds, and the nodes that hold the others.

    `rows`: one C-contiguous (n, W) array for each column group with the steps of this node's
    episodes, in their order, back to back.  They must not move while an exchange is open.
    """

    lengths: Int64Array  # (E,) steps of every episode of the dataset, the same on every rank
    nodes: Int64Array  # (E,) the node that holds each episode, the same on every rank
    rows: tuple[npt.NDArray[np.generic], ...]

    def first_rows(self) -> Int64Array:
        """Return (E,) int64: where an episode begins among the rows of its node."""
        first = np.empty_like(self.lengths)
        for node in np.unique(self.nodes).tolist():
            at = np.flatnonzero(self.nodes == node)
            first[at] = np.cumsum(self.lengths[at]) - self.lengths[at]
        return first


@dataclass(frozen=True, kw_only=True, eq=False)
class Reads:
    """The reads of a block of steps by all ranks, the same on every rank; (M,) each.

    Those of a reader land in windows of a table's margin, one behind the other in the order of
    their owners.
    """

    readers: Int64Array  # the rank that needs the rows
    owners: Int64Array  # a rank of another node that holds them
    episodes: Int64Array
    starts: Int64Array  # within the episode
    steps: Int64Array  # rows from there
    rows: Int64Array  # of the reader's landing memory, where the first one goes

    def __len__(self) -> int:
        return len(self.readers)

    def take(self, index: Int64Array | slice) -> Reads:
        """Return some reads, in the order of `index`."""
        return Reads(**{name: column[index] for name, column in vars(self).items()})

    def made_by(self, rank: int) -> Reads:
        """Return the reads of a rank, in the order of their owners."""
        at = np.flatnonzero(self.readers == rank)
        return self.take(at[np.argsort(self.owners[at], kind="stable")])

    def served_by(self, rank: int) -> Reads:
        """Return the reads from a rank, in the order of their readers."""
        at = np.flatnonzero(self.owners == rank)
        return self.take(at[np.argsort(self.readers[at], kind="stable")])

    def check(self, node_rows: NodeRows, landing_rows: int) -> None:
        """Assert that reads lie within episodes and landing memory."""
        ends = self.starts + self.steps
        assert ((self.starts >= 0) & (self.steps > 0)).all(), "reads have rows"
        assert (ends <= node_rows.lengths[self.episodes]).all(), "reads end within their episodes"
        assert ((self.rows >= 0) & (self.rows + self.steps <= landing_rows)).all(), "reads land"


def as_bytes(rows: npt.NDArray[np.generic]) -> npt.NDArray[np.uint8]:
    """Return (n, bytes of a row) uint8 over the same memory."""
    assert rows.ndim == 2 and rows.flags.c_contiguous, "rows lie back to back"
    return rows.view(np.uint8)


def ranges(firsts: Int64Array, counts: Int64Array) -> Int64Array:
    """Return (sum of counts,) int64: ``firsts[i], firsts[i] + 1, ...``, counts[i] of each."""
    ends = np.cumsum(counts)
    shifts = np.repeat(firsts - (ends - counts), counts)
    return np.asarray(shifts + np.arange(len(shifts), dtype=np.int64))
