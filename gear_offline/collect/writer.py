"""Write episodes as an HDF5 file in D4RL's layout.

Shape legend: T steps of an episode, E episodes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gear_offline.collect.rollout import Episode
from gear_offline.core.types import Array
from gear_offline.errors import GearError
from gear_offline.export import Hdf5Writer

METADATA = "metadata"


class D4rlWriter(Hdf5Writer):
    """Writes episodes one after the other; a context manager.

    Leaving the context without `finish` removes everything.

    Parameters
    ----------
    path, overwrite
        As `Hdf5Writer`, and the errors.
    """

    def __init__(self, path: Path, *, overwrite: bool = False) -> None:
        super().__init__(path, overwrite=overwrite)
        self.steps = 0
        self.makers: list[int] = []
        self.seeds: list[int] = []
        self.returns: list[float] = []

    def append(self, episode: Episode, *, rows: int | None = None) -> None:
        """Add `episode`, or only its first `rows` rows: then its last row bears no flag."""
        steps = episode.steps if rows is None else min(rows, episode.steps)
        part = {name: column[:steps] for name, column in episode.columns.items()}
        if self.held and set(part) != set(self.held):
            raise GearError("COLLECT_COLUMNS", "episodes of one file must have the same columns")
        self.steps += steps
        self.makers.append(episode.maker)
        self.seeds.append(episode.reset_seed)
        self.returns.append(float(part["rewards"].sum(dtype=np.float64)))
        self.hold(part, steps)

    def finish(
        self,
        attributes: Mapping[str, Any],
        metadata: Mapping[str, Array | str],
    ) -> None:
        """Complete the file and give it its name.

        Parameters
        ----------
        attributes
            Attributes of the file; mappings and lists are stored as JSON.
        metadata
            Written below ``metadata/``; strings as bytes, as D4RL does.

        Raises
        ------
        InputError
            ``OUTPUT_EXISTS`` when `path` has appeared meanwhile.
        GearError
            ``OUTPUT_WRITE``.
        """
        details: dict[str, Array | str] = {
            "episode_maker": np.array(self.makers, dtype=np.int32),
            "episode_reset_seed": np.array(self.seeds, dtype=np.int64),
            **metadata,
        }
        self.publish(attributes, {f"{METADATA}/{k}": v for k, v in details.items()})

    @property
    def mean_return(self) -> float:
        """Mean of the episodes' stored returns; NaN without episodes."""
        return math.fsum(self.returns) / len(self.returns) if self.returns else math.nan
