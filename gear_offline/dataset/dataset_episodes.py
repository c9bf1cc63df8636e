"""Episodes of a dataset one by one: as an item, in a loop, chosen.

Shape legend: E episodes, T steps of an episode.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import index
from typing import TYPE_CHECKING, Any, SupportsIndex, cast

import numpy as np
import numpy.typing as npt

from gear_offline.dataset.schema import chosen_episodes
from gear_offline.errors import InputError

if TYPE_CHECKING:
    from gear_offline.dataset.dataset import Dataset
    from gear_offline.dataset.schema import EpisodeIndex, TableSpec

Columns = dict[str, npt.NDArray[Any]]

RUN_BYTES = 16 << 20  # episodes that follow each other are read together up to this


class HasEpisodeArrays:
    """What reading single episodes adds to a dataset, which gives the rows.

    ``dataset[3]`` is an episode as arrays by column name, ``len(dataset)`` counts episodes, and a
    loop goes over them; ``print(dataset.describe())`` shows what `gear-offline inspect` shows.
    """

    episodes: EpisodeIndex

    if TYPE_CHECKING:

        @property
        def spec(self) -> TableSpec: ...

        def read(
            self, column: str, start: int, stop: int, *, check: bool = False
        ) -> npt.NDArray[Any]: ...

    def __len__(self) -> int:
        """Return E, the number of episodes."""
        return self.episodes.episodes

    def __getitem__(self, number: SupportsIndex) -> Columns:
        """Return an episode as `episode` does; a negative number counts from the end.

        Raises
        ------
        IndexError
            If there is no such episode.
        """
        try:
            found = index(number)
        except TypeError as error:
            what = f"episodes have numbers, not {number!r}; whole columns: column(name)"
            raise TypeError(what) from error
        found += len(self) if found < 0 else 0
        if not 0 <= found < len(self):
            raise IndexError(f"episode {number} of {len(self)}")
        return self.episode(found)

    def __iter__(self) -> Iterator[Columns]:
        """Iterate over all episodes as `iter_episodes` does."""
        return self.iter_episodes()

    def describe(self) -> str:
        """Return columns, statistics and histograms as text."""
        from gear_offline.dataset.inspection import describe

        return describe(cast("Dataset", self))

    def episode(self, number: int, *, columns: Sequence[str] | None = None) -> Columns:
        """Return one episode in memory of its own.

        Parameters
        ----------
        number
            ``0 <= number < E``.
        columns
            Columns to read, default all.

        Returns
        -------
        dict
            Column name to (T, *shape), the column's dtype.

        Raises
        ------
        InputError
            ``SELECTION`` if there is no such episode, and those of `Dataset.read`.
        """
        return next(self.iter_episodes([number], columns=columns))

    def iter_episodes(
        self, which: npt.ArrayLike | None = None, *, columns: Sequence[str] | None = None
    ) -> Iterator[Columns]:
        """Iterate over episodes, each as `episode` returns it.

        Parameters
        ----------
        which
            Numbers of episodes, each at most once, or (E,) bool; default all.
        columns
            Columns to read, default all.

        Raises
        ------
        InputError
            As `episode`.
        """
        if isinstance(columns, str):
            what = f"columns is the text {columns!r}"
            raise InputError("COLUMN_MISSING", what, remedy=f"give a list: [{columns!r}]")
        chosen = np.arange(len(self)) if which is None else chosen_episodes(which, len(self))
        names = [c.name for c in self.spec] if columns is None else list(columns)
        widest = max((self.spec[name].step_bytes for name in names), default=1)
        return self._read_runs(chosen, names, max(1, RUN_BYTES // widest))

    def _read_runs(
        self, chosen: npt.NDArray[np.int64], names: Sequence[str], most: int
    ) -> Iterator[Columns]:
        offsets, at = self.episodes.offsets, 0
        while at < chosen.size:
            first, count = int(chosen[at]), 1
            low = int(offsets[first])
            while (
                at + count < chosen.size
                and chosen[at + count] == first + count
                and offsets[first + count + 1] - low <= most
            ):
                count += 1
            rows = {name: self.read(name, low, int(offsets[first + count])) for name in names}
            for number in range(first, first + count):
                begin, end = int(offsets[number]) - low, int(offsets[number + 1]) - low
                # Copies, so that holding one episode does not hold all that were read with it.
                yield {name: found[begin:end].copy() for name, found in rows.items()}
            at += count
