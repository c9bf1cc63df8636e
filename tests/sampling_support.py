"""What tests of samplers share: small tables, exact probabilities by definition, chi-square.

Nothing here is computed as the package does: probabilities are enumerated with fractions.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gear_offline.batches.sampling import Facts, Prioritized, Segments
from gear_offline.data.dataset.schema import EpisodeIndex

CONTEXT = 4
MIXED: list[dict[str, Any]] = [
    {"strategy": "uniform_steps"},
    {"strategy": "top_k", "k": 2},
    {"strategy": "stratified_return", "strata": 3},
    {"strategy": "prioritized"},
    {"strategy": "uniform_episodes"},
]
SCHEDULE = [
    {"step": 7, "weights": [0, 0, 0, 0, 1]},
    {"step": 50, "weights": [0, 3, 1e-12, 2, 1]},
    {"step": 2**40, "weights": [1, 0, 0, 0, 0]},
]
CASES: list[tuple[str, dict[str, Any]]] = [  # every strategy is here
    ("uniform_steps", {}),
    ("uniform_episodes", {}),
    ("return_weighted", {}),
    ("return_weighted", {"temperature": 0.5, "unit": "episodes"}),
    ("return_weighted", {"rule": "rank", "temperature": 2.0}),
    ("return_weighted", {"rule": "percentile"}),
    ("top_percent", {"percent": 35.0}),
    ("top_percent", {"percent": 50, "of": "episodes", "unit": "episodes"}),
    ("top_k", {"k": 2}),
    ("top_k", {"k": 3, "unit": "episodes"}),
    ("stratified_return", {"strata": 3}),
    ("stratified_return", {"strata": 2, "unit": "episodes"}),
    ("recent", {"steps": 9}),
    ("recent", {"steps": 1}),
    ("first_episodes", {"column": "rewards"}),
    ("heap", {}),
    ("heap", {"of": "min", "column": "rewards"}),
    ("weighted", {"column": "rewards"}),
    ("weighted", {"column": "rewards", "unit": "episodes"}),
    ("shuffled_epochs", {}),
    ("prioritized", {}),
    ("original", {}),
    ("huggingface", {}),
    ("corl", {}),
    ("min_dt", {}),
    ("d3rlpy", {}),
    ("fifo", {}),
    ("lifo", {}),
    ("mixture", {"parts": [{**part, "weight": 10.0 ** (-i)} for i, part in enumerate(MIXED)]}),
    ("mixture", {"parts": [MIXED[0] | {"weight": 1}, MIXED[1] | {"weight": 3}]}),
    ("mixture", {"parts": MIXED, "schedule": SCHEDULE}),
]
IDS = [f"{number}-{name}" for number, (name, _) in enumerate(CASES)]
EVEN = ("uniform_steps", "original", "huggingface", "corl", "shuffled_epochs", "prioritized")
Key = tuple[int, int, int]  # episode, start, steps of the window


def facts(
    lengths: Sequence[int],
    returns: Sequence[float] | None = None,
    terminated: Sequence[bool] | None = None,
    column: Any = None,
) -> Facts:
    count = len(lengths)
    default = [float((7 * e + 3) % count) for e in range(count)]
    ends = [e % 3 != 1 for e in range(count)] if terminated is None else list(terminated)
    return Facts(
        episodes=EpisodeIndex(np.array(lengths, dtype=np.int64)),
        returns=np.array(default if returns is None else returns, dtype=np.float64),
        terminated=np.array(ends, dtype=bool),
        column=lambda name: (5 * np.arange(sum(lengths)) + 1) % 4 if column is None else column,
    )


def prioritized(lengths: Any, **options: Any) -> Prioritized:
    index = EpisodeIndex(np.array(lengths, dtype=np.int64))
    return Prioritized(Facts(episodes=index), **options)


def keys(segments: Segments, lengths: Sequence[int], context: int = CONTEXT) -> list[Key]:
    """Return (episode, start, window steps) of each slot, in order."""
    table = np.asarray(lengths)
    real = np.minimum(table[segments.episodes] - segments.starts, context)
    if segments.lengths is not None:
        real = np.minimum(real, segments.lengths)
    flat = (part.reshape(-1).tolist() for part in (segments.episodes, segments.starts, real))
    return list(zip(*flat, strict=True))


def window(length: int, start: int, context: int = CONTEXT) -> int:
    return min(context, length - start)


def by_episode(weights: Sequence[Fraction | float], lengths: Sequence[int]) -> dict[Key, float]:
    """An episode by weight, then each start alike."""
    total = sum(weights)
    return {
        (e, s, window(length, s)): float(weight / total / length)
        for e, (weight, length) in enumerate(zip(weights, lengths, strict=True))
        for s in range(length)
        if weight
    }


def ranks(returns: Sequence[float]) -> list[Fraction]:
    """1 for the best; equals share the mean of their places."""
    order = sorted(returns, reverse=True)
    return [
        Fraction(sum(i + 1 for i, r in enumerate(order) if r == mine), order.count(mine))
        for mine in returns
    ]


def best(returns: Sequence[float]) -> list[int]:
    return sorted(range(len(returns)), key=lambda e: (-returns[e], e))


def exact_law(name: str, data: Facts, **options: Any) -> dict[Key, float]:
    """The probability of every segment that a slot can take, from the definition in the docs."""
    lengths = [int(n) for n in data.episodes.lengths]
    assert data.returns is not None and data.terminated is not None
    returns = [float(r) for r in data.returns]
    count = len(lengths)
    per_step = options.get("unit", "steps") == "steps"
    unit = [Fraction(n if per_step else 1) for n in lengths]
    if name == "return_weighted":
        rule = options.get("rule", "softmax")
        heat = options.get("temperature", {"softmax": 0.1, "rank": 1.0, "percentile": 0.1}[rule])
        spread = max(returns) - min(returns)
        if rule == "softmax":
            weights = [
                math.exp(((r - min(returns)) / spread if spread else 0) / heat) for r in returns
            ]
        elif rule == "percentile":
            weights = [math.exp(sum(q <= r for q in returns) / count / heat) for r in returns]
        else:
            weights = [float(1 / r) ** (1 / heat) for r in ranks(returns)]
        return by_episode([w * float(u) for w, u in zip(weights, unit, strict=True)], lengths)
    if name == "stratified_return":
        strata = min(options.get("strata", 4), count)
        order = best(returns)[::-1]
        edges = [i * count // strata for i in range(strata + 1)]
        weights_: list[Fraction] = [Fraction(0)] * count
        for a, b in pairwise(edges):
            whole = sum(unit[e] for e in order[a:b])
            for e in order[a:b]:
                weights_[e] = unit[e] / whole / strata
        return by_episode(weights_, lengths)
    if name == "weighted":
        assert data.column is not None
        values, firsts = data.column(options["column"]).tolist(), data.episodes.offsets.tolist()
        if not per_step:
            return by_episode([Fraction(values[first]) for first in firsts[:-1]], lengths)
        steps = [(e, s) for e, length in enumerate(lengths) for s in range(length)]
        return {
            (e, s, window(lengths[e], s)): float(Fraction(value) / sum(map(Fraction, values)))
            for (e, s), value in zip(steps, values, strict=True)
            if value
        }
    if name == "min_dt":
        law = {}
        for e, length in enumerate(lengths):
            places = max(length - CONTEXT, 0) + 1
            for s in range(places):
                law[e, s, window(length, s)] = 1 / count / places
        return law
    if name == "d3rlpy":
        ends = [
            (e, t)
            for e, length in enumerate(lengths)
            for t in range(length if data.terminated[e] else length - 1)
        ]
        return {(e, max(t - CONTEXT + 1, 0), min(t + 1, CONTEXT)): 1 / len(ends) for e, t in ends}
    if name == "mixture":
        parts, weights_at = options["parts"], options.get("schedule")
        mass = [Fraction(part["weight"]) for part in parts] if weights_at is None else None
        if weights_at is not None:  # at step 0, as before the first point
            mass = [Fraction(weight) for weight in weights_at[0]["weights"]]
        assert mass is not None
        law = {}
        for part, weight in zip(parts, mass, strict=True):
            more = {k: v for k, v in part.items() if k not in ("strategy", "weight")}
            for key, chance in exact_law(part["strategy"], data, **more).items():
                law[key] = law.get(key, 0.0) + float(weight / sum(mass)) * chance
        return {key: chance for key, chance in law.items() if chance}
    order = best(returns)
    if name == "top_k":
        order = order[: options["k"]]
    elif name == "top_percent":  # the best, and more while they are no more than so many percent
        sizes = [1] * count if options.get("of", "steps") == "episodes" else lengths
        most = options.get("percent", 10) * sum(sizes) / 100
        sums = np.cumsum([sizes[e] for e in order])
        order = [e for e, size in zip(order, sums, strict=True) if e == order[0] or size <= most]
    elif name == "recent":
        order = [e for e in range(count) if e == count - 1 or sum(lengths[e:]) <= options["steps"]]
    elif name == "first_episodes":
        assert data.column is not None
        values = [data.column("")[first] for first in data.episodes.offsets[:-1]]
        order = [e for e, value in enumerate(values) if value not in values[:e]]
    elif name == "heap":
        if "column" in options:
            assert data.column is not None
            firsts = data.episodes.offsets[:-1].tolist()
            order = best([float(-data.column("")[first]) for first in firsts])
        order = order[:1]
    elif name == "uniform_episodes":
        unit = [Fraction(1)] * count
    else:
        assert name in EVEN
    return by_episode([u if e in order else Fraction(0) for e, u in enumerate(unit)], lengths)


def p_value(counts: npt.NDArray[Any], expected: npt.NDArray[np.float64]) -> float:
    """Upper tail of the chi-square distribution, cells minus one degrees of freedom."""
    statistic = float(((counts - expected) ** 2 / expected).sum())
    half = torch.tensor([max(counts.size - 1, 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
