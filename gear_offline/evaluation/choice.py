"""Whether a run's evaluations are played beside training, where, and with how many processes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gear_offline.config.recipe import Recipe
from gear_offline.config.tasks import environments_of
from gear_offline.core.system import usable_cores
from gear_offline.core.text import count_text
from gear_offline.distributed.world import World
from gear_offline.errors import UnavailableError
from gear_offline.evaluation.atari import is_atari

MOST_WORKERS = 8
CPU_PARAMETERS = 5_000_000  # a larger model takes hours for an evaluation on CPU cores
# A core of an AMD EPYC did 68e9 a second (2 a parameter and token) with the paper's model acting in
# 40 environments, 2026-11-21.
CORE_FLOPS = 60e9
THREADS = 4  # of a process that evaluates beside a GPU: an evaluation should not take minutes
LONGEST_EPISODE = 1000  # steps, for environments that name no limit


@dataclass(frozen=True, kw_only=True)
class EvaluationChoice:
    """How evaluations are played.

    Attributes
    ----------
    beside
        In processes of their own.
    reason
        Why, a clause to print.
    device
        Where the policy runs.
    workers, threads
        Processes, and torch's CPU threads in each.
    specifications
        What another process needs to make the environments, beyond their names.
    most_seconds
        What an evaluation takes a process if every episode lasts as long as it may; 0 if that does
        not matter to the choice.
    otherwise
        What to do if `most_seconds` turn out to be long beside the training.
    """

    beside: bool
    reason: str
    device: torch.device
    workers: int = 1
    threads: int = 1
    specifications: tuple[str, ...] = ()
    most_seconds: float = 0.0
    otherwise: EvaluationChoice | None = None

    def is_too_slow(self, interval_seconds: float) -> bool:
        """Whether evaluations beside would come slower than half as fast as they are due."""
        return self.most_seconds / self.workers > 2 * interval_seconds


def choose_evaluation(
    recipe: Recipe, device: torch.device, world: World, *, parameters: int, neighbours: int = 1
) -> EvaluationChoice:
    """Decide for a run that trains on `device`.

    Parameters
    ----------
    parameters
        Of the model.
    neighbours
        Runs that share the cores that training leaves.

    Raises
    ------
    UnavailableError
        ``EVALUATE_BESIDE`` if the recipe insists and it is not possible.
    """
    settings, train = recipe.evaluate, recipe.train
    asked = settings.device
    here = device if asked == "auto" else torch.device(asked)
    there = torch.device("cpu") if asked == "auto" else torch.device(asked)
    if there.type == "cuda" and there.index is None and device.type == "cuda":
        here = there = device

    def in_place(reason: str) -> EvaluationChoice:
        threads = torch.get_num_threads()
        return EvaluationChoice(beside=False, reason=reason, device=here, threads=threads)

    if not environments_of(recipe) or settings.episodes == 0:
        return in_place("none are asked for")
    if settings.background == "off":
        return in_place("evaluate.background=off")
    ranks = world.nodes.count(world.nodes[world.rank])
    busy = ranks * (1 if device.type == "cuda" else torch.get_num_threads())
    spare = usable_cores() - busy
    found = [_elsewhere(name) for name in environments_of(recipe)]
    problem = next((why for _, why in found if why), "")
    if not problem and settings.background == "auto":
        every = train.evaluate_every
        if every is None or every >= train.steps:
            problem = "nothing is evaluated before the end"
        elif spare < 1:
            problem = "training uses all cores"
        elif there.type == "cpu" and device.type == "cuda" and parameters > CPU_PARAMETERS:
            problem = (
                f"{count_text(parameters, 'parameter')} are slow on CPU cores; "
                "evaluate.device=cuda evaluates on the GPU beside training"
            )
    elif problem and settings.background == "on":
        raise UnavailableError(
            "EVALUATE_BESIDE",
            f"evaluate.background=on is not possible: {problem}",
            remedy="use evaluate.background=auto, or an environment that a package registers",
        )
    if problem:
        return in_place(problem)
    threads = (train.threads or 1) if device.type == "cpu" else max(1, min(THREADS, spare // 2))
    workers = settings.workers or _workers(spare, threads, neighbours)
    if there.type == "cuda":
        workers, threads = settings.workers or 1, 1
    undecided = settings.background == "auto" and device.type == "cuda" and there.type == "cpu"
    words = f"{workers} process{'es' if workers > 1 else ''} on {there}"
    return EvaluationChoice(
        beside=True,
        reason=words,
        device=there,
        workers=workers,
        threads=threads,
        specifications=tuple(text for text, _ in found if text),
        most_seconds=_most_seconds(recipe, parameters) / threads if undecided else 0.0,
        otherwise=in_place("the cores take longer than training does") if undecided else None,
    )


def _workers(spare: int, threads: int, neighbours: int) -> int:
    """Return how many processes take a share of the cores that training leaves."""
    share = spare // 2 if threads == 1 else spare * 3 // 4
    return max(1, min(MOST_WORKERS, share // (threads * neighbours)))


def _most_seconds(recipe: Recipe, parameters: int) -> float:
    """Return what an evaluation takes one core if every episode is as long as it may be."""
    import gymnasium

    settings = recipe.evaluate
    steps = 0
    for name in environments_of(recipe):
        spec = gymnasium.registry.get(name)
        longest = spec.max_episode_steps if spec is not None else None
        steps += (longest or LONGEST_EPISODE) * settings.episodes * len(settings.targets or (1,))
    tokens = 3 * recipe.loader.context_length
    return steps * tokens * 2.0 * parameters / CORE_FLOPS


def _elsewhere(environment: str) -> tuple[str, str]:
    """Return what another process needs to make the environment, and why it cannot."""
    import gymnasium

    if ":" in environment or is_atari(environment):
        return "", ""
    spec = gymnasium.registry.get(environment)
    if spec is None:
        return "", ""  # the error of making it is the same everywhere
    if not isinstance(spec.entry_point, str):
        return "", f"{environment} is known to this process only"
    try:
        return spec.to_json(), ""
    except (TypeError, ValueError):
        return "", f"{environment} has options that cannot be sent to another process"
