"""Readers of foreign formats; `open_source` picks one from what the user typed."""
