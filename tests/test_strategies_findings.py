"""What a comparison says: each measure and its correction by hand, words, contrast of the page."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from gear_offline.significance import holm, paired
from gear_offline.strategies_learning import compare_rows
from gear_offline.strategies_learning_text import findings_lines, verdict_text
from gear_offline.strategies_svg import STYLE

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
