"""Programs behind docs/explanation/trust.md: kills, flipped bits, fuzzed HDF5."""
