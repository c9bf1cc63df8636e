"""`gear-offline strategies`: what sampling strategies draw from a recipe's data, and teach."""

from __future__ import annotations

from pathlib import Path

from typer import Option

from gear_offline.cli.values import Json, Overrides, Quiet, RecipeName, print_json


def strategies(
    recipe: RecipeName,
    overrides: Overrides = None,
    strategies: str | None = Option(
        None,
        help="Comma-separated, options after colons: uniform_steps,top_k:k=50; or a YAML file.",
    ),
    train: bool = Option(
        False, "--train", help="Train each strategy as well, and compare the returns."
    ),
    seeds: int | None = Option(None, help="Runs of each strategy, with --train; default 3."),
    parallel: int | None = Option(None, min=1, help="Runs at a time, with --train."),
    exact: bool = Option(False, "--exact", help="On a GPU, give each run the bits of one alone."),
    everything: bool = Option(False, "--all", help="Print all columns."),
    out: Path | None = Option(None, help="Folder of page and runs; default runs/NAME-strategies."),
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare sampling strategies: what they draw and, with --train, what is learnt from it."""
    from gear_offline.config.recipe import load_recipe
    from gear_offline.errors import InputError

    given = {"--seeds": seeds is not None, "--parallel": parallel is not None, "--exact": exact}
    for option, is_given in given.items():
        if is_given and not train:
            raise InputError("USAGE", f"{option} is for --train", remedy="add --train")
    whole = load_recipe(recipe, overrides or ())

    from gear_offline.analysis.page import print_comparison
    from gear_offline.analysis.strategies import compare_strategies

    folder = out or Path("runs") / f"{whole.name}-strategies"
    comparison = compare_strategies(
        whole,
        strategies,
        train=train,
        seeds=3 if seeds is None else seeds,
        out=folder,
        parallel=parallel,
        exact=exact,
        quiet=quiet,
    )
    if as_json:
        print_json(comparison.to_json())
    else:
        print_comparison(comparison, everything=everything)
        print(folder / "strategies.html")
