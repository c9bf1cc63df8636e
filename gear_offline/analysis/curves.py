"""What strategies learn, as parts of the page: a row of scores each, and curves for the cards.

The picture of scores is one row a strategy on a common axis: a ring for each seed, a bar for the
95 % interval, a stroke for the mean, and a dashed line for the baseline's mean.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from gear_offline.analysis.learning_text import (
    columns_of,
    failed_runs,
    findings_lines,
    interval,
    learning_rows,
    number,
    threshold_line,
    training_line,
    verdict_text,
)
from gear_offline.analysis.svg import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Scale,
    figure,
    picture,
    scale,
)

Row = Mapping[str, Any]
ROW_HEIGHT = 26
_UNBROKEN = re.compile(r"(?<! to)(?<!,) ")


def learning_section(training: Row) -> str:
    """Return the section on final scores: sentences, the picture, the table."""
    rows = learning_rows(training)
    parts = [
        "<h2>What they learn</h2>",
        *(f"<p><strong>{escape(line)}</strong></p>" for line in findings_lines(training)[:1]),
        *(f"<p>{escape(line)}</p>" for line in findings_lines(training)[1:]),
        f'<p class="soft">{escape(training_line(training))}</p>',
        _scores(rows, training),
        f"<p>{escape(training['limits'])}</p>",
        _table(rows, training),
        *(f"<p>Failed: {escape(line)}</p>" for line in failed_runs(training)),
    ]
    goal = threshold_line(training)
    if goal is not None:
        parts.append(f'<p class="soft">{escape(goal)}</p>')
    return "\n".join(parts)


def _scores(rows: Sequence[Row], training: Row) -> str:
    """Return the picture of final returns, if policies were played to the end."""
    good = [row for row in rows if row["final"] and "score" in row["final"]]
    if not good:
        return ""
    ends = [_final_scores(row, training) for row in good]
    values = [value for found in ends for value in found]
    for row in good:
        values += [row["final"]["score"]["mean"]]
    low, high = min(values), max(values)
    room = 0.06 * ((high - low) or abs(high) or 1.0)
    low, high = low - room, high + room
    x = scale(low, high, 4, WIDTH - 4)
    # without a baseline that came to its end there is no dashed line
    base = good[0]["final"]["score"]["mean"] if good[0]["is_baseline"] else None
    lines = [
        _score_row(row, found, x, base, (low, high)) for row, found in zip(good, ends, strict=True)
    ]
    axis = (
        '<div class="score"><span></span><span class="ends" aria-hidden="true">'
        f"<span>{escape(number(low))}</span><span>{escape(number(high))}</span></span>"
        "<span></span></div>"
    )
    caption = (
        "Final return: rings are seeds, the bar is the 95 % interval of the mean over seeds (with "
        "few seeds it is wide, and cut at the edge), the stroke the mean"
        + ("." if base is None else ", the dashed line the baseline's mean.")
    )
    return (
        f'<figure class="scores"><figcaption>{escape(caption)}</figcaption>'
        f"{''.join(lines)}{axis}</figure>"
    )


def _final_scores(row: Row, training: Row) -> list[float]:
    last = training["marks"][-1]
    return [p["score"] for run in row["runs"] for p in run["points"] if p["step"] == last]


def _score_row(
    row: Row, scores: Sequence[float], x: Scale, base: float | None, ends: tuple[float, float]
) -> str:
    found, middle = row["final"]["score"], ROW_HEIGHT / 2
    body = ""
    if base is not None:
        at = f"{x(base):.1f}"
        body = f'<line class="note" x1="{at}" x2="{at}" y1="0" y2="{ROW_HEIGHT}"/>'
    if found["low"] is not None:
        left, right = max(found["low"], ends[0]), min(found["high"], ends[1])
        body += (
            f'<rect class="interval" x="{x(left):.1f}" y="{middle - 4}" '
            f'width="{x(right) - x(left):.1f}" height="8"/>'
        )
    body += "".join(f'<circle class="seed" cx="{x(s):.1f}" cy="{middle}" r="4"/>' for s in scores)
    mean = x(found["mean"])
    body += f'<line class="mean" x1="{mean:.1f}" x2="{mean:.1f}" y1="3" y2="{ROW_HEIGHT - 3}"/>'
    said = verdict_text(row)
    label = (
        f"{row['label']}: mean final return {number(found['mean'])}, 95 percent interval "
        f"{interval(found)}, seeds {', '.join(number(s) for s in scores)}; {said}"
    )
    return (
        f'<div class="score"><span class="who">{breakable(row["label"])}</span>'
        f'<svg viewBox="0 0 {WIDTH} {ROW_HEIGHT}" role="img" aria-label="{escape(label)}">{body}'
        f'</svg><span class="what"><b>{escape(number(found["mean"]))}</b> '
        f"{escape(said)}</span></div>"
    )


def _table(rows: Sequence[Row], training: Row) -> str:
    columns = columns_of(training)
    head = "".join(f"<th>{escape(column.title)}</th>" for column in columns)
    lines = []
    for number_of, row in enumerate(rows):
        cells = "".join(f"<td>{cell(column.text(row))}</td>" for column in columns)
        own = ' class="own"' if number_of == 0 else ""
        lines.append(f"<tr{own}><td>{breakable(row['label'])}</td>{cells}</tr>")
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="Results"><table><thead><tr>'
        f"<th>strategy</th>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def cell(text: str) -> str:
    """Return a figure that may break behind the ``to`` of an interval and behind a comma alone."""
    return escape(_UNBROKEN.sub("\N{NO-BREAK SPACE}", text))


def breakable(label: str) -> str:
    """Return a label that may break behind underscores."""
    return escape(label).replace("_", "_<wbr>")


def learning_figures(label: str, training: Row) -> str:
    """Return the curves of a strategy for its card; nothing if it was not trained."""
    row = next((row for row in training["strategies"] if row["label"] == label), None)
    if row is None or not row["curve"]:
        return ""
    found = []
    if "score" in row["curve"][-1]:
        caption = "Return of the policy over steps: mean and seeds"
        found.append(figure(caption, _return_curve(row, training)))
    caption = "Loss on fixed windows over steps: of all data, and (dotted) of the best tenth"
    found.append(figure(caption, _probe_curve(row, training)))
    return "".join(found)


def _path(points: Sequence[tuple[float, float]], style: str, x: Scale, y: Scale) -> str:
    drawn = "L".join(f"{x(at):.1f} {y(value):.1f}" for at, value in points)
    return f'<path class="{style}" d="M{drawn}"/>' if points else ""


def _means(row: Row, key: str) -> list[tuple[float, float]]:
    return [(p["step"], p[key]["mean"]) for p in row["curve"] if key in p]


def _return_curve(row: Row, training: Row) -> str:
    everything = [
        p["score"]
        for other in training["strategies"]
        for run in other["runs"]
        for p in run["points"]
        if p["score"] is not None
    ]
    low, high = min(everything), max(everything)
    low = min(0.0, low) if high > 0 and low < 0.5 * high else low
    base = training["strategies"][0]
    x = scale(0.0, training["steps"], LEFT, WIDTH - RIGHT)
    y = scale(low, high, HEIGHT - BOTTOM - 2, TOP)
    body = _path(_means(base, "score"), "base", x, y) if row is not base else ""
    for run in row["runs"]:
        points = [(p["step"], p["score"]) for p in run["points"] if p["score"] is not None]
        body += _path(points, "thin", x, y)
    means = _means(row, "score")
    body += _path(means, "drawn", x, y)
    body += "".join(
        f'<circle class="dot" cx="{x(a):.1f}" cy="{y(b):.1f}" r="2.5"/>' for a, b in means
    )
    said = ", ".join(f"{number(value)} after {step:,}" for step, value in means)
    ends = ("0", f"{training['steps']:,} steps")
    return picture(f"mean return {said} steps", body, ends, f"{number(low)} to {number(high)}")


def _probe_curve(row: Row, training: Row) -> str:
    """Losses on a logarithmic axis, which all cards share."""
    keys = ("probe_all", "probe_best")
    everything = [
        p[key]["mean"] for other in training["strategies"] for p in other["curve"] for key in keys
    ]
    tiny = 1e-12
    low, high = (math.log(max(v, tiny)) for v in (min(everything), max(everything)))
    x = scale(0.0, training["steps"], LEFT, WIDTH - RIGHT)
    y = scale(low, high, HEIGHT - BOTTOM - 2, TOP)

    def logs(which: Mapping[str, Any], key: str) -> list[tuple[float, float]]:
        return [(step, math.log(max(value, tiny))) for step, value in _means(which, key)]

    base = training["strategies"][0]
    body = ""
    for key, dashes in zip(keys, ("", " dashed"), strict=True):
        if row is not base:
            body += _path(logs(base, key), f"base{dashes}", x, y)
        body += _path(logs(row, key), f"drawn{dashes}", x, y)
    final = row["curve"][-1]
    label = (
        f"loss at the end {final['probe_all']['mean']:.3g} on windows of all data, "
        f"{final['probe_best']['mean']:.3g} on windows of the best tenth"
    )
    corner = f"{math.exp(low):.3g} to {math.exp(high):.3g}, logarithmic"
    return picture(label, body, ("0", f"{training['steps']:,} steps"), corner)
