"""Hold episodes out by their content: one falls on the same side in every dataset that has it.

A digest makes a number in [0, 1) of each episode; those below the share are held out.  Shards,
order, other episodes and the dtype of floats do not matter, so merging and growing move none.

Shape legend: E episodes, n of them from some number on.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import pairwise
from math import prod

import numpy as np

from gear_offline.config.arguments import check_arguments
from gear_offline.config.sections import share_of
from gear_offline.core.text import count_text
from gear_offline.core.types import Array, BoolArray, Float64Array, Int64Array
from gear_offline.data.dataset.dataset import RUN_BYTES, Dataset, open_dataset, view_episodes
from gear_offline.data.dataset.schema import ColumnSpec, check_whole
from gear_offline.errors import InputError

WIDE = 1024  # numbers a step; of wider columns not every row is read


@dataclass(frozen=True)
class HeldOut:
    """The rule: a `share` of the episodes, or of the values of a column `by`."""

    share: float
    by: str | None = None

    def keep(self, dataset: Dataset) -> Int64Array:
        """Return the numbers of the episodes that stay: some, but not all."""
        places = episode_numbers(dataset, self.by)
        check_whole(dataset.histories, places < self.share, f"held_out_by={self.by}")
        numbers = np.flatnonzero(places >= self.share)
        if not 0 < len(numbers) < len(places):
            low, high = float(places.min()), float(places.max())
            which = "all" if not len(numbers) else "none"
            problem = f"{self.share:.6g} holds out {which} of {count_text(len(places), 'episode')}"
            remedy = f"use a share (data.held_out) above {low:.4f} and up to {high:.4f}"
            if low == high:
                remedy = f"it takes two episodes that differ{(self.by and f' in {self.by}') or ''}"
            raise InputError("SELECTION", problem, dataset.name, remedy)
        return numbers

    def stays(self, dataset: Dataset, first: int) -> BoolArray:
        """Return (n,) which of the episodes from `first` on stay."""
        return episode_numbers(dataset, self.by, first) >= self.share

    def others(self, dataset: Dataset, numbers: Int64Array | None = None) -> Dataset:
        """Return a view of what stays, which grows with its data; `numbers`: if known already."""
        return view_episodes(
            dataset, self.keep(dataset) if numbers is None else numbers, self.stays
        )


@check_arguments()
def split(
    dataset: Dataset | str | os.PathLike[str],
    held_out: float | str = "10%",
    by: str | None = None,
) -> tuple[Dataset, Dataset]:
    """Split a dataset into two views of whole episodes: to train on, and held out.

    An episode's own content decides, of histories their number, so merging, growing or sharding
    data moves none, and the same episode twice is on one side.  Nothing is copied; statistics are
    those of each view alone.

    Parameters
    ----------
    dataset
        An opened dataset, or the directory of one.
    held_out
        Share of the episodes, about: ``"10%"`` or 0.1.
    by
        Column whose value stays in an episode: episodes of one value are on one side.

    Raises
    ------
    InputError
        ``SELECTION`` if one side has no episode; ``COLUMN``; those of `gear_offline.open_dataset`.

    Examples
    --------
    `tiny` is what the example of `gear_offline.convert` makes.

    >>> import gear_offline as go
    >>> train, held_out = go.split("tiny", "50%")
    >>> len(train), len(held_out), train.returns.tolist()
    (1, 1, [5.0])
    """
    try:
        rule = HeldOut(share_of(held_out), by)
    except ValueError as error:
        raise InputError("USAGE", str(error), "held_out", "write it like 10% or 0.1") from error
    opened = dataset if isinstance(dataset, Dataset) else open_dataset(dataset)
    numbers = rule.keep(opened)
    others = np.setdiff1d(np.arange(len(opened)), numbers)
    return rule.others(opened, numbers), view_episodes(opened, others)


def held_out_part(dataset: Dataset, observations: Sequence[str]) -> Dataset:
    """Return the episodes that a view leaves out, with the view's moments of `observations`."""
    view = dataset.view
    assert view is not None, "some episodes are held out"
    numbers = np.setdiff1d(np.arange(len(view.whole)), view.numbers)
    moments = {name: dataset.statistics[name] for name in observations}
    part = view_episodes(view.whole, numbers)
    statistics = {**part.manifest.statistics, **moments}
    manifest = part.manifest.replace_fields(statistics=statistics)
    return replace(part, manifest=manifest, verified_shards=dataset.verified_shards, frozen=True)


def episode_numbers(dataset: Dataset, by: str | None = None, first: int = 0) -> Float64Array:
    """Return (n,) numbers in [0, 1) of the episodes from `first` on.

    Each is an 8-byte BLAKE2b digest, little-endian, divided by ``2**64``: of what
    `digest_episodes` gives for observations and actions, or of its value of the column `by`.  A
    view's depth salts them: its episodes' own numbers are all on one side of a share.  Without a
    column an episode goes with its history.
    """
    by = by or dataset.history_column
    if by is not None:
        content = list(_values(dataset, dataset.spec[by], first))
    else:
        names = [column.name for column in dataset.spec]
        observed = [name for name in names if name.startswith("observation")]
        names = [*observed, "actions"] if observed and "actions" in names else names
        content = digest_episodes(dataset, names, first)
    salt = dataset.depth.to_bytes(2, "little")
    digests = b"".join(blake2b(each, digest_size=8, salt=salt).digest() for each in content)
    return np.frombuffer(digests, "<u8") / 2.0**64


def digest_episodes(dataset: Dataset, names: Sequence[str], first: int = 0) -> list[bytes]:
    """Return the 16-byte digests of columns, by name, and the length of each episode, joined."""
    columns = [_digests(dataset, dataset.spec[name], first) for name in sorted(names)]
    lengths = [length.to_bytes(8, "little") for length in dataset.episodes.lengths.tolist()]
    return [b"".join(fields) for fields in zip(*columns, lengths[first:], strict=True)]


def _digests(dataset: Dataset, column: ColumnSpec, first: int) -> Iterator[bytes]:
    """Yield the digest of each episode's rows of a column."""
    digest = blake2b(digest_size=16)
    for _, rows, is_last in _pieces(dataset, column, first):
        digest.update(rows.data)
        if is_last:
            yield digest.digest()
            digest = blake2b(digest_size=16)


def _values(dataset: Dataset, column: ColumnSpec, first: int) -> Iterator[bytes]:
    """Yield each episode's value of a column, which may not change in it."""
    value = b""
    for number, rows, is_last in _pieces(dataset, column, first):
        value = value or rows[0].tobytes()
        if rows.tobytes() != value * len(rows):
            problem, remedy = f"it changes in episode {number}", "name one that does not"
            raise InputError("COLUMN", problem, f"column {column.name}", remedy)
        if is_last:
            yield value
            value = b""


def _pieces(dataset: Dataset, column: ColumnSpec, first: int) -> Iterator[tuple[int, Array, bool]]:
    """Yield an episode's number, some of its rows, and whether they are its last; in order.

    Of frames, and others as wide, they are the first row and the last one.  Floats are float32 and
    other numbers int64, so that data of any width are alike, and zero has no sign; bytes of frames
    stay.
    """
    kind, offsets = column.dtype.kind, dataset.episodes.offsets.tolist()
    is_wide = prod(column.shape) > WIDE
    is_frame = is_wide and column.dtype == "u1"
    dtype = "<f4" if kind == "f" else "<i8" if kind in "iub" and not is_frame else None

    def read(begin: int, end: int) -> Array:
        with np.errstate(over="ignore", invalid="ignore"):
            rows = np.ascontiguousarray(dataset.read(column.name, begin, end), dtype)
        return rows + 0 if kind == "f" else rows  # -0.0 + 0 is 0.0

    if is_wide:
        for number, (begin, end) in enumerate(pairwise(offsets[first:]), first):
            yield number, read(begin, begin + 1), False
            yield number, read(end - 1, end), True
        return
    number, count = first, max(1, RUN_BYTES // column.step_bytes)
    for at in range(offsets[first], offsets[-1], count):
        rows, begin = read(at, min(at + count, offsets[-1])), 0
        while begin < len(rows):
            end = min(offsets[number + 1] - at, len(rows))
            is_last = at + end == offsets[number + 1]
            yield number, rows[begin:end], is_last
            number, begin = number + is_last, end
