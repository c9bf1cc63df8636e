"""Play a trained policy in its environment and say what it achieved for each asked return.

Every target return gets the same episodes: episode ``e`` is reset with ``seed + e`` whatever the
target, so that a difference between two targets is not a difference of start states.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from gear_offline.core.files import check_new_file, write_error
from gear_offline.core.progress import Progress, say
from gear_offline.core.text import count_text
from gear_offline.dataset.scores import ReferenceScores, reference_scores
from gear_offline.errors import GearError, InputError, given_path
from gear_offline.evaluation.environment_ids import check_no_import, say_version
from gear_offline.evaluation.episode_runner import (
    ActingPolicy,
    RandomPolicy,
    make_environment,
    run_episodes,
    space_sizes,
)
from gear_offline.evaluation.results import (
    EvaluationReport,
    TargetResult,
    evaluation_table,
    keep_earlier,
)
from gear_offline.training.checkpoint_folder import find_checkpoint, run_of, typed_run
from gear_offline.training.seeding import torch_threads

__all__ = ["EvaluationReport", "TargetResult", "evaluate", "evaluate_policy", "random_return"]

FOREIGN = "the environment is not the one that D4RL measured, so the score is indicative only"


def resolve_reference(
    environment_id: str, reference: str | ReferenceScores | None = None
) -> ReferenceScores | None:
    """Return the scores to normalise by.

    A dataset's name (``hopper-medium-v2``) may give the pair, but whether the result can be
    called a D4RL score depends on the environment that was played; Gymnasium's are not D4RL's.

    Raises
    ------
    InputError
        ``REFERENCE_UNKNOWN`` when `reference` is a name without scores.
    """
    own = reference_scores(environment_id)
    if reference is None:
        return own
    found = reference_scores(reference) if isinstance(reference, str) else reference
    if found is None:
        raise InputError(
            "REFERENCE_UNKNOWN",
            f"no reference scores under the name {reference!r}",
            where="evaluate.reference",
            remedy="use a D4RL name such as hopper-medium-v2, or leave it empty",
        )
    exact = own is not None and not own.indicative
    if exact or found.indicative:
        return found
    return replace(found, indicative=True, note=own.note if own is not None else FOREIGN)


def evaluate_policy(
    policy: ActingPolicy,
    *,
    environment_id: str,
    targets: Sequence[float] | float,
    episodes: int,
    environments: int = 20,
    seed: int = 0,
    reference: str | ReferenceScores | None = None,
    max_steps: int | None = None,
    quiet: bool = True,
) -> EvaluationReport:
    """Play `episodes` episodes for each of `targets` and report what came of them.

    Parameters
    ----------
    policy
        Batched policy; it is given up to ``environments * len(targets)`` slots.
    environment_id
        Gymnasium id.
    targets
        Asked returns, in the environment's units; one number is one target.
    episodes
        Episodes of each target; episode e is reset with ``seed + e``.
    environments
        Environments side by side for each target.
    seed
        Reset seed of each target's first episode.
    reference
        D4RL name or scores to normalise by; default: those of the environment's family.
    max_steps
        Cut episodes after so many steps; default: the environment's limit.
    quiet
        No progress.

    Returns
    -------
    EvaluationReport
        A `TargetResult` for each target, in their order.

    Raises
    ------
    InputError
        ``EVALUATE_OPTION``, ``REFERENCE_UNKNOWN``, and those of making the environment.
    UnavailableError
        ``ENVIRONMENT_PACKAGE`` when the simulator is not installed.
    """
    targets = _asked_returns(targets)
    _check_options(episodes, environments, seed)
    scores = resolve_reference(environment_id, reference)
    asked = [float(target) for _ in range(episodes) for target in targets]
    seeds = [seed + episode for episode in range(episodes) for _ in targets]
    started = time.perf_counter()
    what = f"evaluate {environment_id}"
    with Progress(what, total=len(asked), unit="episodes", quiet=quiet) as progress:
        played = run_episodes(
            policy,
            environment_id=environment_id,
            seeds=seeds,
            targets=asked,
            environments=environments * len(targets),
            max_steps=max_steps,
            on_episode=progress.advance,
        )
    results = tuple(
        TargetResult(
            target=float(target),
            returns=played.returns[index :: len(targets)],
            lengths=played.lengths[index :: len(targets)],
            terminated=played.terminated[index :: len(targets)],
        )
        for index, target in enumerate(targets)
    )
    return EvaluationReport(
        environment=environment_id,
        reference=scores,
        results=results,
        seed=seed,
        environments=environments,
        seconds=time.perf_counter() - started,
        versions=_versions(),
    )


def evaluate(
    run: str | Path,
    *,
    targets: Sequence[float] | float | None = None,
    episodes: int | None = None,
    environment: str | None = None,
    checkpoint: str | int | None = None,
    seed: int | None = None,
    device: str = "auto",
    out: str | Path | None = None,
    quiet: bool = False,
) -> EvaluationReport:
    """Evaluate a run; write ``evaluation.json``, the report and its plots into the run directory.

    An ``evaluation.json`` that is there already is kept as ``evaluation-1.json`` and so on.

    Parameters
    ----------
    run
        Run directory, or one checkpoint of it.
    targets, episodes, environment, seed
        Default: the recipe's; 10 episodes if the recipe has 0, which means none while training.
    checkpoint
        ``"last"`` (the default), ``"best"`` (the highest mean return that was seen while training,
        over its targets) or a step number.  Must not contradict `run` when that is a checkpoint.
    device
        ``"auto"``, ``"cpu"`` or ``"cuda"``.
    out
        Write the result to this file instead; the run directory then stays as it is.
    quiet
        No progress, no messages.

    Raises
    ------
    InputError
        ``OUTPUT_EXISTS`` or ``OUTPUT_WRITE`` when `out` cannot be made; those of
        `evaluate_policy`; ``ENVIRONMENT_MISMATCH`` when the environment's sizes are not the
        model's; ``RUN_*`` of finding and reading the checkpoint.
    GearError
        ``OUTPUT_WRITE`` when `out` could not be written; the result is printed.
    UnavailableError
        ``ENVIRONMENT_PACKAGE``; ``DEVICE`` when the asked device is not here.
    """
    from gear_offline.core.device import resolve_device
    from gear_offline.runs.report import write_report
    from gear_offline.training.checkpoint import read_state
    from gear_offline.training.policies import load_policy_parts

    run = given_path(run, "RUN_NOT_FOUND", where="run")
    if out is not None:
        check_new_file(Path(out))
    folder = find_checkpoint(run, checkpoint)
    parts = load_policy_parts(folder)
    step = read_state(folder).step  # now: a run in training may remove it before the end
    recipe = parts.recipe
    settings, where = recipe.evaluate, resolve_device(device)
    environment_id = _chosen(
        environment, settings.environment, "environment", "say it: --environment Hopper-v5"
    )
    if environment is None:
        check_no_import(environment_id, source="the run", option="--environment ")
    check_sizes(parts.model, environment_id)
    say_version(environment_id, quiet=quiet)
    policy = parts.policy(where)
    with torch_threads(recipe.train.threads):
        report = evaluate_policy(
            policy,
            environment_id=environment_id,
            targets=_chosen(targets, settings.targets, "targets", "say them: --targets 3600,1800"),
            # a recipe's 0 means: not while training
            episodes=(settings.episodes or 10) if episodes is None else episodes,
            environments=settings.environments,
            seed=settings.seed if seed is None else seed,
            # another environment is normalised by its own scores
            reference=settings.reference if environment_id == settings.environment else None,
            quiet=quiet,
        )
    home = run_of(folder)
    shown = typed_run(run, home)
    report = replace(report, run=home.name, step=step, device=str(where))
    try:  # what was played must not be lost because it cannot be written or drawn
        if out is not None:
            report.write(Path(out))
            return report
        kept = keep_earlier(home / "evaluation.json")
        report.write(home / "evaluation.json")
        if kept is not None:
            say(f"the result before this one is kept in {shown / kept.name}", quiet=quiet)
        written = shown / write_report(home).name
        say(f"written: {shown / 'evaluation.json'}, {written} and its plots", quiet=quiet)
    except (OSError, GearError) as error:
        if out is not None and isinstance(error, OSError):
            print_report(report, console=Console(stderr=True))
            raise write_error(error, str(out)) from error
        say(f"the result could not be kept in {shown}: {error}")
    return report


def _chosen(value: Any, default: Any, name: str, remedy: str) -> Any:
    if (found := default if value is None else value) is not None:
        return found
    raise InputError(
        "EVALUATE_OPTION",
        f"neither the command nor the run says which {name} to use",
        where=f"evaluate.{name}",
        remedy=remedy,
    )


def check_sizes(model: Any, environment_id: str) -> None:
    """Refuse an environment whose observations or actions are not the model's.

    Raises
    ------
    InputError
        ``ENVIRONMENT_MISMATCH``, and those of making an environment.
    """
    probe = make_environment(environment_id)
    try:
        states, actions, discrete = space_sizes(probe)
    finally:
        probe.close()
    here = (states, actions, discrete)
    inputs = getattr(model.config, "frame_shape", None) or (model.config.state_dim,)
    wanted = (math.prod(inputs), model.config.act_dim, bool(model.discrete))
    if here != wanted:
        kinds = {True: "discrete action", False: "action value"}
        raise InputError(
            "ENVIRONMENT_MISMATCH",
            f"{environment_id} has {count_text(states, 'observation value')} and "
            f"{count_text(actions, kinds[discrete])}, "
            f"the model {wanted[0]:,} and {count_text(wanted[1], kinds[wanted[2]])}",
            where="evaluate.environment",
            remedy="evaluate in the environment that the data came from",
        )


def _asked_returns(targets: Sequence[float] | float) -> tuple[float, ...]:
    """Return `targets` as finite numbers, at least one."""
    try:
        asked = tuple(float(target) for target in np.atleast_1d(np.asarray(targets)))
    except (TypeError, ValueError):
        asked = ()
    if not asked or isinstance(targets, str) or not all(map(math.isfinite, asked)):
        raise InputError(
            "EVALUATE_OPTION",
            f"target returns {targets!r} are not usable",
            where="evaluate.targets",
            remedy="give at least one finite number, e.g. 3600",
        )
    if len(set(asked)) < len(asked):  # every target plays the same episodes
        raise InputError(
            "EVALUATE_OPTION",
            f"target returns {targets!r} name a return twice",
            where="evaluate.targets",
            remedy="name each return once; --episodes asks for more episodes of each",
        )
    return asked


def _check_options(episodes: int, environments: int, seed: int) -> None:
    least = {"episodes": (episodes, 1), "environments": (environments, 1), "seed": (seed, 0)}
    for name, (value, minimum) in least.items():
        if not minimum <= value < 1 << 63:
            raise InputError(
                "EVALUATE_OPTION",
                f"{name} is {value}",
                where=f"evaluate.{name}",
                remedy=f"give a whole number from {minimum} on, below 2^63",
            )


def _versions() -> dict[str, str]:
    found = {}
    for name in ("gymnasium", "mujoco", "torch", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def random_return(
    environment: str, *, episodes: int = 20, seed: int = 0, max_steps: int | None = None
) -> TargetResult:
    """Play uniformly random actions; the baseline that any policy should beat.

    Parameters
    ----------
    environment
        Gymnasium id.
    episodes
        How many; episode e is reset with ``seed + e``.
    seed
        Of the first episode, and of the actions.
    max_steps
        Cut episodes after so many steps; default: the environment's limit.

    Returns
    -------
    TargetResult
        With target NaN: nothing was asked.
    """
    _check_options(episodes, 1, seed)
    probe = make_environment(environment)
    try:
        space_sizes(probe)
        policy = RandomPolicy(probe.action_space, seed=seed)
    finally:
        probe.close()
    played = run_episodes(
        policy,
        environment_id=environment,
        seeds=range(seed, seed + episodes),
        targets=[math.nan] * episodes,
        environments=1,
        max_steps=max_steps,
    )
    return TargetResult(
        target=math.nan,
        returns=played.returns,
        lengths=played.lengths,
        terminated=played.terminated,
    )


def print_report(report: EvaluationReport, *, console: Console | None = None) -> None:
    """Print the report as a table, one row a target."""
    (console or Console()).print(evaluation_table(report))
