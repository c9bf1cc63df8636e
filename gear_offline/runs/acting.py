"""Actors in the training process: a run plays before each look at its data, by turns with training.

Environments and policy are those of `gear_offline.evaluation.batched_play`, on the run's device,
and act with the weights that are learnt.  What they play follows from the run's seed and the step.
A look comes to the host once: its episodes are appended as any actor's, and it admits them.
"""

from __future__ import annotations

import numpy as np
import torch

from gear_offline.artifacts.trained import TrainedModel
from gear_offline.core.text import count_text, say
from gear_offline.data.convert.append import Appender
from gear_offline.errors import InputError
from gear_offline.evaluation.batched import find_batched, make_batched
from gear_offline.evaluation.batched_play import BatchedPlay
from gear_offline.evaluation.environments import probe
from gear_offline.evaluation.play import check_sizes
from gear_offline.evaluation.tasks import tasks_of
from gear_offline.training.learner import Learner

STREAM = 0xAC7  # of what a run draws for its actors


class RunActors:
    """The environments that a run plays in by itself."""

    def __init__(self, learner: Learner, count: int, *, quiet: bool) -> None:
        recipe, self._learner, self._count = learner.recipe, learner, count
        if learner.world.size > 1:
            problem, remedy = "data.actors is for one rank", "start actors: gear-offline act RUN"
            raise InputError("RECIPE", problem, "data.actors", remedy)
        task = next(iter(tasks_of(recipe)), None)
        if task is None or not task.targets or recipe.data.path is None:
            problem = "the run names no environment to act in, or no return to ask for"
            remedy = "give evaluate.environment and evaluate.targets"
            raise InputError("RECIPE", problem, "data.actors", remedy)
        name, options = task.environment, task.environment_options
        if find_batched(name, options) is None:
            problem = f"{name} has no environments that step on one device"
            remedy = "name a go.BatchedEnvironment, FILE.py:Name, or start actors beside the run: "
            raise InputError("RECIPE", problem, "data.actors", f"{remedy}gear-offline act RUN")
        trained = TrainedModel(learner.model, recipe, learner.loader.window)
        policy, facts = trained.policy(device=learner.device), probe(name, options)
        check_sizes(facts, policy.model.facts.sizes, [*policy.columns], whose="the model")
        problem, remedy = "", "take another environment"
        if not facts.step_limit:
            problem = f"{name} has no time limit"
            remedy = "give one: evaluate.environment_options={max_episode_steps: 1000}"
        elif not (policy.discrete or policy.stochastic):
            problem, remedy = "the policy tries nothing out", "train with model.policy=gaussian"
        elif policy.goals or len(policy.columns) > 1:
            problem = "goals and several columns of observations are not acted with here"
            remedy = "start actors beside the run: gear-offline act RUN"
        if problem:
            raise InputError("RECIPE", problem, "data.actors", remedy)
        environments = make_batched(name, options, count, learner.device)
        self._play = BatchedPlay(policy, environments, facts, total=count, draws=True, keep=count)
        self._appender, self._target = Appender(recipe.data.path), max(task.targets)
        text = f"acts in {count_text(count, 'environment')} of {name} on {learner.device}"
        says = "by turns with training: order and replay are exact"
        say(f"{recipe.name}: {text}, {says}", quiet=quiet)
        growing, step = learner.growing, learner.step
        if growing is not None and (last := growing.last_step) >= step and not recipe.data.replay:
            text = f"looks up to step {last:,} are as {recipe.data.path} has them, of this run or "
            text += "another; it acts behind them"
            remedy = "" if step else ": to act from the beginning, give another data.path"
            say(f"{recipe.name}: {text}{remedy}")

    def act(self) -> None:
        """Play an episode in each environment and append it, where a look is due and open."""
        learner, growing = self._learner, self._learner.growing
        step, every = learner.step, learner.recipe.data.admit_every
        if growing is None or every is None or step % every or not growing.is_open(step):
            return
        if learner.device.type == "cuda":
            torch.cuda.current_stream(learner.device).synchronize()  # the weights are there
        drawn = np.random.SeedSequence([learner.recipe.seed, STREAM, step]).generate_state(2)
        first, seed = (int(number) for number in drawn)
        seeds, targets = range(first, first + self._count), [self._target] * self._count
        played = self._play.play(seeds, targets, seed=seed)
        piece = self._appender.append(self._play.episodes(played))
        # the same under an older time: of this run, killed before it admitted them
        for again in {*piece.parent.glob(f"*-{piece.name.partition('-')[2]}")} - {piece}:
            again.unlink(missing_ok=True)
