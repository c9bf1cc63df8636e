"""`collect`: make a D4RL-layout file of real episodes from policies of known quality."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from gear_offline.collect import ars
from gear_offline.collect.makers import (
    Maker,
    MakerReport,
    mix_makers,
    policy_maker,
    report_of,
    requested_mix,
)
from gear_offline.collect.policies import (
    LinearPolicy,
    is_of_library,
    load_linear_policy,
    save_linear_policy,
    train_with_library,
)
from gear_offline.collect.record import Crew, Episode, Policy
from gear_offline.core.files import check_new_file
from gear_offline.core.system import usable_cores
from gear_offline.core.text import count_text
from gear_offline.core.types import Array
from gear_offline.errors import GearError, InputError
from gear_offline.evaluation.environments import import_module_of, is_atari, say_version
from gear_offline.export import Hdf5Writer
from gear_offline.progress import Progress, say

NOTE = "collected locally; not D4RL data"
PARALLEL_STEPS = 20_000  # below this many steps, starting processes costs more than it brings
MAX_PROCESSES = 16  # a training iteration has no more rollouts to share out
LIBRARY_STEPS = 100_000


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
        policy = None if self.policy_path is None else str(self.policy_path)
        return asdict(self) | {"path": str(self.path), "policy_path": policy}


@dataclass(frozen=True, kw_only=True)
class _Request:
    """The arguments of `collect`, as documented there."""

    environment: str
    out: Path
    policy: str
    mix: Mapping[str, float]
    steps: int
    exact_steps: bool
    processes: int | None
    action_noise: float
    seed: int
    train_steps: int | None
    target: float | None
    gate: float | None
    save_policy: Path | None
    overwrite: bool
    quiet: bool


def collect(
    environment: str,
    out: str | Path,
    *,
    policy: str | Path = "random",
    quality: str | None = None,
    mix: Mapping[str, float] | None = None,
    steps: int = 100_000,
    exact_steps: bool = False,
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

    The same arguments and package versions give the same bytes, for any number of `processes`
    (policies of an RL library excepted: their training may depend on the machine).

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
    """
    request = _Request(
        environment=environment,
        out=Path(out),
        policy=str(policy),
        mix=requested_mix(str(policy), quality, mix),
        steps=steps,
        exact_steps=exact_steps,
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
    _check(request)
    with D4rlWriter(request.out, overwrite=overwrite) as writer:
        import_module_of(environment)
        with Crew(environment, processes=_processes(request)) as crew:
            say_version(environment, quiet=quiet)
            makers, best, used = _prepare(request, crew)
            reports = _record(request, crew, writer, makers)
            _check_gate(request, max(report.mean_return for report in reports))
            report = CollectReport(
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
                # the policy follows its data: a file that is there was recorded with it
                policy_path=request.save_policy if isinstance(best, LinearPolicy) else None,
            )
        writer.finish(_attributes(request, report), _metadata(makers, best))
        if report.policy_path is not None and isinstance(best, LinearPolicy):
            save_linear_policy(best, report.policy_path, environment_id=report.environment_id)
    for part in reports:
        say(part.line(), quiet=quiet)
    return report


def _check(request: _Request) -> None:
    """Refuse what makes no sense before any work."""
    least = {"steps": 1, "seed": 0, "action_noise": 0.0, "train_steps": 1, "processes": 1}
    for name in (*least, "target", "gate"):
        value = getattr(request, name)
        if value is None or least.get(name, -math.inf) <= value < math.inf:
            continue
        need = f"at least {least[name]}" if name in least else "a finite number"
        raise InputError("USAGE", f"got {value}, need {need}", where=name)
    if request.seed >= 1 << 63:
        raise InputError("USAGE", f"got {request.seed}, need less than 2^63", where="seed")
    path = request.save_policy
    if path is None:
        return
    what, remedy = "", "leave it out"
    if request.policy != "ars":
        what = "only a policy trained by 'ars' can be saved"
    elif set(request.mix) == {"random"}:
        what, remedy = "random data train no policy", f"{remedy}, or ask for another quality"
    elif path.absolute() == request.out.absolute():
        what = "the policy and the data would be one file"
        remedy = "give the policy another name, e.g. policy.safetensors"
    if what:
        raise InputError("USAGE", what, where="save_policy", remedy=remedy)
    check_new_file(path, overwrite=request.overwrite)


def _processes(request: _Request) -> int:
    small = request.policy != "ars" and request.steps < PARALLEL_STEPS
    if is_of_library(request.policy) or (request.processes is None and small):
        return 1  # a library's model stays in the process that trained it
    return request.processes or min(usable_cores(), MAX_PROCESSES)


def _prepare(request: _Request, crew: Crew) -> tuple[list[Maker], Policy | None, int]:
    """Train or load; return the makers, the best policy, and the steps that training used."""
    options: dict[str, Any] = {"seed": request.seed, "steps": request.steps}
    if request.policy in ("random", "ars"):
        training = None if set(request.mix) == {"random"} else _train(request, crew)
        makers = mix_makers(
            request.mix,
            facts=crew.facts,
            training=training,
            action_noise=request.action_noise,
            **options,
        )
        if training is None:
            return makers, None, 0
        return makers, training.best.policy, training.steps
    policy: Policy
    used = 0
    if is_of_library(request.policy):
        used = request.train_steps or LIBRARY_STEPS
        say(f"train {request.policy} for {count_text(used, 'step')}", quiet=request.quiet)
        where, seed = request.environment, request.seed
        policy = train_with_library(request.policy, where, steps=used, seed=seed)
    else:
        policy = load_linear_policy(Path(request.policy), crew.facts)
    maker = policy_maker(
        policy, name="policy", number=0, action_noise=request.action_noise, **options
    )
    return [maker], policy, used


def _train(request: _Request, crew: Crew) -> ars.Training:
    options = ars.options_for(request.environment)
    budget = request.train_steps or options.train_steps
    target = request.target if request.target is not None else options.target
    until = "" if target is None else f" until a mean return of {target:g}"
    what = f"train {ars.ALGORITHM}{until}"
    with Progress(what, total=budget, unit="steps", quiet=request.quiet) as progress:
        training = ars.train(
            crew,
            seed=request.seed,
            steps=budget,
            options=options,
            target=target,
            action_noise=request.action_noise,
            on_progress=progress.advance,
        )
    best, attempts = training.best, count_text(training.attempts, "attempt")
    say(
        f"trained {count_text(training.steps, 'step')} in {attempts}: best mean return "
        f"{best.mean_return:.0f}",
        quiet=request.quiet,
    )
    _check_gate(request, best.mean_return)
    return training


def _check_gate(request: _Request, reached: float) -> None:
    if request.gate is not None and not reached >= request.gate:
        raise GearError(
            "USAGE",
            f"best maker's mean return is {reached:.1f}, below the gate of {request.gate:g};"
            " no file was written",
            where=request.environment,
            remedy="give it more train_steps or another seed, or lower the gate",
        )


def _record(
    request: _Request, crew: Crew, writer: D4rlWriter, makers: list[Maker]
) -> list[MakerReport]:
    """Write every maker's episodes; the last one makes up what the others fell short of."""
    reports, what = [], f"record {request.out.name}"
    with Progress(what, total=request.steps, unit="steps", quiet=request.quiet) as progress:
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
            reports.append(report_of(maker, writer.returns[first:], writer.steps - before))
    if writer.steps < request.steps:  # only rollouts of a training come to an end
        say(
            f"warning: {count_text(writer.steps, 'step')} in place of {request.steps:,}: training "
            "had no more rollouts; let it train longer (--train-steps), or take another quality",
            quiet=request.quiet,
        )
    return reports


def _attributes(request: _Request, report: CollectReport) -> dict[str, Any]:
    """Return the attributes of the file; no times or paths, so that equal runs are equal bytes."""
    atari = {"ale_py": _version("ale-py")} if is_atari(request.environment) else {}
    return {
        "env_id": report.environment_id,
        "algorithm": _algorithms(report.makers),
        "note": NOTE,
        "seed": request.seed,
        "train_steps": report.train_steps,
        "steps": report.steps,
        "episodes": report.episodes,
        "mean_return": report.mean_return,
        "std_return": report.std_return,
        "makers": [asdict(maker) for maker in report.makers],
        "gymnasium": _version("gymnasium"),
        "mujoco": _version("mujoco"),
        "numpy": _version("numpy"),
        "gear_offline": _version("gear-offline"),
        **atari,
    }


def _metadata(makers: list[Maker], best: Policy | None) -> dict[str, Array | str]:
    """Return algorithm and weights: of the best policy, and of each maker that has one."""
    content: dict[str, Array | str] = {"algorithm": _algorithms(makers)}
    named = [("policy", best)] + [(f"makers/{maker.name}", maker.policy) for maker in makers]
    for prefix, policy in named:
        if isinstance(policy, LinearPolicy):
            content[f"{prefix}/weight"] = policy.weight
            content[f"{prefix}/observation_mean"] = policy.mean
            content[f"{prefix}/observation_std"] = policy.std
    return content


def _algorithms(makers: list[Maker] | tuple[MakerReport, ...]) -> str:
    return "; ".join(dict.fromkeys(maker.algorithm for maker in makers))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


class D4rlWriter(Hdf5Writer):
    """Writes episodes one after the other; leaving it without `finish` removes everything."""

    def __init__(self, path: Path, *, overwrite: bool = False) -> None:
        super().__init__(path, overwrite=overwrite)
        self.steps = 0
        self.makers: list[int] = []
        self.seeds: list[int] = []
        self.returns: list[float] = []

    def append(self, episode: Episode, *, rows: int | None = None) -> None:
        """Add `episode`, or only its first `rows` rows: then its last row bears no flag."""
        steps = episode.steps if rows is None else min(rows, episode.steps)
        part = {name: column[:steps] for name, column in episode.columns.items()}
        self.steps += steps
        self.makers.append(episode.maker)
        self.seeds.append(episode.reset_seed)
        self.returns.append(float(part["rewards"].sum(dtype=np.float64)))
        self.hold(part, steps)

    def finish(self, attributes: Mapping[str, Any], metadata: Mapping[str, Array | str]) -> None:
        """Complete the file, with `metadata` below ``metadata/``, and give it its name."""
        details: dict[str, Array | str] = {
            "episode_maker": np.array(self.makers, dtype=np.int32),
            "episode_reset_seed": np.array(self.seeds, dtype=np.int64),
            **metadata,
        }
        self.publish(attributes, {f"metadata/{name}": value for name, value in details.items()})
