"""Playing with memory: rewards in place of returns, windows over episodes, cached keys."""

import json
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import onnxruntime
import pytest
import scipy.stats
import torch

import gear_offline as go
from gear_offline.artifacts.records import TargetResult, TaskResult
from gear_offline.data.dataset.scores import RewardEdit
from gear_offline.models.decision_transformer import DecisionTransformer
from gear_offline.models.hugging_face import to_released
from tests.checkpoint_support import write_run
from tests.gpu_support import NEEDS_GPU
from tests.model_support import ACTIONS, STATES, inputs, make
from tests.sampling_support import p_value
from tests.support import Captured, one_error
from tests.test_policy import CONTEXT, COUNT, make_policy
from tests.training_support import (
    ACTION_DIM,
    ENVIRONMENT,
    STATE_DIM,
    register_environment,
    tiny_recipe,
)

EDIT = RewardEdit(scale=0.5, shift=1.0)
LIMIT = 50  # timesteps that the model knows


def shift(rewards: Any) -> Any:
    """Return the reward before each of a window's steps, 0 before the first."""
    rows = [0.0, *np.asarray(rewards, np.float64).reshape(-1)[:-1]]
    return np.array(rows, np.float32)[:, None]


class Naive:
    """One environment whose window is lists; at each step all of it passes a plain model."""

    def __init__(self, model: DecisionTransformer, span: int = CONTEXT, halves: bool = False):
        self.model, self.span, self.rows, self.halves = model, span, list[list[Any]](), halves
        self.plain = make(position=model.config.position).eval()
        self.plain.load_state_dict(model.state_dict())

    def act(self, state: Any, timestep: int, asked: float = 0.0) -> Any:
        if self.halves and len(self.rows) == self.span:
            self.rows = self.rows[self.span - self.span // 2 :]
        self.rows.append([state, np.zeros(ACTIONS), 0.0, asked, min(timestep, LIMIT - 1)])
        self.rows = self.rows[-self.span :]
        states, actions, rewards, returns, timesteps = (
            np.array(column, np.float32) for column in zip(*self.rows, strict=True)
        )
        is_asked = self.model.config.condition == "returns"
        window = {"states": states, "actions": actions, "timesteps": timesteps.astype(np.int64)}
        window["returns_to_go"] = returns[:, None] if is_asked else shift(rewards)
        with torch.no_grad():
            output = self.plain(**{n: torch.from_numpy(v)[None] for n, v in window.items()})
        return output.action_preds[0, -1].numpy()

    def observe(self, action: Any, reward: float) -> None:
        self.rows[-1][1:3] = action, reward


@pytest.mark.parametrize("padding", ["right", "left", "none"])
def test_the_reward_before_a_step_stands_for_its_return(padding: str) -> None:
    batch, order = inputs(), slice(None)
    if padding != "none":
        places = torch.arange(batch["timesteps"].shape[1])
        real = (places < 4) if padding == "right" else (places >= 3)
        batch = {name: values * real.view(1, -1, *[1] * (values.ndim - 2))
                 for name, values in batch.items()}  # fmt: skip
        order = slice(0, 4) if padding == "right" else slice(3, None)
    expected = dict(batch)
    rows = [shift(each[order]) for each in batch["rewards"].numpy()]
    expected["returns_to_go"] = torch.zeros_like(batch["rewards"])
    expected["returns_to_go"][:, order] = torch.from_numpy(np.array(rows))
    with torch.no_grad():
        found, plain = make(condition="rewards").eval(), make().eval()
        actions = [model(**each).action_preds[:, order]
                   for model, each in ((found, batch), (plain, expected))]  # fmt: skip
    torch.testing.assert_close(actions[0], actions[1], rtol=0, atol=0)
    with one_error("MODEL", "rewards and timesteps are all needed"):
        found(**{name: values for name, values in batch.items() if name != "rewards"})
    with one_error("MODEL", "reads no rewards"):
        to_released(found)


def test_a_policy_sees_what_its_actions_earned(tmp_path: Path) -> None:
    """As the data hold rewards, also of what was done in place of the model's action."""
    model, rng = make(condition="rewards").eval(), np.random.default_rng(0)
    raw: dict[str, Any] = {"state_mean": None, "state_std": None, "reward_edits": [EDIT]}
    folder = make_policy(model, **raw).save(tmp_path / "policy")
    policy, naive = go.load_policy(folder, device="cpu"), Naive(model)
    policy.reset()
    for step in range(3 * CONTEXT):
        seen, done, reward = rng.normal(size=STATES), rng.normal(size=ACTIONS), rng.normal()
        action = policy.act(seen[None])[0]
        np.testing.assert_allclose(action, naive.act(seen, step), atol=1e-5)
        policy.observe_reward([reward], actions=done[None])
        naive.observe(done, reward / 2 + 1)


class Derived(DecisionTransformer):
    """Keys and values are cached of the class itself alone."""


CASES: list[tuple[dict[str, Any], int]] = [
    ({"condition": "rewards", "position": "rotary"}, 8),
    ({"condition": "rewards"}, 5),
    ({"position": "rotary"}, 7),
    ({}, 1),
]


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_GPU])]
)
@pytest.mark.parametrize("is_derived", [False, True])
@pytest.mark.parametrize(("options", "span"), CASES)
def test_memory_goes_on_over_episodes_and_by_halves(
    options: dict[str, Any], span: int, is_derived: bool, device: str
) -> None:
    """Environments end, act and are forgotten at different times; cached or not, as a loop does."""
    model = make(**options, context_length=span).eval()
    if is_derived:
        model.__class__ = Derived
    how: dict[str, Any] = {"context_length": span, "span": "history", "memory": True}
    raw: dict[str, Any] = {"state_mean": None, "state_std": None, "returns_scale": 1.0}
    policy, rng = make_policy(model, device=device, **how, **raw), np.random.default_rng(0)
    naives = [Naive(model, span, halves=True) for _ in range(COUNT)]
    policy.capture(COUNT)
    policy.reset(np.arange(COUNT), 5.0)
    left, timesteps = np.full(COUNT, 5.0), np.zeros(COUNT, int)
    for turn in range(3 * span + 6):
        envs = np.flatnonzero(rng.random(COUNT) < 0.7) if turn else np.arange(COUNT)
        if not envs.size:
            continue
        seen = rng.normal(size=(len(envs), STATES))
        done, rewards = rng.normal(size=(len(envs), ACTIONS)), rng.normal(size=len(envs))
        found = policy.act(seen, envs)
        plays = zip(envs, seen, strict=True)
        expected = [naives[e].act(s, timesteps[e], left[e]) for e, s in plays]
        np.testing.assert_allclose(found, expected, atol=1e-5 if device == "cpu" else 2e-3)
        policy.observe_reward(rewards, envs, actions=done)
        for env, action, reward in zip(envs, done, rewards, strict=True):
            naives[env].observe(action, reward)
        left[envs], timesteps[envs] = left[envs] - rewards, timesteps[envs] + 1
        over = np.flatnonzero(rng.random(COUNT) < 0.2)
        gone = over[over == 1] if turn > 9 else over[:0]
        policy.forget(gone)
        for env in gone:
            naives[env].rows.clear()
        policy.reset(over, 3.0)
        left[over], timesteps[over] = 3.0, 0


class Recall(gymnasium.Env[Any, Any]):
    """The first reset, which alone has a seed, draws the task; how long episodes are goes on."""

    observation_space = gymnasium.spaces.Box(-9, 9, (STATES,), np.float64)
    action_space = gymnasium.spaces.Box(-9, 9, (ACTIONS,), np.float32)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        if seed is not None:
            self.task = self.np_random.normal(size=ACTIONS)
        self.left = int(self.np_random.integers(1, 5))
        return self.np_random.normal(size=STATES), {}

    def step(self, action: Any) -> Any:
        self.left -= 1
        seen = self.np_random.normal(size=STATES)
        return seen, float(self.task @ action), self.left == 0, False, {}


gymnasium.register("GearTest/Recall-v0", lambda **_: Recall())


@pytest.mark.parametrize(
    ("condition", "asked", "span"), [("returns", None, 6), ("rewards", 9, 9), ("rewards", 3, 3)]
)
def test_memories_are_evaluated_as_a_loop_plays_them(
    condition: str, asked: int | None, span: int, tmp_path: Path, capsys: Captured
) -> None:
    """Two environments play three memories for each target; whoever begins anew forgets."""
    count, several, out = 12, 3, tmp_path / "evaluation.json"
    model = make(condition=condition, position="rotary", context_length=6).eval()
    raw: dict[str, Any] = {"state_mean": None, "state_std": None, "returns_scale": 1.0}
    policy = make_policy(model, context_length=6, span="history", **raw)
    how: dict[str, Any] = {"environment": "GearTest/Recall-v0", "targets": [5.0, -3.0], "seed": 7}
    how |= {"episodes": several, "episodes_of_memory": count, "context_length": asked}
    report = go.evaluate(policy, out=out, quiet=True, **how)
    assert report.context_length == asked
    targets = [5.0, -3.0] if condition == "returns" else [5.0]
    environment, lengths = Recall(), []
    for target, result in zip(targets, report.targets, strict=True):
        expected = np.zeros((several, count))
        for memory in range(several):
            naive = Naive(model, span, halves=True)
            for episode in range(count):
                seen, _ = environment.reset(seed=7 + memory if episode == 0 else None)
                left, step, ended = target, 0, False
                while not ended:
                    action = naive.act(seen, step, left)
                    seen, reward, ended, _, _ = environment.step(action)
                    naive.observe(action, reward)
                    expected[memory, episode] += reward
                    left, step = left - reward, step + 1
                lengths.append(step)
        np.testing.assert_allclose(result.returns, expected.ravel(), atol=1e-4)
        assert result.episodes == several and np.isclose(
            result.std or 0, expected.mean(1).std(ddof=1)
        )
        ends = expected.mean(1).min(), expected.mean(1).max()
        assert (result.min, result.max) == pytest.approx(ends)
        means = [each.mean_return for each in result.by_episode]
        np.testing.assert_allclose(means, expected.mean(0), atol=1e-4)
    assert [n for result in report.targets for n in result.lengths] == lengths
    assert json.loads(out.read_text())["targets"][0]["by_episode"][0]["return"] == pytest.approx(
        report.targets[0].by_episode[0].mean_return
    )
    report.print()
    printed = capsys.readouterr().out
    assert "episode in its memory" in printed and "..." in printed
    assert ("windows of" in printed) == (asked is not None)


def test_the_interval_of_an_episode_is_that_of_scipy() -> None:
    values = np.random.default_rng(1).exponential(size=(60, 3))
    result = TaskResult(episodes_of_memory=3).with_targets(
        [TargetResult(target=0.0, returns=tuple(values.ravel()), lengths=(1,) * 180)]
    )
    for column, each in zip(values.T, result.targets[0].by_episode, strict=True):
        law = scipy.stats.bootstrap((column,), np.mean, method="percentile")
        ends = np.array(each.ci95, np.float64)
        np.testing.assert_allclose(ends, law.confidence_interval, atol=0.05)


def test_a_run_over_histories_plays_memories_and_reports_them(tmp_path: Path) -> None:
    register_environment()
    rng, data = np.random.default_rng(0), tmp_path / "data"
    shapes = {"observations": (6, STATE_DIM), "actions": (6, ACTION_DIM), "rewards": (6,)}
    read = [
        {name: rng.uniform(-1, 1, shape).astype(np.float32) for name, shape in shapes.items()}
        for _ in range(8)
    ]
    source = go.from_episodes(
        [episode | {"truncated": True} for episode in read],
        history=[0, 0, 0, 1, 1, 1, 1, 2],
        environment=ENVIRONMENT,
    )
    go.convert(source, data, quiet=True)
    changes = ["loader.span=history", "loader.context_length=15", "model.condition=rewards"]
    recipe = tiny_recipe(data, *changes, "evaluate.episodes_of_memory=3")
    run = go.train(recipe, out=tmp_path / "run", quiet=True)
    assert run.last is not None and run.last.condition == "nothing"
    assert [len(target.by_episode) for target in run.last.targets] == [3]
    page = (run.path / "report.md").read_text()
    assert "6 episodes of 2 memories" in page and "plots/episodes.png" in page
    assert (run.path / "plots" / "episodes.png").stat().st_size
    plain = go.evaluate(run.path, episodes_of_memory=1, quiet=True)
    assert plain.targets[0].by_episode == ()
    remembered = go.evaluate(run.path, episodes_of_memory=2, quiet=True)
    assert remembered.episodes_of_memory == 2
    for memory, result in (False, plain), (True, remembered):
        achieved = go.load_policy(run.path, memory=memory).facts.achieved
        assert [each.mean_return for each in achieved] == [result.targets[0].mean_return]
    assert "windows of" not in (run.path / "report.md").read_text()
    go.evaluate(run.path, context_length=40, quiet=True)
    assert ", windows of 40 steps, " in (run.path / "report.md").read_text()
    policy = run.policy(memory=True, context_length=40)
    saved = policy.save(tmp_path / "saved")
    for each in (policy, saved):  # a folder keeps its windows
        assert go.evaluate(each, quiet=True).context_length == 40
        assert go.evaluate(each, context_length=15, quiet=True).context_length is None
    with one_error("MODEL", "context_length: .*whole number, got 1.5"):
        go.evaluate(run.path, context_length=1.5, quiet=True)  # type: ignore[arg-type]
    with one_error("USAGE", "loader.span=history"):
        go.evaluate(write_run(tmp_path / "other"), episodes_of_memory=2, quiet=True)
    with one_error("RECIPE", "needs loader.span=history"):
        tiny_recipe(data, "evaluate.episodes_of_memory=3")


@pytest.mark.parametrize("memory", [False, True])
def test_discrete_actions_are_drawn_by_their_probabilities(memory: bool) -> None:
    model = make(discrete=True, condition="rewards").eval()
    head: Any = model.predict_action[0]
    head.weight.data *= 10.0
    policy = make_policy(model, memory=memory, span="history", state_mean=None, state_std=None)
    policy.reset(np.arange(3000), 0.0)
    plain = make(discrete=True).eval()
    plain.load_state_dict(model.state_dict())
    for step in range(2):
        actions = policy.act(np.ones((3000, STATES)), generator=np.random.default_rng(step))
        policy.observe_reward(np.zeros(3000), actions=np.zeros(3000))
        states, past = torch.ones(1, step + 1, STATES), torch.zeros(1, step + 1, 1)
        window = {"states": states, "returns_to_go": past, "actions": past[..., 0].long()}
        with torch.no_grad():
            output = plain(**window, timesteps=torch.arange(step + 1)[None])
        chances = output.action_preds[0, -1].softmax(-1).numpy().astype(np.float64)
        counts = np.bincount(actions, minlength=len(chances))
        assert p_value(counts, 3000 * chances / chances.sum()) > 1e-4


def test_an_evaluation_draws_actions_on_request(tmp_path: Path) -> None:
    raw: dict[str, Any] = {"state_mean": None, "state_std": None}
    policy = make_policy(make(state_dim=4, action_dim=2, discrete=True, max_timestep=500), **raw)
    how: dict[str, Any] = {"environment": "CartPole-v1", "targets": 9.0, "episodes": 4}
    reports = [
        go.evaluate(policy, **how, sample=drawn, out=tmp_path / str(number), quiet=True)
        for number, drawn in enumerate((True, True, False))
    ]
    returns = [report.targets[0].returns for report in reports]
    assert returns[0] == returns[1] != returns[2]
    assert [report.sample for report in reports] == [True, True, False]
    how |= {"environment": "GearTest/Recall-v0"}
    with one_error("MODEL", "draws no actions"):
        go.evaluate(make_policy(), **how, sample=True, quiet=True)


def test_a_memory_needs_histories_and_every_reward() -> None:
    with one_error("MODEL", "train with loader.span=history"):
        make_policy(memory=True)
    policy = make_policy(memory=True, span="history")
    policy.reset(0, 1.0)
    policy.act(np.zeros((1, STATES)))
    with one_error("MODEL", "lacks the last reward"):
        policy.reset(0, 1.0)
    policy.forget()
    policy.reset(0, 1.0)
    policy.act(np.zeros((1, STATES)))


@pytest.mark.long
def test_an_onnx_file_takes_rewards(tmp_path: Path) -> None:
    model, rng = make(condition="rewards").eval(), np.random.default_rng(0)
    policy = make_policy(model, state_mean=None, state_std=None)
    session = onnxruntime.InferenceSession(go.export_policy(policy, tmp_path / "policy.onnx"))
    window = {"observations": rng.normal(size=(1, 3, STATES)), "rewards": rng.normal(size=(1, 3)),
              "actions": rng.normal(size=(1, 3, ACTIONS))}  # fmt: skip
    window = {name: values.astype(np.float32) for name, values in window.items()}
    (found,) = session.run(["action"], window | {"timesteps": np.arange(3)[None]})
    naive = Naive(model)
    for step in range(3):
        expected = naive.act(window["observations"][0, step], step)
        naive.observe(window["actions"][0, step], window["rewards"][0, step])
    np.testing.assert_allclose(found[0], expected, atol=1e-5)


REFUSED = [
    ("model.kind=decoupled", "is for kind=decision_transformer"),
    ("loader.goals={future: 1.0}", "loader.goals exclude each other"),
    ("loader.condition=advantage", "model.condition=returns takes it"),
]


@pytest.mark.parametrize(("option", "reason"), REFUSED)
def test_options_that_rewards_exclude_are_named(option: str, reason: str) -> None:
    with one_error("RECIPE", reason):
        go.load_recipe("smoke", [option, "model.condition=rewards"])
