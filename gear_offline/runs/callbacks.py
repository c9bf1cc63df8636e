"""Calls during training: a `Callback` is told of each event, and may end the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, chdir
from pathlib import Path
from typing import Any

from gear_offline.config.recipe import Recipe
from gear_offline.core.parts import Kind, calling_part, find_part
from gear_offline.core.text import first_line, say
from gear_offline.errors import GearError, InputError
from gear_offline.runs.run import Run

CALLBACKS = Kind(noun="callback", group="callbacks", option="train.callbacks", own={})


class Callback:
    """Methods that `gear_offline.train` calls; override those you need in a subclass.

    All methods are called in the training process between two steps, on the first rank only.
    `on_log`, `on_evaluation` and `on_checkpoint` may return True to ask for the run's end.  The run
    saves a checkpoint, waits for evaluations under way, and is summed up after the step; resuming
    it goes on.  An exception ends the run with the error ``CALLBACK``.

    Examples
    --------
    `"tiny"` is what the example of `gear_offline.convert` makes.

    >>> import gear_offline as go
    >>> class Enough(go.Callback):
    ...     def on_log(self, run, step, values):
    ...         return values["loss"] < 100
    >>> options = {"data.path": "tiny", "train.steps": 400, "train.device": "cpu"}
    >>> options |= {"train.log_every": 3, "evaluate.episodes": 0}
    >>> go.train("smoke", options, out="runs/enough", callbacks=[Enough()], quiet=True).steps
    3
    """

    def on_begin(self, run: Run) -> None:
        """Called once, before the first step of this process."""

    def on_log(self, run: Run, step: int, values: Mapping[str, float]) -> bool | None:
        """Called with each line of ``metrics.jsonl``, every ``train.log_every`` steps.

        Where episodes are held out also at checkpoints, whose lines have ``validation/loss``.
        """

    def on_evaluation(self, run: Run, step: int, record: Mapping[str, Any]) -> bool | None:
        """Called with the line of ``evaluations.jsonl``: ``return``, ``targets`` and more.

        `step` is that of the weights; in the background its result comes later.  One that failed
        has ``error`` and no ``return``.
        """

    def on_checkpoint(self, run: Run, step: int, path: Path) -> bool | None:
        """Called when the checkpoint of `step` is whole in the directory `path`."""

    def on_end(self, run: Run, error: BaseException | None) -> None:
        """Called once at the end; `error` is None if the run is complete or a callback ended it."""


def check_callbacks(callbacks: Sequence[Callback]) -> tuple[Callback, ...]:
    """Return the callbacks; refuse other objects."""
    listed = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]
    if wrong := [callback for callback in listed if not isinstance(callback, Callback)]:
        remedy = "give a list of objects whose class derives from gear_offline.Callback"
        raise InputError("USAGE", f"{wrong[0]!r} is no callback", "callbacks", remedy)
    return tuple(listed)


def recipe_callbacks(recipe: Recipe) -> tuple[Callback, ...]:
    """Return new callbacks of the classes that a recipe names."""
    listeners = []
    for name in recipe.train.callbacks:
        callback = find_part(CALLBACKS, name)
        with calling_part(CALLBACKS, "making it", name):
            listeners.append(callback() if isinstance(callback, type) else callback)
    return check_callbacks(listeners)


class Callbacks(AbstractContextManager["Callbacks"]):
    """The callbacks of a run, which are told of its end too; `stop`: one has asked for that."""

    def __init__(self, run: Run, callbacks: Sequence[Callback] = ()) -> None:
        self.run, self._callbacks, self.stop = run, callbacks, False

    def tell(self, event: str, *facts: Any) -> None:
        """Call the method `event` of each with the run and `facts`."""
        for callback in self._callbacks:
            self._call(callback, event, *facts)

    def _call(self, callback: Callback, event: str, *facts: Any) -> None:
        import torch

        from gear_offline.core.torch_state import torch_threads

        try:  # whatever it sets or draws, the steps to come are as without it
            with torch.random.fork_rng(devices=[]), torch_threads(None), chdir("."):
                self.stop = bool(getattr(callback, event)(self.run, *facts)) or self.stop
        except (Exception, SystemExit) as error:
            problem = f"a callback failed: {type(error).__name__}: {first_line(error)}"
            remedy = f"mend it; the run in {self.run.path} goes on from its newest checkpoint "
            remedy += "with resume"
            where = f"{type(callback).__name__}.{event}"
            raise GearError("CALLBACK", problem, where=where, remedy=remedy) from error

    def __exit__(self, error_type: object, error: BaseException | None, trace: object) -> None:
        """Tell all of the end; what ended the run counts more than what fails here."""
        failures = []
        for callback in self._callbacks:
            try:
                self._call(callback, "on_end", error)
            except GearError as failure:
                failures.append(failure)
        first = failures.pop(0) if failures and error is None else None
        for warning in failures:
            say(f"warning: {warning.message}")
        if first is not None:
            raise first
