"""The command line: parsing only; each command calls one function of the package.

Results go to stdout, progress and messages to stderr.  Exit code 0 means done, 2 wrong usage or
bad input, 130 stopped by the user, 1 anything else.  An error is one line,
``error[CODE]: what (where); remedy``.  A recipe is read before anything that loads torch, so that
a typo is answered at once.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import typer
from typer import Argument, Option

import gear_offline
from gear_offline.cli.errors import tell
from gear_offline.cli.plan import plan
from gear_offline.cli.strategies import strategies
from gear_offline.cli.sweep import sweep
from gear_offline.cli.values import (
    Json,
    Overrides,
    Overwrite,
    Quiet,
    RecipeName,
    examples,
    parse_count,
    parse_list,
    parse_numbers,
    parse_shares,
    parse_size,
    print_json,
)

__all__ = ["main"]

ABOUT = "Offline-RL datasets as GEAR shards, and Decision Transformers trained from them."
COUNT = "COUNT"  # read by `parse_count`, which takes 1e5 too
RECIPE_GROUPS = {
    "First runs": ("smoke", "cartpole", "demo"),
    "Your own data": ("paper",),
    "The paper's tasks (D4RL)": tuple(
        f"{body}-medium{rest}"
        for body in ("hopper", "halfcheetah", "walker2d")
        for rest in ("", "-replay", "-expert")
    ),
    "Images": ("atari-pong",),
    "Several tasks": ("multitask-smoke", "multitask-locomotion"),
    "Larger models": ("dt_1m", "dt_15m", "dt_87m", "dt_200m", "dt_1b"),
}

app = typer.Typer(
    name="gear-offline",
    help=ABOUT,
    no_args_is_help=True,
    epilog=examples("recipes ls", "train smoke", "evaluate runs/smoke-s0", "help train"),
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
recipes_app = typer.Typer(no_args_is_help=True, help="List, show, copy and check recipes.")


def _version(asked: bool) -> None:
    if asked:
        print(f"gear-offline {gear_offline.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: bool = Option(
        False, "--version", "-V", callback=_version, is_eager=True, help="Print the version."
    ),
    debug: bool = Option(False, "--debug", help="Show tracebacks of errors."),
) -> None:
    """Offline-RL datasets as GEAR shards, and Decision Transformers trained from them."""


@app.command(
    rich_help_panel="Data",
    epilog=examples(
        "convert mine.hdf5 data/mine",
        "convert d4rl:hopper-medium-v2 data/hopper",
        "convert mine.hdf5 data/mine --columns observations=obs,actions",
    ),
)
def convert(
    source: str = Argument(
        ..., help="HDF5 file or a folder of them, Minari or GEAR directory, d4rl:NAME, minari:ID."
    ),
    out: Path = Argument(..., help="Directory of GEAR shards to make."),
    shard_size: str = Option("256MiB", help="Target bytes of a shard."),
    workers: int = Option(1, min=1, help="Processes that write shards."),
    columns: str | None = Option(
        None, help="Columns to keep, comma-separated, NEW=OLD renames; default all."
    ),
    discrete: str | None = Option(
        None, help="Float columns of whole numbers to store as integers, e.g. actions."
    ),
    rule: str | None = Option(None, help="Episode boundary rule, if the detected one is wrong."),
    environment: str | None = Option(
        None, "--environment", "--env", help="Gymnasium id, if not in the file."
    ),
    reference: str | None = Option(None, help="D4RL name whose reference scores apply."),
    allow_nonfinite: bool = Option(False, "--allow-nonfinite", help="Accept NaN and Inf values."),
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Convert a dataset to GEAR shards."""
    from gear_offline.convert.conversion import convert as run
    from gear_offline.evaluation.environments import unregistered
    from gear_offline.progress import say

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


@app.command(
    rich_help_panel="Data",
    epilog=examples(
        "inspect data/mine", "inspect data/mine --full", "inspect data/mine --no-verify --json"
    ),
)
def inspect(
    dataset: Path = Argument(..., help="Directory of GEAR shards."),
    verify: bool = Option(True, help="Check the digest of every block, or of the manifest alone."),
    full: bool = Option(
        False, "--full", help="Also histograms, and what the source says of itself."
    ),
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show columns, statistics and digests of a dataset."""
    from gear_offline.dataset.inspect import inspect as run
    from gear_offline.dataset.inspect import print_inspection

    document = run(dataset, verify=verify, quiet=quiet or as_json)
    if as_json:
        print_json(document)
    else:
        print_inspection(document, full=full)


@app.command(
    rich_help_panel="Data",
    epilog=examples(
        "collect Pendulum-v1 pendulum.hdf5",
        "collect Hopper-v5 hopper.hdf5 --policy ars --quality mixed",
    ),
)
def collect(
    environment: str = Argument(..., help="Gymnasium id, e.g. Hopper-v5."),
    out: Path = Argument(..., help="HDF5 file to write, in D4RL's layout."),
    policy: str = Option(
        "random",
        help="random; ars (linear, trained on the spot); sb3:PPO or sbx:TQC; a policy file.",
    ),
    quality: str | None = Option(
        None, help="With ars: expert, medium, replay, medium-expert or mixed."
    ),
    mix: str | None = Option(
        None, help="Parts and shares instead of a quality: replay=1,level:0.5=1,expert=2."
    ),
    steps: str = Option("100000", metavar=COUNT, help="Record at least so many steps."),
    exact: bool = Option(
        False, "--exact", help="Cut the last episode at --steps, as D4RL's files."
    ),
    action_noise: float = Option(0.0, min=0, help="Gaussian noise, in half ranges of the action."),
    seed: int = Option(0, help="Random seed."),
    train_steps: str | None = Option(
        None, metavar=COUNT, help="Environment steps of training the policy."
    ),
    gate: float | None = Option(
        None, help="Mean return that the best policy must reach, else no file."
    ),
    save_policy: Path | None = Option(None, help="With ars: write the best policy here."),
    overwrite: Overwrite = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Make a dataset with Gymnasium: real episodes in D4RL's layout."""
    from gear_offline.collect.collection import collect as run

    report = run(
        environment,
        out,
        policy=policy,
        quality=quality,
        mix=parse_shares(mix),
        steps=parse_count(steps, "--steps") or 0,
        exact_steps=exact,
        action_noise=action_noise,
        seed=seed,
        train_steps=parse_count(train_steps, "--train-steps"),
        gate=gate,
        save_policy=save_policy,
        overwrite=overwrite,
        quiet=quiet,
    )
    if as_json:
        print_json(report.to_json())
    else:
        print(report.path)


@app.command(rich_help_panel="Data", epilog=examples("export data/mine mine.hdf5"))
def export(
    dataset: Path = Argument(..., help="Directory of GEAR shards."),
    out: Path = Argument(..., help="HDF5 file to write, in D4RL's layout."),
    columns: str | None = Option(None, help="Columns to keep, comma-separated; default all."),
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Write a dataset as one HDF5 file in D4RL's layout."""
    from gear_offline.export import export_hdf5

    picked = parse_list(columns, "observations,actions")
    print(export_hdf5(dataset, out, columns=picked, overwrite=overwrite, quiet=quiet))


@recipes_app.command("ls", epilog=examples("recipes ls", "recipes ls --json"))
def recipes_ls(as_json: Json = False) -> None:
    """List the recipes that come with gear-offline."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from gear_offline.config.files import recipe_descriptions

    entries = recipe_descriptions()
    groups = {title: [n for n in names if n in entries] for title, names in RECIPE_GROUPS.items()}
    if as_json:
        print_json(
            [
                {"name": name, "description": entries[name], "group": title}
                for title, names in groups.items()
                for name in names
            ]
        )
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("recipe", no_wrap=True)
    table.add_column("what it is for")
    for title, names in groups.items():
        table.add_row(f"[bold]{title}[/]")
        for name in names:
            table.add_row(f"  {name}", entries[name], end_section=name == names[-1])
    Console().print(table)


@recipes_app.command("show", epilog=examples("recipes show hopper-medium"))
def recipes_show(recipe: RecipeName) -> None:
    """Print the file of a recipe: what it changes of its base, and why."""
    from gear_offline.config.files import find_recipe

    print(find_recipe(recipe).read_text("utf-8"), end="")


@recipes_app.command(
    "cp", epilog=examples("recipes cp hopper-medium", "recipes cp hopper-medium mine.yaml")
)
def recipes_cp(
    name: str = Argument(..., metavar="RECIPE", help="Name from `recipes ls`."),
    target: Path = Argument(Path("."), help="File or directory to write."),
) -> None:
    """Copy a recipe to a file of your own."""
    from gear_offline.config.files import copy_recipe

    print(copy_recipe(name, target))


@recipes_app.command(
    "validate",
    epilog=examples("recipes validate smoke", "recipes validate mine.yaml train.steps=1e4"),
)
def recipes_validate(recipe: RecipeName, overrides: Overrides = None) -> None:
    """Check a recipe and print it with every default filled in."""
    from gear_offline.config.recipe import load_recipe

    whole = load_recipe(recipe, overrides or ())
    from gear_offline.runs.checks import check_recipe

    check_recipe(whole, where=recipe)
    print(whole.to_yaml(), end="")


app.add_typer(recipes_app, name="recipes", rich_help_panel="Train")


@app.command(
    rich_help_panel="Train",
    epilog=examples(
        "train smoke",
        "train hopper-medium train.steps=20000",
        "train paper data.path=data/mine train.steps=2000",
        "train runs/hopper-medium-s0 --resume",
    ),
)
def train(
    recipe: RecipeName,
    overrides: Overrides = None,
    out: Path | None = Option(
        None, metavar="RUN", help="Run directory; default runs/NAME-sSEED, or the resumed run."
    ),
    resume: bool = Option(False, "--resume", help="Continue from the last checkpoint."),
    quiet: Quiet = False,
) -> None:
    """Train a Decision Transformer from a recipe."""
    from gear_offline.config.recipe import load_recipe
    from gear_offline.progress import say

    is_first = os.environ.get("RANK", "0") == "0"  # torchrun starts several of us
    whole = load_recipe(recipe, overrides or ())
    rising = whole.optimizer.warmup(whole.train.steps)
    warmup = f", the first {rising:,} of them warm-up" if rising else ""
    say(
        f"{whole.name}: {whole.train.steps:,} steps{warmup}; seed {whole.seed}",
        quiet=quiet or not is_first,
    )
    from gear_offline.evaluation.environments import import_module_of
    from gear_offline.runs.checks import check_recipe
    from gear_offline.runs.directory import run_in

    check_recipe(whole, where=recipe)
    if resume:  # a run's own recipe imports no module of an environment, what is typed here does
        for override in overrides or ():
            key, _, value = override.partition("=")
            if key.endswith("environment"):
                import_module_of(value)
    from gear_offline.runs.loop import train as run  # loads torch

    if resume and out is None:
        out = run_in(recipe)  # a run that is named is resumed where it lies
    path = run(whole, out=out, resume=resume, quiet=quiet)
    if is_first:
        print(path)


@app.command(
    rich_help_panel="Train",
    epilog=examples(
        "evaluate runs/smoke-s0",
        "evaluate runs/hopper-medium-s0 --targets 3600,1800 --episodes 100",
        "evaluate runs/hopper-medium-s0 --checkpoint best --json",
    ),
)
def evaluate(
    run: Path = Argument(..., metavar="RUN", help="Run directory or checkpoint."),
    targets: str | None = Option(
        None, help="Target returns, comma-separated; default the recipe's."
    ),
    episodes: str | None = Option(None, metavar=COUNT, help="Episodes per target."),
    environment: str | None = Option(None, "--environment", "--env", help="Gymnasium id."),
    checkpoint: str | None = Option(None, help="last, best or a step number; default last."),
    seed: int | None = Option(None, help="Seed of the first episode."),
    device: str = Option("auto", help="auto, cpu or cuda."),
    out: Path | None = Option(
        None, help="File for the result; default evaluation.json of the run."
    ),
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Play episodes with a trained policy at several target returns, and score it."""
    asked, count = parse_numbers(targets), parse_count(episodes, "--episodes")
    from gear_offline.runs.evaluate import evaluate as play

    report = play(
        run,
        targets=asked,
        episodes=count,
        environment=environment,
        checkpoint=checkpoint,
        seed=seed,
        device=device,
        out=out,
        quiet=quiet,
    )
    if as_json:
        print_json(report.to_json())
    else:
        report.print()


app.command(
    rich_help_panel="Compare",
    epilog=examples(
        "sweep smoke --seeds 3",
        "sweep smoke --seeds 3,5,7 optimizer.learning_rate=1e-4,3e-4",
    ),
)(sweep)
app.command(
    rich_help_panel="Compare",
    epilog=examples(
        "strategies smoke",
        "strategies hopper-medium --strategies top_percent,top_k:k=50",
        "strategies hopper-medium --train --seeds 5",
    ),
)(strategies)


@app.command(rich_help_panel="Machines", epilog=examples("doctor", "doctor --json"))
def doctor(as_json: Json = False) -> None:
    """Show what is installed, what is missing, and what each feature will use."""
    from gear_offline.doctor import diagnose, print_diagnosis

    diagnosis = diagnose()
    if as_json:
        print_json(diagnosis)
    else:
        print_diagnosis(diagnosis)
    if not diagnosis["healthy"]:
        raise typer.Exit(1)


app.command(
    rich_help_panel="Machines",
    epilog=examples(
        "plan hopper-medium --gpus 4",
        "plan dt_1b --nodes 8 --gpus 8 --data 10TB",
    ),
)(plan)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code (`sys.exit` is the caller's)."""
    arguments = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in arguments
    arguments = [word for word in arguments if word != "--debug"]  # anywhere on the line
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    try:
        result: Any = app(args=arguments, prog_name="gear-offline", standalone_mode=False)
        sys.stdout.flush()  # here its errors can still be told
        if result == 130:  # typer's answer to Ctrl-C
            raise KeyboardInterrupt
        return result if isinstance(result, int) else 0
    except BrokenPipeError:
        sys.stderr.close()  # nobody reads any more; Python would complain at exit
        return 1
    except Exception as error:
        return tell(error, debug)
