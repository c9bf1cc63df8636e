"""Files, memory, progress, text: what every room needs."""
