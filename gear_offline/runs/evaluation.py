"""Evaluate a run: play a checkpoint, write the result, the report and its plots into the run."""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path

from gear_offline.artifacts.checkpoint import Checkpoint
from gear_offline.artifacts.records import EvaluationReport
from gear_offline.artifacts.trained import find_trained, live, trained_model
from gear_offline.core.files import write_error
from gear_offline.core.parts import admit
from gear_offline.core.progress import Terminal
from gear_offline.core.text import say
from gear_offline.core.torch_state import torch_threads
from gear_offline.distributed.world import resolve_device
from gear_offline.errors import GearError, InputError
from gear_offline.evaluation.play import play_tasks, timestep_warning
from gear_offline.evaluation.tasks import EvaluationTask, PlayOptions, say_choice
from gear_offline.evaluation.video import check_video, plan_tasks, write_videos


def evaluate_run(
    options: PlayOptions, checkpoint: Checkpoint | None, tasks: list[EvaluationTask] | None
) -> EvaluationReport:
    """Play a checkpoint and tasks, if they are known, else those that `options` mean.

    `evaluate` is the public door.
    """
    run, device, video, quiet = options.run, options.device, options.video, options.quiet
    if checkpoint is not None:
        trained = trained_model(checkpoint, options.model)
    elif isinstance(run, Path):
        trained = find_trained(run, options.checkpoint, model=options.model)
    else:
        trained, device = live(run), str(run.device)
        if options.checkpoint is not None or options.model is not None:
            problem, remedy = "a policy has no checkpoint, and stays here", "give its run or folder"
            raise InputError("USAGE", problem, "run", remedy)
    name = options.environment
    admit([name] if name else [])  # behind the names of the run, which may be the same
    tasks = tasks or plan_tasks(trained.recipe, options)
    say_choice(tasks, trained.recipe, options)
    if video is not None:
        check_video(tasks)
    device = str(resolve_device(device))
    with torch_threads(trained.recipe.train.threads):
        report = play_tasks(trained, tasks, device, quiet=quiet)
    if warning := timestep_warning(report, trained.model):
        say(warning)
    home = trained.run
    path = run if isinstance(run, Path) else Path("policy")
    try:
        if video is not None:
            videos = write_videos(video, report, quiet=quiet)
            say(f"written: {', '.join(map(str, videos))}", quiet=quiet)
            base = (home or (path if path.exists() else Path())).resolve()  # not one of the Hub
            relative = tuple(os.path.relpath(file.resolve(), base) for file in videos)
            report = report.model_copy(update={"videos": relative})
    finally:  # what was played must not be lost
        if options.out is not None:
            try:
                report.write(options.out)
            except OSError as error:
                report.print(console=Terminal(stderr=True))
                raise write_error(error, str(options.out)) from error
        elif home is not None:
            _keep(report, home, path if (path / "checkpoints").is_dir() else home, quiet)
    return report


def _keep(report: EvaluationReport, home: Path, folder: Path, quiet: bool) -> None:
    """Write the result and the run's report; what was played is not lost if that fails."""
    from gear_offline.runs.report import write_report  # matplotlib takes half a second

    try:
        file, backup = home / "evaluation.json", None
        if file.is_file():
            numbered = (file.with_stem(f"{file.stem}-{n}") for n in itertools.count(1))
            backup = shutil.copyfile(file, next(path for path in numbered if not path.exists()))
        report.write(file)
        page = folder / write_report(home, final=report).with_suffix(".html").name
        say(f"written: {folder / 'evaluation.json'}, {page} and its plots", quiet=quiet)
        if backup is not None:
            text = f"the result before this one is kept in {folder / backup.name}"
            say(f"{text}; report and plots show the new one", quiet=quiet)
    except (OSError, GearError) as error:
        say(f"the result could not be kept in {folder}: {error}")
