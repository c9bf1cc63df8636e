"""What a strategy draws, measured without training: coverage, repetition, returns, age, speed.

Every strategy draws the batches that a training run of the recipe would ask for, up to a number,
and nothing is gathered.  Figures are of those draws; nothing is extrapolated.

Shape legend: E episodes, N steps, B slots of a batch, K steps of a window.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gear_offline.analysis.candidates import parse_candidates
from gear_offline.config.recipe import Recipe
from gear_offline.core.progress import Progress, say
from gear_offline.core.system import machine
from gear_offline.core.text import count_text, strategies_text
from gear_offline.core.types import Int64Array
from gear_offline.errors import GearError, InputError
from gear_offline.loaders.recipes import recipe_sampler
from gear_offline.runs.plots import histogram_edges
from gear_offline.runs.preparation import prepare_dataset
from gear_offline.sampling import Sampler, Segments
from gear_offline.tables.joint import TableData, data_name

__all__ = ["compare", "write_comparison"]

Float64Array = npt.NDArray[np.float64]

MOST_DRAWS = 1_000_000  # of a strategy
POINTS = 40  # of a coverage curve
BINS = 40  # of returns
AGES = 20  # bins over the table's order
NODES = (2, 4, 8)  # for which network traffic is predicted
BATCHES_ASSIGNED = 50


def compare(
    recipe: Recipe, *, strategies: str | None = None, quiet: bool = False
) -> dict[str, Any]:
    """Measure strategies on a recipe's data.

    Parameters
    ----------
    recipe
        Names the data, the batch size, the window, the seed and the steps.
    strategies
        What to compare the recipe's own strategy with, as on the command line:
        ``"top_k:k=50,return_weighted:rule=rank"``, or a YAML file; default the usual ones.
    quiet
        Show no progress.

    Returns
    -------
    dict
        JSON-able; docs/strategies.md says what is in it.

    Raises
    ------
    InputError
        ``SELECTION``, ``STRATEGIES_FILE``, ``USAGE`` for `strategies`; ``COLUMN`` for returns
        that are NaN or infinite; those of preparing the recipe's data.
    """
    candidates = parse_candidates(strategies, recipe)
    dataset = prepare_dataset(recipe, quiet=quiet)
    _refuse_nonfinite(dataset)
    batch = recipe.loader.batch_size
    batches = max(1, min(recipe.train.steps, MOST_DRAWS // batch))
    rows: list[dict[str, Any]] = []
    title = strategies_text(len(candidates))
    total = len(candidates) * batches
    with Progress(title, total=total, unit="batches", quiet=quiet) as progress:
        for candidate in candidates:
            head = {"label": candidate.label, "strategy": candidate.strategy}
            try:
                law = recipe_sampler(recipe, dataset, candidate.settings)
                tally = Tally(dataset, recipe, law)
                tally.run(batches, progress.advance)
            except GearError as error:
                say(f"{candidate.label}: {error}", quiet=quiet)
                rows.append({**head, "options": dict(candidate.options), "error": str(error)})
                continue
            rows.append({**head, "options": asdict(law.options), **tally.document()})
    lengths = dataset.episodes.lengths
    return {
        "recipe": recipe.name,
        "seed": recipe.seed,
        "batch_size": batch,
        "context_length": recipe.loader.context_length,
        "batches": batches,
        "data": {
            "path": recipe.data.path,
            "episodes": dataset.spec.episodes,
            "steps": dataset.spec.steps,
            "mean_return": float(np.average(dataset.returns, weights=lengths)),
            "best_return": float(dataset.returns.max()),
            "returns": _shares(dataset.returns, lengths.astype(np.float64)),
            "edges": _edges(dataset.returns),
        },
        "machine": machine(),
        "strategies": rows,
    }


def _refuse_nonfinite(dataset: TableData) -> None:
    """Refuse what has no place in a histogram or a mean, and cannot be trained on."""
    bad = int((~np.isfinite(dataset.returns)).sum())
    if bad:
        raise InputError(
            "COLUMN",
            f"{count_text(bad, 'episode')} with a return that is NaN or infinite",
            where=data_name(dataset),
            remedy="repair the source and convert it again without --allow-nonfinite, or leave "
            "them out with pick_episodes (docs/sources.md)",
        )


def _edges(returns: Float64Array) -> list[float]:
    return [float(edge) for edge in histogram_edges(returns, BINS)]


def _shares(returns: Float64Array, weights: Float64Array) -> list[float]:
    """Return the share of `weights` in each bin of returns."""
    counts, _ = np.histogram(returns, bins=histogram_edges(returns, BINS), weights=weights)
    return [float(share) for share in counts / weights.sum()]


class Tally:
    """Counts what one strategy draws.

    Parameters
    ----------
    dataset
        Lengths and returns of its episodes.
    recipe
        Batch size, window and seed.
    law
        What to measure.
    """

    def __init__(self, dataset: TableData, recipe: Recipe, law: Sampler) -> None:
        self._index, self._returns, self._law = dataset.episodes, dataset.returns, law
        self._batch, self._span = recipe.loader.batch_size, recipe.loader.context_length
        self._seed, self._budget = recipe.seed, recipe.loader.hbm_budget
        self._row_bytes = row_bytes(dataset)
        steps = self._index.steps
        self._started = np.zeros(steps, dtype=np.int64)  # (N,) how often each start was drawn
        self._change = np.zeros(steps + 1, dtype=np.int64)  # its sums: how often a step was shown
        self._episodes = np.zeros(self._index.episodes, dtype=np.int64)  # (E,)
        self._curve: list[tuple[int, float, float]] = []  # batches, starts seen, steps shown
        self._real = self._same_start = self._same_episode = 0
        self._inverse = self._inverse_squared = self._probability = 0.0
        self._certain = True
        self._seconds = 0.0
        self._batches = 0

    def run(self, batches: int, advance: Any) -> None:
        """Draw the batches of steps 0 to `batches`."""
        marks = sorted({max(1, batches * (i + 1) // POINTS) for i in range(POINTS)})
        for begin, end in zip([0, *marks], marks, strict=False):
            most = max(1, 65536 // self._batch)
            for first in range(begin, end, most):
                steps = min(most, end - first)
                began = time.perf_counter()
                drawn = self._law.sample(self._seed, first, steps, self._batch)
                self._seconds += time.perf_counter() - began
                self._count(drawn)
                advance(steps)
            self._batches = end
            shown = np.cumsum(self._change[:-1]) > 0
            self._curve.append((end, float((self._started > 0).mean()), float(shown.mean())))

    def _count(self, drawn: Segments) -> None:
        steps = self._index.steps
        rows = self._index.offsets[drawn.episodes] + drawn.starts
        real = np.minimum(self._index.lengths[drawn.episodes] - drawn.starts, self._span)
        if drawn.lengths is not None:
            real = np.minimum(real, drawn.lengths)
        flat = rows.reshape(-1)
        self._started += np.bincount(flat, minlength=steps)
        self._change += np.bincount(flat, minlength=steps + 1)
        self._change -= np.bincount((rows + real).reshape(-1), minlength=steps + 1)
        self._episodes += np.bincount(drawn.episodes.reshape(-1), minlength=self._episodes.size)
        self._real += int(real.sum())
        self._same_start += _repeats(rows)
        self._same_episode += _repeats(drawn.episodes)
        weights = 1.0 / drawn.probability
        self._inverse += float(weights.sum())
        self._inverse_squared += float((weights * weights).sum())
        self._probability += float(drawn.probability.sum())
        self._certain &= bool((drawn.probability == 1.0).all())

    def document(self) -> dict[str, Any]:
        """Return the figures, JSON-able."""
        steps, draws = self._index.steps, self._batches * self._batch
        shown = np.cumsum(self._change[:-1])
        # The mean probability of what is drawn is the sum of squared probabilities.
        effective = float(steps) if self._certain else draws / self._probability
        ages = self._started * 1.0
        centres = (np.arange(steps) + 0.5) / steps  # 0 is the oldest step, 1 the newest
        cumulative = np.cumsum(ages) / draws
        quartiles = [
            float(1.0 - centres[np.searchsorted(cumulative, q)]) for q in (0.75, 0.5, 0.25)
        ]
        return {
            "draws": draws,
            "coverage_starts": self._curve[-1][1],
            "coverage_steps": self._curve[-1][2],
            "coverage_episodes": float((self._episodes > 0).mean()),
            "effective_segments": min(effective, float(steps)),
            "effective_sample_share": self._inverse**2 / (draws * self._inverse_squared),
            "most_shown_over_mean": float(shown.max() / shown.mean()),
            "duplicate_starts": self._same_start / draws,
            "duplicate_episodes": self._same_episode / draws,
            "padding": 1.0 - self._real / (draws * self._span),
            "mean_return": float(np.average(self._returns, weights=self._episodes)),
            "age_quartiles": quartiles,
            "segments_per_second": draws / self._seconds,
            **self._predictions(shown),
            "returns": _shares(self._returns, self._episodes.astype(np.float64)),
            "ages": [float(share) for share in _parts(self._started, AGES) / draws],
            "coverage": [list(point) for point in self._curve],
        }

    def _predictions(self, shown: Int64Array) -> dict[str, Any]:
        """Return where windows would be read from, and what would cross the network."""
        from gear_offline.tables.placement import plan_episodes

        sizes = self._index.lengths * self._row_bytes
        budget = int(sizes.sum()) // 2 if self._budget is None else self._budget
        weights = np.add.reduceat(shown, self._index.offsets[:-1]).astype(np.float64)
        plan = plan_episodes(sizes, weights, budget)
        return {
            "hbm_budget_bytes": budget,
            "hbm_share": plan.shares[0],
            "window_bytes_per_batch": self._real * self._row_bytes / self._batches,
            "moved_share": {str(nodes): self._moved(nodes) for nodes in NODES},
        }

    def _moved(self, nodes: int) -> float | None:
        """Return the share of segments that leave their node, one rank a node.

        The table is split into runs of episodes of nearly equal steps; the batch is cut to a
        multiple of the ranks.
        """
        from gear_offline.distributed.assignment import Assigner

        count = self._batch // nodes * nodes
        if count == 0 or self._index.episodes < nodes:
            return None
        middle = (self._index.offsets[:-1] + self._index.offsets[1:]) // 2
        homes = np.minimum(middle * nodes // self._index.steps, nodes - 1)
        batches = min(self._batches, BATCHES_ASSIGNED)
        drawn = self._law.sample(self._seed, 0, batches, self._batch)
        moved = Assigner(range(nodes), count).moved(homes[drawn.episodes[:, :count]])
        return float(moved.sum()) / (batches * count)


def _parts(counts: Int64Array, parts: int) -> Float64Array:
    """Return the sums of (N,) `counts` over parts of equal width, (parts,).

    An entry that lies on an edge is divided: parts of whole entries would differ in width, which
    shows where entries are few.
    """
    below = np.concatenate([[0], np.cumsum(counts)])
    edges = np.arange(parts + 1) * counts.size
    whole, rest = np.divmod(edges, parts)
    cut = np.append(counts, 0)[whole] * (rest / parts)
    return np.diff(below[whole] + cut)


def _repeats(values: Int64Array) -> int:
    """Return how many entries of (steps, B) are in their row already, further left."""
    ordered = np.sort(values, axis=1)
    return int((ordered[:, 1:] == ordered[:, :-1]).sum())


def row_bytes(dataset: TableData) -> int:
    """Return the bytes of a step in the loader's table: float32 records, images as they are."""
    floats, images = 2, 0  # reward and return-to-go
    for name in ("observations", "actions"):
        spec = dataset.spec[name]
        if spec.dtype == np.uint8 and len(spec.shape) >= 2:
            images += spec.step_bytes
        else:
            floats += prod(spec.shape)
    return -(-4 * floats // 16) * 16 + images


def write_comparison(document: Mapping[str, Any], out: Path) -> Sequence[Path]:
    """Write ``strategies.json`` and ``strategies.html``; return both paths.

    Parameters
    ----------
    document
        From `compare`.
    out
        Folder; made if it is not there.

    Raises
    ------
    GearError
        ``OUTPUT_WRITE``.
    """
    import json

    from gear_offline.analysis.page import render
    from gear_offline.core.files import write_error, write_file

    data, page = out / "strategies.json", out / "strategies.html"
    text, picture = json.dumps(document, indent=1, allow_nan=False) + "\n", render(document)
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_file(data, text.encode())
        write_file(page, picture.encode())
    except OSError as error:
        raise write_error(error, str(out)) from error
    return data, page
