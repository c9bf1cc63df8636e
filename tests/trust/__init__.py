"""Checks of docs/explanation/trust.md that need processes of their own: corpus, fuzzing, kills, soak."""
