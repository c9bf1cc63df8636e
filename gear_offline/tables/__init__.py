"""Rows in memory, on GPUs, on disk."""
