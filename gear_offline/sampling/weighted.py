"""Laws that draw an episode by its weight, then a start in it uniformly.

Shape legend: E episodes, N steps, T steps of one episode, B slots of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np

from gear_offline.dataset.schema import BoolArray, EpisodeIndex, Int64Array
from gear_offline.errors import InputError
from gear_offline.kernels.philox import bounded, draws
from gear_offline.sampling.base import (
    ROTATION_STREAM,
    Float64Array,
    Segments,
    SlotLaw,
    register,
    slot_draws,
)
from gear_offline.sampling.options import choice, integer, number, wrong
from gear_offline.sampling.thresholds import Thresholds

UNITS = ("steps", "episodes")
DEFAULT_TEMPERATURE = {"softmax": 0.1, "rank": 1.0, "percentile": 0.1}


class WeightedEpisodes(SlotLaw):
    """Episode e with probability w_e / sum(w), then each of its T starts with 1 / T.

    The base of laws that give every episode a weight: make the weights and call this.

    Parameters
    ----------
    index
        Episode index.
    weights
        (E,) float64, finite, at least 0, not all 0.
    """

    name = "weighted_episodes"

    def __init__(self, index: EpisodeIndex, weights: Float64Array) -> None:
        self.index = index
        self.thresholds = Thresholds(weights)

    @property
    def options(self) -> Mapping[str, Any]:
        """What the law was made with besides the data; recipes and checkpoints record it."""
        return {}

    def select_many(self, *, seed: int, first_step: int, steps: int, count: int) -> Segments:
        """Return the segments of `steps` consecutive steps, arrays of shape (steps, count).

        The first one is `first_step`; everything follows from it and the `seed`.
        """
        first, second = slot_draws(seed=seed, first_step=first_step, steps=steps, count=count)
        episodes = self.thresholds.find(first)
        lengths = self.index.lengths[episodes]
        return Segments(
            episodes=episodes,
            starts=bounded(second, lengths),
            probability=self.thresholds.probability(episodes) / lengths,
        )

    @property
    def episode_weight(self) -> Float64Array:
        """(E,) float64, the probability of each episode: the likely ones go into GPU memory."""
        return self.thresholds.probability(np.arange(self.index.episodes))

    def density(self, segments: Segments) -> Float64Array:
        """Return the probability of each segment in one slot."""
        found: Float64Array = self.thresholds.probability(segments.episodes)
        return found / self.index.lengths[segments.episodes]


def check_returns(returns: Float64Array, index: EpisodeIndex) -> Float64Array:
    """Return (E,) finite returns.

    Raises
    ------
    InputError
        ``SELECTION_WEIGHTS``
    """
    found = np.asarray(returns, dtype=np.float64)
    if found.shape != (index.episodes,) or not np.isfinite(found).all():
        raise InputError(
            "SELECTION_WEIGHTS",
            f"returns of {index.episodes} episodes are needed, and all must be finite",
            remedy="look for NaN or infinite rewards with `gear-offline inspect`",
        )
    return found


def best_first(returns: Float64Array) -> Int64Array:
    """Return the episodes by falling return; among equals the earlier one comes first."""
    return np.argsort(-returns, kind="stable").astype(np.int64)


def in_unit(weights: Float64Array | BoolArray, index: EpisodeIndex, unit: str) -> Float64Array:
    """Return the weights of episodes: as they are, or times T where they are those of a step."""
    found = np.asarray(weights, dtype=np.float64)
    return found * index.lengths if unit == "steps" else found


def return_weights(returns: Float64Array, rule: str, temperature: float) -> Float64Array:
    """Return (E,) weights of episodes by their returns, the best one's being 1.

    ``softmax``: exp((x - 1) / temperature), x the return scaled to [0, 1] over the episodes.
    ``percentile``: the same of x = the share of episodes that return no more.
    ``rank``: (1 / r) ** (1 / temperature), r = 1 for the best; equals share their mean rank.
    """
    if rule == "softmax":
        half = returns / 2  # the difference of two finite returns need not be finite
        spread = half.max() - half.min()
        x = (half - half.min()) / spread if spread > 0 else np.ones_like(returns)
        return _warmed(x, temperature)
    ordered = np.sort(returns)
    no_more = np.searchsorted(ordered, returns, side="right")
    if rule == "percentile":
        return _warmed(no_more / returns.size, temperature)
    less = np.searchsorted(ordered, returns, side="left")
    rank = returns.size - (less + no_more - 1) / 2  # 1 for the best
    return np.asarray((rank / rank.min()) ** (-1.0 / temperature))


def _warmed(x: Float64Array, temperature: float) -> Float64Array:
    """Return exp((x - 1) / temperature) of (E,) values up to 1; 0 where that is too small."""
    with np.errstate(over="ignore"):  # of a quotient, which is minus infinity then
        return np.asarray(np.exp((x - 1.0) / temperature))


def _check_weighted(
    *, rule: object = "softmax", temperature: object = None, unit: object = "steps"
) -> None:
    choice("rule", rule, tuple(DEFAULT_TEMPERATURE))
    choice("unit", unit, UNITS)
    if temperature is not None:
        number("temperature", temperature, above=0.0)


@register("return_weighted", check=_check_weighted)
class ReturnWeighted(WeightedEpisodes):
    """Episodes by their returns: softmax, rank or percentile, with a temperature."""

    name = "return_weighted"

    def __init__(
        self,
        index: EpisodeIndex,
        *,
        returns: Float64Array,
        rule: str = "softmax",
        temperature: float | None = None,
        unit: str = "steps",
    ) -> None:
        heat = DEFAULT_TEMPERATURE[rule] if temperature is None else float(temperature)
        self._options = {"rule": rule, "temperature": heat, "unit": unit}
        weights = return_weights(check_returns(returns, index), rule, heat)
        super().__init__(index, in_unit(weights, index, unit))

    @property
    def options(self) -> Mapping[str, Any]:
        return self._options


def _check_percent(*, percent: object = 10.0, of: object = "steps", unit: object = "steps") -> None:
    number("percent", percent, above=0.0, most=100.0)
    choice("of", of, UNITS)
    choice("unit", unit, UNITS)


def share_of(percent: float, whole: int) -> int:
    """Return `percent` of `whole` rounded down, exactly for the decimal that was written."""
    return math.floor(Fraction(str(percent)) * whole / 100)


@register("top_percent", check=_check_percent)
class TopPercent(WeightedEpisodes):
    """The best episodes only: as many as make up at most so many percent, at least one."""

    name = "top_percent"

    def __init__(
        self,
        index: EpisodeIndex,
        *,
        returns: Float64Array,
        percent: float = 10.0,
        of: str = "steps",
        unit: str = "steps",
    ) -> None:
        self._options = {"percent": float(percent), "of": of, "unit": unit}
        order = best_first(check_returns(returns, index))
        if of == "steps":
            within = np.cumsum(index.lengths[order]) <= share_of(percent, index.steps)
            kept = int(np.count_nonzero(within))
        else:
            kept = share_of(percent, index.episodes)
        chosen = np.zeros(index.episodes, dtype=bool)
        chosen[order[: max(kept, 1)]] = True
        super().__init__(index, in_unit(chosen, index, unit))

    @property
    def options(self) -> Mapping[str, Any]:
        return self._options


def _check_top(*, k: object = None, unit: object = "steps") -> None:
    if k is None:
        raise wrong("k", "given", k)
    integer("k", k, least=1)
    choice("unit", unit, UNITS)


@register("top_k", check=_check_top)
class TopK(WeightedEpisodes):
    """The k episodes of highest return only; all of them where there are no more than k."""

    name = "top_k"

    def __init__(
        self, index: EpisodeIndex, *, returns: Float64Array, k: int, unit: str = "steps"
    ) -> None:
        self._options = {"k": k, "unit": unit}
        chosen = np.zeros(index.episodes, dtype=bool)
        chosen[best_first(check_returns(returns, index))[:k]] = True
        super().__init__(index, in_unit(chosen, index, unit))

    @property
    def options(self) -> Mapping[str, Any]:
        return self._options


def _check_strata(*, strata: object = 4, unit: object = "steps") -> None:
    integer("strata", strata, least=1, most=1024)
    choice("unit", unit, UNITS)


@register("stratified_return", check=_check_strata)
class StratifiedReturn(SlotLaw):
    """Each batch takes equally from strata of episodes ordered by return.

    Slot b of a step takes stratum ``(b + r) % strata``; r is drawn once a step, so that every
    stratum is equally likely in every slot whatever the batch size.

    Attributes
    ----------
    members, thresholds
        Episodes of each stratum, ascending, and the weighted choice among them.
    chances
        (E,) float64, the probability of each episode in one slot.
    """

    name = "stratified_return"

    def __init__(
        self, index: EpisodeIndex, *, returns: Float64Array, strata: int = 4, unit: str = "steps"
    ) -> None:
        self.index = index
        self._options = {"strata": strata, "unit": unit}
        order = best_first(check_returns(returns, index))[::-1]
        count = min(strata, index.episodes)
        edges = [number * index.episodes // count for number in range(count + 1)]
        weights = in_unit(np.ones(index.episodes), index, unit)
        self.members = [np.sort(order[a:b]) for a, b in pairwise(edges)]
        self.thresholds = [Thresholds(weights[members]) for members in self.members]
        self.chances = np.empty(index.episodes)
        for members, thresholds in zip(self.members, self.thresholds, strict=True):
            self.chances[members] = thresholds.probability(np.arange(members.size)) / count

    @property
    def options(self) -> Mapping[str, Any]:
        return self._options

    def select_many(self, *, seed: int, first_step: int, steps: int, count: int) -> Segments:
        """Return the segments of `steps` consecutive steps, arrays of shape (steps, count)."""
        first, second = slot_draws(seed=seed, first_step=first_step, steps=steps, count=count)
        stratum = rotated(seed, first_step, steps, count, len(self.members))
        episodes = np.empty((steps, count), dtype=np.int64)
        for group, members in enumerate(self.members):
            mine = stratum == group
            episodes[mine] = members[self.thresholds[group].find(first[mine])]
        lengths = self.index.lengths[episodes]
        return Segments(
            episodes=episodes,
            starts=bounded(second, lengths),
            probability=self.chances[episodes] / lengths,
        )

    def density(self, segments: Segments) -> Float64Array:
        """Return the probability of each segment in one slot."""
        return np.asarray(self.chances[segments.episodes] / self.index.lengths[segments.episodes])


def rotated(seed: int, first_step: int, steps: int, count: int, groups: int) -> Int64Array:
    """Return the group of each slot, (steps, count): consecutive ones, beginning anywhere."""
    begin, _ = draws(seed=seed, stream=ROTATION_STREAM, first_step=first_step, steps=steps, count=1)
    return (bounded(begin, groups) + np.arange(count, dtype=np.int64)) % groups
