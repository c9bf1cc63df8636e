"""The fixed list of episodes: each is played once, as a plain loop would, in any processes."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from gear_offline.errors import GearError
from gear_offline.evaluation import rollout
from gear_offline.evaluation.environments import probe
from gear_offline.evaluation.rollout import ActingPolicy, Environments, Episodes
from gear_offline.kernels.cuda_module import capturing
from gear_offline.models.decision_transformer import build_model
from gear_offline.models.encoders import InputColumn
from gear_offline.models.policy import Policy
from gear_offline.tables.fields import ObservedColumn
from tests.evaluation_support import Constant, Remembering, play_episodes
from tests.gpu_support import ON_GPU
from tests.model_support import make
from tests.support import Patch, one_error

FRAMES: dict[str, Any] = {"discrete": True, "action_tanh": False, "state_dim": 36 * 36}
FRAMES |= {"frame_shape": (36, 36), "frame_stack": 2}
COLUMNS: dict[str, Any] = {"frame_stack": 2, "encoder": "patch"}
COLUMNS["observations"] = [
    InputColumn(name="camera", shape=(3, 24, 18), frames="uint8"),
    InputColumn(name="depth", shape=(18, 24, 1), frames="float32"),
    InputColumn(name="state", shape=(4,)),
]


def play(
    policy: ActingPolicy, environment_id: str, seeds: Sequence[int],
    targets: Sequence[float] | None = None, *, environments: int = 1, processes: int = 1,
    **options: Any,
) -> Episodes:  # fmt: skip
    asked = [0.0] * len(seeds) if targets is None else targets
    with Environments(environment_id, environments, processes=processes) as made:
        return play_episodes(policy, made, seeds=seeds, targets=asked, **options)


def one_by_one(
    policy: Remembering, environment_id: str, seeds: Sequence[int], targets: Sequence[float]
) -> tuple[list[float], list[int]]:
    """The oracle: a loop over episodes with one environment, as in Gymnasium's own manual."""
    environment = gymnasium.make(environment_id)
    returns, lengths = [], []
    for seed, target in zip(seeds, targets, strict=True):
        observation, _ = environment.reset(seed=seed)
        total, step, over = 0.0, 0, False
        while not over:
            action: Any = policy.one(observation, target - total, step)
            space = environment.action_space
            if isinstance(space, gymnasium.spaces.Box):
                action = np.clip(action, space.low, space.high).astype(np.float32)
            observation, reward, ended, cut, _ = environment.step(action)
            total, step, over = total + float(reward), step + 1, ended or cut
        returns.append(total)
        lengths.append(step)
    environment.close()
    return returns, lengths


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize(
    ("environments", "processes"),
    [(1, 1), (3, 1), (20, 1), (5, 2), (5, 3)],
)
@pytest.mark.parametrize(
    ("environment_id", "discrete"),
    [("Pendulum-v1", False), ("CartPole-v1", True), ("InvertedPendulum-v5", False)],
)
def test_batch_of_environments_gives_the_episodes_of_a_plain_loop(
    environment_id: str, discrete: bool, environments: int, processes: int
) -> None:  # fmt: skip
    facts = probe(environment_id)
    assert facts.discrete is discrete
    weights = np.random.default_rng(3).normal(size=(facts.state_size + 2, facts.action_size))
    seeds, targets = [5, 6, 7, 5, 6, 7], [10.0, 10.0, 10.0, -400.0, -400.0, -400.0]
    expected = one_by_one(Remembering(weights, discrete=discrete), environment_id, seeds, targets)
    assert len(set(expected[0])) >= 3, "the episodes differ, so mixing them up would show"
    policy, how = Remembering(weights, discrete=discrete), {"processes": processes}
    played = play(policy, environment_id, seeds, targets, environments=environments, **how)
    assert played.returns.tolist() == expected[0]
    assert played.lengths.tolist() == expected[1]


@pytest.mark.parametrize("processes", [1, 3])
def test_each_listed_episode_is_played_once_however_long_it_is(processes: int) -> None:
    seeds = [3, 6, 0, 13, 2, 6, 20, 1, 0, 5]
    ended: list[int] = []
    far = Constant(np.full(3, 9.0))  # outside: the environment checks that it was clipped
    options: dict[str, Any] = {"environments": 4, "processes": processes}
    played = play(far, "GearTest/Counted-v0", seeds, on_episode=ended.append, **options)
    lengths = [seed % 7 + 1 for seed in seeds]
    assert played.lengths.tolist() == lengths
    assert played.returns.tolist() == [n * (n + 1) / 2 for n in lengths]
    assert played.terminated.all() and sum(ended) == len(seeds)


def test_environments_that_only_this_process_knows_are_played_here() -> None:
    gymnasium.register("GearTest/Local-v0", lambda **_: gymnasium.make("GearTest/Counted-v0"))
    try:
        with Environments("GearTest/Local-v0", 4, processes=2) as made:
            assert not made._workers
            played = play_episodes(Constant(np.zeros(3)), made, seeds=[3], targets=[0.0])
        assert played.lengths.tolist() == [4]
    finally:
        gymnasium.registry.pop("GearTest/Local-v0")


def test_actions_are_given_in_the_environments_own_shape() -> None:
    flat = play(Constant(np.array([0.5, 0.5, 2.0, 0.5])), "GearTest/Square-v0", [1])
    assert flat.returns.tolist() == [2.5], "2.0 was clipped to 1.0"


def test_episodes_without_a_limit_are_cut_and_not_called_terminated(monkeypatch: Patch) -> None:
    monkeypatch.setattr(rollout, "FALLBACK_MAX_STEPS", 7)
    played = play(Constant(np.zeros(3)), "GearTest/Endless-v0", [0, 1], environments=2)
    assert played.lengths.tolist() == [7, 7]
    assert not played.terminated.any()


def test_whose_fault_it_is_that_something_is_not_a_number() -> None:
    with one_error("MODEL"):
        play(Constant(np.array([0.0, np.nan, 0.0])), "GearTest/Counted-v0", [0])
    for name, what in (("Broken", "a reward"), ("Blind", "an observation")):
        with one_error("ENVIRONMENT", f"the environment gave {what} .* NaN") as caught:
            play(Remembering(np.ones((4, 3))), f"GearTest/{name}-v0", [2])
        assert caught.value.where == f"GearTest/{name}-v0"


def test_what_goes_wrong_in_a_worker_is_raised_here() -> None:
    policy = Constant(np.zeros(3))
    with pytest.raises(GearError, match="raised AssertionError: every episode"):
        play(policy, "GearTest/Counted-v0", [-1, -1], environments=2, processes=2)


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize(
    "kind", [{}, {"discrete": True, "action_tanh": False}, {"goals": True}, FRAMES, COLUMNS]
)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_a_policy_on_a_gpu_acts_as_on_the_cpu(
    kind: dict[str, Any], graph: bool, device: str
) -> None:
    """Also where some act and others begin anew; on the CPU it is compared with a plain loop."""
    how: dict[str, Any] = {"state_mean": None, "state_std": None, "context_length": 4}
    how["observations"] = [ObservedColumn(name=c.name) for c in kind.get("observations", ())]
    policies = [Policy(make(**kind), **how, returns_scale=1.0, device=d) for d in ("cpu", device)]
    if graph:
        policies[1].capture(5)
    generator = np.random.default_rng(0)
    for step in range(9):
        acting = np.arange(5) if step < 4 else np.array([3, 0, 4])
        begun = acting if step == 0 else acting[step % 3 : step % 3 + 1]
        asked: Any = generator.normal(size=len(begun))
        if "goals" in kind:
            asked = generator.normal(size=(len(begun), policies[0].state_dim))
        seen: Any = {}
        for name, column in policies[0].columns.items():
            shape = (len(acting), *column.shape)
            seen[name] = generator.normal(size=shape).astype(np.float32)
            if column.frames == "uint8":
                seen[name] = generator.integers(0, 256, shape, np.uint8)
        seen = seen if len(seen) > 1 else seen["observations"]
        actions = []
        for policy in policies:
            policy.reset(begun, asked)
            actions.append(policy.act(seen, acting))
            done = actions[0] if policy.discrete else actions[0] / 2
            policy.observe_reward(np.ones(len(acting)), acting, actions=done)
        np.testing.assert_allclose(actions[1], actions[0], rtol=0, atol=3e-3 if graph else 1e-5)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])
def test_a_policy_acts_while_another_thread_captures(device: str) -> None:
    """Torch has 32 streams for all: a capture of 40 branches joins the policy's."""
    how: dict[str, Any] = {"state_mean": None, "state_std": None, "context_length": 4}
    policy = Policy(make(), **how, returns_scale=1.0, device=device)
    policy.capture(3)
    seen = np.random.default_rng(0).normal(size=(20, 3, policy.state_dim)).astype(np.float32)

    def episode() -> list[Any]:
        policy.reset(np.arange(3), np.ones(3))
        actions = []
        for rows in seen:
            actions.append(policy.act(rows))
            policy.observe_reward(np.ones(3))
        return actions

    alone, stop = episode(), threading.Event()
    values, streams = torch.zeros(8, device=device), [torch.cuda.Stream() for _ in range(40)]  # type: ignore[no-untyped-call]

    def capture() -> int:
        captures = 0
        while not stop.is_set() or not captures:
            graph: Any = torch.cuda.CUDAGraph()
            with capturing(graph, torch.cuda.Stream()):  # type: ignore[no-untyped-call]
                main = torch.cuda.current_stream()
                for stream in streams:
                    stream.wait_stream(main)
                    with torch.cuda.stream(stream):
                        values.add_(1)
                    time.sleep(1e-4)
                for stream in streams:
                    main.wait_stream(stream)
            captures += 1
        return captures

    with ThreadPoolExecutor(1) as pool:
        capturing_thread = pool.submit(capture)
        try:
            beside = [episode() for _ in range(10)]
        finally:
            stop.set()
        assert capturing_thread.result() > 0
    for played in beside:
        np.testing.assert_array_equal(played, alone)


def test_a_policy_remembers_what_was_done() -> None:
    """Data have actions within the bounds; a model without a tanh may choose others."""
    model: Any = build_model(state_dim=3, action_dim=1, hidden_size=8, layers=1, action_tanh=False)
    torch.nn.init.constant_(model.predict_action[0].bias, 50.0)  # Pendulum takes -2 .. 2
    policy = Policy(model, state_mean=None, state_std=None, returns_scale=1.0, context_length=4)
    act, seen = model.predict_last_action, list[torch.Tensor]()

    def spy(states: torch.Tensor, actions: torch.Tensor, *rest: Any) -> Any:
        seen.append(actions[:, :-1].clone())
        return act(states, actions, *rest)

    model.predict_last_action = spy
    play(policy, "Pendulum-v1", [0, 1], environments=2)
    assert len(seen) == 200 and all((actions == 2.0).all() for actions in seen)
