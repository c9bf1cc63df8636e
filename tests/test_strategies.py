"""`gear-offline strategies`: figures against plain counting, training, the page, the command."""

import json
import re
from collections import Counter
from dataclasses import replace
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from gear_offline.analysis.page import drawn_cells, learned_cells, print_comparison, render
from gear_offline.analysis.sampling import Draws, measure, parse_candidates
from gear_offline.analysis.significance import Comparison
from gear_offline.analysis.strategies import compare_strategies
from gear_offline.batches.sampling import find_strategy, make_sampler, strategy_names
from gear_offline.batches.sampling.registry import _STRATEGIES
from gear_offline.cli import main as cli
from gear_offline.config.recipe import Recipe, load_recipe
from gear_offline.core.progress import Terminal
from gear_offline.data.convert.conversion import convert
from gear_offline.data.dataset.dataset import Dataset, open_dataset
from gear_offline.data.sources import from_episodes
from gear_offline.errors import GearError
from gear_offline.models.policy import Policy
from gear_offline.runs.loop import TrainingInterrupted
from gear_offline.sweep import run as sweep_run
from tests.forks import fork_workers
from tests.sampling_support import keys
from tests.support import (
    ROOT,
    ArraySource,
    failing_code,
    hopper_columns,
    last_words,
    make_dataset,
    one_error,
)
from tests.test_docs import blocks
from tests.training_support import tiny_recipe

pytestmark = pytest.mark.usefixtures("no_reports")

LENGTHS = [3, 8, 1, 12, 6]
BATCHES, BATCH, SPAN = 60, 4, 5
NAMES = "uniform_steps,top_k:k=2,d3rlpy,shuffled_epochs,fifo,uniform_episodes,min_dt"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_dataset(tmp_path_factory.mktemp("strategies"), LENGTHS)


def recipe_of(dataset: Dataset, *overrides: str) -> Recipe:
    sizes = f"loader.batch_size={BATCH}", f"loader.context_length={SPAN}", f"train.steps={BATCHES}"
    given = (f"data.path={dataset.path}", *sizes, "optimizer.warmup_steps=1", *overrides)
    return load_recipe("paper", last_words(*given))


@pytest.fixture(scope="module")
def comparison(dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    out = tmp_path_factory.mktemp("drawn")
    return compare_strategies(recipe_of(dataset), strategies=NAMES, out=out, quiet=True)


def draws_of(comparison: Comparison, label: str) -> Draws:
    (found,) = (one.draws for one in comparison.strategies if one.label == label)
    assert found is not None
    return found


@pytest.mark.parametrize("label", ["uniform_steps", "top_k k=2", "d3rlpy", "fifo", "min_dt"])
def test_figures_are_those_of_counting_one_by_one(
    dataset: Dataset, comparison: Comparison, label: str
) -> None:
    (row,) = (one for one in comparison.strategies if one.label == label)
    found = draws_of(comparison, label)
    sampler = make_sampler(row.strategy, dataset, context_length=SPAN, **row.options)
    drawn, repeats, shown = Counter[Any](), 0, Counter[Any]()
    returns, weights, places, real, coverage = [], [], [], 0, []
    first = np.cumsum([0, *LENGTHS]).tolist()
    steps = sum(LENGTHS)
    for step in range(BATCHES):
        segments = sampler.sample(0, step, 1, BATCH)[0]
        named = keys(segments, LENGTHS, SPAN)
        starts = [(e, s) for e, s, _ in named]
        repeats += len(starts) - len(set(starts))
        drawn.update(starts)
        for e, s, n in named:
            shown.update((e, s + i) for i in range(n))
            returns.append(dataset.returns[e])
            places.append(1 - (first[e] + s + 0.5) / steps)
            real += n
        weights += [1 / p for p in segments.probability.tolist()]
        coverage.append((step + 1, len(drawn) / steps))
    draws = BATCHES * BATCH
    assert found.draws == draws
    expected = {
        "coverage_starts": len(drawn) / steps,
        "coverage_steps": len(shown) / steps,
        "duplicate_starts": repeats / draws,
        "padding": 1 - real / draws / SPAN,
        "mean_return": float(np.mean(returns)),
        "effective_sample_share": sum(weights) ** 2 / sum(w * w for w in weights) / draws,
    }
    for key, value in expected.items():
        assert getattr(found, key) == pytest.approx(value, rel=1e-9), key
    middle = sorted(places)[draws // 2 - 1 : draws // 2 + 1]
    assert middle[0] <= found.median_age <= middle[1]
    assert sum(found.returns) == pytest.approx(1)
    assert found.coverage[-1][0] == BATCHES
    assert set(found.coverage) <= set(coverage), "of the first batches each"


def test_effective_starts(comparison: Comparison, dataset: Dataset) -> None:
    last = make_sampler("weighted", dataset, column="timeouts")  # one step has a weight
    assert measure(dataset, recipe_of(dataset), last, 10).effective_segments == 1
    assert draws_of(comparison, "uniform_steps").effective_segments == pytest.approx(30)
    assert draws_of(comparison, "fifo").effective_segments == 30
    best = draws_of(comparison, "top_k k=2")
    assert best.effective_segments == pytest.approx(30 * best.coverage_starts)
    exact = 1 / sum(1 / (25 * length) for length in LENGTHS)
    found = draws_of(comparison, "uniform_episodes").effective_segments
    assert found == pytest.approx(exact, rel=0.15), "from 240 draws"
    assert draws_of(comparison, "shuffled_epochs").coverage_starts == 1


def test_a_strategy_that_cannot_run_is_named_and_the_others_go_on(
    dataset: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = recipe_of(dataset, "loader.batch_size=6", "train.steps=3")
    found = compare_strategies(recipe, strategies="min_dt,top_percent", out=tmp_path)
    assert [one.error is None for one in found.strategies] == [True, False, True]
    reason = "5 episodes make no batch of 6"
    streams = capsys.readouterr()
    assert "strategies: 6 batches in" in streams.err and reason not in streams.err
    console = Terminal(width=90, record=True)
    print_comparison(found, console=console)
    assert reason in " ".join(console.export_text().split())
    assert reason in render(found)


def test_returns_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    columns = hopper_columns(9)
    columns["rewards"][[1, 2, 8]] = np.nan, 1.0, np.inf
    convert(ArraySource(columns, [3, 3, 3]), tmp_path / "d", allow_nonfinite=True, quiet=True)
    recipe = recipe_of(open_dataset(tmp_path / "d"))
    with one_error("COLUMN") as caught:
        compare_strategies(recipe, strategies="fifo", out=tmp_path / "out", quiet=True)
    assert "2 episodes" in caught.value.problem


def test_data_without_rewards_have_no_returns_to_compare(tmp_path: Path) -> None:
    """The errors name what needs none."""
    steps = {"observations": np.ones((6, 3), np.float32), "actions": np.ones((6, 2), np.float32)}
    convert(from_episodes([steps | {"truncated": True}] * 3), tmp_path / "d", quiet=True)
    dataset = open_dataset(tmp_path / "d")
    with one_error("COLUMN", "no rewards.*sweep RECIPE selection.strategy=A,B"):
        compare_strategies(
            recipe_of(dataset, "loader.goals={future: 1.0}"), strategies="fifo", quiet=True
        )
    with one_error("SELECTION", "data without rewards .*: use selection.strategy=uniform_steps"):
        make_sampler("top_k", dataset, k=1)


def test_returns_that_are_equal_but_for_rounding(tmp_path: Path) -> None:
    """NumPy refuses a histogram whose range spans fewer floats than it has bins."""
    columns = hopper_columns(6)
    columns["rewards"] = np.array([0.1, 0.2, 0.3, 0.3, 0.2, 0.1])
    data = make_dataset(tmp_path, [3, 3], columns=columns)
    assert 0 < np.ptp(data.returns) < 1e-15
    found = compare_strategies(
        recipe_of(data), strategies="top_k:k=1", out=tmp_path / "out", quiet=True
    )
    assert sum(found.data.returns) == pytest.approx(1)


def test_candidates(tmp_path: Path) -> None:
    recipe = load_recipe("paper", ["selection={strategy: top_k, k: 3}"])
    named = "top_k:k=3, return_weighted:rule=rank:temperature=2,top_k:k=3"
    found = parse_candidates(named, recipe)
    assert [c.label for c in found] == ["top_k k=3", "return_weighted rule=rank temperature=2"]
    assert found[1].options == {"rule": "rank", "temperature": 2}
    assert len(parse_candidates(None, recipe)) == 9
    best = {"strategy": "top_percent", "percent": 5, "label": "best 5 %"}
    listed = ["fifo", best, {"strategy": "top_k", "k": 3, "label": "mine"}]
    file = tmp_path / "list.yaml"
    file.write_text(json.dumps(listed))
    found = parse_candidates(str(file), recipe)
    assert found == parse_candidates(listed, recipe)
    assert [c.label for c in found] == ["mine", "fifo", "best 5 %"]
    assert found[2].options == {"percent": 5}
    twice = [{"strategy": "top_k", "k": k, "label": "a"} for k in (2, 4)]
    for wrong in (twice, [], " ,", ""):
        assert failing_code(partial(parse_candidates, wrong, recipe)) == "USAGE"
    names = ("uniform", "top_kk:k=3", "top_k:q=1", "top_k:k=5: k=6", "top_k:50")
    for unknown in (*names, [3], [{"percent": 5}]):
        assert failing_code(partial(parse_candidates, unknown, recipe)) == "SELECTION"


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Comparison, Path]:
    recipe = tiny_recipe(data, "evaluate.targets=[3,1]", "evaluate.background=off")
    out = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        fork_workers(patch)  # which write the reports of the runs
        found = compare_strategies(
            recipe,
            strategies="top_k:k=2,corl",
            train=True,
            seeds=3,
            out=out,
            parallel=1,
            quiet=True,
        )
    return found, out


def test_trained_strategies_are_a_sweep_over_strategies_and_seeds(
    trained: tuple[Comparison, Path],
) -> None:
    found, out = trained
    runs = sorted((out / "training" / "runs").iterdir())
    assert len(runs) == 9
    recipes = [load_recipe(run).to_dict() for run in runs]
    for recipe in recipes:
        for key in ("seed", "selection", "description"):
            del recipe[key]
        del recipe["loader"]["padding"]
    assert all(recipe == recipes[0] for recipe in recipes)
    base, best, corl = found.outcomes
    assert [one.label for one in found.outcomes] == ["uniform_steps", "top_k k=2", "corl"]
    assert [one.versus is None for one in found.outcomes] == [True, False, False]
    for one in found.outcomes:
        assert one.seeds == (0, 1, 2) and one.final is not None
    assert base.final is not None and best.final is not None and best.versus is not None
    assert best.versus.mean == pytest.approx(best.final.mean - base.final.mean)
    assert corl.versus is not None and corl.versus.pairs == 3
    document = json.loads((out / "strategies.json").read_text())
    assert document == found.to_json() and document["verdict"] == found.verdict
    assert document["outcomes"][1]["versus"]["verdict"] == best.versus.verdict


def test_running_again_trains_nothing_again(
    data: Path, trained: tuple[Comparison, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, out = trained
    monkeypatch.setattr(sweep_run, "_train", lambda *_, **__: pytest.fail("trained"))
    recipe = tiny_recipe(data, "evaluate.targets=[3,1]", "evaluate.background=off")
    again = partial(compare_strategies, recipe, strategies="top_k:k=2,corl", out=out, quiet=True)
    assert again(train=True, seeds=3).to_json()["outcomes"] == found.to_json()["outcomes"]
    other = partial(compare_strategies, recipe, "model.layers=2", strategies="corl", out=out)
    assert failing_code(lambda: other(train=True, quiet=True)) == "RUN_MISMATCH"


def test_what_there_is_after_a_stop_is_shown(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise TrainingInterrupted("INTERRUPTED", "stopped")

    monkeypatch.setattr(sweep_run, "_train", stop)
    recipe = tiny_recipe(data, "evaluate.targets=[3,1]")
    with pytest.raises(TrainingInterrupted):
        compare_strategies(
            recipe, strategies="corl", train=True, out=tmp_path, parallel=1, quiet=True
        )
    document = json.loads((tmp_path / "strategies.json").read_text())
    assert [one["seeds"] for one in document["outcomes"]] == [[], []]
    assert document["verdict"].startswith("Nothing is compared")


def test_the_page_stands_alone(trained: tuple[Comparison, Path]) -> None:
    found, _ = trained
    first, *others = found.strategies
    hostile = replace(first, label="<script>alert(1)</script>")
    data = replace(found.data, path="data/<b>")
    text = render(replace(found, strategies=(hostile, *others), data=data))
    assert "<script" not in text and "<b>" not in text
    assert re.findall(r'src="([^"]{22})', text) == ["data:image/png;base64,"]
    assert re.findall(r'href="([^"]*)', text) == ["training/plots/learning_curves.png"]
    assert "prefers-color-scheme: dark" in text and "width=device-width" in text
    assert text.index(found.verdict[:20]) < text.index("<table"), "the verdict comes first"
    for title in (*drawn_cells(draws_of(found, "corl")), *learned_cells(found.outcomes[0])):
        assert text.count(escape(title)) >= 2, "in a table, and what it means"
    assert not re.search(r">\s*(nan|inf)\s*<", text)
    assert render(found) == render(found), "the same for the same"


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_tables_fit_the_terminal(
    comparison: Comparison, trained: tuple[Comparison, Path], width: int
) -> None:
    for found in (comparison, trained[0]):
        console = Terminal(width=width, record=True)
        print_comparison(found, console=console)
        text = console.export_text()
        assert max(map(len, text.splitlines())) <= width
        assert width < 80 or "…" not in text
        assert " ".join(text.split()).startswith(found.verdict[:40])


def test_the_command(dataset: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"data.path={dataset.path}", "train.steps=5", "optimizer.warmup_steps=1"]
    words += ["loader.batch_size=3", "--strategies", "fifo,corl", "--out", str(tmp_path / "out")]
    assert cli.main(["strategies", "paper", *words, "--json", "-q"]) == 0
    streams = capsys.readouterr()
    shown = json.loads(streams.out)
    assert streams.err == ""
    assert [row["strategy"] for row in shown["strategies"]] == ["uniform_steps", "fifo", "corl"]
    assert json.loads((tmp_path / "out" / "strategies.json").read_text()) == shown
    assert cli.main(["strategies", "paper", *words]) == 0
    assert "strategies.html" in capsys.readouterr().out
    assert cli.main(["strategies", "paper", *words, "--seeds", "2"]) == 2
    assert "add --train" in capsys.readouterr().err
    assert cli.main(["strategies", "paper", *words, "--train", "evaluate.episodes=0"]) == 2
    assert "error[USAGE]" in capsys.readouterr().err
    assert cli.main(["strategies", "paper", *words, "--train", "--seeds", "0"]) == 2


def test_evaluations_that_fail_are_told_with_their_error(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """When a run ends, in the comparison, and by the exit code; the next call plays again.

    So it is of `train` and `sweep`, whose other runs and steps are done.
    """

    def refuse(*_: Any, **__: Any) -> None:
        raise GearError("MODEL", "an action that is NaN")

    ask = Policy.ask
    monkeypatch.setattr(Policy, "ask", refuse)
    recipe, out = tmp_path / "tiny.yaml", tmp_path / "out"
    settings = tiny_recipe(data, "evaluate.background=off", "train.checkpoint_every=20").to_dict()
    recipe.write_text(yaml.safe_dump(settings))
    words = ["--strategies", "fifo", "--train", "--seeds", "1", "--parallel", "1"]
    assert cli.main(["strategies", str(recipe), *words, "--out", str(out)]) == 1
    streams = capsys.readouterr()
    why = "evaluation failed: MODEL: an action that is NaN"
    assert f"fifo,s0: complete; step 20: {why}" in " ".join(streams.err.split())
    outcomes = json.loads((out / "strategies.json").read_text())["outcomes"]
    assert [outcome["failures"] for outcome in outcomes] == [
        [[f"{label},s0", why]] for label in ("uniform_steps", "fifo")
    ]
    assert why in " ".join(streams.out.split())
    run, swept = (
        ["--out", str(tmp_path / "run"), "-q"],
        ["--out", str(tmp_path / "sweep"), "--json"],
    )
    assert cli.main(["train", str(recipe), *run]) == 1
    streams = capsys.readouterr()
    assert streams.out.split() == [run[1]]
    assert " ".join(streams.err.split()).startswith(f"error[EVALUATION]: {why} ({run[1]}); ")
    assert cli.main(["sweep", str(recipe), "--seeds", "2", *swept, "-q"]) == 1
    told = capsys.readouterr()
    trials = json.loads(told.out)["trials"]
    assert told.err.splitlines() == [f"error[EVALUATION]: s{seed}: {why}" for seed in range(2)]
    assert [(trial["status"], trial["error"]) for trial in trials] == [("complete", why)] * 2
    summary = out / "training" / "runs" / "fifo,s0" / "summary.json"
    rate = json.loads(summary.read_text())["steps_per_second"]
    monkeypatch.setattr(Policy, "ask", ask)
    assert cli.main(["strategies", str(recipe), *words, "--out", str(out)]) == 0
    command = streams.err.split("`")[1].split()
    assert cli.main(command[1:]) == cli.main(["sweep", str(recipe), "--seeds", "2", *swept]) == 0
    outcomes = json.loads((out / "strategies.json").read_text())["outcomes"]
    assert [(outcome["seeds"], outcome["failures"]) for outcome in outcomes] == [([0], [])] * 2
    assert json.loads(summary.read_text())["steps_per_second"] == rate > 0


def test_the_file_in_the_documents_is_a_strategy(
    dataset: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = blocks((ROOT / "docs" / "reference" / "strategies.md").read_text(), "python")
    file, recipe = tmp_path / "fading.py", tmp_path / "mine.yaml"
    file.write_text(next(block for block in page if "def fading" in block))
    recipe.write_text(recipe_of(dataset).to_yaml())
    words = [
        "strategies",
        str(recipe),
        "--strategies",
        f"{file}:fading:half_life=2",
        "--json",
        "-q",
    ]
    try:
        assert cli.main([*words, "--out", str(tmp_path / "out")]) == 0
    finally:
        _STRATEGIES.pop("fading", None)
    assert json.loads(capsys.readouterr().out)["strategies"][1]["options"] == {"half_life": 2}


def test_every_strategy_and_option_is_documented() -> None:
    text = (ROOT / "docs" / "reference" / "strategies.md").read_text()
    for name in strategy_names():
        assert f"`{name}`" in text, name
        for option in find_strategy(name).options.model_fields:
            assert f"`{option}`" in text or f"{option}:" in text, f"{name}: {option}"
