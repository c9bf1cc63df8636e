"""Readers of foreign formats: HDF5 files, D4RL, Minari, arrays, and what is combined of them.

`uri.open_source` picks a reader from what the user typed; `base` says what every source offers,
`episode_ends` where episodes end, `hdf5` reads files from outside without trusting them.
"""

from gear_offline.sources.arrays import from_arrays, from_episodes
from gear_offline.sources.base import Source, SourceInfo, iter_episodes
from gear_offline.sources.combine import join_sources, pick_episodes
from gear_offline.sources.uri import open_source

__all__ = [
    "Source",
    "SourceInfo",
    "from_arrays",
    "from_episodes",
    "iter_episodes",
    "join_sources",
    "open_source",
    "pick_episodes",
]
