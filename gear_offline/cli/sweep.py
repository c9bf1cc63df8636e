"""`gear-offline sweep`: many runs of a recipe as one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer


def sweep(
    recipe: Annotated[str, typer.Argument(help="Recipe name or file.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="key=value changes, or key=a,b,c: every combination is a run."),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(help="Number of seeds from 0 on (8), or a list (3,5,7).")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Sweep directory; default runs/NAME-sweep.")
    ] = None,
    mode: Annotated[
        str, typer.Option(help="auto, streams, stacked, processes or serial.")
    ] = "auto",
    parallel: Annotated[
        int | None, typer.Option(min=1, help="Runs at a time; default by mode.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document on stdout.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no messages.")] = False,
) -> None:
    """Train a recipe with several seeds and settings; the same command again goes on."""
    from gear_offline.sweep.points import parse_points, parse_seeds
    from gear_offline.sweep.report import print_sweep, sweep_document
    from gear_offline.sweep.sweep import default_sweep_path, run_sweep

    points = parse_points(recipe, overrides or (), seeds=parse_seeds(seeds))
    path = out or default_sweep_path(points[0])
    chosen: Any = mode
    results = run_sweep(points, path, mode=chosen, parallel=parallel, quiet=quiet)
    if as_json:
        print(json.dumps(sweep_document(path), indent=2, allow_nan=False))
    else:
        if not quiet:
            print_sweep(path)
        print(path)
    if any(result.status != "complete" for result in results):
        raise typer.Exit(1)
