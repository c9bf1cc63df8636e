"""Evaluate a run, of one task or of several: what ``gear-offline evaluate`` does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from gear_offline.config.recipe import Recipe
from gear_offline.config.tasks import tasks_in
from gear_offline.core.files import check_new_file, write_error
from gear_offline.core.progress import say
from gear_offline.errors import GearError
from gear_offline.evaluation.environment_ids import check_no_import
from gear_offline.evaluation.evaluate import check_sizes, evaluate, print_report
from gear_offline.evaluation.results import EvaluationReport, keep_earlier
from gear_offline.evaluation.tasks import (
    TasksReport,
    chosen_tasks,
    evaluate_tasks,
    print_tasks,
)
from gear_offline.training.checkpoint_folder import find_checkpoint, run_of, typed_run
from gear_offline.training.seeding import torch_threads


def evaluate_run(
    run: str | Path,
    *,
    targets: Sequence[float] | float | None = None,
    episodes: int | None = None,
    environment: str | None = None,
    checkpoint: str | int | None = None,
    seed: int | None = None,
    device: str = "auto",
    out: str | Path | None = None,
    quiet: bool = False,
) -> EvaluationReport | TasksReport:
    """Evaluate a run, and write the result as `gear_offline.evaluation.evaluate.evaluate` does.

    Of several tasks every one is played in its environment, with its own targets.

    Parameters
    ----------
    environment
        Of a run of several tasks: play only the tasks of this environment, or of this name.
    targets
        Of a run of several tasks: only together with an `environment` that names one of them.
    run, episodes, checkpoint, seed, device, out, quiet
        As `gear_offline.evaluation.evaluate.evaluate`.

    Raises
    ------
    InputError
        As `gear_offline.evaluation.evaluate.evaluate`, and ``EVALUATE_OPTION`` as
        `gear_offline.evaluation.tasks.chosen_tasks`.
    """
    from gear_offline.training.checkpoint import read_state

    folder = find_checkpoint(Path(run), checkpoint)
    state = read_state(folder)
    recipe = Recipe.parse(state.recipe, where=str(folder))
    if not tasks_in(recipe):
        return evaluate(
            run,
            targets=targets,
            episodes=episodes,
            environment=environment,
            checkpoint=checkpoint,
            seed=seed,
            device=device,
            out=out,
            quiet=quiet,
        )
    if out is not None:
        check_new_file(Path(out))
    only = chosen_tasks(recipe, environment, targets)
    for name in only if environment is None else ():
        if (named := tasks_in(recipe)[name].environment) is not None:
            check_no_import(named, source=f"task {name} of the run", option="--environment ")
    report = _play(folder, recipe, only, targets, episodes, seed, device, quiet)
    report = report.replace(run=run_of(folder).name, step=state.step)
    _keep(report, run_of(folder), typed_run(Path(run), run_of(folder)), out, quiet)
    return report


def _play(
    folder: Path,
    recipe: Recipe,
    only: Sequence[str],
    targets: Sequence[float] | float | None,
    episodes: int | None,
    seed: int | None,
    device: str,
    quiet: bool,
) -> TasksReport:
    from gear_offline.core.device import resolve_device
    from gear_offline.models.multitask import tasks_of_config
    from gear_offline.models.policy import Policy
    from gear_offline.training.checkpoint import read_checkpoint
    from gear_offline.training.policies import restore_model, task_policy

    where = resolve_device(device)
    model = restore_model(read_checkpoint(folder.resolve(), training=False))

    def policy_of(name: str) -> Policy:
        policy = task_policy(model, name, recipe, where)
        environment = tasks_in(recipe)[name].environment
        if environment is not None:
            check_sizes(policy.model, environment)
        return policy

    with torch_threads(recipe.train.threads):
        report = evaluate_tasks(
            policy_of,
            recipe,
            tasks_of_config(model.config),
            only=only,
            targets=targets,
            episodes=episodes,
            seed=seed,
            quiet=quiet,
        )
    return report.replace(device=str(where))


def _keep(
    report: TasksReport, home: Path, shown: Path, out: str | Path | None, quiet: bool
) -> None:
    """Write the result and the run's report; what was played is not lost if that fails."""
    from gear_offline.runs.report import write_report

    try:
        if out is not None:
            report.write(Path(out))
            return
        kept = keep_earlier(home / "evaluation.json")
        report.write(home / "evaluation.json")
        if kept is not None:
            say(f"the result before this one is kept in {shown / kept.name}", quiet=quiet)
        written = shown / write_report(home).name
        say(f"written: {shown / 'evaluation.json'}, {written} and its plots", quiet=quiet)
    except (OSError, GearError) as error:
        if out is not None and isinstance(error, OSError):
            print_tasks(report, console=Console(stderr=True))
            raise write_error(error, str(out)) from error
        say(f"the result could not be kept in {shown}: {error}")


def print_run(report: EvaluationReport | TasksReport) -> None:
    """Print what `evaluate_run` returned."""
    if isinstance(report, TasksReport):
        print_tasks(report)
    else:
        print_report(report)
