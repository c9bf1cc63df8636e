"""Whether a run may go on with a recipe: only with one that would have made the same run."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from gear_offline.config.files import flat
from gear_offline.config.recipe import Recipe
from gear_offline.errors import InputError
from gear_offline.runs.directory import RESUMABLE
from gear_offline.training.checkpoint import SavedState, newest_checkpoint, read_state
from gear_offline.training.checkpoint_folder import list_checkpoints


def check_resumed(
    path: Path, recipe: Recipe, start: Path | None = None, *, is_resolved: bool = True
) -> None:
    """Refuse to go on with a run whose recipe would have made another run, or has fewer steps.

    A run without a checkpoint is not refused.  What goes on is `start`, a checkpoint of any run, or
    by default the run at `path`.  A recipe that is not resolved yet leaves options to the data.
    """
    saved = [path for _, path in list_checkpoints(path / "checkpoints")]
    state = _begun_with([start] if start else saved)
    if state is not None:
        check_same_run(state, recipe, path, is_resolved=is_resolved)
    if state is None or state.step <= recipe.train.steps:
        return
    whole = None if start else newest_checkpoint(path / "checkpoints", lambda message: None)
    done = whole.state.step if whole else state.step  # damaged ones after it are passed over
    if done > recipe.train.steps:
        what = f"train.steps is {recipe.train.steps}, but {done} steps are done"
        remedy = "ask for at least as many steps, or train into another directory"
        raise InputError("RUN_MISMATCH", what, where=str(path), remedy=remedy)


def _begun_with(checkpoints: list[Path]) -> SavedState | None:
    """Return the state of a run's newest checkpoint, since recipe.yaml may be edited."""
    for place in reversed(checkpoints):
        with suppress(InputError):  # a damaged one is passed over
            return read_state(place)
    return None  # without a whole checkpoint nothing is resumed


def check_same_run(state: SavedState, now: Recipe, path: Path, *, is_resolved: bool = True) -> None:
    """Refuse to resume a run with a recipe that would have made another run."""
    before = Recipe.parse(state.recipe, where=str(path))
    old, new = flat(before.to_dict()), flat(now.to_dict())
    for options, recipe in ((old, before), (new, now)):  # what is skipped later is free
        past = before.train.batch_of(state.step - 1) if state.step else -1
        options["train.skip"] = [list(one) for one in recipe.train.skip if one[0] <= past]
    free = set(RESUMABLE)
    if now.optimizer.schedule != "constant":
        free.remove("train.steps")  # the learning rates of the steps done depend on it
    if not is_resolved:
        free |= {key for key in {*old, *new} if new.get(key) is None} | {"model.action_tanh"}
    for key in sorted({*old, *new} - free):
        if old.get(key) != new.get(key):
            raise InputError(
                "RUN_MISMATCH",
                f"{key} was {old.get(key)!r} when the run began and is {new.get(key)!r} now",
                where=str(path),
                remedy="it may change with optimizer.schedule=constant; "
                * (key == "train.steps")
                + f"undo that (here, or in {path / 'recipe.yaml'} if it was edited), or train "
                "into another directory",
            )
