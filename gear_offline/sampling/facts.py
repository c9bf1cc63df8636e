"""The facts of data that strategies use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from gear_offline.core.types import Array, BoolArray, Float64Array
from gear_offline.dataset.schema import EpisodeIndex
from gear_offline.errors import InputError


class EpisodeData(Protocol):
    """A dataset, several for one table, or `Facts`."""

    @property
    def episodes(self) -> EpisodeIndex: ...
    @property
    def returns(self) -> Float64Array | None: ...
    @property
    def terminated(self) -> BoolArray | None: ...
    @property
    def column(self) -> Callable[[str], Array] | None: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Facts:
    """The facts of data and windows that a strategy may use; None: not known."""

    episodes: EpisodeIndex
    returns: Float64Array | None = None  # (E,) undiscounted sum of rewards of each episode
    terminated: BoolArray | None = None  # (E,) True if the environment ended the episode
    column: Callable[[str], Array] | None = None  # reads a column by its name, (N, *shape)
    context_length: int | None = None  # K of the loader
    kept: BoolArray | None = None  # (E,) what a table of limited size has; None: everything

    def need(self, name: Literal["returns", "terminated", "column", "context_length"]) -> Any:
        """Return a fact that the strategy needs."""
        value = getattr(self, name)
        if value is None:
            what = f"the strategy needs {name.replace('_', ' ')}"
            remedy = "pass a dataset, and context_length=K where the strategy depends on it"
            raise InputError("SELECTION", what, remedy=remedy)
        return value

    def of_kept(self) -> Facts:
        """Return the facts of the kept episodes alone."""
        kept, column = self.kept, self.column
        assert kept is not None, "the table has everything"
        rows = np.repeat(kept, self.episodes.lengths)
        return Facts(
            episodes=EpisodeIndex(self.episodes.lengths[kept]),
            returns=None if self.returns is None else self.returns[kept],
            terminated=None if self.terminated is None else self.terminated[kept],
            column=None if column is None else lambda name: column(name)[rows],
            context_length=self.context_length,
        )
