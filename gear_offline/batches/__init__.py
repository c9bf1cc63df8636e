"""Batches: which segments are drawn, and the tables that hold their rows."""
