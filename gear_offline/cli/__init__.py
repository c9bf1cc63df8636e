"""Commands: parsing only."""
