"""The examples: the Hugging Face Trainer, learners with (s, a, r, s', done), the quickstart."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import gear_offline as go
from examples.hf_trainer import (
    POSITION,
    GearTrainer,
    last_checkpoint,
    make_model,
    training_arguments,
)
from examples.td_learning import Greedy, Learner, main, stream, transitions
from gear_offline.data.convert.conversion import convert
from gear_offline.data.dataset.dataset import Dataset, open_dataset
from gear_offline.distributed.world import joined_world
from gear_offline.loaders.loader import GearLoader
from tests.ranks_support import launch
from tests.support import ROOT, ArraySource, Captured, Patch, hopper_columns, make_dataset

BATCH, STEPS, SAVED = 4, 6, 3


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_dataset(tmp_path_factory.mktemp("data"), [4, 3, 8, 2])


def make_trainer(dataset: Dataset, out: Path, **sizes: Any) -> GearTrainer:
    settings: dict[str, Any] = {"steps": STEPS, "batch_size": BATCH, "save_steps": SAVED}
    settings |= {"use_cpu": True, "disable_tqdm": True, "warmup_steps": 2, "logging_steps": 1}
    arguments = training_arguments(out, learning_rate=1e-2, **settings)
    loader = GearLoader(
        dataset,
        batch_size=BATCH,
        context_length=5,
        normalize_states=True,
        returns_scale=10.0,
        device="cpu",
        seed=5,
        world=joined_world(),
    )
    torch.manual_seed(0)
    model = make_model(loader, hidden_size=16, layers=1, heads=1, **sizes)
    return GearTrainer(model, loader, arguments)


def weights(trainer: GearTrainer) -> dict[str, Tensor]:
    assert trainer.model is not None
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def test_resumed_run_equals_the_uninterrupted_one(dataset: Dataset, tmp_path: Path) -> None:
    """And its checkpoint is enough to act."""
    whole = make_trainer(dataset, tmp_path / "run")
    start = weights(whole)
    whole.train()
    expected = weights(whole)
    checkpoint = tmp_path / "run" / f"checkpoint-{SAVED}"
    assert json.loads((checkpoint / POSITION).read_text())["step"] == SAVED

    resumed = make_trainer(dataset, tmp_path / "again")
    resumed.resume(checkpoint)
    found = weights(resumed)
    assert resumed.loader.step == whole.loader.step == STEPS
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert any(not torch.equal(start[name], value) for name, value in expected.items())

    policy = go.load_policy(tmp_path / "run" / f"checkpoint-{STEPS}" / "policy")
    policy.reset([0, 1], [20.0, 10.0])
    assert policy.context_length == 5 and policy.returns_scale == 10.0
    raw = dataset.read("observations", 0, 2)
    actions = policy.act(raw)
    assert actions.shape == (2, 3) and np.isfinite(actions).all()
    statistics = dataset.statistics["observations"]
    assert policy.statistics is not None
    for kept, known in zip(
        policy.statistics, (statistics.mean, statistics.std + 1e-6), strict=True
    ):
        np.testing.assert_allclose(kept, known, rtol=1e-6)


@pytest.mark.long
@pytest.mark.timeout(200)
def test_two_ranks_learn_what_one_learns(dataset: Dataset, tmp_path: Path) -> None:
    """They share each batch, and padding weighs as it would alone; then one resumes alone."""
    make_trainer(dataset, tmp_path / "alone", dropout=0.0).train()
    words = (str(dataset.path), str(tmp_path / "ranks"))
    launch(2, "-m", "tests.test_examples", *words)
    last = f"checkpoint-{STEPS}"
    alone, ranks = (
        load_file(tmp_path / name / last / "model.safetensors") for name in ("alone", "ranks")
    )
    for name, tensor in alone.items():
        torch.testing.assert_close(ranks[name], tensor, rtol=1e-4, atol=1e-5)
    resumed = make_trainer(dataset, tmp_path / "again", dropout=0.0)
    resumed.resume(tmp_path / "ranks" / f"checkpoint-{SAVED}")
    assert resumed.loader.step == STEPS
    for name, tensor in weights(resumed).items():
        torch.testing.assert_close(alone[name], tensor, rtol=1e-4, atol=1e-5)


def test_a_checkpoint_that_a_kill_left_half_written_is_passed_over(tmp_path: Path) -> None:
    assert last_checkpoint(tmp_path) is None
    for step in (500, 1000):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / POSITION).write_text("{}")
    (tmp_path / "checkpoint-1500").mkdir()
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-1000"


def test_discrete_actions_train_too(tmp_path: Path) -> None:
    columns = hopper_columns(12) | {"actions": np.arange(12) % 3}
    discrete = make_dataset(tmp_path, [5, 7], columns=columns)
    trainer = make_trainer(discrete, tmp_path / "run")
    assert trainer.loader.batch_at(0).actions.dtype == torch.int64
    assert float(trainer.train().training_loss) > 0
    logits = go.load_policy(
        tmp_path / "run" / f"checkpoint-{STEPS}" / "policy"
    ).model.config.act_dim
    assert logits == 3


# Episodes: terminated, cut, terminated after one step, cut after one step, cut.
LENGTHS = [3, 4, 1, 1, 4]
TERMINATED = [True, False, True, False, False]


def chain(folder: Path, actions: npt.NDArray[Any]) -> Dataset:
    """Reward 1 a step.  What is cut stays in one state for ever; what terminates counts down."""
    states = [3, 2, 1, *[0] * 4, 1, *[0] * 5]  # steps to the end; 0: there is none
    columns = {
        "observations": np.eye(4, dtype=np.float32)[states],
        "actions": actions,
        "rewards": np.ones(len(states), np.float32),
    }
    convert(ArraySource(columns, LENGTHS, terminated=TERMINATED), folder / "chain")
    return go.open_dataset(folder / "chain")


@pytest.mark.parametrize("context_length", [2, 5])
def test_transitions_are_those_of_the_arrays(tmp_path: Path, context_length: int) -> None:
    dataset = chain(tmp_path, np.linspace(-1, 1, 26, dtype=np.float32).reshape(13, 2))
    loader = go.GearLoader(
        dataset, batch_size=200, context_length=context_length, device="cpu", seed=3
    )
    batch = next(loader)
    found = transitions(batch, torch.from_numpy(dataset.terminated.copy()))
    seen = set()
    for slot, (episode, start) in enumerate(batch.segments.tolist()):
        arrays = dataset[episode]
        last = start == LENGTHS[episode] - 1
        seen.add((episode, start))
        np.testing.assert_array_equal(found.states[slot], arrays["observations"][start])
        np.testing.assert_array_equal(found.actions[slot], arrays["actions"][start])
        assert found.rewards[slot] == arrays["rewards"][start]
        assert bool(found.terminated[slot]) == (last and TERMINATED[episode])
        assert bool(found.known[slot]) == (not last or TERMINATED[episode])
        after = np.zeros(4) if last else arrays["observations"][start + 1]
        np.testing.assert_array_equal(found.next_states[slot], after)
    assert len(seen) == sum(LENGTHS)
    left = go.GearLoader(dataset, batch_size=4, context_length=2, padding="left", device="cpu")
    with pytest.raises(ValueError, match="padding='right'"):
        next(stream(left))


def taught(dataset: Dataset, loader: GearLoader, steps: int, **options: Any) -> Learner:
    torch.manual_seed(0)
    learner = Learner(dataset, hidden=16, learning_rate=1e-2, **options)
    for _, data in zip(range(steps), stream(loader), strict=False):
        found = learner.step(data)
    assert (found.keys() == {"policy"}) == ("cloning" in options)
    return learner


@pytest.mark.parametrize("discrete", [False, True])
def test_values_are_those_of_the_chain(tmp_path: Path, discrete: bool) -> None:
    """A cut is not an end: 1 + g + g^2 ... = 2 where it was cut, 1.75, 1.5 and 1 before an end."""
    dataset = chain(tmp_path, np.zeros(13, np.int64) if discrete else np.zeros((13, 1), np.float32))
    loader = go.GearLoader(dataset, batch_size=32, context_length=2, device="cpu")
    learner = taught(dataset, loader, 300, gamma=0.5, expectile=0.5, slow_rate=0.1)
    data = transitions(loader.batch_at(0), torch.from_numpy(dataset.terminated.copy()))
    states = data.states.argmax(1)
    expected = torch.tensor([2.0, 1.0, 1.5, 1.75])
    with torch.no_grad():
        values = learner._values_of(learner.critics, data)
    assert set(states.tolist()) == {0, 1, 2, 3}
    torch.testing.assert_close(values, expected[states].expand(2, -1), rtol=0, atol=0.05)


def test_cloning_takes_the_action_of_the_data(tmp_path: Path) -> None:
    actions = np.asarray([2, 2, 0, *[1] * 4, 0, *[1] * 5])
    dataset = chain(tmp_path, actions)
    options: dict[str, Any] = {"normalize_states": True, "device": "cpu"}
    loader = go.GearLoader(dataset, batch_size=32, context_length=2, **options)
    learner = taught(dataset, loader, 200, cloning=True)
    taken = Greedy(learner, dataset).act(dataset.read("observations", 0, 13))
    np.testing.assert_array_equal(taken, actions)


@pytest.mark.parametrize("cloning", [[], ["--cloning"]])
def test_the_program_trains_and_plays(tmp_path: Path, capsys: Captured, cloning: list[str]) -> None:
    go.collect("CartPole-v1", tmp_path / "a.hdf5", steps=100, quiet=True)
    convert(tmp_path / "a.hdf5", tmp_path / "data", quiet=True)
    main([str(tmp_path / "data"), "--steps", "3", "--episodes", "2", *cloning])
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("step 3: policy ")
    assert ("critic" in shown[0]) == (not cloning)
    assert shown[-1].startswith("CartPole-v1: ")


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.slow
def test_the_notebook_runs_and_is_the_script(
    tmp_path: Path, monkeypatch: Patch, capsys: Captured
) -> None:
    parts = re.split(r"^# %%(.*)\n", (ROOT / "examples/quickstart.py").read_text(), flags=re.M)[1:]
    script = []
    for kind, text in zip(parts[::2], parts[1::2], strict=True):
        prose = kind == " [markdown]"
        plain = re.sub(r"^# ?", "", text.strip(), flags=re.M) if prose else text.strip()
        script.append(("markdown" if prose else "code", plain))
    cells = json.loads((ROOT / "examples/quickstart.ipynb").read_text())["cells"]
    notebook = [(cell["cell_type"], "".join(cell["source"])) for cell in cells]
    assert notebook == script
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    names: dict[str, Any] = {}
    less = {
        '"train_steps": 60_000': '"train_steps": 3_000',
        '"train.steps": 200': '"train.steps": 20',
    }
    for kind, text in notebook:
        for more, few in less.items():
            text = text.replace(more, few)
        if kind == "code":
            exec(compile(text, "quickstart", "exec"), names)
    assert names["achieved"] > 0 and len(names["report"].tasks[0].targets) == 1
    assert "asked return" in capsys.readouterr().out


if __name__ == "__main__":  # a rank of two
    make_trainer(open_dataset(sys.argv[1]), Path(sys.argv[2]), dropout=0.0).train()


@pytest.mark.usefixtures("forked_workers")
def test_asking_for_the_best_return_of_a_game_of_luck_is_wrong(tmp_path: Path) -> None:
    """By Bayes' rule: 5 and -15 come of action 0 alone, -6 of action 1, 1 of action 2 mostly."""
    pays = {5.0: {5.0, -15.0}, -15.0: {5.0, -15.0}, -6.0: {1.0, -6.0}, 1.0: {1.0}}
    name, source, data = "examples.gambling:Gambling-v0", tmp_path / "luck.hdf5", tmp_path / "luck"
    go.collect(name, source, steps=2000, quiet=True)
    go.convert(source, data, quiet=True)
    options = {"data.path": data, "data.collect": None, "loader.returns_scale": 10.0}
    options |= {"loader.batch_size": 64, "train.steps": 300, "evaluate.episodes": 0}
    run = go.train("smoke", options, out=tmp_path / "run", quiet=True)
    report = go.evaluate(run, environment=name, targets=list(pays), episodes=40, quiet=True)
    assert {r.target: set(r.returns) for r in report.targets} == pays
