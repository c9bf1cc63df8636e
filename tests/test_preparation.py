"""Before training: data are made on first use, and what a recipe leaves open is filled in."""

import os
import queue
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gear_offline.artifacts.json_lines import read_records
from gear_offline.artifacts.trained import load_policy
from gear_offline.config.files import recipe_paths
from gear_offline.config.recipe import load_recipe
from gear_offline.core import files
from gear_offline.data.convert.conversion import convert
from gear_offline.data.dataset.dataset import open_dataset
from gear_offline.data.dataset.scores import ReferenceScores
from gear_offline.data.sources import from_arrays
from gear_offline.data.sources.input_files import InputFile
from gear_offline.errors import InputError
from gear_offline.runs.data import prepare_dataset, prepare_one
from gear_offline.runs.loop import train_run
from gear_offline.runs.resolve import resolve
from tests.support import (
    ArraySource,
    Captured,
    Patch,
    hopper_columns,
    last_words,
    make_dataset,
    one_error,
    write_hdf5,
)
from tests.training_support import ACTION_DIM, STATE_DIM, STEP_LIMIT, tiny_data, tiny_recipe


@pytest.mark.usefixtures("forked_workers")
def test_smoke_as_a_new_user_runs_it(tmp_path: Path, monkeypatch: Patch, capfd: Captured) -> None:
    monkeypatch.chdir(tmp_path)
    run = train_run(load_recipe("smoke"))
    assert run == Path("runs/smoke-s0")
    said = capfd.readouterr()
    assert said.out == ""
    for line in ("collecting 2,000 steps", "converting ", "step 40", "complete after"):
        assert line in said.err
    assert [r["step"] for r in read_records(run / "metrics.jsonl")] == list(range(5, 41, 5))
    assert len(read_records(run / "evaluations.jsonl")) == 2
    assert list((run / "tensorboard").iterdir())
    assert (run / "report.md").is_file()
    assert load_policy(run, device="cpu").model.config.max_ep_len == 200

    # the same file as a source, and the dataset that is there already
    monkeypatch.setattr("gear_offline.runs.report.write_report", lambda run: run)
    overrides = ["data.collect=null", "data.source=data/smoke-pendulum.hdf5", "train.steps=5"]
    overrides += ["evaluate.episodes=0", "train.trackers=[]"]
    other = load_recipe("smoke", [*overrides, "data.path=data/other", "name=other"])
    train_run(other)
    assert f"converting {Path('data/smoke-pendulum.hdf5').absolute()} to " in capfd.readouterr().err
    assert open_dataset("data/other").episodes.steps == 2000
    train_run(other.replace({"seed": 1}))
    assert "converting" not in capfd.readouterr().err


def test_resolving_twice_changes_nothing(tmp_path: Path) -> None:
    dataset = open_dataset(tiny_data(tmp_path, [3, STEP_LIMIT + 4]))
    recipe = tiny_recipe(dataset.path)
    assert prepare_one(recipe).episodes.steps == dataset.episodes.steps
    resolved, sizes = resolve(recipe, dataset)
    assert (sizes.state_dim, sizes.action_dim, sizes.discrete) == (STATE_DIM, ACTION_DIM, False)
    assert resolved.model.max_timestep == STEP_LIMIT + 4
    assert resolved.evaluate.targets == (dataset.returns.max(), dataset.returns.mean())
    assert resolve(resolved, dataset) == (resolved, sizes)


def test_data_of_one_return_are_asked_for_once(tmp_path: Path) -> None:
    columns = hopper_columns(6)
    columns["rewards"] = np.full(6, -0.1, np.float32)
    dataset = make_dataset(tmp_path, [3, 3], columns=columns)
    resolved, _ = resolve(tiny_recipe(dataset.path), dataset)
    assert resolved.evaluate.targets == pytest.approx((-0.3,))


@pytest.mark.parametrize("mapped", [False, True])
def test_what_playing_does_not_share_with_the_data_is_said(
    mapped: bool, tmp_path: Path, capfd: Captured
) -> None:
    columns = hopper_columns(6, state_dim=3, action_dim=1)
    options: dict[str, Any] = {"g": 1.0, "max_episode_steps": 7}
    convert(
        ArraySource(columns, [3, 3]), tmp_path / "d",
        map=(lambda e: {"observations": e["observations"] / 8}) if mapped else None,
        environment="Pendulum-v1", environment_options=options, quiet=True,
    )  # fmt: skip
    dataset = open_dataset(tmp_path / "d")
    capfd.readouterr()
    resolve(tiny_recipe(dataset.path, "evaluate.environment_options={g: 2.0}"), dataset)
    said = capfd.readouterr().err
    assert "max_episode_steps=7 among them" in said
    assert ("map made the data's observations, and Pendulum-v1 has its own" in said) is mapped


@pytest.mark.parametrize(("scale", "share"), [(2.0, None), (2.01, None), (8.0, "75%")])
def test_actions_that_playing_clips_are_said(
    scale: float, share: str | None, tmp_path: Path, capfd: Captured
) -> None:
    """Pendulum takes -2 .. 2."""
    columns = hopper_columns(1000, state_dim=3, action_dim=1)
    columns["actions"] = np.linspace(-scale, scale, 1000, dtype=np.float32)[:, None]
    convert(ArraySource(columns, [500, 500]), tmp_path / "d", quiet=True)
    recipe = tiny_recipe(tmp_path / "d", "evaluate.environment=Pendulum-v1")
    resolve(recipe.replace({"model.action_tanh": False}), open_dataset(tmp_path / "d"))
    lines = [line for line in capfd.readouterr().err.splitlines() if "beyond the bounds" in line]
    assert len(lines) == bool(share)
    if share:
        assert share == f"{np.mean(np.abs(columns['actions']) > 2.04):.0%}"
        assert lines[0].startswith(f"{share} of the data's actions are beyond the bounds of")


def test_another_version_of_the_simulator_is_said(tmp_path: Path, capfd: Captured) -> None:
    columns = hopper_columns(6, state_dim=3, action_dim=1)
    position = {"infos/qpos": np.zeros((6, 1))}  # MuJoCo's data have it
    for made, extra in (("2.3.7", position), (version("mujoco"), position), ("2.3.7", {})):
        source = ArraySource(columns | extra, [3, 3], attributes={"attributes": {"mujoco": made}})
        place = tmp_path / f"{made} {len(extra)}"
        convert(source, place, environment="Pendulum-v1", quiet=True)
        resolve(tiny_recipe(place), open_dataset(place))
        said = "the data are of MuJoCo 2.3.7, and" in capfd.readouterr().err
        assert said is (made == "2.3.7" and bool(extra))


def test_options_of_data_hold_for_the_environment_that_the_user_names(tmp_path: Path) -> None:
    columns = hopper_columns(6, state_dim=3, action_dim=1)
    for name, options in ((None, {"max_episode_steps": 7}), ("Hopper-v5", None)):
        place, source = tmp_path / str(name), ArraySource(columns, [3, 3])
        how = {"max_episode_steps": 7}
        convert(source, place, environment=name, environment_options=how, quiet=True)
        recipe = tiny_recipe(place, "evaluate.environment=Pendulum-v1")
        resolved, _ = resolve(recipe, open_dataset(place), quiet=True)
        assert resolved.evaluate.environment_options == options


def test_an_id_with_its_module_is_the_environment_of_the_data(
    tmp_path: Path, capfd: Captured
) -> None:
    columns, how = hopper_columns(6, state_dim=3, action_dim=1), {"max_episode_steps": 7}
    source = ArraySource(columns, [3, 3])
    scores = ReferenceScores(name="mine", minimum=-9.0, maximum=1.0)
    source.info = replace(source.info, scores=scores)
    convert(source, tmp_path / "a", environment="Pendulum-v1", environment_options=how, quiet=True)
    convert(tmp_path / "a", tmp_path / "b", environment="gymnasium:Pendulum-v1", quiet=True)
    for place, name in (("a", "gymnasium:Pendulum-v1"), ("b", "Pendulum-v1")):
        recipe = tiny_recipe(tmp_path / place, f"evaluate.environment={name}")
        resolved, _ = resolve(recipe, open_dataset(tmp_path / place))
        assert resolved.evaluate.environment_options == how
        assert resolved.evaluate.reference == (-9.0, 1.0)
        assert "the data are of" not in capfd.readouterr().err


def test_a_scale_that_hides_the_returns_is_said(tmp_path: Path, capfd: Captured) -> None:
    columns = hopper_columns(6)
    columns["rewards"] = np.full(6, -4.0, np.float32)  # episodes of three steps return -12
    dataset = make_dataset(tmp_path, [3, 3], columns=columns)
    for scale, is_said in ((1000.0, True), (200.0, False)):
        resolve(tiny_recipe(dataset.path, f"loader.returns_scale={scale}"), dataset)
        assert ("loader.returns_scale=10 shows them" in capfd.readouterr().err) is is_said


def test_an_environment_that_only_the_data_name_may_be_missing(
    tmp_path: Path, capfd: Captured
) -> None:
    for name, alone, said in (
        ("NoSuchEnvironment-v0", "the data alone tell the model's sizes: ", "no evaluation: "),
        (None, "", "no evaluation: neither the recipe nor "),
    ):
        dataset = make_dataset(tmp_path / f"of {name}", [3, 3], environment_id=name)
        resolve(tiny_recipe(dataset.path, "evaluate.episodes=0"), dataset)
        error = capfd.readouterr().err
        assert error.startswith(alone) and error.count("\n") == bool(alone)
        resolved, _ = resolve(tiny_recipe(dataset.path), dataset)
        assert resolved.evaluate.environment is None
        error = capfd.readouterr().err
        assert error.startswith(said) and error.count("\n") == 1
        with one_error("ENVIRONMENT"):
            resolve(tiny_recipe(dataset.path, "evaluate.environment=NoSuch-v0"), dataset)


@pytest.mark.parametrize("most", [1.0, 1.5])
def test_predictions_are_bounded_where_the_data_are(tmp_path: Path, most: float) -> None:
    columns = hopper_columns(6)
    columns["actions"] = np.linspace(-1, most, 18, dtype=np.float32).reshape(6, 3)
    dataset = make_dataset(tmp_path, [3, 3], columns=columns)
    asked = ("evaluate.episodes=0", "model.action_tanh=auto")
    resolved, _ = resolve(tiny_recipe(dataset.path, *asked), dataset)
    assert resolved.model.action_tanh == (most <= 1)


def test_discrete_actions_that_never_occur_come_from_the_environment(tmp_path: Path) -> None:
    columns = hopper_columns(6, state_dim=4)
    columns["actions"] = np.zeros(6, np.int64)  # CartPole has two actions
    dataset = make_dataset(tmp_path, [3, 3], columns=columns, environment_id="CartPole-v1")
    resolved, sizes = resolve(tiny_recipe(dataset.path), dataset)
    assert (sizes.action_dim, sizes.discrete) == (2, True)
    assert not resolved.model.action_tanh
    assert resolved.model.max_timestep == 500
    unplayed, same = resolve(tiny_recipe(dataset.path, "evaluate.episodes=0"), dataset)
    assert (same, unplayed.model) == (sizes, resolved.model)


def test_what_training_would_stumble_over_late_is_refused_early(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    dataset = open_dataset(tiny_data(tmp_path / "data"))
    for code, option in (
        ("MEMORY", "model.hidden_size=1e12"),
        ("MEMORY", "model.max_timestep=1e15"),
        ("MEMORY", "loader.batch_size=1e10"),
        ("DEVICE", "evaluate.device=cuda"),
    ):
        recipe = load_recipe("paper", [f"data.path={dataset.path}", option])
        with one_error(code, "evaluate.device" if code == "DEVICE" else None):
            resolve(recipe, dataset)
    recipe = load_recipe("paper", [f"data.path={dataset.path}", "evaluate.device=cuda"])
    resolve(recipe.replace({"evaluate.episodes": 0}), dataset, quiet=True)
    columns: list[tuple[str, Any, str]] = [
        ("observations", np.nan, "1 value NaN or inf"),
        ("rewards", np.inf, "1 value NaN or inf"),
        ("rewards", np.full(7, np.nan, np.float32), "7 values NaN or inf"),
        ("observations", 1e300, "are usable"),
        ("actions", np.full(7, -1), "actions"),
        ("actions", np.zeros((7, 2), np.int64), "actions"),
    ]
    for number, (name, value, said) in enumerate(columns):
        found, out = hopper_columns(7), tmp_path / str(number)
        if np.isscalar(value):
            found[name] = found[name].astype(np.float64)
            found[name].reshape(-1)[2] = value
        else:
            found[name] = value
        convert(ArraySource(found, [3, 4]), out, allow_nonfinite=True, quiet=True)
        recipe = load_recipe("paper", [f"data.path={out}", "evaluate.episodes=0"])
        with np.errstate(all="ignore"), one_error("COLUMN", said) as caught:
            resolve(recipe, open_dataset(out))
        assert ("pick_episodes" in caught.value.remedy) == ("NaN" in said)


@pytest.mark.parametrize(
    ("made", "wanted", "fits"),
    [
        ("d4rl:hopper-medium-v2", "d4rl:hopper-medium-v2", True),
        ("hopper_medium-v2.hdf5", "d4rl:hopper-medium-v2", True),
        ("d4rl:hopper-medium-v2", "d4rl:hopper-expert-v2", False),
        ("minari:x/y-v0", "minari:x/y-v0", True),
        ("minari:x/y-v0", "minari:x/y-v1", False),
        ("other.hdf5", "d4rl:hopper-medium-v2", False),
    ],
)
def test_a_named_source_is_compared_with_the_dataset(
    tmp_path: Path, made: str, wanted: str, fits: bool
) -> None:
    source = ArraySource(hopper_columns(7), [3, 4])
    file = write_hdf5(tmp_path / made) if made.endswith(".hdf5") else None
    source.info = replace(source.info, uri=made, files=(InputFile.find(file),) if file else ())
    convert(source, tmp_path / "d", quiet=True)
    recipe = tiny_recipe(tmp_path / "d", f"data.source={wanted}")
    if fits:
        assert prepare_one(recipe, quiet=True).spec.steps == 7
        return
    with one_error("DATA_MISMATCH") as caught:
        prepare_one(recipe, quiet=True)
    assert wanted in caught.value.problem


def test_a_dataset_of_edits_is_not_taken_for_its_source(tmp_path: Path) -> None:
    file = write_hdf5(tmp_path / "x.hdf5")
    convert(file, tmp_path / "d", where="length > 0", quiet=True)
    with one_error("DATA_MISMATCH") as caught:
        prepare_one(tiny_recipe(tmp_path / "d", f"data.source={file}"), quiet=True)
    assert "x.hdf5 with edits (where length > 0" in caught.value.problem
    assert prepare_one(tiny_recipe(tmp_path / "d"), quiet=True).spec.steps > 0


def test_what_a_dataset_was_made_of_may_not_change(tmp_path: Path, monkeypatch: Patch) -> None:
    """A file that was rewritten, in its size or not, other columns, another rule of conversion."""
    file, taken = write_hdf5(tmp_path / "x.hdf5", episodes=3), tmp_path / "d"
    recipe = tiny_recipe(taken, f"data.source={file}")
    assert prepare_one(recipe, quiet=True).spec.episodes == 3
    os.utime(file)  # the same bytes
    prepare_one(recipe, quiet=True)
    for option in ("data.columns=[observations,actions]", "data.columns=[actions]"):
        with one_error("DATA_MISMATCH", "columns actions"):
            prepare_one(recipe.replace(option), quiet=True)
    write_hdf5(file, episodes=3, seed=1)  # as many bytes
    with one_error("DATA_MISMATCH", "has another content now"):
        prepare_one(recipe, quiet=True)
    write_hdf5(file, episodes=4)
    with one_error("DATA_MISMATCH", "x.hdf5 has .* bytes now") as caught:
        prepare_one(recipe, quiet=True)
    assert "data.source=null" in caught.value.remedy and f"rm -r {taken}" in caught.value.remedy
    assert prepare_one(recipe.replace("data.source=null"), quiet=True).spec.episodes == 3
    shutil.rmtree(taken)
    columns = recipe.replace("data.columns=[observations,actions]")
    for _ in range(2):  # made, and there already
        assert prepare_one(columns, quiet=True).spec.episodes == 4
    with one_error("DATA_MISMATCH", "columns actions, observations"):
        prepare_one(recipe, quiet=True)
    shutil.rmtree(taken)
    convert(file, taken, rule="timeouts", quiet=True)
    with one_error("DATA_MISMATCH", "rule timeouts"):
        prepare_one(recipe, quiet=True)


def test_a_folder_of_files_may_not_change(tmp_path: Path) -> None:
    folder = tmp_path / "days"
    folder.mkdir()
    for day in (1, 2):
        write_hdf5(folder / f"{day}.hdf5", episodes=2, seed=day)
    recipe = tiny_recipe(tmp_path / "d", f"data.source={folder}")
    assert prepare_one(recipe, quiet=True).spec.episodes == 4
    (folder / "README.txt").write_text("no data")
    prepare_one(recipe, quiet=True)
    write_hdf5(folder / "3.hdf5", episodes=2)
    with one_error("DATA_MISMATCH", "3.hdf5 is new"):
        prepare_one(recipe, quiet=True)
    (folder / "3.hdf5").unlink()
    (folder / "1.hdf5").unlink()
    with one_error("DATA_MISMATCH", "1.hdf5 is gone"):
        prepare_one(recipe, quiet=True)


@pytest.mark.parametrize("name", [name for name in recipe_paths() if name != "atari-pong"])
def test_who_names_data_means_these_data(tmp_path: Path, name: str) -> None:
    """Of every recipe that comes with the package: its own environment and targets give way."""
    place = tmp_path / "mine"
    data = hopper_columns(9) | {"terminals": np.arange(9) % 5 == 4, "rewards": np.ones(9)}
    convert(from_arrays(data, environment="gear_offline/Maze-v0"), place, quiet=True)
    tasks = load_recipe(name).data.tasks or {}
    options = {f"data.tasks.{task}.path": str(place) for task in tasks}
    recipe = load_recipe(name, options or {"data.path": str(place)})
    recipe = recipe.replace({"evaluate.episodes": 0, "loader.goals": None})
    dataset = prepare_dataset(recipe, quiet=True)
    resolved, _ = resolve(recipe, dataset, quiet=True)
    assert resolve(resolved, dataset, quiet=True)[0] == resolved
    for single in map(resolved.of_task, tasks) if tasks else (resolved,):
        assert single.evaluate.environment in (None, "gear_offline/Maze-v0")
        targets = (5.0,) if recipe.model.asks_returns is False else (5.0, 4.5)
        assert single.evaluate.targets == targets and single.evaluate.reference is None
        assert (single.data.source, single.data.collect, single.data.fallback) == (None,) * 3


def test_a_recipe_s_own_data_keep_its_evaluation_elsewhere(tmp_path: Path) -> None:
    """Made where the user names a place, there already, or based on; what he types wins."""
    place = {"data.path": str(tmp_path / "d")}
    based = tmp_path / "mine.yaml"
    based.write_text(f"base: cartpole\ndata: {{path: {place['data.path']}}}\n")
    steps = load_recipe("cartpole").replace({"data.collect.policy": "random"})
    steps = steps.replace({"data.collect.quality": None, "data.collect.steps": 50})
    for _ in range(2):  # made, and there already
        resolved, _ = resolve(steps.replace(place), prepare_one(steps.replace(place), quiet=True))
        assert resolved.evaluate.targets == (500.0, 100.0)
        assert resolved.data.collect == steps.data.collect
    dataset = open_dataset(place["data.path"])
    typed = {"evaluate.targets": [7.0], "evaluate.episodes": 0}
    for recipe in (load_recipe(based), load_recipe("demo", place)):
        assert prepare_one(recipe, quiet=True).spec == dataset.spec
        resolved, _ = resolve(recipe.replace("model.max_timestep=null"), dataset, quiet=True)
        assert resolved.evaluate.environment == "CartPole-v1"
        assert resolved.evaluate.targets == (dataset.returns.max(), dataset.returns.mean())
        resolved, _ = resolve(recipe.replace({**typed, "model.max_timestep": None}), dataset)
        assert resolved.evaluate.targets == (7.0,)


def test_another_maker_takes_the_place_of_the_recipe_s() -> None:
    recipe = load_recipe("demo", "data.source=mine.hdf5")
    assert (recipe.data.source, recipe.data.collect) == ("mine.hdf5", None)
    assert (recipe.evaluate.environment, recipe.evaluate.targets) == (None, None)
    kept = load_recipe("demo", {"data.source": "mine.hdf5", "evaluate.environment": "Hopper-v5"})
    assert (kept.evaluate.environment, kept.evaluate.targets) == ("Hopper-v5", None)
    recipe = load_recipe("hopper-medium", "data.collect.environment=Walker2d-v5")
    assert recipe.data.source is None and recipe.evaluate.reference is None
    assert load_recipe("demo", "data.collect.steps=9").evaluate.targets == (3000, 2000, 1000, 500)


def test_one_process_makes_the_data_and_others_wait(
    tmp_path: Path, capfd: Captured, monkeypatch: Patch
) -> None:
    """Of one process here, with the lock of another one, which is killed without a dataset."""
    recipe = load_recipe("smoke", [f"data.path={tmp_path / 'd'}", "data.collect.steps=200"])
    wait = "import fcntl,sys; f=open(sys.argv[1],'w'); fcntl.flock(f,2); print(); sys.stdin.read()"
    words = [sys.executable, "-c", wait, str(tmp_path / ".d.making")]
    maker = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert maker.stdin and maker.stdout and maker.stdout.readline()
    told: queue.Queue[str] = queue.Queue()
    monkeypatch.setattr(files, "say", lambda text, **_: told.put(text))
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(prepare_one, recipe) for _ in range(2)]
        try:
            said = [told.get(timeout=60) for _ in asked]
        finally:
            maker.kill()
        made = [one.result() for one in asked]
    maker.communicate()
    assert all("waits for another process" in text for text in said)
    assert {dataset.spec.steps for dataset in made} == {200}
    assert capfd.readouterr().err.count("converting") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d", "d.hdf5"]


def test_a_dataset_made_of_something_else_is_not_taken(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    one, other = (write_hdf5(tmp_path / f"{name}.hdf5") for name in ("one", "other"))
    convert(one, Path("d"), quiet=True)
    taken = prepare_one(load_recipe("paper", ["data.path=d", f"data.source={one}"]))
    assert taken.episodes.steps > 0
    with pytest.raises(InputError, match=r"made of one\.hdf5, the recipe says .*other\.hdf5"):
        prepare_one(load_recipe("paper", ["data.path=d", f"data.source={other}"]))
    smoke = load_recipe("smoke", ["data.collect.steps=200"])
    prepare_one(smoke, quiet=True)
    prepare_one(smoke, quiet=True)
    for option in ("seed=7", "steps=300", "policy=ars", "action_noise=0.5", "train_steps=9"):
        key, value = option.split("=")
        words = last_words("data.collect.steps=200", f"data.collect.{option}")
        recipe = load_recipe("smoke", words)
        with pytest.raises(InputError, match=rf"made of {key} \S+, the recipe says {key} {value}"):
            prepare_one(recipe)
    unversioned = ["data.path=p", "data.collect.environment=Pendulum", "data.collect.steps=200"]
    for _ in range(2):  # made, and there already
        dataset = prepare_one(load_recipe("smoke", unversioned), quiet=True)
        assert dataset.environment_id == "Pendulum-v1"
    shutil.rmtree("p")  # what was collected stays
    assert prepare_one(load_recipe("smoke", unversioned), quiet=True).episodes.steps == 200
    shutil.rmtree("p")
    other_one = ["data.path=p", "data.collect.environment=MountainCarContinuous-v0"]
    other_one.append("data.collect.steps=200")
    with pytest.raises(InputError, match=r"file that is there was made of env_id Pendulum-v1, the"):
        prepare_one(load_recipe("smoke", other_one), quiet=True)
    assert not Path("p").exists()
