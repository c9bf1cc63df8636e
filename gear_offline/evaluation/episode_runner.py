"""Run a fixed list of episodes with one batched policy.

The list is fixed before the first step: each entry has its own seed and target return, and every
entry is played to its end exactly once.  So short episodes cannot crowd out long ones, which is
what happens when a vector environment resets itself and the first N finished episodes count.

Environments are stepped one after the other in this process, as Gymnasium's ``SyncVectorEnv``
does; the policy sees all of them as one batch.  ``SyncVectorEnv`` itself would go on stepping
environments whose episodes are all done, and its automatic reset does not take seeds; here the
batch shrinks when the list runs out.
Subprocesses cost more than they bring: on two cores ``AsyncVectorEnv`` is slower than the plain
loop on nearly every MuJoCo environment.

Shape legend: E environments (slots), n episodes, S state size, A action size.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import gymnasium
import numpy as np
import numpy.typing as npt

from gear_offline.core.types import BoolArray, Int64Array
from gear_offline.errors import InputError, UnavailableError
from gear_offline.evaluation.atari import REMEDY, is_atari, make_atari

Float64Array = npt.NDArray[np.float64]
FALLBACK_MAX_STEPS = 10_000  # for environments that are registered without a time limit


class ActingPolicy(Protocol):
    """What the runner asks of a policy: it acts for several environments (slots) at once."""

    def reset(self, indices: Int64Array, targets: Float64Array) -> None:
        """Begin a new episode in the slots `indices` (m,), asked for the returns `targets` (m,)."""
        ...

    def act(
        self, observations: npt.NDArray[Any], indices: Int64Array | None = None
    ) -> npt.NDArray[Any]:
        """Return the actions for `observations` (m, S), or frames (m, h, w), of `indices` (m,).

        (m, A) floating, or (m,) integers for discrete actions.
        """
        ...

    def observe_reward(self, rewards: Float64Array, indices: Int64Array | None = None) -> None:
        """Take the rewards (m,) of the actions just returned for the slots `indices`."""
        ...


class RandomPolicy:
    """Uniformly random actions, drawn from the action space with its own generator."""

    def __init__(self, action_space: gymnasium.Space[Any], *, seed: int) -> None:
        self._space = action_space
        action_space.seed(seed)

    def reset(self, indices: Int64Array, targets: Float64Array) -> None:
        """Nothing to forget."""

    def act(
        self, observations: npt.NDArray[Any], indices: Int64Array | None = None
    ) -> npt.NDArray[Any]:
        """Return one action a row, whatever the observations."""
        return np.stack([np.asarray(self._space.sample()) for _ in observations])

    def observe_reward(self, rewards: Float64Array, indices: Int64Array | None = None) -> None:
        """Nothing to learn."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Episodes:
    """What came of a list of episodes, in the order of that list.

    Attributes
    ----------
    returns
        (n,) float64, undiscounted sum of the rewards.
    lengths
        (n,) int64, steps.
    terminated
        (n,) bool; the environment ended the episode.  False: a time limit did.
    """

    returns: Float64Array
    lengths: Int64Array
    terminated: BoolArray


def make_environment(environment_id: str, **options: Any) -> gymnasium.Env[Any, Any]:
    """Make one Gymnasium environment, with one clear error when that is not possible.

    Raises
    ------
    InputError
        ``ENVIRONMENT_UNKNOWN`` when nothing is registered under the name.
    UnavailableError
        ``ENVIRONMENT_PACKAGE`` when the simulator behind it is not installed.
    """
    try:
        with warnings.catch_warnings(), _quiet_simulator():
            # v4 is asked for on purpose where it is closer to D4RL's environments than v5
            warnings.filterwarnings("ignore", message=".*is out of date.*")
            # `say_version` says it, once for all environments and processes
            warnings.filterwarnings("ignore", message=".*Using the latest versioned environment.*")
            # the checker repeats for every step what the first episode already proves
            make = make_atari if is_atari(environment_id) else gymnasium.make
            return make(environment_id, disable_env_checker=True, **options)
    except (gymnasium.error.DependencyNotInstalled, ImportError) as error:
        raise UnavailableError(
            "ENVIRONMENT_PACKAGE",
            f"the simulator of {environment_id} is not usable: {_first_line(error)}",
            remedy=_package_remedy(environment_id),
        ) from error
    except gymnasium.error.Error as error:
        raise InputError(
            "ENVIRONMENT_UNKNOWN",
            f"no environment {environment_id!r}: {_first_line(error)}",
            remedy="use a registered Gymnasium id such as Hopper-v5; "
            "one of your own with its module: my_module:Name-v0",
        ) from error


@contextmanager
def _quiet_simulator() -> Iterator[None]:
    # compiling HalfCheetah's model makes MuJoCo's C code print a deprecation at every `make`
    try:
        import mujoco
    except ImportError:
        yield
        return
    before = mujoco.get_mju_user_warning()
    mujoco.set_mju_user_warning(lambda message: None)
    try:
        yield
    finally:
        mujoco.set_mju_user_warning(before)


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__


def _package_remedy(environment_id: str) -> str:
    if is_atari(environment_id):
        return REMEDY
    module, colon, _ = environment_id.partition(":")
    if colon:
        return f"put the folder of module {module!r} on PYTHONPATH, e.g. PYTHONPATH=. for this one"
    return "install it, for MuJoCo: pip install 'gear-offline[mujoco]'"


def space_sizes(environment: gymnasium.Env[Any, Any]) -> tuple[int, int, bool]:
    """Return ``(state size, action size, discrete)`` of `environment`.

    For discrete actions the action size is the number of actions; for frames (uint8 of two or
    three dimensions) the state size is the number of their elements.

    Raises
    ------
    InputError
        ``ENVIRONMENT_SPACE`` unless observations are one flat Box or frames, and actions Box or
        Discrete from 0 on.
    """
    seen, acted = environment.observation_space, environment.action_space
    if isinstance(seen, gymnasium.spaces.Box) and (len(seen.shape) == 1 or is_frame(seen)):
        if isinstance(acted, gymnasium.spaces.Box) and len(acted.shape) == 1:
            return prod(seen.shape), int(acted.shape[0]), False
        if isinstance(acted, gymnasium.spaces.Discrete):
            if int(acted.start) != 0:  # a model's first choice is 0
                raise InputError(
                    "ENVIRONMENT_SPACE",
                    f"actions {acted} do not start at 0",
                    remedy="wrap the environment",
                )
            return prod(seen.shape), int(acted.n), True
    raise InputError(
        "ENVIRONMENT_SPACE",
        f"spaces {seen} and {acted} are not supported",
        remedy="use an environment with flat Box observations or uint8 frames, and Box or Discrete "
        "actions",
    )


def is_frame(space: gymnasium.spaces.Box) -> bool:
    """Return whether observations are frames: uint8, (h, w) or (h, w, colours)."""
    return space.dtype == np.uint8 and len(space.shape) in (2, 3)


def run_episodes(
    policy: ActingPolicy,
    *,
    environment_id: str,
    seeds: Sequence[int],
    targets: Sequence[float],
    environments: int,
    max_steps: int | None = None,
    on_episode: Callable[[int], None] | None = None,
) -> Episodes:
    """Play episode i with ``seeds[i]`` and ``targets[i]``, for every i, to its end.

    Parameters
    ----------
    policy
        Acts for up to ``min(environments, n)`` slots at once.
    environment_id
        Gymnasium id.
    seeds, targets
        n entries each: the reset seed and the asked return of each episode.
    environments
        Episodes that run side by side.
    max_steps
        Episodes are cut after so many steps; default: the environment's own limit, or 10,000.
    on_episode
        Called with 1 whenever an episode ends.

    Raises
    ------
    InputError
        ``ENVIRONMENT_UNKNOWN``, ``ENVIRONMENT_SPACE``, ``POLICY_NONFINITE`` when an action is NaN
        or infinite, ``ENVIRONMENT_NONFINITE`` when a reward or an observation is.
    UnavailableError
        ``ENVIRONMENT_PACKAGE``.
    """
    slots = max(1, min(environments, len(seeds)))
    made = [make_environment(environment_id) for _ in range(slots)]
    try:
        run = _Run(policy, made, seeds, targets, max_steps, on_episode)
        while (run.playing >= 0).any():
            run.step()
        return Episodes(returns=run.returns, lengths=run.lengths, terminated=run.terminated)
    finally:
        for environment in made:
            environment.close()


class _Run:
    """The state of `run_episodes`: which slot plays which episode."""

    def __init__(
        self,
        policy: ActingPolicy,
        environments: list[gymnasium.Env[Any, Any]],
        seeds: Sequence[int],
        targets: Sequence[float],
        max_steps: int | None,
        on_episode: Callable[[int], None] | None,
    ) -> None:
        self.policy, self.environments = policy, environments
        self.seeds, self.targets = seeds, targets
        self.on_episode = on_episode or (lambda n: None)
        states, _, discrete = space_sizes(environments[0])
        spec = environments[0].spec
        limit = spec.max_episode_steps if spec is not None else None
        self.max_steps = max_steps or limit or FALLBACK_MAX_STEPS
        self.space = None if discrete else environments[0].action_space
        self.returns = np.zeros(len(seeds), dtype=np.float64)
        self.lengths = np.zeros(len(seeds), dtype=np.int64)
        self.terminated = np.zeros(len(seeds), dtype=np.bool_)
        seen = environments[0].observation_space
        frames = isinstance(seen, gymnasium.spaces.Box) and is_frame(seen)
        shape = (len(environments), *(seen.shape or ())) if frames else (len(environments), states)
        self.observations: npt.NDArray[Any] = np.zeros(shape, np.uint8 if frames else np.float64)
        self.playing = np.full(len(environments), -1, dtype=np.int64)  # slot -> episode, -1: none
        self.next_episode = 0
        self.begin(range(len(environments)))

    def begin(self, slots: Sequence[int]) -> None:
        """Give the next episodes of the list to the idle `slots`."""
        fresh = []
        for slot in slots:
            self.playing[slot] = -1
            if self.next_episode < len(self.seeds):
                episode = self.playing[slot] = self.next_episode
                self.next_episode += 1
                seed = int(self.seeds[int(episode)])
                self.observations[slot], _ = self.environments[slot].reset(seed=seed)
                fresh.append(slot)
        if fresh:
            asked = [float(self.targets[int(self.playing[slot])]) for slot in fresh]
            self.policy.reset(np.asarray(fresh, np.int64), np.asarray(asked, np.float64))

    def step(self) -> None:
        """One step of every slot that still plays."""
        active = np.flatnonzero(self.playing >= 0)
        actions = self.bounded(self.policy.act(self.observations[active], active), active)
        rewards = np.zeros(active.size, dtype=np.float64)
        ended = []
        for row, slot in enumerate(active.tolist()):
            episode = int(self.playing[slot])
            seen, reward, terminated, truncated, _ = self.environments[slot].step(actions[row])
            self.observations[slot] = seen
            rewards[row] = reward
            self.returns[episode] += float(reward)
            self.lengths[episode] += 1
            if terminated or truncated or self.lengths[episode] >= self.max_steps:
                self.terminated[episode] = terminated
                ended.append(slot)
        if not np.isfinite(rewards).all():
            raise self.broken("a reward")
        self.policy.observe_reward(rewards, active)
        if ended:
            self.on_episode(len(ended))
            self.begin(ended)

    def broken(self, what: str) -> InputError:
        """Return the error for an environment that gives what no policy can act on."""
        spec = self.environments[0].spec
        return InputError(
            "ENVIRONMENT_NONFINITE",
            f"the environment gave {what} that is NaN or infinite",
            where="" if spec is None else spec.id,
            remedy="its simulation has broken down, or its reward has no value there: mend it",
        )

    def bounded(self, actions: npt.NDArray[Any], active: Int64Array) -> npt.NDArray[Any]:
        """Return finite `actions` of the `active` slots, clipped to the bounds of a Box."""
        if not np.isfinite(actions).all():
            if not np.isfinite(self.observations[active]).all():
                raise self.broken("an observation")
            raise InputError(
                "POLICY_NONFINITE",
                "the policy returned an action that is NaN or infinite",
                remedy="the weights have probably diverged: train with a lower learning rate",
            )
        if isinstance(self.space, gymnasium.spaces.Box):
            clipped = np.clip(actions, self.space.low, self.space.high)
            return np.asarray(clipped, dtype=self.space.dtype)
        return actions
