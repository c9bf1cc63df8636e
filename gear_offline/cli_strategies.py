"""`gear-offline strategies`: what selection strategies draw from a recipe's data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def strategies(
    recipe: Annotated[str, typer.Argument(help="Recipe name or file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value changes, e.g. loader.batch_size=256.")
    ] = None,
    strategies: Annotated[
        str | None,
        typer.Option(help="Comma-separated, options after colons: uniform_steps,top_k:k=50."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the page; default runs/NAME-strategies.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document on stdout.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no messages.")] = False,
) -> None:
    """Compare what selection strategies draw, without training."""
    from gear_offline.recipe import load_recipe
    from gear_offline.strategies import compare, write_comparison
    from gear_offline.strategies_text import print_comparison

    found = load_recipe(recipe, overrides or ())
    document = compare(found, strategies=strategies, quiet=quiet)
    _, page = write_comparison(document, out or Path("runs") / f"{found.name}-strategies")
    if as_json:
        print(json.dumps(document, indent=2, allow_nan=False))
    else:
        print_comparison(document)
        print(page)
