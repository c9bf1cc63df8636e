"""Before training: data are made on first use, and what a recipe leaves open is filled in."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gear_offline.config.recipe import load_recipe
from gear_offline.convert.conversion import convert
from gear_offline.dataset.dataset import Dataset, open_dataset
from gear_offline.errors import InputError
from gear_offline.runs.loop import train
from gear_offline.runs.prepare import prepare_one, resolve
from gear_offline.sources.base import InputFile
from gear_offline.training.metrics import read_records
from gear_offline.training.policies import load_policy
from tests.support import ArraySource, hopper_columns, make_dataset, one_error, write_hdf5
from tests.training_support import (
    ACTION_DIM,
    ENVIRONMENT,
    STATE_DIM,
    STEP_LIMIT,
    register_environment,
    tiny_data,
    tiny_recipe,
)


def test_smoke_as_a_new_user_runs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = train(load_recipe("smoke"))
    assert run == Path("runs/smoke-s0")
    said = capfd.readouterr()
    assert said.out == ""
    for line in ("collecting 2,000 steps", "converting data/", "step 40", "complete after"):
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
    train(other)
    assert "converting data/smoke-pendulum.hdf5 to data/other" in capfd.readouterr().err
    assert open_dataset("data/other").episodes.steps == 2000
    train(other.replace({"seed": 1}))
    assert "converting" not in capfd.readouterr().err


def test_resolving_twice_changes_nothing(tmp_path: Path) -> None:
    register_environment()
    dataset = make_dataset(
        tmp_path,
        [3, STEP_LIMIT + 4],
        state_dim=STATE_DIM,
        action_dim=ACTION_DIM,
        environment_id=ENVIRONMENT,
    )
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


def test_an_environment_that_only_the_data_name_may_be_missing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    dataset = make_dataset(tmp_path, [3, 3], environment_id="NoSuchEnvironment-v0")
    resolved, _ = resolve(tiny_recipe(dataset.path), dataset)
    assert resolved.evaluate.environment is None
    assert "no evaluation: " in capfd.readouterr().err
    with one_error("ENVIRONMENT"):
        resolve(tiny_recipe(dataset.path, "evaluate.environment=NoSuch-v0"), dataset)


def test_without_an_environment_a_line_says_that_nothing_is_evaluated(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    dataset = make_dataset(tmp_path, [3, 3], environment_id=None)
    resolve(tiny_recipe(dataset.path, "evaluate.episodes=0"), dataset)
    assert capfd.readouterr().err == ""
    resolve(tiny_recipe(dataset.path), dataset)
    said = capfd.readouterr().err
    assert said.startswith("no evaluation: neither the recipe nor ") and said.count("\n") == 1


def test_discrete_actions_that_never_occur_come_from_the_environment(tmp_path: Path) -> None:
    columns = hopper_columns(6, state_dim=4)
    columns["actions"] = np.zeros(6, np.int64)  # CartPole has two actions
    dataset = make_dataset(tmp_path, [3, 3], columns=columns, environment_id="CartPole-v1")
    resolved, sizes = resolve(tiny_recipe(dataset.path), dataset)
    assert (sizes.action_dim, sizes.discrete) == (2, True)
    assert not resolved.model.action_tanh
    assert resolved.model.max_timestep == 500


def refused(dataset: Dataset, *overrides: str) -> str:
    recipe = load_recipe("paper", [f"data.path={dataset.path}", *overrides])
    with pytest.raises(InputError) as caught:
        resolve(recipe, dataset)
    return caught.value.code


def test_what_training_would_stumble_over_late_is_refused_early(tmp_path: Path) -> None:
    register_environment()
    dataset = make_dataset(
        tmp_path, [3, 4], environment_id=ENVIRONMENT, state_dim=STATE_DIM, action_dim=ACTION_DIM
    )
    for huge in ("model.hidden_size=1e12", "model.max_timestep=1e15"):
        assert refused(dataset, huge) == "MEMORY"
    assert refused(dataset, "loader.batch_size=1e10") == "MEMORY"
    for name, value in (("observations", np.nan), ("rewards", np.inf), ("observations", 1e300)):
        columns = hopper_columns(7)
        columns[name] = columns[name].astype(np.float64)
        columns[name].reshape(-1)[2] = value
        out = tmp_path / f"{name}-{value}"
        convert(ArraySource(columns, [3, 4]), out, allow_nonfinite=True, quiet=True)
        with np.errstate(all="ignore"):
            recipe = load_recipe("paper", [f"data.path={out}", "evaluate.episodes=0"])
            said = "1 value NaN or inf" if not np.isfinite(value) else "are usable"
            with one_error("COLUMN", said) as caught:
                resolve(recipe, open_dataset(out))
            assert ("pick_episodes" in caught.value.remedy) == (not np.isfinite(value))
    for number, actions in enumerate((np.full(7, -1), np.zeros((7, 2), np.int64))):
        columns = hopper_columns(7) | {"actions": actions}
        convert(ArraySource(columns, [3, 4]), tmp_path / str(number), quiet=True)
        found = refused(open_dataset(tmp_path / str(number)), "evaluate.episodes=0")
        assert found == "COLUMN"


def test_evaluations_on_a_device_that_is_not_here_are_refused_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run on the CPU came to its first evaluation, and ended there with an error of torch's."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    data = tiny_data(tmp_path / "data")
    recipe = tiny_recipe(data, "evaluate.device=cuda")
    with one_error("DEVICE", r"\(evaluate\.device\)"):
        train(recipe, out=tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()
    resolve(recipe.replace({"evaluate.episodes": 0}), open_dataset(data), quiet=True)


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
    assert wanted in caught.value.what


def test_a_dataset_of_edits_is_not_taken_for_its_source(tmp_path: Path) -> None:
    file = write_hdf5(tmp_path / "x.hdf5")
    convert(file, tmp_path / "d", where="length > 0", quiet=True)
    with one_error("DATA_MISMATCH") as caught:
        prepare_one(tiny_recipe(tmp_path / "d", f"data.source={file}"), quiet=True)
    assert "x.hdf5 with edits (where length > 0" in caught.value.what
    assert prepare_one(tiny_recipe(tmp_path / "d"), quiet=True).spec.steps > 0


def test_a_dataset_made_of_something_else_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    with pytest.raises(InputError, match="made of seed 0, the recipe says seed 7"):
        prepare_one(load_recipe("smoke", ["data.collect.seed=7"]))
    unversioned = ["data.path=p", "data.collect.environment=Pendulum", "data.collect.steps=200"]
    for _ in range(2):  # made, and there already
        dataset = prepare_one(load_recipe("smoke", unversioned), quiet=True)
        assert dataset.environment_id == "Pendulum-v1"
    shutil.rmtree("p")  # what was collected stays
    assert prepare_one(load_recipe("smoke", unversioned), quiet=True).episodes.steps == 200
    shutil.rmtree("p")
    other_one = ["data.path=p", "data.collect.environment=MountainCarContinuous-v0"]
    with pytest.raises(InputError, match=r"file that is there was made of env_id Pendulum-v1, the"):
        prepare_one(load_recipe("smoke", other_one), quiet=True)
    assert not Path("p").exists()
