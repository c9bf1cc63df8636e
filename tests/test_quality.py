"""The quality benchmark: both learners run, are judged alike, and its table can tell them apart."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.parity import OURS, RELEASED
from benchmarks.quality import measure, parse, summary, table
from tests.support import make_dataset
from tests.test_parity import SETTINGS


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("quality")
    small = replace(SETTINGS, steps=3, learning_rate=1e-4)
    data = make_dataset(folder, (30, 25, 40)).path
    words = [str(data), "--steps", "3", "--seeds", "2", "--episodes", "0"]
    words += ["--work", str(folder / "work"), "--out", str(folder / "found")]
    words += ["--recipe", "train.threads=1", "train.log_every=1", "model.hidden_size=8"]
    words += ["model.layers=1", "loader.batch_size=8", "loader.context_length=4"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.quality.settings_of", lambda options: small)
        patch.setattr("gear_offline.runs.report.write_report", lambda run, **_: Path(run))
        return measure(parse(words)), folder


def test_both_learners_are_measured(measured: tuple[dict[str, Any], Path]) -> None:
    document, folder = measured
    (found,) = document["datasets"].values()
    for kind in (OURS, RELEASED):
        assert [one["seed"] for one in found["runs"][kind]] == [0, 1]
        assert all(one["seconds"] > 0 for one in found["runs"][kind])
        assert document["steps_per_second_alone"][kind] > 0
    # three steps at a tiny rate from the same weights: nearly the same loss, but not the same
    pairs = zip(found["runs"][OURS], found["runs"][RELEASED], strict=True)
    for ours, theirs in pairs:
        assert ours["probe_loss"] == pytest.approx(theirs["probe_loss"], rel=0.01)
        assert ours["probe_loss"] != theirs["probe_loss"]
    assert json.loads((folder / "found.json").read_text()) == document
    assert (folder / "found.md").read_text() == table(document)
    assert document["settings"]["steps"] == 3 and document["settings"]["warmup_steps"] == 1


def test_the_table_tells_noise_from_a_difference() -> None:
    def runs(ours: list[float], theirs: list[float]) -> dict[str, list[dict[str, Any]]]:
        return {
            kind: [
                {"probe_loss": 0.5, "returns": [value, 1.0], "scores": [value / 10, 0.1]}
                for value in values
            ]
            for kind, values in ((OURS, ours), (RELEASED, theirs))
        }

    same, other = runs([10, 20, 30], [12, 19, 30]), runs([10, 20, 30], [100, 111, 120])
    document = {
        "datasets": {
            name: {"mean_return": 5.0, "best_return": 1234.0, "summary": summary(found)}
            for name, found in (("alike", same), ("apart", other))
        }
    }
    head, _, alike, apart = table(document).splitlines()
    assert "within seed noise" in alike and "| different |" in apart
    assert "| 5, 1,234 |" in alike and "20 (10)" in alike and "2.0 (1.0)" in alike
    assert head.count("|") == alike.count("|") == apart.count("|")
    assert summary(same)["return, asked for the mean"]["difference"] == 0.0
