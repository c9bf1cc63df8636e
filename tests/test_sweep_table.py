"""The table of a sweep, its curves, plots and texts, against small naive oracles."""

import json
import math
import os
import statistics
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gear_offline.config.recipe import load_recipe
from gear_offline.sweep.report import read_sweep
from gear_offline.sweep.trials import SweepDirectory, make_trials
from tests.support import one_error

STEPS = 30
T_95 = {3: 4.30265273, 4: 3.18244631}  # Student's t of a table, by number of values


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def fill(path: Path, *, losses: list[float], returns: list[float], complete: bool = True) -> None:
    """Write what a run leaves: losses every 10 steps, returns every 15."""
    path.mkdir(parents=True)
    lost = [{"step": 10 * (n + 1), "loss": loss} for n, loss in enumerate(losses)]
    write_lines(path / "metrics.jsonl", lost)
    played = [
        {"step": 15 * (n + 1), "return": value, "normalized_score": value / 10, "targets": []}
        for n, value in enumerate(returns)
    ]
    failed = {"step": STEPS + 1, "error": "x", "return": None, "normalized_score": None}
    write_lines(path / "evaluations.jsonl", [*played, failed])
    if complete:
        (path / "summary.json").write_text(json.dumps({"steps": STEPS}))


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Two settings with four seeds; two trials of the second setting failed."""
    base = load_recipe("paper", {"train.steps": STEPS, "optimizer.warmup_steps": 1})
    trials = make_trials(base, {"model.layers": [1, 2]}, range(4))
    names = [trials[n].name for n in (0, 5, 7)]
    failures = {name: f"MEMORY: out of memory | ({name}); a smaller <model>" for name in names}
    directory = SweepDirectory(tmp_path / "made-up-sweep")
    directory.path.mkdir()
    directory.write(directory.file_for(trials).model_copy(update={"failures": failures}))
    for n, trial in enumerate(trials):
        losses, returns = [3.0 + n, 2.0 + n, 1.0 + n], [50.0 - n, 40.0 + n]
        fill(directory.run_path(trial), losses=losses, returns=returns, complete=n not in (5, 7))
    return directory.path


def test_the_table_is_the_mean_over_seeds_with_students_interval(sweep: Path) -> None:
    result = read_sweep(sweep)
    second, first = result.table.rows  # the best one first
    assert (first.label, first.trials, first.seeds) == ("layers=1", 4, (0, 1, 2, 3))
    assert (second.label, second.seeds) == ("layers=2", (0, 2))
    assert second.failed == ("layers=2,s1", "layers=2,s3")
    for name, values in (
        ("return", [40.0, 41.0, 42.0, 43.0]),
        ("best_return", [50.0, 49.0, 48.0, 47.0]),
        ("normalized_score", [4.0, 4.1, 4.2, 4.3]),
        ("loss", [1.0, 2.0, 3.0, 4.0]),
    ):
        estimate = first.estimates[name]
        assert estimate.values == pytest.approx(values)
        assert estimate.mean == pytest.approx(statistics.fmean(values))
        half = T_95[4] * statistics.stdev(values) / 2
        assert estimate.half == pytest.approx(half, rel=1e-6)
    two = second.estimates["return"]
    assert (two.mean, two.half) == (45.0, None), "two seeds have no interval worth its name"
    json.dumps(result.to_json(), allow_nan=False)


def test_the_report_names_settings_runs_and_failures(sweep: Path) -> None:
    result = read_sweep(sweep)
    text = result.write().read_text()
    assert text.index("layers=2 | 2") < text.index("layers=1 | 4")
    assert "6 complete, 2 failed" in text and "out of memory \\| (layers=2,s1)" in text
    assert "<model>" not in text and "a smaller" in text
    assert "[layers=1,s0](runs/layers=1,s0/report.md)" in text
    assert "plots/learning_curves.png" in text
    assert (sweep / "plots" / "learning_curves.png").read_bytes().startswith(b"\x89PNG")
    console = Console(record=True, width=80)
    result.print(console=console)
    printed = console.export_text()
    half = T_95[4] * math.sqrt(5 / 3) / 2
    assert f"41.5 ± {half:.3g}" in printed and "layers=2,s1 failed: MEMORY" in printed
    assert max(map(len, printed.splitlines())) <= 80 and "…" not in printed


def test_several_tasks_are_ranked_by_their_normalized_score(sweep: Path) -> None:
    for place, path in enumerate(sorted((sweep / "runs").iterdir())):
        task = {"return": 5.0, "normalized_score": 7.0}
        row = {"step": 30, "return": None, "normalized_score": 9.0 - place, "tasks": {"a": task}}
        write_lines(path / "evaluations.jsonl", [row])
    table = read_sweep(sweep).table
    assert table.metric == "normalized_score"
    assert [row.label for row in table.rows] == ["layers=1", "layers=2"]
    assert "return" not in table.rows[0].estimates
    assert read_sweep(sweep).write().exists()


@pytest.mark.parametrize("name", ["sweep.json", "runs/layers=1,s0/summary.json"])
def test_damaged_files_of_a_sweep_are_one_error(sweep: Path, name: str) -> None:
    for content in (b"{\n", b"[" * 100_000 + b"\n", b'{"format": 3}\n', None):
        (sweep / name).unlink()
        if content is None:
            os.mkfifo(sweep / name)  # opening it would wait for ever
        else:
            (sweep / name).write_bytes(content)
        with one_error("RUN_DAMAGED"):
            read_sweep(sweep)
