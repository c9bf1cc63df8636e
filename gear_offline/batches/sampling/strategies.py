"""The strategies: each a function of the data's facts and of its options.

What a function returns is the (E,) weights of the episodes, or a sampler.
docs/reference/strategies.md describes them.

Shape legend: E episodes, N steps, T steps of one episode, K steps of a window, S strata, B slots of
a batch.
"""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from gear_offline.batches.sampling.draws import (
    CumulativeWeights,
    Facts,
    HostFunction,
    KeyedPermutation,
    Prioritized,
    Sampler,
    any_start,
    any_start_density,
)
from gear_offline.batches.sampling.masses import WeightedChoice
from gear_offline.batches.sampling.registry import strategy
from gear_offline.config.sections import Positive, PositiveFloat, Text, Whole
from gear_offline.core.types import Array, Float64Array, Int64Array
from gear_offline.data.dataset.schema import EpisodeIndex
from gear_offline.errors import InputError
from gear_offline.kernels.draws import (
    ROTATION_STREAM,
    KeyedOrder,
    Segments,
    StepLocator,
    bound_draws,
    check_range,
    places,
    slot_draws,
)

Unit = Literal["steps", "episodes"]  # each step of an episode has a weight, or it as a whole
Rule = Literal["softmax", "rank", "percentile"]
DEFAULT_TEMPERATURE = {"softmax": 0.1, "rank": 1.0, "percentile": 0.1}


# What public implementations of the Decision Transformer draw, by their names: these differ in the
# side that they pad alone.  docs/reference/strategies.md says where each was read.
@strategy("corl", padding="right")
@strategy("huggingface", padding="left")
@strategy("original", padding="left")
@strategy("uniform_steps")
def uniform_steps(facts: Facts) -> Int64Array:
    """Every (episode, start) is equally likely, 1/N: the Decision Transformer paper's strategy."""
    return facts.episodes.lengths


@strategy("uniform_episodes")
def uniform_episodes(facts: Facts) -> Float64Array:
    """Every episode is equally likely, then every start in it: 1/(E T) each."""
    return np.ones(facts.episodes.episodes)


def fill_temperature(options: dict[str, Any]) -> None:
    """Give the rule its own temperature if there is none."""
    if options["temperature"] is None:
        options["temperature"] = DEFAULT_TEMPERATURE[options["rule"]]


@strategy("return_weighted", check=fill_temperature)
def return_weighted(
    facts: Facts,
    rule: Rule = "softmax",
    temperature: PositiveFloat | None = None,
    unit: Unit = "steps",
) -> Float64Array:
    """Episodes by their returns; the best one's weight is 1.

    ``softmax``: exp((x - 1) / temperature), x the return scaled to [0, 1] over the episodes.
    ``percentile``: the same of x = the share of episodes that return no more.
    ``rank``: (1 / r) ** (1 / temperature), r = 1 for the best; equals share their mean rank.
    """
    assert temperature is not None, "filled in"
    returns = finite_returns(facts)
    ordered = np.sort(returns)
    no_more = np.searchsorted(ordered, returns, side="right")
    if rule == "rank":
        less = np.searchsorted(ordered, returns, side="left")
        rank = returns.size - (less + no_more - 1) / 2  # 1 for the best
        return by_unit(facts, (rank / rank.min()) ** (-1.0 / temperature), unit)
    x = no_more / returns.size
    if rule == "softmax":
        half = returns / 2  # the difference of two finite returns need not be finite
        spread = half.max() - half.min()
        x = (half - half.min()) / spread if spread > 0 else np.ones_like(returns)
    with np.errstate(over="ignore"):  # of a quotient, which is minus infinity then
        return by_unit(facts, np.exp((x - 1.0) / temperature), unit)


@strategy("top_percent")
def top_percent(
    facts: Facts,
    percent: Annotated[float, Field(gt=0.0, le=100.0)] = 10.0,
    of: Unit = "steps",
    unit: Unit = "steps",
) -> Float64Array:
    """The best episodes only: at most `percent` of all steps or episodes, at least one.

    Of equal returns the earlier episodes are taken.
    """
    index, order = facts.episodes, best_first(finite_returns(facts))
    share = Fraction(str(percent)) / 100  # exactly the decimal that was written
    count = math.floor(share * index.episodes)
    if of == "steps":
        most = math.floor(share * index.steps)
        count = int(np.count_nonzero(np.cumsum(index.lengths[order]) <= most))
    return by_unit(facts, among(index, order[: max(count, 1)]), unit)


@strategy("top_k")
def top_k(facts: Facts, k: Positive, unit: Unit = "steps") -> Float64Array:
    """The k episodes of highest return only; all of them where there are no more than k.

    Of equal returns the earlier episodes are taken.
    """
    best = best_first(finite_returns(facts))[:k]
    return by_unit(facts, among(facts.episodes, best), unit)


@strategy("recent")
def recent(facts: Facts, steps: Positive) -> Array:
    """Every start of the last episodes: those of at most `steps` steps together, at least one."""
    index = facts.episodes
    first = min(index.steps - steps, int(index.offsets[-2]))
    return np.where(index.offsets[:-1] >= first, index.lengths, 0)


@strategy("first_episodes")
def first_episodes(facts: Facts, column: Text) -> Float64Array:
    """Every start of the first episode of each value of a column, such as a history's number.

    So windows over the ends of episodes begin where histories do, as play with an empty memory.
    """
    index = facts.episodes
    numbers = column_of(facts, column)[index.offsets[:-1]]
    return by_unit(facts, among(index, np.unique(numbers, return_index=True)[1]), "steps")


@strategy("heap")
def heap(
    facts: Facts, of: Literal["max", "min"] = "max", column: Text | None = None
) -> CumulativeWeights:
    """Any start of the episode of highest or lowest return, or value of a column at its first step.

    Among equals of the oldest.
    """
    index, sign = facts.episodes, 1.0 if of == "max" else -1.0
    if column is None:
        values = finite_returns(facts)
    else:
        values = column_of(facts, column)[index.offsets[:-1]]
    order = best_first(sign * values)
    return CumulativeWeights(index, among(index, order[:1]), order=order)


@strategy("weighted")
def column_weighted(facts: Facts, column: Text, unit: Unit = "steps") -> Sampler:
    """Starts in proportion to a column; or episodes, to its value at their first step."""
    values, index, where = column_of(facts, column), facts.episodes, f"column {column}"
    first = index.offsets[:-1]
    if unit == "episodes":
        return CumulativeWeights(index, values[first], where=where)
    choice, locate = WeightedChoice(values, where), StepLocator(index)

    def sample(seed: int, first_step: int, steps: int, count: int) -> Segments:
        rows = choice.search.find(slot_draws(seed, first_step, steps, count)[0])
        episodes, starts = locate(rows)
        return Segments(episodes=episodes, starts=starts, probability=choice.probability[rows])

    def density(segments: Segments) -> Float64Array:
        return np.asarray(choice.probability[index.offsets[segments.episodes] + segments.starts])

    weight = np.add.reduceat(choice.probability, first)
    return HostFunction(index, sample, density=density, episode_weight=weight)


@strategy("stratified_return")
def stratified_return(
    facts: Facts, strata: Annotated[Whole, Field(ge=1, le=1024)] = 4, unit: Unit = "steps"
) -> Sampler:
    """Each batch takes equally from strata of episodes ordered by return.

    Slot b of a step takes stratum ``(b + r) % S``.  r is drawn once a step, so that every stratum
    is equally likely in every slot whatever the batch size.
    """
    index = facts.episodes
    order, many = best_first(finite_returns(facts))[::-1], min(strata, index.episodes)
    edges = [number * index.episodes // many for number in range(many + 1)]
    weights, weight = by_unit(facts, np.ones(index.episodes), unit), np.empty(index.episodes)
    members = [np.sort(order[a:b]) for a, b in pairwise(edges)]
    choices = [WeightedChoice(weights[group]) for group in members]
    for group, choice in zip(members, choices, strict=True):
        weight[group] = choice.probability / many

    def sample(seed: int, first_step: int, steps: int, count: int) -> Segments:
        first, second = slot_draws(seed, first_step, steps, count)
        begin, _ = slot_draws(seed, first_step, steps, 1, stream=ROTATION_STREAM)
        stratum = (bound_draws(begin, many) + np.arange(count, dtype=np.int64)) % many
        episodes = np.empty(first.shape, dtype=np.int64)
        for number, (group, choice) in enumerate(zip(members, choices, strict=True)):
            slots = stratum == number
            episodes[slots] = group[choice.search.find(first[slots])]
        return any_start(index, episodes, second, weight)

    def density(segments: Segments) -> Float64Array:
        return any_start_density(index, segments, weight)

    return HostFunction(index, sample, density=density, episode_weight=weight)


@strategy("fifo", mixable=False)
def fifo(facts: Facts) -> Sampler:
    """Every step of the table as a start, in the order of the table, then again.

    Nothing is random: what a slot takes has probability 1, whatever the seed.
    """
    return _in_turn(facts.episodes, backwards=False)


@strategy("lifo", mixable=False)
def lifo(facts: Facts) -> Sampler:
    """Starts against the order of the table, newest first, then again."""
    return _in_turn(facts.episodes, backwards=True)


def _in_turn(index: EpisodeIndex, *, backwards: bool) -> Sampler:
    locate = StepLocator(index)

    def sample(seed: int, first_step: int, steps: int, count: int) -> Segments:
        check_range(seed, first_step, steps, count)
        _, _, at = places(first_step, steps, count, size=index.steps)
        episodes, starts = locate(index.steps - 1 - at if backwards else at)
        chance = np.broadcast_to(np.float64(1.0), starts.shape)
        return Segments(episodes=episodes, starts=starts, probability=chance)

    order = np.arange(index.episodes)[:: -1 if backwards else 1]
    return HostFunction(index, sample, episode_order=order)


@strategy("shuffled_epochs", mixable=False)
def shuffled_epochs(facts: Facts) -> Sampler:
    """Every start exactly once an epoch, in an order of its own each epoch."""
    return KeyedPermutation(facts.episodes)


@strategy("min_dt", padding="right", mixable=False)
def min_dt(facts: Facts) -> Sampler:
    """min-decision-transformer: every episode once an epoch, full windows, padded right.

    A window begins uniformly where K steps are left, at 0 in shorter episodes.  An epoch ends
    with its last full batch: ``E % B`` episodes are left out, others each time.
    """
    index, span = facts.episodes, facts.need("context_length")
    begins = np.maximum(index.lengths - span, 0) + 1

    def sample(seed: int, first_step: int, steps: int, count: int) -> Segments:
        _, second = slot_draws(seed, first_step, steps, count)
        full = index.episodes // count  # batches of an epoch
        if full == 0:
            problem = "min_dt takes each episode once an epoch and full batches only, and "
            problem += f"{index.episodes} episodes make no batch of {count}"
            remedy = "lower the batch size, or use uniform_episodes"
            raise InputError("SELECTION", problem, remedy=remedy)
        first_epoch, epochs, batches = places(first_step, steps, 1, size=full)
        at = batches * count + np.arange(count, dtype=np.int64)
        order = KeyedOrder(index.episodes)
        episodes = order(seed, first_epoch, np.broadcast_to(epochs, at.shape), at)
        return Segments(
            episodes=episodes,
            starts=bound_draws(second, begins[episodes]),
            probability=1.0 / (np.float64(index.episodes) * begins[episodes]),
        )

    return HostFunction(index, sample, context_length=span)


@strategy("d3rlpy", padding="left", mixable=False)
def d3rlpy(facts: Facts) -> Sampler:
    """d3rlpy: the last step of a window is uniform over transitions, padded left.

    A window is the up to K steps that end there; none of the episode's later steps is in it.  The
    last step of an episode that the environment did not end is no transition and ends no window.
    """
    index, span = facts.episodes, facts.need("context_length")
    transitions = index.lengths - ~np.asarray(facts.need("terminated"), dtype=bool)
    members = np.flatnonzero(transitions)
    if members.size == 0:
        problem = "no episode has a transition: all have one step and none was terminated"
        raise InputError("SELECTION", problem)
    ends = EpisodeIndex(transitions[members])
    locate = StepLocator(ends)

    def sample(seed: int, first_step: int, steps: int, count: int) -> Segments:
        first, _ = slot_draws(seed, first_step, steps, count)
        member, end = locate(bound_draws(first, ends.steps))
        starts = np.maximum(end - span + 1, 0)
        return Segments(
            episodes=members[member],
            starts=starts,
            probability=np.broadcast_to(np.float64(1.0 / ends.steps), starts.shape),
            lengths=end - starts + 1,
        )

    return HostFunction(index, sample, context_length=span, cuts_windows=True)


def check_priorities(options: dict[str, Any]) -> None:
    """Refuse a first priority above the largest one."""
    if options["initial"] > options["largest"]:
        raise ValueError(f"initial must be at most largest, {options['largest']:g}")


strategy("prioritized", check=check_priorities, handles_subset=True)(Prioritized)


def by_unit(facts: Facts, weights: Float64Array, unit: Unit) -> Float64Array:
    """Return (E,) weights of episodes, from those of one of their steps if that is the unit."""
    return weights * facts.episodes.lengths if unit == "steps" else weights


def among(index: EpisodeIndex, episodes: Int64Array) -> Float64Array:
    """Return (E,) weights: 1 of these episodes, 0 of all others."""
    weights = np.zeros(index.episodes)
    weights[episodes] = 1.0
    return weights


def finite_returns(facts: Facts) -> Float64Array:
    """Return (E,) returns, of which none may be NaN or infinite."""
    returns = np.asarray(facts.need("returns"), dtype=np.float64)
    if returns.shape != (facts.episodes.episodes,) or not np.isfinite(returns).all():
        problem = (
            f"returns of {facts.episodes.episodes} episodes are needed, and all must be finite"
        )
        remedy = "look for NaN or infinite rewards with `gear-offline inspect`; data without "
        remedy += "rewards have no returns: use selection.strategy=uniform_steps"
        raise InputError("SELECTION", problem, remedy=remedy)
    return returns


def column_of(facts: Facts, name: str) -> Array:
    """Return (N,) values of a column of one number a step."""
    values = np.asarray(facts.need("column")(name))
    if values.size != facts.episodes.steps or values.dtype.kind == "c":
        problem = f"{values.dtype} {values.shape[1:]} a step is not one number"
        raise InputError(
            "SELECTION", problem, f"column {name}", "name another one, or uniform_steps"
        )
    return values.reshape(-1)


def best_first(returns: Float64Array) -> Int64Array:
    """Return the episodes by falling return; among equals the earlier one comes first."""
    return np.argsort(-returns, kind="stable").astype(np.int64)
