"""The demo: its commands, what it repeats and what not, and the check that must be able to fail."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from rich.console import Console

from gear_offline import demo as demo_module
from gear_offline.config.recipe import load_recipe
from gear_offline.convert import convert
from gear_offline.demo import (
    HOPPER,
    Demo,
    DemoSettings,
    check_results,
    main,
    rank_correlation,
    results_table,
)
from gear_offline.errors import GearError

PENDULUM = DemoSettings(
    environment="Pendulum-v1",
    name="swinging",
    collect=("--policy", "random", "--steps", "400"),
    recipe="smoke",
    random_episodes=2,
    margin=2.0,  # a return of zero or more, which Pendulum never pays
)


def document(means: dict[float, float], *, half: float = 50.0) -> dict[str, Any]:
    """An evaluation with these mean returns for these targets."""
    rows = [
        {
            "target": target,
            "episodes": 2,
            "mean": mean,
            "ci95": [mean - half, mean + half],
            "returns": [mean - 10.0, mean + 10.0],
        }
        for target, mean in means.items()
    ]
    return {
        "environment": "Pendulum-v1",
        "run": "run",
        "step": 5,
        "seed": 1,
        "reference": None,
        "confidence": "an interval",
        "targets": rows,
    }


class Commands:
    """In place of the command line: remembers what was asked, and makes the results at once."""

    def __init__(self, *, failing: str = "") -> None:
        self.seen: list[list[str]] = []
        self.failing = failing

    def __call__(self, arguments: list[str]) -> int:
        self.seen.append(arguments)
        name = arguments[0]
        if name == self.failing:
            return 2
        if name == "collect":
            with h5py.File(arguments[2], "w") as file:
                file["observations"] = np.zeros((4, 3), np.float32)
                file["actions"] = np.zeros((4, 1), np.float32)
                file["rewards"] = np.array([100, 100, 150, 150], np.float32)
                file["terminals"] = np.array([0, 1, 0, 1], bool)
                file["timeouts"] = np.zeros(4, bool)
        if name == "convert":
            convert(arguments[1], Path(arguments[2]), quiet=True)
        if name == "train":
            run = Path(arguments[arguments.index("--out") + 1])
            run.mkdir(exist_ok=True)
            (run / "metrics.jsonl").write_text('{"step": 5, "loss": 0.5}\n')
            (run / "summary.json").write_text("{}")
        if name == "evaluate":
            results = document({500.0: 400.0, 1000.0: 800.0, 2000.0: 1500.0})
            (Path(arguments[1]) / "evaluation.json").write_text(json.dumps(results))
        return 0

    @property
    def names(self) -> list[str]:
        return [arguments[0] for arguments in self.seen]


def page() -> tuple[io.StringIO, Console]:
    text = io.StringIO()
    return text, Console(file=text, width=100)


QUICK = DemoSettings(environment="Pendulum-v1", name="tiny", random_episodes=2)


def test_commands_in_order_and_printed_as_typed(tmp_path: Path) -> None:
    text, console = page()
    commands = Commands()
    Demo(tmp_path / "out", QUICK, run=commands, console=console).complete()
    assert commands.names == ["collect", "convert", "inspect", "train", "evaluate"]
    for arguments in commands.seen:
        assert f"$ gear-offline {' '.join(arguments)}" in text.getvalue()
    shown = text.getvalue()
    assert "behaviour data: mean" in shown and "250" in shown  # (200 + 300) / 2
    assert "random policy" in shown
    assert "Decision Transformer, asked 2,000" in shown and "1,500" in shown
    for name in ("learning_curve.png", "data_returns.png", "asked_vs_achieved.png"):
        assert str(tmp_path / "out" / "run" / "plots" / name) in shown
    assert "Where to go next" in shown
    assert "checked" in shown


def test_what_is_done_is_not_repeated_unless_fresh(tmp_path: Path) -> None:
    _, console = page()
    Demo(tmp_path, QUICK, run=Commands(), console=console).complete()
    text, console = page()
    again = Commands()
    Demo(tmp_path, QUICK, run=again, console=console).complete()
    assert again.names == ["inspect"]
    assert text.getvalue().count("done before") == 4
    (tmp_path / "notes.txt").write_text("mine")
    fresh = Demo(tmp_path, QUICK, run=(third := Commands()), console=console)
    fresh.clear()
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    fresh.complete()
    assert third.names == ["collect", "convert", "inspect", "train", "evaluate"]


def test_unfinished_training_is_resumed(tmp_path: Path) -> None:
    _, console = page()
    first, second = Commands(failing="train"), Commands(failing="train")
    with pytest.raises(GearError):
        Demo(tmp_path, QUICK, run=first, console=console).complete()
    assert "--resume" not in first.seen[-1]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text("name: tiny\n")
    with pytest.raises(GearError):
        Demo(tmp_path, QUICK, run=second, console=console).complete()
    assert second.seen[-1][-1] == "--resume"


def test_failing_command_stops_the_demo(tmp_path: Path) -> None:
    _, console = page()
    commands = Commands(failing="convert")
    with pytest.raises(GearError) as caught:
        Demo(tmp_path, QUICK, run=commands, console=console).complete()
    assert caught.value.code == "DEMO_STEP"
    assert "step 2" in str(caught.value)
    assert commands.names == ["collect", "convert"]


@pytest.mark.parametrize(
    ("means", "half"),
    [
        ({500.0: 300.0, 1000.0: 900.0, 2000.0: 700.0}, 50.0),  # below 1.5 times the mean
        ({500.0: 300.0, 1000.0: 700.0, 2000.0: 900.0}, 500.0),  # it might be chance
        ({500.0: 1900.0, 1000.0: 1800.0, 2000.0: 1700.0}, 50.0),  # does not follow
    ],
)
def test_policy_that_has_not_learnt_fails(means: dict[float, float], half: float) -> None:
    with pytest.raises(GearError) as caught:
        check_results(document(means, half=half), 500.0, DemoSettings())
    assert caught.value.code == "DEMO_CHECK"


def test_policy_that_has_learnt_passes() -> None:
    means = {2000.0: 1700.0, 500.0: 480.0, 1000.0: 1100.0}
    lines = check_results(document(means), 500.0, DemoSettings())
    assert "asked for 2,000 it returns 1,700" in lines[0]
    assert "1.00" in lines[1]
    # returns below zero: half as far from zero is better, twice as far is not
    assert check_results(document({-100.0: -200.0}), -500.0, DemoSettings())
    with pytest.raises(GearError):
        check_results(document({-100.0: -400.0}), -500.0, DemoSettings())


def test_rank_correlation() -> None:
    assert rank_correlation([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1.0)
    assert rank_correlation([1, 2, 3, 4], [40, 30, 20, 10]) == pytest.approx(-1.0)
    assert rank_correlation([1, 2, 3, 4], [10, 30, 20, 40]) == pytest.approx(0.8)


def test_table_carries_scores_and_their_remark() -> None:
    text, console = page()
    pair = {"name": "x", "minimum": 0.0, "maximum": 2000.0, "indicative": True, "note": "a hint"}
    found = {**document({2000.0: 1700.0, 500.0: 480.0}), "reference": pair}
    console.print(results_table(found, 500.0, 1800.0, 20.0))
    rows = [line for line in text.getvalue().splitlines() if "│" in line]
    assert [row.split("│")[-2].strip() for row in rows] == ["1.0", "25.0", "90.0", "85.0", "24.0"]
    assert "a hint" in text.getvalue()


def test_errors_are_one_line_and_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(self: Demo) -> None:
        raise GearError("DEMO_CHECK", "it has not learnt")

    monkeypatch.setattr(demo_module.Demo, "complete", fail)
    assert main(["--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "error[DEMO_CHECK]: it has not learnt\n"


def test_the_real_demos_margin_is_strict() -> None:
    assert HOPPER.environment == "Hopper-v5" and HOPPER.margin >= 1.2 and HOPPER.follow > 0.5


def test_demo_and_recipe_make_the_same_data() -> None:
    made = load_recipe("demo").data.collect
    assert made is not None and made.environment == HOPPER.environment
    options = dict(zip(HOPPER.collect[::2], HOPPER.collect[1::2], strict=True))
    assert options == {
        "--policy": made.policy,
        "--quality": made.quality,
        "--steps": str(made.steps),
        "--action-noise": str(made.action_noise),
        "--gate": f"{made.gate:.0f}",
    }


def test_the_real_commands_work_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step for real, with Pendulum and a model of one small layer."""
    monkeypatch.chdir(tmp_path)
    text, console = page()
    with pytest.raises(GearError) as caught:
        Demo(Path("out"), PENDULUM, console=console).complete()
    assert caught.value.code == "DEMO_CHECK", "the last step of all; everything else is done"
    run = tmp_path / "out" / "run"
    for name in ("learning_curve", "data_returns", "asked_vs_achieved"):
        assert (run / "plots" / f"{name}.png").stat().st_size > 10_000
    assert "random actions" in (run / "report.md").read_text()
    assert json.loads((run / "evaluation.json").read_text())["environment"] == "Pendulum-v1"
    assert "Results in Pendulum-v1" in text.getvalue()
