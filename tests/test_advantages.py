"""Values of a dataset's steps by a critic, and policies that are asked for an advantage."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

import gear_offline as go
from gear_offline.cli.main import main
from gear_offline.models.base import PlayedWindow
from gear_offline.runs.report import write_report
from tests.support import Captured, hopper_columns, make_dataset, one_error
from tests.training_support import ACTION_DIM, ENVIRONMENT, STATE_DIM, register_environment

pytestmark = pytest.mark.usefixtures("no_reports")
LENGTHS = [9, 4, 12, 7]
TINY: dict[str, Any] = {
    "loader.batch_size": 8, "loader.context_length": 3, "model.hidden_size": 8,
    "train.device": "cpu", "train.steps": 3, "evaluate.episodes": 0, "train.trackers": [],
}  # fmt: skip
ASKED = {"loader.condition": "advantage"}


def random_data(path: Path, *, discrete: bool = False) -> Path:
    register_environment()
    columns = hopper_columns(sum(LENGTHS), state_dim=STATE_DIM, action_dim=ACTION_DIM)
    if discrete:
        columns["actions"] = np.random.default_rng(0).integers(0, 3, sum(LENGTHS))
    name = None if discrete else ENVIRONMENT
    made = make_dataset(path, LENGTHS, columns=columns, environment_id=name, shard_bytes=900)
    assert len(made.manifest.shards) > 1
    return made.path


def train(recipe: str, data: Path, out: Path, **more: Any) -> go.Run:
    return go.train(recipe, TINY | {"data.path": str(data)} | more, out=out, quiet=True)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Data, a run of iql on them, and the data with its values."""
    path = tmp_path_factory.mktemp("advantages")
    data = random_data(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gear_offline.runs.report.write_report", lambda run, **_: Path(run))
        critic = train("iql", data, path / "critic", **{"optimizer.learning_rate": 0.01}).path
    return {
        "data": data,
        "critic": critic,
        "valued": go.value(data, path / "v", critic, quiet=True),
    }


def perceptron(weights: dict[str, Any], name: str, row: npt.NDArray[np.float64]) -> float:
    """Return the one output of three layers, by loops."""
    for layer in (0, 2, 4):
        matrix, bias = (weights[f"{name}.{layer}.{each}"].numpy() for each in ("weight", "bias"))
        row = np.array([sum(w * x for w, x in zip(line, row, strict=True)) for line in matrix])
        row = row + bias if layer == 4 else np.maximum(row + bias, 0.0)
    return float(row[0])


@pytest.mark.parametrize("discrete", [False, True])
def test_values_are_those_of_a_loop(tmp_path: Path, discrete: bool) -> None:
    data = go.open_dataset(random_data(tmp_path, discrete=discrete))
    run = train("iql", data.path, tmp_path / "run")
    path = go.value(data, tmp_path / "valued", run.path, quiet=True)
    valued = go.open_dataset(path)
    weights = run.policy(device="cpu").model.state_dict()
    states, actions = data.column("observations").astype("f8"), data.column("actions")
    states = (states - states.mean(0)) / (states.std(0) + 1e-6)
    done = np.eye(3)[actions] if discrete else actions.astype("f8")
    scale = float(np.ptp(data.returns)) / 1000
    for step in range(sum(LENGTHS)):
        value = scale * perceptron(weights, "value", states[step])
        pair = np.concatenate([states[step], done[step]])
        critics = [scale * perceptron(weights, f"slow.{number}", pair) for number in (0, 1)]
        expected = [value, min(critics) - value]
        found = [valued.column(name)[step] for name in ("values", "advantages")]
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * scale)
    for spec in data.spec:  # all else is as it was
        assert valued.column(spec.name).tobytes() == data.column(spec.name).tobytes()
    np.testing.assert_array_equal(valued.returns, data.returns)
    assert valued.terminated.tolist() == data.terminated.tolist()
    origin = valued.manifest.source.attributes["values"]
    assert (origin["run"], origin["step"], origin["gamma"]) == ("run", 3, 0.99)
    if not discrete:
        first, second = (go.split(each, "80%")[0].episodes.lengths for each in (data, valued))
        assert first.tolist() == second.tolist(), "what is held out stays so"


def test_values_of_a_policy_folder_go_to_a_parquet_file(
    tmp_path: Path, places: dict[str, Path]
) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    folder = go.export_policy(places["critic"], tmp_path / "policy")
    file = go.value(places["data"], tmp_path / "values.parquet", folder, quiet=True)
    table, valued = parquet.read_table(file).to_pydict(), go.open_dataset(places["valued"])
    assert table["episode_index"] == [n for n, length in enumerate(LENGTHS) for _ in range(length)]
    assert table["frame_index"] == [step for length in LENGTHS for step in range(length)]
    assert table["advantages"] == valued.column("advantages").tolist()
    assert table["values"] == valued.column("values").tolist()


def test_values_are_refused_and_replaced(tmp_path: Path, places: dict[str, Path]) -> None:
    data, critic = random_data(tmp_path / "a"), places["critic"]
    valued = go.value(data, tmp_path / "valued", critic, quiet=True)
    cloned = train("smoke", data, tmp_path / "cloned", **{"model.kind": "mlp"}).path
    wide = make_dataset(tmp_path / "wide", LENGTHS).path
    broken = go.load_policy(critic, device="cpu")
    broken.model.value[0].bias.data.fill_(torch.nan)
    nan = broken.save(tmp_path / "nan")
    before = sorted(tmp_path.iterdir())
    for code, words, source, out, run in (
        ("MODEL", "the run's model has no values", data, "x", cloned),
        ("MODEL", "the policy's actions have 2 elements, the data's 3", wide, "x", critic),
        ("MODEL", "the value of step 0 is NaN", data, "x", nan),
        ("COLUMN", "advantages and values", valued, "x", critic),
        ("OUTPUT_EXISTS", "exists", data, "valued", critic),
        ("RUN_NOT_FOUND", "no such run", data, "x", tmp_path / "none"),
    ):
        with one_error(code, words):
            go.value(source, tmp_path / out, run, quiet=True)
    assert sorted(tmp_path.iterdir()) == before
    steady = {"model.policy_schedule": "constant"}  # else train.steps may not change
    other = train("iql", data, tmp_path / "other", seed=1, **steady).path
    again = TINY | steady | {"data.path": str(data), "seed": 1, "train.steps": 4}  # by its name
    assert go.train("iql", again, out=other, resume=True, quiet=True).steps == 4
    go.value(data, data, critic, overwrite=True, quiet=True)  # in its own place
    first = go.open_dataset(data).column("advantages")
    np.testing.assert_array_equal(first, go.open_dataset(valued).column("advantages"))
    go.value(data, data, other, overwrite=True, quiet=True)
    assert (go.open_dataset(data).column("advantages") != first).any()


def test_advantages_do_not_outlive_their_rewards(tmp_path: Path, places: dict[str, Path]) -> None:
    def relabel(episode: Any) -> Any:
        return {"rewards": 2 * episode["rewards"]}

    with one_error("COLUMN", "map changes rewards, and advantages are of those before"):
        go.convert(places["valued"], tmp_path / "x", map=relabel, quiet=True)
    columns = ["observations", "actions"]
    go.convert(places["valued"], tmp_path / "x", map=relabel, columns=columns, quiet=True)
    flags = {"terminated": True, "truncated": False}
    episode = hopper_columns(5, state_dim=STATE_DIM, action_dim=ACTION_DIM) | flags
    with one_error("COLUMN", "lacks the column 'values'"):
        go.Appender(places["valued"]).append([episode])


@pytest.mark.parametrize("placement", ["host", "disk"])
@pytest.mark.parametrize("padding", ["left", "right"])
def test_batches_have_the_advantage_of_each_step(
    places: dict[str, Path], placement: Any, padding: Any
) -> None:
    data = go.open_dataset(places["valued"])
    loader = go.GearLoader(
        data, 8, context_length=5, condition="advantage", returns_scale=0.5, padding=padding,
        placement=placement, device="cpu", host_budget="1MiB", extra_columns=["advantages"],
    )  # fmt: skip
    advantages, rewards = data.column("advantages"), data.column("rewards")
    firsts = np.cumsum([0, *LENGTHS])
    for batch, _ in zip(loader, range(6), strict=False):
        real = batch.attention_mask.bool().numpy()
        rows = (firsts[batch.segments[:, :1].numpy()] + batch.timesteps.numpy())[real]
        expected = (advantages[rows].astype("f8") / 0.5).astype("f4")
        np.testing.assert_array_equal(batch.returns_to_go[..., 0].numpy()[real], expected)
        assert not batch.returns_to_go.numpy()[~real].any()
        np.testing.assert_array_equal(batch.rewards[..., 0].numpy()[real], rewards[rows])
        np.testing.assert_array_equal(batch.extras["advantages"].numpy()[real], advantages[rows])
    state = loader.state_dict()
    loader.close()
    with one_error("LOADER_STATE", "condition is 'return' here and 'advantage'"):
        go.GearLoader(data, 8, context_length=5, returns_scale=0.5, padding=padding,
                      device="cpu").load_state_dict(state)  # fmt: skip


@pytest.mark.parametrize("kind", ["decision_transformer", "decoupled", "mlp"])
def test_a_policy_is_asked_for_the_same_advantage_at_each_step(
    tmp_path: Path, places: dict[str, Path], kind: str
) -> None:
    more = {"model.kind": kind} | ({"model.condition": "returns"} if kind == "mlp" else {})
    run = train("smoke", places["valued"], tmp_path / "run", **more, **ASKED)
    advantages = go.open_dataset(places["valued"]).column("advantages").astype("f8")
    scale = run.recipe.loader.returns_scale
    assert scale == pytest.approx(advantages.std(), rel=1e-6)
    (target,) = run.recipe.evaluate.targets or ()
    assert target == float(f"{np.quantile(advantages, 0.9):.3g}")
    saved = go.export_policy(run.path, tmp_path / "policy")
    assert f"policy.reset({target:g}" in (saved / "README.md").read_text()
    states = np.random.default_rng(1).normal(size=(3, STATE_DIM)).astype("f4")
    for policy in (run.policy(device="cpu"), go.load_policy(saved, device="cpu")):
        policy.reset(2 * target)
        acted = list[Any]()
        for step, state in enumerate(states):
            acted.append(policy.act(state[None])[0])
            policy.observe_reward([1.5])
            assert policy.targets.tolist() == [2 * target], "no reward is subtracted"
            window = PlayedWindow(
                states=torch.from_numpy(policy.window.columns[0].states(states[None, : step + 1])),
                actions=torch.tensor(np.array([[*acted[:-1], 0 * acted[-1]]])),
                returns_to_go=torch.full((1, step + 1, 1), 2 * target / scale),
                goals=None,
                timesteps=torch.arange(step + 1)[None],
                place=torch.tensor([step]),
            )
            with torch.inference_mode():
                expected = policy.model.act(window)[0].numpy()
            np.testing.assert_allclose(acted[-1], expected, rtol=1e-4, atol=1e-6)


def test_a_run_says_advantage_where_others_say_return(
    tmp_path: Path, places: dict[str, Path], capsys: Captured
) -> None:
    more = {"evaluate.episodes": 2, "evaluate.targets": [0.5, 0.25], "train.checkpoint_every": 2}
    out = tmp_path / "run"
    run = train("smoke", places["valued"], out, **more, **ASKED)
    again = {"train.steps": 4, "optimizer.schedule": "constant"}
    go.train("smoke", TINY | {"data.path": str(places["valued"])} | more | ASKED | again,
             out=out, resume=True, quiet=True)  # fmt: skip
    assert go.open_run(out).steps == 4
    report = go.evaluate(out, targets=0.75, episodes=2, device="cpu", quiet=True)
    report.print()
    assert "asked advantage" in capsys.readouterr().out
    assert (
        "asked advantage" in (go.export_policy(run.path, tmp_path / "p") / "README.md").read_text()
    )
    choice = go.choose([out], targets=[0.1, 0.9], critics=2, steps=5, device="cpu")
    assert {row.label for row in choice.policies} == {
        "run asked advantage 0.1",
        "run asked advantage 0.9",
    }
    other = train("smoke", places["data"], tmp_path / "other").path
    with one_error("USAGE", "some policies are asked for returns and some for advantages"):
        go.choose([out, other], targets=[0.1], device="cpu")
    choice = go.choose([out, other], critics=2, steps=200, device="cpu", data=places["data"])
    assert not any("other data" in note for note in choice.notes), "the same episodes"


def test_what_asks_for_nothing_is_asked_for_nothing(
    tmp_path: Path, places: dict[str, Path], capsys: Captured
) -> None:
    run = tmp_path / "run"
    more = {"model.kind": "mlp", "evaluate.episodes": 2}
    train("smoke", places["data"], run, **more)
    report = go.evaluate(run, targets=[3.0, 2.0], episodes=2, device="cpu", quiet=True)
    report.print()
    folder = go.export_policy(run, tmp_path / "policy")
    texts = [capsys.readouterr().out, report.summary()[1], write_report(run).read_text()]
    texts += [(folder / "README.md").read_text()]
    assert len(report.targets) == 1 and "asked" not in texts[1] and "| nothing |" in texts[3]
    assert not any("asked return" in text or "asked 3" in text for text in texts)
    assert not (run / "plots" / "asked_vs_achieved.png").exists()


def test_actors_refuse_what_they_cannot_append(tmp_path: Path, places: dict[str, Path]) -> None:
    data = go.value(places["data"], tmp_path / "grows", places["critic"], quiet=True)
    run = train("smoke", data, tmp_path / "run", **{"data.admit_every": 2}).path
    with one_error("COLUMN", "values and advantages, which no episode that is played has"):
        go.act(run, episodes=1, quiet=True)
    asked = train("smoke", places["valued"], tmp_path / "asked", **ASKED).path
    with one_error("USAGE", "train one that asks for returns"):
        go.act(asked, episodes=1, quiet=True)


def test_what_makes_no_sense_is_refused(
    tmp_path: Path, places: dict[str, Path], capsys: Captured
) -> None:
    for option, words in (
        ("loader.gamma=0.9", "gamma=0.9, of returns, exclude each other"),
        ("loader.goals={future: 1.0}", "goals exclude each other"),
        ("data.admit_every=5", "data.admit_every exclude each other"),
        ("model.kind=mlp", "model.condition=returns takes it"),
        ("model.kind=iql", "needs a model that is asked for something"),
    ):
        with one_error("RECIPE", words):
            go.load_recipe("smoke", ["loader.condition=advantage", "data.path=d", option])
    with one_error("COLUMN", "no column advantages"):
        train("smoke", places["data"], tmp_path / "x", **ASKED)
    with one_error("COLUMN", "no column advantages"):
        go.GearLoader(places["data"], 4, condition="advantage", device="cpu")
    returns = train("smoke", places["valued"], tmp_path / "returns").path
    with one_error("MODEL", "trained on condition return"):
        train("smoke", places["valued"], tmp_path / "y", **ASKED, **{"train.init": str(returns)})
    command = ["value", str(places["data"]), str(tmp_path / "z"), "--with"]
    assert main([*command, str(returns), "--quiet"]) == 2
    assert "error[MODEL]" in capsys.readouterr().err
    assert main([*command, str(places["critic"]), "--quiet"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'z'}\n"
