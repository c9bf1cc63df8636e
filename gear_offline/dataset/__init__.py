"""The dataset on disk: GEAR shards and their manifest (bytes: docs/reference/format.md).

`dataset.open_dataset` opens, verifies and reads; `manifest` says what a dataset holds, `shard` how
its files are laid out; `schema` has columns and the index of episodes.
"""

from gear_offline.dataset.dataset import Dataset, open_dataset
from gear_offline.dataset.manifest import Manifest
from gear_offline.dataset.schema import ColumnSpec, EpisodeIndex, TableSpec

__all__ = ["ColumnSpec", "Dataset", "EpisodeIndex", "Manifest", "TableSpec", "open_dataset"]
