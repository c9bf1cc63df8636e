"""Models, strategies and environments of somebody else's files, through every door."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gear_offline as go
from gear_offline.core import parts
from gear_offline.runs.loop import TrainingInterrupted
from gear_offline.training.json_lines import read_records
from tests.own_parts import BESIDE, ENVIRONMENT, NET, STRATEGY
from tests.support import Patch, make_dataset, one_error
from tests.test_resume import interrupted_in
from tests.training_support import learnt

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
    for name in ("_admitted", "_refused", "_words", "_live", "_modules"):
        monkeypatch.setattr(parts, name, type(getattr(parts, name))())
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
        with one_error("MODEL", "that only a run.*--model .*net.py:Net"):
            go.load_policy(place, device="cpu")
    with one_error("MODEL", "that only a run"):
        go.train("run", {"train.steps": STEPS + 1}, resume=True, quiet=True)
    assert go.load_policy(folder, device="cpu", model="net.py:Net").action_dim == 1
    assert go.load_policy(run.path, device="cpu").action_dim == 1, "a word is given once"


def test_a_changed_file_is_told_with_what_to_type(own: Path, monkeypatch: Patch) -> None:
    run = train("run", evaluate__episodes=0)
    another_process(monkeypatch)
    (own / "net.py").write_text(NET + "\n# mended\n")
    with one_error("MODEL", "net.py has changed since.*model.kind=.*net.py:Net") as caught:
        go.train("run", {"train.steps": 11}, resume=True, quiet=True)
    kind = str(caught.value).partition("model.kind=")[2].partition(" ")[0]
    again = go.train("run", {"train.steps": 11, "model.kind": kind}, resume=True, quiet=True)
    assert again.steps == 11 and go.load_policy(run.path, device="cpu").facts.step == 11
