"""Choosing a policy from data alone."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gear_offline as go
from gear_offline.cli.main import main
from gear_offline.data.convert.conversion import convert
from gear_offline.runs.report import write_report
from tests.gpu_support import ON_GPU
from tests.support import ArraySource, Captured, make_dataset, one_error

pytestmark = pytest.mark.usefixtures("no_reports")
LENGTH, EPISODES, GAMMA = 20, 60, 0.8


def guessing(path: Path, slope: float, noise: float, seed: int = 0) -> Path:
    """Each step shows a number; the reward is minus the squared distance of the action to it."""
    generator = np.random.default_rng(seed)
    states = generator.uniform(-1, 1, size=(EPISODES * LENGTH, 1)).astype(np.float32)
    actions = slope * states + noise * generator.uniform(-1, 1, size=states.shape)
    columns = {
        "observations": states, "actions": actions.astype(np.float32),
        "rewards": -((actions - states) ** 2)[:, 0].astype(np.float32),
    }  # fmt: skip
    source = ArraySource(columns, [LENGTH] * EPISODES, terminated=[False] * EPISODES)
    convert(source, path / "guesses", quiet=True)
    return path / "guesses"


def cloned(path: Path, name: str, slope: float) -> Path:
    (path / name).mkdir()
    options = {
        "data.path": str(guessing(path / name, slope, 0.05)), "model.kind": "mlp",
        "model.hidden_size": 32, "model.dropout": 0.0, "train.steps": 150, "loader.batch_size": 64,
        "optimizer.learning_rate": 0.01, "evaluate.episodes": 0, "train.device": "cpu",
        "loader.context_length": 1,
    }  # fmt: skip
    return go.train("smoke", options, out=path / "runs" / name, quiet=True).path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    path = tmp_path_factory.mktemp("choose")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gear_offline.runs.report.write_report", lambda *_, **__: None)
        slopes = {"good": 1.0, "poor": -0.6}
        return {name: cloned(path, name, slope) for name, slope in slopes.items()}


def test_values_are_those_that_a_formula_gives(tmp_path: Path, runs: dict[str, Path]) -> None:
    data = guessing(tmp_path, 0.3, 0.9, seed=1)
    choice = go.choose(
        list(runs.values()), data=data, gamma=GAMMA, steps=800, critics=3, device="cpu",
        out=tmp_path / "choice.svg",
    )  # fmt: skip
    assert choice.best == ("good",) and "good is better than poor" in choice.answer
    steps = (1 - GAMMA**LENGTH) / (1 - GAMMA)
    for row in choice.policies:
        slope = {"good": 1.0, "poor": -0.6}[row.label]
        true = -((1 - slope) ** 2) / 3 * steps  # the mean of x ** 2 is 1 / 3
        assert row.estimate == pytest.approx(true, abs=0.5)
        assert row.low <= row.estimate <= row.high and row.outside < 0.15
    dataset = go.open_dataset(data)
    rewards = dataset.column("rewards").reshape(EPISODES, LENGTH).astype(np.float64)
    returns = rewards @ GAMMA ** np.arange(LENGTH)
    assert choice.data_mean == pytest.approx(returns.mean(), rel=1e-5)
    assert choice.data_best == pytest.approx(returns.max(), rel=1e-5)
    assert choice.plot is not None and choice.plot.is_file()
    assert choice.answer in str(choice)
    assert choice.among("poor").best == () and choice.among(["good", "poor"]).best == ("good",)
    with one_error("USAGE", "were judged; there are good, poor"):
        choice.among("best")


def test_what_the_data_never_did_is_not_judged(tmp_path: Path, runs: dict[str, Path]) -> None:
    data = guessing(tmp_path, -1.0, 0.02)
    choice = go.choose(
        list(runs.values()), data=data, gamma=GAMMA, steps=150, critics=3, device="cpu"
    )
    assert choice.best == () and "cannot be told from these data, because" in choice.answer
    assert max(row.outside for row in choice.policies) > 0.5


def test_a_policy_alone_is_compared_with_the_data(tmp_path: Path, runs: dict[str, Path]) -> None:
    """The data act as ``0.3 state`` and noise, so one is better than they are, one is not."""
    data, verdicts = guessing(tmp_path, 0.3, 0.9, seed=1), dict[str, str]()
    for name, run in runs.items():
        choice = go.choose(run, data=data, gamma=GAMMA, steps=800, critics=3, device="cpu")
        verdicts[name] = choice.answer
        assert choice.best == (("good",) if name == "good" else ())
    assert verdicts["good"].startswith("good is better than what the data did (p ")
    assert "better" not in verdicts["poor"]


def test_a_run_is_judged_when_it_ends(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gear_offline.runs.writer.choose", partial(go.choose, steps=50))
    options = {
        "data.path": str(guessing(tmp_path, 0.3, 0.9)), "train.steps": 3, "evaluate.episodes": 0,
        "train.device": "cpu", "evaluate.offline": True,
    }  # fmt: skip
    run = go.train("smoke", options, out=tmp_path / "run")
    answer = json.loads((run.path / "summary.json").read_text())["choice"]["answer"]
    assert f"judged by its data: {answer}" in capsys.readouterr().err
    page = write_report(run.path).read_text()
    assert answer in page and (run.path / "plots" / "choice.png").is_file()
    again = go.train(run.path, {"evaluate.offline": False}, resume=True, quiet=True)
    assert again.steps == 3, "an option that a resumed run may change"
    cuts = ArraySource(
        {name: np.ones((30, 1), "f4") for name in ("observations", "actions", "rewards")},
        [1] * 30,
        terminated=[False] * 30,
    )
    convert(cuts, tmp_path / "cuts", quiet=True)
    cut = options | {"data.path": str(tmp_path / "cuts"), "model.kind": "mlp"}
    run = go.train("smoke", cut, out=tmp_path / "cut")
    assert "not judged by its data: " in capsys.readouterr().err
    assert json.loads((run.path / "summary.json").read_text())["choice"] is None
    bare = tmp_path / "bare"
    bare.mkdir()
    columns = {name: np.ones((40, 1), "f4") for name in ("observations", "actions")}
    convert(ArraySource(columns, [20, 20], terminated=[False, False]), bare / "x", quiet=True)
    options |= {"data.path": str(bare / "x"), "model.kind": "mlp"}
    with one_error("COLUMN", "the data have no rewards"):
        go.train("smoke", options, out=tmp_path / "other", quiet=True)
    assert not list((tmp_path / "other").rglob("step-*")), "it is told before training"


def test_equal_policies_are_not_told_apart(tmp_path: Path, runs: dict[str, Path]) -> None:
    data = guessing(tmp_path, 0.3, 0.9, seed=1)
    copy = tmp_path / "copy"
    go.load_policy(runs["good"], device="cpu").save(copy)
    choice = go.choose(
        [runs["good"], copy], data=data, gamma=GAMMA, steps=150, critics=3, device="cpu"
    )
    assert choice.answer == "good or copy" or choice.answer == "copy or good"
    assert choice.policies[0].estimate == choice.policies[1].estimate


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_targets_of_one_run_are_played_as_the_loader_shows_them(
    tmp_path: Path, device: str
) -> None:
    """What a policy does in the data's own histories is what its model says of the windows."""
    rng = np.random.default_rng(0)
    columns: dict[str, Any] = {
        "observations": rng.normal(size=(40, 3)).astype(np.float32),
        "actions": rng.uniform(-1, 1, size=(40, 2)).astype(np.float32),
        "rewards": rng.normal(size=40).astype(np.float32),
    }
    data = make_dataset(tmp_path, [12, 9, 19], columns=columns, environment_id=None)
    options = {
        "data.path": str(data.path), "train.steps": 3, "evaluate.episodes": 0,
        "train.device": "cpu", "loader.context_length": 4,
    }  # fmt: skip
    run = go.train("smoke", options, out=tmp_path / "run", quiet=True)
    choice = go.choose([run], targets=[5.0, 1.0], steps=20, critics=2, device=device)
    assert {row.target for row in choice.policies} == {5.0, 1.0}
    totals = [columns["rewards"][a:b].sum() for a, b in ((0, 12), (12, 21), (21, 40))]
    best = int(np.argmax(totals))
    first, last = [(0, 12), (12, 21), (21, 40)][best]
    policy = run.policy(device="cpu")
    for row in choice.policies:
        policy.reset(row.target)
        acted = list[Any]()
        for step in range(first, last):
            acted.append(policy.act(columns["observations"][step : step + 1])[0])
            rewards, actions = columns["rewards"][step : step + 1], columns["actions"][step]
            policy.observe_reward(rewards, actions=actions[None])
        apart = (np.stack(acted) - columns["actions"][first:last]) / columns["actions"].std(0)
        assert row.action_error == pytest.approx(np.sqrt((apart**2).mean()), rel=1e-4)


def test_the_command_and_what_it_refuses(
    tmp_path: Path, runs: dict[str, Path], capsys: Captured
) -> None:
    words = ["choose", str(runs["good"]), str(runs["poor"]), "--steps", "20", "--device", "cpu"]
    assert main([*words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {row["label"] for row in document["policies"]} == {"good", "poor"}
    assert main(["choose", str(tmp_path / "none"), str(runs["good"])]) == 2
    assert "RUN_NOT_FOUND" in capsys.readouterr().err
    other = make_dataset(tmp_path, [5, 5]).path
    with one_error("MODEL", "the policy's actions have 1 elements, the data's 3"):
        go.choose(list(runs.values()), data=other, device="cpu")


def test_the_error_is_of_held_out_episodes(tmp_path: Path, runs: dict[str, Path]) -> None:
    data = guessing(tmp_path, 0.3, 0.9, seed=2)
    options = {"data.path": str(data), "data.held_out": "20%", "train.steps": 2}
    options |= {"evaluate.episodes": 0, "train.device": "cpu"}
    run = go.train("smoke", options, out=tmp_path / "run", quiet=True)
    choice = go.choose([run, runs["good"]], targets=[0.0], steps=20, critics=2, device="cpu")
    held_out, whole = go.split(data, "20%")[1], go.open_dataset(data)
    assert len(held_out) < 20, "the best tenth is one episode"
    best = held_out[int(held_out.returns.argmax())]
    policy = go.load_policy(runs["good"], device="cpu")
    policy.reset(np.arange(LENGTH), 0.0)
    apart = policy.act(best["observations"]) - best["actions"]
    (row,) = (row for row in choice.policies if row.label == "good")
    error = np.sqrt((apart**2).mean()) / whole.column("actions").std()
    assert row.action_error == pytest.approx(error, rel=1e-3)


def test_what_was_learnt_is_known_by_content(tmp_path: Path, runs: dict[str, Path]) -> None:
    """A run holds out the same episodes of a copy, and of a view of it."""
    data = guessing(tmp_path, 0.3, 0.9, seed=2)
    go.convert(data, tmp_path / "copy", quiet=True)
    options = {"data.path": str(data), "data.held_out": "20%", "train.steps": 2}
    options |= {"evaluate.episodes": 0, "train.device": "cpu", "model.kind": "mlp"}
    run = go.train("smoke", options, out=tmp_path / "run", quiet=True)
    fit: Any = {"steps": 200, "critics": 2, "device": "cpu", "gamma": 0.0}
    held_out = go.split(data, "20%")[1]
    places = data, tmp_path / "copy", held_out
    first, second, third = (go.choose(run.path, data=each, **fit) for each in places)
    notes = [*first.notes, *second.notes, *third.notes]
    assert not any("other data" in note or "held out" in note for note in notes)
    assert first.policies[0].action_error == second.policies[0].action_error


def rng_rows(name: str) -> Any:
    rows = np.random.default_rng(len(name)).uniform(-1, 1, size=(30, 1)).astype(np.float32)
    return rows[:, 0] if name == "rewards" else rows


def edited(path: Path, **changes: Any) -> Path:
    """Copy data whose columns are changed: by name a function of the rows."""
    path.mkdir()
    whole = go.open_dataset(guessing(path, 0.3, 0.9))
    columns = {name: whole.column(name).copy() for name in ("observations", "actions", "rewards")}
    for name, change in changes.items():
        columns[name] = change(columns[name])
    source = ArraySource(columns, [LENGTH] * EPISODES, terminated=[False] * EPISODES)
    convert(source, path / "edited", quiet=True, allow_nonfinite=True)
    return path / "edited"


@pytest.mark.parametrize("reward", [1e30, 3e38])
def test_one_absurd_reward_makes_no_policy_better(
    tmp_path: Path, runs: dict[str, Path], reward: float
) -> None:
    def spoil(rewards: Any) -> Any:
        return np.where(np.arange(len(rewards)) == 7, np.float32(reward), rewards)

    data = edited(tmp_path / "huge", rewards=spoil)
    choice = go.choose(list(runs.values()), data=data, steps=5, critics=2, device="cpu")
    assert len(choice.best) != 1 and "better" not in choice.answer


def test_returns_that_do_not_differ_and_a_run_twice(tmp_path: Path, runs: dict[str, Path]) -> None:
    options: dict[str, Any] = {"steps": 5, "critics": 2, "device": "cpu"}
    data = edited(tmp_path / "same", rewards=np.ones_like)
    choice = go.choose(list(runs.values()), data=data, **options)
    assert choice.best == () and "the returns of their episodes do not differ" in choice.answer
    data = edited(tmp_path / "high", rewards=lambda rows: rows.astype(np.float64) + 1e9)
    choice = go.choose(list(runs.values()), data=data, **options)
    assert choice.best == () and "do not differ by more than rounding" in choice.answer
    gap = edited(
        tmp_path / "gap", rewards=lambda rows: np.where(np.arange(len(rows)) == 47, np.nan, rows)
    )
    with one_error("COLUMN", "rewards is not finite at step 7 of episode 2"):
        go.choose(list(runs.values()), data=gap, **options)
    with one_error("USAGE", "no policy is given"):
        go.choose([])
    with one_error("USAGE", "gamma=1.5 is no discount"):
        go.choose(list(runs.values()), gamma=1.5)
    with one_error("USAGE", "critics=1 is below 2"):
        go.choose(list(runs.values()), critics=1)
    cut = ArraySource(
        {name: rng_rows(name) for name in ("observations", "actions", "rewards")},
        [1] * 30,
        terminated=[True] + [False] * 29,
    )
    convert(cut, tmp_path / "cut", quiet=True)
    choice = go.choose(list(runs.values()), data=tmp_path / "cut", **options)
    assert len(choice.best) != 1, "one step says what comes after it"
    with one_error("USAGE", "given twice"):
        go.choose([runs["good"], runs["good"].parent / ".." / "runs" / "good"], **options)


def test_a_view_is_judged_as_data_are(tmp_path: Path, runs: dict[str, Path]) -> None:
    data = guessing(tmp_path, 0.3, 0.9, seed=1)
    view = go.split(data, "30%")[1]
    choice = go.choose(list(runs.values()), data=view, steps=5, critics=2, device="cpu")
    assert choice.episodes == len(view)
    assert len(choice.notes) == 3 and "learnt from other data" in choice.notes[0]
    assert "after 5 steps critics have not come to rest" in str(choice)
