"""What the sections of a recipe with several tasks must agree on."""

from __future__ import annotations

from gear_offline.config.sections import DataSettings, EvaluateSettings, TaskSettings
from gear_offline.errors import InputError


def check_tasks(data: DataSettings, evaluate: EvaluateSettings) -> None:
    """Refuse a recipe that says for all what each task says for itself, and crooked weights.

    Raises
    ------
    InputError
        ``RECIPE_VALUE``
    """
    tasks = data.tasks
    if tasks is None:
        if data.schedule is not None:
            raise _wrong("data.schedule needs data.tasks", "name the tasks, or leave it out")
        return
    if not tasks:
        raise _wrong("data.tasks must name at least one task", "null is for one dataset")
    given = {
        "data.path": data.path,
        "data.source": data.source,
        "data.collect": data.collect,
        "evaluate.environment": evaluate.environment,
        "evaluate.reference": evaluate.reference,
        "evaluate.targets": evaluate.targets,
    }
    for key, value in given.items():
        if value is not None:
            leaf = key.split(".")[1]
            raise _wrong(
                f"{key} and data.tasks exclude each other",
                f"say {leaf} in each task: data.tasks.{next(iter(tasks))}.{leaf}",
            )
    paths: dict[str, str] = {}
    for name, task in tasks.items():
        _check_task(name, task)
        other = paths.setdefault(task.path, name)
        if other != name and tasks[other].collect != task.collect:
            raise _wrong(
                f"data.tasks.{name}.path is that of {other}, made of something else",
                "give each its own path",
            )
    if data.schedule is not None:
        _check_schedule(data, list(tasks))
    elif not sum(task.weight for task in tasks.values()) > 0:
        raise _wrong("the weights of data.tasks are all zero", "give one a positive weight")


def _check_task(name: str, task: TaskSettings) -> None:
    if task.source is not None and task.collect is not None:
        raise _wrong(
            f"data.tasks.{name}.source and data.tasks.{name}.collect exclude each other", "keep one"
        )
    if task.targets is not None and not task.targets:
        raise _wrong(
            f"data.tasks.{name}.targets must name at least one return, got an empty list",
            "null takes targets from the data; evaluate.episodes: 0 turns it off",
        )


def _check_schedule(data: DataSettings, names: list[str]) -> None:
    before = -1
    if not data.schedule:
        raise _wrong("data.schedule must have at least one point", "null: the tasks' weights")
    for place, point in enumerate(data.schedule):
        where = f"data.schedule.{place}"
        if set(point.weights) != set(names):
            raise _wrong(
                f"{where}.weights must name every task once, got {', '.join(point.weights)}",
                f"tasks: {', '.join(names)}",
            )
        if not sum(point.weights.values()) > 0:
            raise _wrong(f"{where}.weights are all zero", "give one task a positive weight")
        if point.step <= before:
            raise _wrong(
                f"{where}.step must be above the one before it ({before}), got {point.step}",
                "sort the points by their steps",
            )
        before = point.step


def _wrong(what: str, remedy: str) -> InputError:
    return InputError("RECIPE_VALUE", what, remedy=remedy)
