"""`gear-offline strategies --train`: figures against plain recomputation, resumption, errors."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from gear_offline import cli, strategies_judge, strategies_plan
from gear_offline.checkpoint import load_policy_parts
from gear_offline.dataset import open_dataset
from gear_offline.evaluate import evaluate
from gear_offline.loaders.loader import GearLoader
from gear_offline.metrics import read_records
from gear_offline.preparation import resolve
from gear_offline.recipe import Recipe, load_recipe
from gear_offline.recipe_checks import check_recipe
from gear_offline.selection import make_selection
from gear_offline.significance import holm, paired
from gear_offline.strategies_candidates import Candidate, parse_candidates
from gear_offline.strategies_judge import Judges, judgements, write_probes
from gear_offline.strategies_learning import busy_seconds, learning_document
from gear_offline.strategies_learning_text import print_learning
from gear_offline.strategies_outlook import Outlook, last_step
from gear_offline.strategies_page import render
from gear_offline.strategies_plan import Point, TrainingPlan, make_plan, run_in_turn, run_together
from gear_offline.strategies_train import _work, train_strategies
from gear_offline.trainer import TrainingInterrupted
from tests.support import failing_code
from tests.test_strategies import Page
from tests.training_support import learnt, register_environment, tiny_data, tiny_recipe

NAMES = "top_k:k=2,uniform_episodes"
SEEDS = 2


def recipe_of(data: Path, *overrides: str) -> Recipe:
    return tiny_recipe(data, "evaluate.targets=[3,1]", "train.evaluate_every=8", *overrides)


def run(recipe: Recipe, out: Path, **options: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {"seeds": SEEDS, "jobs": 0, "quiet": True} | options
    return train_strategies(recipe, parse_candidates(NAMES, recipe), out=out, **settings)


@pytest.fixture(scope="module", autouse=True)
def no_reports() -> Iterator[None]:
    """Reports of single runs, with their plots, take most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gear_offline.report.write_report", lambda run, **_: Path(run))
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def out(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compared")


@pytest.fixture(scope="module")
def document(data: Path, out: Path) -> dict[str, Any]:
    return run(recipe_of(data), out)


def points_of(document: dict[str, Any], label: str, seed: int) -> list[dict[str, Any]]:
    (row,) = (row for row in document["strategies"] if row["label"] == label)
    (found,) = (one for one in row["runs"] if one["seed"] == seed)
    return list(found["points"])


def timeless(document: dict[str, Any]) -> dict[str, Any]:
    """Return the document without what may differ from one time to the next."""
    found = json.loads(json.dumps(document))
    for key in ("wall_seconds", "resumed"):
        del found[key]
    for row in found["strategies"]:
        del row["training_seconds"]
        row["threshold"].pop("seconds")
        for one in row["runs"]:
            for point in one["points"]:
                del point["seconds"]
    return dict(found)


def test_runs_are_ordinary_and_share_everything_but_strategy_and_seed(
    document: dict[str, Any], out: Path
) -> None:
    paths = sorted(p.name for p in (out / "training" / "runs").iterdir())
    assert len(paths) == 6 and "uniform_steps-s1" in paths
    recipes = [load_recipe(p).to_dict() for p in sorted((out / "training" / "runs").iterdir())]
    for one in recipes:
        for key in ("seed", "selection", "name"):
            del one[key]
    assert all(one == recipes[0] for one in recipes)
    assert document["marks"] == [8, 16, 20]
    assert document["episodes"] == {"8": 2, "16": 2, "20": 2}


@pytest.mark.parametrize("label", ["uniform_steps", "top_k k=2"])
def test_scores_are_those_of_evaluating_the_checkpoint(
    document: dict[str, Any], out: Path, tmp_path: Path, label: str
) -> None:
    slug = label.replace(" ", "-")
    for point in points_of(document, label, 1):
        report = evaluate(
            out / "training" / "runs" / f"{slug}-s1",
            checkpoint=point["step"],
            episodes=2,
            device="cpu",
            out=tmp_path / f"{point['step']}.json",
            quiet=True,
        )
        means = [result.mean for result in report.results]
        assert [target["mean"] for target in point["targets"]] == means
        assert point["score"] == max(means)


def test_probes_are_the_mean_error_over_real_steps_of_fixed_windows(
    document: dict[str, Any], data: Path, out: Path
) -> None:
    dataset = open_dataset(data)
    for name, law in (("all", "uniform_steps"), ("best", "top_percent")):
        loader = GearLoader(
            dataset,
            batch_size=strategies_judge.PROBE_WINDOWS,
            context_length=3,
            returns_scale=10.0,
            normalize_states=True,
            selection=make_selection(law, dataset),
            seed=strategies_judge.PROBE_SEED,
            device="cpu",
        )
        batch = loader.batch_at(0)
        point = points_of(document, "top_k k=2", 0)[1]
        folder = out / "training" / "runs" / "top_k-k=2-s0" / "checkpoints" / "step-00000016"
        model = load_policy_parts(folder).model
        with torch.no_grad():
            output = model(**batch.model_inputs(), return_dict=True).action_preds.numpy()
        real = batch.attention_mask.numpy() > 0
        error = np.mean((output[real] - batch.actions.numpy()[real]) ** 2)
        assert point["probes"][name] == pytest.approx(float(error), rel=1e-5)


def test_figures_over_seeds(document: dict[str, Any], out: Path) -> None:
    ends = {
        row["label"]: [one["points"][-1]["score"] for one in row["runs"]]
        for row in document["strategies"]
    }
    row = document["strategies"][1]
    first, second = ends[row["label"]]
    half = 12.7062 * abs(first - second) / math.sqrt(2) / math.sqrt(2)
    final = row["final"]["score"]
    assert final["mean"] == pytest.approx((first + second) / 2)
    assert (final["low"], final["high"]) == pytest.approx(
        (final["mean"] - half, final["mean"] + half), rel=1e-4
    )
    results = [paired(ends[r["label"]], ends["uniform_steps"]) for r in document["strategies"][1:]]
    adjusted = holm([result.t_p for result in results])
    for found, result, p in zip(document["strategies"][1:], results, adjusted, strict=True):
        assert found["versus"]["score"]["mean"] == pytest.approx(result.mean)
        assert found["versus"]["score"]["t_p"] == pytest.approx(result.t_p)
        assert found["versus"]["score"]["holm_p"] == pytest.approx(p)
        assert found["versus"]["score"]["permutation_p"] == result.permutation_p
        assert found["versus"]["seeds"] == [0, 1]
    assert document["strategies"][0]["versus"] is None
    curve = [p["score"]["mean"] for p in document["strategies"][0]["curve"]]
    best = max(curve)
    assert document["threshold"]["value"] == pytest.approx(best - 0.1 * abs(best))
    records = read_records(out / "training" / "runs" / "uniform_steps-s0" / "metrics.jsonl")
    seconds = points_of(document, "uniform_steps", 0)[-1]["seconds"]
    assert seconds == pytest.approx(busy_seconds(records, 20)) and seconds > 0


def test_steps_to_a_threshold(document: dict[str, Any], data: Path, out: Path) -> None:
    scores = [p["score"] for p in points_of(document, "uniform_steps", 0)]
    again = run(recipe_of(data), out, threshold=max(scores))
    found = again["strategies"][0]["threshold"]
    assert found["steps"][0] == document["marks"][scores.index(max(scores))]
    assert again["threshold"] == {"value": max(scores), "share": None}
    far = run(recipe_of(data), out, threshold=1e9)["strategies"][0]["threshold"]
    assert far == {"steps": [None, None], "seconds": [None, None], "reached": 0}


def test_busy_seconds_by_hand() -> None:
    records = [{"step": 3, "step_seconds": 2.0}, {"step": 5, "step_seconds": 1.0}]
    assert busy_seconds(records, 4) == 6.0 and busy_seconds(records, 5) == 8.0
    assert busy_seconds([{"step": 3, "step_seconds": None}], 3) == 0.0


def test_running_again_does_nothing_again(
    document: dict[str, Any], data: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: Any, **__: Any) -> Any:
        raise AssertionError("nothing is left to do")

    monkeypatch.setattr("gear_offline.trainer.train", forbidden)
    monkeypatch.setattr(strategies_judge, "judge", forbidden)
    again = run(recipe_of(data), out)
    assert timeless(again) == timeless(document)
    assert again["resumed"] and not document["resumed"]


def test_another_way_to_judge_judges_again_without_training(
    document: dict[str, Any], data: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gear_offline.trainer.train", None)
    again = run(recipe_of(data, "evaluate.seed=5"), out)
    assert points_of(again, "uniform_steps", 0) != points_of(document, "uniform_steps", 0)
    assert timeless(run(recipe_of(data), out)) == timeless(document), "the old ones are still there"


def test_runs_of_another_recipe_are_refused(
    document: dict[str, Any], data: Path, out: Path
) -> None:
    recipe = recipe_of(data, "optimizer.learning_rate=0.02")
    assert failing_code(lambda: run(recipe, out)) == "RUN_RECIPE"


def victim(data: Path, out: Path) -> None:
    """Train in a process that dies with half a judgement written."""
    register_environment()
    real = Judges._keep

    def deadly(self: Judges, sitting: strategies_judge.Sitting, record: dict[str, Any]) -> None:
        if len(self.done) == 4:
            path = self.plan.out / "judged" / f"{sitting.run}.jsonl"
            with open(path, "ab") as file:
                file.write(json.dumps(record).encode()[:40])
            os.kill(os.getpid(), signal.SIGKILL)
        real(self, sitting, record)

    Judges._keep = deadly  # type: ignore[method-assign]
    run(recipe_of(data), out)


def test_a_killed_comparison_goes_on(
    document: dict[str, Any], data: Path, out: Path, tmp_path: Path
) -> None:
    killed = tmp_path / "killed"

    def stop_early(points: Sequence[Point], folder: Path) -> dict[str, str]:
        run_in_turn(points[:5], folder)
        raise TrainingInterrupted("TRAIN_INTERRUPTED", "stopped")

    kept: list[dict[str, Any]] = []
    with pytest.raises(TrainingInterrupted):
        run(recipe_of(data), killed, run_points=stop_early, on_stop=kept.append)
    assert [row["complete"] for row in kept[0]["strategies"]] == [0, 0, 0], "nothing was judged"
    assert "mean final return" not in render({**PLAIN, "training": kept[0]})
    code = (
        "import sys, pathlib as p, tests.test_strategies_train as t; t.victim(p.Path(sys.argv[1]), "
    )
    code += "p.Path(sys.argv[2]))"
    died = subprocess.run([sys.executable, "-c", code, str(data), str(killed)], check=False)
    assert died.returncode == -signal.SIGKILL
    torn = [p for p in (killed / "judged").iterdir() if not p.read_bytes().endswith(b"\n")]
    assert len(torn) == 1
    assert timeless(run(recipe_of(data), killed)) == timeless(document)
    for path in sorted((killed / "training" / "runs").iterdir()):
        whole = learnt(out / "training" / "runs" / path.name)
        mine = learnt(path)
        for name in ("model", "training", "metrics"):
            assert mine[name] == whole[name], (path.name, name)


def test_a_run_that_fails_is_named_and_only_whole_pairs_are_compared(
    data: Path, tmp_path: Path
) -> None:
    def one_fails(points: Sequence[Point], folder: Path) -> dict[str, str]:
        bad = [point for point in points if point.name == "top_k-k=2-s1"]
        assert run_in_turn([point for point in points if point not in bad], folder) == {}
        return {point.name: "the loss of step 3 is nan" for point in bad}

    found = run(recipe_of(data), tmp_path / "out", run_points=one_fails)
    row = found["strategies"][1]
    assert row["complete"] == 1 and row["versus"]["seeds"] == [0]
    assert row["versus"]["score"]["verdict"] == "one seed"
    assert row["runs"][1]["error"] == "the loss of step 3 is nan"
    console = Console(width=100, record=True)
    print_learning(found, console=console)
    assert "top_k k=2, seed 1: the loss of step 3 is nan" in console.export_text()


def test_a_policy_that_cannot_be_played_is_an_error_of_its_run(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gear_offline.errors import InputError

    real = strategies_judge.judge

    def picky(sitting: strategies_judge.Sitting) -> dict[str, Any]:
        if sitting.run == "uniform_episodes-s0":
            raise InputError("POLICY_NONFINITE", "an action is NaN")
        return real(sitting)

    monkeypatch.setattr(strategies_judge, "judge", picky)
    found = run(recipe_of(data), tmp_path / "out")
    assert "NaN" in found["strategies"][2]["runs"][0]["error"]
    assert found["strategies"][2]["complete"] == 1 and found["strategies"][1]["complete"] == 2


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
    page = render({**PLAIN, "training": {**found, "engine": "serial", "device": "cpu"}})
    assert "error, all" in page and "final return" not in page


def test_errors_beside_training_are_told(data: Path, tmp_path: Path) -> None:
    plan = plan_of(data, tmp_path)
    judges = Judges(plan, strategies_judge.Probes(path=tmp_path, digest=""), jobs=1)

    def broken(trained: threading.Event, stop: threading.Event) -> None:
        raise OSError("no processes")

    judges.sit = broken  # type: ignore[method-assign]
    outlook = Outlook(plan, judges, beside=True, quiet=True)
    with pytest.raises(OSError, match="no processes"):
        _work(plan, judges, lambda points, out: {}, outlook, beside=True)


def plan_of(data: Path, out: Path, *overrides: str, seeds: int = 2) -> TrainingPlan:
    recipe, _ = resolve(recipe_of(data, *overrides), open_dataset(data), quiet=True)
    return make_plan(recipe, parse_candidates(NAMES, recipe), seeds=seeds, out=out)


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

    monkeypatch.setattr("gear_offline.sweep.run_sweep", run_sweep)
    plan = plan_of(data, tmp_path)
    assert run_together(plan.points, tmp_path) == {plan.points[1].name: "x"}
    assert [tmp_path / "training" / "runs" / n for n in asked["names"]] == [
        point.path for point in plan.points
    ]
    assert asked["out"] == tmp_path / "training" and not asked["report"] and asked["quiet"]


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
    ):
        file.write_text(content)
        assert failing_code(lambda: parse_candidates(str(file), recipe)) == "STRATEGIES_FILE"
    file.write_text("- {a: [}")
    assert failing_code(lambda: parse_candidates(str(file), recipe)) == "RECIPE_SYNTAX"
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
    for options in ({"seeds": 0}, {"seeds": 65}, {"jobs": -1}):
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


PLAIN: dict[str, Any] = {}


@pytest.fixture(scope="module", autouse=True)
def plain(data: Path) -> None:
    """Have a document without training at hand."""
    from gear_offline.strategies import compare

    PLAIN.update(compare(recipe_of(data), strategies=NAMES, quiet=True))


def test_the_page(document: dict[str, Any]) -> None:
    text = render({**PLAIN, "training": document})
    page = Page()
    page.feed(text)
    assert page.open == [] and page.loads == [] and page.tags["script"] == 0
    # a row of scores for each; five plots in each card
    assert page.tags["svg"] == 3 + 5 * 3
    assert text.count('role="img"') == 3 + 5 * 3, "every picture has a text"
    assert text.count("aria-label=") >= 18
    assert "What they learn" in text and escape(document["limits"]) in text
    assert "nothing was trained" not in text
    hostile = json.loads(json.dumps(document).replace("top_k k=2", "<script>k"))
    assert "<script>" not in render({**PLAIN, "training": hostile})


@pytest.mark.parametrize("width", [60, 100])
def test_the_tables_fit_the_terminal(document: dict[str, Any], width: int) -> None:
    console = Console(width=width, record=True)
    print_learning(document, console=console)
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= width and "…" not in text
    for word in ("baseline", "reached", "0.5"):
        assert word in text


def test_the_command(data: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = out / "recipe.yaml"
    recipe.write_text(recipe_of(data).to_yaml())
    words = ["strategies", str(recipe), "--strategies", NAMES, "--out", str(out)]
    assert cli.main([*words, "--train", "--seeds", "2", "--jobs", "0", "--json", "-q"]) == 0
    streams = capsys.readouterr()
    shown = json.loads(streams.out)
    assert streams.err == "" and shown["training"]["seeds"] == [0, 1]
    assert json.loads((out / "strategies.json").read_text()) == shown
    assert (out / "strategies.html").read_text() == render(shown)
    assert cli.main([*words, "--train", "--seeds", "2", "--jobs", "0"]) == 0
    streams = capsys.readouterr()
    assert "so it is" in " ".join(streams.out.split()) and "policies played" in streams.err
    assert cli.main([*words, "--seeds", "2"]) == 2
    assert "error[USAGE]" in capsys.readouterr().err


def test_a_signal_while_policies_are_played_keeps_what_there_is(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = strategies_judge.judge
    calls = 0

    def slow(sitting: strategies_judge.Sitting) -> dict[str, Any]:
        nonlocal calls
        calls += 1
        if calls == 10:  # six at step 8, then those of step 16
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Event().wait(1.0)
        return real(sitting)

    monkeypatch.setattr(strategies_judge, "judge", slow)
    kept: list[dict[str, Any]] = []
    with pytest.raises(TrainingInterrupted) as caught:
        run(recipe_of(data), tmp_path / "out", on_stop=kept.append)
    assert caught.value.code == "STRATEGIES_INTERRUPTED"
    points = [len(one["points"]) for row in kept[0]["strategies"] for one in row["runs"]]
    assert sum(points) == 10, "what was being played is kept as well"
    assert "What they learn" in render({**PLAIN, "training": kept[0]})


def test_several_tasks_are_refused(tmp_path: Path) -> None:
    recipe = load_recipe("paper", ["data.tasks={a: {path: x}, b: {path: y}}"])
    assert failing_code(lambda: run(recipe, tmp_path)) == "STRATEGIES_OPTION"


def test_the_page_of_a_study(document: dict[str, Any], tmp_path: Path) -> None:
    from benchmarks.study_page import BEGIN, END, main

    page, found = tmp_path / "study.md", tmp_path / "strategies.json"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    whole = {**PLAIN, "training": document}
    found.write_text(json.dumps(whole))
    main([f"tiny={found}"], page=page)
    text = page.read_text()
    assert "### tiny" in text and "old\n" not in text and text.endswith("\nafter\n")
    assert json.loads(page.with_suffix(".json").read_text()) == {"tiny": whole}
    for row in document["strategies"]:
        lines = [line for line in text.splitlines() if line.startswith(f"| {row['label']} |")]
        assert len(lines) == 3, "final figures, targets and curve, draws and probes"
        assert f"{row['final']['score']['mean']:.3g}".replace("-", "\N{MINUS SIGN}") in lines[0]
    tables = [line.count("|") for line in text.splitlines() if line.startswith("|")]
    assert len(set(tables)) <= 3, "every table has as many cells in each row"
