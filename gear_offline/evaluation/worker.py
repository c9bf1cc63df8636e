"""A process that plays checkpoints while a run trains.

It takes requests as JSON lines on its standard input, answers each with one on its standard
output, and ends with that input or with the process that started it.  Nothing is unpickled.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gear_offline.core.processes import die_with_parent
from gear_offline.errors import GearError
from gear_offline.training.metrics import finite
from gear_offline.training.seeding import torch_threads

NICENESS = 5  # where cores are short, training goes first


@dataclass(frozen=True, kw_only=True)
class PlayRequest:
    """One evaluation of a checkpoint.

    Attributes
    ----------
    checkpoint
        Its directory.
    run, step
        Name of the run and optimiser step of the weights.
    environment, targets, episodes, environments, seed, reference
        As in `evaluation.evaluate.evaluate_policy`.  Of several tasks the recipe of the
        checkpoint says all of this; `environment` is empty.
    specifications
        How Gymnasium makes each environment (``EnvSpec.to_json``) whose name is not enough.
    device
        Where the policy runs.
    threads
        CPU threads of torch; sums over more threads differ in last bits.
    """

    checkpoint: str
    run: str
    step: int
    environment: str
    targets: tuple[float, ...]
    episodes: int
    environments: int
    seed: int
    reference: str | None
    specifications: tuple[str, ...]
    device: str
    threads: int


def play(policy: Any, request: PlayRequest) -> dict[str, Any]:
    """Play `policy` as `request` says; its checkpoint and threads are the caller's business.

    Returns
    -------
    dict
        JSON-able: the report, and ``score``, the highest mean return over the targets.
    """
    from gear_offline.evaluation.evaluate import evaluate_policy

    report = evaluate_policy(
        policy,
        environment_id=request.environment,
        targets=request.targets,
        episodes=request.episodes,
        environments=min(request.environments, request.episodes),
        seed=request.seed,
        reference=request.reference,
        quiet=True,
    )
    report = replace(report, run=request.run, step=request.step, device=request.device)
    return {"score": report.best.mean, **finite(report.to_json())}


def play_tasks(model: Any, recipe: Any, request: PlayRequest) -> dict[str, Any]:
    """Play each task of `model` as its `recipe` says; as `play` otherwise.

    Returns
    -------
    dict
        JSON-able: see `gear_offline.evaluation.tasks.TasksReport`.
    """
    from gear_offline.evaluation.tasks import evaluate_tasks
    from gear_offline.models.multitask import tasks_of_config
    from gear_offline.training.policies import task_policy

    report = evaluate_tasks(
        lambda name: task_policy(model, name, recipe, request.device),
        recipe,
        tasks_of_config(model.config),
    ).replace(run=request.run, step=request.step, device=request.device)
    document: dict[str, Any] = finite(report.to_json())
    return document


def play_checkpoint(request: PlayRequest) -> dict[str, Any]:
    """Read the weights of ``request.checkpoint`` and play them; see `play`.

    Torch's random numbers and threads are as before afterwards.

    Raises
    ------
    GearError
        Those of reading a checkpoint and of `gear_offline.evaluation.evaluate.evaluate_policy`.
    """
    import torch

    from gear_offline.training.checkpoint import read_checkpoint
    from gear_offline.training.policies import policy_parts, restore_model

    with torch_threads(request.threads), torch.random.fork_rng(devices=[]):
        found = read_checkpoint(Path(request.checkpoint), training=False)
        if not request.environment:
            return play_tasks(restore_model(found), found.recipe, request)
        return play(policy_parts(found).policy(request.device), request)


def answer(line: str) -> dict[str, Any]:
    """Return what to answer to a request: ``report``, or an error's ``code`` and words."""
    asked: Mapping[str, Any] = json.loads(line)
    lists = {key: tuple(asked[key]) for key in ("targets", "specifications")}
    request = PlayRequest(**{**asked, **lists})
    try:
        _register(request)
        return {"step": request.step, "report": play_checkpoint(request)}
    except GearError as error:
        words = {"what": error.what, "where": error.where, "remedy": error.remedy}
        return {"step": request.step, "code": error.code, **words}


def _register(request: PlayRequest) -> None:
    """Make known what the training process knew of the environments."""
    import gymnasium

    for text in request.specifications:
        spec = gymnasium.envs.registration.EnvSpec.from_json(text)
        gymnasium.registry.setdefault(spec.id, spec)


def main(parent: str) -> None:
    """Answer until the input ends."""
    die_with_parent(int(parent))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the trainer decides
    os.nice(NICENESS)
    # Simulators print what they like; the answers have a way of their own.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        for line in sys.stdin:
            print(json.dumps(answer(line), allow_nan=False), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
