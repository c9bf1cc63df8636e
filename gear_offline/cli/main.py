"""The command line: parsing only; each command calls one function of the package.

Results go to stdout, progress and messages to stderr.  Exit code 0 means done, 2 wrong usage or
bad input, 130 stopped by the user, 1 anything else, also where every evaluation of a run failed.
An error is one line, ``error[CODE]: what (where); remedy``.  A recipe is read before anything that
loads torch, so that a typo is answered at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer
from typer import Argument, Option

import gear_offline as go
from gear_offline.cli.errors import tell, tell_failures
from gear_offline.cli.values import (
    Axes,
    Command,
    Count,
    Device,
    Environment,
    How,
    Json,
    Model,
    Names,
    Numbers,
    Overrides,
    Overwrite,
    Pairs,
    Quiet,
    Ray,
    RecipeName,
    Run,
    Shift,
    Size,
    alone_on_stdout,
    complete_recipe,
    examples,
    options,
    parse_range,
    show,
)
from gear_offline.core.text import count_text, quote
from gear_offline.distributed import is_first_process
from gear_offline.errors import GearError, InputError, at_the_command_line

FIRST_RECIPES = ("smoke", "cartpole", "demo", "maze-goals", "paper")  # of the list

app = typer.Typer(
    name="gear-offline",
    no_args_is_help=True,
    epilog=examples("recipes ls", "train smoke", "evaluate runs/smoke-s0", "help train"),
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
recipes_app = typer.Typer(no_args_is_help=True, help="List, show, copy and check recipes.")
runs_app = typer.Typer(no_args_is_help=True, help="List runs, show one, compare several.")


def command(panel: str, *lines: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return the decorator of a command in a group of the overview, with its examples."""
    register = app.command(cls=Command, rich_help_panel=panel, epilog=examples(*lines))
    return lambda function: register(alone_on_stdout(function))


def _version(is_given: bool) -> None:
    if is_given:
        print(f"gear-offline {go.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: bool = Option(
        False, "--version", "-V", callback=_version, is_eager=True, help="Print the version."
    ),
    debug: bool = Option(False, "--debug", help="Show tracebacks of errors."),
) -> None:
    """Offline-RL datasets as GEAR shards, and Decision Transformers trained from them."""


@command(
    "Data",
    "convert mine.hdf5 data/mine",
    "convert d4rl:hopper-medium-v2 data/hopper",
    "convert mine.hdf5 data/mine --columns observations=obs,actions",
    "convert mine.hdf5 data/best --where 'return > 1000'",
    "convert mine.hdf5 data/mine --histories learner",
)
def convert(
    source: str = Argument(
        help="File, folder or address, d4rl:NAME, minari:ID, robomimic:FILE#KEY, hub:USER/NAME."
    ),
    out: Path = Argument(help="Directory of GEAR shards to make."),
    shard_bytes: int = Size("256MiB", "--shard-size", help="Target bytes of a shard."),
    workers: int = Option(1, min=1, help="Processes that write shards."),
    ray: Ray = None,
    columns: Any = Names(None, help="Columns to keep, NEW=OLD renames; default all."),
    discrete: Any = Names(None, help="Float columns to store as integers, e.g. actions."),
    rename: Any = Pairs(None, help="New names of columns; all others stay."),
    reader: str | None = Option(
        None, metavar="FILE.py:FUNCTION", help="Yields the episodes of a format of your own."
    ),
    map: str | None = Option(
        None, metavar="FILE.py:FUNCTION", help="Changes columns of each episode."
    ),
    where: list[str] | None = Option(
        None, metavar="EXPRESSION", help="Episodes to keep: return > 1000 and not truncated."
    ),
    histories: str | None = Option(
        None, metavar="COLUMN", help="Numbers the histories of episodes, e.g. of learners."
    ),
    video: str = Option(
        "decode", metavar="decode|keep", help="keep: LeRobot's frames stay in their videos."
    ),
    resize: str | None = Option(
        None, metavar="HEIGHTxWIDTH", help="Size of LeRobot's frames, made in decoding."
    ),
    rule: str | None = Option(None, help="What the flags mean, if what is detected is wrong."),
    ends: str | None = Option(
        None,
        metavar="KIND:COLUMN",
        help="Column that tells where episodes are: starts, lengths, ids, first, last:COLUMN=2.",
    ),
    shift: Any = Shift(None, help="Columns stored so many rows late, e.g. actions=1,rewards=1."),
    environment: str | None = Environment(help="Gymnasium id, if not in the file."),
    environment_options: Any = How(),
    reference: str | None = Option(None, help="D4RL name whose reference scores apply."),
    allow_nonfinite: bool = Option(False, "--allow-nonfinite", help="Accept NaN and Inf values."),
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Convert a dataset to GEAR shards."""
    options = locals() | {"discrete": discrete or ()}
    if where:  # every one of them holds
        options["where"] = " and ".join(f"({text})" for text in where) if where[1:] else where[0]
    go.convert(**options)
    from gear_offline.core.text import say
    from gear_offline.evaluation.environments import explain_unregistered

    if environment is not None and (problem := explain_unregistered(environment)):
        say(f"warning: {problem}")
    show(out)


@command("Data", "inspect data/mine", "inspect data/mine --no-verify --json")
def inspect(
    dataset: str = Argument(help="Directory of GEAR shards, or its address."),
    verify: bool = Option(True, help="Check the digest of every block, or of the manifest alone."),
    full: bool = Option(False, "--full", help="All columns, and what the source says."),
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show columns, statistics and digests of a dataset."""
    from gear_offline.data.dataset.inspect import print_inspection

    document = go.inspect(dataset, verify=verify, quiet=quiet or as_json)
    show(document, as_json, lambda: print_inspection(document, full=full))


@command("Data", "audit data/mine", "audit data/medium-expert --against data/medium")
def audit(
    dataset: str = Argument(help="Directory of GEAR shards, or its address."),
    against: list[str] = Option(
        [], metavar="PATH", help="Another dataset: which episodes are in both? Repeatable."
    ),
    full: bool = Option(False, "--full", help="Read all rows of large data, not a sample."),
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Look for what is wrong in a dataset: boundaries, endings, outliers, repeated episodes."""
    page = go.audit(dataset, against=against, full=full, quiet=quiet or as_json)
    show(page.to_json(), as_json, page.print)


@command(
    "Data",
    "collect Pendulum-v1 pendulum.hdf5",
    "collect Hopper-v5 hopper.hdf5 --policy ars --quality mixed",
)
def collect(
    environment: str = Argument(help="Gymnasium id, e.g. Hopper-v5."),
    out: Path = Argument(help="HDF5 file to write, in D4RL's layout."),
    environment_options: Any = How(),
    policy: str = Option("random", help="random, ars, q_learning, play, sb3:PPO."),
    quality: str | None = Option(None, help="expert, medium, replay, medium-expert or mixed."),
    steps: int = Count("100000", help="Record at least so many steps."),
    exact_steps: bool = Option(
        False, "--exact", help="Cut the last episode at --steps, as D4RL does."
    ),
    action_noise: float = Option(
        0.0, min=0, help="Gaussian, in half ranges; of discrete actions, share of random ones."
    ),
    seed: int = Option(0, min=0, help="Random seed."),
    train_steps: int | None = Count(None, help="Environment steps of training the policy."),
    gate: float | None = Option(None, help="Mean return the policy must reach, else no file."),
    histories: int | None = Count(None, help="Learners, of ars or q_learning, to record."),
    overwrite: Overwrite = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Make a dataset with Gymnasium: real episodes in D4RL's layout."""
    report = go.collect(**options(locals()))
    show(report.to_json(), as_json, lambda: print(report.path))


@command("Data", "export data/mine mine.hdf5")
def export(
    dataset: str = Argument(help="Directory of GEAR shards, or its address."),
    out: Path = Argument(help="HDF5 file to write, in D4RL's layout."),
    columns: Any = Names(None, help="Columns to keep; default all."),
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Write a dataset as one HDF5 file in D4RL's layout."""
    show(go.export_hdf5(dataset, out, columns=columns, overwrite=overwrite, quiet=quiet))


@command("Data", "value data/mine data/valued --with runs/iql-s0")
def value(
    data: str = Argument(help="Directory of GEAR shards, or its address."),
    out: Path = Argument(help="Directory of GEAR shards to make, or NAME.parquet."),
    run: Path = Option(..., "--with", metavar="RUN", help="Run of model iql, or its policy."),
    checkpoint: str | None = Option(None, help="last, best or a step number; default last."),
    device: str = Device("auto", help="auto, cpu or cuda."),
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Write the value and the advantage of each step as columns, by a trained run."""
    show(go.value(**locals()))


@command(
    "Data", "push data/mine hub:USER/NAME", "push runs/hopper-medium-s0 hub:USER/NAME --private"
)
def push(
    what: Path = Argument(help="Dataset, run, checkpoint or policy folder."),
    name: str = Argument(help="hub:USER/NAME, or hub:USER/NAME@BRANCH."),
    task: str | None = Option(None, help="The task to act in, of a run of several."),
    private: bool = Option(False, "--private", help="If it is made: for you alone."),
    model: Model = None,
) -> None:
    """Put a dataset or a policy on the Hugging Face Hub."""
    from gear_offline.artifacts.checkpoint import open_trained
    from gear_offline.core.hub import split_name
    from gear_offline.data.dataset.manifest import is_dataset

    split_name(name, "OUTPUT_WRITE")
    pushed: Any
    if is_dataset(what):
        pushed = go.open_dataset(what, verify=False)
    else:
        if model is None:
            open_trained(what)  # before torch is loaded
        pushed = go.load_policy(what, task, device="cpu", model=model)
    show(pushed.push_to_hub(name, private=private))


app.add_typer(recipes_app, name="recipes", rich_help_panel="Train")


@recipes_app.command("ls", epilog=examples("recipes ls", "recipes ls --json"))
def recipes_ls(as_json: Json = False) -> None:
    """List the recipes that come with gear-offline."""
    from rich.table import Table

    from gear_offline.config.files import recipe_descriptions
    from gear_offline.core.progress import Terminal

    descriptions = recipe_descriptions()
    rows = [{"name": name, "description": text} for name, text in descriptions.items()]
    table = Table("recipe", "what it is for", box=None, pad_edge=False)
    for name in dict.fromkeys((*FIRST_RECIPES, *descriptions)):
        table.add_row(name, descriptions[name])
    show(rows, as_json, lambda: Terminal().print(table))


@recipes_app.command("show", epilog=examples("recipes show hopper-medium"))
def recipes_show(recipe: RecipeName) -> None:
    """Print the file of a recipe: what it changes of its base, and why."""
    from gear_offline.config.files import find_recipe

    print(find_recipe(recipe).read_text("utf-8"), end="")


@recipes_app.command("cp", epilog=examples("recipes cp paper", "recipes cp paper mine.yaml"))
def recipes_cp(
    name: str = Argument(
        metavar="RECIPE", help="Name from `recipes ls`.", autocompletion=complete_recipe
    ),
    target: Path = Argument(Path("."), help="File or directory to write."),
) -> None:
    """Copy a recipe to a file of your own."""
    from gear_offline.config.files import copy_recipe

    print(copy_recipe(name, target))


@recipes_app.command("validate", epilog=examples("recipes validate mine.yaml train.steps=1e4"))
def recipes_validate(recipe: RecipeName, overrides: list[str] = Overrides()) -> None:
    """Check a recipe and print it with every default filled in."""
    checked = go.load_recipe(recipe, overrides)
    from gear_offline.runs.checks import check_recipe

    check_recipe(checked, where=recipe)
    print(checked.to_yaml(), end="")


@command(
    "Train",
    "train smoke",
    "train paper data.path=data/mine train.steps=2000",
    "train runs/hopper-medium-s0 --resume",
    "train runs/a-s0 --checkpoint 4000 'train.skip=[[4100,4160]]'",
)
def train(
    recipe: RecipeName,
    overrides: list[str] = Overrides(),
    out: Path | None = Option(None, metavar="RUN", help="Run directory; default runs/NAME-sSEED."),
    resume: bool = Option(False, "--resume", help="Continue from the last checkpoint."),
    checkpoint: str | None = Option(None, help="Of a run, a step: begin another run with it."),
    quiet: Quiet = False,
) -> None:
    """Train a Decision Transformer from a recipe."""
    trained = go.train(**locals())
    if is_first_process():  # torchrun starts several of us
        show(trained.path)
        from gear_offline.artifacts.records import failure_of, read_evaluations

        if failure := failure_of(read_evaluations(trained.path)):
            remedy = f"mend that; `gear-offline train {quote(trained.path)} --resume` plays again"
            raise GearError("EVALUATION", failure, str(trained.path), remedy)


@command(
    "Train",
    "evaluate runs/smoke-s0",
    "evaluate runs/hopper-medium-s0 --targets 3600,1800 --episodes 100",
    "evaluate runs/hopper-medium-s0 --video hopper.gif",
)
def evaluate(
    run: Path = Run(help="Run directory, checkpoint or policy folder, or hub:USER/NAME."),
    targets: Any = Numbers(None, help="Target returns, comma-separated; default the recipe's."),
    episodes: int | None = Count(None, help="Episodes per target."),
    episodes_of_memory: int | None = Count(None, help="Episodes in a row in each, remembered."),
    sample: bool | None = Option(None, "--sample", help="Draw actions by their probabilities."),
    context_length: int | None = Count(None, help="Steps of a window; default as in training."),
    environment: str | None = Environment(help="Gymnasium id."),
    environment_options: Any = How(),
    checkpoint: str | None = Option(None, help="last, best or a step number; default last."),
    seed: int | None = Option(None, min=0, help="Seed of the first episode."),
    device: str = Device("auto", help="auto, cpu or cuda."),
    out: Path | None = Option(None, help="File for the result; default evaluation.json there."),
    video: Path | None = Option(None, help="Also show first episodes: a new .gif or .mp4 file."),
    model: Model = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Play episodes with a trained policy at several target returns, and score it."""
    report = go.evaluate(**options(locals()))
    show(report.to_json(), as_json, report.print)


@command(
    "Train", "act runs/online-s0 --actors 4", "act runs/online-s0 --episodes 100 --target 3600"
)
def act(
    run: Path = Run(help="Run directory whose newest policy plays."),
    environment: str | None = Environment(help="Gymnasium id."),
    environment_options: Any = How(),
    actors: int = Option(1, min=1, help="Processes that play."),
    episodes: int | None = Count(None, help="How many in all; default until the run has ended."),
    target: float | None = Option(None, help="Return to ask for; default the run's highest."),
    action_noise: float | None = Option(
        None, min=0, help="As collect's; default 0.1, 0 if stochastic."
    ),
    seed: int | None = Option(None, min=0, help="Of resets and noise; default another each time."),
    model: Model = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Play while a run trains, and append what is seen to its dataset."""
    arguments = options(locals())
    from gear_offline.artifacts.checkpoint import no_run

    if not (run / "recipe.yaml").is_file():  # before torch is loaded
        raise no_run(run)
    report = go.act(**arguments)
    counts = f"{count_text(report.episodes, 'episode')} of {count_text(report.steps, 'step')}"
    line = f"{counts} appended"
    if report.mean_return is not None:
        line += f", mean return {report.mean_return:,.1f}"
    show(report.to_json(), as_json, lambda: print(line))


@command("Train", "sync runs/a-s0 --tracker wandb", "sync runs/a-s0 --project mine --tracker wandb")
def sync(
    run: Path = Run(help="Run directory."),
    tracker: str | None = Option(None, help="As in train.trackers; default the recipe's."),
    project: str | None = Option(None, help="Where it is shown; default the recipe's."),
) -> None:
    """Send what a run has logged to a tracker, as far as it is not there yet."""
    go.sync(run, tracker, project=project)
    show(run)


@command(
    "Train",
    "export-policy runs/hopper-medium-s0 hopper",
    "export-policy runs/hopper-medium-s0 hopper.onnx",
)
def export_policy(
    run: Path = Run(help="Run directory or checkpoint."),
    out: Path = Argument(help="Folder to make, or NAME.onnx."),
    task: str | None = Option(None, help="The task to act in, of a run of several."),
    overwrite: Overwrite = False,
    model: Model = None,
) -> None:
    """Write a policy as a folder that acts without its run, or as an ONNX file, without torch."""
    show(go.export_policy(run, out, task, overwrite=overwrite, model=model))


@command("Compare", "sweep smoke --seeds 3", "sweep smoke optimizer.learning_rate=1e-4,3e-4")
def sweep(
    recipe: RecipeName,
    overrides: list[str] = Axes(),
    seeds: str | None = Option(None, help="Number of seeds from 0 on (8), or a list (3,5,8..10)."),
    out: Path | None = Option(None, help="Sweep directory; default runs/NAME-sweep."),
    parallel: int | None = Option(
        None, min=1, help="Runs at a time, on each GPU; default: what pays off."
    ),
    ray: Ray = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a recipe with several seeds and settings; the same command again goes on."""
    how: dict[str, Any] = {"parallel": parallel, "ray": ray, "quiet": quiet}
    result = go.sweep(recipe, overrides, seeds=seeds, out=out, **how)
    if not (quiet or as_json):
        show(None, print_text=result.print)
    show(result.to_json(), as_json, lambda: print(result.path))
    failed = [trial for trial in result.trials if trial.problem or trial.status != "complete"]
    tell_failures([(t.trial.name, t.problem or "INCOMPLETE: not all steps") for t in failed], quiet)


app.add_typer(runs_app, name="runs", rich_help_panel="Compare")


@runs_app.command("ls", epilog=examples("runs ls", "runs ls runs/hopper-medium-sweep --json"))
def runs_ls(
    folder: Path = Argument(Path("runs"), help="Where to look, folders below included."),
    as_json: Json = False,
) -> None:
    """List runs, the newest first: steps, best and last return, score, data, age."""
    runs = go.list_runs(folder)
    show(runs.to_json(), as_json, runs.print)


@runs_app.command("show", epilog=examples("runs show runs/smoke-s0"))
def runs_show(run: Path = Run(help="Run directory."), as_json: Json = False) -> None:
    """Show one run: its recipe, data, steps, checkpoints and evaluations."""
    opened = go.open_run(run)
    show(opened.to_json(), as_json, opened.print)


@runs_app.command(
    "compare", cls=Command, epilog=examples("runs compare runs/a-s0 runs/b-s0 --out ab.html")
)
def runs_compare(
    runs: list[Path] = Run(metavar="RUN RUN...", help="Run directories, or a sweep's."),
    out: Path | None = Option(None, help="File for the curves, .png or .svg; .html: a page."),
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Put runs side by side: a table, and with --out their curves or one page of all."""
    comparison = go.compare_runs(runs, out=out, overwrite=overwrite)
    show(comparison.to_json(), as_json, comparison.print)
    if comparison.plot is not None and not as_json:
        print(comparison.plot)


@command(
    "Compare", "choose runs/a-s0 runs/b-s0", "choose runs/a-s0 --targets 3600,1800 --out a.svg"
)
def choose(
    policies: list[Path] = Run(metavar="RUN...", help="Runs, checkpoints or policy folders."),
    data: str | None = Option(
        None, metavar="PATH", help="Dataset to judge by; default that of the first run."
    ),
    targets: Any = Numbers(None, help="Target returns, comma-separated; default the recipes'."),
    checkpoint: str | None = Option(None, help="last, best or a step number; default last."),
    gamma: float | None = Option(None, min=0, max=1, help="Discount; default by the episodes."),
    critics: int = Option(5, min=2, help="Critics of each policy."),
    steps: int = Count("3000", help="Training steps of the critics."),
    seed: int = Option(0, min=0, help="Seed of critics and bootstrap."),
    device: str = Device("auto", help="auto, cpu or cuda."),
    out: Path | None = Option(None, help="File for a picture, .png or .svg; default none."),
    overwrite: Overwrite = False,
    model: Model = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Choose a policy from data alone, or compare one with what the data did."""
    given = options(locals())
    from gear_offline.artifacts.checkpoint import open_trained

    for path in policies:  # before torch is loaded
        open_trained(path, checkpoint, model)
    choice = go.choose(**given)
    show(choice.to_json(), as_json, choice.print)
    if choice.plot is not None and not as_json:
        print(choice.plot)


@command("Compare", "blame runs/a-s0", "blame runs/a-s0 4100..4160")
def blame(
    run: Path = Run(help="Run directory."),
    batches: Any = Argument(
        None, parser=parse_range, metavar="FIRST..LAST", help="Batches; without: find spikes."
    ),
    device: str = Device("auto", help="auto, cpu or cuda."),
    model: Model = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Find the data in the batches of a loss spike; without batches: list the spikes."""
    if batches is None:
        spikes = go.find_spikes(run)
        texts = [str(spike) for spike in spikes[:20]] or ["the logged loss has no spike"]
        show([asdict(spike) for spike in spikes], as_json, lambda: print("\n".join(texts)))
        return
    from gear_offline.analysis.spikes import find_batches

    find_batches(go.open_run(run), *batches)  # before torch is loaded
    page = go.blame(run, *batches, device=device, model=model, quiet=quiet or as_json)
    show(page.to_json(), as_json, page.print)


@command(
    "Compare",
    "strategies smoke",
    "strategies hopper-medium --strategies top_percent,top_k:k=50",
    "strategies hopper-medium --train --seeds 5",
)
def strategies(
    recipe: RecipeName,
    overrides: list[str] = Overrides(),
    strategies: str | None = Option(None, help="uniform_steps,top_k:k=50 or such; or a YAML file."),
    train: bool = Option(False, "--train", help="Train each as well, and compare the returns."),
    seeds: str | None = Option(None, help="Runs of each, with --train (3), or a list (3,5,8..10)."),
    parallel: int | None = Option(None, min=1, help="Runs at a time, on each GPU, with --train."),
    ray: Ray = None,
    out: Path | None = Option(None, help="Folder of page and runs; default runs/NAME-strategies."),
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare sampling strategies: what they draw and, with --train, what is learnt from it."""
    if not train and (seeds is not None or parallel is not None or ray):
        problem = "--seeds, --parallel and --ray are for --train"
        raise InputError("USAGE", problem, remedy="add --train")
    base = go.load_recipe(recipe, overrides)
    from gear_offline.analysis.sampling import parse_candidates
    from gear_offline.runs.checks import check_data
    from gear_offline.sweep.trials import parse_seeds

    parse_candidates(strategies, base)  # before torch is loaded
    parse_seeds(seeds or 3)
    check_data(base)
    from gear_offline.analysis.page import print_comparison

    folder = out or Path("runs") / f"{base.name}-strategies"
    how: dict[str, Any] = {"parallel": parallel, "ray": ray, "quiet": quiet}
    how |= {"train": train, "seeds": seeds or 3}
    comparison = go.compare_strategies(recipe, overrides, strategies=strategies, out=folder, **how)
    if not as_json:
        show(None, print_text=lambda: print_comparison(comparison))
    show(comparison.to_json(), as_json, lambda: print(folder / "strategies.html"))
    tell_failures([each for outcome in comparison.outcomes for each in outcome.failures], quiet)


@command("Machines", "doctor", "doctor --json")
def doctor(as_json: Json = False) -> None:
    """Show what is installed, what is missing, and what each feature will use."""
    from gear_offline.analysis.doctor import diagnose, print_diagnosis

    diagnosis = diagnose()
    show(diagnosis, as_json, lambda: print_diagnosis(diagnosis))
    if not diagnosis["healthy"]:
        raise typer.Exit(1)


@command(
    "Machines",
    "plan demo data.path=demo/hopper --gpus 4",
    "plan dt_1b data.path=demo/hopper --nodes 8 --gpus 8",
)
def plan(
    recipe: RecipeName,
    overrides: list[str] = Overrides(),
    nodes: int = Count("1", help="Nodes."),
    gpus: int = Count("1", help="GPUs per node."),
    nic_gbps: float = Option(400.0, min=0.001, help="Gigabits/s of a network card, one a GPU."),
    hardware: str = Option("h200", help="Measured machine, or a YAML file of the same form."),
    host_memory: int | None = Size(None, help="Memory of a node, e.g. 2TB; default as measured."),
    disk_rate: int | None = Size(None, help="Bytes/s of a node's storage, e.g. 20GB."),
    data: int | None = Size(None, help="Assume a dataset of this size in memory, e.g. 100TB."),
    columns: str | None = Option(
        None, help="Data that do not exist yet: observations=uint8[84,84],actions=int64,..."
    ),
    as_json: Json = False,
) -> None:
    """Predict memory, tiers, traffic and times of a recipe on a cluster."""
    loaded = go.load_recipe(recipe, overrides)
    from gear_offline.analysis.planning.hardware import Cluster, load_hardware
    from gear_offline.data.dataset.manifest import check_dataset
    from gear_offline.runs.checks import check_model

    if loaded.data.path and columns is None and Path(loaded.data.path).is_file():
        check_dataset(loaded.data.path)
    cluster = Cluster(
        nodes=nodes,
        gpus=gpus,
        hardware=load_hardware(hardware),
        nic_bits=nic_gbps * 1e9,
        host_memory=host_memory,
        disk_rate=disk_rate,
    )
    check_model(loaded.model)
    from gear_offline.analysis.planning.plan import plan as run  # loads torch
    from gear_offline.analysis.planning.plan import print_plan
    from gear_offline.analysis.planning.workload import make_workload

    workload = make_workload(loaded, data_bytes=data, columns=columns)
    document = run(loaded, workload, cluster)
    show(document, as_json, lambda: print_plan(document))


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code (`sys.exit` is the caller's)."""
    arguments = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in arguments
    arguments = [word for word in arguments if word != "--debug"]  # anywhere on the line
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    with at_the_command_line():
        return _run(arguments, debug)


def _run(arguments: list[str], debug: bool) -> int:
    try:
        result: Any = app(args=arguments, prog_name="gear-offline", standalone_mode=False)
        print(end="", flush=True)  # here its errors can still be told
        if result == 130:  # typer's answer to Ctrl-C
            raise KeyboardInterrupt
        return result if isinstance(result, int) else 0
    except BrokenPipeError:
        sys.stderr.close()  # nobody reads any more; Python would complain at exit
        return 1
    except Exception as error:
        return tell(error, debug)
