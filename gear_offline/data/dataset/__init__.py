"""The dataset on disk: GEAR shards and their manifest (bytes: docs/reference/format.md).

`dataset.open_dataset` opens, verifies and reads; `manifest` says what a dataset holds, `shard` how
its files are laid out; `schema` has columns and the index of episodes.
"""
