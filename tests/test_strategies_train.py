"""`gear-offline strategies --train`: figures against plain recomputation, resumption, errors."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from gear_offline.analysis import judge as strategies_judge
from gear_offline.analysis.judge import Judges
from gear_offline.analysis.learning import busy_seconds
from gear_offline.analysis.learning_text import print_learning
from gear_offline.analysis.page import render
from gear_offline.analysis.plan import Point, run_in_turn
from gear_offline.analysis.significance import holm, paired
from gear_offline.cli import main as cli
from gear_offline.config.recipe import load_recipe
from gear_offline.dataset.dataset import open_dataset
from gear_offline.loaders.loader import GearLoader
from gear_offline.runs.evaluate import evaluate
from gear_offline.runs.trainer import TrainingInterrupted
from gear_offline.sampling import make_sampler
from gear_offline.training.checkpoint_folder import list_checkpoints
from gear_offline.training.metrics import read_records
from gear_offline.training.policies import load_policy_parts
from tests.strategies_support import NAMES, plan_of, recipe_of, run
from tests.support import failing_code
from tests.test_resume import interrupted_in
from tests.test_strategies import Page
from tests.training_support import learnt, register_environment

pytestmark = pytest.mark.usefixtures("no_reports")


@pytest.fixture(scope="module")
def out(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compared")


@pytest.fixture(scope="module")
def document(data: Path, out: Path) -> dict[str, Any]:
    return run(recipe_of(data), out)


def trained(out: Path, elsewhere: Path, *missing: str) -> Path:
    """Return a new folder with the runs of `out` and nothing judged."""
    left_out = shutil.ignore_patterns(*missing)
    shutil.copytree(out / "training", elsewhere / "training", ignore=left_out)
    return elsewhere


@pytest.fixture
def copied(document: dict[str, Any], out: Path, tmp_path: Path) -> Path:
    """A folder with trained runs."""
    return trained(out, tmp_path / "out")


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
        means = [target.mean_return for target in report.tasks[0].targets]
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
            selection=make_sampler(law, dataset),
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


def test_running_again_does_nothing_again(
    document: dict[str, Any], data: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: Any, **__: Any) -> Any:
        raise AssertionError("nothing is left to do")

    monkeypatch.setattr("gear_offline.runs.trainer.train", forbidden)
    monkeypatch.setattr(strategies_judge, "judge", forbidden)
    again = run(recipe_of(data), out)
    assert timeless(again) == timeless(document) and again["resumed"] > document["resumed"]


def test_another_way_to_judge_judges_again_without_training(
    document: dict[str, Any], data: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gear_offline.runs.trainer.train", None)
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


@pytest.mark.long
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


def test_after_a_stop_the_comparison_goes_on_not_the_run(data: Path, tmp_path: Path) -> None:
    def stop(points: Sequence[Point], folder: Path) -> dict[str, str]:
        what = "stopped by SIGTERM after step 8, a checkpoint is saved"
        raise TrainingInterrupted("TRAIN_INTERRUPTED", what, remedy="go on with `train --resume`")

    with pytest.raises(TrainingInterrupted) as caught:
        run(recipe_of(data), tmp_path, run_points=stop)
    assert caught.value.code == "STRATEGIES_INTERRUPTED"
    assert str(caught.value) == (
        f"stopped, what was trained and played is kept ({tmp_path}); the same command goes on"
    )


def test_a_stop_costs_no_point_of_a_curve(data: Path, tmp_path: Path) -> None:
    """What is saved then is a checkpoint more, and policies are judged when all are trained."""
    plan = plan_of(data, tmp_path)
    for step in (11, 14):
        with interrupted_in(step), pytest.raises(TrainingInterrupted):
            run_in_turn(plan.points[:1], tmp_path)
    assert run_in_turn(plan.points[:1], tmp_path) == {}
    there = {step for step, _ in list_checkpoints(plan.points[0].path / "checkpoints")}
    assert there >= set(plan.marks)


def test_a_run_that_fails_is_named_and_only_whole_pairs_are_compared(
    document: dict[str, Any], data: Path, out: Path, tmp_path: Path
) -> None:
    def one_fails(points: Sequence[Point], folder: Path) -> dict[str, str]:
        (bad,) = [point for point in points if not point.is_complete()]
        return {bad.name: "the loss of step 3 is nan"}

    there = trained(out, tmp_path / "out", "top_k-k=2-s1")
    found = run(recipe_of(data), there, run_points=one_fails)
    row = found["strategies"][1]
    assert row["complete"] == 1 and row["versus"]["seeds"] == [0]
    assert row["versus"]["score"]["verdict"] == "too few seeds"
    assert row["runs"][1]["error"] == "the loss of step 3 is nan"
    console = Console(width=100, record=True)
    print_learning(found, console=console)
    assert "top_k k=2, seed 1: the loss of step 3 is nan" in console.export_text()


def test_a_policy_that_cannot_be_played_is_an_error_of_its_run(
    data: Path, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gear_offline.errors import InputError

    real = strategies_judge.judge

    def picky(sitting: strategies_judge.Sitting) -> dict[str, Any]:
        if sitting.run == "uniform_episodes-s0":
            raise InputError("POLICY_NONFINITE", "an action is NaN")
        return real(sitting)

    monkeypatch.setattr(strategies_judge, "judge", picky)
    found = run(recipe_of(data), copied)
    assert "NaN" in found["strategies"][2]["runs"][0]["error"]
    assert found["strategies"][2]["complete"] == 1 and found["strategies"][1]["complete"] == 2


def test_a_policy_that_diverged_in_its_last_step_is_an_error_of_its_run(
    data: Path, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its loss on the probes is infinite, which JSON has no number for."""
    real = strategies_judge.judge

    def infinite(sitting: strategies_judge.Sitting) -> dict[str, Any]:
        found = real(sitting)
        return found | ({"probes": {"all": None, "best": None}} if sitting.run == bad else {})

    bad = "top_k-k=2-s1"
    monkeypatch.setattr(strategies_judge, "judge", infinite)
    row = run(recipe_of(data), copied)["strategies"][1]
    assert row["complete"] == 1 and row["versus"]["seeds"] == [0]
    assert "diverged" in row["runs"][1]["error"]


PLAIN: dict[str, Any] = {}


@pytest.fixture(scope="module", autouse=True)
def plain(data: Path) -> None:
    """Have a document without training at hand."""
    from gear_offline.analysis.strategies import compare

    PLAIN.update(compare(recipe_of(data), strategies=NAMES, quiet=True))


def test_the_page(document: dict[str, Any]) -> None:
    text = render({**PLAIN, "training": document})
    page = Page()
    page.feed(text)
    assert page.open == [] and page.loads == [] and page.tags["script"] == 0
    assert page.tags["svg"] == 3 + 5 * 3, "a row of scores for each; five plots in each card"
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
    assert "2 seeds are too few" in streams.err and "too few seeds to say" in streams.out
    assert cli.main([*words, "--seeds", "2"]) == 2
    assert "error[USAGE]" in capsys.readouterr().err


def test_a_signal_while_policies_are_played_keeps_what_there_is(
    data: Path, copied: Path, monkeypatch: pytest.MonkeyPatch
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
        run(recipe_of(data), copied, on_stop=kept.append)
    assert caught.value.code == "STRATEGIES_INTERRUPTED"
    points = [len(one["points"]) for row in kept[0]["strategies"] for one in row["runs"]]
    assert sum(points) == 10, "what was being played is kept as well"


def test_the_page_of_a_study(document: dict[str, Any], tmp_path: Path) -> None:
    from benchmarks.study_page import BEGIN, END, main

    page, found = tmp_path / "study.md", tmp_path / "strategies.json"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    found.write_text(json.dumps(whole := {**PLAIN, "training": document}))
    main([f"tiny={found}", f"again={found}"], page=page)
    text = page.read_text()
    assert "### tiny" in text and "old\n" not in text and text.endswith("\nafter\n")
    assert json.loads(page.with_suffix(".json").read_text()) == {"tiny": whole, "again": whole}
    assert (tmp_path / "study-tiny.html").read_text() == render(whole)
    for row in document["strategies"]:
        lines = [line for line in text.splitlines() if line.startswith(f"| {row['label']} |")]
        count = 6 if row is document["strategies"][0] else 7  # the table of both has no baseline
        assert len(lines) == count, "final figures, targets and curve, draws and probes, twice"
        assert f"{row['final']['score']['mean']:.3g}".replace("-", "\N{MINUS SIGN}") in lines[0]
