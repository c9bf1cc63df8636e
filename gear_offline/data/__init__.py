"""Data: readers of foreign formats, conversion, datasets of shards, export."""
