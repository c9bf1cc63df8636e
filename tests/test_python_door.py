"""Mistakes that people make in Python: each is one line that says what to write instead."""

import pickle
from collections.abc import Callable
from inspect import isfunction, signature
from operator import length_hint
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

import gear_offline as go
from gear_offline.cli.main import main
from gear_offline.config.sections import LoaderSettings, SelectionSettings
from gear_offline.errors import GearError, InputError, UnavailableError
from gear_offline.evaluation.tasks import EvaluationTask
from gear_offline.models.decision_transformer import DecisionTransformer
from tests.support import Captured, Patch, make_dataset, one_error

DOOR: Any = go  # what type checkers would refuse already


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = make_dataset(tmp_path_factory.mktemp("door"), [9, 7, 8]).path
    return path


def loader(folder: Path, **options: Any) -> Any:
    return DOOR.GearLoader(folder, **{"batch_size": 4, "context_length": 3} | options, device="cpu")


def set_steps() -> None:
    recipe: Any = go.load_recipe("smoke")
    recipe.train.steps = 5


def weights(run: Path) -> Any:
    (run / "checkpoints").mkdir(parents=True)
    return DecisionTransformer.from_pretrained(run)


TASK: Any = EvaluationTask
PENDULUM = {"environment": "Pendulum-v1", "targets": (0.0,)}
MISTAKES: list[tuple[Callable[[Path], object], str]] = [
    (lambda d: loader(d, selection="top_percnt:percent=10"), "did you mean 'top_percent'"),
    (lambda d: next(iter(DataLoader(loader(d)))), "has no length"),
    (lambda d: next(loader(d)).observations, "did you mean states?"),
    (lambda d: next(loader(d)).dones, "extra_columns=['terminals']"),
    (lambda d: next(loader(d))["obs"], "a batch has states, actions"),
    (lambda d: set_steps(), "recipe.replace("),
    (lambda d: DOOR.from_episodes([{"obs": np.zeros((3, 2))}]), "no column is named observations"),
    (lambda d: DecisionTransformer.from_pretrained(d), "it has no config.json, model.safetensors"),
    (lambda d: DOOR.evaluate(d), "this is a dataset, not a run"),
    (lambda d: DOOR.train("paper"), "[DATASET_NOT_FOUND]"),
    (lambda d: DOOR.collect("Pendulum-v1", "x.hdf5", steps="many"), "got 'many', need a number"),
    (lambda d: DOOR.collect("Pendulum-v1", "x.hdf5", seed=1.5), "got 1.5, need a number"),
    (lambda d: DOOR.sweep("smoke", {"data.path": str(d)}, seeds=2.5), "a whole number, got 2.5"),
    (lambda d: TASK(**PENDULUM, episodes=2.5).settle(), "episodes is 2.5"),
    (lambda d: TASK(**PENDULUM, seed="3").settle(), "seed is 3 (evaluate.seed)"),
    (lambda d: DOOR.load_recipe("smoke", "data.path=2024"), """quotes: data.path='"TEXT"'"""),
    (lambda d: DOOR.export_policy("runs/x", 5), "a int is not a path (out)"),
    (lambda d: DOOR.export_policy("runs/x", "x.pt"), "write x.onnx, or a folder: x"),
    (lambda d: DOOR.open_run("runs/hopper-medium-s0"), "train smoke` makes a run"),
    (lambda d: weights(d / "run"), "/run').model, or name a"),
    (lambda d: DOOR.train("smoke", steps=5), "go.train(recipe, {'train.steps': ...})"),
]


@pytest.mark.parametrize(("mistake", "remedy"), MISTAKES, ids=[remedy for _, remedy in MISTAKES])
def test_a_mistake_is_told_with_its_remedy(
    mistake: Callable[[Path], object], remedy: str, folder: Path
) -> None:
    with pytest.raises((go.GearError, TypeError, AttributeError, KeyError, UserWarning)) as caught:
        mistake(folder)
    assert remedy in str(caught.value) and "\n" not in str(caught.value)


def test_an_error_is_one_line_with_code_place_and_remedy() -> None:
    error = InputError("A_CODE", "it is\nwrong", where="file x", remedy="do y")
    assert str(error) == "[A_CODE] it is wrong (file x); do y"
    assert error.message == "it is wrong (file x); do y"
    assert (error.code, error.exit_code) == ("A_CODE", 2)
    assert str(GearError("A_CODE", "it is wrong")) == "[A_CODE] it is wrong"
    assert str(pickle.loads(pickle.dumps(error))) == str(error), "workers send theirs"


def test_every_door_answers_an_argument_that_it_lacks() -> None:
    """Before anything else: what is needed besides is not looked at."""
    doors = {name: getattr(go, name) for name in go.__all__}
    names = [name for name, door in doors.items() if isfunction(door)]
    for name in [*names, "GearLoader", "Appender"]:
        parameters = signature(doors[name]).parameters.values()
        if any(each.kind == each.VAR_KEYWORD for each in parameters):
            continue  # options of a strategy, or of a model, are checked as such
        needed = [each for each in parameters if each.default is each.empty]
        *_, last = parameters
        arguments = dict.fromkeys([each.name for each in needed] + [f"{last.name}z"])
        with one_error("USAGE", f"did you mean '{last.name}'"):
            doors[name](**arguments)
    with one_error("USAGE", r"go\.sweep\(recipe, \{'optimizer\.learning_rate': \.\.\.\}\)"):
        DOOR.sweep("smoke", lr=1e-3)


def late(facts: Any, power: float = 1.0) -> Any:
    return np.arange(1.0, facts.episodes.episodes + 1) ** power


def test_functions_are_strategies_wherever_one_is_named(folder: Path, tmp_path: Path) -> None:
    choice = {"strategy": late, "power": 2.0}
    data = {"data.path": str(folder), "train.steps": 2, "evaluate.episodes": 0}
    data |= {"train.device": "cpu"}
    loaders = [loader(folder, selection=late), loader(folder, selection=choice)]
    assert [each.selection.options for each in loaders] == [{"power": 1.0}, {"power": 2.0}]
    mixed = {"strategy": "mixture", "parts": [{**choice, "weight": 1.0}]}
    for selection in (late, choice, mixed):
        recipe = go.load_recipe("smoke", {"selection": selection})
        assert f"{__name__}:late" in recipe.to_yaml()
    compared = DOOR.compare_strategies(
        "smoke", data, strategies=[late, choice], out=tmp_path / "page", quiet=True
    )
    assert [row.label.rpartition(":")[2] for row in compared.strategies] == [
        "uniform_steps",
        "late",
        "late power=2.0",
    ]
    axes = {**data, "selection.strategy": [late, "uniform_steps"]}
    swept = go.sweep("smoke", axes, model="mlp", out=tmp_path / "sweep", parallel=1, quiet=True)
    assert [trial.trial.recipe.model.kind for trial in swept.trials] == ["mlp", "mlp"]
    assert swept.is_complete and len(swept.table.rows) == 2


@pytest.mark.parametrize(
    "options",
    [
        {"overrides": ["train.steps=5", "seed=1", "train.steps=6"]},
        {"overrides": {"model.kind": "mlp"}, "model": "decoupled"},
    ],
)
@pytest.mark.parametrize("door", [go.train, go.sweep, go.compare_strategies])
def test_an_option_is_given_once(door: Any, options: dict[str, Any]) -> None:
    with one_error("USAGE", "is given twice"):
        door("smoke", quiet=True, **options)


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        (["selection.percent=10", "selection=top_percent"], "write selection.strategy=top_percent"),
        (["model=mlp", "model.hidden_size=8"], "write model.kind=mlp"),
        (["data.collect=5", "data.collect.steps=5"], "keep one of them"),
    ],
)
def test_a_section_is_not_given_beside_its_options(options: list[str], remedy: str) -> None:
    with one_error("USAGE", remedy):
        go.load_recipe("smoke", options)


@pytest.mark.parametrize(
    ("option", "argument"),
    [
        ("accept them (--allow-nonfinite)", "accept them (allow_nonfinite=True)"),
        ("--rule 'steps=N' cuts them", "rule='steps=N' cuts them"),
        ("give --ends starts:index", "give rule='starts:index'"),
        ("--columns a=x/y,b; see", "columns=['a=x/y', 'b']; see"),
        ("--rename x=rewards takes it", "rename={'x': 'rewards'} takes it"),
        ("--shift actions=1,rewards=1 puts", "shift={'actions': 1, 'rewards': 1} puts"),
        ("say them: --targets 3600,1800", "say them: targets=[3600, 1800]"),
        ("another --environment-options", "another environment_options"),
        ("any --rule does", "any rule does"),
        ("`gear-offline train a--b --resume`", "`gear-offline train a--b --resume`"),
        ("more (docker --ulimit memlock=-1)", "more (docker --ulimit memlock=-1)"),
    ],
)
def test_python_is_told_arguments(option: str, argument: str) -> None:
    assert InputError("A_CODE", "wrong", remedy=option).message == f"wrong; {argument}"


def test_what_is_quoted_or_a_place_is_no_option() -> None:
    error = InputError("A_CODE", "no 'x --steps 5'", "a --name/b.h5", "take --where '--x > 0'")
    assert error.message == "no 'x --steps 5' (a --name/b.h5); take where='--x > 0'"
    assert InputError("A_CODE", "wrong", "--targets").message == "wrong (targets)"


def test_a_command_is_told_options(folder: Path, capsys: Captured) -> None:
    file = folder.parent / "there.hdf5"
    file.write_text("")
    assert main(["export", str(folder), str(file)]) == 2
    assert "--overwrite" in capsys.readouterr().err
    with one_error("OUTPUT_EXISTS", "overwrite=True"):
        go.export_hdf5(folder, file)


def test_doors_take_a_run_for_a_path() -> None:
    for name in {*go.__all__} - {"__version__"}:
        for parameter in signature(getattr(go, name)).parameters.values():
            if "str | " in str(parameter.annotation) and "Path" in str(parameter.annotation):
                assert "os.PathLike[str]" in parameter.annotation, (name, parameter)


def typed(run: go.Run) -> None:
    """For mypy alone: what docs/how-to/runs.md says is typed, too."""
    go.evaluate(run)
    go.load_policy(run)
    go.export_policy(run, run.path / "policy")
    go.act(run)
    go.sweep(run, seeds=2, out=run)
    go.train(run, out=run)
    go.compare_strategies(run)
    go.compare_runs([run, "runs/x"], out=run)
    go.convert(run, run)
    go.audit(run, against=[run])
    go.export_hdf5(run, run)
    go.inspect(run)
    go.GearLoader(run)
    go.Appender(run)
    go.collect("Pendulum-v1", run)


def test_the_home_is_no_folder_with_a_tilde(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "home" / "made").mkdir(parents=True)
    file = go.collect("Pendulum-v1", "~/made/x.hdf5", steps=10, quiet=True).path
    assert file == tmp_path / "home" / "made" / "x.hdf5"
    go.convert("~/made/x.hdf5", "~/d", quiet=True)
    go.export_hdf5("~/d", "~/y.hdf5", quiet=True)
    go.inspect("~/d"), go.audit("~/d"), go.GearLoader("~/d", batch_size=2, device="cpu")
    options: dict[str, Any] = {"data.path": "~/d", "train.steps": 1, "evaluate.episodes": 0}
    options |= {"data.collect": None, "data.source": "~/made/x.hdf5", "train.device": "cpu"}
    run = go.train("smoke", options, out="~/r", quiet=True)
    assert run.recipe.data.path == str(tmp_path / "home" / "d")
    go.export_policy("~/r", "~/p"), go.open_run("~/r"), go.list_runs("~"), go.load_policy("~/p")
    go.sweep("~/r", {"seed": [1]}, out="~/s", quiet=True)
    go.compare_runs(["~/r", "~/s"], out="~/c.svg")
    (tmp_path / "home" / "mine.yaml").write_text("base: ~/r\ntrain: {init: ~/r}\n")
    assert go.load_recipe("~/mine.yaml").train.init == str(tmp_path / "home" / "r")
    assert list(tmp_path.iterdir()) == [tmp_path / "home"]
    with one_error("USAGE", "~nobody-here"):
        go.convert(tmp_path / "home" / "d", "~nobody-here/d", quiet=True)


def test_kinds_are_also_the_builtin_kinds() -> None:
    assert issubclass(InputError, ValueError)
    assert issubclass(UnavailableError, RuntimeError)
    assert UnavailableError("A", "b").exit_code == 1


def test_what_is_written_elsewhere_works_here_too(folder: Path) -> None:
    assert len(next(DOOR.GearLoader(folder, 4, device="cpu", context_length=3)).segments) == 4
    assert bool(loader(folder)) and length_hint(loader(folder), 3) == 3
    batch = next(loader(folder, extra_columns=["terminals"]))
    assert batch["states"] is batch.states and batch["terminals"] is batch.extras["terminals"]
    assert {**batch}.keys() == set(batch.keys()) >= {"states", "segments", "terminals"}
    dataset = go.open_dataset(folder)
    assert [len(episode["rewards"]) for episode in dataset[1:]] == [7, 8]
    assert dataset[5:10] == [] and [len(each["rewards"]) for each in dataset[::-2]] == [8, 9]
    assert not hasattr(dataset, "nothing") and not hasattr(batch, "nothing")


def test_a_loader_of_a_recipe(folder: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"data.path": str(folder), "seed": 3, "loader.context_length": 4}
    options |= {"selection.strategy": "weighted", "selection.column": "observations"}
    with pytest.raises(go.InputError, match="column observations"):
        go.GearLoader.from_recipe("smoke", options)
    options["selection.column"] = "timeouts"  # the last step alone
    recipe = go.load_recipe("smoke", options)
    made = go.GearLoader.from_recipe(recipe, device="cpu", start_step=2)
    batch = next(made)
    assert batch.states.shape == (16, 4, 11) and made.selection.name == "weighted"
    assert batch.segments.tolist() == [[2, 7]] * 16
    shape: dict[str, Any] = {"batch_size": 16, "context_length": 4, "seed": 3}
    more: dict[str, Any] = {"normalize_states": True, "returns_scale": 100.0}
    plain = loader(folder, selection="weighted:column=timeouts", **shape, **more).batch_at(2)
    assert all(bool((batch[name] == plain[name]).all()) for name in made.batch_at(0).model_inputs())
    with one_error("DATASET_NOT_FOUND", "`gear-offline train` makes it"):
        go.GearLoader.from_recipe("smoke", {"data.path": str(tmp_path / "nothing")})


def test_defaults_of_loaders_are_those_of_recipes() -> None:
    arguments = signature(go.GearLoader.__init__).parameters
    recipe = LoaderSettings().model_dump() | {"selection": SelectionSettings().strategy, "seed": 0}
    differ = {name for name, value in recipe.items() if arguments[name].default != value}
    assert differ == {"returns_scale", "normalize_states"}, "docs/reference/batch.md"
