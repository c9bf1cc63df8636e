"""The command line: parsing only; each command calls one function of the package.

Results go to stdout, progress and messages to stderr.  Exit code 0 means done, 2 wrong usage or
bad input, 130 stopped by the user, 1 anything else.  An error is one line,
``error[CODE]: what, where; remedy``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

import gear_offline
from gear_offline.cli.command import INTERRUPTED_BY_USER
from gear_offline.cli.errors import tell
from gear_offline.cli.examples import examples
from gear_offline.cli.listing import print_names
from gear_offline.cli.plan import plan
from gear_offline.cli.strategies import strategies
from gear_offline.cli.sweep import sweep
from gear_offline.cli.values import (
    parse_count,
    parse_list,
    parse_numbers,
    parse_shares,
    parse_size,
)
from gear_offline.core.text import show_error

__all__ = ["main"]

app = typer.Typer(
    name="gear-offline",
    help="Offline-RL datasets as GEAR shards, and Decision Transformers trained from them.",
    no_args_is_help=True,
    epilog=examples(""),
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
recipes_app = typer.Typer(
    no_args_is_help=True, help="List, copy and check recipes.", epilog=examples("recipes")
)
app.add_typer(recipes_app, name="recipes")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no messages.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing target.")]
WHOLE = "<int>"  # read by `parse_count`, which takes 1e5 too


def _print_json(document: Any) -> None:
    print(json.dumps(document, indent=2, allow_nan=False))


def _version(asked: bool) -> None:
    if asked:
        print(f"gear-offline {gear_offline.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    """Offline-RL datasets as GEAR shards, and Decision Transformers trained from them."""


@app.command(epilog=examples("convert"))
def convert(
    source: Annotated[
        str,
        typer.Argument(
            help="HDF5 file or a folder of them, Minari or GEAR directory, d4rl:NAME, minari:ID."
        ),
    ],
    out: Annotated[Path, typer.Argument(help="Directory of GEAR shards to make.")],
    shard_size: Annotated[str, typer.Option(help="Target bytes of a shard.")] = "256MiB",
    workers: Annotated[int, typer.Option(min=1, help="Processes that write shards.")] = 1,
    columns: Annotated[
        str | None,
        typer.Option(help="Columns to keep, comma-separated, NEW=OLD renames; default all."),
    ] = None,
    discrete: Annotated[
        str | None,
        typer.Option(help="Float columns of whole numbers to store as integers, e.g. actions."),
    ] = None,
    rule: Annotated[
        str | None, typer.Option(help="Episode boundary rule, if the detected one is wrong.")
    ] = None,
    environment: Annotated[
        str | None, typer.Option(help="Gymnasium id, if the source does not say it.")
    ] = None,
    reference: Annotated[
        str | None, typer.Option(help="D4RL name whose reference scores apply.")
    ] = None,
    allow_nonfinite: Annotated[
        bool, typer.Option("--allow-nonfinite", help="Accept NaN and Inf values.")
    ] = False,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Convert a dataset to GEAR shards."""
    from gear_offline.convert import convert as run
    from gear_offline.core.progress import say
    from gear_offline.evaluation.environment_ids import unregistered

    run(
        source,
        out,
        rule=rule,
        shard_bytes=parse_size(shard_size),
        workers=workers,
        columns=parse_list(columns, "observations,actions"),
        discrete=parse_list(discrete, "actions") or (),
        allow_nonfinite=allow_nonfinite,
        overwrite=overwrite,
        environment=environment,
        reference=reference,
        quiet=quiet,
    )
    if environment is not None and (problem := unregistered(environment)):
        say(f"warning: {problem}", quiet=quiet)
    print(out)


@app.command(epilog=examples("export"))
def export(
    dataset: Annotated[Path, typer.Argument(help="Directory of GEAR shards.")],
    out: Annotated[Path, typer.Argument(help="HDF5 file to write, in D4RL's layout.")],
    columns: Annotated[
        str | None, typer.Option(help="Columns to keep, comma-separated; default all.")
    ] = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Write a dataset as one HDF5 file in D4RL's layout."""
    from gear_offline.export import export_hdf5

    picked = parse_list(columns, "observations,actions")
    print(export_hdf5(dataset, out, columns=picked, overwrite=overwrite, quiet=quiet))


@app.command(short_help="Show columns, statistics and digests.", epilog=examples("inspect"))
def inspect(
    dataset: Annotated[Path, typer.Argument(help="Directory of GEAR shards.")],
    verify: Annotated[
        bool, typer.Option(help="Check the digest of every block, or of the manifest alone.")
    ] = True,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show columns, statistics, histograms and digest state of a dataset."""
    from gear_offline.dataset.inspect import inspect as run
    from gear_offline.dataset.inspect import print_inspection

    document = run(dataset, verify=verify, quiet=quiet or as_json)
    if as_json:
        _print_json(document)
    else:
        print_inspection(document)


@app.command(epilog=examples("collect"))
def collect(
    environment: Annotated[str, typer.Argument(help="Gymnasium id, e.g. Hopper-v5.")],
    out: Annotated[Path, typer.Argument(help="HDF5 file to write, in D4RL's layout.")],
    policy: Annotated[
        str,
        typer.Option(
            help="random; ars (linear, trained on the spot); sb3:PPO or sbx:TQC; a policy file."
        ),
    ] = "random",
    quality: Annotated[
        str | None,
        typer.Option(help="With ars: expert, medium, replay, medium-expert or mixed."),
    ] = None,
    mix: Annotated[
        str | None,
        typer.Option(help="Parts and shares instead of a quality: replay=1,level:0.5=1,expert=2."),
    ] = None,
    steps: Annotated[
        str, typer.Option(metavar=WHOLE, help="Record at least so many steps.")
    ] = "100000",
    exact: Annotated[
        bool, typer.Option("--exact", help="Cut the last episode at --steps, as D4RL's files.")
    ] = False,
    environments: Annotated[int, typer.Option(min=1, help="Environments a process.")] = 8,
    action_noise: Annotated[
        float, typer.Option(min=0, help="Gaussian noise, in half ranges of the action.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Names every random stream.")] = 0,
    train_steps: Annotated[
        str | None,
        typer.Option(
            metavar=WHOLE,
            help="Environment steps of training; the iteration that reaches them is finished.",
        ),
    ] = None,
    gate: Annotated[
        float | None, typer.Option(help="Mean return the best maker must reach, else no file.")
    ] = None,
    save_policy: Annotated[
        Path | None, typer.Option(help="With ars: write the best policy here.")
    ] = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Make a dataset with Gymnasium: real episodes in D4RL's layout."""
    from gear_offline.collect import collect as run

    report = run(
        environment,
        out,
        policy=policy,
        quality=quality,
        mix=parse_shares(mix),
        steps=parse_count(steps, "--steps") or 0,
        exact_steps=exact,
        environments=environments,
        action_noise=action_noise,
        seed=seed,
        train_steps=parse_count(train_steps, "--train-steps"),
        gate=gate,
        save_policy=save_policy,
        overwrite=overwrite,
        quiet=quiet,
    )
    if as_json:
        _print_json(report.to_json())
    else:
        print(report.path)


@recipes_app.command("ls", epilog=examples("recipes ls"))
def recipes_ls(as_json: Json = False) -> None:
    """List the recipes that come with gear_offline."""
    from gear_offline.config.recipe import list_recipes

    found = list_recipes()
    if as_json:
        _print_json([{"name": item.name, "description": item.description} for item in found])
    else:
        print_names([(item.name, item.description) for item in found], width=32)


@recipes_app.command("cp", epilog=examples("recipes cp"))
def recipes_cp(
    name: Annotated[str, typer.Argument(help="Name from `recipes ls`.")],
    target: Annotated[Path, typer.Argument(help="File or directory to write.")] = Path("."),
) -> None:
    """Copy a recipe to a file of your own."""
    from gear_offline.config.recipe import copy_recipe

    print(copy_recipe(name, target))


@recipes_app.command("validate", epilog=examples("recipes validate"))
def recipes_validate(
    recipe: Annotated[str, typer.Argument(help="Recipe name or file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value changes, e.g. train.steps=1000.")
    ] = None,
) -> None:
    """Check a recipe and print it with every default filled in."""
    from gear_offline.runs.checks import validate_recipe

    print(validate_recipe(recipe, overrides or ()).to_yaml(), end="")


@app.command(epilog=examples("train"))
def train(
    recipe: Annotated[str, typer.Argument(help="Recipe name or file, or a run directory.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value changes, e.g. train.steps=1000.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Run directory; default runs/NAME-sSEED, or the run that is resumed."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Train a Decision Transformer from a recipe."""
    from gear_offline.config.recipe import load_recipe
    from gear_offline.runs.directory import run_in
    from gear_offline.runs.trainer import train as run

    if resume and out is None:
        out = run_in(recipe)  # a run that is named goes on where it lies
    path = run(load_recipe(recipe, overrides or ()), out=out, resume=resume, quiet=quiet)
    if os.environ.get("RANK", "0") == "0":  # torchrun starts several of us
        print(path)


@app.command(epilog=examples("evaluate"))
def evaluate(
    run: Annotated[Path, typer.Argument(help="Run directory or checkpoint.")],
    targets: Annotated[
        str | None, typer.Option(help="Asked returns, comma-separated; default the recipe's.")
    ] = None,
    episodes: Annotated[str | None, typer.Option(metavar=WHOLE, help="Episodes a target.")] = None,
    environment: Annotated[str | None, typer.Option(help="Gymnasium id.")] = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="last, best or a step number; default last.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the first episode.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    out: Annotated[
        Path | None, typer.Option(help="File for the result; default evaluation.json of the run.")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Roll out a trained run at several asked returns and score it."""
    from gear_offline.evaluation.run_evaluation import evaluate_run, print_run

    report = evaluate_run(
        run,
        targets=parse_numbers(targets),
        episodes=parse_count(episodes, "--episodes"),
        environment=environment,
        checkpoint=checkpoint,
        seed=seed,
        device=device,
        out=out,
        quiet=quiet,
    )
    if as_json:
        _print_json(report.to_json())
    else:
        print_run(report)


@app.command(short_help="Show what is installed and what will run.", epilog=examples("doctor"))
def doctor(as_json: Json = False) -> None:
    """Show what is installed, what is missing, and which path each feature will take."""
    from gear_offline.doctor import diagnose, print_diagnosis

    diagnosis = diagnose()
    if as_json:
        _print_json(diagnosis)
    else:
        print_diagnosis(diagnosis)
    if not diagnosis["healthy"]:
        raise typer.Exit(1)


app.command(short_help="Compare what strategies draw, and teach.", epilog=examples("strategies"))(
    strategies
)
app.command(short_help="Predict what a recipe needs on a cluster.", epilog=examples("plan"))(plan)
app.command(short_help="Train several seeds and settings as one.", epilog=examples("sweep"))(sweep)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code (`sys.exit` is the caller's)."""
    arguments = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in arguments
    arguments = [a for a in arguments if a != "--debug"]  # anywhere on the line
    try:
        result = app(args=arguments, prog_name="gear-offline", standalone_mode=False)
        sys.stdout.flush()  # here its errors can still be told
        if result == INTERRUPTED_BY_USER:  # typer's answer to Ctrl-C
            show_error("INTERRUPTED", "stopped by the user")
        return result if isinstance(result, int) else 0
    except KeyboardInterrupt:
        show_error("INTERRUPTED", "stopped by the user")
        return INTERRUPTED_BY_USER
    except BrokenPipeError:
        sys.stderr.close()  # nobody reads any more; Python would complain at exit
        return 1
    except Exception as error:
        return tell(error, debug)
