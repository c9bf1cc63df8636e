"""Recipes of several tasks."""

from __future__ import annotations

from pathlib import Path

import pytest

from gear_offline.config.recipe import Recipe, load_recipe
from gear_offline.config.strict_yaml import parse_yaml
from gear_offline.config.tasks import task_recipe
from gear_offline.errors import InputError
from gear_offline.runs.checks import validate_recipe
from tests.test_recipe import write

TASKS = """
base: paper
name: several
data:
  tasks:
    one:
      path: a
      weight: 2
      selection: {strategy: top_k, k: 5}
      collect: {environment: Pendulum-v1}
    two: {path: b, returns_scale: 10}
  schedule: [{step: 0, weights: {one: 1, two: 0}}, {step: 10, weights: {one: 1, two: 1}}]
evaluate: {episodes: 5}
"""


def test_tasks_are_sections_by_name(tmp_path: Path) -> None:
    path = write(tmp_path / "several.yaml", TASKS)
    recipe = validate_recipe(path, ["data.tasks.two.weight=3"])
    assert recipe.data.tasks is not None and recipe.data.schedule is not None
    assert recipe.data.tasks["two"].weight == 3.0
    single = task_recipe(recipe, "one")
    assert (single.data.path, single.selection.options) == ("a", {"k": 5})
    assert single.data.tasks is None and single.evaluate.episodes == 5
    assert task_recipe(recipe, "two").loader.returns_scale == 10.0
    assert single.loader.returns_scale == 1000.0
    child = write(tmp_path / "child.yaml", "base: several.yaml\ndata: {tasks: {one: {path: c}}}")
    tasks = load_recipe(child).data.tasks
    assert tasks is not None and (tasks["one"].path, tasks["one"].weight) == ("c", 2.0)
    fewer = load_recipe(child, ["data.tasks.two=null", "data.schedule=null"]).data.tasks
    assert fewer is not None and list(fewer) == ["one"], "null leaves one of the base out"
    assert Recipe.parse(parse_yaml(recipe.to_yaml(), where="x")) == recipe
    with pytest.raises(InputError, match="no task 'three'"):
        task_recipe(recipe, "three")


@pytest.mark.parametrize(
    ("override", "code", "said"),
    [
        ("data.tasks.two.wieght=3", "RECIPE_UNKNOWN_KEY", "did you mean 'data.tasks.two.weight'"),
        ("data.tasks.two=3", "RECIPE_TYPE", "data.tasks.two must be a section"),
        ("data.tasks.two.path=null", "RECIPE_TYPE", "data.tasks.two.path must be text"),
        ("data.tasks.two.weight=-1", "RECIPE_VALUE", "data.tasks.two.weight"),
        ("data.tasks.two.path=a", "RECIPE_VALUE", "data.tasks.two.path is that of one"),
        ("data.tasks.two.targets=[]", "RECIPE_VALUE", "data.tasks.two.targets"),
        ("data.tasks.one.source=x", "RECIPE_VALUE", "exclude each other"),
        ("data.tasks.two=null", "RECIPE_VALUE", "weights must name every task once"),
        ("data.path=x", "RECIPE_VALUE", "data.path and data.tasks exclude each other"),
        ("evaluate.targets=[3]", "RECIPE_VALUE", "say targets in each task"),
        ("data.schedule=[]", "RECIPE_VALUE", "at least one point"),
        ("data.schedule=[{step: 0, weights: {one: 1}}]", "RECIPE_VALUE", "tasks: one, two"),
        ("data.schedule=[{step: 0, weights: {one: 0, two: 0}}]", "RECIPE_VALUE", "all zero"),
        ("data.schedule=[{step: 0, wights: {}}]", "RECIPE_UNKNOWN_KEY", "data.schedule.0.weights"),
        ("data.tasks.one.selection.strategy=top", "SELECTION", "task one"),
        ("data.tasks.one.collect.environment=Pendulun-v1", "ENVIRONMENT_UNKNOWN", "task one"),
    ],
)
def test_mistakes_in_tasks_are_one_error(
    tmp_path: Path, override: str, code: str, said: str
) -> None:
    path = write(tmp_path / "several.yaml", TASKS)
    with pytest.raises(InputError) as caught:
        validate_recipe(path, [override])
    assert (caught.value.code, "\n" in str(caught.value)) == (code, False), str(caught.value)
    assert said in str(caught.value)
