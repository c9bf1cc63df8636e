"""The plan of `strategies --train`: candidates, runs, playing beside, time left, bad input."""

from __future__ import annotations

import io
import math
import threading
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gear_offline.analysis import judge as strategies_judge
from gear_offline.analysis import plan as strategies_plan
from gear_offline.analysis.candidates import Candidate, parse_candidates
from gear_offline.analysis.judge import Judges, judgements, write_probes
from gear_offline.analysis.learning import busy_seconds, learning_document
from gear_offline.analysis.learning_text import print_learning
from gear_offline.analysis.outlook import Outlook, last_step
from gear_offline.analysis.plan import make_plan, run_in_turn, run_together
from gear_offline.analysis.train import _work, hold_comparison, train_strategies
from gear_offline.cli import main as cli
from gear_offline.config.recipe import Recipe, load_recipe
from gear_offline.dataset.dataset import open_dataset
from gear_offline.runs.checks import check_recipe
from gear_offline.runs.preparation import resolve
from tests.strategies_support import plan_of, recipe_of, run
from tests.support import failing_code


def test_the_sweep_engine_gets_the_points(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def run_sweep(points: Sequence[Recipe], out: Path, **options: Any) -> list[Any]:
        asked.update(points=list(points), out=out, **options)
        names = options["names"]
        return [
            types.SimpleNamespace(
                name=n, status="failed" if n == names[1] else "complete", error="x"
            )
            for n in names
        ]

    monkeypatch.setattr("gear_offline.sweep.sweep.run_sweep", run_sweep)
    plan = plan_of(data, tmp_path)
    assert run_together(plan.points, tmp_path) == {plan.points[1].name: "x"}
    assert [tmp_path / "training" / "runs" / n for n in asked["names"]] == [
        point.path for point in plan.points
    ]
    assert asked["out"] == tmp_path / "training" and not asked["report"] and asked["quiet"]
    assert asked["others"], "strategies and seeds may be added"


def test_time_left(data: Path, tmp_path: Path) -> None:
    plan = plan_of(data, tmp_path)
    judges = Judges(plan, strategies_judge.Probes(path=tmp_path, digest=""), jobs=2)
    outlook = Outlook(plan, judges, beside=True, quiet=True)
    assert outlook.seconds_left(0.0, 0) is None, "nothing is known yet"
    assert outlook.seconds_left(10.0, 0) is None, "nobody has played yet"
    judges.done[plan.points[0].name, 8] = 4.0
    # 6 runs of 3 points, 2 episodes for each target: 17 sittings left at 4 s, two at a time
    assert outlook.seconds_left(10.0, 20) == pytest.approx(max(100 / 10, 17 * 4 / 2))
    after = Outlook(plan, judges, beside=False, quiet=True)
    assert after.seconds_left(10.0, 20) == pytest.approx(100 / 10 + 17 * 4 / 2)
    assert after.seconds_left(0.0, 120) == pytest.approx(17 * 4 / 2)
    assert "1 of 18 policies played" in outlook.line()


def test_where_things_stand_is_said_once(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(data, tmp_path)
    judges = Judges(plan, strategies_judge.Probes(path=tmp_path, digest=""), jobs=2)
    monkeypatch.setattr("gear_offline.analysis.outlook.PLAIN_INTERVAL_SECONDS", 0.0)
    with Outlook(plan, judges, beside=True, quiet=False) as outlook:
        outlook._draw()
        outlook._draw()
    outlook.close()
    (line,) = capsys.readouterr().err.splitlines()
    assert "0 of 18 policies played" in line


def test_the_last_step_is_that_of_the_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert last_step(path) == 0
    path.write_bytes(b'{"step": 3}\n{"step": 5}\n{"st')
    assert last_step(path) == 5
    path.write_bytes(b'{"st')
    assert last_step(path) == 0
    path.write_bytes(b"not json\n")
    assert last_step(path) == 0


def test_candidates_of_a_file(data: Path, tmp_path: Path) -> None:
    recipe = recipe_of(data)
    file = tmp_path / "list.yaml"
    file.write_text(
        "- uniform_episodes\n- top_k:k=3\n- {strategy: top_percent, percent: 5, label: best 5 %}\n"
        "- {strategy: uniform_steps, label: plain}\n"
    )
    found = parse_candidates(str(file), recipe)
    assert [c.label for c in found] == ["plain", "uniform_episodes", "top_k k=3", "best 5 %"]
    assert found[3].options == {"percent": 5}
    names = [c.slug for c in found]
    assert len(set(names)) == 4 and all("/" not in n and " " not in n for n in names)
    for content in (
        "strategy: top_k",
        "[]",
        "- 3",
        "- {percent: 5}",
        "- {strategy: top_k, label: ''}",
        "- {strategy: top_k, k: 2, label: a}\n- {strategy: top_k, k: 3, label: a}",
        "- {strategy: top_k, k: 2, label: a b}\n- {strategy: top_k, k: 3, label: a-b}",
    ):
        file.write_text(content)
        assert failing_code(lambda: parse_candidates(str(file), recipe)) == "STRATEGIES_FILE"
    file.write_text("- {a: [}")
    assert failing_code(lambda: parse_candidates(str(file), recipe)) == "RECIPE"
    missing = str(tmp_path / "no.yaml")
    assert failing_code(lambda: parse_candidates(missing, recipe)) == "STRATEGIES_FILE"


def test_names_of_runs() -> None:
    one = Candidate(strategy="mixture", options={"parts": [{"strategy": "x" * 90}]})
    other = Candidate(strategy="mixture", options={"parts": [{"strategy": "x" * 91}]})
    assert one.label == other.label and one.slug != other.slug
    assert len(one.slug) < 80
    assert Candidate(strategy="top_k", options={"k": 5}).slug == "top_k-k=5"
    hostile = Candidate(strategy="top_k", options={"k": 5}, title="../../x y")
    assert "/" not in hostile.slug and not hostile.slug.startswith(".")


def test_bad_options(data: Path, tmp_path: Path) -> None:
    recipe = recipe_of(data)
    for options in ({"seeds": 0}, {"seeds": 65}, {"jobs": -1}, {"threshold": math.nan}):
        found = failing_code(lambda o=options: run(recipe, tmp_path, **o))  # type: ignore[misc]
        assert found == "STRATEGIES_OPTION"
    many = recipe_of(data, "train.evaluate_every=1", "train.steps=1000")
    assert failing_code(lambda: run(many, tmp_path)) == "STRATEGIES_OPTION"
    assert failing_code(lambda: train_strategies(recipe, [], out=tmp_path)) == "STRATEGIES_OPTION"
    assert not (tmp_path / "training").exists()


def test_points_before_the_last_play_fewer_episodes(data: Path, tmp_path: Path) -> None:
    plan = plan_of(data, tmp_path, "evaluate.episodes=100")
    assert [plan.episodes(mark) for mark in plan.marks] == [10, 10, 100]
    plan = plan_of(data, tmp_path, "evaluate.episodes=20", "train.evaluate_every=null")
    assert plan.marks == tuple(range(2, 21, 2))
    assert [plan.episodes(mark) for mark in plan.marks] == [5] * 9 + [20]
    names = [(point.seed, point.candidate.strategy) for point in plan.points]
    assert names[:3] == [(0, "uniform_steps"), (0, "top_k"), (0, "uniform_episodes")]
    for point in plan.points:
        check_recipe(point.recipe, where=point.name)
    assert strategies_plan.MOST_SEEDS == 64


def test_several_tasks_are_refused(tmp_path: Path) -> None:
    recipe = load_recipe("paper", ["data.tasks={a: {path: x}, b: {path: y}}"])
    assert failing_code(lambda: run(recipe, tmp_path)) == "STRATEGIES_OPTION"


def test_busy_seconds_by_hand() -> None:
    records = [{"step": 3, "step_seconds": 2.0}, {"step": 5, "step_seconds": 1.0}]
    assert busy_seconds(records, 4) == 6.0 and busy_seconds(records, 5) == 8.0
    assert busy_seconds([{"step": 3, "step_seconds": None}], 3) == 0.0


def test_processes_judge_beside_training(data: Path, tmp_path: Path) -> None:
    """Without an environment; the same figures as in this process."""
    recipe, _ = resolve(recipe_of(data, "evaluate.episodes=0"), open_dataset(data), quiet=True)
    candidates = parse_candidates("uniform_episodes", recipe)
    plan = make_plan(recipe, candidates, seeds=1, out=tmp_path / "out")
    probes = write_probes(recipe, open_dataset(data), tmp_path / "out" / "probe.safetensors")
    judges = Judges(plan, probes, jobs=1)
    with Outlook(plan, judges, beside=True, quiet=True) as outlook:
        errors = _work(plan, judges, run_in_turn, outlook, beside=True)
    assert errors == {} and len(judges.done) == 6
    found = learning_document(plan, probes, errors=errors)
    assert found["environment"] is None and found["threshold"]["value"] is None
    row = found["strategies"][1]
    assert row["versus"]["probe_all"]["pairs"] == 1 and "score" not in row["versus"]
    here = Judges(plan, probes, jobs=0)
    assert len(here.done) == 6 and here.waiting() == []
    sitting = strategies_judge.sitting_of(
        plan, probes, plan.points[0], 8, plan.points[0].path / "checkpoints" / "step-00000008"
    )
    stored = judgements(plan, probes, plan.points[0])[0]
    assert strategies_judge.judge(sitting)["probes"] == stored["probes"]
    console = Console(width=100, record=True, file=io.StringIO())
    print_learning({**found, "engine": "serial", "device": "cpu"}, console=console)
    text = " ".join(console.export_text().split())
    assert "error, all error, best seconds trained" in text and "final" not in text


def test_errors_beside_training_are_told(data: Path, tmp_path: Path) -> None:
    plan = plan_of(data, tmp_path)
    judges = Judges(plan, strategies_judge.Probes(path=tmp_path, digest=""), jobs=1)

    def broken(trained: threading.Event, stop: threading.Event) -> None:
        raise OSError("no processes")

    judges.sit = broken  # type: ignore[method-assign]
    outlook = Outlook(plan, judges, beside=True, quiet=True)
    with pytest.raises(OSError, match="no processes"):
        _work(plan, judges, lambda points, out: {}, outlook, beside=True)


def test_the_recipe_and_the_strategies_of_the_study() -> None:
    studies = Path(__file__).parents[1] / "docs" / "studies"
    recipe = load_recipe(studies / "sampling-on-replay-data.yaml")
    check_recipe(recipe, where="study")
    found = parse_candidates(str(studies / "sampling-on-replay-data-strategies.yaml"), recipe)
    assert len(found) == 8 and found[0].strategy == "uniform_steps"
    for candidate in found:
        settings = {"strategy": candidate.strategy, "options": dict(candidate.options)}
        check_recipe(recipe.replace(selection=settings), where=candidate.label)


def test_a_folder_that_is_being_trained_into_is_refused_at_once(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, out = tmp_path / "recipe.yaml", tmp_path / "out"
    recipe.write_text(recipe_of(data).to_yaml())
    words = ["strategies", str(recipe), "--out", str(out), "--train", "--jobs", "0"]
    with hold_comparison(out):
        assert cli.main(words) == 2
        assert [path.name for path in out.iterdir()] == [".lock"]
    streams = capsys.readouterr()
    assert streams.out == "" and streams.err == (
        f"error[STRATEGIES_LOCKED]: another process is training this comparison ({out}); "
        "wait for it, or give another folder with --out\n"
    )
    assert not out.exists(), "nothing was added while it was held"
    assert cli.main([*words, "--strategies", "nonsense"]) == 2
    assert "SELECTION" in capsys.readouterr().err and not out.exists()
