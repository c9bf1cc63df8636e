"""Play policies in their environments and say what they achieved for each asked return.

Every target return gets the same episodes: episode ``e`` is reset with ``seed + e`` whatever the
target.  So a difference between two targets is not a difference of start states.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Self, TypeAlias

import numpy as np
import torch

from gear_offline.artifacts.records import EvaluationReport, TargetResult, TaskResult
from gear_offline.artifacts.trained import TrainedModel, find_trained
from gear_offline.batches.tables.fields import STATES
from gear_offline.core.draws import Draws
from gear_offline.core.files import Closing
from gear_offline.core.progress import Progress
from gear_offline.core.system import available_bytes, versions
from gear_offline.core.text import count_text, say
from gear_offline.core.torch_state import torch_threads
from gear_offline.core.types import Array
from gear_offline.core.workers import Caller
from gear_offline.data.dataset.schema import channels_last, match_columns
from gear_offline.data.dataset.scores import ReferenceScores, find_scores, known_scores
from gear_offline.errors import GearError, InputError
from gear_offline.evaluation.batched import OWN, find_batched, make_batched
from gear_offline.evaluation.batched_play import BatchedPlay
from gear_offline.evaluation.environments import (
    EnvironmentFacts,
    Pack,
    pack_environment,
    probe,
    weigh,
)
from gear_offline.evaluation.rollout import (
    ActingPolicy,
    Environments,
    Episodes,
    play_together,
    reseed,
    turns,
)
from gear_offline.evaluation.tasks import CPU_ENVIRONMENTS, EvaluationTask, Reference
from gear_offline.models.base import ModelSizes, SequenceModel
from gear_offline.models.encoders import InputColumn
from gear_offline.models.policy import Policy

MOST_ENVIRONMENTS = 1024  # at once, of all policies that play together
ENVIRONMENT_BYTES = 16 << 20  # of memory that one takes at least; a robot of meshes has 170 MB
FOREIGN = "the environment is not the one that D4RL measured, so the score is indicative only"

Player: TypeAlias = ActingPolicy | BatchedPlay
Evaluation = tuple[Callable[[EvaluationTask], Player], Sequence[EvaluationTask]]


def play_tasks(
    trained: TrainedModel,
    tasks: Sequence[EvaluationTask],
    device: str,
    *,
    cores: int | None = None,
    quiet: bool = True,
) -> EvaluationReport:
    """Play tasks with a trained policy; options are those of `evaluate_tasks`."""
    tasks = settle_tasks(trained, tasks, device)
    gpus = [torch.device(device)] if device.startswith("cuda") else []
    with torch.random.fork_rng(gpus):
        torch.manual_seed(tasks[0].seed)  # a policy may draw on a GPU
        report = evaluate_tasks(
            lambda task: make_player(trained, task, device),
            tasks,
            cores=cores,
            quiet=quiet,
        )
    facts = {"run": trained.facts.name, "step": trained.facts.step, "device": device}
    return report.model_copy(update=facts)


def make_player(trained: TrainedModel, task: EvaluationTask, device: str) -> Policy | BatchedPlay:
    """Return the policy that plays a task, with its environments if they are batched."""
    memory = task.episodes_of_memory > 1
    how: dict[str, Any] = {"memory": memory, "context_length": task.context_length}
    policy = trained.policy(task.name or None, device, **how)
    if not task.batched:
        return policy
    options = task.environment_options
    facts = probe(task.environment, options)
    check_sizes(facts, policy.model.facts.sizes, [*policy.columns], whose="the model")
    return BatchedPlay(
        policy,
        make_batched(task.environment, options, task.slots, policy.device),
        facts,
        total=task.episodes * len(task.targets),
        draws=task.sample,
        keep=len(task.targets),
    )


def _is_batched(trained: TrainedModel, task: EvaluationTask, device: str) -> bool:
    """True if a task's environments step on the policy's device.

    On the CPU those that are there without are played without.
    """
    facts, options = trained.model.facts, task.environment_options
    if task.goals or task.episodes_of_memory > 1 or len(facts.columns) > 1:
        return False
    if facts.columns[0].frames or find_batched(task.environment, options) is None:
        return False
    is_there = task.environment in OWN and not device.startswith("cuda")
    return not is_there and probe(task.environment, options).step_limit > 0


def settle_tasks(
    trained: TrainedModel, tasks: Sequence[EvaluationTask], device: str
) -> list[EvaluationTask]:
    """Give tasks environments for a device, and the returns of the data of a trained model.

    A model that asks for nothing is played once, whatever the targets.
    """
    returns = {t.name: (t.return_worst, t.return_best) for t in trained.model.facts.tasks}
    tasks = [replace(task, data_returns=returns.get(task.name)).settle(device) for task in tasks]
    if trained.model.asks_nothing:
        tasks = [replace(t, targets=t.targets[:1], condition="nothing") for t in tasks]
    return [replace(task, batched=_is_batched(trained, task, device)) for task in tasks]


def evaluate_tasks(
    policy_of: Callable[[EvaluationTask], Player],
    tasks: Sequence[EvaluationTask],
    *,
    cores: int | None = None,
    quiet: bool = True,
) -> EvaluationReport:
    """Play tasks; `policy_of` gives the batched policy of each.

    It is given up to ``environments * len(targets)`` slots.  Environments step on up to so many
    `cores`, by default on all; the results do not depend on it.
    """
    with Stage(cores, keep=False) as stage:
        report = evaluate_together([(policy_of, tasks)], stage, quiet=quiet)[0]
    if isinstance(report, Exception):
        raise report
    return report


class Stage(Closing):
    """The environments of evaluations, which stay for those to come if `keep`; a context manager.

    They step on up to so many `cores`, by default on all that pay off.
    """

    def __init__(self, cores: int | None = None, *, keep: bool = True) -> None:
        self._cores, self.keep, self.is_closed = cores, keep, False
        self._made: dict[str, Environments] = {}
        self._room: dict[str, int] = {}

    def room(self, task: EvaluationTask) -> int:
        """Return the environments that memory has room for, those that are kept included."""
        if task.kind not in self._room:
            each = ENVIRONMENT_BYTES
            if task.slots > CPU_ENVIRONMENTS:
                with suppress(GearError):
                    each = max(each, weigh(task.environment, task.environment_options))
            self._room[task.kind] = available_bytes() // each
        return self._room[task.kind]

    def environments(self, task: EvaluationTask, policies: int) -> Environments:
        """Return environments for so many policies at least, each with the slots of a task."""
        environments = self._made.get(task.kind)
        if environments is None or len(environments.slots) < task.slots * policies:
            self.drop(task)
            episodes = task.episodes * task.episodes_of_memory * len(task.targets) * policies
            slots = task.slots * policies
            how: dict[str, Any] = {"goals": task.goals, "options": task.environment_options}
            how |= {"episodes": episodes, "cores": self._cores}
            self._made[task.kind] = environments = Environments(task.environment, slots, **how)
        if self.is_closed:  # meanwhile
            self.drop(task)
        self.check()
        return environments

    def check(self) -> None:
        """Raise an error once it is closed."""
        if self.is_closed:
            raise GearError("INTERRUPTED", "the environments are closed")

    def drop(self, task: EvaluationTask) -> None:
        """Close the environments of a task."""
        if (environments := self._made.pop(task.kind, None)) is not None:
            environments.close()

    def close(self) -> None:
        """Close all; whoever plays in them hears of it."""
        self.is_closed = True
        while self._made:
            self._made.popitem()[1].close()


def evaluate_together(
    evaluations: Sequence[Evaluation], stage: Stage, *, quiet: bool = True
) -> list[EvaluationReport | Exception]:
    """Play the tasks of several policies, those in equal environments side by side.

    Each evaluation is what `evaluate_tasks` takes, and gives the report that it gives, or its
    error.
    """
    began, alike = time.perf_counter(), dict[str, list[_TaskPlay]]()
    by_policy = [[_TaskPlay.of(policy, task) for task in tasks] for policy, tasks in evaluations]
    for play in chain.from_iterable(by_policy):
        if play.task.batched:
            play.play_batched(stage, quiet)
        else:
            alike.setdefault(play.task.kind, []).append(play)
    for group in alike.values():
        task = group[0].task
        if (room := stage.room(task)) < task.slots:
            most = max(1, room // len(task.targets))
            count = count_text(most * len(task.targets), "environment")
            say(f"{task.environment}: memory has room for {count} at once", quiet=quiet)
            for play in group:
                play.task = replace(play.task, environments=most)
        portions = -(-len(group) // max(1, min(MOST_ENVIRONMENTS, room) // group[0].task.slots))
        for number in range(portions):
            _play(group[number::portions], stage, quiet)
        if not stage.keep:
            stage.drop(group[0].task)
    software = versions("gear-offline", "gymnasium", "mujoco", "torch", "numpy")
    reports: list[EvaluationReport | Exception] = []
    for plays in by_policy:
        try:
            results = {play.task.name: play.result() for play in plays}
            reports.append(_report(results, versions=software, seconds=time.perf_counter() - began))
        except Exception as error:
            reports.append(error)
    return reports


@dataclass
class _TaskPlay:
    """One task of one policy."""

    policy_of: Callable[[EvaluationTask], Player]
    task: EvaluationTask
    header: TaskResult
    played: Sequence[TargetResult] | Exception = ()

    @classmethod
    def of(cls, policy_of: Callable[[EvaluationTask], Player], task: EvaluationTask) -> Self:
        task, (worst, best) = task.settle(), task.data_returns or (None, None)
        header = TaskResult(
            environment=task.environment,
            environment_options=dict(task.environment_options),
            reference=resolve_reference(task.environment, task.reference),
            data_worst=worst,
            data_best=best,
            seed=task.seed,
            episodes_of_memory=task.episodes_of_memory,
            sample=task.sample,
            condition=task.condition,
            goals=task.goals,
        )
        return cls(policy_of, task, header)

    def result(self) -> TaskResult:
        if isinstance(self.played, Exception):
            raise self.played
        header = self.header.model_copy(update={"environments": self.task.environments})
        return header.with_targets(self.played)

    def turns(
        self, environments: Environments, number: int, quiet: bool, **options: Any
    ) -> Generator[None, None, list[TargetResult]]:
        """Play the episodes of all targets, those of one episode number side by side."""
        task, count = self.task, len(self.task.targets)
        if task.goals:
            check_goals(environments.facts, task.targets)
        policy = self.policy_of(task)
        assert not isinstance(policy, BatchedPlay), "it has environments of its own"
        if isinstance(policy, Policy):
            self._note_window(policy)
            sizes, names = policy.model.facts.sizes, [*policy.columns]
            check_sizes(environments.facts, sizes, names, whose="the model", quiet=quiet)
            policy.capture(task.slots)
        # each policy's slots are spread over all, and so over the workers
        stride = len(environments.slots) // task.slots
        played = yield from turns(
            policy,
            environments,
            environments.slots[number::stride][: task.slots],
            **self._list,
            memory=task.episodes_of_memory,
            generator=np.random.default_rng(task.seed) if task.sample else None,
            keep_actions=count,
            **options,
        )
        return self._results(played)

    def play_batched(self, stage: Stage, quiet: bool) -> None:
        """Play all episodes in environments of the policy's device."""
        task = self.task
        total, title = task.episodes * len(task.targets), f"evaluate {task.environment}"
        try:
            player = self.policy_of(task)
            assert isinstance(player, BatchedPlay), "as make_player gives"
            self._note_window(player.policy)
            count = count_text(task.slots, "environment")
            say(f"{task.environment}: {count} on {player.policy.device}", quiet=quiet)
            with Draws(), Progress(title, total=total, unit="episodes", quiet=quiet) as progress:

                def advance(episodes: int) -> None:
                    stage.check()
                    progress.advance(episodes)

                played = player.play(**self._list, on_episode=advance, seed=task.seed)
                self.played = self._results(played)
        except Exception as error:
            self.played = error

    @property
    def _list(self) -> dict[str, Any]:
        """Seeds and targets of the episodes, those of one seed side by side."""
        episodes, targets = self.task.episodes, self.task.targets
        seeds = [self.task.seed + e for e in range(episodes) for _ in targets]
        return {"seeds": seeds, "targets": targets * episodes}

    def _note_window(self, policy: Policy) -> None:
        window = {"context_length": policy.other_context_length}
        self.header = self.header.model_copy(update=window)

    def _results(self, played: Episodes) -> list[TargetResult]:
        task, count = self.task, len(self.task.targets)

        def select(results: Array, index: int) -> tuple[Any, ...]:
            return tuple(results.reshape(task.episodes, count, -1)[:, index].ravel().tolist())

        return [
            TargetResult(
                target=target,
                returns=select(played.returns, index),
                lengths=select(played.lengths, index),
                terminated=select(played.terminated, index),
                actions=played.actions[index],
            )
            for index, target in enumerate(task.targets)
        ]


def _play(plays: Sequence[_TaskPlay], stage: Stage, quiet: bool) -> None:
    """Play parts of one kind; where their environments fail, each alone."""
    task, tasks = plays[0].task, [play.task for play in plays]
    total = sum(t.episodes * t.episodes_of_memory * len(t.targets) for t in tasks)
    title = f"evaluate {task.environment}"
    try:
        environments = stage.environments(task, len(plays))
        with Draws(), Progress(title, total=total, unit="episodes", quiet=quiet) as progress:
            how: dict[str, Any] = {"quiet": quiet, "on_episode": progress.advance}
            playing = [
                reseed(play.turns(environments, number, **how), play.task.seed)
                for number, play in enumerate(plays)
            ]
            for play, played in zip(plays, play_together(environments, playing), strict=True):
                play.played = played
    except Exception as error:
        stage.drop(task)
        for play in plays:
            if len(plays) == 1 or stage.is_closed:
                play.played = error
            else:
                _play([play], stage, quiet)


def _report(results: Mapping[str, TaskResult], *, seconds: float, **facts: Any) -> EvaluationReport:
    """Return the report of tasks by name, where a policy of one has none, and of other `facts`."""
    facts["seconds"] = round(seconds, 3)
    if "" in results:
        result = {name: getattr(results[""], name) for name in TaskResult.model_fields}
        return EvaluationReport(**result, **facts)
    scores = [task.normalized_score for task in results.values()]
    scored = [score for score in scores if score is not None]
    returns = [task.mean_return for task in results.values()]
    return EvaluationReport(
        targets=(),
        named=dict(results),
        mean_return=returns[0] if len(returns) == 1 else None,
        normalized_score=sum(scored) / len(scored) if len(scored) == len(scores) else None,
        **facts,
    )


def timestep_warning(report: EvaluationReport, model: SequenceModel) -> str | None:
    """Return a warning of episodes longer than the model's timesteps, if there are any."""
    most = model.facts.max_timestep
    lengths = [n for task in report.tasks for target in task.targets for n in target.lengths]
    longer = sum(n > most for n in lengths)
    if not longer or not model.sees_timesteps:
        return None
    finding = f"{longer:,} of {count_text(len(lengths), 'episode')} outlasted model.max_timestep"
    return f"{finding}: the model was shown each step after {most:,} as that one"


def resolve_reference(
    environment_id: str, reference: Reference | None = None
) -> ReferenceScores | None:
    """Return the scores to normalise by.

    A dataset's name (``hopper-medium-v2``) may give the pair, but whether the result can be
    called a D4RL score depends on the environment that was played; Gymnasium's are not D4RL's.
    """
    native = find_scores(environment_id)
    if reference is None:
        return native
    if isinstance(reference, tuple):
        return ReferenceScores(name="two returns", minimum=reference[0], maximum=reference[1])
    scores = known_scores(reference) if isinstance(reference, str) else reference
    exact = native is not None and not native.indicative
    if exact or scores.indicative:
        return scores
    note = native.note if native is not None else FOREIGN
    return scores.model_copy(update={"indicative": True, "note": note})


def check_goals(environment: EnvironmentFacts, targets: Sequence[float]) -> None:
    """Refuse targets that number no tasks of an environment with goals (``USAGE``)."""
    most = environment.tasks or math.inf
    if wrong := [target for target in targets if target % 1 or not 1 <= target <= most]:
        problem = f"{environment.environment_id} has no task {wrong[0]:g}"
        remedy = "give whole numbers from 1" + f" to {most}" * bool(environment.tasks)
        raise InputError("USAGE", problem, "evaluate.targets", remedy)


def check_sizes(
    environment: EnvironmentFacts,
    sizes: ModelSizes,
    names: Sequence[str] = (STATES,),
    *,
    whose: str,
    otherwise: str = "",
    quiet: bool = True,
) -> None:
    """Refuse an environment whose observations or actions are not those of data or a model.

    `names` are those of the columns; what they are called in the environment, if otherwise, is
    said.
    """
    has, name = environment.observations, environment.environment_id
    matched = {names[0]: ""} if "" in has else match_columns(tuple(names), tuple(has))
    remedy = "name the environment that the data came from" + otherwise
    if missing := [column for column in names if column not in matched]:
        texts = (f"{leaf or 'one'} {dtype.base} {dtype.shape}" for leaf, dtype in has.items())
        problem = f"{name} observes {', '.join(texts)}: none is {', '.join(missing)} of {whose}"
        if "" not in has:
            option = f"{{observation_columns: {{NAME: {missing[0]}}}}}"
            remedy = f"say which it is, in environment_options: {option}"
        raise InputError("ENVIRONMENT", problem, "evaluate.environment", remedy)
    played, columns = list[InputColumn](), sizes.columns
    for label, column in zip(names, columns, strict=True):
        dtype = has[matched[label]]
        changes: dict[str, Any] = {"shape": (math.prod(dtype.shape),)}
        if column.frames:
            is_same = channels_last(dtype.shape) == channels_last(column.shape)
            frames = "uint8" if dtype.base == np.uint8 else "float32"
            changes = {"shape": column.shape if is_same else dtype.shape, "frames": frames}
        played.append(column.model_copy(update=changes))
    actions = (environment.action_size, environment.discrete)
    if (tuple(played), actions) != (columns, (sizes.action_dim, sizes.discrete)):
        problem = f"{name} has {_sizes_text(played, *actions)}, {whose} "
        problem += _sizes_text(columns, sizes.action_dim, sizes.discrete)
        if any(c.size == 1 < p.size for c, p in zip(columns, played, strict=True)):
            remedy = "make one-hot vectors of numbers of choices (convert --map), or " + remedy
        raise InputError("ENVIRONMENT", problem, "evaluate.environment", remedy)
    renamed = [f"{label} is {leaf}" for label, leaf in matched.items() if leaf not in ("", label)]
    say(f"observations of {name}: {', '.join(renamed)}", quiet=quiet or not renamed)


def _sizes_text(columns: Sequence[InputColumn], actions: int, discrete: bool) -> str:
    texts = ", ".join(column.text for column in columns)
    return f"{texts} and {count_text(actions, 'discrete action' if discrete else 'action value')}"


# elsewhere: in a worker process ----------------------------------------------------------------


def pack_environments(tasks: Sequence[EvaluationTask]) -> list[Pack]:
    """Pack the environments of `tasks` for another process, which learns them first."""
    names = ((task.environment, task.environment_options) for task in tasks)
    return [pack_environment(name, options) or Pack(name) for name, options in names]


def play_job(
    caller: Caller,
    environments: Sequence[Pack],
    checkpoint: Path,
    tasks: Sequence[EvaluationTask],
    device: str,
    threads: int,
    cores: int | None,
) -> EvaluationReport:
    """Read a checkpoint and play it: a job, with `threads` of torch."""
    for pack in environments:
        pack.learn()
    with torch_threads(threads):
        return play_tasks(find_trained(checkpoint), tasks, device, cores=cores)
