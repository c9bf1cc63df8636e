"""The format: schema, shards, manifest, statistics; open, verify, inspect."""
