"""The columns of what strategies learn, as a table in the terminal, and what they mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape

from gear_offline.analysis.significance import LEAST_PAIRS
from gear_offline.analysis.text import Column, Row, print_columns, short
from gear_offline.core.text import count_text, remedies_once, strategies_text


def number(value: float) -> str:
    """Return a return with a sensible number of digits and a true minus sign."""
    return short(value).replace("-", "\N{MINUS SIGN}")


def signed(value: float) -> str:
    """Return a difference with its sign."""
    return f"+{number(value)}" if value > 0 else number(value)


def probability(value: float | None) -> str:
    """Return a p; a dash where there is none."""
    if value is None:
        return "-"
    return "< 0.0001" if value < 1e-4 else f"{value:.2g}"


def interval(found: Mapping[str, Any], write: Any = number) -> str:
    """Return ``low to high``; a dash with one seed."""
    if found["low"] is None:
        return "-"
    return f"{write(found['low'])} to {write(found['high'])}"


def _final(key: str, write: Any = number) -> Any:
    def text(row: Row) -> str:
        final = row["final"]
        return write(final[key]["mean"]) if final and key in final else "-"

    return text


def _final_interval(row: Row) -> str:
    return interval(row["final"]["score"]) if row["final"] else "-"


def _versus(key: str, measure: str = "score") -> Any:
    def text(row: Row) -> str:
        found = (row.get("versus") or {}).get(measure)
        return "-" if found is None else probability(found[key])

    return text


def _difference(row: Row) -> str:
    found = (row.get("versus") or {}).get("score")
    return "-" if found is None else signed(found["mean"])


def _difference_interval(row: Row) -> str:
    found = (row.get("versus") or {}).get("score")
    return "-" if found is None else interval(found, signed)


def verdict_text(row: Row, measure: str = "score") -> str:
    """Return the word on a row: of the baseline, that it is the baseline."""
    if row.get("versus") is None:
        return "baseline" if row.get("is_baseline") else "-"
    found = row["versus"].get(measure)
    return "-" if found is None else str(found["verdict"])


def _median(values: Sequence[float | None]) -> float | None:
    """Return the (upper) median; what is missing counts as later than everything."""
    ordered = sorted(values, key=lambda v: (v is None, v or 0.0))
    return ordered[len(ordered) // 2] if ordered else None


def _reached(row: Row) -> str:
    found = row["threshold"]
    return f"{found['reached']} of {len(found['steps'])}" if found else "-"


def _median_of(key: str) -> Any:
    def text(row: Row) -> str:
        value = _median(row["threshold"][key]) if row["threshold"] else None
        return "-" if value is None else short(value)

    return text


def _along(row: Row) -> str:
    found = row.get("along")
    if found is None:
        return "-"
    said = (row.get("versus") or {}).get("along")
    return number(found["mean"]) + ("" if said is None else f", {said['verdict']}")


def _error(value: float) -> str:
    return f"{value:.3g}"


def _seconds(row: Row) -> str:
    return "-" if row["training_seconds"] is None else short(row["training_seconds"]["mean"])


PLAYED = (
    Column(
        "final return",
        _final("score"),
        "mean over seeds of a run's mean return after its last step, for the asked return that "
        "served it best",
    ),
    Column(
        "95 % interval",
        _final_interval,
        "Student t interval of that mean over seeds, which takes them for normal",
    ),
    Column(
        "against baseline",
        _difference,
        "mean over seeds of the final return minus that of the baseline with the same seed",
    ),
    Column(
        "95 % of it",
        _difference_interval,
        "Student t interval of that mean difference, by itself: not corrected over the "
        "strategies, so it may leave out 0 where the word is within noise",
    ),
    Column(
        "p, t test",
        _versus("holm_p"),
        "paired t test of the difference, after Holm's correction over the strategies",
    ),
    Column(
        "p, signs",
        _versus("permutation_p"),
        "exact paired permutation (sign-flip) test, without correction",
    ),
    Column(
        "so it is",
        verdict_text,
        "higher or lower where the corrected t test says p < 0.05, else within noise; nothing of "
        f"fewer than {LEAST_PAIRS} seeds",
    ),
    Column(
        "along the way",
        _along,
        "mean over seeds of a run's return averaged over all judged steps, and the word on its "
        "difference: less of an accident than the last step, and early learning counts",
    ),
    Column(
        "reached",
        _reached,
        "runs that reached the threshold at a step where policies were played; one lucky step "
        "is enough",
    ),
    Column(
        "steps to it",
        _median_of("steps"),
        "median over seeds of the first such step, the later of two middle ones",
    ),
    Column("seconds to it", _median_of("seconds"), "median over seeds of the training until then"),
)
SCORE = Column("score", _final("normalized"), "final return on D4RL's scale of 0 to 100")
PROBED = (
    Column(
        "error, all",
        _final("probe_all", _error),
        "loss at the end on fixed windows drawn uniformly over all steps, the same for every "
        "strategy; they are part of the training data",
    ),
    Column(
        "error, best",
        _final("probe_best", _error),
        "the same on fixed windows of the best episodes that make up a tenth of the steps",
    ),
    Column("seconds trained", _seconds, "mean seconds of a run's steps, without playing"),
)


PLAYING = (
    "Every policy was played from the same start states, so intervals tell how training varies "
    "with its seed, not how other start states or other data would change it.",
    "A run's return is that of the asked return that served it best. The larger of several noisy "
    "means lies above the truth, more so the closer they are together; the findings for each asked "
    "return alone are free of that.",
    "Higher is a higher return, also where less was asked for: not one closer to what was asked.",
    "Every measure is corrected over the strategies by itself.",
)


def columns_of(training: Row) -> tuple[Column, ...]:
    """Return the columns that a comparison has figures for."""
    if training["environment"] is None:
        return PROBED
    first: tuple[Column, ...] = PLAYED[:2]
    if training["reference"] is not None:
        first = (*first, SCORE)
    return (*first, *PLAYED[2:], *PROBED)


def learning_rows(training: Row) -> list[dict[str, Any]]:
    """Return the rows that tables are made of."""
    base = training["baseline"]
    return [{**row, "is_baseline": row["label"] == base} for row in training["strategies"]]


def training_line(training: Row) -> str:
    """Return what was trained, in a few sentences."""
    seeds = len(training["seeds"])
    runs = len(training["strategies"]) * seeds
    text = (
        f"{strategies_text(len(training['strategies']))}, {count_text(seeds, 'seed')} each: "
        f"{count_text(runs, 'run')} "
        f"of {training['steps']:,} steps on {training['device']}"
        f"{', sharing it' if training['engine'] == 'sweep' else ''}."
    )
    if training["environment"] is not None:
        targets = " and ".join(number(target) for target in training["targets"])
        last, first = (training["episodes"][str(training["marks"][i])] for i in (-1, 0))
        text += (
            f" Policies were played in {training['environment']}, asked for {targets}: {last} "
            f"episodes for each at the end, {first} at the points before."
        )
    return text


def threshold_line(training: Row) -> str | None:
    """Return what the threshold is."""
    found = training["threshold"]
    if found["value"] is None:
        return None
    text = f"Threshold: a return of {number(found['value'])}"
    if found["share"] is not None:
        below = 100 * (1 - found["share"])
        text += f", {below:.0f} % of its size below the best mean of {training['baseline']}"
    return text + "."


def findings_lines(training: Row) -> list[str]:
    """Return what the comparison says, first of final returns, then of each asked return alone.

    Nothing where no policy was played.
    """
    base, targets = training["baseline"], training["targets"]
    found = _finding(training, "score")
    if found is None:
        return []
    lines = [f"Final return against {base}: {found}."]
    for place, target in enumerate(targets if len(targets) > 1 else ()):
        alone = _finding(training, f"target_{place}")
        if alone is not None:
            lines.append(f"Asked for {number(target)} alone: {alone}.")
    return lines


def _finding(training: Row, measure: str) -> str | None:
    """Return which strategies are higher, lower, within noise; None where nothing was compared."""
    groups: dict[str, list[str]] = {}
    for row in training["strategies"][1:]:
        said = (row["versus"] or {}).get(measure)
        if said is not None:
            groups.setdefault(said["verdict"], []).append(row["label"])
    words = [
        f"{word} with {', '.join(groups[word])}" for word in ("higher", "lower") if word in groups
    ]
    noise, few = groups.get("within noise", []), groups.get("too few seeds", [])
    if noise:
        count = f"{'the other' if words or few else 'all'} {len(noise)}"
        words.append(f"within noise with {noise[0] if len(noise) == 1 else count}")
    if few:
        words.append("too few seeds to say" + (f" of {', '.join(few)}" if words else ""))
    return "; ".join(words) or None


def learning_method_lines(training: Row) -> list[str]:
    """Return a line on each figure."""
    lines = [f"{column.title}: {column.meaning}." for column in columns_of(training)]
    goal = threshold_line(training)
    lines += [] if goal is None else [goal]
    if training["environment"] is not None:
        lines += PLAYING
    if training["engine"] == "sweep":
        lines.append(
            "Runs shared one GPU, so seconds are longer than those of a run that has it alone."
        )
    if training["reference"] is not None and training["reference"]["note"]:
        lines.append(f"About the score: {training['reference']['note']}.")
    return lines


def failed_runs(training: Row) -> list[str]:
    """Return a line on each run that did not come to its end."""
    failed = [
        (f"{row['label']}, seed {run['seed']}", str(run["error"]))
        for row in training["strategies"]
        for run in row["runs"]
        if "error" in run
    ]
    errors = remedies_once(error for _, error in failed)
    return [f"{run}: {error}" for (run, _), error in zip(failed, errors, strict=True)]


def print_learning(training: Row, *, console: Console | None = None) -> None:
    """Print what was learnt as tables that fit the terminal."""
    console = Console() if console is None else console
    console.print(escape(training_line(training)), highlight=False)
    print_columns(console, columns_of(training), learning_rows(training))
    last = (threshold_line(training), training["limits"])
    for line in (*findings_lines(training), *last, *failed_runs(training)):
        if line is not None:
            console.print(escape(line), highlight=False)
