"""Foreign data become a dataset: `conversion` checks, plans and merges, `shards` writes."""

from gear_offline.convert.conversion import convert

__all__ = ["convert"]
