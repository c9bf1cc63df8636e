"""What the shell completes beside commands and options: recipes, runs, options of recipes.

Called at each press of TAB, so nothing here loads torch.
"""

from __future__ import annotations

import os
from glob import escape, glob


def complete_recipe(incomplete: str) -> list[str]:
    """Return names of recipes, recipe files and runs that begin so."""
    from gear_offline.config.files import recipe_paths

    names = [name for name in recipe_paths() if name.startswith(incomplete)]
    return [*names, *sorted(glob(f"{escape(incomplete)}*.yaml")), *complete_run(incomplete)]


def complete_run(incomplete: str) -> list[str]:
    """Return run directories that begin so, also those one folder further down."""
    below = ("*/recipe.yaml", "*/*/recipe.yaml")
    found = [path for end in below for path in glob(escape(incomplete) + end)]
    return sorted(os.path.dirname(path) for path in found)


def complete_option(incomplete: str) -> list[str]:
    """Return the options of recipes that begin so, with their ``=``."""
    from gear_offline.config.problems import dotted_fields
    from gear_offline.config.recipe import Recipe

    return [f"{name}=" for name in dotted_fields(Recipe) if f"{name}=".startswith(incomplete)]
