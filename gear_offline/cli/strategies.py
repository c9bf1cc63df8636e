"""`gear-offline strategies`: what selection strategies draw from a recipe's data."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer


def strategies(
    recipe: Annotated[str, typer.Argument(help="Recipe name or file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value changes, e.g. loader.batch_size=256.")
    ] = None,
    strategies: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated, options after colons: uniform_steps,top_k:k=50; or a YAML file."
        ),
    ] = None,
    train: Annotated[
        bool, typer.Option("--train", help="Train each strategy as well, and compare the scores.")
    ] = False,
    seeds: Annotated[
        int | None, typer.Option(help="Runs of each strategy, with --train; default 3.")
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(help="Return to reach; default 90 % of the recipe's own strategy's best."),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            help="Processes that play policies; 0: this one, after training; default: the cores."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of page and runs; default runs/NAME-strategies.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document on stdout.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no messages.")] = False,
) -> None:
    """Compare what selection strategies draw and, with --train, what is learnt from it."""
    from gear_offline.analysis.candidates import parse_candidates
    from gear_offline.analysis.learning_text import print_learning
    from gear_offline.analysis.strategies import compare, write_comparison
    from gear_offline.analysis.text import print_comparison
    from gear_offline.analysis.train import check_request, hold_comparison, train_strategies
    from gear_offline.config.recipe import load_recipe
    from gear_offline.core.files import check_new_folder
    from gear_offline.errors import InputError

    given = {"--seeds": seeds, "--threshold": threshold, "--jobs": jobs}
    for option, value in given.items():
        if value is not None and not train:
            raise InputError("USAGE", f"{option} is for --train", remedy="add --train")
    found = load_recipe(recipe, overrides or ())
    folder = out or Path("runs") / f"{found.name}-strategies"
    runs = 3 if seeds is None else seeds
    check_new_folder(folder)  # before anything is drawn
    if train:
        check_request(found, seeds=runs, jobs=jobs, threshold=threshold)
    # held before anything is drawn or printed
    with hold_comparison(folder) if train else nullcontext():
        document = compare(found, strategies=strategies, quiet=quiet)

        def keep(training: dict[str, Any]) -> None:
            write_comparison({**document, "training": training}, folder)

        if train:
            bad = {row["label"] for row in document["strategies"] if "error" in row}
            candidates = [c for c in parse_candidates(strategies, found) if c.label not in bad]
            document["training"] = train_strategies(
                found,
                candidates,
                out=folder,
                seeds=runs,
                jobs=jobs,
                threshold=threshold,
                quiet=quiet,
                on_stop=keep,
            )
        _, page = write_comparison(document, folder)
    if as_json:
        print(json.dumps(document, indent=2, allow_nan=False))
        return
    print_comparison(document)
    if train:
        print_learning(document["training"])
    print(page)
