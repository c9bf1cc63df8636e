"""The table of a sweep, its curves, plots and texts, against small naive oracles."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gear_offline.config.recipe import Recipe, load_recipe
from gear_offline.errors import InputError
from gear_offline.sweep.directory import SweepDirectory
from gear_offline.sweep.display import SweepDisplay
from gear_offline.sweep.points import SweepPoint, grid, name_points
from gear_offline.sweep.report import load_sweep, print_sweep, sweep_document, write_sweep_report
from gear_offline.sweep.results import RunResult, read_result, steps_done
from gear_offline.sweep.summary import curves, summarize

STEPS = 30
T_95 = {2: 12.7062047, 3: 4.30265273, 4: 3.18244631}  # of a table, by number of values


def recipe(**options: Any) -> Recipe:
    return load_recipe("paper").replace(
        name="made-up", train__steps=STEPS, optimizer__warmup_steps=1, **options
    )


def fill(
    path: Path,
    *,
    losses: list[float],
    returns: list[float],
    complete: bool = True,
    reference: bool = True,
) -> None:
    """Write what a run leaves: losses every 10 steps, returns every 15."""
    path.mkdir(parents=True)
    rows: list[dict[str, Any]]
    rows = [{"step": 10 * (n + 1), "loss": loss} for n, loss in enumerate(losses)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows = [
        {
            "step": 15 * (n + 1),
            "score": value,
            "targets": [
                {"target": 9.0, "mean": value, "normalized": value / 10 if reference else None},
                {"target": 1.0, "mean": value - 1, "normalized": None},
            ],
        }
        for n, value in enumerate(returns)
    ]
    (path / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if complete:
        (path / "summary.json").write_text(json.dumps({"steps": STEPS}))


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Two settings with three seeds; one run of the second setting failed."""
    recipes = grid(recipe(), {"model.layers": [1, 2]}, seeds=[0, 1, 2])
    path = tmp_path / "made-up-sweep"
    with SweepDirectory(path, name_points(recipes), free=()) as directory:
        directory.note(mode="serial", parallel=1)
        for number, point in enumerate(name_points(recipes)):
            fill(
                directory.run_path(point),
                losses=[3.0 + number, 2.0 + number, 1.0 + number],
                returns=[50.0 - number, 40.0 + number],
                complete=number != 4,
            )
        directory.note_run("layers=2,s1", error="LOSS_NONFINITE: the loss | of step 7 is nan")
    return path


def test_the_table_is_the_mean_over_seeds_with_students_interval(sweep: Path) -> None:
    _, points, results = load_sweep(sweep)
    summary = summarize(points, results)
    first, second = summary["rows"]
    assert (first["label"], first["runs"], first["complete"]) == ("model.layers=1", 3, 3)
    assert (second["complete"], second["failed"], second["seeds"]) == (2, ["layers=2,s1"], [0, 2])
    for row, last, best in (
        (first, [40.0, 41.0, 42.0], [50.0, 49.0, 48.0]),
        (second, [43.0, 45.0], [47.0, 45.0]),
    ):
        for name, values in (
            ("return_last", last),
            ("return_best", best),
            ("score_last", [value / 10 for value in last]),
        ):
            mean, count = statistics.fmean(values), len(values)
            half = T_95[count] * statistics.stdev(values) / math.sqrt(count)
            assert row[name]["values"] == values
            assert row[name]["mean"] == pytest.approx(mean)
            assert row[name]["ci95"] == pytest.approx([mean - half, mean + half], rel=1e-6)
    assert summary["best"] == "model.layers=2"
    json.dumps(summary, allow_nan=False)


def test_curves_keep_the_steps_that_all_runs_have(sweep: Path) -> None:
    (sweep / "runs" / "layers=1,s1" / "metrics.jsonl").write_text(
        '{"step": 10, "loss": 4.0}\n{"step": 30, "loss": null}\n{"step": 20, "loss": 3.0}\n{"st'
    )
    _, points, results = load_sweep(sweep)
    found = curves(points, results)
    assert [row["step"] for row in found["model.layers=1"]["loss"]] == [10, 20]
    assert [row["mean"] for row in found["model.layers=1"]["loss"]] == [4.0, 3.0]
    assert [row["step"] for row in found["model.layers=2"]["return"]] == [15, 30]
    half = T_95[2] * statistics.stdev([47.0, 45.0]) / math.sqrt(2)
    assert found["model.layers=2"]["return"][0]["ci95"] == pytest.approx([46 - half, 46 + half])


def test_the_report_names_settings_runs_and_failures(sweep: Path) -> None:
    text = write_sweep_report(sweep).read_text()
    assert text.index("model.layers=2 | 2") < text.index("model.layers=1 | 3"), "best first"
    assert "5 complete, 1 failed" in text
    assert "LOSS_NONFINITE: the loss \\| of step 7 is nan" in text
    assert "[layers=1,s0](runs/layers=1,s0/report.md)" in text
    for name in ("learning_curves", "runs"):
        picture = sweep / "plots" / f"{name}.png"
        assert f"plots/{name}.png" in text
        assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000
    console = Console(record=True, width=120)
    print_sweep(sweep, console=console)
    printed = console.export_text()
    assert "layers=2" in printed and "layers=2,s1 failed: LOSS_NONFINITE" in printed
    document = sweep_document(sweep)
    assert "recipe" not in document["points"][0] and document["points"][0]["seed"] == 0
    assert document["others"] == [] and "not in the table" not in text + printed
    json.dumps(document, allow_nan=False)


def test_the_table_fits_a_terminal_of_80_columns(tmp_path: Path) -> None:
    """Values with decimals stay whole, and so do the numbers beside them."""
    points = name_points(grid(recipe(), {"optimizer.learning_rate": [1e-3, 1e-4]}, seeds=[0, 1]))
    with SweepDirectory(tmp_path / "rates", points, free=()) as directory:
        directory.note(mode="serial")
        for number, point in enumerate(points):
            fill(directory.run_path(point), losses=[1.25 + number], returns=[-1000.0 - number])
    console = Console(record=True, width=80)
    print_sweep(tmp_path / "rates", console=console)
    printed = console.export_text()
    for text in ("learning_rate=0.001 ", "learning_rate=0.0001 ", "-1,000 ", " 1.75"):
        assert text in printed, printed
    # returns, scores and losses: what has no room stands below, its intervals whole
    for text in ("(-1,007 to -994)", "(-101 to -99.4)", "(-4.6 to 8.1)"):
        assert text in printed, printed
    assert max(map(len, printed.splitlines())) <= 80


def test_intervals_stay_in_a_line_without_scores(tmp_path: Path) -> None:
    points = name_points(grid(recipe(), {"optimizer.learning_rate": [1e-3, 1e-4]}, seeds=[0, 1]))
    with SweepDirectory(tmp_path / "rates", points, free=()) as directory:
        directory.note(mode="serial")
        for number, point in enumerate(points):
            path, far = directory.run_path(point), -1000.0 - 40 * number
            fill(path, losses=[1.25 + number / 10], returns=[far], reference=False)
    console = Console(record=True, width=80)
    print_sweep(tmp_path / "rates", console=console)
    printed = console.export_text()
    assert printed.count("(-1,274 to -766)") == 2 and "(0.665 to 1.94)" in printed, printed


def test_a_remedy_that_several_runs_need_is_said_once(sweep: Path) -> None:
    document = json.loads((sweep / "sweep.json").read_text())
    for number, name in ((3, "layers=2,s0"), (4, "layers=2,s1"), (5, "layers=2,s2")):
        cure = "a smaller model" if number < 5 else "a larger disk"
        document["points"][number]["error"] = f"MEMORY: out of memory ({name}); {cure}"
        (sweep / "runs" / name / "summary.json").unlink(missing_ok=True)
    (sweep / "sweep.json").write_text(json.dumps(document))
    console = Console(record=True, width=120)
    print_sweep(sweep, console=console)
    for text in (console.export_text(), write_sweep_report(sweep).read_text()):
        assert text.count("a smaller model") == text.count("a larger disk") == 1
        assert all(f"MEMORY: out of memory (layers=2,s{seed})" in text for seed in range(3))


def test_one_seed_has_no_interval_and_no_evaluation_no_column(tmp_path: Path) -> None:
    path = tmp_path / "alone"
    points = name_points([recipe()])
    with SweepDirectory(path, points, free=()) as directory:
        directory.note(mode="serial")
        fill(directory.run_path(points[0]), losses=[2.0, 1.0], returns=[])
    text = write_sweep_report(path).read_text()
    assert "| made-up | 1 | 1 |" in text and "return" not in text.split("## ")[0]
    assert summarize(*load_sweep(path)[1:])["rows"][0]["loss"]["ci95"] == [None, None]


def test_nothing_done_yet_is_reported_too(tmp_path: Path) -> None:
    points = name_points([recipe()])
    with SweepDirectory(tmp_path / "new", points, free=()) as directory:
        directory.note(mode="serial")
    assert "1 not done" in write_sweep_report(tmp_path / "new").read_text()
    with pytest.raises(InputError) as caught:
        write_sweep_report(tmp_path)
    assert caught.value.code == "SWEEP_DIRECTORY"


@pytest.mark.parametrize("change", [{"points": []}, {"others": [{"name": "s0"}]}])
def test_a_damaged_file_is_refused(sweep: Path, change: dict[str, Any]) -> None:
    document = json.loads((sweep / "sweep.json").read_text())
    (sweep / "sweep.json").write_text(json.dumps(document | change))
    for read in (sweep_document, write_sweep_report):
        with pytest.raises(InputError) as caught:
            read(sweep)
        assert caught.value.code == "SWEEP_DIRECTORY"


def test_the_table_covers_what_was_asked_for_last(sweep: Path) -> None:
    points = name_points(grid(recipe(), {"model.layers": [1]}, [0, 2]), options=["model.layers"])
    with SweepDirectory(sweep, points, free=()) as directory:
        directory.note(mode="serial")
    table, _, runs = write_sweep_report(sweep).read_text().partition("## Runs")
    assert "2 runs of `made-up`: 2 complete" in table and "not in the table: 4 more runs" in table
    assert "| model.layers=1 | 2 |" in table and "layers=2" not in table + runs
    document = sweep_document(sweep)
    assert [row["name"] for row in document["points"]] == ["layers=1,s0", "layers=1,s2"]
    assert len(document["others"]) == 4 and "recipe" not in document["others"][0]


def test_two_processes_do_not_run_one_sweep(tmp_path: Path) -> None:
    points = name_points([recipe()])
    with SweepDirectory(tmp_path, points, free=()):
        with pytest.raises(InputError) as caught:
            SweepDirectory(tmp_path, points, free=())
        assert caught.value.code == "SWEEP_LOCKED"
    SweepDirectory(tmp_path, points, free=()).close()


def test_results_of_runs_in_any_state(tmp_path: Path) -> None:
    point = SweepPoint(name="s0", recipe=recipe(), settings={})
    nothing = read_result(point, tmp_path / "none")
    assert (nothing.status, nothing.steps, nothing.loss) == ("open", 0, None)
    fill(tmp_path / "s0", losses=[2.0], returns=[3.0, 1.0], complete=False)
    result: RunResult = read_result(point, tmp_path / "s0", error="CODE: what")
    assert (result.status, result.error, result.steps) == ("failed", "CODE: what", 10)
    assert result.evaluation_best is not None and result.evaluation_best["step"] == 15
    (tmp_path / "s0" / "summary.json").write_text(json.dumps({"steps": STEPS}))
    assert read_result(point, tmp_path / "s0", error="CODE: before").error is None
    for content in ("", "{", "[]", json.dumps({"steps": STEPS - 1})):
        (tmp_path / "s0" / "summary.json").write_text(content)
        assert read_result(point, tmp_path / "s0").status == "open"


def test_steps_are_read_from_the_end_of_long_files(tmp_path: Path) -> None:
    rows = [json.dumps({"step": n, "loss": 0.5}) + "\n" for n in range(1, 1000)]
    (tmp_path / "metrics.jsonl").write_text("".join(rows) + '{"step": 1000, "lo')
    assert steps_done(tmp_path) == 999
    assert steps_done(tmp_path / "nothing") == 0


def test_the_display_tells_runs_steps_and_the_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 100.0
    monkeypatch.setattr("gear_offline.sweep.display.time.monotonic", lambda: now)
    display = SweepDisplay("mine", {"a": 100, "b": 100, "c": 100}, quiet=False)
    display.begin({"a": 100, "b": 20})
    assert display.facts() == "0 of 3 runs  120 of 300 steps"
    now = 110.0
    display.step("b", 60)
    assert display.facts() == "0 of 3 runs  160 of 300 steps  4 steps/s  left 0:00:35"
    assert "mine: 0 of 3 runs" in capsys.readouterr().err
    display.end("b", "failed")  # what it does not do any more needs no time
    assert "1 of 3 runs  160 of 260 steps" in display.facts()
    assert "left 0:00:25" in display.facts()
    later = SweepDisplay("mine", {"a": 100, "b": 100}, quiet=True)
    later.begin({"a": 100}, complete={"a"})
    assert later.facts() == "1 of 2 runs  100 of 200 steps"
