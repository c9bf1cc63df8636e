"""`gear-offline sweep`: many runs of a recipe as one."""

from __future__ import annotations

from pathlib import Path

from typer import Argument, Exit, Option

from gear_offline.cli.values import Json, Quiet, RecipeName, print_json


def sweep(
    recipe: RecipeName,
    overrides: list[str] | None = Argument(
        None, metavar="KEY=VALUE", help="Options to change; key=a,b,c: every combination is a run."
    ),
    seeds: str | None = Option(None, help="Number of seeds from 0 on (8), or a list (3,5,7)."),
    out: Path | None = Option(None, help="Sweep directory; default runs/NAME-sweep."),
    parallel: int | None = Option(None, min=1, help="Runs at a time; default: as many as pay off."),
    exact: bool = Option(False, "--exact", help="On a GPU, give each run the bits of one alone."),
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a recipe with several seeds and settings; the same command again goes on."""
    from gear_offline.sweep.trials import make_trials, parse_options, parse_seeds

    options = parse_options(overrides or ())
    numbers = None if seeds is None else parse_seeds(seeds)
    make_trials(recipe, options, numbers)  # a typo is told before torch is loaded

    from gear_offline.sweep.report import print_sweep
    from gear_offline.sweep.run import sweep as run_sweep

    result = run_sweep(
        recipe, options, seeds=numbers, out=out, parallel=parallel, exact=exact, quiet=quiet
    )
    if as_json:
        print_json(result.to_json())
    elif quiet:
        print(result.path)
    else:
        print_sweep(result)
        print(result.path)
    if not result.is_complete:
        raise Exit(1)
