"""Samplers that draw an episode by its weight, then any start in it.

Weights become integer masses once.  From then on everything is integer arithmetic, so that every
device draws the same episode, and the probability of an episode is its mass over ``2**64``.

Shape legend: E episodes, N steps, T steps of one episode, K steps of a window, S strata, B slots of
a batch, n items.
"""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field
from pydantic.dataclasses import dataclass

from gear_offline.config.sections import Positive, PositiveFloat, Text, Whole
from gear_offline.core.types import Array, Float64Array, Int64Array, UInt64Array
from gear_offline.dataset.schema import EpisodeIndex
from gear_offline.errors import InputError
from gear_offline.kernels.draws import CumulativeWeights, GuidedSearch, Segments, bounded
from gear_offline.sampling.base import (
    ROTATION_STREAM,
    STRICT,
    Facts,
    Sampler,
    StepLocator,
    register,
    slot_draws,
)

Unit = Literal["steps", "episodes"]
DEFAULT_TEMPERATURE = {"softmax": 0.1, "rank": 1.0, "percentile": 0.1}
WHOLE = 1 << 64
SHORTFALL = 1.0 - 2.0**-51  # keeps rounding from giving out more than there is


class ChosenEpisodes(Sampler):
    """An episode, which a subclass chooses, then each of its T starts with 1 / T."""

    chances: Float64Array  # (E,) of each episode in one slot

    def choose(self, seed: int, first_step: int, numbers: UInt64Array) -> Int64Array:
        """Return the episodes drawn by `numbers` (steps, count)."""
        raise NotImplementedError

    def sample(self, seed: int, first_step: int, steps: int, count: int) -> Segments:
        first, second = slot_draws(seed, first_step, steps, count)
        episodes = self.choose(seed, first_step, first)
        lengths = self.index.lengths[episodes]
        return Segments(
            episodes=episodes,
            starts=bounded(second, lengths),
            probability=self.chances[episodes] / lengths,
        )

    def density(self, segments: Segments) -> Float64Array:
        return np.asarray(self.chances[segments.episodes] / self.index.lengths[segments.episodes])

    @property
    def episode_weight(self) -> Float64Array:
        return self.chances


class WeightedEpisodes(ChosenEpisodes):
    """Episode e with probability w_e / sum(w); a subclass has `weights`, or they are given."""

    def __init__(
        self, facts: Facts, options: Any = None, *, weights: Float64Array | None = None
    ) -> None:
        super().__init__(facts, options)
        choice = WeightedChoice(self.weights(facts) if weights is None else weights)
        self.chances, self._search = choice.probability, choice.search

    def weights(self, facts: Facts) -> Float64Array:
        """Return (E,) weights of the episodes: finite, at least 0, not all 0."""
        raise NotImplementedError

    def choose(self, seed: int, first_step: int, numbers: UInt64Array) -> Int64Array:
        return self._search.find(numbers)

    @property
    def gpu(self) -> CumulativeWeights:
        return CumulativeWeights(self._search)


class WeightedChoice:
    """A choice among items by (n,) weights; `probability` (n,) is mass / 2**64.

    `search` finds in the cumulative masses.  From the last item with a mass on they would be
    ``2**64`` and are ``2**64 - 1``, and searching ends there.
    """

    def __init__(self, weights: npt.ArrayLike, where: str = "") -> None:
        masses = integer_masses(weights, where)
        last = int(np.flatnonzero(np.asarray(weights))[-1])
        table: UInt64Array = np.cumsum(masses, dtype=np.uint64)
        table[last:] = np.uint64(WHOLE - 1)
        self.search = GuidedSearch(table, last=last)
        exact = masses.astype(np.float64)
        if np.count_nonzero(masses) == 0:  # one item has everything, 2^64
            exact[last] = float(WHOLE)
        self.probability: Float64Array = exact * 2.0**-64


def integer_masses(weights: npt.ArrayLike, where: str = "") -> UInt64Array:
    """Return (n,) integer masses in proportion to `weights` that sum to ``2**64``.

    A positive weight gets at least 1, zero gets 0.  Ratios differ from those of the weights by
    about ``2**-51``.  Each mass differs by 6 more at most: 4 for the scaled weight's fraction, 2
    for those of the two passes.  An item that has everything has 0, ``2**64`` modulo ``2**64``.
    """
    values = np.asarray(weights, dtype=np.float64)
    positive, wrong = np.flatnonzero(values), np.flatnonzero(~((values >= 0) & (values < np.inf)))
    if positive.size == 0 or wrong.size:
        example = f": number {wrong[0]} is {values[wrong[0]]:g}" if wrong.size else ""
        what = f"weights must be finite, not negative and not all 0{example}"
        raise InputError(
            "SELECTION", what, where, "look for such values with `gear-offline inspect`"
        )
    result = np.zeros(values.size, dtype=np.uint64)
    if positive.size == 1:
        return result
    # Scaling by a power of two is exact: the largest becomes 2^62 or more, below 2^63.
    exponent = 62 - (int(np.frexp(values.max())[1]) - 1)
    scaled = np.floor(np.ldexp(values[positive], exponent))  # integers, exact in float64
    total = _sum_exactly(scaled.astype(np.uint64))
    masses = np.ones(positive.size, dtype=np.uint64)
    for _ in range(2):  # nearly all, then what rounding left
        rest = WHOLE - _sum_exactly(masses)
        masses += np.floor(scaled * (rest / total * SHORTFALL)).astype(np.uint64)
    each, more = divmod(WHOLE - _sum_exactly(masses), positive.size)
    masses += np.uint64(each)
    masses[:more] += np.uint64(1)
    result[positive] = masses
    return result


def _sum_exactly(values: UInt64Array) -> int:
    """Return the sum of fewer than 2^32 values, however large."""
    high = int((values >> np.uint64(32)).sum(dtype=np.uint64))
    low = int((values & np.uint64(0xFFFFFFFF)).sum(dtype=np.uint64))
    return (high << 32) + low


@register("uniform_steps")
class UniformSteps(WeightedEpisodes):
    """Every (episode, start) is equally likely, 1/N: the Decision Transformer paper's strategy."""

    def weights(self, facts: Facts) -> Float64Array:
        return self.index.lengths.astype(np.float64)


# What public implementations of the Decision Transformer draw, by their names: these differ in the
# side that they pad alone.  docs/reference/strategies.md says where each was read.
UNIFORM = {"original": "left", "huggingface": "left", "corl": "right"}
for _name, _side in UNIFORM.items():
    register(_name)(type(_name, (UniformSteps,), {"padding": _side, "__module__": __name__}))


@register("uniform_episodes")
class UniformEpisodes(WeightedEpisodes):
    """Every episode is equally likely, then every start in it: 1/(E T) each."""

    def weights(self, facts: Facts) -> Float64Array:
        return np.ones(self.index.episodes)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class UnitOptions:
    """The unit of a weight: each step of an episode, or the episode as a whole."""

    unit: Unit = "steps"


class ReturnSampler(WeightedEpisodes):
    """Episodes by their returns; a subclass has `weigh`, and options with a `unit`."""

    def weights(self, facts: Facts) -> Float64Array:
        weights = self.weigh(finite_returns(facts))
        return weights * self.index.lengths if self.options.unit == "steps" else weights

    def weigh(self, returns: Float64Array) -> Float64Array:
        """Return (E,) weights, each of an episode or of one of its steps."""
        raise NotImplementedError

    def alike(self, episodes: Int64Array) -> Float64Array:
        """Return (E,) weights: 1 of these episodes, 0 of all others."""
        weights = np.zeros(self.index.episodes)
        weights[episodes] = 1.0
        return weights


@register("return_weighted")
class ReturnWeighted(ReturnSampler):
    """Episodes by their returns; the best one's weight is 1.

    ``softmax``: exp((x - 1) / temperature), x the return scaled to [0, 1] over the episodes.
    ``percentile``: the same of x = the share of episodes that return no more.
    ``rank``: (1 / r) ** (1 / temperature), r = 1 for the best; equals share their mean rank.
    """

    @dataclass(frozen=True, kw_only=True, config=STRICT)
    class Options(UnitOptions):
        rule: Literal["softmax", "rank", "percentile"] = "softmax"
        temperature: PositiveFloat | None = None

        def __post_init__(self) -> None:
            if self.temperature is None:
                object.__setattr__(self, "temperature", DEFAULT_TEMPERATURE[self.rule])

    def weigh(self, returns: Float64Array) -> Float64Array:
        rule, temperature, ordered = self.options.rule, self.options.temperature, np.sort(returns)
        no_more = np.searchsorted(ordered, returns, side="right")
        if rule == "rank":
            less = np.searchsorted(ordered, returns, side="left")
            rank = returns.size - (less + no_more - 1) / 2  # 1 for the best
            return np.asarray((rank / rank.min()) ** (-1.0 / temperature))
        x = no_more / returns.size
        if rule == "softmax":
            half = returns / 2  # the difference of two finite returns need not be finite
            spread = half.max() - half.min()
            x = (half - half.min()) / spread if spread > 0 else np.ones_like(returns)
        with np.errstate(over="ignore"):  # of a quotient, which is minus infinity then
            return np.asarray(np.exp((x - 1.0) / temperature))


@register("top_percent")
class TopPercent(ReturnSampler):
    """The best episodes only: as many as make up at most so many percent, at least one."""

    @dataclass(frozen=True, kw_only=True, config=STRICT)
    class Options(UnitOptions):
        percent: Annotated[float, Field(gt=0.0, le=100.0)] = 10.0
        of: Unit = "steps"

    def weigh(self, returns: Float64Array) -> Float64Array:
        order = best_first(returns)
        share = Fraction(str(self.options.percent)) / 100  # exactly the decimal that was written
        if self.options.of == "steps":
            most = math.floor(share * self.index.steps)
            kept = int(np.count_nonzero(np.cumsum(self.index.lengths[order]) <= most))
        else:
            kept = math.floor(share * self.index.episodes)
        return self.alike(order[: max(kept, 1)])


@register("top_k")
class TopK(ReturnSampler):
    """The k episodes of highest return only; all of them where there are no more than k."""

    @dataclass(frozen=True, kw_only=True, config=STRICT)
    class Options(UnitOptions):
        k: Positive

    def weigh(self, returns: Float64Array) -> Float64Array:
        return self.alike(best_first(returns)[: self.options.k])


@register("recent")
class Recent(WeightedEpisodes):
    """Every start of the last episodes: as many as have at most so many steps, at least one."""

    @dataclass(frozen=True, kw_only=True, config=STRICT)
    class Options:
        steps: Positive

    def weights(self, facts: Facts) -> Float64Array:
        first = self.index.steps - self.options.steps
        is_kept = self.index.offsets[:-1] >= min(first, int(self.index.offsets[-2]))
        return np.where(is_kept, self.index.lengths, 0.0)


@register("heap")
class Heap(WeightedEpisodes):
    """Any start of the episode of highest or lowest return, or value of a column at its first step.

    Among equals of the oldest.
    """

    @dataclass(frozen=True, kw_only=True, config=STRICT)
    class Options:
        of: Literal["max", "min"] = "max"
        column: Text | None = None

    def weights(self, facts: Facts) -> Float64Array:
        column, sign = self.options.column, 1.0 if self.options.of == "max" else -1.0
        if column is None:
            values = finite_returns(facts)
        else:
            values = column_of(facts, column)[self.index.offsets[:-1]]
        self.episode_order = best_first(sign * values)
        return np.where(np.arange(self.index.episodes) == self.episode_order[0], 1.0, 0.0)


@register("weighted")
class Weighted(ChosenEpisodes):
    """Starts in proportion to a column; or episodes, to its value at their first step."""

    @dataclass(frozen=True, kw_only=True, config=STRICT)
    class Options(UnitOptions):
        column: Text

    def __init__(self, facts: Facts, options: Any) -> None:
        super().__init__(facts, options)
        values, first = column_of(facts, options.column), self.index.offsets[:-1]
        self._by_steps = options.unit == "steps"
        choice = WeightedChoice(
            values if self._by_steps else values[first], f"column {options.column}"
        )
        self._search, self._chance = choice.search, choice.probability
        self.chances = np.add.reduceat(self._chance, first) if self._by_steps else self._chance

    def choose(self, seed: int, first_step: int, numbers: UInt64Array) -> Int64Array:
        return self._search.find(numbers)

    def sample(self, seed: int, first_step: int, steps: int, count: int) -> Segments:
        if not self._by_steps:
            return super().sample(seed, first_step, steps, count)
        rows = self._search.find(slot_draws(seed, first_step, steps, count)[0])
        episodes, starts = self.locate(rows)
        return Segments(episodes=episodes, starts=starts, probability=self._chance[rows])

    def density(self, segments: Segments) -> Float64Array:
        if not self._by_steps:
            return super().density(segments)
        rows = self.index.offsets[segments.episodes] + segments.starts
        return np.asarray(self._chance[rows])

    @property
    def episode_weight(self) -> Float64Array:
        return self.chances

    @property
    def gpu(self) -> CumulativeWeights | None:
        return None if self._by_steps else CumulativeWeights(self._search)


@register("stratified_return")
class StratifiedReturn(ChosenEpisodes):
    """Each batch takes equally from strata of episodes ordered by return.

    Slot b of a step takes stratum ``(b + r) % S``.  r is drawn once a step, so that every stratum
    is equally likely in every slot whatever the batch size.
    """

    @dataclass(frozen=True, kw_only=True, config=STRICT)
    class Options(UnitOptions):
        strata: Annotated[Whole, Field(ge=1, le=1024)] = 4

    def __init__(self, facts: Facts, options: Any = None) -> None:
        super().__init__(facts, options)
        index = self.index
        order = best_first(finite_returns(facts))[::-1]
        count = min(self.options.strata, index.episodes)
        edges = [number * index.episodes // count for number in range(count + 1)]
        weights = np.ones(index.episodes)
        if self.options.unit == "steps":
            weights *= index.lengths
        self._members = [np.sort(order[a:b]) for a, b in pairwise(edges)]
        self._choices = [WeightedChoice(weights[members]) for members in self._members]
        self.chances = np.empty(index.episodes)
        for members, choice in zip(self._members, self._choices, strict=True):
            self.chances[members] = choice.probability / count

    def choose(self, seed: int, first_step: int, numbers: UInt64Array) -> Int64Array:
        steps, count = numbers.shape
        begin, _ = slot_draws(seed, first_step, steps, 1, stream=ROTATION_STREAM)
        strata = len(self._members)
        stratum = (bounded(begin, strata) + np.arange(count, dtype=np.int64)) % strata
        episodes = np.empty(numbers.shape, dtype=np.int64)
        for number, members in enumerate(self._members):
            slots = stratum == number
            episodes[slots] = members[self._choices[number].search.find(numbers[slots])]
        return episodes


@register("d3rlpy")
class D3rlpy(Sampler):
    """d3rlpy: the last step of a window is uniform over transitions, padded left.

    A window is the up to K steps that end there; none of the episode's later steps is in it.  The
    last step of an episode that the environment did not end is no transition and ends no window.
    """

    padding = "left"
    cuts_windows = True

    def __init__(self, facts: Facts, options: object = None) -> None:
        super().__init__(facts, options)
        self.context_length = facts.need("context_length")
        ends = self.index.lengths - ~np.asarray(facts.need("terminated"), dtype=bool)
        self._members = np.flatnonzero(ends)  # episodes that have transitions
        if self._members.size == 0:
            what = "no episode has a transition: all have one step and none was terminated"
            raise InputError("SELECTION", what)
        self._ends = EpisodeIndex(ends[self._members])
        self._locate = StepLocator(self._ends)

    def sample(self, seed: int, first_step: int, steps: int, count: int) -> Segments:
        first, _ = slot_draws(seed, first_step, steps, count)
        member, end = self._locate(bounded(first, self._ends.steps))
        assert self.context_length is not None
        starts = np.maximum(end - self.context_length + 1, 0)
        return Segments(
            episodes=self._members[member],
            starts=starts,
            probability=np.broadcast_to(np.float64(1.0 / self._ends.steps), starts.shape),
            lengths=end - starts + 1,
        )


def finite_returns(facts: Facts) -> Float64Array:
    """Return (E,) returns, of which none may be NaN or infinite."""
    returns = np.asarray(facts.need("returns"), dtype=np.float64)
    if returns.shape != (facts.episodes.episodes,) or not np.isfinite(returns).all():
        what = f"returns of {facts.episodes.episodes} episodes are needed, and all must be finite"
        remedy = "look for NaN or infinite rewards with `gear-offline inspect`"
        raise InputError("SELECTION", what, remedy=remedy)
    return returns


def column_of(facts: Facts, name: str) -> Array:
    """Return (N,) values of a column of one number a step."""
    values = np.asarray(facts.need("column")(name))
    if values.size != facts.episodes.steps or values.dtype.kind == "c":
        what = f"{values.dtype} {values.shape[1:]} a step is not one number"
        raise InputError("SELECTION", what, f"column {name}", "name another one, or uniform_steps")
    return values.reshape(-1)


def best_first(returns: Float64Array) -> Int64Array:
    """Return the episodes by falling return; among equals the earlier one comes first."""
    return np.argsort(-returns, kind="stable").astype(np.int64)
