"""Readers of foreign formats, and sources that are combined of others.

`formats` lists the readers, `uri` opens what a user names, `base` says what every source offers,
`episode_ends` where episodes end; `hdf5` reads files from outside without trusting them; `combine`
and `edit` change a source.
"""

from gear_offline.data.sources.arrays import from_arrays, from_episodes
from gear_offline.data.sources.base import Source, SourceInfo
from gear_offline.data.sources.combine import join_sources, pick_episodes
from gear_offline.data.sources.uri import open_source

__all__ = [
    "Source",
    "SourceInfo",
    "from_arrays",
    "from_episodes",
    "join_sources",
    "open_source",
    "pick_episodes",
]
