"""The recipe: typed sections, files, checks."""
