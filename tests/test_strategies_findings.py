"""What a comparison says: each measure and its correction by hand, words, contrast of the page."""

from __future__ import annotations

import json
import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.font_manager import FontProperties, findfont, get_font

from benchmarks.study_page import refreshed
from gear_offline.analysis.curves import cell
from gear_offline.analysis.learning import compare_rows, limits_of
from gear_offline.analysis.learning_text import findings_lines, verdict_text
from gear_offline.analysis.page import render
from gear_offline.analysis.significance import holm, limits_text, paired
from gear_offline.analysis.svg import STYLE

STUDY = Path(__file__).parent.parent / "docs" / "studies" / "sampling-on-replay-data.json"
MARKS = (5, 10)
# strategy -> seed -> mean return for each of two targets, after steps 5 and 10
PLAYED: dict[str, list[list[tuple[float, float]]]] = {
    "base": [[(1, 2), (10, 9)], [(2, 1), (11, 12)], [(0, 0), (9, 10)], [(3, 1), (12, 8)]],
    "good": [[(5, 2), (20, 9)], [(6, 1), (21.5, 11)], [(4, 0), (19, 11)], [(7, 1), (22, 9)]],
    "noise": [[(2, 2), (14, 3)], [(0, 1), (4, 12)], [(9, 0), (1, 10)], [(3, 8), (30, 8)]],
}


def rows_of(played: dict[str, list[list[tuple[float, float]]]]) -> list[dict[str, Any]]:
    rows = []
    for label, seeds in played.items():
        runs = []
        for seed, steps in enumerate(seeds):
            points = [
                {
                    "step": step,
                    "score": max(means),
                    "normalized": None,
                    "targets": [
                        {"target": asked, "mean": mean}
                        for asked, mean in zip((30, 10), means, strict=True)
                    ],
                    "probes": {"all": 1.0 + seed, "best": 2.0 + seed},
                    "seconds": float(step),
                }
                for step, means in zip(MARKS, steps, strict=False)
            ]
            runs.append({"seed": seed, "points": points})
        rows.append({"label": label, "runs": runs})
    return rows


def test_every_measure_is_a_family_of_its_own() -> None:
    rows = rows_of(PLAYED)
    assert compare_rows(rows, MARKS, None) == pytest.approx(0.9 * (10 + 12 + 10 + 12) / 4)

    def values(label: str) -> dict[str, list[float]]:
        seeds = PLAYED[label]
        return {
            "score": [max(steps[1]) for steps in seeds],
            "along": [(max(steps[0]) + max(steps[1])) / 2 for steps in seeds],
            "target_0": [steps[1][0] for steps in seeds],
            "target_1": [steps[1][1] for steps in seeds],
        }

    base = values("base")
    for measure in ("score", "along", "target_0", "target_1"):
        results = [paired(values(label)[measure], base[measure]) for label in ("good", "noise")]
        by_t, by_signs = holm([r.t_p for r in results]), holm([r.permutation_p for r in results])
        for place, row in enumerate(rows[1:]):
            found = row["versus"][measure]
            assert (found["mean"], found["t_p"]) == (results[place].mean, results[place].t_p)
            assert (found["holm_p"], found["permutation_holm_p"]) == (by_t[place], by_signs[place])
    assert rows[0]["along"]["mean"] == pytest.approx(np.mean(base["along"]))
    assert rows[1]["versus"]["score"]["verdict"] == "higher"
    assert rows[1]["versus"]["target_1"]["verdict"] == "within noise"


def test_a_step_that_was_not_judged_leaves_no_mean_along_the_way() -> None:
    rows = rows_of(PLAYED)
    del rows[1]["runs"][2]["points"][0]
    compare_rows(rows, MARKS, None)
    assert rows[0]["along"] is not None and rows[1]["along"] is None
    assert "along" not in rows[1]["versus"] and rows[1]["versus"]["score"]["pairs"] == 4
    assert rows[2]["versus"]["along"]["holm_p"] == rows[2]["versus"]["along"]["t_p"]


def test_findings_in_words() -> None:
    rows = rows_of(PLAYED)
    compare_rows(rows, MARKS, None)
    training = {"baseline": "base", "targets": [30, 10], "strategies": rows}
    assert findings_lines(training) == [
        "Final return against base: higher with good; within noise with noise.",
        "Asked for 30 alone: higher with good; within noise with noise.",
        "Asked for 10 alone: within noise with all 2.",
    ]
    rows[1]["versus"]["score"]["verdict"] = rows[2]["versus"]["score"]["verdict"] = "lower"
    assert findings_lines({**training, "targets": [30]}) == [
        "Final return against base: lower with good, noise."
    ]


@pytest.mark.parametrize("seeds", [1, 2])
def test_one_or_two_seeds_are_too_few_to_say(seeds: int) -> None:
    rows = rows_of({label: runs[:seeds] for label, runs in PLAYED.items()})
    compare_rows(rows, MARKS, None)
    assert {row["versus"]["score"]["verdict"] for row in rows[1:]} == {"too few seeds"}
    assert [verdict_text(row) for row in rows[1:]] == ["too few seeds"] * 2
    training = {"baseline": "base", "targets": [30], "strategies": rows}
    assert findings_lines(training) == ["Final return against base: too few seeds to say."]


def test_a_strategy_that_lost_seeds_is_named_beside_the_others() -> None:
    rows = rows_of(PLAYED)
    del rows[2]["runs"][2:]
    compare_rows(rows, MARKS, None)
    training = {"baseline": "base", "targets": [30], "strategies": rows}
    assert findings_lines(training) == [
        "Final return against base: higher with good; too few seeds to say of noise."
    ]


def test_limits_are_of_the_pairs_that_are_complete() -> None:
    rows = rows_of(PLAYED)
    compare_rows(rows, MARKS, None)
    assert limits_of(rows) == limits_text(4, 2)
    for row in (rows[0], rows[2]):  # of the other strategy two pairs are left
        del row["runs"][2:]
    compare_rows(rows, MARKS, None)
    assert limits_of(rows) == limits_text(2, 2)
    rows[0]["runs"] = []
    compare_rows(rows, MARKS, None)
    assert limits_of(rows).startswith("Nothing is compared")
    assert limits_of(rows[:1]).startswith("One strategy")


def test_a_single_strategy_is_told_as_one() -> None:
    study = json.loads(STUDY.read_text())["hopper"]
    study["strategies"], trained = study["strategies"][:1], study["training"]
    trained["strategies"], trained["seeds"] = trained["strategies"][:1], [0]
    study["data"] |= {"episodes": 1, "steps": 7}
    study |= {"batches": 1, "batch_size": 1, "context_length": 1}
    text = render(study)
    assert "1 episode, 7 steps, mean" in text and "1 batch of 1 window of 1 step a strategy" in text
    assert "<h1>What 1 strategy draws and learns from hopper-replay</h1>" in text
    assert "1 strategy, 1 seed each: 1 run of" in text


def test_the_dashed_line_is_the_baselines_or_is_not_there() -> None:
    study = json.loads(STUDY.read_text())["hopper"]
    assert render(study).count('y1="0" y2="26"') == 8
    for one in study["training"]["strategies"][0]["runs"]:
        del one["points"][-1]
    text = render(refreshed(study))
    assert 'y1="0" y2="26"' not in text and "dashed line" not in text
    assert 'd="M"' not in text, "an empty curve is no path"


class Tables(HTMLParser):
    """The rows of a page's tables, each a list of the texts of its cells."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("th", "td"):
            self.tables[-1][-1].append("")
            self.inside = True
        elif tag == "wbr" and self.inside:
            self.tables[-1][-1][-1] += " "

    def handle_endtag(self, tag: str) -> None:
        self.inside &= tag not in ("th", "td")

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.tables[-1][-1][-1] += data


def pixels(text: str, *, bold: bool) -> float:
    """Width in 13 pixels of DejaVu Sans, which is wider than what most readers have."""
    font = get_font(findfont(FontProperties(family="DejaVu Sans", weight=700 if bold else 400)))
    font.set_size(13, 72)
    font.set_text(text)
    return float(font.get_width_height()[0]) / 64


@pytest.mark.parametrize("name", ["hopper", "walker2d"])
def test_the_tables_of_a_page_fit_1200_pixels(name: str) -> None:
    """As a browser lays tables out: a column is no narrower than its longest unbroken piece."""
    text = render(json.loads(STUDY.read_text())[name])
    assert "font-size: .8125rem; font-variant" in text and "padding: .4rem .3rem" in text
    page = Tables()
    page.feed(text)
    assert [len(table) for table in page.tables] == [9, 9]
    for head, *rows in page.tables:
        width = 0.0
        for title, *cells in zip(head, *rows, strict=True):
            pieces = [(piece, True) for piece in title.split(" ")]
            pieces += [(piece, False) for one in cells for piece in one.split(" ")]
            column = max(pixels(piece, bold=bold) for piece, bold in pieces) + 2 * 0.3 * 16
            width += max(column, 8 * 16 if title == "strategy" else 0)
        assert 800 < width <= 1200 - 2 * 16 - 15, "margins and a scroll bar"


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("762 to 1,824", ["762 to", "1,824"]),
        ("\N{MINUS SIGN}738 to +13.7", ["\N{MINUS SIGN}738 to", "+13.7"]),
        ("567, within noise", ["567,", "within noise"]),
        *((whole, [whole]) for whole in ("3 of 5", "> 99.9 %", "< 0.0001", "0.77 M/s", "-")),
    ],
)
def test_cells_break_at_intervals_and_commas_alone(text: str, pieces: list[str]) -> None:
    assert unescape(cell(text)).replace(" ", "|").replace("\xa0", " ").split("|") == pieces


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_contrast_in_both_themes() -> None:
    """WCAG 2.1: 4.5 for text, 3 for graphics that must be seen."""
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    themes = [
        dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", half)) for half in STYLE.split("@media")[:2]
    ]
    assert len(themes) == 2 and themes[0].keys() == themes[1].keys()
    for theme in themes:
        for ground in (theme["page"], theme["card"]):
            for name in ("ink", "soft"):
                assert contrast(theme[name], ground) >= 4.5, name
            for name in ("data", "mark", "base", "soft-mark"):
                assert contrast(theme[name], ground) >= 3, name
