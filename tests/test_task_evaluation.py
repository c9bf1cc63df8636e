"""What is said of an evaluation in one line."""

from __future__ import annotations

from typing import Any

import pytest

from gear_offline.evaluation.tasks import outcome


def target(asked: float, mean: float, score: float | None = None) -> dict[str, Any]:
    return {"target": asked, "mean": mean, "normalized": score}


@pytest.mark.parametrize(
    ("targets", "short", "whole"),
    [
        ([target(-765, -983)], "return -983", "asked -765, got -983"),
        ([target(9, 7, 50)], "return 7, score 50.0", "asked 9, got 7, score 50.0"),
        (
            [target(9, 7, 50), target(5, 4, 30)],
            "return 7, score 50.0",
            "asked 9, got 7; asked 5, got 4; best of 2 targets: return 7, score 50.0",
        ),
    ],
)
def test_the_best_is_said_to_be_that_of_the_targets(
    targets: list[dict[str, Any]], short: str, whole: str
) -> None:
    assert outcome({"targets": targets}) == (short, whole)
