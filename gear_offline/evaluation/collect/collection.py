"""`collect`: make a D4RL-layout file of real episodes from policies of known quality."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import count, repeat
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from gear_offline.config.arguments import check_arguments
from gear_offline.config.environment_options import typed_options
from gear_offline.core.parts import admit, part_name
from gear_offline.core.progress import Progress
from gear_offline.core.system import usable_cores, versions
from gear_offline.core.text import Document, count_text, say, short
from gear_offline.core.types import Array
from gear_offline.data.dataset.dataset import HISTORIES
from gear_offline.data.dataset.schema import is_lost
from gear_offline.data.export import Hdf5Writer, new_hdf5
from gear_offline.errors import GearError, InputError, given_path
from gear_offline.evaluation.collect import ars
from gear_offline.evaluation.collect.policies import (
    LEVELS,
    LinearPolicy,
    RandomPolicy,
    play_policy,
    quality_parts,
    train_with_library,
)
from gear_offline.evaluation.collect.q_learning import ALGORITHM, plan_histories
from gear_offline.evaluation.collect.record import (
    LEARN,
    LEARNER,
    RECORD,
    Crew,
    EpisodePolicy,
    Plan,
    check_noise,
    episode_plan,
    reset_seed,
)
from gear_offline.evaluation.environments import is_atari, say_version

NOTE = "collected locally; not D4RL data"
PARALLEL_STEPS = 20_000  # below this many steps, starting processes costs more than it brings
MAX_PROCESSES = 16  # a training iteration has no more rollouts to share out
NARROWED = ("observations", "next_observations", "rewards")  # float64 is stored as float32
LIBRARY_STEPS = 100_000
REPLAY = f"{ars.ALGORITHM}, training rollouts"


@dataclass(frozen=True, kw_only=True)
class Recorded(Document):
    """Episodes that were recorded; returns are undiscounted sums of the stored rewards."""

    episodes: int  # a partial last one included
    steps: int  # rows in the file
    mean_return: float
    std_return: float
    min_return: float
    max_return: float

    @classmethod
    def of(cls, episodes: Sequence[_RecordedEpisode], **facts: Any) -> Self:
        returns = [episode.total for episode in episodes]
        return cls(
            episodes=len(episodes),
            steps=sum(episode.steps for episode in episodes),
            mean_return=float(np.mean(returns)),
            std_return=float(np.std(returns)),
            min_return=min(returns),
            max_return=max(returns),
            **facts,
        )


@dataclass(frozen=True, kw_only=True)
class MakerReport(Recorded):
    """The recordings of one maker."""

    name: str  # the part of the quality
    algorithm: str  # what its policy was made with
    action_noise: float  # as asked of `collect`


@dataclass(frozen=True, kw_only=True, repr=False)
class CollectReport(Recorded):
    """The file that `collect` wrote."""

    path: Path  # the file
    environment_id: str  # Gymnasium id, with the version that was taken
    makers: tuple[MakerReport, ...]  # one entry a part
    train_steps: int = 0  # environment steps that training used; 0 without one

    def __repr__(self) -> str:
        size = f"{count_text(self.episodes, 'episode')}, {count_text(self.steps, 'step')}"
        returns = f"returns {short(self.min_return)} to {short(self.max_return)}"
        return f"CollectReport({str(self.path)!r}: {self.environment_id}, {size}, {returns})"


@check_arguments()
def collect(
    environment: str | Callable[..., Any],
    out: str | os.PathLike[str],
    *,
    environment_options: Mapping[str, Any] | None = None,
    policy: str = "random",
    quality: str | None = None,
    steps: int = 100_000,
    exact_steps: bool = False,
    processes: int | None = None,
    action_noise: float = 0.0,
    seed: int = 0,
    train_steps: int | None = None,
    gate: float | None = None,
    histories: int | None = None,
    overwrite: bool = False,
    quiet: bool = False,
) -> CollectReport:
    """Record episodes of a Gymnasium environment in a D4RL-layout HDF5 file.

    The same arguments and package versions give the same bytes, for any number of `processes`
    (policies of an RL library excepted: their training may depend on the machine).

    Parameters
    ----------
    environment
        Gymnasium id, e.g. ``"Hopper-v5"``, FILE.py:Name, or a class or function.
    environment_options
        What `gymnasium.make` takes besides, such as ``{"max_episode_steps": 40}``; it is recorded.
    out
        File to write; appears only when complete.
    policy
        ``"random"``; ``"ars"``, a linear policy trained on the spot; ``"sb3:PPO"``, ``"sbx:TQC"``
        and so on, trained on the spot by an RL library; ``"q_learning"``, tables that learn while
        they are recorded (`histories`); or ``"play"``, which an environment brings
        (``play_policy()``).
    quality
        With ``"ars"``: ``expert`` (default), ``medium``, ``replay``, ``medium-expert``, ``mixed``.
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
    gate
        Least mean return that the best maker must have recorded; else there is no file.
    histories
        Learners that are recorded, each with random streams of its own, with its number as the
        column ``learner``: its history.  With ``"ars"``, and no quality: each is trained for
        `train_steps`, and its rollouts are evenly spaced from the first to its best policy.
        With ``"q_learning"``: all it did, from its first step on, in whole episodes of at least
        `steps` / `histories` steps.
    overwrite
        Replace `out`.
    quiet
        No progress on stderr.

    Returns
    -------
    CollectReport
        What is in the file, and who made it.
    """
    arguments: dict[str, Any] = {"policy": policy, "quality": quality, "steps": steps, "seed": seed}
    arguments |= {"train_steps": train_steps, "action_noise": action_noise, "histories": histories}
    text = json.dumps(arguments)
    learns = policy in ("ars", "q_learning")
    if histories is not None and (not learns or quality is not None or exact_steps):
        problem, remedy = "histories are what learners did", "use policy ars or q_learning, and no "
        raise InputError("USAGE", problem, "histories", f"{remedy}quality, of whole episodes")
    if policy == "q_learning" and (histories is None or train_steps is not None):
        problem, remedy = "all that q_learning does is recorded", "say histories and steps, and no "
        raise InputError("USAGE", problem, "policy", f"{remedy}train_steps")
    out, shares = given_path(out, "OUTPUT_WRITE", where="out"), quality_parts(policy, quality)
    environment_id: str = part_name(environment)
    admit([environment_id])
    for name, number, least in (
        ("steps", steps, 1),
        ("processes", processes, 1),
        ("train_steps", train_steps, 1),
        ("histories", histories, 1),
        ("action_noise", action_noise, 0.0),
        ("seed", seed, 0),
        ("gate", gate, -math.inf),
    ):
        fits = isinstance(number, int | np.integer if name == "seed" else int | float | np.number)
        if number is not None and not (fits and least <= number < 1 << 63):
            need = f"need a number, {least} <= {name} < 2^63"
            raise InputError("USAGE", f"got {number!r}, {need}", where=name)
    idle = {"action_noise": policy == "random" and action_noise > 0}
    idle["train_steps"] = policy in ("random", "play") and train_steps is not None
    for name in (name for name, is_given in idle.items() if is_given):
        raise InputError("USAGE", f"policy {policy} makes no use of it", name, "leave it out")
    of_library = ":" in policy
    if of_library or (processes is None and policy != "ars" and steps < PARALLEL_STEPS):
        processes = 1  # a library's model stays in the process that trained it
    with new_hdf5(out, overwrite=overwrite) as writer:
        how, several = typed_options(environment_options), min(usable_cores(), MAX_PROCESSES)
        with Crew(environment_id, how, processes=processes or several) as crew:
            check_noise(crew.facts, action_noise)
            say_version(environment_id, quiet=quiet)
            source: ars.Training | EpisodePolicy
            plans: Iterator[Plan]
            used, best, learners = 0, None, list[ars.Training]()
            share = -(-steps // (histories or 1))
            if "random" in shares:
                source = RandomPolicy(crew.facts.low, crew.facts.high, crew.facts.choices)
            elif policy == "ars":
                options = ars.options_for(environment_id, train_steps=train_steps)
                seeds = [seed]
                if histories is not None:
                    seeds = [reset_seed(seed, LEARN, number) for number in range(histories)]
                    each = count_text(options.train_steps, "step")
                    text = f"trains {count_text(histories, 'learner')} for {each} each"
                    say(f"{text}: --train-steps takes fewer", quiet=quiet)
                learners = [
                    ars.train(crew, options, each, action_noise=action_noise, quiet=quiet)
                    for each in seeds
                ]
                plans = (
                    replace(plan, learner=number)
                    for number, learner in enumerate(learners)
                    for plan in learner.replay(share)
                )
                source = max(learners, key=lambda learner: learner.best.mean_return)
                used, best = sum(each.steps for each in learners), source.best.policy
                _check_gate(gate, source.best.mean_return, environment_id, policy)
            elif policy == "q_learning":
                plans = iter(plan_histories(crew.facts, histories or 0, seed, share, action_noise))
            elif policy == "play":
                source = play_policy(environment_id, how)
            else:
                used = train_steps or LIBRARY_STEPS
                say(f"train {policy} for {count_text(used, 'step')}", quiet=quiet)
                source = train_with_library(policy, environment_id, how, steps=used, seed=seed)
            if histories is None:
                makers, most = _makers(shares, source, steps, seed, action_noise), steps
            else:  # each to its end
                description = ("replay", REPLAY, steps, 0.0)
                if policy == "q_learning":
                    description = ("policy", ALGORITHM, steps, action_noise)
                makers, most = [_Maker(*description, None, plans)], sys.maxsize
            with Progress(f"record {out.name}", total=steps, unit="steps", quiet=quiet) as progress:
                _record(crew, writer, makers, most, progress, exact=exact_steps)
        report = CollectReport.of(
            [episode for maker in makers for episode in maker.recorded],
            path=out,
            environment_id=crew.facts.environment_id,
            makers=tuple(maker.report() for maker in makers if maker.recorded),
            train_steps=used,
        )
        reached = max(maker.mean_return for maker in report.makers)
        _check_gate(gate, reached, environment_id, policy)
        options_used = {"env_options": json.dumps(how)} if how else {}
        if histories is not None:
            options_used[HISTORIES] = LEARNER
        facts = {"asked": text, **_attributes(report, seed), **options_used}
        writer.describe(facts, _metadata(makers, best))
    if report.steps < steps:  # only rollouts of a training come to an end
        say(
            f"warning: {count_text(report.steps, 'step')} in place of {steps:,}: training "
            "had no more rollouts; let it train longer (--train-steps), or take another quality"
        )
    for maker in report.makers:
        counts = f"{count_text(maker.episodes, 'episode')}, {count_text(maker.steps, 'step')}"
        returns = f"{maker.mean_return:.0f} ± {maker.std_return:.0f}"
        ends = f"({maker.min_return:.0f} to {maker.max_return:.0f})"
        say(f"{maker.name}: {counts}, return {returns} {ends}", quiet=quiet)
    return report


def _check_gate(gate: float | None, reached: float, environment: str, policy: str) -> None:
    if gate is not None and not reached >= gate:
        problem = f"best maker's mean return is {reached:.1f}, below the gate of {gate:g}"
        remedies = dict.fromkeys(("random", "play"), "take another policy")
        remedies["q_learning"] = "give it more steps or another seed"
        remedy = remedies.get(policy, "give it more train_steps or another seed")
        problem += "; no file was written"
        raise GearError("USAGE", problem, environment, f"{remedy}, or lower the gate")


class _RecordedEpisode(NamedTuple):
    """An episode in the file."""

    reset_seed: int
    steps: int
    total: float  # of the stored rewards


@dataclass(frozen=True, eq=False)
class _Maker:
    """One part of a file."""

    name: str  # random, policy or a part of a quality
    algorithm: str  # what made its policy
    steps: int  # that it should give
    action_noise: float
    policy: EpisodePolicy | None  # None for replay, whose every episode has another one
    plans: Iterator[Plan]  # endless, except for replay
    recorded: list[_RecordedEpisode] = field(default_factory=list)

    def report(self) -> MakerReport:
        facts = {name: getattr(self, name) for name in ("name", "algorithm", "action_noise")}
        return MakerReport.of(self.recorded, **facts)


def _makers(
    shares: Mapping[str, float],
    source: ars.Training | EpisodePolicy,
    steps: int,
    seed: int,
    action_noise: float,
) -> list[_Maker]:
    """Return the makers of parts; action noise is for policies, not for random or replayed ones."""
    makers = []
    for number, (name, share) in enumerate(shares.items()):
        maker_steps, policy = max(1, round(share * steps)), source
        if isinstance(policy, ars.Training):
            if name == "replay":
                plans = policy.replay(maker_steps)
                makers.append(_Maker(name, REPLAY, maker_steps, 0.0, None, plans))
                continue
            policy = policy.at_level(LEVELS[name]).policy
        noise = 0.0 if name == "random" else action_noise
        paths = ((seed, RECORD, number, episode) for episode in count())
        plans = map(episode_plan, repeat(policy), paths, repeat(noise))
        makers.append(_Maker(name, policy.algorithm, maker_steps, noise, policy, plans))
    return makers


def _record(
    crew: Crew,
    writer: Hdf5Writer,
    makers: Sequence[_Maker],
    steps: int,
    progress: Progress,
    *,
    exact: bool,
) -> None:
    """Write every maker's episodes; the last one makes up what the others fell short of."""
    done, lost = 0, set[str]()
    for maker in makers:
        target_steps = steps if maker is makers[-1] else min(steps, done + maker.steps)
        # an earlier maker's last episode may have used this one's share
        for episode in crew.play(maker.plans) if done < steps else ():
            rows = min(steps - done, episode.steps) if exact else episode.steps
            columns = episode.columns()
            floats = {
                n for n in columns if n.split("/")[0] in NARROWED and columns[n].dtype == "f8"
            }
            lossy = {name for name in floats - lost if is_lost(columns[name], np.float32)}
            if not done:  # the first episode decides
                wide = lossy
            if lossy:
                how = "as float64, because float32" if lossy <= wide else "as float32, which"
                say(f"{', '.join(sorted(lossy))}: stored {how} does not tell steps apart")
            lost |= lossy
            # where it is cut its last row bears no flag
            stored = {name: column[:rows] for name, column in columns.items()}
            stored |= {name: stored[name].astype(np.float32) for name in floats - wide}
            writer.write(stored)
            total = float(stored["rewards"].sum(dtype=np.float64))
            maker.recorded.append(_RecordedEpisode(episode.reset_seed, rows, total))
            progress.advance(rows)
            done += rows
            if done >= target_steps:
                break


def _attributes(report: CollectReport, seed: int) -> dict[str, Any]:
    """Return the attributes of the file; no times or paths, so that equal runs are equal bytes."""
    atari = ["ale_py"] if is_atari(report.environment_id) else []
    packages = ["gymnasium", "mujoco", "numpy", "gear_offline", *atari]
    facts = asdict(report)
    names = ("train_steps", "steps", "episodes", "mean_return", "std_return", "makers")
    return {
        "env_id": report.environment_id,
        "algorithm": _algorithms(report.makers),
        "note": NOTE,
        "seed": seed,
        **{name: facts[name] for name in names},
        **(dict.fromkeys(packages, "") | versions(*packages)),
    }


def _metadata(makers: Sequence[_Maker], best: EpisodePolicy | None) -> dict[str, Array | str]:
    """Return the file's other contents: the maker of each episode, and the weights."""
    counts = [len(maker.recorded) for maker in makers]
    seeds = [episode.reset_seed for maker in makers for episode in maker.recorded]
    content: dict[str, Array | str] = {
        "episode_maker": np.repeat(np.arange(len(makers), dtype=np.int32), counts),
        "episode_reset_seed": np.array(seeds, np.int64),
        "algorithm": _algorithms(makers),
    }
    policies = [("policy", best)] + [(f"makers/{maker.name}", maker.policy) for maker in makers]
    for prefix, policy in policies:
        if isinstance(policy, LinearPolicy):
            content[f"{prefix}/weight"] = policy.weight
            content[f"{prefix}/observation_mean"] = policy.mean
            content[f"{prefix}/observation_std"] = policy.std
    return {f"metadata/{name}": value for name, value in content.items()}


def _algorithms(makers: Sequence[_Maker | MakerReport]) -> str:
    return "; ".join(dict.fromkeys(maker.algorithm for maker in makers))
