"""`collect`: make a D4RL-layout file of real episodes from policies of known quality."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gear_offline.collect import ars, stable_baselines
from gear_offline.collect.ars_options import options_for
from gear_offline.collect.environment import EnvironmentFacts, package_version
from gear_offline.collect.makers import (
    Maker,
    MakerReport,
    mix_makers,
    policy_maker,
    report,
)
from gear_offline.collect.policy import (
    LinearPolicy,
    Policy,
    load_linear_policy,
    save_linear_policy,
)
from gear_offline.collect.request import Request, check_request, requested_mix
from gear_offline.collect.workers import Crew
from gear_offline.collect.writer import D4rlWriter
from gear_offline.core.progress import Progress, say
from gear_offline.core.text import count_text
from gear_offline.errors import GearError
from gear_offline.evaluation.environments import import_module_of, is_atari, say_version

NOTE = "collected locally; not D4RL data"


@dataclass(frozen=True, kw_only=True)
class CollectReport:
    """What `collect` has written.

    Attributes
    ----------
    path
        The file.
    environment_id
        Gymnasium id, with the version that was taken.
    steps, episodes
        Rows and episodes in the file.
    mean_return, std_return, min_return, max_return
        Over its episodes (a partial last one included), from the stored rewards.
    makers
        One entry a part.
    train_steps
        Environment steps that training used; 0 without one.
    policy_path
        Where the best policy was saved, if it was.
    """

    path: Path
    environment_id: str
    steps: int
    episodes: int
    mean_return: float
    std_return: float
    min_return: float
    max_return: float
    makers: tuple[MakerReport, ...]
    train_steps: int = 0
    policy_path: Path | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name, JSON-able."""
        fields = dict(vars(self))
        fields["path"] = str(self.path)
        fields["policy_path"] = None if self.policy_path is None else str(self.policy_path)
        fields["makers"] = [maker.to_json() for maker in self.makers]
        return fields


def collect(
    environment: str,
    out: str | Path,
    *,
    policy: str | Path = "random",
    quality: str | None = None,
    mix: Mapping[str, float] | None = None,
    steps: int = 100_000,
    exact_steps: bool = False,
    environments: int = 8,
    processes: int | None = None,
    action_noise: float = 0.0,
    seed: int = 0,
    train_steps: int | None = None,
    target: float | None = None,
    gate: float | None = None,
    save_policy: str | Path | None = None,
    overwrite: bool = False,
    quiet: bool = False,
) -> CollectReport:
    """Record episodes of a Gymnasium environment in a D4RL-layout HDF5 file.

    The same arguments and package versions give the same bytes, for any `processes` and
    `environments` (policies of an RL library excepted: their training may depend on the machine).

    Parameters
    ----------
    environment
        Gymnasium id, e.g. ``"Hopper-v5"``.
    out
        File to write; appears only when complete.
    policy
        ``"random"``; ``"ars"``, a linear policy trained on the spot; ``"sb3:PPO"``, ``"sbx:TQC"``
        and so on, trained on the spot by an RL library; or a file that `save_policy` made.
    quality
        With ``"ars"``: ``expert`` (default), ``medium``, ``replay``, ``medium-expert``, ``mixed``.
    mix
        In place of a quality: parts and their shares of the steps, e.g.
        ``{"replay": 1, "level:0.5": 1, "expert": 2}``.
    steps
        Record whole episodes until there are at least so many steps.
    exact_steps
        Cut the last episode at `steps`, without a flag on its last row, as D4RL's files are.
    environments
        Environments that act as one batch in each process, at most 4,096.
    processes
        Default: the cores that may be used, or 1 for small work.
    action_noise
        Gaussian noise on the policies' actions, in half ranges of the action; with discrete
        actions the probability of a random one.  0.1 ruins a linear Hopper; use up to 0.02.
    seed
        Names every random stream.
    train_steps
        Environment steps of training.  The iteration that reaches them is finished, so ARS uses up
        to 2 N episodes more (`ArsOptions.directions`).  Steps, not seconds: time would make the
        result depend on the machine.
    target
        With ``"ars"``: stop training at this mean return.
    gate
        Least mean return that the best maker must have recorded; else there is no file.
    save_policy
        With ``"ars"``: write the best policy here (safetensors), after `out` is complete.
    overwrite
        Replace `out` and `save_policy`.
    quiet
        No progress on stderr.

    Returns
    -------
    CollectReport
        What is in the file, and who made it.

    Raises
    ------
    InputError
        ``COLLECT_OPTION``, ``COLLECT_POLICY``, ``COLLECT_MIX``, ``COLLECT_ENVIRONMENT``,
        ``ENVIRONMENT_UNKNOWN``, ``POLICY_FILE``, ``POLICY_ENVIRONMENT``, ``OUTPUT_EXISTS``,
        ``OUTPUT_WRITE``.
    UnavailableError
        ``ENVIRONMENT_PACKAGE``, ``COLLECT_LIBRARY``.
    GearError
        ``OUTPUT_WRITE``; ``COLLECT_GATE`` when no maker is good enough,
        ``COLLECT_WORKER``.
    """
    request = check_request(
        environment=environment,
        out=Path(out),
        policy=str(policy),
        mix=requested_mix(str(policy), quality, mix),
        steps=steps,
        exact_steps=exact_steps,
        environments=environments,
        processes=processes,
        action_noise=action_noise,
        seed=seed,
        train_steps=train_steps,
        target=target,
        gate=gate,
        save_policy=None if save_policy is None else Path(save_policy),
        overwrite=overwrite,
        quiet=quiet,
    )
    import_module_of(request.environment)
    with (
        D4rlWriter(request.out, overwrite=request.overwrite) as writer,
        Crew(
            request.environment,
            environments=request.environments,
            processes=request.processes,
        ) as crew,
    ):
        say_version(request.environment, quiet=request.quiet)
        makers, best, used = _prepare(request, crew)
        reports = _record(request, crew, writer, makers)
        _check_gate(request, max(r.mean_return for r in reports))
        attributes = _attributes(request, crew.facts, writer, makers, reports, used)
        writer.finish(attributes, _metadata(makers, best))
        saved = None  # the policy follows its data: a file that is there was recorded with it
        if request.save_policy is not None and isinstance(best, LinearPolicy):
            saved = request.save_policy
            save_linear_policy(best, saved, environment_id=crew.facts.environment_id)
        for part in reports:
            say(part.line(), quiet=request.quiet)
        return CollectReport(
            path=request.out,
            environment_id=crew.facts.environment_id,
            steps=writer.steps,
            episodes=len(writer.returns),
            mean_return=float(np.mean(writer.returns)),
            std_return=float(np.std(writer.returns)),
            min_return=min(writer.returns),
            max_return=max(writer.returns),
            makers=tuple(reports),
            train_steps=used,
            policy_path=saved,
        )


def _prepare(request: Request, crew: Crew) -> tuple[list[Maker], Policy | None, int]:
    """Train or load; return the makers, the best policy, and the steps that training used."""
    if request.policy == "ars":
        training = None
        if set(request.mix) != {"random"}:
            training = _train(request, crew)
        makers = mix_makers(
            request.mix,
            facts=crew.facts,
            training=training,
            steps=request.steps,
            seed=request.seed,
            action_noise=request.action_noise,
        )
        if training is None:
            return makers, None, 0
        return makers, training.best.policy, training.steps
    if request.policy == "random":
        makers = mix_makers(
            request.mix,
            facts=crew.facts,
            training=None,
            steps=request.steps,
            seed=request.seed,
            action_noise=0.0,
        )
        return makers, None, 0
    policy: Policy
    used = 0
    if request.trained_elsewhere:
        used = request.train_steps or 100_000
        say(f"train {request.policy} for {count_text(used, 'step')}", quiet=request.quiet)
        policy = stable_baselines.train(
            request.policy, request.environment, steps=used, seed=request.seed
        )
    else:
        policy = load_linear_policy(Path(request.policy), crew.facts)
    maker = policy_maker(
        policy,
        name="policy",
        seed=request.seed,
        number=0,
        steps=request.steps,
        action_noise=request.action_noise,
    )
    return [maker], policy, used


def _train(request: Request, crew: Crew) -> ars.Training:
    options = options_for(request.environment)
    budget = request.train_steps or options.train_steps
    target = request.target if request.target is not None else options.target
    until = "" if target is None else f" until a mean return of {target:g}"
    what = f"train {ars.ALGORITHM}{until}"
    with Progress(what, total=budget, quiet=request.quiet) as progress:
        training = ars.train(
            crew,
            seed=request.seed,
            steps=budget,
            options=options,
            target=target,
            action_noise=request.action_noise,
            on_progress=lambda steps, snapshot: progress.advance(steps),
        )
    best = training.best
    say(
        f"trained {count_text(training.steps, 'step')} in"
        f" {count_text(training.attempts, 'attempt')}: best mean return"
        f" {best.mean_return:.0f}",
        quiet=request.quiet,
    )
    _check_gate(request, best.mean_return)
    return training


def _check_gate(request: Request, reached: float) -> None:
    if request.gate is not None and not reached >= request.gate:
        raise GearError(
            "COLLECT_GATE",
            f"best maker's mean return is {reached:.1f}, below the gate of {request.gate:g};"
            " no file was written",
            where=request.environment,
            remedy="give it more train_steps or another seed, or lower the gate",
        )


def _record(
    request: Request, crew: Crew, writer: D4rlWriter, makers: list[Maker]
) -> list[MakerReport]:
    """Write every maker's episodes; the last one makes up what the others fell short of."""
    reports = []
    what = f"record {request.out.name}"
    with Progress(what, total=request.steps, quiet=request.quiet) as progress:
        for maker in makers:
            first, before = len(writer.returns), writer.steps
            if before >= request.steps:
                break  # earlier makers' last episodes have used this one's share
            wanted = request.steps if maker is makers[-1] else before + maker.steps
            for episode in crew.record(maker.plans):
                room = request.steps - writer.steps
                rows = min(room, episode.steps) if request.exact_steps else episode.steps
                writer.append(episode, rows=rows)
                progress.advance(rows)
                if writer.steps >= min(wanted, request.steps):
                    break
            reports.append(report(maker, writer.returns[first:], writer.steps - before))
    if writer.steps < request.steps:  # only rollouts of a training come to an end
        say(
            f"warning: {count_text(writer.steps, 'step')} in place of {request.steps:,}: training "
            "had no more rollouts; let it train longer (--train-steps), or take another quality",
            quiet=request.quiet,
        )
    return reports


def _attributes(
    request: Request,
    facts: EnvironmentFacts,
    writer: D4rlWriter,
    makers: list[Maker],
    reports: list[MakerReport],
    train_steps: int,
) -> dict[str, Any]:
    """Return the attributes of the file; no times or paths, so that equal runs are equal bytes."""
    return {
        "env_id": facts.environment_id,
        "algorithm": "; ".join(dict.fromkeys(maker.algorithm for maker in makers)),
        "note": NOTE,
        "seed": request.seed,
        "train_steps": train_steps,
        "steps": writer.steps,
        "episodes": len(writer.returns),
        "mean_return": float(np.mean(writer.returns)),
        "std_return": float(np.std(writer.returns)),
        "makers": [r.to_json() for r in reports],
        "gymnasium": package_version("gymnasium"),
        "mujoco": package_version("mujoco"),
        "numpy": package_version("numpy"),
        "gear_offline": package_version("gear-offline"),
        **({"ale_py": package_version("ale-py")} if is_atari(request.environment) else {}),
    }


def _metadata(makers: list[Maker], best: Policy | None) -> dict[str, npt.NDArray[Any] | str]:
    """Return algorithm and weights: of the best policy, and of each maker that has one."""
    content: dict[str, npt.NDArray[Any] | str] = {
        "algorithm": "; ".join(dict.fromkeys(maker.algorithm for maker in makers))
    }
    named = [("policy", best)] + [(f"makers/{m.name}", m.policy) for m in makers]
    for prefix, policy in named:
        if isinstance(policy, LinearPolicy):
            content[f"{prefix}/weight"] = policy.weight
            content[f"{prefix}/observation_mean"] = policy.mean
            content[f"{prefix}/observation_std"] = policy.std
    return content
