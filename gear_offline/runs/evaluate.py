"""The public door of evaluation: a run in, a report out.

What can be told of a mistake without torch is told before torch is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gear_offline.artifacts.checkpoint import open_trained, while_removed
from gear_offline.config.arguments import check_arguments
from gear_offline.evaluation.tasks import PlayOptions, read_options
from gear_offline.evaluation.video import check_suffix, plan_tasks

if TYPE_CHECKING:
    from gear_offline.artifacts.records import EvaluationReport
    from gear_offline.models.policy import Policy


@check_arguments()
def evaluate(
    run: str | os.PathLike[str] | Policy,
    *,
    targets: Sequence[float] | float | None = None,
    episodes: int | None = None,
    episodes_of_memory: int | None = None,
    sample: bool | None = None,
    context_length: int | None = None,
    environment: str | Callable[..., Any] | None = None,
    environment_options: Mapping[str, Any] | None = None,
    checkpoint: str | int | None = None,
    seed: int | None = None,
    device: str = "auto",
    out: str | os.PathLike[str] | None = None,
    video: str | os.PathLike[str] | None = None,
    quiet: bool = False,
    model: Any = None,
) -> EvaluationReport:
    """Evaluate a run; write ``evaluation.json``, the report and its plots into the run directory.

    Of several tasks every one is played in its environment, with its own targets.  An
    ``evaluation.json`` that is there already is kept as ``evaluation-1.json`` and so on.

    Parameters
    ----------
    run
        Run directory, one checkpoint of it, or a policy folder, which stays as it is; one of the
        Hugging Face Hub: ``hub:USER/NAME``; or a policy, whose result is written to `out` alone.
    targets, episodes, seed
        Default: the recipe's; 10 episodes if the recipe has 0, which means none while training.
    episodes_of_memory
        Episodes that are played one after another in each environment, in one memory; then
        `episodes` counts memories.  Default: the recipe's, which is 1.
    sample
        Draw actions, as `Policy.act` does by a generator; default: the recipe's, which is not to.
    context_length
        As of `gear_offline.load_policy`.
    environment
        Default: the recipe's.  Of a run of several tasks: play only the tasks of this environment,
        or of this name; `targets` need one that names a single task.
    environment_options
        What `gymnasium.make` takes besides, such as ``{"g": 1.0, "max_episode_steps": 40}``, in
        place of the recipe's.
    checkpoint
        ``"last"`` (the default), ``"best"`` (as ``train.best`` says: the highest return that was
        seen while training, of several tasks the highest normalised score) or a step number.
    device
        ``"auto"``, ``"cpu"`` or ``"cuda"``.
    out
        Write the result to this file instead; the run directory then stays as it is.
    video
        Also write the first episode of each asked return, one after the other, to this new
        ``.gif`` or ``.mp4`` file; of several tasks one file each, ``NAME-TASK.gif``.  Takes
        ``pip install 'gear-offline[video]'``.
    quiet
        Show no progress. Warnings that change what the result means are still shown.
    model
        As of `gear_offline.load_policy`.

    Raises
    ------
    InputError, UnavailableError
        Before anything is played: ``RUN_NOT_FOUND``, ``USAGE``, ``ENVIRONMENT``; ``OUTPUT_EXISTS``
        and ``OUTPUT_WRITE`` for `out` and `video`, ``PACKAGE_MISSING`` for `video`.
    """
    if video is not None:
        check_suffix(Path(video))
    options = read_options(
        run,
        environment,
        environment_options,
        model,
        targets=targets,
        episodes=episodes,
        episodes_of_memory=episodes_of_memory,
        sample=sample,
        context_length=context_length,
        checkpoint=checkpoint,
        seed=seed,
        device=device,
        out=out,
        video=video,
        quiet=quiet,
    )
    return while_removed(lambda: _evaluate(options))


def _evaluate(options: PlayOptions) -> EvaluationReport:
    """Read the checkpoint of a run, choose its tasks, then load torch."""
    saved, tasks = None, None
    if isinstance(options.run, Path):
        saved = open_trained(options.run, options.checkpoint, options.model)
    if saved is not None:
        tasks = plan_tasks(saved.recipe, options)
    from gear_offline.runs.evaluation import evaluate_run

    return evaluate_run(options, saved, tasks)
