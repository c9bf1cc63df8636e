"""Foreign data become a dataset: `conversion` checks, plans and merges, `shards` writes."""
