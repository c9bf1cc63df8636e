"""What an evaluation found: returns for each asked return, with interval and score.

The interval is the two-sided 95 % Student t interval of the mean over episodes.

Shape legend: n episodes of one target.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gear_offline.core.files import write_file
from gear_offline.core.types import BoolArray, Int64Array
from gear_offline.dataset.scores import ReferenceScores, normalized_score
from gear_offline.evaluation.episode_runner import Float64Array
from gear_offline.evaluation.split_table import SplitTable

CONFIDENCE = "two-sided 95 % Student t interval of the mean over episodes"


@dataclass(frozen=True, kw_only=True, eq=False)
class TargetResult:
    """What one asked return led to.

    Attributes
    ----------
    target
        The asked return, in the environment's units.
    returns
        (n,) float64, achieved undiscounted returns.
    lengths
        (n,) int64, steps of each episode.
    terminated
        (n,) bool; False where a time limit ended the episode.
    """

    target: float
    returns: Float64Array
    lengths: Int64Array
    terminated: BoolArray

    @property
    def mean(self) -> float:
        """Mean return."""
        return float(self.returns.mean())

    @property
    def std(self) -> float:
        """Sample standard deviation (n - 1); NaN for a single episode."""
        return float(self.returns.std(ddof=1)) if self.returns.size > 1 else math.nan

    @property
    def ci95(self) -> tuple[float, float]:
        """Lower and upper end of the 95 % interval of the mean; NaN for a single episode."""
        return mean_interval(self.returns)

    def to_json(self, reference: ReferenceScores | None) -> dict[str, Any]:
        """Return a JSON-able document; NaN becomes null."""
        low, high = self.ci95
        scores = [_score(value, reference) for value in (self.mean, low, high)]
        return {
            "target": self.target,
            "episodes": int(self.returns.size),
            "mean": self.mean,
            "std": _number(self.std),
            "ci95": [_number(low), _number(high)],
            "normalized": scores[0],
            "normalized_ci95": scores[1:],
            "min": float(self.returns.min()),
            "max": float(self.returns.max()),
            "length_mean": float(self.lengths.mean()),
            "returns": self.returns.tolist(),
            "lengths": self.lengths.tolist(),
            "terminated": self.terminated.tolist(),
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class EvaluationReport:
    """The results of all asked returns of one policy in one environment.

    Attributes
    ----------
    environment
        Gymnasium id.
    reference
        Scores that 0 and 100 stand for, or ``None`` when none are known.
    results
        One entry a target, in the order asked.
    seed, environments
        First reset seed, and environments side by side.
    seconds
        Wall time of the rollouts.
    run, step
        Name of the run and optimiser step of the weights, where known.
    device
        Where the policy ran, where known.
    versions
        Of the packages that matter, by name.
    """

    environment: str
    reference: ReferenceScores | None
    results: tuple[TargetResult, ...]
    seed: int
    environments: int
    seconds: float
    run: str | None = None
    step: int | None = None
    device: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def best(self) -> TargetResult:
        """The target with the highest mean return.  Say that it was chosen so when citing it."""
        return max(self.results, key=lambda result: result.mean)

    def normalized(self, result: TargetResult) -> float | None:
        """Mean score of `result` on D4RL's scale (0 to 100), ``None`` without reference."""
        return _score(result.mean, self.reference)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON-able document that `evaluate` writes."""
        reference = None
        if self.reference is not None:
            reference = {
                "name": self.reference.name,
                "minimum": self.reference.minimum,
                "maximum": self.reference.maximum,
                "indicative": self.reference.indicative,
                "note": self.reference.note,
            }
        return {
            "environment": self.environment,
            "reference": reference,
            "run": self.run,
            "step": self.step,
            "device": self.device,
            "seed": self.seed,
            "environments": self.environments,
            "seconds": round(self.seconds, 3),
            "confidence": CONFIDENCE,
            "versions": dict(self.versions),
            "targets": [result.to_json(self.reference) for result in self.results],
        }

    def write(self, path: Path) -> None:
        """Write `to_json` to `path`, whole or not at all."""
        write_file(path, (json.dumps(self.to_json(), indent=2, allow_nan=False) + "\n").encode())


def keep_earlier(path: Path) -> Path | None:
    """Copy the result at `path` to ``NAME-1.json``, or the next number that is free.

    Returns
    -------
    Path or None
        The copy; ``None`` when there is nothing to keep.
    """
    if not path.is_file():
        return None
    content = path.read_bytes()
    for number in itertools.count(1):
        kept = path.with_name(f"{path.stem}-{number}{path.suffix}")
        with suppress(FileExistsError), open(kept, "xb") as file:
            file.write(content)
            return kept
    raise AssertionError("numbers do not end")


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _score(value: float, reference: ReferenceScores | None) -> float | None:
    return None if reference is None else _number(float(normalized_score(value, reference)))


def student_t_inside(theta: float, freedom: int) -> float:
    """Return the probability that Student's t lies within ± ``tan(theta) * sqrt(freedom)``.

    The finite series for whole degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4):
    exact to rounding, and no dependency on SciPy.
    """
    cosine, term, total = math.cos(theta), 1.0, 0.0
    odd = freedom % 2 == 1
    for k in range((freedom - 1) // 2 if odd else freedom // 2):
        # odd: cos, cos^3 2/3, cos^5 2*4/(3*5), ...; even: 1, cos^2 1/2, cos^4 1*3/(2*4), ...
        if k == 0:
            term = cosine if odd else 1.0
        else:
            term *= cosine**2 * ((2 * k) / (2 * k + 1) if odd else (2 * k - 1) / (2 * k))
        total += term
    if odd:
        return 2 / math.pi * (theta + math.sin(theta) * total)
    return math.sin(theta) * total


def student_t_quantile(freedom: int, *, level: float = 0.95) -> float:
    """Return t such that Student's t with `freedom` degrees lies within ±t with `level`."""
    low, high = 0.0, math.pi / 2
    for _ in range(100):
        middle = (low + high) / 2
        inside = student_t_inside(middle, freedom)
        low, high = (middle, high) if inside < level else (low, middle)
    return math.tan(low) * math.sqrt(freedom)


def mean_interval(values: Float64Array) -> tuple[float, float]:
    """Return the 95 % Student t interval of the mean of `values` (n,); NaN when n < 2."""
    if values.size < 2:
        return math.nan, math.nan
    half = student_t_quantile(values.size - 1) * float(values.std(ddof=1)) / math.sqrt(values.size)
    return float(values.mean()) - half, float(values.mean()) + half


def evaluation_table(report: EvaluationReport) -> SplitTable:
    """Return the report as a table for the terminal, one row a target."""
    place = f" at step {report.step:,}" if report.step is not None else ""
    rows = []
    for result in report.results:
        low, high = result.ci95
        score = report.normalized(result)
        rows.append(
            (
                f"{result.target:,.6g}",
                f"{result.mean:,.1f}",
                "-" if math.isnan(low) else f"{low:,.1f} .. {high:,.1f}",
                "-" if math.isnan(result.std) else f"{result.std:,.1f}",
                "-" if score is None else f"{score:.1f}",
                f"{result.lengths.mean():,.0f}",
                str(result.returns.size),
            )
        )
    headings = ("asked return", "achieved", "95 % interval", "std", "score", "length", "n")
    return SplitTable(
        columns=[(heading, [row[index] for row in rows]) for index, heading in enumerate(headings)],
        title=f"{report.run or 'policy'}{place} in {report.environment}",
        caption=report.reference.note if report.reference is not None else None,
        numbers=True,
    )
