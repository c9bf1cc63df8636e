"""One HTML page of a comparison of strategies: no scripts, no files beside it, light and dark.

The plots are small SVG pictures whose colours follow the reader's theme.  Every card has the same
three, with the same axes, so that cards can be compared by eye.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from gear_offline.analysis.curves import breakable, cell, learning_figures, learning_section
from gear_offline.analysis.learning_text import learning_method_lines
from gear_offline.analysis.svg import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    STYLE,
    TOP,
    WIDTH,
    figure,
    picture,
    scale,
)
from gear_offline.analysis.text import COLUMNS, facts_line, method_lines, short
from gear_offline.core.text import strategies_text

TALLEST = 2.5  # times the data's own tallest bar: much higher ones are cut, and it is said
SPARED = 1.5  # a bar is cut only if it is beyond so many times the height of the plots


def render(document: Mapping[str, Any]) -> str:
    """Return the page of a document that `gear_offline.analysis.strategies.compare` made.

    With ``training`` in it, from `gear_offline.analysis.train.train_strategies`, the page begins
    with what was learnt.
    """
    data, rows, training = document["data"], document["strategies"], document.get("training")
    good = [row for row in rows if "error" not in row]
    bad = [row for row in rows if "error" in row]
    does = "draw from" if training is None else "draw and learn from"
    if len(good) == 1:
        does = does.replace("draw", "draws").replace("learn", "learns")
    lines = method_lines(document)
    if training is not None:
        lines = learning_method_lines(training) + lines
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>Strategies: {escape(document['recipe'])}</title>",
        f"<style>{STYLE}</style></head><body>",
        f"<h1>What {strategies_text(len(good))} {does} {escape(_name(data['path']))}</h1>",
        f'<p class="soft">{escape(facts_line(document))}</p>',
        "" if training is None else learning_section(training),
        "" if training is None else "<h2>What they draw</h2>",
        _table(good),
        *(
            f"<p><strong>{escape(row['label'])}</strong> was left out: {escape(row['error'])}</p>"
            for row in bad
        ),
        "<h2>Strategy by strategy</h2>",
        f'<p class="soft">{escape(_legend(training))}</p>',
        '<div class="cards">',
        *(_card(row, document, good) for row in good),
        "</div><h2>What the figures mean</h2><ul>",
        *(f"<li>{escape(line)}</li>" for line in lines),
        "</ul></body></html>\n",
    ]
    return "\n".join(parts)


def _legend(training: Mapping[str, Any] | None) -> str:
    legend = (
        "Grey: the data, and in the curves the other strategies. Blue: this strategy. All plots of "
        "one kind have the same axes."
    )
    if training is None:
        return legend
    return f"{legend} Orange, in the curves of learning: the baseline, {training['baseline']}."


def _name(path: str | None) -> str:
    return (path or "the data").rstrip("/").rpartition("/")[2]


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    head = "".join(f"<th>{escape(column.title)}</th>" for column in COLUMNS)
    lines = []
    for number, row in enumerate(rows):
        cells = "".join(f"<td>{cell(column.text(row))}</td>" for column in COLUMNS)
        own = ' class="own"' if number == 0 else ""
        lines.append(f"<tr{own}><td>{breakable(row['label'])}</td>{cells}</tr>")
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="Draws"><table><thead><tr>'
        f"<th>strategy</th>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def _card(
    row: Mapping[str, Any], document: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> str:
    data = document["data"]
    even = 1 / len(row["ages"])
    tallest = _top([max(r["returns"]) for r in rows], TALLEST * max(data["returns"]))
    oldest = max(_top([max(r["ages"]) for r in rows], TALLEST * even), 1.5 * even)
    facts = "".join(
        f"<dt>{escape(column.title)}</dt><dd>{escape(column.text(row))}</dd>" for column in COLUMNS
    )
    training = document.get("training")
    learned = "" if training is None else learning_figures(row["label"], training)
    return (
        f'<section class="card"><h3>{escape(row["label"])}</h3>'
        + learned
        + figure("Returns of the episodes drawn, share of draws", _returns(row, data, tallest))
        + figure("Share of all starts drawn so far, over batches", _coverage(row, rows))
        + figure("Place in the table, share of draws", _ages(row, oldest))
        + f"<dl>{facts}</dl></section>"
    )


def _top(heights: Sequence[float], most: float) -> float:
    """Return where all plots of one kind end, whose highest bars are `heights`.

    Bars beyond `most` are cut, except where plots would have to be little taller to hold them.
    """
    top = min(most, max(heights))
    for height in sorted(heights):
        if top < height <= SPARED * top:
            top = height
    return top


def _returns(row: Mapping[str, Any], data: Mapping[str, Any], tallest: float) -> str:
    """Bars of the data's steps by return, and a line of what was drawn."""
    edges, base = data["edges"], HEIGHT - BOTTOM
    x = scale(edges[0], edges[-1], LEFT, WIDTH - RIGHT)
    y = scale(0.0, tallest, base, TOP)
    top = float(TOP)
    bars = "".join(
        f'<rect class="data" x="{x(a):.1f}" y="{y(share):.1f}" width="{x(b) - x(a):.1f}" '
        f'height="{base - y(share):.1f}"/>'
        for a, b, share in zip(edges, edges[1:], data["returns"], strict=False)
        if share
    )
    points = [f"M{x(edges[0]):.1f} {base}"]
    for a, b, share in zip(edges, edges[1:], row["returns"], strict=False):
        level = max(y(share), top)
        points.append(f"L{x(a):.1f} {level:.1f}L{x(b):.1f} {level:.1f}")
    line = f'<path class="drawn" d="{"".join(points)}L{x(edges[-1]):.1f} {base}"/>'
    label = (
        f"mean return drawn {short(row['mean_return'])}, of the data {short(data['mean_return'])}"
    )
    ends = (short(edges[0]), short(edges[-1]))
    return picture(label, bars + line, ends, _corner(row["returns"], tallest))


def _coverage(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    base, last = HEIGHT - BOTTOM, row["coverage"][-1][0]
    x, y = scale(0.0, last, LEFT, WIDTH - RIGHT), scale(0.0, 1.0, base, TOP)

    def path(one: Mapping[str, Any], style: str) -> str:
        points = "".join(f"L{x(at):.1f} {y(seen):.1f}" for at, seen, _ in one["coverage"])
        return f'<path class="{style}" d="M{x(0.0):.1f} {base}{points}"/>'

    others = "".join(path(other, "others") for other in rows if other is not row)
    label = f"{100 * row['coverage_starts']:.1f} percent of starts after {last} batches"
    return picture(label, others + path(row, "drawn"), ("0", f"{last:,} batches"), "100 %")


def _ages(row: Mapping[str, Any], tallest: float) -> str:
    ages, base = row["ages"], HEIGHT - BOTTOM
    x, y = scale(0.0, len(ages), LEFT, WIDTH - RIGHT), scale(0.0, tallest, base, TOP)
    bars = "".join(
        f'<rect class="bar" x="{x(place) + 1:.1f}" y="{max(y(share), TOP):.1f}" '
        f'width="{x(1) - x(0) - 2:.1f}" height="{base - max(y(share), TOP):.1f}"/>'
        for place, share in enumerate(ages)
        if share
    )
    even = y(1 / len(ages))
    note = f'<line class="note" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{even:.1f}" y2="{even:.1f}"/>'
    label = "share of draws from the oldest to the newest twentieth of the table"
    return picture(label, bars + note, ("oldest", "newest"), _corner(ages, tallest))


def _corner(shares: Sequence[float], tallest: float) -> str:
    """Return what the top of a plot stands for, and whether something is cut there."""
    highest = max(shares)
    cut = f", cut here: the highest is {100 * highest:.0f} %" if highest > 1.001 * tallest else ""
    return f"{100 * tallest:.0f} %{cut}"
