"""Figures of the documentation, each from a command of its own; not installed."""
