"""Actors: play the newest policy of a run, and append the episodes to its data."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from gear_offline.artifacts.checkpoint import (
    chosen_checkpoint,
    list_checkpoints,
    no_run,
    while_removed,
)
from gear_offline.artifacts.trained import find_trained
from gear_offline.config.arguments import check_arguments
from gear_offline.core.parts import admit, readmit
from gear_offline.core.progress import Progress
from gear_offline.core.text import Document, count_text, say
from gear_offline.core.types import Array
from gear_offline.core.workers import Caller, WorkerPool
from gear_offline.data.convert.append import Appender
from gear_offline.data.dataset.dataset import open_dataset
from gear_offline.errors import InputError, given_path
from gear_offline.evaluation.collect.record import Player, check_noise, check_recorded, episode_plan
from gear_offline.evaluation.environments import Pack, pack_environment, probe
from gear_offline.evaluation.tasks import choose_tasks, read_options, say_choice
from gear_offline.models.policy import Policy

WAIT_SECONDS = 600.0  # for a run and its first checkpoint
POLL_SECONDS = 0.5
RECENT = 20  # episodes of the mean that is shown


@dataclass(frozen=True, kw_only=True)
class ActReport(Document):
    """The episodes that actors appended; `mean_return` is None where no episode was played.

    `waiting`: episodes that the run has not admitted yet.
    """

    episodes: int = 0
    steps: int = 0
    mean_return: float | None = None
    waiting: int = 0


@check_arguments()
def act(
    run: str | os.PathLike[str],
    *,
    environment: str | Callable[..., Any] | None = None,
    environment_options: Mapping[str, Any] | None = None,
    actors: int = 1,
    episodes: int | None = None,
    target: float | None = None,
    action_noise: float | None = None,
    seed: int | None = None,
    quiet: bool = False,
    model: Any = None,
) -> ActReport:
    """Play a run's newest policy with exploration, and append the episodes to the run's dataset.

    The run has ``data.admit_every``: it admits them between its steps.  Actors and learner need
    nothing of each other but the file system: each may be stopped, killed and started again.

    Parameters
    ----------
    run
        Run directory, of which the newest checkpoint plays; waited for until there is one.
    environment, environment_options
        Gymnasium id, and what `gymnasium.make` takes besides; default the run's own.
    actors
        Processes, each with an environment of its own.
    episodes
        How many in all; default until the run has ended, or Ctrl-C.
    target
        Return asked of the policy; default the highest of the run's ``evaluate.targets``.
    action_noise
        Gaussian noise on actions, in half ranges; with discrete actions the probability of a random
        one.  Default 0.1; 0 of a stochastic policy, whose actions are drawn.
    seed
        Seed of resets and noise; default another one each time.
    quiet
        Show no progress. Warnings that change what the result means are still shown.
    model
        As of `gear_offline.load_policy`.

    Raises
    ------
    InputError
        ``RUN_NOT_FOUND``; ``USAGE`` if the run's data do not grow; ``COLUMN`` if the dataset has
        columns that actors do not record, as `gear_offline.collect` does; ``ENVIRONMENT``.
    GearError
        ``WORKER_LOST``, ``OUTPUT_WRITE``.
    """
    path = given_path(run, "RUN_NOT_FOUND", where="run")
    if actors < 1 or (episodes is not None and episodes < 1) or not (action_noise or 0.0) >= 0.0:
        problem = f"got actors={actors}, episodes={episodes}, action_noise={action_noise}"
        raise InputError(
            "USAGE", problem, remedy="give at least one actor and episode, no negatives"
        )
    options = read_options(path, environment, environment_options, model, targets=target, seed=seed)
    _wait_for_checkpoint(path, quiet=quiet)
    recipe = while_removed(lambda: chosen_checkpoint(path)).recipe
    readmit(recipe.trusted)
    admit([options.environment] if options.environment else [])
    if recipe.data.admit_every is None or recipe.data.path is None:
        problem, remedy = "the run's data do not grow", "train it with data.admit_every=1000"
        if recipe.loader.condition == "advantage":
            remedy = "episodes that are played have no advantages: train one that asks for returns"
        raise InputError("USAGE", problem, str(path), remedy)
    check_recorded(open_dataset(recipe.data.path))
    (task,) = choose_tasks(recipe, options)
    check_noise(probe(task.environment, task.environment_options), action_noise or 0.0)
    if (pack := pack_environment(task.environment, task.environment_options)) is None:
        problem = "only this process knows the environment"
        remedy = "register it with an entry point"
        raise InputError("ENVIRONMENT", problem, task.environment, remedy)
    say_choice([task], recipe, options)
    if action_noise is None:
        action_noise = 0.0 if recipe.model.is_stochastic else 0.1
    base = time.time_ns() if seed is None else seed
    target = max(task.targets)
    shared = path, Path(recipe.data.path), pack, options.model, target, action_noise, time.time()
    jobs = [
        (*shared, (base, number), episodes and (episodes + actors - 1 - number) // actors)
        for number in range(min(actors, episodes or actors))
    ]
    played: list[tuple[float, int, int, Path]] = []  # return, steps, the policy's step, its piece
    problem, total = f"act for {path.name}", episodes or 0
    try:
        with (
            WorkerPool(actors) as pool,
            Progress(problem, total=total, unit="episodes", quiet=quiet) as progress,
        ):

            def add(episode: tuple[float, int, int, Path]) -> None:
                played.append(episode)
                mean = np.mean([returned for returned, *_ in played[-RECENT:]])
                facts = {"mean return": f"{mean:,.1f}", "policy of step": f"{episode[2]:,}"}
                progress.update(len(played), **facts)

            list(pool.run(f"{__name__}:play_in_worker", jobs, on_message=add))
    except KeyboardInterrupt:
        say("stopped: the episodes under way are lost, the others appended", quiet=quiet)
    if not played:
        return ActReport()
    returns, steps, _, pieces = zip(*played, strict=True)
    if waiting := sum(piece.exists() for piece in pieces):
        problem = f"{waiting:,} of {count_text(len(played), 'episode')} not admitted yet"
        when = "the run does so at its next look"
        if list_checkpoints(path / "checkpoints")[-1][0] >= recipe.train.steps:
            when = f"the run has ended; the next one on {recipe.data.path} does so"
        say(f"{problem}: {when}", quiet=quiet)
    mean = float(np.mean(returns))
    return ActReport(episodes=len(played), steps=sum(steps), mean_return=mean, waiting=waiting)


def _wait_for_checkpoint(path: Path, *, quiet: bool) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    if not list_checkpoints(path / "checkpoints"):
        say(f"waiting for the first checkpoint of {path}", quiet=quiet)
    while not list_checkpoints(path / "checkpoints"):
        if time.monotonic() > deadline:
            raise no_run(path)
        time.sleep(POLL_SECONDS)


@dataclass(frozen=True, eq=False)
class _Acting:
    """A model with a target return, as the policy of an episode's plan."""

    policy: Policy
    algorithm: str = "gear-offline"

    def act(self, observation: Array, generator: np.random.Generator) -> Array:
        policy_generator = generator if self.policy.stochastic else None
        return np.asarray(self.policy.act(observation[None], generator=policy_generator)[0])

    def observe(self, _: Array, action: Array, reward: float, *following: object) -> None:
        self.policy.observe_reward([reward], actions=action[None])


def play_in_worker(
    caller: Caller,
    run: Path,
    data: Path,
    pack: Pack,
    model: str | None,
    target: float,
    noise: float,
    began: float,
    seed: tuple[int, int],
    episodes: int | None,
) -> None:
    """Play episodes until there are enough, or the run has ended; send the facts of each."""
    appender, policy, step, played = Appender(data), None, -1, 0
    last_listing = list[tuple[int, Path]]()
    summary = run / "summary.json"
    with Player(pack.make()) as player:
        while episodes is None or played < episodes:
            is_over = summary.is_file() and summary.stat().st_mtime > began
            if episodes is None and is_over:
                return
            newest = list_checkpoints(run / "checkpoints")[-1:]
            if policy is None or (newest and newest != last_listing):  # a damaged one is told once
                last_listing = newest
                trained = find_trained(run, model=model)
                policy, step = trained.policy(), trained.facts.step or 0
            policy.reset(target)
            acting = _Acting(policy)
            plan = episode_plan(acting, (*seed, played), noise)
            episode = player.play(replace(plan, on_step=acting.observe))
            piece = appender.append([episode.columns()])
            played += 1
            caller.send((episode.total, episode.steps, step, piece))
