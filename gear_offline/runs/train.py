"""The public door of training: a recipe and options in, a `Run` out.

What can be told of a mistake without torch is told before torch is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gear_offline.config.arguments import check_arguments
from gear_offline.config.files import Overrides, with_value
from gear_offline.config.recipe import Recipe, load_recipe, recipe_option
from gear_offline.distributed import is_first_process

if TYPE_CHECKING:
    from gear_offline.models.base import SequenceModel
    from gear_offline.runs.callbacks import Callback
    from gear_offline.runs.run import Run


@check_arguments(recipe_option)
def train(
    recipe: Recipe | str | os.PathLike[str],
    overrides: Overrides = (),
    *,
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    checkpoint: str | int | None = None,
    quiet: bool = False,
    callbacks: Sequence[Callback] = (),
    model: type[SequenceModel] | str | None = None,
) -> Run:
    """Train, evaluate and write a run directory.

    Under ``torchrun`` every process calls this; together they train on the batches that one
    process would have, and the first one writes the run directory.

    Parameters
    ----------
    recipe
        Name of a recipe, a YAML file, a run directory, or what `gear_offline.load_recipe` gave.
    overrides
        Options to change, as for `gear_offline.load_recipe`: ``{"train.steps": 600}``, or
        ``"train.steps=600"``, one or many.
    out
        Run directory; default ``runs/NAME-sSEED``, or that of the run that is resumed.
    resume
        Go on from the newest whole checkpoint; begins the run when there is none.
    checkpoint
        Of the run that `recipe` names, a step, ``"last"`` or ``"best"``: another run begins with
        it, in `out` or ``RUN-from-STEP``.  Options may change as when a run is resumed.
    quiet
        Print nothing.
    callbacks
        Objects derived from `gear_offline.Callback`: told of metrics, evaluations and checkpoints,
        on the first rank; they may end the run.
    model
        In place of ``model.kind``: a class derived from `gear_offline.SequenceModel`, or its name.

    Returns
    -------
    Run
        The run: its policy, metrics and evaluations.

    Raises
    ------
    InputError
        ``RECIPE``, ``OUTPUT_EXISTS``, ``RUN_LOCKED``, ``RUN_MISMATCH`` (resuming with another
        recipe), ``RUN_DAMAGED``, ``MEMORY``, ``DEVICE``, and those of preparing the data.
    TrainingInterrupted
        ``INTERRUPTED``.
    GearError
        ``LOSS_NONFINITE``; ``CALLBACK`` for an exception of a callback; ``RANK_LOST`` and
        ``RANK_FAILED`` for what happened on other ranks.

    Examples
    --------
    `tiny` is what the example of `gear_offline.convert` makes.

    >>> import gear_offline as go
    >>> options = {"data.path": "tiny", "train.steps": 4, "train.device": "cpu"}
    >>> options |= {"optimizer.warmup_steps": 2, "evaluate.episodes": 0}
    >>> run = go.train("smoke", options, out="runs/tiny", quiet=True)
    >>> run.steps
    4
    >>> sorted(path.name for path in (run.path / "checkpoints").iterdir())
    ['step-00000004']
    """
    loaded = load_recipe(recipe, with_value(overrides, "model.kind", model))
    from gear_offline.core.text import say
    from gear_offline.runs.callbacks import check_callbacks
    from gear_offline.runs.checks import check_data, check_recipe
    from gear_offline.runs.directory import check_place, run_and_start
    from gear_offline.runs.resume import find_past
    from gear_offline.runs.run import Run

    callbacks = check_callbacks(callbacks)
    path, start = run_and_start(recipe, loaded, out, resume=resume, checkpoint=checkpoint)
    if is_first_process():
        past = find_past(path, start)
        full = past.fill(loaded) if past else loaded
        check_recipe(loaded, where=f"recipe {loaded.name}")
        check_data(loaded, is_of_run=past is not None and full.data_paths == past.recipe.data_paths)
        if past is not None and (resume or start is not None):
            past.check(full)
        check_place(path, resume=resume)  # last: what is typed wrong is told first
        steps = full.train.steps
        warmup = min(full.optimizer.warmup(steps), steps)
        text = f"{steps:,} steps" + (f", the first {warmup:,} of them warm-up" if warmup else "")
        say(f"{full.name}: {text}; seed {full.seed}", quiet=quiet)
    from gear_offline.runs import loop  # loads torch

    trained = loop.train_run(
        loaded, path, resume=resume, start=start, callbacks=callbacks, quiet=quiet
    )
    return Run(trained)
