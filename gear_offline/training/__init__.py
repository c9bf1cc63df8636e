"""One step and its state."""
