"""A policy acts as a plain loop would; its folder and its ONNX file act as the run does."""

import json
import math
import os
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DecisionTransformerModel

import gear_offline as go
from gear_offline import export_policy
from gear_offline.cli.main import main
from gear_offline.core.torch_state import torch_threads
from gear_offline.data.dataset.scores import RewardEdit
from gear_offline.errors import InputError, UnavailableError
from gear_offline.models.decision_transformer import DecisionTransformer
from gear_offline.models.hugging_face import to_released
from gear_offline.models.policy import Policy
from gear_offline.models.tensor_file import file_facts
from tests.checkpoint_support import write_run
from tests.model_support import ACTIONS, STATES, float64, make, meta
from tests.support import Captured, Patch, failing_code, one_error

STEPS, COUNT, FRAME, STACK = 60, 3, (36, 36), 2  # the model knows timesteps up to 49
FRAMES = {"state_dim": FRAME[0] * FRAME[1], "frame_shape": FRAME, "frame_stack": STACK}
MODELS: dict[str, dict[str, Any]] = {
    "normalised": {},
    "one step": {"discrete": True},
    "goals": {"goals": True},
    "frames": {"discrete": True, **FRAMES},
}
OFFSET = 1.75e9  # of observations in float64


def policy_of(name: str) -> Policy:
    raw: dict[str, Any] = {"state_mean": None, "state_std": None}
    raw = {} if name in ("normalised", "goals") else raw
    span = 1 if name == "one step" else CONTEXT
    if name == "goals":
        raw = {"state_mean": MEAN + OFFSET, "state_dtype": "float64"}
    if name == "frames":
        raw |= {"gamma": 0.9, "reward_edits": [RewardEdit(scale=0.5, shift=1.0)]}
    return make_policy(
        make(layers=1, **MODELS[name]), returns_scale=10 / 3, context_length=span, **raw
    )


def act(policy: Policy) -> np.ndarray[Any, Any]:
    """Return the actions of an episode of random observations, longer than the context."""
    generator, actions = np.random.default_rng(0), []
    policy.reset(5.0)
    for _ in range(8):
        seen: Any = generator.normal(size=(1, policy.state_dim))
        if policy.columns["observations"].frames:
            seen = generator.integers(0, 256, (1, *FRAME), np.uint8)
        actions.append(policy.act(seen)[0])
        policy.observe_reward([0.5])
    return np.array(actions)


@pytest.mark.parametrize("name", ["normalised", "one step"])
def test_episodes_that_are_there_are_acted_in_as_step_by_step(name: str) -> None:
    policy, rng, lengths = policy_of(name), np.random.default_rng(0), (3, STEPS, 1, 12)
    count, starts = sum(lengths), np.cumsum([0, *lengths[:-1]])
    seen = rng.normal(size=(count, STATES)).astype(np.float32)
    actions = rng.integers(0, ACTIONS, count) if policy.discrete else rng.normal(size=(count, 3))
    rewards, targets, expected = rng.normal(size=count), np.zeros(count), list[Any]()
    for start, length in zip(starts.tolist(), lengths, strict=True):
        policy.reset(5.0)
        for row in range(start, start + length):
            targets[row] = policy.targets[0]
            expected.append(policy.act(seen[row : row + 1])[0])
            policy.observe_reward(rewards[row : row + 1], actions=actions[row : row + 1])
    found = policy.act_in_episodes(seen, actions, rewards, targets, starts)
    np.testing.assert_allclose(found, np.array(expected), rtol=0, atol=1e-6)


@pytest.mark.parametrize("around", [float64, meta])
def test_a_caller_s_torch_changes_no_action(around: Any, tmp_path: Path) -> None:
    policy = policy_of("normalised")
    folder, before = policy.save(tmp_path / "policy"), act(policy)
    with around():
        np.testing.assert_array_equal(act(policy), before)
        loaded = go.load_policy(str(folder), device="cpu")
        np.testing.assert_array_equal(act(loaded), before)
        assert {weight.dtype for weight in loaded.model.parameters()} == {torch.float32}
    np.testing.assert_array_equal(act(loaded), before)


def test_a_process_that_was_forked_acts_and_does_not_wait_for_ever(tmp_path: Path) -> None:
    """Threads of OpenMP stay behind; so does the number of threads, which is refused there."""
    policy, threads = make_policy(make(layers=1)), torch.get_num_threads()
    policy.reset(range(COUNT), [5.0] * COUNT)
    torch.set_num_threads(2)
    try:
        policy.act(np.ones((COUNT, STATES)))
        policy.observe_reward(np.zeros(COUNT))
        torch.ones(1 << 18).add(1.0)  # by both
        child = os.fork()
        if not child:
            policy.act(np.ones((COUNT, STATES)))
            alone = torch.ones(1 << 18).add(1.0).sum().item() == 1 << 19
            with suppress(InputError), torch_threads(2):
                alone = False
            os._exit(7 if alone else 1)
        deadline = time.monotonic() + 60
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
            time.sleep(0.01)
        if ended == (0, 0):
            os.kill(child, 9)
        assert os.waitstatus_to_exitcode(ended[1]) == 7
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("kind", ["normalised", "one step", "frames"])
def test_a_folder_acts_as_the_policy_that_was_saved(kind: str, tmp_path: Path) -> None:
    policy, normalised = policy_of(kind), kind == "normalised"
    folder = policy.save_pretrained(tmp_path / "policy")
    loaded = go.load_policy(str(folder), device="cpu")
    np.testing.assert_array_equal(act(loaded), act(policy))
    with one_error("USAGE", "knows no return"):
        loaded.reset()
    released = DecisionTransformerModel.from_pretrained(folder)
    for name, weight in released.state_dict().items():
        torch.testing.assert_close(weight, policy.model.state_dict()[name], rtol=0, atol=0)
    written = json.loads((folder / "policy.json").read_text())
    assert written["actions"] == ("continuous" if normalised else "discrete")
    assert written["action_bounds"] == ([-1, 1] if normalised else None)


def test_a_run_becomes_a_folder_that_plays_the_same(tmp_path: Path, capsys: Captured) -> None:
    run, folder = write_run(tmp_path / "pend-s0"), tmp_path / "pend"
    expected = go.evaluate(run, device="cpu", quiet=True).to_json()
    other = go.evaluate(run, environment_options={"g": 1.0}, device="cpu", quiet=True)
    assert other.mean_return != expected["return"], "of an environment that is not the policy's"
    short = go.evaluate(run, context_length=1, device="cpu", quiet=True)
    assert short.mean_return != expected["return"], "of windows that are not the policy's"
    assert main(["export-policy", str(run), str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder}\n"
    shutil.rmtree(run)
    policy = go.load_policy(folder, device="cpu")
    facts = policy.facts
    assert (facts.name, facts.environment, facts.step) == ("pend-s0", "Pendulum-v1", 20)
    assert [one.mean_return for one in facts.achieved] == [t["return"] for t in expected["targets"]]
    assert go.load_policy(folder, device="cpu", context_length=1).facts.achieved == ()
    policy.reset()
    assert policy.targets.tolist() == [-200]

    files = ["README.md", "config.json", "model.safetensors", "policy.json"]
    played = go.evaluate(folder, episodes=2, seed=3, device="cpu", quiet=True).to_json()
    assert played["targets"] == expected["targets"]
    assert sorted(path.name for path in folder.iterdir()) == files, "nothing is written there"
    assert failing_code(lambda: go.evaluate(folder, checkpoint="best")) == "USAGE"

    _, metadata, text = (folder / "README.md").read_text().split("---\n", 2)
    assert "decision-transformer" in yaml.safe_load(metadata)["tags"] and "- seed: " in text
    (result,) = yaml.safe_load(metadata)["model-index"][0]["results"]
    assert result["metrics"][0] == {"type": "mean_reward", "value": expected["return"]}
    assert result["dataset"]["name"] == "Pendulum-v1" and "| -200 |" in text


def test_only_another_policy_folder_is_replaced(tmp_path: Path) -> None:
    policy = go.load_policy(write_run(tmp_path / "run"), device="cpu")
    folder = policy.save(tmp_path / "policy")
    assert failing_code(lambda: policy.save(folder)) == "OUTPUT_EXISTS"
    assert go.export_policy(policy, folder, overwrite=True) == folder
    (folder / "mine").write_text("")
    assert failing_code(lambda: policy.save(folder, overwrite=True)) == "OUTPUT_EXISTS"
    assert failing_code(lambda: go.load_policy(folder, "hop")) == "RECIPE"


def test_damage_is_one_error(tmp_path: Path) -> None:
    policy = go.load_policy(write_run(tmp_path / "run"), device="cpu")
    changes: list[tuple[str, str, str]] = [
        ("policy.json", '"returns_scale": 50.0', '"returns_scale": -1.0'),
        ("policy.json", '"format_version": 1', '"format_version": 2'),
        ("policy.json", '"targets"', '"__import__"'),
        ("policy.json", '"context_length": 4', '"context_length": "4"'),
        ("config.json", "{", "{ "),
        ("model.safetensors", "format", "FORMAT"),
        ("model.safetensors", "", ""),
    ]
    for number, (file, old, new) in enumerate(changes):
        path = policy.save(tmp_path / str(number)) / file
        content = path.read_bytes()
        assert old.encode() in content
        path.write_bytes(content.replace(old.encode(), new.encode(), 1))
        if not old:
            path.unlink()
        with one_error("RUN_DAMAGED", "the policy is damaged"):
            go.load_policy(path.parent)


HUGE = 2**40
FOREIGN: list[tuple[str, Any]] = [
    *((name, HUGE) for name in ("hidden_size", "n_positions", "max_ep_len")),
    *((name, HUGE) for name in ("vocab_size", "n_inner", "state_dim", "context_length")),
    *(("n_layer", value) for value in (-1, 0, 1e12, True, "2", None, [2], 10**6)),
    *(("n_head", value) for value in (-1, 3, 2.0)),
    *(("max_ep_len", value) for value in (math.nan, -5, math.inf)),
    *(("frame_shape", None), ("frame_shape", [36, 36]), ("frame_stack", "x")),
    *(("frame_encoder", "cnn"), ("add_cross_attention", True), ("resid_pdrop", 7.0)),
    *(("activation_function", "os.system"), ("activation_function", {"a": 1}), ("tasks", [1])),
]


@pytest.mark.parametrize(("key", "value"), FOREIGN)
def test_a_strangers_configuration_is_refused(key: str, value: Any, tmp_path: Path) -> None:
    with one_error("RUN_DAMAGED", key if key != "frame_encoder" else "the policy is damaged"):
        go.load_policy(with_config(tmp_path, **{key: value}), device="cpu")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"n_layer": 1, ' * 10_000, "\xff", ""])
def test_a_configuration_that_is_no_json_is_refused(text: str, tmp_path: Path) -> None:
    with one_error("RUN_DAMAGED"):
        go.load_policy(with_config(tmp_path, text), device="cpu")


def test_keys_of_transformers_change_nothing(tmp_path: Path) -> None:
    """Neither code nor attention is fetched that a folder names; a released file has such keys."""
    keys: dict[str, Any] = {
        "attn_implementation": "someone/kernel@main",
        "_attn_implementation": "someone/kernel",
    }
    keys |= {"auto_map": {"AutoModel": "someone/code--model.Model"}, "torch_dtype": "float16"}
    keys |= {"quantization_config": {"quant_method": "bitsandbytes"}, "id2label": {"0": "\x1b[2J"}}
    policy = go.load_policy(with_config(tmp_path, **keys), device="cpu")
    np.testing.assert_array_equal(act(policy), act(policy_of("normalised")))


def with_config(folder: Path, text: str | None = None, **keys: Any) -> Path:
    """A policy folder whose configuration somebody has written, with its digest."""
    path = policy_of("normalised").save(folder / "policy")
    if text is None:
        text = json.dumps(json.loads((path / "config.json").read_text()) | keys)
    (path / "config.json").write_text(text)
    facts = json.loads((path / "policy.json").read_text())
    facts["files"]["config.json"] = file_facts(path / "config.json").model_dump()
    (path / "policy.json").write_text(json.dumps(facts))
    return path


def test_what_others_wrote_steers_nothing(tmp_path: Path) -> None:
    """Neither a module that only a folder names is imported, nor is a terminal told what to do."""
    run = write_run(tmp_path / "run\x1b[2J", environment="this:Pendulum-v1")
    folder = go.load_policy(run, device="cpu").save(tmp_path / "policy")
    assert "\x1b" not in go.load_policy(folder, device="cpu").facts.name
    with one_error("ENVIRONMENT"):
        go.evaluate(folder, quiet=True)


LONG = pytest.mark.long


@pytest.mark.parametrize(
    "name", ["one step", *(pytest.param(name, marks=LONG) for name in ("goals", "frames"))]
)
def test_actions_equal_those_of_the_policy(name: str, tmp_path: Path) -> None:
    policy, generator = policy_of(name), np.random.default_rng(0)
    file = export_policy(policy, tmp_path / "policy.onnx")
    session = onnxruntime.InferenceSession(file)
    facts = session.get_modelmeta().custom_metadata_map
    length = int(facts["context_length"])
    assert length == policy.context_length and float(facts["gamma"]) == policy.window.gamma
    asked: Any = np.linspace(5.0, 50.0, COUNT)
    if name == "goals":
        asked = generator.normal(size=(COUNT, STATES)) + OFFSET
    policy.reset(np.arange(COUNT), asked)
    inputs = [each.name for each in session.get_inputs()]
    columns: dict[str, list[Any]] = {name: [] for name in inputs}
    stack = np.zeros((COUNT, STACK, *FRAME), np.uint8)
    for step in range(STEPS):
        seen: Any = generator.normal(size=(COUNT, STATES)).astype(np.float32)
        if name == "goals":
            seen = seen.astype(np.float64) + OFFSET
        if name == "frames":
            frames = generator.integers(0, 256, (COUNT, *FRAME), np.uint8)
            stack = np.concatenate([stack[:, 1:], frames[:, None]], axis=1)
            expected, seen = policy.act(frames), stack
        else:
            expected = policy.act(seen)
        columns["observations"].append(seen)
        columns["actions"].append(generator.integers(0, 2, expected.shape).astype(expected.dtype))
        columns["goals" if name == "goals" else "returns_to_go"].append(
            asked if name == "goals" else asked.astype(np.float32)
        )
        columns["timesteps"].append(np.full(COUNT, step))
        window = {key: np.stack(rows[-length:], axis=1) for key, rows in columns.items()}
        (action,) = session.run(["action"], window)
        assert action.dtype == expected.dtype
        np.testing.assert_allclose(action, expected, atol=1e-5, rtol=0)
        columns["actions"][-1] = expected
        rewards = generator.normal(size=COUNT)
        policy.observe_reward(rewards)
        rewards = rewards / 2 + 1 if name == "frames" else rewards
        asked = asked if name == "goals" else (asked - rewards) / policy.window.gamma
    assert expected.shape == ((COUNT,) if policy.discrete else (COUNT, ACTIONS))


def test_what_cannot_be_exported(tmp_path: Path, monkeypatch: Patch) -> None:
    file = tmp_path / "policy.onnx"
    file.write_text("mine")
    with pytest.raises(InputError, match="OUTPUT_EXISTS"):
        export_policy(policy_of("normalised"), file)
    assert main(["export-policy", str(tmp_path / "nothing"), str(tmp_path / "new.onnx")]) == 2
    assert file.read_text() == "mine"
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(UnavailableError, match=r"gear-offline\[onnx\]"):
        export_policy(policy_of("normalised"), tmp_path / "other.onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["policy.onnx"]


# the batched policy against a plain loop over single environments ------------------------------


MEAN = np.linspace(-1.0, 1.0, STATES)
STD = np.linspace(0.5, 2.0, STATES)
CONTEXT = 4


def make_policy(model: DecisionTransformer | None = None, **changes: Any) -> Policy:
    options: dict[str, Any] = {"state_mean": MEAN, "state_std": STD, "context_length": CONTEXT}
    return Policy(model or make(), **{**options, "returns_scale": 10.0, **changes})


class PlainActor:
    """One environment, the released class, history in lists, no padding: the paper's loop."""

    def __init__(self, model: DecisionTransformer, target: Any, *, scale: float = 10.0) -> None:
        self.model, self.scale, self.goals = to_released(model), scale, model.goals
        self.asked = [(target - MEAN) / (STD + 1e-6) if self.goals else [target / scale]]
        self.limit = int(model.config.max_ep_len)
        self.states: list[Any] = []
        self.actions: list[Any] = []

    def act(self, observation: Any) -> Any:
        self.states.append((np.asarray(observation) - MEAN) / (STD + 1e-6))
        first = max(0, len(self.states) - CONTEXT)
        steps = range(first, len(self.states))

        def window(rows: list[Any]) -> torch.Tensor:
            return torch.tensor(np.asarray(rows[first:]), dtype=torch.float32)[None]

        with torch.no_grad():
            output = self.model(
                states=window(self.states),
                actions=window([*self.actions, np.zeros(ACTIONS)]),
                returns_to_go=window(self.asked),
                timesteps=torch.tensor([[min(step, self.limit - 1) for step in steps]]),
            )
        self.actions.append(output.action_preds[0, -1].numpy())
        return self.actions[-1]

    def observe_reward(self, reward: float) -> None:
        left = self.asked[-1]
        self.asked.append(left if self.goals else [left[0] - reward / self.scale])


@given(
    seed=st.integers(0, 100),
    resets=st.lists(st.integers(0, 8), max_size=3),
    goals=st.booleans(),
    acting=st.sampled_from([[0, 1, 2], [2, 0], [1]]),
)
@settings(max_examples=12, deadline=None)
def test_lock_step_equals_single_environments(
    seed: int, resets: list[int], goals: bool, acting: list[int]
) -> None:
    """Environments with their own targets and resets at any step, all or some, act as if alone."""
    rng = np.random.default_rng(seed)
    model = make(goals=goals)
    targets: Any = rng.normal(size=(3, STATES)) if goals else np.array([30.0, 10.0, -5.0])
    policy = make_policy(model)
    policy.reset(np.arange(3), targets)
    asked = policy.targets.copy()
    alone = [PlainActor(model, target) for target in targets]
    for step in range(9):
        if step in resets:
            target, place = targets[0] + 7.0, acting[step % len(acting)]
            policy.reset([place], target)
            alone[place] = PlainActor(model, target)
        shape = (len(acting), STATES)
        observations, rewards = rng.normal(size=shape), rng.normal(size=len(acting))
        found = policy.act(observations, indices=acting)
        actors = [alone[place] for place in acting]
        expected = [actor.act(o) for actor, o in zip(actors, observations, strict=True)]
        np.testing.assert_allclose(found, np.asarray(expected), rtol=0, atol=1e-5)
        policy.observe_reward(rewards, indices=acting)
        for actor, reward in zip(actors, rewards, strict=True):
            actor.observe_reward(float(reward))
    others = [place for place in range(3) if place not in acting]
    np.testing.assert_array_equal(policy.targets[others], asked[others])


def test_impossible_settings_are_refused() -> None:
    settings: list[tuple[dict[str, Any], str]] = [
        ({"returns_scale": 0.0}, "returns_scale: .* greater than 0"),
        ({"returns_scale": float("nan")}, "returns_scale: .* finite"),
        ({"context_length": 0}, "context_length: .* equal to 1"),
        ({"gamma": 1.5}, "gamma: .* equal to 1"),
        ({"state_mean": None}, "belong together"),
        ({"state_std": np.ones(STATES + 1)}, "belong together"),
        ({"state_std": np.ones(STATES + 1), "state_mean": np.ones(STATES + 1)}, "has 6 elements"),
        ({"state_std": -np.ones(STATES)}, "state_std is negative"),
        ({"state_mean": np.full(STATES, np.nan)}, "state_mean"),
    ]
    for changes, message in settings:
        with one_error("MODEL", message):
            make_policy(**changes)


def test_a_mask_stands_for_the_numbers_of_what_is_true() -> None:
    policy, same = make_policy(), make_policy()
    for each, chosen in ((policy, np.array([False, True, True])), (same, [1, 2])):
        each.reset(range(3), [1.0, 2.0, 3.0])
        each.reset(chosen, 9.0)
        seen = np.arange(2.0 * STATES).reshape(2, STATES)
        each.act(seen, chosen)
        each.observe_reward([0.5, 1.0], chosen)
    np.testing.assert_array_equal(policy.targets, same.targets)
    seen = np.ones((3, STATES))
    np.testing.assert_array_equal(policy.act(seen, np.full(3, True)), same.act(seen))
    for wrong in ([1, 1], [0.0, 1.7], ["0", "1"]):
        with one_error("MODEL", "different numbers"):
            policy.observe_reward([0.0, 0.0], wrong)


def test_wrong_use_is_refused() -> None:
    policy = make_policy()
    with pytest.raises(InputError, match="reset an environment"):
        policy.act(np.zeros((1, STATES)))
    with pytest.raises(InputError, match="different numbers"):
        policy.reset([-1], 0.0)
    policy.reset([0], 1.0)
    with pytest.raises(InputError, match="without an act"):
        policy.observe_reward([1.0])
    for shape in ((1, STATES + 1), (2, STATES), (STATES, STATES)):
        with one_error("MODEL", "1 environment; give each that acts 5 elements"):
            policy.act(np.zeros(shape))
    policy.act(np.zeros((1, STATES)))
    with one_error("MODEL", "2 rewards of 1 environment"):
        policy.observe_reward([1.0, 2.0])
    with pytest.raises(InputError, match="twice"):
        policy.act(np.zeros((1, STATES)))
    with pytest.raises(InputError, match="among 1"):
        policy.observe_reward([1.0], indices=[1])
    policy.reset([], [])
    assert policy.environments == 1


def test_a_policy_of_one_environment_takes_a_number() -> None:
    policy = make_policy()
    for number in (3600, 200.5):
        policy.reset(number)
        assert policy.targets.tolist() == [number]
    with one_error("USAGE", r"policy\.reset\(0\.0\)"):  # the number of an environment, or a return
        policy.reset(0)
    policy.reset(0.0)
    for index in (0, None):
        assert policy.targets.tolist() == [0.0]
        policy.reset(index, 0)
    with one_error("MODEL", "one for each environment"):
        policy.reset([0, 1], [1.0, 2.0, 3.0])
    policy.reset([0, 1], 5)
    with pytest.raises(InputError, match=r"policy\.reset\(numbers of environments, targets\)"):
        policy.reset(3600)


def test_a_model_in_training_acts_in_evaluation_mode_and_goes_on_training(
    tmp_path: Path,
) -> None:
    model, acted = make(dropout=0.5).train(), []
    for policy in (make_policy(model), make_policy(model)):
        policy.reset([0], 3.0)
        acted.append(policy.act(np.ones((1, STATES))))
    np.testing.assert_array_equal(acted[0], acted[1])
    frozen = next(iter(model.children())).eval()
    modes = {name: module.training for name, module in model.named_modules()}
    assert len(set(modes.values())) == 2 and frozen is not model
    export_policy(policy, tmp_path / "p.onnx")
    with pytest.raises(InputError):  # of another environment
        go.evaluate(policy, environment="Blackjack-v1", episodes=1, targets=1.0, quiet=True)
    live = make(dropout=0.5, state_dim=3, action_dim=1).train()
    played = Policy(live, state_mean=None, state_std=None, returns_scale=1.0, context_length=4)
    how: dict[str, Any] = {"environment_options": {"max_episode_steps": 3}, "quiet": True}
    go.evaluate(played, environment="Pendulum-v1", episodes=1, targets=1.0, **how)
    assert all(module.training for module in live.modules())
    assert modes == {name: module.training for name, module in model.named_modules()}
    assert not go.load_policy(policy.save(tmp_path / "p")).model.training


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300])
def test_numbers_that_are_not_finite_are_refused(value: float) -> None:
    """What is asked next would be NaN: discrete actions would be drawn from it unseen."""
    policy = make_policy()
    policy.reset([0, 1], 5.0)
    seen = np.zeros((2, MEAN.size))
    seen[1, 2] = value
    with one_error("MODEL", "observation 1 is NaN"):
        policy.act(seen)
    assert np.isfinite(policy.act(np.zeros((2, MEAN.size)))).all(), "nothing of it is remembered"
    if not np.isfinite(value):
        with one_error("MODEL", "reward 1 is"):
            policy.observe_reward([1.0, value])
    assert policy.targets.tolist() == [5.0, 5.0], "nothing of it is remembered"
