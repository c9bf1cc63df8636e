"""Ranks, shards of nodes, assignment, exchange of rows."""
