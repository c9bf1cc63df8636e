"""Recipes: every shipped one is sound, and all that is wrong in one is told in one error."""

import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from gear_offline.config.files import RECIPES, copy_recipe
from gear_offline.config.problems import ALIASES, dotted_fields, section_of
from gear_offline.config.recipe import Recipe, load_recipe
from gear_offline.config.sections import SchedulePoint, TaskSettings
from gear_offline.config.strict_yaml import MAX_BYTES, dump_yaml, parse_yaml
from gear_offline.errors import InputError
from gear_offline.runs.checks import check_recipe
from gear_offline.runs.train import train
from tests.support import Patch, failing_code, one_error

SHIPPED = sorted(RECIPES.rglob("*.yaml"))
LOCOMOTION = [
    f"{body}-{quality}"
    for body in ("hopper", "halfcheetah", "walker2d")
    for quality in ("medium", "medium-replay", "medium-expert")
]
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
OPTIONS = list(dotted_fields(Recipe))


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def validate_recipe(name: str | Path, *overrides: str) -> Recipe:
    """Do what `recipes validate` does."""
    recipe = load_recipe(name, overrides)
    check_recipe(recipe, where=str(name))
    return recipe


def refused(name: str | Path, *overrides: str) -> str:
    """Return the one line that a recipe is refused with."""
    with one_error("RECIPE") as caught:
        load_recipe(name, overrides)
    return str(caught.value)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_each_shipped_recipe_is_sound(path: Path, tmp_path: Path) -> None:
    recipe = validate_recipe(path.stem)
    assert recipe.name == path.stem and 0 < len(recipe.description) <= 80
    assert recipe == load_recipe(path) == load_recipe(write(tmp_path / "r.yaml", recipe.to_yaml()))


def test_paper_spells_out_the_defaults() -> None:
    paper = load_recipe("paper")
    defaults = Recipe(name="paper", description=paper.description)
    assert paper == defaults.replace({"model.action_tanh": "auto"})  # of data of one's own


def test_the_papers_hyper_parameters() -> None:
    """Chen et al. 2021, and gym/experiment.py of the public code."""
    targets = {"hopper": (3600, 1800), "halfcheetah": (12000, 6000), "walker2d": (5000, 2500)}
    for name in LOCOMOTION:
        recipe = load_recipe(name)
        assert (recipe.loader.context_length, recipe.loader.batch_size) == (20, 64)
        assert (recipe.model.layers, recipe.model.heads, recipe.model.hidden_size) == (3, 1, 128)
        assert (recipe.model.activation, recipe.model.dropout) == ("relu", 0.1)
        assert recipe.optimizer.learning_rate == recipe.optimizer.weight_decay == 1e-4
        assert (recipe.optimizer.clip_norm, recipe.optimizer.warmup(100_000)) == (0.25, 10_000)
        assert (recipe.train.steps, recipe.loader.returns_scale) == (100_000, 1000.0)
        assert recipe.evaluate.targets == targets[name.split("-")[0]]
        assert recipe.data.source == f"d4rl:{name}-v2"


def test_a_short_run_has_a_short_warm_up() -> None:
    for steps, options, warmup in (
        *((500, {}, 50), (3, {}, 0), (10**6, {}, 10_000)),
        (5, {"optimizer.warmup_steps": 7}, 7),
    ):
        recipe = load_recipe("paper", {"train.steps": steps, **options})
        assert recipe.optimizer.warmup(steps) == warmup


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.step=3", "unknown option 'train.step', did you mean 'train.steps'?"),
        ("modle.layers=2", "did you mean 'model.layers'"),
        ("train.lr=1", "did you mean 'optimizer.learning_rate'"),
        ("environment=x", "did you mean 'evaluate.environment'"),
        ("model.xyz=2", "unknown option 'model.xyz' of decision_transformer, `recipes validate`"),
        ("train.steps=many", 'train.steps: Input should be a whole number, got "many"'),
        ("train.skip=3", "a list, as in [1, 2]"),
        ("evaluate.targets=[3600, 1800, 3600]", "evaluate.targets: names a return twice"),
        (
            "train.precision=bf61",
            "train.precision: Input should be 'auto', 'fp32', 'bf16' or 'fp8'",
        ),
        ("model.heads=3", "multiple of model.heads (3), got 128: try 129"),
        ("model.max_timestep=5", "at least loader.context_length"),
        ("train={deterministic: true, compile: on}", "exclude each other"),
        ("train={deterministic: ranks, parallel: fsdp}", "train.parallel=fsdp and train.determ"),
        ("evaluate.targets=[1e308]", "each below 1e+18 in size"),
        ("data={path: x, source: x, collect: {environment: Hopper-v5}}", "exclude each other"),
        ("train.accumulate=7", "must divide loader.batch_size (64), got 7"),
        ("data.path=null", "no place"),
        ("seed=[1", "override seed"),
        ("train.steps", "key=value"),
        ("train..steps=3", "key=value"),
    ],
)
def test_each_mistake_is_one_error(override: str, said: str) -> None:
    assert said in refused("hopper-medium", override)


def test_all_problems_are_told() -> None:
    for overrides in (["train.steps=x", "seed=y"], ["train.accumulate=7", "model.heads=3"]):
        said = refused("paper", *overrides)
        assert all(override.partition("=")[0] in said for override in overrides)
    assert "selection.strategy=top_k" in refused("paper", "selection=top_k")
    two = "selection.strategy=top_percent selection.percent=50"
    for text in ("selection=", "selection.strategy="):
        assert two in refused("paper", f"{text}top_percent:percent=50")


# a million narrow blocks would fit the memory, and never be made
WRONG = """
train.steps=1.5 train.steps.x=3 train.steps= train.steps=0 seed=9223372036854775808 seed=true
selection=3 evaluate.targets=[a] evaluate.targets=[] evaluate.targets=[1e308] name=../x
loader.normalize_states=1 model.layers=1e6 model.dropout=1 optimizer.learning_rate=.nan
train.device=gpu
"""


@pytest.mark.parametrize("override", WRONG.split())
def test_a_wrong_value_is_told_with_its_option(override: str) -> None:
    option = override.partition("=")[0].removesuffix(".x")
    said = refused("hopper-medium", override)
    assert said.startswith(f"[RECIPE] {option}") and "match pattern" not in said


def test_every_alias_leads_to_an_option_there_is() -> None:
    assert set(ALIASES.values()) <= set(OPTIONS)
    for alias, option in ALIASES.items():
        assert f"{alias!r}, did you mean {option!r}?" in refused("paper", f"{alias}=1")


@pytest.mark.parametrize("path", ["data #1", "#1", 'da=ta #é, it\'s "b"'])
def test_no_part_of_an_option_counts_as_a_comment(path: str) -> None:
    with one_error("RECIPE", "from # on") as caught:
        load_recipe("smoke", f"data.path={path}")
    remedy = caught.value.remedy.removeprefix("write ")
    assert load_recipe("smoke", shlex.split(remedy)).data.path == path
    assert load_recipe("smoke", "data.path=a#1").data.path == "a#1"


def test_overrides_are_texts_or_a_mapping() -> None:
    pairs: list[tuple[str, str, Any]] = [
        ("train.steps", "2e4", np.int64(20_000)),
        ("optimizer.learning_rate", "5e-4", np.float64(5e-4)),
        ("evaluate.targets", "[1, 2.5]", np.array([1, 2.5])),
        ("evaluate.environment", "", None),
        ("selection.alpha", "0.5", 0.5),
        ("loader", "{batch_size: 7}", {"batch_size": 7}),
    ]
    texts = [f"{option}={text}" for option, text, _ in pairs]
    mapping = {option: value for option, _, value in pairs}
    base = load_recipe("hopper-medium")
    recipe = load_recipe("hopper-medium", texts)
    assert recipe == load_recipe("hopper-medium", mapping)
    assert recipe == base.replace(mapping) == base.replace(texts)
    assert (recipe.train.steps, recipe.optimizer.learning_rate) == (20_000, 5e-4)
    assert (recipe.evaluate.targets, recipe.evaluate.environment) == ((1.0, 2.5), None)
    assert recipe.selection.options == {"alpha": 0.5}
    assert (recipe.loader.batch_size, recipe.loader.context_length) == (7, 20)
    for text in ("100000", "1e5", "1.0E+5", "100_000", "+1e5"):
        steps = load_recipe("smoke", f"train.steps={text}").train.steps
        assert steps == 100_000 and type(steps) is int
    for name, reference in {"Hopper-v4": "hopper-medium-v2", "Pendulum-v1": None}.items():
        other = base.replace({"evaluate.environment": name})
        assert other.evaluate.reference == reference, "other scores are not those of the data"
    for pair in ([5, 1], [0, 0]):
        with pytest.raises(InputError, match=r"write \[LOWER, HIGHER\]"):
            check_recipe(base.replace({"evaluate.reference": pair}))
    for text, targets in {"3600": (3600.0,), "36e2, -1": (3600.0, -1.0)}.items():
        assert load_recipe("paper", f"evaluate.targets={text}").evaluate.targets == targets
    listed = load_recipe("paper", ["train.trackers=tensorboard,wandb", "optimizer.betas=0.8,0.9"])
    assert listed.train.trackers == ("tensorboard", "wandb")
    assert listed.optimizer.betas == (0.8, 0.9)
    assert load_recipe("paper", {"data.path": Path("d/ü")}).data.path == "d/ü"
    with pytest.raises(InputError, match=r"train\.steps: .*, got .*\{1\}"):
        load_recipe("paper", {"train.steps": {1}})


def test_sizes_have_units() -> None:
    recipe = load_recipe("smoke", ["loader.host_budget=1MiB", "loader.hbm_budget=2GB"])
    assert (recipe.loader.host_budget, recipe.loader.hbm_budget) == (1 << 20, 2 * 10**9)
    with pytest.raises(InputError, match="write it like 256MiB"):
        load_recipe("smoke", "loader.host_budget=much")


def test_a_recipe_is_frozen_and_replace_names_what_is_wrong() -> None:
    recipe = load_recipe("paper", ["data.path=x"])
    with pytest.raises(InputError, match=r"recipe\.replace"):
        recipe.train.steps = 3
    changed = recipe.replace({"train.steps": 20_000, "seed": 3})
    assert (changed.train.steps, changed.seed, recipe.train.steps) == (20_000, 3, 100_000)
    for option, said in (
        ("trian.steps", "did you mean 'train.steps'"),
        ("seed.x", "seed: "),
        ("data.collect.steps", "data.collect.environment: Field required"),
    ):
        with pytest.raises(InputError, match=re.escape(said)):
            recipe.replace({option: 3})


def test_a_base_is_a_name_or_a_file_in_the_same_folder(tmp_path: Path) -> None:
    write(tmp_path / "one.yaml", "base: hopper-medium\nselection: {a: 1, b: 2}\nseed: 4")
    child = write(tmp_path / "two.yaml", "base: one.yaml\nselection: {c: 3}")
    recipe = load_recipe(child)
    assert recipe.name == "two", "a recipe is named after its file unless it says otherwise"
    assert (recipe.seed, recipe.evaluate.environment) == (4, "Hopper-v4")
    assert recipe.selection.options == {"a": 1, "b": 2, "c": 3}


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ({"a": "base: b.yaml", "b": "base: a.yaml"}, "round"),
        ({"a": "base: papr"}, "did you mean 'paper'"),
        ({"a": ""}, "key: value"),
        ({"a": "model.layers: 4"}, "'model.layers', nest it: model: {layers: ...}"),
        ({"a": "loader: {goals.future: 1}"}, "'loader.goals.future', nest it: goals: {future: "),
        ({"a": "\xff"}, "cannot be read"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, texts: dict[str, str], said: str) -> None:
    for name, text in texts.items():
        (tmp_path / f"{name}.yaml").write_bytes(text.encode("latin-1"))
    assert said in refused(tmp_path / "a.yaml")


def test_what_is_there_and_no_recipe_is_told_as_that(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data/set").mkdir(parents=True)
    write(tmp_path / "data/set/manifest.json", "{}")
    for name in ("notes.txt", "mine.hdf5"):
        write(tmp_path / name, "x")
    train_it = "gear-offline train paper data.path=data/"
    assert f"is a dataset, not a recipe; {train_it}set" in refused("data/set")
    assert f"convert mine.hdf5 data/mine, then {train_it}mine" in refused("mine.hdf5")
    assert "ends with .yaml" in refused("notes.txt")
    assert "no run there" in refused("data")
    assert "did you mean 'hopper-medium'? `gear-offline recipes ls`" in refused("hoper-medium")
    for name in ("missing.yaml", "no/such/file.yaml"):
        assert f"there is no file {name}; `gear-offline recipes ls`" in refused(name)


def test_a_copy_is_named_after_its_file(tmp_path: Path, monkeypatch: Patch) -> None:
    mine = copy_recipe("hopper-medium", tmp_path / "mine.yaml")
    assert load_recipe(mine) == load_recipe("hopper-medium", "name=mine")
    assert failing_code(lambda: copy_recipe("hopper-medium", mine)) == "OUTPUT_EXISTS"
    monkeypatch.chdir(tmp_path)
    assert copy_recipe("paper") == Path("paper.yaml")
    assert load_recipe("./paper.yaml") == load_recipe("paper")


COLLECT = "data: {path: p, collect: {environment: Pendulum-v1, policy: %s}}"


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("selection: {strategy: uniform_step}", "SELECTION", "did you mean 'uniform_steps'"),
        ("selection: {temperature: 2}", "SELECTION", "temperature"),
        ("evaluate: {reference: hopper-mediun-v2}", "RECIPE", "did you mean 'hopper-medium-v2'"),
        (
            "evaluate: {environment: Pendulum-v7}",
            "ENVIRONMENT",
            "It provides versioned environments: [ `v1` ]",
        ),
        ("evaluate: {environment: a b}", "ENVIRONMENT", "evaluate.environment"),
        (COLLECT.replace("um-v1", "un-v1") % "ars", "ENVIRONMENT", "data.collect.environment"),
        (COLLECT % "arz", "RECIPE", "did you mean 'ars'"),
        (COLLECT % "'sb3:'", "RECIPE", "sb3:PPO"),
        (COLLECT % "ars, quality: good", "RECIPE", "data.collect.quality: no quality 'good'"),
        (COLLECT % "random, quality: expert", "RECIPE", "data.collect.quality"),
    ],
)
def test_names_that_nothing_answers_to_are_refused_before_the_data_is_read(
    tmp_path: Path, text: str, code: str, said: str
) -> None:
    path = write(tmp_path / "a.yaml", f"base: paper\n{text}")
    load_recipe(path)  # its types are right
    with pytest.raises(InputError, match=re.escape(said)) as caught:
        validate_recipe(path)
    assert caught.value.code.startswith(code) and str(path) in caught.value.where
    with one_error(caught.value.code, "recipe a"):
        train(load_recipe(path), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_names_that_something_answers_to_are_accepted(tmp_path: Path) -> None:
    texts = [COLLECT % repr(name) for name in ("random", "ars", "sb3:PPO")]
    texts += [
        f"evaluate: {{environment: '{name}'}}" for name in ("Pendulum", "gymnasium:CartPole-v1")
    ]
    for text in texts:
        validate_recipe(write(tmp_path / "a.yaml", f"base: paper\n{text}"))


def test_a_recipe_is_shown_in_a_line() -> None:
    recipe = load_recipe("paper", {"train.steps": 12_000, "seed": 3, "train.device": "cpu"})
    said = "12,000 steps of 64 x 20, uniform_steps, 128 wide, 3 layers, seed 3, on cpu)"
    assert repr(recipe) == str(recipe) == f"Recipe('paper': no data, {said}"
    tasks = {"one": {"path": "a"}, "two": {"path": "b"}}
    assert "tasks one, two" in repr(recipe.replace({"data.tasks": tasks}))


def test_options_stand_next_to_their_strategy_and_go_with_it(tmp_path: Path) -> None:
    base = write(tmp_path / "one.yaml", "base: paper\nselection: {strategy: top_k, k: 5}")
    cases: list[tuple[list[str], dict[str, int]]] = [
        (["selection.k=7"], {"k": 7}),
        (["selection.percent=3", "selection.strategy=top_percent"], {"percent": 3}),
        (["selection.strategy=top_k"], {"k": 5}),
    ]
    for overrides, options in cases:
        assert load_recipe(base, overrides).selection.options == options
        assert load_recipe(base).replace(overrides).selection.options == options
    child = write(tmp_path / "two.yaml", "base: one.yaml\nselection: {strategy: return_weighted}")
    assert load_recipe(child).selection.options == {}, "another strategy starts without options"


def test_tasks_are_sections_by_name(tmp_path: Path) -> None:
    path = write(tmp_path / "several.yaml", TASKS)
    recipe = validate_recipe(path, "data.tasks.two.weight=3")
    assert recipe.data.tasks is not None and recipe.data.tasks["two"].weight == 3.0
    single = recipe.of_task("one")
    assert (single.data.path, single.selection.options) == ("a", {"k": 5})
    assert single.data.tasks is None and single.evaluate.episodes == 5
    assert single.loader.returns_scale == 1000.0
    assert recipe.of_task("two").loader.returns_scale == 10.0
    child = write(tmp_path / "child.yaml", "base: several.yaml\ndata: {tasks: {one: {path: c}}}")
    tasks = load_recipe(child).data.tasks
    assert tasks is not None and (tasks["one"].path, tasks["one"].weight) == ("c", 2.0)
    fewer = load_recipe(child, ["data.tasks.two=null", "data.schedule=null"]).data.tasks
    assert fewer is not None and list(fewer) == ["one"], "null leaves one of the base out"
    assert Recipe.parse(parse_yaml(recipe.to_yaml(), where="x")) == recipe


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.tasks.two.wieght=3", "did you mean 'data.tasks.two.weight'"),
        ("data.tasks.two=3", "data.tasks.two: "),
        ("data.tasks.two=null", "weights must name every task once"),
        ("data.path=x", "path and tasks exclude each other"),
        ("evaluate.targets=[3]", "say targets in each task"),
        ("data.schedule=[]", "data.schedule"),
        ("data.schedule=[{step: 0, weights: {one: 0, two: 0}}]", "all zero"),
        ("data.tasks.one.selection.strategy=top", "task one"),
        ("data.tasks.one.collect.environment=Pendulun-v1", "task one"),
    ],
)
def test_mistakes_in_tasks_are_one_error(tmp_path: Path, override: str, said: str) -> None:
    with pytest.raises(InputError, match=re.escape(said)) as caught:
        validate_recipe(write(tmp_path / "several.yaml", TASKS), override)
    assert "\n" not in str(caught.value)


def test_every_option_has_a_meaning() -> None:
    """The line that help and documents show."""
    models: list[type[BaseModel]] = [Recipe, TaskSettings, SchedulePoint]
    for model in models:  # which grow by sections
        for name, field in model.model_fields.items():
            if section := section_of(field.annotation):
                models.append(section)
            else:
                assert (field.description or "").endswith("."), name


@given(
    st.dictionaries(
        st.sampled_from(OPTIONS), st.integers() | st.text(max_size=5) | st.floats(), max_size=3
    )
)
def test_any_values_are_accepted_or_refused_with_a_code(values: dict[str, Any]) -> None:
    try:
        recipe = load_recipe("paper", values)
    except InputError as error:
        assert error.code == "RECIPE"
    else:
        assert Recipe.parse(parse_yaml(recipe.to_yaml(), where="x")) == recipe


def test_scalars_follow_yaml_1_2() -> None:
    # YAML 1.1 reads the text 1e-4, eight, ninety and false
    different = {"1e-4": 1e-4, "010": 10, "1:30": "1:30", "no": "no"}
    same = {".5": 0.5, "true": True, "~": None, "": None, "[1, 2.5, x]": [1, 2.5, "x"]}
    texts = {text: text for text in ("2020-01-01", "0x10")}
    for text, expected in (different | same | texts).items():
        value = parse_yaml(text, where="test")
        assert value == expected and type(value) is type(expected), text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a:\n  b: 1\n  b: 2", "'b' is given twice"),
        ("a: &a [x,x,x,x]\nb: &b [*a,*a,*a,*a]\nc: [*b,*b,*b,*b]\n", "anchors and aliases"),
        ("a: !!python/object/apply:os.system [echo]", "tag"),
        ("1: 2", "no name"),
        ("a: [1", "expected"),
        ("--- 1\n--- 2", "single document"),
        ("a: \x07", "unacceptable character"),
        ("a: " + "9" * 5000, "integer string conversion"),
        ("[" * 5000, "nested deeper"),
        ("a: " + "x" * MAX_BYTES, "larger than"),
    ],
)
def test_what_is_not_plain_yaml_is_refused_with_one_error(text: str, said: str) -> None:
    with one_error("RECIPE", said) as caught:
        parse_yaml(text, where="file.yaml")
    assert "file.yaml" in str(caught.value)


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(10**18), 10**18)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=("Cc", "Cs", "Cn")), max_size=12)
    | st.sampled_from(["1e5", "no", "null", "~", "010", "-", "1:30", "a: b", "#x", "*a", "&a"])
)


@given(
    st.dictionaries(
        st.text("abcdefgh_", min_size=1, max_size=6), SCALARS | st.lists(SCALARS, max_size=3)
    )
)
def test_what_is_dumped_is_read_back_equal(document: dict[str, Any]) -> None:
    # as texts: equality is blind to 1 == 1.0 == True
    assert repr(parse_yaml(dump_yaml(document), where="test")) == repr(document)
