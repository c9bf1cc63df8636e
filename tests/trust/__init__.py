"""Checks of docs/reliability.md that need processes of their own: corpus, fuzzing, kills, soak."""
