"""Evaluations of checkpoints, in worker processes while training goes on; sets on a cluster.

Every evaluation that is due is played, by one worker from beginning to end, so its returns are
those of playing it in the training process with the same device and number of threads.  Results are
handed out in the order of their steps.  When more are outstanding than allowed, the next one waits
for room: leaving evaluations out would make the result of a run depend on its machine's speed.  An
evaluation that fails gives a document with ``error``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from gear_offline.config.recipe import Recipe
from gear_offline.core.closing import Closing
from gear_offline.core.system import usable_cores
from gear_offline.distributed.world import World
from gear_offline.errors import GearError
from gear_offline.evaluation.environments import Known, known_of, probe
from gear_offline.evaluation.evaluate import EvaluationTask, check_sizes, evaluate_tasks, sets_of
from gear_offline.evaluation.results import EvaluationReport, joined
from gear_offline.models.policy import Policy
from gear_offline.progress import Progress
from gear_offline.training.checkpoint import read_checkpoint
from gear_offline.training.model import sizes_of
from gear_offline.training.policies import TrainedModel, find_trained, trained_model
from gear_offline.training.seeding import torch_threads
from gear_offline.workers import Caller, RayPool, WorkerPool

POLL_SECONDS = 0.05
SPARE = 2  # evaluations that may wait while all workers play
NICENESS = 5  # where cores are short, training goes first
MOST_WORKERS = 8
MOST_THREADS = 4  # of a worker beside a GPU: an evaluation should not take minutes
CPU_PARAMETERS = 5_000_000  # a larger model takes CPU cores hours for an evaluation


@dataclass(frozen=True, kw_only=True)
class EvaluationPlan:
    """How a run's evaluations are played."""

    workers: int  # processes in the background; 0: in the training process
    threads: int  # of torch on the CPU where they are played
    device: torch.device  # where the policy runs


def plan_evaluations(
    recipe: Recipe,
    tasks: tuple[EvaluationTask, ...],
    device: torch.device,
    world: World,
    *,
    parameters: int,
    concurrent_runs: int = 1,
) -> EvaluationPlan:
    """Decide for a run that trains on `device`: ``auto`` takes cores that training leaves."""
    settings, train = recipe.evaluate, recipe.train
    on_gpu = device.type == "cuda"
    here = device if settings.device == "auto" else torch.device(settings.device)
    away = torch.device("cpu") if settings.device == "auto" else torch.device(settings.device)
    if on_gpu and away.type == "cuda" and away.index is None:
        here = away = device
    ranks = world.nodes.count(world.nodes[world.rank])
    spare = usable_cores() - ranks * (1 if on_gpu else torch.get_num_threads())
    spare //= concurrent_runs
    wanted = settings.background == "on"
    if settings.background == "auto":
        at_the_end = train.evaluate_every is None or train.evaluate_every >= train.steps
        too_large = on_gpu and away.type == "cpu" and parameters > CPU_PARAMETERS
        wanted = spare > 0 and not at_the_end and not too_large
    can = all(known_of(task.environment) is not None for task in tasks)
    if not (wanted and can and tasks):
        return EvaluationPlan(workers=0, threads=torch.get_num_threads(), device=here)
    threads = max(1, min(MOST_THREADS, spare // 2)) if on_gpu else train.threads or 1
    workers = max(1, min(MOST_WORKERS, spare // (2 * threads)))
    if away.type == "cuda":
        workers = threads = 1
    return EvaluationPlan(workers=settings.workers or workers, threads=threads, device=away)


@dataclass(frozen=True, kw_only=True)
class PlayRequest:
    """One evaluation of a checkpoint."""

    checkpoint: str  # its directory
    run: str
    step: int
    tasks: tuple[EvaluationTask, ...]
    device: str  # where the policy runs
    threads: int  # of torch on the CPU; sums over more differ in last bits


def play_tasks(
    trained: TrainedModel,
    tasks: Sequence[EvaluationTask],
    device: str,
    *,
    processes: int | None = None,
    quiet: bool = True,
) -> EvaluationReport:
    """Play tasks with a trained policy; options are those of `evaluate_tasks`."""

    def policy_of(task: EvaluationTask) -> Policy:
        policy = trained.policy(task.name or None, device)
        check_sizes(probe(task.environment), sizes_of(policy.model), whose="the model")
        return policy

    report = evaluate_tasks(policy_of, tasks, processes=processes, quiet=quiet)
    return replace(report, run=trained.facts.name, step=trained.facts.step, device=device)


def play(
    trained: TrainedModel, request: PlayRequest, *, processes: int | None = 1
) -> dict[str, Any]:
    """Play as `request` says; return the document for ``evaluations.jsonl``."""
    report = play_tasks(trained, request.tasks, request.device, processes=processes)
    return replace(report, run=request.run, step=request.step).to_json()


def play_checkpoint(request: PlayRequest) -> dict[str, Any]:
    """Read the weights of a checkpoint and play them; torch's state is as before afterwards."""
    with torch_threads(request.threads), torch.random.fork_rng(devices=[]):
        checkpoint = read_checkpoint(Path(request.checkpoint), training=False)
        return play(trained_model(checkpoint), request)


def play_in_worker(
    caller: Caller, request: PlayRequest, environments: Sequence[Known]
) -> dict[str, Any]:
    """The job of `BackgroundEvaluations`."""
    os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
    for known in environments:
        known.learn()
    return play_checkpoint(request)


def failure(error: Exception) -> dict[str, Any]:
    """Return the document of an evaluation that failed."""
    text = f"{error.code}: {error}" if isinstance(error, GearError) else repr(error)
    return {"error": text, "return": None, "normalized_score": None, "targets": []}


class BackgroundEvaluations(Closing):
    """The evaluations of a run that are under way, and the processes that play them.

    Up to `workers` are started when there is work for them, each with `threads` CPU threads.
    """

    def __init__(self, *, workers: int, threads: int) -> None:
        self._pool = WorkerPool(workers, threads=threads)
        self._asked: dict[int, tuple[PlayRequest, float]] = {}  # step -> what, and when
        self._jobs: dict[int, int] = {}  # number in the pool -> step that is being played
        self._found: dict[int, Mapping[str, Any]] = {}  # step -> document that is to hand out
        self._polled = 0.0

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps whose evaluation is outstanding; their checkpoints must stay."""
        return tuple(self._asked)

    @property
    def is_full(self) -> bool:
        """Whether one more would have to wait."""
        return len(self._asked) >= self._pool.workers + SPARE

    def submit(self, request: PlayRequest) -> None:
        """Have a checkpoint played as soon as it is on the disk and a worker is free."""
        self._asked[request.step] = request, time.monotonic()

    def drop(self, step: int) -> None:
        """Forget a checkpoint that will not be there."""
        self._asked.pop(step, None)

    def poll(self) -> list[tuple[int, Mapping[str, Any], float]]:
        """Hand out what is done, in the order of steps: (step, document, seconds it took).

        Cheap enough for every step; does not wait.
        """
        now = time.monotonic()
        if not self._asked or now - self._polled < POLL_SECONDS:
            return []
        self._polled = now
        for job, value in self._pool.wait(0):
            self._found[self._jobs.pop(job)] = (
                failure(value) if isinstance(value, GearError) else value
            )
        for step, (request, _) in self._asked.items():
            begun = step in self._found or step in self._jobs.values()
            if begun or not self._pool.has_room or not Path(request.checkpoint).is_dir():
                continue  # a checkpoint may still be being written
            known = [known_of(task.environment) or Known() for task in request.tasks]
            try:
                job = self._pool.submit(f"{__name__}:play_in_worker", request, known)
                self._jobs[job] = step
            except GearError as error:
                self._found[step] = failure(error)
        done = []
        for step in takewhile(self._found.__contains__, sorted(self._asked)):
            _, began = self._asked.pop(step)
            done.append((step, self._found.pop(step), now - began))
        return done

    def wait(self) -> None:
        """Sleep a moment."""
        time.sleep(POLL_SECONDS)

    def close(self) -> None:
        """End the processes; what is outstanding is left to a resumed run."""
        self._pool.close()


def play_sets(
    pool: RayPool,
    run: Path,
    trained: TrainedModel,
    tasks: Sequence[EvaluationTask],
    device: str,
    *,
    quiet: bool = True,
) -> EvaluationReport:
    """Play sets of episodes as jobs of a pool, and put them together."""
    began, device = time.perf_counter(), pool.device(device)
    pool.share(pool.gpus if device == "cuda" else pool.cpus, device=device)
    pool.check(run)
    step = trained.facts.step if (run / "checkpoints").is_dir() else None  # a newer one may come
    parts = [part for task in tasks for part in sets_of(task)]
    jobs = [(run, step, part, known_of(part.environment) or Known(), device) for part in parts]
    total = sum(part.episodes * len(part.targets) for part in parts)
    reports: list[EvaluationReport] = []
    with Progress("evaluate", total=total, unit="episodes", quiet=quiet) as progress:
        for part, report in zip(parts, pool.run(f"{__name__}:play_set", jobs), strict=True):
            reports.append(report)
            progress.advance(part.episodes * len(part.targets))
    return joined(reports, seconds=time.perf_counter() - began)


def play_set(
    caller: Caller,
    run: Path,
    checkpoint: int | None,
    task: EvaluationTask,
    known: Known,
    device: str,
) -> EvaluationReport:
    """Play some episodes of a task in a worker."""
    known.learn()
    trained = find_trained(run, checkpoint)
    with torch_threads(trained.recipe.train.threads):
        return play_tasks(trained, [task], device, processes=1)
