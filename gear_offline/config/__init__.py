"""The recipe: typed sections (`sections`), the whole (`recipe`), files and overrides (`files`)."""
