"""The public door of training: a recipe and options in, a `Run` out."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from gear_offline.config.files import Overrides
from gear_offline.config.recipe import Recipe, load_recipe
from gear_offline.runs.callbacks import Callback, check_callbacks
from gear_offline.runs.run import Run

__all__ = ["train"]


def train(
    recipe: Recipe | str | os.PathLike[str],
    overrides: Overrides = (),
    *,
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    checkpoint: str | int | None = None,
    quiet: bool = False,
    callbacks: Sequence[Callback] = (),
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
    whole = load_recipe(recipe, overrides)
    told = check_callbacks(callbacks)
    from gear_offline.runs import loop  # loads torch: a typo was told before
    from gear_offline.runs.directory import places

    place = None if out is None else Path(out)
    place, start = places(recipe, place, resume=resume, checkpoint=checkpoint)
    path = loop.train(whole, out=place, resume=resume, start=start, quiet=quiet, callbacks=told)
    return Run(path)
