"""Recipes: every shipped one is sound, every mistake is one error that shows the way out."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from gear_offline.config.files import RECIPES, recipe_paths
from gear_offline.config.recipe import (
    Recipe,
    copy_recipe,
    list_recipes,
    load_recipe,
)
from gear_offline.config.strict_yaml import parse_yaml
from gear_offline.errors import InputError
from gear_offline.runs.checks import validate_recipe
from gear_offline.runs.trainer import train

SHIPPED = sorted(RECIPES.rglob("*.yaml"))
LOCOMOTION = [
    f"{body}-{quality}"
    for body in ("hopper", "halfcheetah", "walker2d")
    for quality in ("medium", "medium-replay", "medium-expert")
]


def leaves(value: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(value, dict) and prefix != "selection.options.":
        for key, item in value.items():
            yield from leaves(item, f"{prefix}{key}.")
    else:
        yield prefix.rstrip(".")


def test_the_shipped_recipes_are_found() -> None:
    assert len(SHIPPED) >= 12
    assert [entry.path for entry in list_recipes()] == [recipe_paths()[p.stem] for p in SHIPPED]
    assert set(LOCOMOTION) | {"paper", "demo", "smoke"} <= set(recipe_paths())


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_each_shipped_recipe_is_sound(path: Path) -> None:
    recipe = validate_recipe(path.stem)
    assert recipe.name == path.stem
    assert recipe.description
    assert len(recipe.description) <= 80
    assert recipe == load_recipe(path)
    content = parse_yaml(path.read_text(), where=path.name)
    if "base" in content:
        base = load_recipe(content.pop("base")).to_dict()
        changed = set(leaves(content)) - {"name", "description"}
        if path.stem in LOCOMOTION:
            assert len(changed) <= 5, "a variant is its base plus at most five changed fields"
        assert base != recipe.to_dict()


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_recipe_survives_its_own_yaml(path: Path, tmp_path: Path) -> None:
    recipe = load_recipe(path)
    copy = tmp_path / "copy.yaml"
    copy.write_text(recipe.to_yaml())
    assert load_recipe(copy) == recipe
    assert recipe.to_yaml() == load_recipe(copy).to_yaml()


def test_paper_spells_out_the_defaults() -> None:
    paper = load_recipe("paper")
    assert paper == Recipe(name="paper", description=paper.description)


def test_the_papers_hyper_parameters() -> None:
    """Chen et al. 2021, and gym/experiment.py of the public code."""
    targets = {"hopper": (3600, 1800), "halfcheetah": (12000, 6000), "walker2d": (5000, 2500)}
    for name in LOCOMOTION:
        recipe = load_recipe(name)
        assert (recipe.loader.context_length, recipe.loader.batch_size) == (20, 64)
        assert (recipe.model.layers, recipe.model.heads, recipe.model.hidden_size) == (3, 1, 128)
        assert (recipe.model.activation, recipe.model.dropout) == ("relu", 0.1)
        assert recipe.optimizer.learning_rate == recipe.optimizer.weight_decay == 1e-4
        assert (recipe.optimizer.clip_norm, recipe.optimizer.warmup_steps) == (0.25, 10_000)
        assert (recipe.train.steps, recipe.loader.returns_scale) == (100_000, 1000.0)
        assert recipe.evaluate.targets == targets[name.split("-")[0]]
        assert recipe.data.source == f"d4rl:{name}-v2"


@pytest.mark.parametrize(
    ("override", "code", "said"),
    [
        ("train.step=3", "RECIPE_UNKNOWN_KEY", "did you mean 'train.steps'"),
        ("batch_size=3", "RECIPE_UNKNOWN_KEY", "did you mean 'loader.batch_size'"),
        ("learning_rate=1", "RECIPE_UNKNOWN_KEY", "did you mean 'optimizer.learning_rate'"),
        ("modle.layers=2", "RECIPE_UNKNOWN_KEY", "did you mean 'model'"),
        ("loader.batch_sice=2", "RECIPE_UNKNOWN_KEY", "did you mean 'loader.batch_size'"),
        ("model.xyz=2", "RECIPE_UNKNOWN_KEY", "options here: hidden_size"),
        ("train.steps=many", "RECIPE_TYPE", "train.steps must be a whole number, got 'many'"),
        ("train.steps='10'", "RECIPE_TYPE", "train.steps must be a whole number, got '10'"),
        ("train.steps=1.5", "RECIPE_TYPE", "train.steps must be a whole number"),
        ("train.steps=1e30", "RECIPE_TYPE", "at most 2^53"),
        ("train.steps=.inf", "RECIPE_TYPE", "train.steps must be a whole number, got inf"),
        ("train.steps.x=3", "RECIPE_TYPE", "train.steps must be a whole number"),
        ("seed=true", "RECIPE_TYPE", "seed must be a whole number, got true"),
        ("train.steps=", "RECIPE_TYPE", "train.steps must be a whole number, got null"),
        ("selection=3", "RECIPE_TYPE", "selection must be a section"),
        ("evaluate.targets=[a]", "RECIPE_TYPE", "evaluate.targets.0 must be a number"),
        ("evaluate.targets=3600,1800", "RECIPE_TYPE", "in brackets: [1, 2]"),
        ("evaluate.targets=true", "RECIPE_TYPE", "evaluate.targets must be a list"),
        ("loader.normalize_states=1", "RECIPE_TYPE", "must be true or false"),
        ("train.steps=0", "RECIPE_VALUE", "train.steps must be greater than or equal to 1"),
        ("loader.context_length=0", "RECIPE_VALUE", "loader.context_length"),
        # a million narrow blocks would fit the memory, and never be made
        ("model.layers=1e6", "RECIPE_VALUE", "model.layers must be less than or equal to 10000"),
        ("train.threads=1e5", "RECIPE_VALUE", "train.threads must be less than or equal to 4096"),
        ("model.dropout=1", "RECIPE_VALUE", "model.dropout must be less than 1"),
        ("optimizer.learning_rate=.nan", "RECIPE_VALUE", "a finite number"),
        ("optimizer.betas=[1,2,3]", "RECIPE_VALUE", "list of two numbers, got [1, 2, 3]"),
        ("optimizer.betas=[0.9]", "RECIPE_VALUE", "write it like optimizer.betas=[0.9,0.999]"),
        ("optimizer.betas=[]", "RECIPE_VALUE", "two numbers, got [] (hopper-medium); write it"),
        ("optimizer.betas=0.9", "RECIPE_TYPE", "two numbers, got 0.9 (hopper-medium); write it"),
        ("optimizer.betas=[0.9,a]", "RECIPE_TYPE", "optimizer.betas.1 must be a number"),
        ("train.precision=bf61", "RECIPE_VALUE", "did you mean 'bf16'"),
        ("train.device=gpu", "RECIPE_VALUE", "auto, cpu, cuda or cuda:N"),
        ("name=../x", "RECIPE_VALUE", "letters, digits"),
        ("seed=9223372036854775808", "RECIPE_VALUE", "seed must be less than"),
        ("model.heads=3", "RECIPE_VALUE", "multiple of model.heads"),
        ("train.steps=100", "RECIPE_VALUE", "optimizer.warmup_steps must not exceed train.steps"),
        ("model.max_timestep=5", "RECIPE_VALUE", "at least loader.context_length"),
        ("train.accumulate=7", "RECIPE_VALUE", "must divide loader.batch_size (64), got 7"),
        ("evaluate.targets=[]", "RECIPE_VALUE", "at least one return"),
        ("data.collect.environment=Hopper-v5", "RECIPE_VALUE", "exclude each other"),
        ("data.path=null", "RECIPE_VALUE", "no place"),
        ("seed=[1", "RECIPE_SYNTAX", "override seed"),
        ("train.steps", "RECIPE_OVERRIDE", "key=value"),
        ("=3", "RECIPE_OVERRIDE", "key=value"),
        ("train..steps=3", "RECIPE_OVERRIDE", "key=value"),
    ],
)
def test_each_mistake_is_one_error(override: str, code: str, said: str) -> None:
    with pytest.raises(InputError, match=re.escape(said)) as caught:
        load_recipe("hopper-medium", [override])
    assert caught.value.code == code
    assert "\n" not in str(caught.value)


def test_several_mistakes_are_counted() -> None:
    with pytest.raises(InputError, match=r"\(and 1 more\)"):
        load_recipe("paper", ["train.steps=x", "seed=y"])


def test_overrides_set_nested_values() -> None:
    recipe = load_recipe(
        "hopper-medium",
        [
            "train.steps=2e4",
            "train.steps=20000",
            "optimizer.learning_rate=5e-4",
            "evaluate.targets=[1, 2.5]",
            "evaluate.environment=",
            "selection.options.alpha=0.5",
            "loader={batch_size: 7}",
        ],
    )
    assert recipe.train.steps == 20_000
    assert recipe.optimizer.learning_rate == 5e-4
    assert recipe.evaluate.targets == (1.0, 2.5)
    assert recipe.evaluate.environment is None
    assert recipe.selection.options == {"alpha": 0.5}
    assert (recipe.loader.batch_size, recipe.loader.context_length) == (7, 20)
    assert load_recipe("paper", ["evaluate.targets=3600"]).evaluate.targets == (3600.0,)


def test_overrides_may_be_one_text_or_a_mapping() -> None:
    asked = {"train.steps": 20_000, "evaluate.targets": [1, 2.5], "evaluate.environment": None}
    recipe = load_recipe("hopper-medium", asked)
    assert recipe.train.steps == 20_000
    assert (recipe.evaluate.targets, recipe.evaluate.environment) == ((1.0, 2.5), None)
    assert load_recipe("hopper-medium", "train.steps=20000").train.steps == 20_000


def test_values_of_a_mapping_may_be_numpy_or_paths() -> None:
    asked = {
        "data.path": Path("d/ü"),
        "train.steps": np.int64(20_000),
        "optimizer.learning_rate": np.logspace(-3, -4, 2)[1],
        "model.dropout": np.float32(0.5),
        "evaluate.targets": np.array([1, 2.5]),
    }
    recipe = load_recipe("hopper-medium", asked)
    assert (recipe.data.path, recipe.train.steps, recipe.model.dropout) == ("d/ü", 20_000, 0.5)
    assert recipe.optimizer.learning_rate == pytest.approx(1e-4)
    assert recipe.evaluate.targets == (1.0, 2.5)
    with pytest.raises(InputError, match=r"train\.steps cannot be a set") as caught:
        load_recipe("hopper-medium", {"train.steps": {1}})
    assert caught.value.code == "RECIPE_TYPE"


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("trian__steps", "unknown option 'trian'"),
        ("train__stepz", "did you mean 'train.steps'"),
        ("seed__x", "seed must be a whole number"),
        ("data__collect__steps", "'data.collect.environment' is missing"),
    ],
)
def test_what_cannot_be_replaced_is_named(option: str, said: str) -> None:
    with pytest.raises(InputError, match=re.escape(said)):
        load_recipe("paper", ["data.path=x"]).replace(**{option: 3})


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_base_is_a_name_or_a_file_beside(tmp_path: Path) -> None:
    write(tmp_path / "one.yaml", "base: hopper-medium\nselection: {options: {a: 1, b: 2}}\nseed: 4")
    child = write(tmp_path / "two.yaml", "base: one.yaml\nselection: {options: {c: 3}}")
    recipe = load_recipe(child)
    assert recipe.name == "two", "a recipe is named after its file unless it says otherwise"
    assert recipe.seed == 4
    assert recipe.evaluate.environment == "Hopper-v4"
    assert recipe.selection.options == {"c": 3}, "options belong to their strategy"


@pytest.mark.parametrize(
    ("texts", "code", "said"),
    [
        ({"a": "base: a.yaml"}, "RECIPE_BASE", "round"),
        ({"a": "base: b.yaml", "b": "base: a.yaml"}, "RECIPE_BASE", "round"),
        ({"a": "base: papr"}, "RECIPE_NOT_FOUND", "did you mean 'paper'"),
        ({"a": "base: 3"}, "RECIPE_TYPE", "base must be text"),
        ({"a": "- 1"}, "RECIPE_SYNTAX", "key: value"),
        ({"a": ""}, "RECIPE_SYNTAX", "key: value"),
        ({"a": "\xff"}, "RECIPE_SYNTAX", "UTF-8"),
    ],
)
def test_files_that_cannot_be_used(
    tmp_path: Path, texts: dict[str, str], code: str, said: str
) -> None:
    for name, text in texts.items():
        (tmp_path / f"{name}.yaml").write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError, match=re.escape(said)) as caught:
        load_recipe(tmp_path / "a.yaml")
    assert caught.value.code == code


@pytest.mark.parametrize("name", ["hoper-medium", "missing.yaml", "no/such/file.yaml"])
def test_a_recipe_that_is_not_there(name: str) -> None:
    with pytest.raises(InputError, match="recipes ls") as caught:
        load_recipe(name)
    assert caught.value.code == "RECIPE_NOT_FOUND"


def test_what_is_there_and_no_recipe_is_told_as_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "notes.txt").write_text("base: paper")
    with pytest.raises(InputError, match=r"the folder of that name is no run"):
        load_recipe("data")
    with pytest.raises(InputError, match=r"a file's name ends with \.yaml"):
        load_recipe("notes.txt")


def test_a_copy_is_named_after_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = copy_recipe("hopper-medium", tmp_path / "mine.yaml")
    copied, original = load_recipe(mine), load_recipe("hopper-medium")
    assert copied.name == "mine"
    assert {**copied.to_dict(), "name": ""} == {**original.to_dict(), "name": ""}
    with pytest.raises(InputError) as caught:
        copy_recipe("hopper-medium", mine)
    assert caught.value.code == "RECIPE_EXISTS"
    monkeypatch.chdir(tmp_path)
    assert copy_recipe("paper") == Path("paper.yaml")
    assert load_recipe("./paper.yaml") == load_recipe("paper")


def test_a_copy_that_cannot_be_written_leaves_no_file(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(InputError) as caught:
            copy_recipe("paper", tmp_path / "mine.yaml")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.code == "RECIPE_WRITE"
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_strategy_is_refused_before_the_data_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.yaml", "base: paper\nselection: {strategy: uniform_step}")
    with pytest.raises(InputError, match="did you mean 'uniform_steps'") as caught:
        validate_recipe(path)
    assert caught.value.code == "SELECTION"


@pytest.mark.parametrize(
    ("text", "code", "key", "remedy"),
    [
        ("selection: {options: {temperature: 2}}", "SELECTION", "temperature",
         "no options"),
        ("evaluate: {reference: hopper-mediun-v2}", "REFERENCE_UNKNOWN", "evaluate.reference",
         "did you mean 'hopper-medium-v2'"),
        ("evaluate: {environment: Pendulum-v7}", "ENVIRONMENT_UNKNOWN", "evaluate.environment",
         "did you mean Pendulum-v1"),
        ("evaluate: {targets: [3600, 1800, 3600]}", "RECIPE_VALUE", "evaluate.targets",
         "evaluate.episodes"),
        ("evaluate: {environment: a b}", "ENVIRONMENT", "evaluate.environment",
         "Hopper-v5"),
        ("data: {path: p, collect: {environment: Pendulun-v1}}", "ENVIRONMENT_UNKNOWN",
         "data.collect.environment", "Pendulum-v1"),
        ("data: {path: p, collect: {environment: Pendulum-v1, policy: arz}}", "RECIPE_VALUE",
         "data.collect.policy", "did you mean 'ars'"),
        ("data: {path: p, collect: {environment: Pendulum-v1, policy: 'sb3:'}}", "RECIPE_VALUE",
         "data.collect.policy", "sb3:PPO"),
        ("data: {path: p, collect: {environment: Pendulum-v1, policy: ars, quality: good}}",
         "COLLECT_OPTION", "data.collect.quality", "medium-expert"),
        ("data: {path: p, collect: {environment: Pendulum-v1, quality: expert}}",
         "COLLECT_OPTION", "data.collect.quality", "'ars'"),
        ("data: {path: p, collect: {environment: Pendulum-v1, policy: ars, mix: {best: 1}}}",
         "COLLECT_MIX", "data.collect.mix", "replay"),
    ],
)  # fmt: skip
def test_names_that_nothing_answers_to_are_refused_before_the_data_is_read(
    tmp_path: Path, text: str, code: str, key: str, remedy: str
) -> None:
    path = write(tmp_path / "a.yaml", f"base: paper\n{text}")
    load_recipe(path)  # its types are right
    with pytest.raises(InputError) as caught:
        validate_recipe(path)
    assert caught.value.code == code
    assert key in str(caught.value) and str(path) in caught.value.where
    assert remedy in str(caught.value)
    with pytest.raises(InputError, match="recipe a") as early:
        train(load_recipe(path), out=tmp_path / "run")
    assert early.value.code == code and not (tmp_path / "run").exists()


def test_names_that_something_answers_to_are_accepted(tmp_path: Path) -> None:
    collect = "data: {path: p, collect: {environment: Pendulum-v1, policy: '%s'}}"
    policy = write(tmp_path / "policy.safetensors", "")
    for name in ("random", "ars", "sb3:PPO", str(policy)):
        validate_recipe(write(tmp_path / "a.yaml", f"base: paper\n{collect % name}"))
    for environment in ("Pendulum", "some.module:Own-v0"):
        text = f"base: paper\nevaluate: {{environment: '{environment}'}}"
        validate_recipe(write(tmp_path / "a.yaml", text))


@pytest.mark.parametrize("text", ["100000", "1e5", "1.0E+5", "100_000", "1_00_000", "+1e5"])
def test_whole_numbers_may_have_exponents_and_underscores(text: str) -> None:
    recipe = load_recipe("paper", [f"train.steps={text}", f"name=r{text.strip('+')}"[:6]])
    assert recipe.train.steps == 100_000 and type(recipe.train.steps) is int
    assert load_recipe("paper", ["loader.context_length=3e1"]).loader.context_length == 30


@pytest.mark.parametrize(
    "text", ["1.5", "1e-1", "1e400", "_1", "1_", "1__0", "'10'", ".nan", "1e30"]
)
def test_what_is_no_whole_number_stays_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"train\.steps"):
        load_recipe("paper", [f"train.steps={text}"])


def test_a_recipe_is_shown_in_a_line() -> None:
    recipe = load_recipe("paper", {"train.steps": 12_000, "seed": 3, "train.device": "cpu"})
    said = "12,000 steps of 64 x 20, uniform_steps, 128 wide, 3 layers, seed 3, on cpu)"
    assert repr(recipe) == str(recipe) == f"Recipe('paper': no data, {said}"
    assert repr(recipe.replace(data__path="data/mine")).startswith("Recipe('paper': data/mine, ")
    tasks = {"one": {"path": "a"}, "two": {"path": "b"}}
    assert repr(recipe.replace(data__tasks=tasks)).startswith("Recipe('paper': tasks one, two, ")


def test_a_recipe_is_frozen() -> None:
    recipe = load_recipe("paper")
    with pytest.raises(ValidationError):
        recipe.train.steps = 3
    changed = recipe.replace(train__steps=20_000, seed=3)
    assert (changed.train.steps, changed.seed, recipe.train.steps) == (20_000, 3, 100_000)


def test_options_may_stand_beside_their_strategy(tmp_path: Path) -> None:
    base = write(tmp_path / "one.yaml", "base: paper\nselection: {strategy: top_k, k: 5}")
    assert load_recipe(base).selection.options == {"k": 5}
    assert validate_recipe(base, ["selection.k=7"]).selection.options == {"k": 7}
    child = write(tmp_path / "two.yaml", "base: one.yaml\nselection: {strategy: return_weighted}")
    assert load_recipe(child).selection.options == {}, "another strategy starts without options"
    for overrides, options in (
        (["selection.strategy=return_weighted"], {}),
        (["selection.percent=3", "selection.strategy=top_percent"], {"percent": 3}),
        (["selection.strategy=top_k"], {"k": 5}),
        (["selection.options={}"], {}),
        (["selection.options={unit: steps}"], {"unit": "steps"}),
    ):
        assert load_recipe(base, overrides).selection.options == options, overrides
    mixed = "selection: {strategy: top_percent, percent: 20, options: {of: episodes}}"
    found = load_recipe(write(tmp_path / "three.yaml", f"base: paper\n{mixed}"))
    assert found.selection.options == {"of": "episodes", "percent": 20}
