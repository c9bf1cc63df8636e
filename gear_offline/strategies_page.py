"""One HTML page of a comparison of strategies: no scripts, no files beside it, light and dark.

The plots are small SVG pictures whose colours follow the reader's theme.  Every card has the same
three, with the same axes, so that cards can be compared by eye.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from gear_offline.strategies_text import COLUMNS, facts_line, method_lines, short

WIDTH, HEIGHT = 300, 120  # of a plot, in its own units
LEFT, RIGHT, TOP, BOTTOM = 2, 2, 18, 18  # margins of the plot; above it stands its scale
TALLEST = 2.5  # times the data's own tallest bar: higher ones are cut, and it is said

STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1e; --soft: #5f6368; --line: #d8dadd;
  --page: #ffffff; --card: #f6f7f8; --data: #b9bec4; --mark: #0072b2; --other: #c9ced4; }
@media (prefers-color-scheme: dark) { :root { --ink: #eceef0; --soft: #a0a6ad; --line: #3a3e43;
  --page: #141618; --card: #1d2023; --data: #565c63; --mark: #56b4e9; --other: #42474d; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.25rem 1rem 3rem; max-width: 74rem; background: var(--page);
  color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .25rem; }
h2 { font-size: 1.15rem; margin: 2.25rem 0 .5rem; }
h3 { font-size: 1rem; margin: 0 0 .5rem; overflow-wrap: anywhere; }
p, li { max-width: 52rem; } p.soft, li, figcaption, dt { color: var(--soft); }
.scroll { overflow-x: auto; border-block: 1px solid var(--line); }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .4rem .35rem; text-align: right; vertical-align: bottom; white-space: nowrap; }
th { font-weight: 600; color: var(--soft); } th.wide { white-space: normal; min-width: 4.2rem; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0;
  background: var(--page); min-width: 9.5rem; white-space: normal; padding-left: 0; }
tbody tr { border-top: 1px solid var(--line); } tr.own td:first-child { font-weight: 650; }
.cards { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 19rem), 1fr)); }
.card { background: var(--card); border-radius: .6rem; padding: 1rem; }
figure { margin: 0 0 .75rem; } figcaption { font-size: .8125rem; }
svg { display: block; width: 100%; height: auto; overflow: visible; }
svg text { font: 11px system-ui, sans-serif; fill: var(--soft); }
.axis { stroke: var(--line); stroke-width: 1; } .data { fill: var(--data); }
.drawn { fill: none; stroke: var(--mark); stroke-width: 2; stroke-linejoin: round; }
.bar { fill: var(--mark); } .others { fill: none; stroke: var(--other); stroke-width: 1; }
.note { stroke: var(--soft); stroke-width: 1; stroke-dasharray: 3 3; }
dl { display: grid; grid-template-columns: 1fr auto; gap: .1rem .75rem; margin: 0;
  font-size: .875rem; }
dd { margin: 0; text-align: right; font-variant-numeric: tabular-nums; }
"""

Scale = Callable[[float], float]


def render(document: Mapping[str, Any]) -> str:
    """Return the page of a document that `gear_offline.strategies.compare` made."""
    data, rows = document["data"], document["strategies"]
    good = [row for row in rows if "error" not in row]
    bad = [row for row in rows if "error" in row]
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>Strategies: {escape(document['recipe'])}</title>",
        f"<style>{STYLE}</style></head><body>",
        f"<h1>What {len(good)} strategies draw from {escape(_name(data['path']))}</h1>",
        f'<p class="soft">{escape(facts_line(document))}</p>',
        _table(good),
        *(
            f"<p><strong>{escape(row['label'])}</strong> was left out: {escape(row['error'])}</p>"
            for row in bad
        ),
        "<h2>Strategy by strategy</h2>",
        '<p class="soft">Grey: the data, and in the curves the other strategies. Blue: this '
        "strategy. All plots of one kind have the same axes.</p>",
        '<div class="cards">',
        *(_card(row, document, good) for row in good),
        "</div><h2>What the figures mean</h2><ul>",
        *(f"<li>{escape(line)}</li>" for line in method_lines(document)),
        "</ul></body></html>\n",
    ]
    return "\n".join(parts)


def _name(path: str | None) -> str:
    return (path or "the data").rstrip("/").rpartition("/")[2]


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    head = "".join(f'<th class="wide">{escape(column.title)}</th>' for column in COLUMNS)
    lines = []
    for number, row in enumerate(rows):
        cells = "".join(f"<td>{escape(column.text(row))}</td>" for column in COLUMNS)
        own = ' class="own"' if number == 0 else ""
        lines.append(f"<tr{own}><td>{_breakable(row['label'])}</td>{cells}</tr>")
    return (
        '<div class="scroll"><table><thead><tr><th>strategy</th>'
        f"{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def _breakable(label: str) -> str:
    """Return a label that may break behind underscores."""
    return escape(label).replace("_", "_<wbr>")


def _card(
    row: Mapping[str, Any], document: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> str:
    data = document["data"]
    tallest = max(max(r["returns"]) for r in rows)
    tallest = min(tallest, TALLEST * max(data["returns"]))
    oldest = max(max(r["ages"]) for r in rows)
    oldest = max(min(oldest, TALLEST / len(row["ages"])), 1.5 / len(row["ages"]))
    facts = "".join(
        f"<dt>{escape(column.title)}</dt><dd>{escape(column.text(row))}</dd>" for column in COLUMNS
    )
    return (
        f'<section class="card"><h3>{escape(row["label"])}</h3>'
        + _figure("Returns of the episodes drawn, share of draws", _returns(row, data, tallest))
        + _figure("Share of all starts drawn so far, over batches", _coverage(row, rows))
        + _figure("Place in the table, share of draws", _ages(row, oldest))
        + f"<dl>{facts}</dl></section>"
    )


def _figure(caption: str, picture: str) -> str:
    return f"<figure><figcaption>{escape(caption)}</figcaption>{picture}</figure>"


def _scale(low: float, high: float, first: float, last: float) -> Scale:
    span = (high - low) or 1.0
    return lambda value: first + (last - first) * (value - low) / span


def _picture(label: str, body: str, ends: tuple[str, str], corner: str) -> str:
    base = HEIGHT - BOTTOM
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">'
        f'{body}<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>'
        f'<text x="{LEFT}" y="{HEIGHT - 4}">{escape(ends[0])}</text>'
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">{escape(ends[1])}</text>'
        f'<text x="{LEFT}" y="{TOP - 6}">{escape(corner)}</text></svg>'
    )


def _returns(row: Mapping[str, Any], data: Mapping[str, Any], tallest: float) -> str:
    """Bars of the data's steps by return, and a line of what was drawn."""
    edges, base = data["edges"], HEIGHT - BOTTOM
    x = _scale(edges[0], edges[-1], LEFT, WIDTH - RIGHT)
    y = _scale(0.0, tallest, base, TOP)
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
    return _picture(label, bars + line, ends, _corner(row["returns"], tallest))


def _coverage(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    base, last = HEIGHT - BOTTOM, row["coverage"][-1][0]
    x, y = _scale(0.0, last, LEFT, WIDTH - RIGHT), _scale(0.0, 1.0, base, TOP)

    def path(one: Mapping[str, Any], style: str) -> str:
        points = "".join(f"L{x(at):.1f} {y(seen):.1f}" for at, seen, _ in one["coverage"])
        return f'<path class="{style}" d="M{x(0.0):.1f} {base}{points}"/>'

    others = "".join(path(other, "others") for other in rows if other is not row)
    label = f"{100 * row['coverage_starts']:.1f} percent of starts after {last} batches"
    return _picture(label, others + path(row, "drawn"), ("0", f"{last:,} batches"), "100 %")


def _ages(row: Mapping[str, Any], tallest: float) -> str:
    ages, base = row["ages"], HEIGHT - BOTTOM
    x, y = _scale(0.0, len(ages), LEFT, WIDTH - RIGHT), _scale(0.0, tallest, base, TOP)
    bars = "".join(
        f'<rect class="bar" x="{x(place) + 1:.1f}" y="{max(y(share), TOP):.1f}" '
        f'width="{x(1) - x(0) - 2:.1f}" height="{base - max(y(share), TOP):.1f}"/>'
        for place, share in enumerate(ages)
        if share
    )
    even = y(1 / len(ages))
    note = f'<line class="note" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{even:.1f}" y2="{even:.1f}"/>'
    label = "share of draws from the oldest to the newest twentieth of the table"
    return _picture(label, bars + note, ("oldest", "newest"), _corner(ages, tallest))


def _corner(shares: Sequence[float], tallest: float) -> str:
    """Return what the top of a plot stands for, and whether something is cut there."""
    highest = max(shares)
    cut = f", cut here: the highest is {100 * highest:.0f} %" if highest > 1.001 * tallest else ""
    return f"{100 * tallest:.0f} %{cut}"
