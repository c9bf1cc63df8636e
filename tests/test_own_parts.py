"""Models, strategies and environments of somebody else's files, through every door."""

import json
import os
import runpy
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import gear_offline as go
from gear_offline.artifacts.json_lines import read_records
from gear_offline.cli.main import main
from gear_offline.config.sections import DecoupledSettings, MLPSettings
from gear_offline.core import parts
from gear_offline.kernels.cuda_module import capturing
from gear_offline.models.base import ModelFacts
from gear_offline.models.encoders import InputColumn
from gear_offline.models.mlp import MLP
from gear_offline.runs.loop import TrainingInterrupted
from gear_offline.training.learner import Learner
from gear_offline.training.step import GraphStep
from tests.own_parts import BESIDE, ENVIRONMENT, NET, STRATEGY
from tests.support import ROOT, Captured, Patch, make_dataset, one_error
from tests.test_docs import blocks
from tests.test_resume import interrupted_in
from tests.training_support import learnt

pytestmark = pytest.mark.usefixtures("no_reports")
LENGTHS, STEPS, CONTEXT = [9, 4, 12, 7], 9, 5


@pytest.fixture
def own(tmp_path: Path, monkeypatch: Patch) -> Iterator[Path]:
    """Work in a folder that has the files of others, in a home of its own."""
    files = {"net.py": NET, "beside.py": BESIDE, "draw.py": STRATEGY, "env.py": ENVIRONMENT}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    make_dataset(tmp_path, LENGTHS, state_dim=3, action_dim=1, environment_id=None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    another_process(monkeypatch)
    yield tmp_path


def another_process(monkeypatch: Patch, home: Path | None = None) -> None:
    """Forget what this process has been told, as another one has not been."""
    monkeypatch.setattr(parts, "_permission", parts.Permission())
    if home is not None:
        monkeypatch.setenv("XDG_STATE_HOME", str(home))


def options(**more: Any) -> dict[str, Any]:
    return {
        "data.path": "dataset",
        "model.kind": "net.py:Net",
        "selection.strategy": "draw.py:fading",
        "selection.half_life": 2.0,
        "evaluate.environment": "env.py:Reach",
        "evaluate.episodes": 1,
        "evaluate.background": "off",
        "train.steps": STEPS,
        "train.log_every": 3,
        "train.device": "cpu",
        **{name.replace("__", "."): value for name, value in more.items()},
    }


def train(out: str, **more: Any) -> go.Run:
    return go.train("smoke", options(**more), out=out, quiet=True)


def test_a_run_of_other_peoples_parts_is_interrupted_and_goes_on(
    own: Path, monkeypatch: Patch
) -> None:
    whole = train("whole")
    records = read_records(whole.path / "metrics.jsonl")
    for record in records:  # what is trained is their sum
        assert record["loss"] == pytest.approx(record["imitation"] + record["dynamics"], rel=1e-5)
    with interrupted_in(5), pytest.raises(TrainingInterrupted):
        train("cut")
    another_process(monkeypatch)
    cut = go.train("cut", resume=True, quiet=True)
    assert learnt(cut.path) == learnt(whole.path)
    assert cut.recipe.model.sizes == [8, 8], "with the model's own defaults"
    named = {Path(name).name for name in cut.recipe.parts}
    assert named == {"net.py:Net", "draw.py:fading", "env.py:Reach"}
    report = go.evaluate(cut.path, episodes=2, quiet=True)
    assert report.targets[0].lengths == (9, 9)


def test_a_policy_acts_as_its_model_predicts(own: Path, monkeypatch: Patch) -> None:
    run = train("run", evaluate__episodes=0)
    folder = run.policy(device="cpu").save("policy")
    policy = go.load_policy(folder, device="cpu")
    go.export_policy(folder, "policy.onnx")
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession("policy.onnx")
    policy.reset(7.0)
    seen, done = list[Any](), list[Any]()
    model: Any = run.policy(device="cpu").model
    for step in range(CONTEXT + 2):
        seen.append(np.random.default_rng(step).normal(size=3).astype(np.float32))
        action = policy.act(seen[-1][None])[0]
        states = policy.window.states(np.stack(seen[-CONTEXT:]))
        before = np.stack([*done, np.zeros(1, np.float32)])[-CONTEXT:]
        blank = CONTEXT - len(states)  # the oracle: the window by hand, padded on the right
        window = go.SequenceModel()
        window.states = torch.from_numpy(np.pad(states, ((0, blank), (0, 0))))[None]
        window.actions = torch.from_numpy(np.pad(before, ((0, blank), (0, 0))))[None]
        with torch.no_grad():
            expected = model.predict(window)[0, len(states) - 1].numpy()
        np.testing.assert_allclose(action, expected, rtol=1e-5, atol=1e-6)
        inputs = {"observations": np.stack(seen[-CONTEXT:])[None], "actions": before[None]}
        inputs["returns_to_go"] = np.full((1, len(states)), 7.0, np.float32)
        inputs["timesteps"] = np.arange(len(states))[None]
        known = {entry.name for entry in session.get_inputs()}
        found = session.run(None, {name: v for name, v in inputs.items() if name in known})[0]
        np.testing.assert_allclose(found[0], expected, rtol=1e-4, atol=1e-5)
        done.append(action)
        policy.observe_reward([1.0])


def test_nobodys_word_imports_nothing(own: Path, monkeypatch: Patch) -> None:
    run = train("run", evaluate__episodes=0)
    folder = run.policy(device="cpu").save("policy")
    another_process(monkeypatch, own / "elsewhere")
    for place in (run.path, folder):
        with one_error("MODEL", "that only a run.*model='.*net.py:Net'"):
            go.load_policy(place, device="cpu")
    with one_error("MODEL", "that only a run"):
        go.train("run", {"train.steps": STEPS + 1}, resume=True, quiet=True)
    assert go.load_policy(folder, device="cpu", model="net.py:Net").action_dim == 1
    assert go.load_policy(run.path, device="cpu").action_dim == 1, "a word is given once"


def test_a_changed_file_is_told_with_what_to_type(
    own: Path, monkeypatch: Patch, capsys: Captured
) -> None:
    run = train("run", evaluate__episodes=0)
    another_process(monkeypatch)
    (own / "net.py").write_text(NET + "\n# mended\n")
    with one_error("MODEL", "net.py has changed since.*model.kind=.*net.py:Net") as caught:
        go.train("run", {"train.steps": 11}, resume=True, quiet=True)
    kind = str(caught.value).partition("model.kind=")[2].partition(" ")[0]
    capsys.readouterr()
    again = go.train("run", {"train.steps": 11, "model.kind": kind}, resume=True)
    assert "net.py:Net has changed since the run began" in capsys.readouterr().err
    assert again.steps == 11 and go.load_policy(run.path, device="cpu").facts.step == 11


GROUPS = """
    def parameter_groups(self, optimizer):
        rate = 0.5 * optimizer.learning_rate
        return [{"params": self.action.parameters(), "learning_rate": rate}]

    def predict("""


def test_a_run_whose_groups_have_changed_does_not_go_on(own: Path, monkeypatch: Patch) -> None:
    run = train("run", evaluate__episodes=0, optimizer__learning_rate=0.01)
    another_process(monkeypatch)
    (own / "net.py").write_text(NET.replace("    def predict(", GROUPS[1:]))
    with one_error("RUN_MISMATCH", r"group of action.bias was 1 when the run began and is 2 now"):
        go.train(run.path, {"train.steps": 11, "model.kind": "net.py:Net"}, resume=True, quiet=True)
    (own / "net.py").write_text(
        NET.replace("    def predict(", GROUPS[1:].replace("self.action", "self.no"))
    )
    with one_error("MODEL", r"parameter_groups\(\) raised .*, at .*net.py:\d+ in parameter_groups"):
        train("other", evaluate__episodes=0)


OURS: dict[str, dict[str, Any]] = {
    "bc": {"model.kind": "mlp", "model.history": 3, "selection.strategy": "top_percent"},
    "rvs": {
        "model.kind": "mlp",
        "model.history": 3,
        "model.condition": "returns",
        "model.activation": "gelu_new",
        "model.initialization": "glorot",
    },
    "decoupled": {"model.kind": "decoupled", "model.layers": 1, "model.hidden_size": 16},
    "released": {
        "model.kind": "transformers.DecisionTransformerModel",
        "model.layers": 1,
        "model.hidden_size": 16,
    },
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.long if n in ("rvs", "released") else ()) for n in OURS],
)
def test_models_of_the_package_train_play_save_and_export(own: Path, name: str) -> None:
    recipe = {**options(), **OURS[name]}
    recipe |= {"selection.strategy": OURS[name].get("selection.strategy", "uniform_steps")}
    del recipe["selection.half_life"]
    run = go.train("smoke", recipe, out="run", quiet=True)
    assert run.best is not None and run.recipe.model.kind == OURS[name]["model.kind"]
    folder = run.policy(device="cpu").save("policy")
    policy, other = go.load_policy(folder, device="cpu"), run.policy(device="cpu")
    with one_error("ENVIRONMENT", "env.py has no 'Raech', did you mean 'Reach'"):
        go.evaluate(policy, environment="env.py:Raech", episodes=2, quiet=True)
    report = go.evaluate(policy, environment="env.py:Reach", episodes=2, seed=3, quiet=True)
    again = go.evaluate(run, episodes=2, seed=3, out="again.json", quiet=True)
    assert report.targets[0].returns == pytest.approx(again.targets[0].returns, rel=1e-4)
    asks = run.recipe.model.asks_returns is not False
    assert len(again.targets) == (2 if asks else 1), "what asks for nothing plays once"
    if name == "bc":  # its graph is that of "rvs" with fewer inputs
        return
    go.export_policy(policy, "policy.onnx")
    session = pytest.importorskip("onnxruntime").InferenceSession("policy.onnx")
    named = {entry.name for entry in session.get_inputs()}
    other.reset(5.0)
    seen, done = list[Any](), list[Any]()
    for step in range(CONTEXT + 1):
        seen.append(np.random.default_rng(step).normal(size=3).astype(np.float32))
        action = other.act(seen[-1][None])[0]
        before = np.stack([*done, np.zeros(1, np.float32)])[-CONTEXT:]
        count = len(before)
        inputs: dict[str, Any] = {"observations": np.stack(seen[-CONTEXT:])[None]}
        inputs |= {"actions": before[None], "timesteps": np.arange(step + 1)[None, -count:]}
        inputs["returns_to_go"] = (5.0 - inputs["timesteps"]).astype(np.float32)
        found = session.run(None, {key: value for key, value in inputs.items() if key in named})[0]
        np.testing.assert_allclose(found[0], action, rtol=1e-4, atol=1e-5)
        done.append(action)
        other.observe_reward([1.0])


def test_a_class_of_this_process_is_trained_and_found_again(
    own: Path, monkeypatch: Patch, capsys: Captured
) -> None:
    class Here(go.SequenceModel):
        def __init__(self, facts: Any, settings: Any) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList([torch.nn.Linear(3, 3)])
            self.out = torch.nn.Linear(3, facts.action_dim)

        def predict(self, batch: Any) -> torch.Tensor:
            made: torch.Tensor = self.out(self.blocks[0](batch.states))
            return made

    recipe = options(train__recompute=True, evaluate__background="on")
    del recipe["model.kind"]
    run = go.train("smoke", recipe, model=Here, out="run")
    assert run.best is not None and "only this process has" in capsys.readouterr().err
    another_process(monkeypatch)
    assert go.load_policy("run", device="cpu", model=Here).action_dim == 1


def test_callbacks_trackers_and_maps_are_parts(own: Path) -> None:
    text = """
import gear_offline as go

class Stop(go.Callback):
    def on_log(self, run, step, values):
        return step >= 6

class Lines:
    last_steps = {}
    def __init__(self, run, project):
        self.file = open(run.path / "lines.txt", "a")
    def send(self, step, values):
        print(step, *values, file=self.file)
    def close(self):
        self.file.close()

def doubled(episode):
    return {"rewards": episode["rewards"] * 2}
"""
    (own / "more.py").write_text(text)
    named = {"train__callbacks": ["more.py:Stop"], "train__trackers": ["more.py:Lines"]}
    run = train("run", evaluate__episodes=0, **named)
    assert run.steps == 6
    lines = (run.path / "lines.txt").read_text().splitlines()
    assert [line.split()[0] for line in lines] == ["3", "6"] and "train/dynamics" in lines[0]
    (own / "line.py").write_text(text.replace("lines.txt", "line.txt"))
    go.sync(run, "line.py:Lines")
    assert len((run.path / "line.txt").read_text().splitlines()) == 2, "named by the caller alone"
    (own / "line.py").write_text(text.replace("lines.txt", "nowhere/line.txt"))
    with one_error("RECIPE", "sending to it raised FileNotFoundError.*line.py:"):
        go.sync(run, "line.py:Lines")
    dataset = go.open_dataset("dataset")
    twice = go.convert("dataset", "twice", map="more.py:doubled", quiet=True)
    assert twice.returns.mean == pytest.approx(2 * dataset.manifest.returns.mean)
    with one_error("USAGE", "more.py has no 'doubly', did you mean 'doubled'"):
        go.convert("dataset", "thrice", map="more.py:doubly", quiet=True)
    (own / "of --rename a=b").mkdir()  # a path is no option, which Python would call otherwise
    path = (own / "more.py").rename(own / "of --rename a=b" / "more.py")
    with one_error("USAGE", f"'{path}' has no 'doubly'"):
        go.convert("dataset", "thrice", map=f"{path}:doubly", quiet=True)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("return {\n", "return [\n"), "SyntaxError"),
        (("nn.Linear(seen, settings.width)", "nn.Linear(seen, 7)"), "trying its losses raised"),
        (("class Net(go.SequenceModel)", "class Net(nn.Module)"), "no subclass"),
        (("nn.Linear(3, 3)", "nn.LazyLinear(3)"), "lazy modules"),
        (("torch.tanh(self.action(self.hidden(batch)))", "batch.states"), r"act\(\) gave"),
        (
            ("        before[:, 0] = 0\n", "        before = batch.actions\n"),
            "the action of that step",
        ),
        (
            ("self.lstm(hidden)[0]", "hidden.flip(1).cumsum(1).flip(1)"),
            r"predict\(\)\[:, 0\] depends on states after step 0.* actions? ",
        ),
        (
            ("self.lstm(hidden)[0]", "0.0 * hidden + batch.returns_to_go.amax(1, keepdim=True)"),
            r"predict\(\)\[:, 0\] depends on returns after step 0, unknown",
        ),
        ((", batch_first=True", ""), "those beside it in the batch"),
        (
            (
                "self.action = nn.Linear(settings.width, facts.action_dim)",
                "maps = [nn.Linear(settings.width, facts.action_dim)]\n"
                "        self.action = lambda hidden: maps[0](hidden)",
            ),
            "made anew with its state dict it acts otherwise",
        ),
        (
            (
                "    def predict",
                "    def get_extra_state(self):\n        return {}\n\n    def predict",
            ),
            "_extra_state, which is no tensor",
        ),
        (
            (
                "squared(torch.tanh(self.action(hidden)), batch.actions)",
                "nn.functional.mse_loss(hidden, batch.actions, reduction='none').mean(-1)",
            ),
            r"a target size .* at .*net.py:\d+ in losses",
        ),
        (
            ("self.state(hidden), following)", "self.state(hidden), following).mean()"),
            r"losses\(\)",
        ),
    ],
)
def test_what_a_model_does_wrong_is_told_before_training(
    own: Path, change: tuple[str, str], told: str
) -> None:
    (own / "net.py").write_text(NET.replace(*change))
    with one_error("MODEL", told):
        train("run", evaluate__episodes=0)


DRAWS = """
import random
import numpy as np
import torch
import gear_offline as go


class Draws(go.SequenceModel):
    def __init__(self, facts, settings):
        super().__init__(facts, settings)
        self.map = torch.nn.Linear(facts.state_dim, facts.action_dim)

    def predict(self, batch):
        return self.map(batch.states)

    def losses(self, batch):
        loss = super().losses(batch)["action"]
        drawn = torch.from_numpy(np.random.random(tuple(loss.shape))) + random.random()
        return {"action": loss * drawn.float(), "drawn": 0 * loss + drawn.mean().float()}


class Counts(Draws):
    seen = 0

    def predict(self, batch):
        return torch.nn.functional.dropout(self.map(batch.states), 0.3)

    def losses(self, batch):
        self.seen += 1
        return {"action": super().losses(batch)["action"] * self.seen}


class Unsaved(Draws):
    def __init__(self, facts, settings):
        super().__init__(facts, settings)
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def after_step(self):
        self.seen += 1


class Twice(Draws):
    def __init__(self, facts, settings):
        super().__init__(facts, settings)
        self.norm = torch.nn.BatchNorm1d(facts.state_dim)
        self.blocks = [self.norm]

    def predict(self, batch):
        return self.map(self.norm(batch.states.flatten(0, 1)).view_as(batch.states))
"""


def test_draws_of_numpy_and_python_are_a_run_s_own(own: Path, capsys: Captured) -> None:
    (own / "draws.py").write_text(DRAWS)
    changes = {**options(), "model.kind": "draws.py:Draws", "evaluate.episodes": 0}
    np.random.seed(0)
    whole = go.train("smoke", changes, out="whole")
    assert np.random.random() == np.random.RandomState(0).random_sample(), "the caller's go on"
    with interrupted_in(5), pytest.raises(TrainingInterrupted):
        go.train("smoke", changes, out="cut", quiet=True)
    assert learnt(go.train("cut", resume=True, quiet=True).path) == learnt(whole.path)
    drawn = [record["drawn"] for record in read_records(whole.path / "metrics.jsonl")]
    assert len(set(drawn)) == len(drawn) and "Draws has" not in capsys.readouterr().err


def test_what_a_run_can_live_with_is_a_line(own: Path, capsys: Captured) -> None:
    (own / "draws.py").write_text(DRAWS)
    changes = {"evaluate__episodes": 0, "train__steps": 1, "train__log_every": 1}
    run = train("counts", model__kind="draws.py:Counts", **changes)
    said = capsys.readouterr().err
    assert "Counts changes seen from step to step" in said and "draws random numbers" in said
    assert run.policy(device="cpu").model.sees_timesteps is False, "no timestep moves its actions"
    train("unsaved", model__kind="draws.py:Unsaved", **changes)
    assert "Unsaved changes seen from step to step" in capsys.readouterr().err
    with one_error("MODEL", "computed twice, its blocks give another norm.running_mean"):
        train("twice", model__kind="draws.py:Twice", train__recompute=True, **changes)
    assert not Path("twice").exists()


def test_sizes_of_other_batches_are_named_on_both_sides(own: Path) -> None:
    model = train("run", evaluate__episodes=0, train__steps=1).policy(device="cpu").model
    wide = make_dataset(own / "wide", LENGTHS, state_dim=4, action_dim=2)
    batch = next(go.GearLoader(wide, 2, context_length=CONTEXT, device="cpu"))
    with one_error(
        "MODEL", "batch has states of 4, actions of 2, the model takes states of 3, act"
    ):
        model.loss(batch)


@pytest.mark.parametrize(
    ("gives", "told"),
    [
        ("np.random.random(count)", "other weights each time"),
        ("['a'] * count", "drawing raised ValueError"),
        ("None", "10 weights are needed|weights"),
    ],
)
def test_weights_that_are_none_or_change_are_refused(own: Path, gives: str, told: str) -> None:
    (own / "odd.py").write_text(f"""
import numpy as np


def odd(facts):
    count = facts.episodes.episodes
    return {gives}
""")
    with one_error("SELECTION", told):
        changes = {**options(), "selection.strategy": "odd.py:odd", "evaluate.episodes": 0}
        changes.pop("selection.half_life")
        go.train("smoke", changes, out="run", quiet=True)


def test_a_model_whose_passes_leave_traces_has_other_bits_on_other_ranks(own: Path) -> None:
    plain = NET.replace("nn.BatchNorm1d(settings.width)", "nn.Identity()")
    counting = "self.seen = 1 + vars(self).get('seen', 0)\n        before[:, 0] = 0"
    for text in (NET, plain.replace("before[:, 0] = 0", counting)):
        (own / "net.py").write_text(text)
        with one_error("MODEL", "its losses change buffers .* or what is in Python"):
            train("run", train__deterministic="ranks", evaluate__episodes=0)
    (own / "net.py").write_text(plain)
    train("run", train__deterministic="ranks", evaluate__episodes=0)


def test_tied_weights_are_exported(own: Path) -> None:
    lines = "self.unused = nn.Linear(settings.width, facts.action_dim)"
    lines += "\n        self.unused.weight = self.action.weight"
    text = NET.replace("self.unused = nn.Linear(3, 3)", lines)
    (own / "net.py").write_text(text.replace("self.action(self.hid", "self.unused(self.hid"))
    run = train("run", evaluate__episodes=0)
    go.export_policy(run, "tied")
    states = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    actions = []
    for place in (run, "tied"):
        policy = go.load_policy(place, model="net.py:Net")
        policy.reset(range(4), [1.0] * 4)
        actions.append(policy.act(states))
    assert np.array_equal(actions[0], actions[1]) and actions[0].any()


RAISES = """
    def checked(self, batch, states):
        if len(batch.actions) > 2 and (batch.states > 1).any():
            raise KeyError("not while capturing")
        return states

    def hidden("""


def test_what_a_model_raises_later_is_told_with_its_line(own: Path, monkeypatch: Patch) -> None:
    """Of batches unlike the trial's: in a step, in play, in an export, in a capture."""
    plain = NET.replace("nn.Linear(3, 3)", "nn.Identity()")  # else all windows are tried
    (own / "net.py").write_text(plain)
    run = train("run", evaluate__episodes=0)
    text = plain.replace("    def hidden(", RAISES[1:]).replace(
        "[batch.states,", "[self.checked(batch, batch.states),"
    )
    (own / "net.py").write_text(text)
    line = r"raised KeyError: 'not while capturing', at .*net.py:\d+ in checked"
    with one_error("MODEL", f"step 1 of training {line}"):
        train("late", evaluate__episodes=0)
    (own / "net.py").write_text(text.replace("len(batch.actions) > 2 and ", ""))
    with one_error("MODEL", rf"act\(\) {line}"):
        go.evaluate(run.path, model="net.py:Net", episodes=1, quiet=True)
    pytest.importorskip("onnxscript")
    with one_error("MODEL", r"export of act\(\) raised .*, at .*net.py:\d+ in checked"):
        go.export_policy(run.path, "policy.onnx", model="net.py:Net")

    class Graph:
        """Ending a capture in which something failed fails as well, as torch's does."""

        def __init__(self, *_: object, **__: object) -> None: ...

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None:
            raise RuntimeError("operation failed due to a previous error during capture")

    def captures(step: GraphStep) -> None:
        with capturing(None, None):
            step.learner.working(step.learner.begin_step())

    (own / "net.py").write_text(text)
    monkeypatch.setattr(torch.cuda, "graph", Graph)
    monkeypatch.setattr(GraphStep, "_capture", captures)
    monkeypatch.setattr("gear_offline.runs.loop.make_step", lambda learners: GraphStep(*learners))
    with one_error("MODEL", f"capturing a step as a CUDA graph {line}.*use train.graph=off"):
        train("captured", evaluate__episodes=0)


def test_what_trains_without_graphs_plays_without(own: Path, monkeypatch: Patch) -> None:
    failing = Mock(side_effect=RuntimeError("not permitted when stream is capturing"))
    monkeypatch.setattr("gear_offline.models.policy._Graph", failing)
    for graph in ("auto", "off"):
        run = train(graph, evaluate__episodes=0, train__graph=graph, train__steps=3)
        policy = run.policy(device="cpu")
        policy.device = torch.device("cuda")
        if graph == "off":
            policy.capture(1)
            continue
        with one_error("MODEL", "capturing act.* not permitted .*train.graph=off, or play on the"):
            policy.capture(1)


def test_models_of_goals_are_shown_no_returns(own: Path) -> None:
    text = NET.replace("nn.Linear(seen,", "nn.Linear(seen + 1,")
    (own / "net.py").write_text(
        text.replace("[batch.states,", "[batch.states, batch.returns_to_go,")
    )
    with one_error("MODEL", r"trying act\(\) raised TypeError: .*NoneType, at .*net.py"):
        train("run", evaluate__episodes=0, loader__goals={"future": 1.0})


def test_a_strategy_that_fails_while_it_draws_is_told_with_its_line(own: Path) -> None:
    (own / "late.py").write_text("""
from gear_offline.batches.sampling import HostFunction

def late(facts):
    def sample(seed, first_step, steps, count):
        return {}["luck"]
    return HostFunction(facts.episodes, sample)
""")
    changes = {"selection.strategy": "late.py:late", "evaluate.episodes": 0}
    recipe = {**options(), **changes}
    del recipe["selection.half_life"]
    with one_error("SELECTION", "drawing raised KeyError: 'luck', at .*late.py:6 in sample"):
        go.train("smoke", recipe, out="run", quiet=True)


@pytest.mark.parametrize(
    ("episodes", "told"),
    [
        ("np.random.randint(2, size=(steps, count))", "other segments each time"),
        (
            "np.random.default_rng([seed, first_step]).integers(2, size=(steps, count))",
            "depend on how many steps are drawn at once",
        ),
        ("np.zeros(2, int)", "no starts inside"),
        ("np.full((steps, count), 4)", "no starts inside"),
    ],
)
def test_a_strategy_that_does_not_repeat_itself_is_refused(
    own: Path, episodes: str, told: str
) -> None:
    (own / "odd.py").write_text(f"""
import numpy as np
from gear_offline.batches.sampling import HostFunction, Segments

def odd(facts):
    def sample(seed, first_step, steps, count):
        episodes = {episodes}
        starts = np.zeros_like(episodes)
        return Segments(episodes=episodes, starts=starts, probability=starts + 0.1)
    return HostFunction(facts.episodes, sample)
""")
    dataset = go.open_dataset("dataset")
    given: Any = runpy.run_path("odd.py")["odd"](dataset)
    for selection in ("odd.py:odd", given):
        with one_error("SELECTION", told):
            go.GearLoader(dataset, 4, context_length=3, selection=selection, device="cpu")


def test_what_cannot_be_compiled_is_told_with_what_to_type(own: Path, monkeypatch: Patch) -> None:
    failing = Mock(side_effect=torch._dynamo.exc.InternalTorchDynamoError("no C compiler\nsee"))
    monkeypatch.setattr(Learner, "begin_step", failing)
    for kind in ("net.py:Net", "decision_transformer"):
        changes = {} if kind.endswith("Net") else {"selection.strategy": "uniform_steps"}
        recipe = {**options(), "model.kind": kind, "evaluate.episodes": 0, **changes}
        recipe.pop("selection.half_life")
        with one_error("MODEL", "compiling it raised .*no C compiler.*; use train.compile=off"):
            go.train("smoke", recipe, out=kind[:3], quiet=True)


def test_options_of_a_model_are_refused_with_the_nearest_name(own: Path) -> None:
    with one_error("RECIPE", "unknown option 'model.widht', did you mean 'model.width'"):
        train("run", model__widht=3)
    with one_error("RECIPE", "model.width: Input should be a whole number"):
        train("run", model__width="wide")
    with one_error("RECIPE", "model.hidden_sizes.*did you mean 'model.hidden_size'"):
        go.load_recipe("smoke", {"model.kind": "mlp", "model.hidden_sizes": 3})
    with one_error("MODEL", "no model 'mpl'.*did you mean 'mlp'"):
        train("run", model__kind="mpl")


def test_another_kind_starts_from_its_own_defaults(own: Path) -> None:
    base = go.load_recipe("smoke", {"model.hidden_size": 24, "model.heads": 2})
    (own / "base.yaml").write_text(base.to_yaml())
    (own / "mine.yaml").write_text("base: base.yaml\nmodel: {kind: mlp, layers: 1}\n")
    typed = base.replace({"model.layers": 1, "model.kind": "mlp"})
    for recipe in (go.load_recipe("mine.yaml"), typed):
        assert recipe.model == MLPSettings(layers=1)
    words = ["model.layers=1", "model.kind=decoupled"]
    assert go.load_recipe("base.yaml", words).model == DecoupledSettings(layers=1)
    with one_error("RECIPE", "unknown option 'model.heads' of mlp, `recipes"):
        go.load_recipe("base.yaml", {"model.kind": "mlp", "model.heads": 2})


def test_the_card_of_a_policy_says_how_its_class_comes_in(own: Path) -> None:
    folder = go.export_policy(train("run", evaluate__episodes=0, train__steps=3), "policy")
    card = (folder / "README.md").read_text()
    assert "decision-transformer" not in card and "- seed: 0" in card and "width 8" in card
    code = card.partition("```python\n")[2].partition("```")[0].replace("THIS FOLDER", "policy")
    names: dict[str, Any] = {}
    exec(code.replace("RETURN", "-200.0"), names)
    assert names["action"].shape == (1,) and np.isfinite(names["action"]).all()


def test_a_file_of_other_content_is_another_part(own: Path) -> None:
    run = train("run", model__width=4, evaluate__episodes=0, train__steps=3)
    for folder, text in {"moved": NET, "other": f"{NET}\n"}.items():
        (own / folder).mkdir()
        (own / folder / "net.py").write_text(text)
        (own / folder / "beside.py").write_text(BESIDE)
    moved = run.recipe.replace({"model.kind": "moved/net.py:Net"})
    assert moved.model.width == 4
    other = run.recipe.replace({"model.kind": "other/net.py:Net"})
    assert not hasattr(other.model, "width"), "it has options of its own"
    with one_error("RUN_MISMATCH", "model.kind was .*net.py:Net' when .* is .*other"):
        go.train("run", ["model.kind=other/net.py:Net"], resume=True, quiet=True)
    with one_error("RUN_MISMATCH", "model.kind was .*net.py:Net' when .* is 'decoupled'"):
        go.train("run", ["model.kind=decoupled"], resume=True, quiet=True)
    (own / "net.py").unlink()
    assert run.recipe.replace({"model.kind": "other/net.py:Net"}).model.width == 4, "it moved"


def test_the_model_of_the_page_goes_through_every_command(own: Path, capsys: Captured) -> None:
    page = (ROOT / "docs" / "how-to" / "own-model.md").read_text()
    (own / "convformer.py").write_text(blocks(page, "python")[0])
    words = [
        f"{key}={value}" for key, value in options().items() if key[:5] not in ("selec", "model")
    ]
    words += ["model.kind=convformer.py:ConvFormer", "model.layers=1", "model.width=8"]
    for line in (
        ["train", "smoke", *words, "--out", "run"],
        ["train", "run", "--resume", "train.steps=11"],
        ["evaluate", "run", "--episodes", "1"],
        ["sweep", "smoke", *words, "--seeds", "2", "--parallel", "1", "--out", "sweep"],
        ["export-policy", "run", "policy"],
        ["export-policy", "run", "policy.onnx"],
        ["blame", "run", "2..4"],
        ["plan", "smoke", *words],
    ):
        assert main(line) == 0, line
    assert "guessed" in " ".join(capsys.readouterr().out.split()), "of the plan, the last one"
    assert {"action", "state"} <= read_records(own / "run" / "metrics.jsonl")[0].keys()
    model, data = go.load_policy("run", device="cpu").model, go.open_dataset("dataset")
    for padding in ("left", "right"):  # no state is predicted behind an episode's last one
        rows: Any = {"batch_size": 64, "context_length": max(LENGTHS) + 2, "padding": padding}
        with go.GearLoader(data, device="cpu", **rows) as loader:
            batch = next(loader)
        last = batch.attention_mask.cumsum(1).argmax(1, keepdim=True)
        losses = model.losses(batch)["state"]
        assert losses.any() and not losses.gather(1, last).any(), padding


def test_parts_of_an_installed_package_have_names(own: Path, monkeypatch: Patch) -> None:
    """By entry points; buffers that are in no file of weights are there when they are loaded."""
    (own / "theirs.py").write_text(
        NET.replace("torch.tanh(self.action", "self.share * (self.action")
    )
    monkeypatch.syspath_prepend(own)
    groups = {"models": ("theirs", "theirs:Net"), "strategies": ("fades", "draw:fading")}
    entries = EntryPoints(EntryPoint(*e, f"gear_offline.{group}") for group, e in groups.items())
    monkeypatch.setattr(parts, "entry_points", lambda group: entries.select(group=group))
    run = train("run", model__kind="theirs", selection__strategy="fades")
    assert run.steps == STEPS and run.recipe.parts.keys() == {f"{own / 'env.py'}:Reach"}
    seen, acted = np.ones((1, 3), np.float32), []
    for place in (run.path, run.policy(device="cpu").save("policy")):
        policy = go.load_policy(place, device="cpu")
        policy.reset(7.0)
        acted.append(policy.act(seen))
    np.testing.assert_array_equal(acted[0], acted[1])
    (own / "theirs.py").write_text("raise ValueError('moved')")
    monkeypatch.delitem(sys.modules, "theirs")
    with one_error("MODEL", "loading theirs:Net raised ValueError: moved, at .*theirs.py:1"):
        train("other", model__kind="theirs")


def test_options_may_be_called_as_methods_of_pydantic(own: Path) -> None:
    (own / "draw.py").write_text(STRATEGY.replace("half_life", "copy").replace("):", ", json=1):"))
    sampler = go.make_sampler("draw.py:fading", go.open_dataset("dataset"), copy=2.0)
    assert sampler.options == {"copy": 2.0, "json": 1}


def test_a_perceptron_sees_bytes_of_frames_as_shares() -> None:
    columns = (
        InputColumn(name="camera", shape=(2, 2), frames="uint8"),
        InputColumn(name="at", shape=(3,)),
    )
    facts = ModelFacts(state_dim=7, action_dim=2, columns=columns)
    model = MLP(facts, MLPSettings(action_tanh=False)).eval()
    camera, at = torch.randint(0, 256, (2, 4, 2, 2), dtype=torch.uint8), torch.randn(2, 4, 3)
    batch = SimpleNamespace(states={"camera": camera, "at": at}, attention_mask=torch.ones(2, 4))
    expected = model.layers(torch.cat([camera.flatten(2) / 255.0, at], -1))
    torch.testing.assert_close(model.predict(batch), expected)


def test_facts_of_earlier_files_are_read() -> None:
    """They said frames of a single column by keys of its own, of vectors nothing."""
    camera = {"name": "camera", "shape": [2, 3], "frames": "uint8", "stack": 1, "encoder": "none"}
    single: dict[str, Any] = {"frame_shape": [2, 3], "frame_dtype": "float32", "frame_stack": 4}
    none: dict[str, Any] = {"frame_shape": [], "frame_dtype": "uint8", "frame_stack": 1}
    for keys, column in (
        ({**single, "observations": []}, ("", (2, 3), "float32", 4)),
        ({**none, "observations": []}, ("", (6,), None, 1)),
        ({**none, "frame_stack": 2, "observations": [camera]}, ("camera", (2, 3), "uint8", 2)),
    ):
        text = json.dumps({"state_dim": 6, "action_dim": 2, "tasks": [], **keys})
        (read,) = ModelFacts.model_validate_json(text).columns
        assert (read.name, read.shape, read.frames, read.stack) == column


def test_a_perceptron_may_begin_and_bend_as_those_of_jax_do() -> None:
    options: dict[str, Any] = {"activation": "gelu_new", "initialization": "glorot"}
    facts = ModelFacts(state_dim=30, action_dim=5)
    layers: list[Any] = [*MLP(facts, MLPSettings(**options, hidden_size=70, layers=1)).layers]
    for layer, share in ((layers[0], 1.0), (layers[-1], 0.1)):
        bound = share * (6 / (layer.in_features + layer.out_features)) ** 0.5
        assert 0.9 * bound < layer.weight.abs().max() <= bound and not layer.bias.any()
    x = np.linspace(-3, 3, 64)
    expected = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    np.testing.assert_allclose(layers[1](torch.from_numpy(x)), expected, rtol=1e-9)


def test_a_class_of_a_file_is_no_version_of_what_it_registers(own: Path, capsys: Captured) -> None:
    registers = "\ngym.register('GearTest/Reach-v3', Reach)\ngym.register('Reach-v4', Reach)\n"
    (own / "env.py").write_text(ENVIRONMENT + registers)
    run = go.train("smoke", options(), out="run")
    assert "names no version" not in capsys.readouterr().err
    assert go.evaluate(run, episodes=1, quiet=True).environment == f"{own / 'env.py'}:Reach"
    go.evaluate(run, episodes=1, environment="env.py:GearTest/Reach")
    assert "the newest one here is taken, GearTest/Reach-v3" in capsys.readouterr().err


def test_an_environment_of_this_process_is_played_as_it_is(own: Path) -> None:
    """A class or function of a script that runs, or of a function, is nowhere imported again."""
    policy = go.load_policy(train("run").path, device="cpu")
    reach: Any = runpy.run_path("env.py")["Reach"]

    class Mine(reach):  # type: ignore[misc]
        def __init__(self, **how: Any) -> None:
            super().__init__(**how)
            os.chdir("/")

    ways: list[Any] = ["env.py:Reach", Mine, lambda **how: reach(**how)]
    reports = [go.evaluate(policy, environment=way, episodes=2, seed=3, quiet=True) for way in ways]
    assert len({report.targets[0].returns for report in reports}) == 1 and Path.cwd() == own


def test_data_say_which_file_their_environment_stands_in(
    own: Path, monkeypatch: Patch, capsys: Captured
) -> None:
    go.collect("env.py:Reach", "reach.hdf5", steps=40, quiet=True)
    go.convert("reach.hdf5", "reach", quiet=True)
    name = f"{own / 'env.py'}:Reach"
    assert go.open_dataset("reach").environment_id == name
    another_process(monkeypatch, own / "elsewhere")
    words = {key: value for key, value in options().items() if key[:8] != "evaluate"}
    words |= {"data.path": "reach", "data.source": None, "data.collect": None}
    words |= {"evaluate.environment": None, "evaluate.episodes": 1, "train.steps": 3}
    run = go.train("smoke", words, out="unplayed")
    said = capsys.readouterr().err
    assert run.best is None and f"'{name}' would import" in said and f"environment={name}" in said
    (own / "moved").mkdir()
    (own / "env.py").rename(own / "moved" / "env.py")
    run = go.train("smoke", words | {"evaluate.environment": "moved/env.py:Reach"}, out="played")
    assert run.best is not None and "the data are of" not in capsys.readouterr().err


HELPED = """
import torch
from torch import nn
import gear_offline as go

class Net(go.SequenceModel):
    def __init__(self, facts, settings):
        {how}
        super().__init__(facts, settings)
        self.into = nn.Linear(facts.state_dim, WIDTH)
        self.out = nn.Linear(WIDTH, facts.action_dim)

    def predict(self, batch):
        return self.out(torch.relu(self.into(batch.states)))
"""


@pytest.mark.parametrize(
    "how",
    [
        "from sizes import WIDTH",
        "import sizes; WIDTH = sizes.WIDTH",
        "from .sizes import WIDTH",
        "from more.sizes import WIDTH",
        "import more.sizes as sizes; WIDTH = sizes.WIDTH",
        "from more import sizes; WIDTH = sizes.WIDTH",
    ],
)
def test_helpers_are_those_of_their_own_folder(own: Path, monkeypatch: Patch, how: str) -> None:
    """Imported late, from a module or from folders with and without __init__.py."""
    runs, settings = [], {"selection.strategy": "uniform_steps", "evaluate.episodes": 0}
    words = options(train__steps=2) | settings
    del words["selection.half_life"]
    for folder, width in (("a", 8), ("b", 24)):
        (own / folder / "more").mkdir(parents=True)
        for place in ("sizes.py", "more/sizes.py"):
            (own / folder / place).write_text(f"WIDTH = {width}\n")
        (own / folder / "net.py").write_text(HELPED.format(how=how))
        kind = f"{folder}/net.py:Net"
        runs.append(
            go.train("smoke", words | {"model.kind": kind}, out=f"run-{folder}", quiet=True)
        )
        found: Any = go.load_policy(runs[-1]).model
        assert found.into.out_features == width
    for place in ("b/sizes.py", "b/more/sizes.py"):
        (own / place).write_text("WIDTH = 32\n")
    with one_error("MODEL", "net.py has changed since the run began"):
        go.load_policy(runs[1])
    with one_error("RUN_DAMAGED", "the weights do not fit"):
        go.load_policy(runs[1], model="b/net.py:Net")
    assert go.load_policy(runs[0]).action_dim == 1, "nobody has touched this one"


def test_a_sweep_does_not_go_on_with_a_file_that_changed(own: Path) -> None:
    words = options(train__steps=2, evaluate__episodes=0)
    go.sweep("smoke", words, seeds=2, out="sweep", parallel=1, quiet=True)
    (own / "beside.py").write_text(f"{BESIDE}# mended\n")
    with one_error("RUN_MISMATCH", "net.py:Net has changed since this run began.*(out)"):
        go.sweep("smoke", words, seeds=3, out="sweep", parallel=1, quiet=True)
    (own / "beside.py").write_text(BESIDE)
    again = go.sweep("smoke", words, seeds=3, out="sweep", parallel=1, quiet=True)
    assert len(again.trials) == 3


CELL = """
UNITS = 4

def bent(x):
    return torch.relu(x)

class Net(go.SequenceModel):
    def __init__(self, facts, settings):
        super().__init__(facts, settings)
        self.into = torch.nn.Linear(facts.state_dim, UNITS)
        self.out = torch.nn.Linear(UNITS, facts.action_dim)

    def predict(self, batch):
        return self.out(bent(self.into(batch.states)) * 2.0)
"""


@pytest.mark.parametrize("change", ["relu/tanh", "2.0/3.0", "UNITS = 4/UNITS = 5", "bent(/abs("])
def test_a_class_of_a_cell_that_was_edited_is_told(
    own: Path, monkeypatch: Patch, capsys: Captured, change: str
) -> None:
    """What it is made of counts: its code, and the functions and constants of the notebook."""
    monkeypatch.setattr(sys.modules["__main__"], "__file__", None, raising=False)
    words = options(train__steps=2, evaluate__episodes=0)
    del words["model.kind"]

    def cell(text: str) -> Any:
        names: dict[str, Any] = {"go": go, "torch": torch, "__name__": "__main__"}
        exec(compile(text, "<cell>", "exec"), names)
        return names["Net"]

    run = go.train("smoke", words, model=cell(CELL), out="run", quiet=True)
    go.train("smoke", words, model=cell(CELL + "\nepochs = 3"), out="other", quiet=True)
    assert go.load_policy(run).action_dim == 1, "run again, it is the same"
    before, _, after = change.partition("/")
    edited = cell(CELL.replace(before, after))
    go.train("smoke", words, model=edited, out="edited", quiet=True)
    with one_error("MODEL", "__main__:Net has changed since the run began.*the class itself"):
        go.load_policy(run)
    if "UNITS" not in change:
        capsys.readouterr()
        assert go.load_policy(run, model=edited).action_dim == 1
        assert "has changed since these weights were trained" in capsys.readouterr().err


def test_a_class_of_a_cell_is_what_its_name_says_now(own: Path, monkeypatch: Patch) -> None:
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__file__", None, raising=False)
    words = options(train__steps=2, evaluate__episodes=0, train__checkpoint_every=1)
    del words["model.kind"]
    for name in ("Net", "bent", "UNITS", "go", "torch"):  # which cells define
        monkeypatch.setattr(main, name, None, raising=False)

    def cell(text: str) -> Any:
        exec(compile(text, "<cell>", "exec"), vars(main))
        return vars(main)["Net"]

    header, other = "import torch\nimport gear_offline as go\n", CELL.replace("2.0", "3.0")
    first = cell(header + CELL)
    run = go.train("smoke", words, model=first, out="run", quiet=True)
    cell(header + other)  # edited, and not named
    with one_error("MODEL", "__main__:Net has changed since the run began"):
        go.train(run.path, ["train.steps=3"], resume=True, quiet=True)
    go.train("smoke", words, model=vars(main)["Net"], out="other", quiet=True)
    cell(header + CELL)  # put back, and not named
    assert go.load_policy(run).action_dim == 1
    cell(header + other)
    go.train("smoke", words, model=first, out="kept", quiet=True)  # that the name is not of
    assert go.load_policy("kept").action_dim == 1
    with one_error("MODEL", "__main__:Net has changed since the run began"):
        go.load_policy("other")


def test_one_environment_by_its_file_and_by_its_class(own: Path, monkeypatch: Patch) -> None:
    monkeypatch.syspath_prepend(own)
    (own / "reaching.py").write_text(ENVIRONMENT)
    import reaching  # type: ignore[import-not-found]

    for name, way in {"file": "reaching.py:Reach", "class": reaching.Reach}.items():
        train(name, evaluate__environment=way, train__steps=3)
    compared = go.compare_runs(["file", "class"])
    assert len(compared.environments) == 1
    assert go.evaluate("file", environment=reaching.Reach, episodes=1, quiet=True).targets


def test_a_script_that_asks_for_its_own_part_while_it_is_imported_is_told(own: Path) -> None:
    train("run")
    script = f"{ENVIRONMENT}\nimport gear_offline as go\n"
    script += "go.evaluate('run', environment='script.py:Reach', out='result.json')\n"
    (own / "script.py").write_text(script)
    with one_error("ENVIRONMENT", "while it is imported.* behind if __name__"):
        go.evaluate("run", environment="script.py:Reach")
    assert not (own / "result.json").exists()
