"""The fixed list of episodes: each is played once, as a plain loop would, in any processes."""

import copy
import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from gear_offline.batches.tables.fields import ObservedColumn
from gear_offline.errors import GearError
from gear_offline.evaluation import environments
from gear_offline.evaluation.collect.collection import collect
from gear_offline.evaluation.environments import probe
from gear_offline.evaluation.play import evaluate_tasks
from gear_offline.evaluation.rollout import ActingPolicy, Environments, Episodes
from gear_offline.evaluation.tasks import EvaluationTask
from gear_offline.kernels.cuda_module import capturing
from gear_offline.models.decision_transformer import build_model
from gear_offline.models.encoders import InputColumn
from gear_offline.models.policy import Policy
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


def test_an_episode_that_does_not_end_is_refused(monkeypatch: Patch) -> None:
    """As `collect` does: a return of steps that we chose is nobody's."""
    monkeypatch.setattr(environments, "MOST_STEPS", 7)
    assert play(Constant(np.zeros(3)), "GearTest/Counted-v0", [6]).lengths.tolist() == [7]
    with one_error("ENVIRONMENT", "has not ended within 7 steps") as caught:
        play(Constant(np.zeros(3)), "GearTest/Endless-v0", [0, 1], environments=2)
    assert "environment_options={max_episode_steps: 20000}" in caught.value.remedy
    for steps, lengths in ((9, [9]), (-1, None)):  # Gymnasium's -1: no limit
        with Environments("GearTest/Endless-v0", 1, options={"max_episode_steps": steps}) as made:
            if lengths:
                played = play_episodes(Constant(np.zeros(3)), made, seeds=[0], targets=[0.0])
                assert played.lengths.tolist() == lengths and not played.terminated.any()
            else:
                with one_error("ENVIRONMENT", "within 7 steps"):
                    play_episodes(Constant(np.zeros(3)), made, seeds=[0], targets=[0.0])


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def drawn() -> list[float]:
    return [random.random(), np.random.normal(), torch.rand(1).item()]


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize(
    ("environments", "processes"), [(1, 1), (4, 1), (4, 2)], ids=["alone", "four", "two processes"]
)
def test_all_that_an_environment_draws_has_the_seed_of_its_episode(
    environments: int, processes: int, tmp_path: Path
) -> None:
    """The oracle: a loop that seeds all generators and spaces by hand."""
    seeds, returns, lengths = [5, 6, 7, 5], [], []
    seed_all(0)
    raw: Any = gymnasium.make("GearTest/Drawing-v0", disable_env_checker=True).unwrapped
    raw.action_space, raw.observation_space = map(
        copy.deepcopy, (raw.action_space, raw.observation_space)
    )
    for seed in seeds:
        seed_all(seed)
        for space in (raw.action_space, raw.observation_space, raw.wind):
            space.seed(seed)
        raw.reset(seed=seed)
        total, over, steps = 0.0, False, 0
        while not over:
            _, reward, over, _, _ = raw.step(np.zeros(3))
            total, steps = total + reward, steps + 1
        returns.append(total)
        lengths.append(steps)
    seed_all(1)
    before = [*drawn(), *drawn()]
    seed_all(1)
    assert drawn() == before[:3]
    how: dict[str, Any] = {"environments": environments, "processes": processes}
    played = play(Constant(np.zeros(3)), "GearTest/Drawing-v0", seeds, **how)
    files = [tmp_path / f"{n}.hdf5" for n in (1, 2)]
    for file in files:
        collect("GearTest/Drawing-v0", file, steps=40, processes=processes, quiet=True)
    assert drawn() == before[3:], "the caller's are as they were"
    assert played.lengths.tolist() == lengths
    np.testing.assert_allclose(played.returns, returns, rtol=1e-12)
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.usefixtures("forked_workers")
def test_a_policy_that_draws_has_the_seed_of_the_evaluation() -> None:
    class Drawn(Constant):
        def act(self, observations: Any, indices: Any = None) -> Any:
            return np.full((len(observations), 3), sum(drawn()) / 9)

    def returns(seed: int) -> Any:
        task = EvaluationTask(environment="GearTest/Drawing-v0", targets=(1.0,), seed=seed)
        report = evaluate_tasks(lambda _: Drawn(np.zeros(3)), [task])
        return report.targets[0].returns

    first = returns(3)
    seed_all(9)
    assert returns(3) == first != returns(4)


def test_whose_fault_it_is_that_something_is_not_a_number() -> None:
    with one_error("MODEL"):
        play(Constant(np.array([0.0, np.nan, 0.0])), "GearTest/Counted-v0", [0])
    for name, what in (("Broken", "a reward"), ("Blind", "an observation")):
        with one_error("ENVIRONMENT", f"the environment gave {what} .* NaN") as caught:
            play(Remembering(np.ones((4, 3))), f"GearTest/{name}-v0", [2])
        assert caught.value.where == f"GearTest/{name}-v0"


def test_what_goes_wrong_in_a_worker_is_raised_here() -> None:
    policy = Constant(np.ones(3))
    with pytest.raises(GearError, match="raised RuntimeError: broken"):
        play(policy, "GearTest/Fragile-v0", [1, 2], environments=2, processes=2)


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
