"""Train from a recipe to a run directory, on one process or on all that ``torchrun`` started.

What one step does is in `gear_offline.training.learner`, what happens between steps in
`gear_offline.runs.training_run` and, on the first rank, `gear_offline.runs.leading_run`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from gear_offline.config.recipe import Recipe, load_recipe
from gear_offline.config.tasks import named_environments
from gear_offline.core.device import resolve_device
from gear_offline.core.files import write_error
from gear_offline.dataset.dataset import Dataset, open_dataset
from gear_offline.distributed.world import World, current, open_world, rank_device
from gear_offline.errors import InputError
from gear_offline.evaluation.environments import import_module_of
from gear_offline.loaders.recipes import open_tasks
from gear_offline.runs.checks import check_recipe
from gear_offline.runs.directory import RunDirectory, default_run_path
from gear_offline.runs.leading_run import LeadingRun
from gear_offline.runs.preparation import open_recipe_dataset, prepare_one, resolve
from gear_offline.runs.training_run import Run, TrainingInterrupted
from gear_offline.tables.joint import TableData
from gear_offline.tables.shared import SharedTables
from gear_offline.training.checkpoint import newest_checkpoint, read_state
from gear_offline.training.checkpoint_folder import list_checkpoints, sweep
from gear_offline.training.gradients import check_micro_batches
from gear_offline.training.learner import Learner
from gear_offline.training.seeding import deterministic, torch_threads

__all__ = ["TrainingInterrupted", "train"]

RESUMABLE = (  # what may differ when a run is resumed: none of it changes a step that was done
    "description",
    "loader.engine",
    "loader.placement",
    "loader.hbm_budget",
    "loader.host_budget",
    "loader.sharding",
    "loader.exchange",
    "train.steps",
    "train.device",
    "train.parallel",
    "train.reshard",
    "train.accumulate",
    "train.recompute",
    "train.threads",
    "train.timeout",
    "train.checkpoint_every",
    "train.keep_checkpoints",
    "train.tensorboard",
    "evaluate.background",
    "evaluate.device",
    "evaluate.workers",
)


def train(
    recipe: Recipe | str | Path,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    quiet: bool = False,
    tables: SharedTables | None = None,
) -> Path:
    """Train, evaluate and write a run directory.

    Under ``torchrun`` every process calls this; together they train on the batches that one
    process would have, and the first one writes the run directory.

    Parameters
    ----------
    recipe
        From `gear_offline.config.recipe.load_recipe`, or what that takes: a name or a file.
    out
        Run directory; default ``runs/NAME-sSEED``.
    resume
        Go on from the newest whole checkpoint; begins the run when there is none.
    quiet
        Print nothing.
    tables
        That several runs of one process share.

    Returns
    -------
    Path
        The run directory.

    Raises
    ------
    InputError
        ``RUN_EXISTS``, ``RUN_LOCKED``, ``RUN_DIRECTORY``, ``RUN_RECIPE`` (resuming with another
        recipe), ``RUN_DAMAGED``, ``LOADER_OPTION``, ``DEVICE``, and those of checking
        the recipe and preparing the data.
    TrainingInterrupted
        ``TRAIN_INTERRUPTED``.
    GearError
        ``LOSS_NONFINITE``; ``RANK_LOST`` and ``RANK_FAILED`` for what happened on other ranks.

    Examples
    --------
    `tiny` is what the example of `gear_offline.convert.convert` makes.

    >>> import gear_offline as go
    >>> options = {"data.path": "tiny", "train.steps": 4, "train.device": "cpu"}
    >>> options |= {"optimizer.warmup_steps": 2, "evaluate.episodes": 0}
    >>> run = go.train(go.load_recipe("smoke", options), out="runs/tiny", quiet=True)
    >>> sorted(path.name for path in (run / "checkpoints").iterdir())
    ['step-00000004']
    """
    whole = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    path = default_run_path(whole) if out is None else Path(out)
    _train(whole, path, resume=resume, quiet=quiet, tables=tables)
    return path


def _train(
    recipe: Recipe, path: Path, *, resume: bool, quiet: bool, tables: SharedTables | None
) -> None:
    device = rank_device(resolve_device(recipe.train.device))
    with open_world(device, timeout=recipe.train.timeout) as world, ExitStack() as stack:
        check_micro_batches(world.rank_batch(recipe.loader.batch_size), recipe.train.accumulate)
        world.lead(lambda: check_recipe(recipe, where=f"recipe {recipe.name}"))
        if not resume:  # then the recipe is the user's word, not only a run's
            for name in named_environments(recipe):
                import_module_of(name)
        directory = world.lead(lambda: stack.enter_context(RunDirectory(path, resume=resume)))
        stack.enter_context(_torch_settings(recipe, device))
        quiet = quiet or not world.is_first
        dataset: TableData
        if recipe.data.tasks:
            dataset = open_tasks(recipe, lambda one: _open(one, world, quiet=quiet))
        else:
            dataset = _open(recipe, world, quiet=quiet)
        resolved, sizes = resolve(recipe, dataset, quiet=quiet)
        world.lead(lambda: check_resumed(path, resolved))
        learner = Learner(resolved, sizes, dataset, device, world=world, tables=tables)
        stack.callback(learner.release)
        if directory is None:
            Run(path, learner).complete()
        else:
            try:
                LeadingRun(directory, learner, dataset, quiet=quiet).complete()
            except OSError as error:  # of the run's own files: the data's errors have codes
                sweep(directory.checkpoints_path)
                raise write_error(error, str(path)) from error


def _open(recipe: Recipe, world: World, *, quiet: bool) -> Dataset:
    """Open the dataset on every rank; it is made once, and compared with its digests once a node.

    That is while the node's first rank loads it.  What is mapped, or read from disk in parts, is
    not compared then, so it is before any rank reads it.
    """
    made = world.lead(lambda: prepare_one(recipe, quiet=quiet))
    if world.size == 1:
        assert made is not None
        return made
    path = str(recipe.data.path)
    loader = recipe.loader
    parts = loader.placement == "disk" or loader.host_budget is not None

    def opened() -> Dataset:
        found = made or open_recipe_dataset(recipe)
        return found.verify() if parts else found

    return world.lead(opened, leader=world.leader) or open_dataset(path, verify=False)


def check_resumed(path: Path, recipe: Recipe) -> None:
    """Refuse to go on with a run whose recipe would have made another run, or has fewer steps.

    Parameters
    ----------
    path
        The run directory; one without a checkpoint is not refused.
    recipe
        As `gear_offline.runs.preparation.resolve` returns it.

    Raises
    ------
    InputError
        ``RUN_RECIPE``; ``RUN_DAMAGED`` where
        that says how many steps are done.
    """
    saved = list_checkpoints(path / "checkpoints")
    before = _begun_with(path, [place for _, place in saved])
    if before is not None:
        check_same_run(before, recipe, path)
    if not saved or saved[-1][0] <= recipe.train.steps:
        return
    whole = newest_checkpoint(path / "checkpoints", lambda message: None)
    done = 0 if whole is None else whole.state.step  # damaged ones after it are passed over
    if done > recipe.train.steps:
        raise InputError(
            "RUN_RECIPE",
            f"train.steps is {recipe.train.steps}, but {done} steps are done",
            where=str(path),
            remedy="ask for at least as many steps, or train into another directory",
        )


def _begun_with(path: Path, checkpoints: list[Path]) -> Recipe | None:
    """Return the recipe of a run: of its newest checkpoint, since recipe.yaml may be edited."""
    for place in reversed(checkpoints):
        with suppress(InputError, KeyError, TypeError):  # a damaged one is passed over
            return Recipe.parse(read_state(place).recipe, where=str(place))
    begun = path / "recipe.yaml"
    return load_recipe(begun) if checkpoints and begun.exists() else None


def check_same_run(before: Recipe, now: Recipe, path: Path) -> None:
    """Refuse to resume a run with a recipe that would have made another run: ``RUN_RECIPE``."""
    old, new = _leaves(before.to_dict()), _leaves(now.to_dict())
    free = set(RESUMABLE)
    if now.optimizer.schedule != "constant":
        free.remove("train.steps")  # the learning rates of the steps done depend on it
    for key in sorted({*old, *new} - free):
        if old.get(key) != new.get(key):
            remedy = f"resume as it began: gear-offline train {path} --resume"
            if _says(path / "recipe.yaml", key, new.get(key)):
                remedy = f"undo that in {path / 'recipe.yaml'}"
            raise InputError(
                "RUN_RECIPE",
                f"{key} was {old.get(key)!r} when the run began and is {new.get(key)!r} now",
                where=str(path),
                remedy=f"{remedy}, or train into another directory",
            )


def _says(file: Path, key: str, value: Any) -> bool:
    """Return whether a recipe's file gives an option that value."""
    try:
        return bool(_leaves(load_recipe(file).to_dict()).get(key) == value)
    except InputError:
        return False


def _leaves(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: value}
    found: dict[str, Any] = {}
    for key, item in value.items():
        found.update(_leaves(item, f"{prefix}.{key}" if prefix else key))
    return found


@contextmanager
def _torch_settings(recipe: Recipe, device: torch.device) -> Iterator[None]:
    """Set torch's GPU, threads and random numbers; give the caller's back at the end."""
    random = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
    settings = recipe.train
    threads, kernels = torch_threads(settings.threads), deterministic(settings.deterministic)
    with current(device), random, threads, kernels:
        torch.manual_seed(recipe.seed)
        yield
