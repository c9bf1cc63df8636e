"""The strategies that are compared, and their draws: coverage, repetition, returns, age.

A strategy draws the batches that a training run of the recipe would ask for, up to a number, and
nothing is gathered.  Figures are of those draws, nothing is extrapolated; memory is bounded by the
number of draws and of episodes, whatever the number of steps.

Shape legend: E episodes, N steps of the table, n draws, B slots of a batch, K steps of a window.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gear_offline.batches.sampling import Sampler, parse_strategy, resolve_options
from gear_offline.batches.tables.joint import TableData, data_name
from gear_offline.batches.tables.table import TableOptions, span_index
from gear_offline.config.recipe import Recipe
from gear_offline.config.strict_yaml import read_yaml
from gear_offline.core.text import count_text
from gear_offline.core.types import Float64Array, Int64Array
from gear_offline.errors import InputError, in_home

MOST_DRAWS = 1_000_000  # of a strategy
DRAWS_AT_ONCE = 65_536
POINTS = 20  # of a coverage curve
BINS = 40  # of returns
DEFAULT = (
    *("uniform_steps", "uniform_episodes", "return_weighted", "top_percent"),
    *("stratified_return", "shuffled_epochs", "min_dt", "d3rlpy"),
)
MOST_TEXT = 24  # characters of an option in a label


@dataclass(frozen=True, kw_only=True)
class Draws:
    """Figures of a strategy's draws; page.md.j2 explains each."""

    draws: int
    coverage_starts: float
    coverage_steps: float
    effective_segments: float
    effective_sample_share: float  # (sum w)^2 / (n sum w^2) with w = 1 / probability
    duplicate_starts: float
    padding: float
    mean_return: float
    returns: tuple[float, ...]  # share of the draws in each bin
    median_age: float  # place of the median draw in the table, 0 the newest step, 1 the oldest
    coverage: tuple[tuple[int, float], ...]  # (batches, share of starts drawn) along the way


@dataclass(frozen=True, kw_only=True)
class Data:
    """The data that strategies draw from."""

    path: str
    episodes: int
    steps: int
    mean_return: float
    edges: tuple[float, ...]  # of the bins of returns
    returns: tuple[float, ...]  # share of the steps in each of them


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A strategy with options, and its draws or its error."""

    label: str
    strategy: str
    options: dict[str, Any]
    draws: Draws | None = None
    error: str | None = None


def parse_candidates(request: str | Sequence[Any] | None, recipe: Recipe) -> list[Candidate]:
    """Parse the strategies for `compare_strategies`; the recipe's own comes first."""
    items = DEFAULT if request is None else request
    if isinstance(items, str) and items.strip().endswith((".yaml", ".yml")):
        if not isinstance(items := read_yaml(Path(in_home(items.strip()))), list):
            remedy = "write a name or a mapping a line: - top_k:k=50"
            raise _usage_error(f"{request} holds no list", remedy)
    elif isinstance(items, str):
        items = [text for text in items.split(",") if text.strip()]
    elif callable(items) or isinstance(items, Mapping):
        items = [items]
    if not items:
        raise _usage_error("no strategy is named", "leave it out for the usual ones")
    strategies: dict[tuple[str, str], Candidate] = {}
    recipe_strategy = recipe.selection.strategy, recipe.selection.options
    for name, options in (recipe_strategy, *map(parse_strategy, items)):
        label = options.pop("label", None)
        resolve_options(name, options)
        key = name, str(sorted(options.items()))
        if key not in strategies or label:  # the recipe's own one may be given a label, too
            label = str(label or _label(name, options))
            strategies[key] = Candidate(label=label, strategy=name, options=options)
    labels = [strategy.label for strategy in strategies.values()]
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise _usage_error(
            f"two strategies are called {twice[0]!r}", "give each a label of its own"
        )
    return list(strategies.values())


def _label(name: str, options: Mapping[str, Any]) -> str:
    texts = [f"{key}={value}" for key, value in options.items()]
    short = [t if len(t) <= MOST_TEXT else f"{t[: MOST_TEXT - 3]}..." for t in texts]
    return " ".join([name, *short])


def _usage_error(problem: str, remedy: str) -> InputError:
    return InputError("USAGE", problem, "--strategies", remedy)


def describe(dataset: TableData) -> Data:
    """Describe the data to draw from; refuse returns that are not finite (``COLUMN``)."""
    returns, lengths = dataset.returns, dataset.episodes.lengths
    if bad := int((~np.isfinite(returns)).sum()):
        problem = f"{count_text(bad, 'episode')} with a return that is NaN or infinite"
        remedy = "convert the source again without --allow-nonfinite, or leave them out"
        if "rewards" not in dataset.spec:
            problem = "the data have no rewards, so no returns to compare draws by"
            remedy = "compare scores: `gear-offline sweep RECIPE selection.strategy=A,B --seeds 5`"
        raise InputError("COLUMN", problem, data_name(dataset), remedy)
    shares, edges = _histogram(returns, lengths)
    return Data(
        path=data_name(dataset),
        episodes=dataset.spec.episodes,
        steps=dataset.spec.steps,
        mean_return=float(np.average(returns, weights=lengths)),
        edges=edges,
        returns=shares,
    )


def measure(
    dataset: TableData,
    recipe: Recipe,
    sampler: Sampler,
    batches: int,
    advance: Callable[[int], None] = lambda batches: None,
) -> Draws:
    """Draw the batches of steps 0 to `batches` of a recipe, and count."""
    index = span_index(dataset, TableOptions.of(vars(recipe.loader)))
    returns = dataset.returns
    size, span = recipe.loader.batch_size, recipe.loader.context_length
    pieces, at_once = [], max(1, DRAWS_AT_ONCE // size)
    for first in range(0, batches, at_once):
        count = min(at_once, batches - first)
        pieces.append(sampler.sample(recipe.seed, first, count, size))
        advance(count)
    episodes = np.concatenate([piece.episodes for piece in pieces])  # (batches, B), as starts and p
    starts = np.concatenate([piece.starts for piece in pieces])
    p = np.concatenate([piece.probability for piece in pieces])
    rows, first_rows = index.offsets[episodes] + starts, index.rows[episodes] + starts
    window_steps = np.minimum(index.reach[episodes] - starts, span)
    if cut := [piece.lengths for piece in pieces if piece.lengths is not None]:
        window_steps = np.minimum(window_steps, np.concatenate(cut))
    draws, steps = rows.size, index.steps
    middle = np.partition(rows, (draws - 1) // 2, axis=None)[(draws - 1) // 2]
    _, drawn_at = np.unique(rows, return_index=True)  # where each start is drawn first
    first_batches = np.sort(drawn_at // size)
    marks = sorted({max(1, batches * (i + 1) // POINTS) for i in range(POINTS)})
    coverage = [(mark, int(np.searchsorted(first_batches, mark)) / steps) for mark in marks]
    per_episode = np.bincount(episodes.reshape(-1), minlength=index.episodes)
    weights = 1.0 / p
    # The mean probability of what is drawn is the sum of squared probabilities; where every start
    # comes once an epoch, its probability is 1 and says nothing of it.
    in_turn = (p == 1.0).all() and sampler.density(pieces[0]) is None
    effective = float(steps) if in_turn else min(1.0 / float(p.mean()), float(steps))
    return Draws(
        draws=draws,
        coverage_starts=coverage[-1][1],
        coverage_steps=_count_covered(first_rows.reshape(-1), window_steps.reshape(-1)) / steps,
        effective_segments=effective,
        effective_sample_share=float(weights.sum() ** 2 / (draws * (weights**2).sum())),
        duplicate_starts=int((np.diff(np.sort(rows, axis=1), axis=1) == 0).sum()) / draws,
        padding=1.0 - int(window_steps.sum()) / (draws * span),
        mean_return=float(np.average(returns, weights=per_episode)),
        returns=_histogram(returns, per_episode)[0],
        median_age=1.0 - (float(middle) + 0.5) / steps,
        coverage=tuple(coverage),
    )


def _count_covered(starts: Int64Array, lengths: Int64Array) -> int:
    """Count the steps that lie in at least one of the windows."""
    order = np.argsort(starts)
    first, last = starts[order], (starts + lengths)[order]
    reached = np.maximum.accumulate(last)
    begun = np.maximum(first[1:], reached[:-1])  # where what a window adds begins
    return int(np.maximum(last[1:] - begun, 0).sum() + last[0] - first[0])


def _histogram(
    returns: Float64Array, weights: Int64Array
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the share of `weights` (E,) in each bin of `returns` (E,), and the bins' edges."""
    # NumPy refuses a range of few floats: returns that are equal but for the rounding of sums
    rounded = returns.astype(np.float32).astype(np.float64)
    counts, edges = np.histogram(rounded, BINS, weights=weights)
    return tuple((counts / weights.sum()).tolist()), tuple(edges.tolist())
