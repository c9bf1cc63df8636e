"""Evaluate a run: play a checkpoint, write the result, the report and its plots into the run."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gear_offline.artifacts.records import EvaluationReport
from gear_offline.artifacts.trained import TrainedModel, find_trained, live
from gear_offline.core.files import write_error
from gear_offline.core.parts import admit, is_same
from gear_offline.core.progress import Terminal
from gear_offline.core.text import say
from gear_offline.core.torch_state import torch_threads
from gear_offline.distributed.world import resolve_device
from gear_offline.errors import GearError, InputError
from gear_offline.evaluation.environments import say_left_out, say_version
from gear_offline.evaluation.play import (
    EvaluationTask,
    play_tasks,
    tasks_of,
    timestep_warning,
)
from gear_offline.evaluation.video import check_video, write_videos
from gear_offline.models.policy import Policy

EPISODES = 10  # where the recipe has 0, which means none while training


def evaluate_run(
    run: Path | Policy,
    name: str | None,
    how: dict[str, Any] | None,
    targets: tuple[float, ...] | None,
    *,
    episodes: int | None,
    checkpoint: str | int | None,
    seed: int | None,
    device: str,
    out: Path | None,
    video: Path | None,
    quiet: bool,
    model: Any,
) -> EvaluationReport:
    """Evaluate a run in the environment `name`, made with `how`; `evaluate` is the public door."""
    if isinstance(run, Policy):
        trained, device, run = live(run), str(run.device), Path("policy")
        if checkpoint is not None or model is not None:
            problem, remedy = "a policy has no checkpoint, and stays here", "give its run or folder"
            raise InputError("USAGE", problem, "run", remedy)
    else:
        trained = find_trained(run, checkpoint, model=model)
    admit([name] if name else [])  # behind the names of the run, which may be the same
    tasks = _chosen_tasks(trained, name, how, targets)
    if name is None or is_same(name, trained.recipe.evaluate.environment):
        say_left_out(how, trained.recipe.evaluate.environment_options)
    for index, task in enumerate(tasks):
        count = (task.episodes or EPISODES) if episodes is None else episodes
        tasks[index] = replace(task, episodes=count, seed=task.seed if seed is None else seed)
        say_version(task.environment)
    if video is not None:
        check_video(video, tasks)
    where = str(resolve_device(device))
    with torch_threads(trained.recipe.train.threads):
        report = play_tasks(trained, tasks, where, quiet=quiet)
    if warning := timestep_warning(report, trained.model):
        say(warning)
    home = trained.run
    try:
        if video is not None:
            videos = write_videos(video, report, quiet=quiet)
            say(f"written: {', '.join(map(str, videos))}", quiet=quiet)
            base = (home or (run if run.exists() else Path())).resolve()  # not one of the Hub
            relative = tuple(os.path.relpath(path.resolve(), base) for path in videos)
            report = report.model_copy(update={"videos": relative})
    finally:  # what was played must not be lost
        if out is not None:
            try:
                report.write(out)
            except OSError as error:
                report.print(console=Terminal(stderr=True))
                raise write_error(error, str(out)) from error
        elif home is not None:
            _keep(report, home, run if (run / "checkpoints").is_dir() else home, quiet)
    return report


def _chosen_tasks(
    trained: TrainedModel,
    environment: str | None,
    options: Mapping[str, Any] | None,
    targets: tuple[float, ...] | None,
) -> list[EvaluationTask]:
    """Return the tasks of a run that `environment` means, with `targets` in place of their own."""
    recipe = trained.recipe
    if not recipe.data.tasks and environment not in (None, recipe.evaluate.environment):
        recipe = recipe.replace({"evaluate.environment": environment})
    run_tasks = tasks_of(recipe, trained.model.facts.tasks)
    tasks = [task for task in run_tasks if environment in (None, task.name)]
    if not tasks and environment is not None:
        matching = [task for task in run_tasks if is_same(environment, task.environment)]
        tasks = [replace(task, environment=environment) for task in matching]
    places = ", ".join(f"{task.name} ({task.environment})" for task in run_tasks)
    if not tasks:
        problem, remedy = (
            "the run names no environment to play in",
            "say it: --environment Hopper-v5",
        )
        if environment is not None:
            problem, remedy = f"{environment} is the environment of no task", f"tasks: {places}"
        raise InputError("USAGE", problem, where="--environment", remedy=remedy)
    for where, value in (("--targets", targets), ("--environment-options", options)):
        if value is not None and len(tasks) > 1:
            problem = "several tasks cannot share them"
            remedy = f"say which task with --environment: {places}"
            raise InputError("USAGE", problem, where=where, remedy=remedy)
    if options is not None:
        tasks = [replace(tasks[0], environment_options=options)]
    if targets is not None:
        tasks = [replace(tasks[0], targets=targets)]
    if not all(task.targets for task in tasks):
        problem, remedy = "the run names no returns to ask for", "say them: --targets 3600,1800"
        raise InputError("USAGE", problem, where="--targets", remedy=remedy)
    return tasks


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
