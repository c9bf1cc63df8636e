"""Make real data: play policies of known quality in Gymnasium and record them in D4RL's layout."""

from gear_offline.collect.collection import CollectReport, collect
from gear_offline.collect.makers import QUALITIES, MakerReport

__all__ = ["QUALITIES", "CollectReport", "MakerReport", "collect"]
