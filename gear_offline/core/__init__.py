"""Files, memory, signals, text, the Hub: what every room needs."""
