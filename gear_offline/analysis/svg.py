"""What the pages of a comparison are drawn with: style, axes, frames of small SVG pictures.

Colours follow the reader's light or dark theme; blue and orange are told apart with any common
colour vision, and lines differ in dashes as well.  Text has a contrast of 4.5 at least, and what
shows a value one of 3; only the grey lines of the other strategies are fainter.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape

WIDTH, HEIGHT = 300, 120  # of a plot, in its own units
LEFT, RIGHT, TOP, BOTTOM = 2, 2, 18, 18  # margins of the plot; above it stands its scale

STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1e; --soft: #5f6368; --line: #d8dadd;
  --page: #ffffff; --card: #f6f7f8; --data: #868d95; --mark: #0072b2; --other: #a3aab2;
  --base: #b35300; --soft-mark: #4a92c2; }
@media (prefers-color-scheme: dark) { :root { --ink: #eceef0; --soft: #a0a6ad; --line: #3a3e43;
  --page: #141618; --card: #1d2023; --data: #6a7179; --mark: #56b4e9; --other: #565c63;
  --base: #e69f00; --soft-mark: #35729c; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.25rem 1rem 3rem; max-width: 74rem; background: var(--page);
  color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .25rem; }
h2 { font-size: 1.15rem; margin: 2.25rem 0 .5rem; }
h3 { font-size: 1rem; margin: 0 0 .5rem; overflow-wrap: anywhere; }
p, li { max-width: 52rem; } p.soft, li, figcaption, dt { color: var(--soft); }
.scroll { overflow-x: auto; border-block: 1px solid var(--line); }
table { border-collapse: collapse; font-size: .8125rem; font-variant-numeric: tabular-nums; }
th, td { padding: .4rem .3rem; text-align: right; vertical-align: bottom; }
th { font-weight: 600; color: var(--soft); }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0;
  background: var(--page); min-width: 8rem; padding-left: 0; }
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
.base { fill: none; stroke: var(--base); stroke-width: 1.5; stroke-dasharray: 6 3; }
.thin { fill: none; stroke: var(--soft-mark); stroke-width: 1; } .dot { fill: var(--mark); }
.drawn.dashed { stroke-dasharray: 2 3; } .base.dashed { stroke-dasharray: 1 3; }
.interval { fill: var(--soft-mark); } .mean { stroke: var(--ink); stroke-width: 3; }
.seed { fill: var(--page); stroke: var(--mark); stroke-width: 1.5; }
.scores { margin: 1rem 0; } .scores figcaption { margin-bottom: .5rem; max-width: 52rem; }
.score { display: grid; grid-template-columns: 13rem minmax(0, 1fr) 11rem; gap: .1rem .75rem;
  align-items: center; font-size: .875rem; } .score .who { overflow-wrap: anywhere; }
.score .what { font-variant-numeric: tabular-nums; color: var(--soft); }
.ends { display: flex; justify-content: space-between; color: var(--soft);
  border-top: 1px solid var(--line); font-size: .8125rem; }
.score b { color: var(--ink); } .score:first-of-type .who { font-weight: 650; }
@media (max-width: 44rem) { .score { grid-template-columns: 1fr auto; margin-bottom: .35rem; }
  .score svg, .score .ends { grid-column: 1 / -1; grid-row: 2; } }
dl { display: grid; grid-template-columns: 1fr auto; gap: .1rem .75rem; margin: 0;
  font-size: .875rem; }
dd { margin: 0; text-align: right; font-variant-numeric: tabular-nums; }
"""

Scale = Callable[[float], float]


def figure(caption: str, picture: str) -> str:
    return f"<figure><figcaption>{escape(caption)}</figcaption>{picture}</figure>"


def scale(low: float, high: float, first: float, last: float) -> Scale:
    span = (high - low) or 1.0
    return lambda value: first + (last - first) * (value - low) / span


def picture(label: str, body: str, ends: tuple[str, str], corner: str) -> str:
    base = HEIGHT - BOTTOM
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">'
        f'{body}<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>'
        f'<text x="{LEFT}" y="{HEIGHT - 4}">{escape(ends[0])}</text>'
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">{escape(ends[1])}</text>'
        f'<text x="{LEFT}" y="{TOP - 6}">{escape(corner)}</text></svg>'
    )
