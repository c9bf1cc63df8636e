"""Play the tasks of a trained model: here, in a worker process, in sets on a Ray cluster."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from gear_offline.evaluation.environments import Known, known_of, probe
from gear_offline.evaluation.evaluate import (
    EvaluationTask,
    check_sizes,
    evaluate_tasks,
    joined,
    sets_of,
)
from gear_offline.models.policy import Policy
from gear_offline.progress import Progress
from gear_offline.training.model import sizes_of
from gear_offline.training.policies import TrainedModel, find_trained
from gear_offline.training.records import EvaluationReport
from gear_offline.training.seeding import torch_threads
from gear_offline.workers import Caller, RayPool


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
    facts = {"run": trained.facts.name, "step": trained.facts.step, "device": device}
    return report.model_copy(update=facts)


def known_to(tasks: Sequence[EvaluationTask]) -> list[Known]:
    """Return what another process has to learn before it can play `tasks`."""
    return [known_of(task.environment) or Known() for task in tasks]


def play_job(
    caller: Caller,
    environments: Sequence[Known],
    run: Path,
    checkpoint: int | None,
    tasks: Sequence[EvaluationTask],
    device: str,
    threads: int | None,
) -> EvaluationReport:
    """Read a model as `find_trained` does and play it: a job, with `threads` of torch."""
    for known in environments:
        known.learn()
    with torch_threads(threads):
        return play_tasks(find_trained(run, checkpoint), tasks, device, processes=1)


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
    threads = trained.recipe.train.threads
    parts = [part for task in tasks for part in sets_of(task)]
    jobs = [(known_to([part]), run, step, [part], device, threads) for part in parts]
    total = sum(part.episodes * len(part.targets) for part in parts)
    reports: list[EvaluationReport] = []
    with Progress("evaluate", total=total, unit="episodes", quiet=quiet) as progress:
        for part, report in zip(parts, pool.run(f"{__name__}:play_job", jobs), strict=True):
            reports.append(report)
            progress.advance(part.episodes * len(part.targets))
    return joined(reports, seconds=time.perf_counter() - began)
