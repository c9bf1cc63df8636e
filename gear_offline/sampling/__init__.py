"""Which segments make up a batch."""
