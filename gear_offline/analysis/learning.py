"""From runs and judgements to figures: curves, final scores, thresholds, comparisons in pairs.

Shape legend: n seeds, M steps at which policies were judged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from gear_offline.analysis.judge import PROBES, Probes, judgements
from gear_offline.analysis.plan import Point, TrainingPlan
from gear_offline.analysis.significance import Paired, holm, limits_text, paired, verdict
from gear_offline.evaluation.evaluate import resolve_reference
from gear_offline.evaluation.results import mean_interval
from gear_offline.training.metrics import finite, read_records

THRESHOLD = 0.9  # of the baseline's best mean


def learning_document(
    plan: TrainingPlan,
    probes: Probes,
    *,
    errors: Mapping[str, str],
    threshold: float | None = None,
) -> dict[str, Any]:
    """Return what was learnt, JSON-able; docs/strategies.md says what is in it.

    Parameters
    ----------
    errors
        Of runs that failed, by name.  A strategy is compared over the seeds that it and the
        baseline completed.
    threshold
        The return for "steps to a threshold"; default: 90 % of the baseline's best mean (for a
        negative one, a tenth of its size below it).
    """
    settings = plan.recipe.evaluate
    runs = {point.name: _run(plan, probes, point, errors.get(point.name)) for point in plan.points}
    rows: list[dict[str, Any]] = []
    for candidate in plan.candidates:
        own = [runs[p.name] for p in plan.points if p.candidate is candidate]
        rows.append({"label": candidate.label, "runs": own})
    goal = compare_rows(rows, plan.marks, threshold)
    reference = None
    if settings.environment is not None and settings.episodes:
        reference = resolve_reference(settings.environment, settings.reference)
    whole: dict[str, Any] = finite(
        {
            "baseline": rows[0]["label"],
            "seeds": list(plan.seeds),
            "steps": plan.recipe.train.steps,
            "marks": list(plan.marks),
            "environment": settings.environment if settings.episodes else None,
            "targets": list(settings.targets or ()),
            "episodes": {str(mark): plan.episodes(mark) for mark in plan.marks},
            "reference": None
            if reference is None
            else {"name": reference.name, "note": reference.note},
            "threshold": {
                "value": goal,
                "share": THRESHOLD if threshold is None and goal is not None else None,
            },
            "probes": {name: {"law": law, **options} for name, (law, options) in PROBES.items()},
            "limits": limits_of(rows),
            "strategies": rows,
        }
    )
    return whole


def compare_rows(
    rows: Sequence[dict[str, Any]], marks: Sequence[int], threshold: float | None
) -> float | None:
    """Give rows, which have a ``label`` and ``runs``, everything that follows from these.

    Parameters
    ----------
    rows
        The baseline first.
    marks
        Steps after which policies were judged, the last one being the end.
    threshold
        As `learning_document`.

    Returns
    -------
    float or None
        The threshold; None where there is none and no policy was played.
    """
    for row in rows:
        good = [r for r in row["runs"] if r["points"] and r["points"][-1]["step"] == marks[-1]]
        row.update(_summary(good, marks))
    played = rows[0]["curve"] if rows[0]["curve"] and "score" in rows[0]["curve"][0] else []
    goal = threshold
    if goal is None and played:
        best = max(point["score"]["mean"] for point in played)
        goal = best - (1 - THRESHOLD) * abs(best)
    for row in rows:
        row["threshold"] = _to_threshold(row["runs"], goal)
        row["versus"] = _versus(row["runs"], rows[0]["runs"], marks) if row is not rows[0] else None
    _correct(rows[1:])
    return goal


def limits_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return what the pairs of runs that are compared can show; `rows` are of `compare_rows`."""
    if len(rows) < 2:
        return "One strategy: there is nothing to compare it with."
    pairs = [len(row["versus"]["seeds"]) for row in rows[1:] if row["versus"]]
    if not pairs:
        return "Nothing is compared: no seed is complete with the baseline and another strategy."
    return limits_text(max(pairs), len(pairs))


def _run(plan: TrainingPlan, probes: Probes, point: Point, error: str | None) -> dict[str, Any]:
    """Return what is known of one run: its judgements and the time that training took."""
    records = read_records(point.path / "metrics.jsonl")
    found: list[dict[str, Any]] = []
    for record in judgements(plan, probes, point):
        if None in record["probes"].values():  # no figure can be made of it
            if record["step"] == plan.marks[-1] and error is None:
                error = f"the policy after step {record['step']:,} diverged: its loss is no number"
            continue
        kept = {key: record[key] for key in ("step", "score", "normalized", "probes", "targets")}
        found.append({**kept, "seconds": busy_seconds(records, record["step"])})
    document: dict[str, Any] = {
        "seed": point.seed,
        "path": str(point.path.relative_to(plan.out)),
        "points": found,
    }
    return document if error is None else {**document, "error": error}


def busy_seconds(records: Sequence[Mapping[str, Any]], step: int) -> float:
    """Return the seconds that the steps up to `step` took, by the run's metrics."""
    seconds, before = 0.0, 0
    for record in records:
        if record["step"] > step:
            break
        seconds += (record["step"] - before) * float(record.get("step_seconds") or 0.0)
        before = record["step"]
    return seconds


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Return mean and 95 % Student t interval over seeds; null ends with one value."""
    array = np.asarray(values, dtype=np.float64)
    low, high = mean_interval(array)
    document: dict[str, Any] = finite({"mean": float(array.mean()), "low": low, "high": high})
    return {**document, "n": array.size}


def _summary(runs: Sequence[Mapping[str, Any]], marks: Sequence[int]) -> dict[str, Any]:
    """Return curve and final figures over the runs that are complete."""
    curve = []
    for mark in marks:
        points = [p for run in runs for p in run["points"] if p["step"] == mark]
        if not points or len(points) < len(runs):
            continue
        curve.append({"step": mark, **_figures(points)})
    final = curve[-1] if curve else None
    seconds = [run["points"][-1]["seconds"] for run in runs]
    along = [mean for run in runs if (mean := _along(run, marks)) is not None]
    return {
        "complete": len(runs),
        "curve": curve,
        "final": final,
        "along": spread(along) if along and len(along) == len(runs) else None,
        "training_seconds": spread(seconds) if seconds else None,
    }


def _along(run: Mapping[str, Any], marks: Sequence[int]) -> float | None:
    """Return the mean score of a run over all judged steps; None if one is missing."""
    scores = [p["score"] for p in run["points"] if p["step"] in marks and p["score"] is not None]
    return float(np.mean(scores)) if len(scores) == len(marks) else None


def _figures(points: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {
        f"probe_{name}": spread([p["probes"][name] for p in points]) for name in PROBES
    }
    if all(p["score"] is not None for p in points):
        found["score"] = spread([p["score"] for p in points])
        found["targets"] = [
            {
                "target": target["target"],
                **spread([p["targets"][place]["mean"] for p in points]),
            }
            for place, target in enumerate(points[0]["targets"])
        ]
    if all(p["normalized"] is not None for p in points):
        found["normalized"] = spread([p["normalized"] for p in points])
    return found


def _to_threshold(runs: Sequence[Mapping[str, Any]], goal: float | None) -> dict[str, Any] | None:
    """Return the first judged step, and its seconds, at which each run reached `goal`."""
    if goal is None:
        return None
    steps: list[int | None] = []
    seconds: list[float | None] = []
    for run in runs:
        reached = [p for p in run["points"] if p["score"] is not None and p["score"] >= goal]
        steps.append(reached[0]["step"] if reached else None)
        seconds.append(reached[0]["seconds"] if reached else None)
    return {"steps": steps, "seconds": seconds, "reached": sum(s is not None for s in steps)}


def _versus(
    runs: Sequence[Mapping[str, Any]],
    baseline: Sequence[Mapping[str, Any]],
    marks: Sequence[int],
) -> dict[str, Any] | None:
    """Compare the ends of runs with those of the baseline, seed by seed."""
    ends = {run["seed"]: _end(run, marks) for run in runs}
    others = {run["seed"]: _end(run, marks) for run in baseline}
    pairs = {s: (new, old) for s, new in ends.items() if new and (old := others.get(s))}
    if not pairs:
        return None
    found: dict[str, Any] = {"seeds": list(pairs)}
    first = next(iter(pairs.values()))[0]
    for name in first:
        if all(name in new and name in old for new, old in pairs.values()):
            result = paired(
                [n[name] for n, _ in pairs.values()], [o[name] for _, o in pairs.values()]
            )
            found[name] = asdict(result)
    return found


def _end(run: Mapping[str, Any], marks: Sequence[int]) -> dict[str, float] | None:
    """Return the measures of a run; None if it did not come to its end.

    ``score``, ``along`` (its mean over the judged steps), ``target_0`` and so on (the mean return
    for each target by itself), and the probes.
    """
    last = run["points"][-1] if run["points"] else None
    if last is None or last["step"] != marks[-1]:
        return None
    found: dict[str, float] = {}
    if last["score"] is not None:
        found["score"] = float(last["score"])
        along = _along(run, marks)
        if along is not None:
            found["along"] = along
        for place, target in enumerate(last["targets"]):
            found[f"target_{place}"] = float(target["mean"])
    return found | {f"probe_{name}": float(value) for name, value in last["probes"].items()}


def _correct(rows: Sequence[dict[str, Any]]) -> None:
    """Add Holm's correction over the strategies, and a word, to each comparison.

    Each measure is a family of its own.
    """
    compared = [row["versus"] for row in rows if row["versus"]]
    for name in {key: None for versus in compared for key in versus if key != "seeds"}:
        results = [versus[name] for versus in compared if name in versus]
        adjusted = holm([r["t_p"] for r in results])
        signs = holm([r["permutation_p"] for r in results])
        for result, by_t, by_signs in zip(results, adjusted, signs, strict=True):
            fields = {key: result[key] for key in Paired.__dataclass_fields__}
            result["holm_p"], result["permutation_holm_p"] = by_t, by_signs
            result["verdict"] = verdict(Paired(**fields), by_t)
