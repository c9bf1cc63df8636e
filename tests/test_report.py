"""Plots are pictures with something on them; the report says what the files of the run say."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from gear_offline.config.recipe import Recipe
from gear_offline.convert import convert
from gear_offline.errors import InputError
from gear_offline.runs.plots import (
    apart,
    asked_finding,
    new_figure,
    plot_asked_vs_achieved,
    plot_data_returns,
    plot_learning_curve,
    short,
    thousands,
    titles,
)
from gear_offline.runs.report import write_report
from gear_offline.sources import from_arrays


def pixels(path: Path) -> npt.NDArray[np.uint8]:
    """(height, width, 3), decoded."""
    with Image.open(path) as picture:
        assert picture.format == "PNG"
        return np.asarray(picture.convert("RGB"))


def close_to(picture: npt.NDArray[np.uint8], colour: str) -> int:
    """How many pixels have `colour`, anti-aliased edges aside."""
    wanted = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)])
    return int((np.abs(picture.astype(int) - wanted).max(axis=2) <= 8).sum())


def check_picture(path: Path, *colours: str) -> None:
    picture = pixels(path)
    assert picture.shape == (675, 1080, 3)
    assert picture.std() > 10, "not blank"
    assert close_to(picture, "#ffffff") > 0.5 * 675 * 1080, "a light background"
    for colour in colours:
        assert close_to(picture, colour) > 100, f"something is drawn in {colour}"
    assert not list(path.parent.glob(".*")), "no partial file stays behind"


def evaluation(**changes: Any) -> dict[str, Any]:
    rows = []
    for target, mean in ((3000.0, 2100.0), (500.0, 450.0), (1500.0, 1400.0)):
        returns = [mean - 100.0, mean, mean + 100.0]
        rows.append(
            {
                "target": target,
                "episodes": 3,
                "mean": mean,
                "std": 100.0,
                "ci95": [mean - 248.4, mean + 248.4],
                "returns": returns,
            }
        )
    return {
        "environment": "Hopper-v5",
        "run": "tiny-s0",
        "step": 20,
        "seed": 7,
        "confidence": "an interval",
        "reference": None,
        "targets": rows,
        **changes,
    }


def test_picture_of_achieved_against_asked(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "asked.png"
    plot_asked_vs_achieved(path, evaluation(), data_mean=414.0, data_best=3124.0)
    check_picture(path, "#0072B2", "#D55E00", "#009E73")


def test_names_beside_lines_keep_their_order_and_stay_inside() -> None:
    assert apart([0.13, 0.96, 1.0], 0.12) == pytest.approx([0.13, 0.88, 1.0])
    assert apart([0.2, 0.2, 0.9], 0.1) == pytest.approx([0.2, 0.3, 0.9])
    assert apart([1.0, 1.0, 1.0], 0.25) == pytest.approx([0.5, 0.75, 1.0])
    assert apart([], 0.1) == []


def test_picture_of_negative_returns_and_single_episodes(tmp_path: Path) -> None:
    rows = [
        {"target": -200.0, "mean": -900.0, "ci95": [None, None], "returns": [-900.0]},
        {"target": -1000.0, "mean": -1100.0, "ci95": [None, None], "returns": [-1100.0]},
    ]
    plot_asked_vs_achieved(tmp_path / "a.png", evaluation(targets=rows, step=None, run=None))
    check_picture(tmp_path / "a.png", "#0072B2")


@pytest.mark.parametrize(
    ("returns", "lengths"),
    [
        (np.random.default_rng(0).gamma(1.0, 500.0, 300), np.arange(1, 301)),
        (np.full(5, 3.0), np.ones(5)),  # all alike
        (np.array([0.6, np.nextafter(0.6, 1)]), np.ones(2)),  # but for rounding
        (np.full(5, 1e17), np.ones(5)),
        (np.array([1.0, np.nan, np.inf, 4.0]), np.array([1, 2, 3, 4])),
        (np.array([-3.0]), np.array([10])),
    ],
)
def test_picture_of_the_datas_returns(
    tmp_path: Path, returns: npt.NDArray[np.float64], lengths: npt.NDArray[np.int64]
) -> None:
    plot_data_returns(tmp_path / "data.png", returns, lengths, name="tiny")
    check_picture(tmp_path / "data.png", "#D55E00", "#009E73")


@pytest.mark.parametrize(
    ("returns", "words"),
    [
        ([1.0, np.nan, 4.0, -np.inf], "2 episodes, 4 steps, without 2 whose return is NaN"),
        ([1.0, 2.0, 4.0, 3.0], "4 episodes, 10 steps.  Bars"),
    ],
)
def test_the_datas_picture_says_what_it_leaves_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, returns: list[float], words: str
) -> None:
    said: list[str] = []
    monkeypatch.setattr("gear_offline.runs.plots.titles", lambda _, *lines: said.extend(lines))
    plot_data_returns(tmp_path / "data.png", returns, [1, 2, 3, 4], name="tiny")
    assert words in said[1]
    assert said[0].startswith("Half of the episodes return less than ")
    alike = [1.5, np.nextafter(1.5, 2), np.nan]
    plot_data_returns(tmp_path / "equal.png", alike, [1, 2, 3], name="equal")
    assert said[2] == "Every episode returns 1.5"


def test_picture_of_learning(tmp_path: Path) -> None:
    steps, losses = np.arange(10, 210, 10), np.geomspace(3.0, 0.1, 20)
    plot_learning_curve(tmp_path / "bare.png", steps=steps, losses=losses, name="tiny")
    check_picture(tmp_path / "bare.png", "#0072B2")
    plot_learning_curve(tmp_path / "one.png", steps=[5], losses=[0.5], name="of one point")
    check_picture(tmp_path / "one.png", "#0072B2")
    rows = [{"step": step, **evaluation()} for step in (100, 200)]
    for row, step in zip(rows, (100, 200), strict=True):
        row["step"] = step
    plot_learning_curve(
        tmp_path / "whole.png", steps=steps, losses=losses, evaluations=rows, name="tiny"
    )
    check_picture(tmp_path / "whole.png", "#0072B2", "#D55E00", "#009E73")


def test_title_says_whether_the_asked_return_is_followed() -> None:
    assert asked_finding([500, 3600, 1000], [450, 1992, 1273]) == (
        "Asked for more, it achieves more: 450 to 1,992 for 500 to 3,600"
    )
    assert asked_finding([1, 2, 3], [5, 9, 8]).startswith("It follows the asked return in part")
    assert asked_finding([-200, -200], [-200, -200]) == "Asked for -200, it achieves -200"
    assert asked_finding([1, 2], [5, 5]).startswith("It does not follow the asked return")
    assert asked_finding([1, 2], [5, 4]).startswith("It does not follow the asked return")
    assert "no clear difference: -911 to -911 for" in asked_finding([-1388, -765], [-911.2, -911.1])
    open_ = asked_finding([1, 2], [5, 5.5], [0.5, 0.5])
    assert open_ == "Asked for more or less, no clear difference: 5 to 5.5 for 1 to 2"
    assert asked_finding([1, 2], [5, 6], [0.5, 0.5]).startswith("Asked for more, it achieves more")
    assert asked_finding([3600], [1992.4]) == "Asked for 3,600, it achieves 1,992"


@pytest.mark.parametrize(
    ("low", "high", "name"),
    [
        (-200.5, -199.5, "-200.2"),
        (3000.01, 3000.04, "3,000.020"),
        (0.0, 3000.0, "1,000"),
        (-1.0, 2.0, "0.5"),
        (100.0, 102.0, "100.25"),
        (0.0, 1_000_000.0, "0.2 M"),
        (0.0, 3_600_000.0, "1.5 M"),
    ],
)
def test_ticks_differ_and_do_not_meet(low: float, high: float, name: str) -> None:
    figure = new_figure()
    axes = figure.add_subplot()
    thousands(axes.xaxis)
    axes.set_xlim(low, high)
    names = [axes.xaxis.get_major_formatter()(tick) for tick in axes.get_xticks()]
    assert len(set(names)) == len(names), names
    assert name in names
    figure.canvas.draw()
    boxes = [label.get_window_extent() for label in axes.get_xticklabels()]
    for left, right in itertools.pairwise(boxes):
        assert left.x1 < right.x0, names


@pytest.mark.parametrize("letters", [10, 90, 400])
def test_titles_fit_the_width(letters: int) -> None:
    figure = new_figure()
    titles(figure, "W" * letters, f"{'name' * letters}: 3 runs")
    for line in figure.texts:
        box = line.get_window_extent()
        assert box.x0 >= 0 and box.x1 <= figure.bbox.width and float(line.get_fontsize()) >= 7
    assert figure.texts[1].get_text().endswith(": 3 runs")


def test_short_numbers() -> None:
    found = [short(value) for value in (0.0, 1234.56, -1234.5, 0.12345, 99.95, 3.0)]
    assert found == ["0", "1,235", "-1,234", "0.123", "100", "3"]


def write_data(folder: Path) -> Path:
    """Two episodes of 3 and 2 steps with returns 6 and 20, as shards."""
    with h5py.File(folder / "tiny.hdf5", "w") as file:
        file["observations"] = np.arange(15, dtype=np.float32).reshape(5, 3)
        file["actions"] = np.zeros((5, 1), np.float32)
        file["rewards"] = np.array([1, 2, 3, 10, 10], np.float32)
        file["terminals"] = np.array([0, 0, 1, 0, 1], bool)
        file["timeouts"] = np.zeros(5, bool)
    convert(folder / "tiny.hdf5", folder / "tiny", quiet=True)
    return folder / "tiny"


def test_report_of_a_whole_run(tmp_path: Path) -> None:
    recipe = Recipe.parse({"name": "tiny", "data": {"path": str(write_data(tmp_path))}})
    run = tmp_path / "tiny-s0"
    run.mkdir()
    (run / "recipe.yaml").write_text(recipe.to_yaml())
    lines = [{"step": step, "loss": 1.0 / step} for step in (10, 20)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "evaluations.jsonl").write_text(json.dumps(evaluation(step=10)) + "\n")
    pair = {
        "name": "hopper-medium-v2",
        "minimum": 0.0,
        "maximum": 1000.0,
        "indicative": True,
        "note": "only a hint",
    }
    (run / "evaluation.json").write_text(json.dumps(evaluation(reference=pair)))
    text = write_report(run, random_return=18.0).read_text()
    for name in ("learning_curve", "data_returns", "asked_vs_achieved"):
        check_picture(run / "plots" / f"{name}.png")
        assert f"(plots/{name}.png)" in text
    assert "| random actions | 18 |  | 1.8 |" in text
    assert "| mean of the data | 13 |  | 1.3 |" in text  # (6 + 20) / 2, of 1000
    assert "| best of the data | 20 |  | 2.0 |" in text
    assert "| policy, asked 3,000 | 2,100 | 1,852 to 2,348 | 210.0 |" in text
    assert "only a hint" in text
    assert "2 episodes, 5 steps" in text
    assert "20 steps" in text
    assert "| random actions, as D4RL measured them | 0 |  | 0.0 |" in write_report(run).read_text()


def test_report_says_where_the_data_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_data(tmp_path)
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "tiny-s0"
    run.mkdir()
    recipe = Recipe.parse({"name": "tiny", "data": {"path": "tiny"}})
    (run / "recipe.yaml").write_text(recipe.to_yaml())
    assert f"- data: `{path}`," in write_report(run).read_text()


def test_text_of_a_dataset_is_no_markup_of_a_report(tmp_path: Path) -> None:
    odd = "<script>x</script>\x1b[2J`**b**"
    columns = {"observations": np.zeros((3, 2)), "actions": np.zeros((3, 1)), "rewards": np.ones(3)}
    source = from_arrays(columns | {"timeouts": np.array([False, False, True])})
    object.__setattr__(source.info, "rule", odd)
    convert(source, tmp_path / "d", quiet=True)
    run = tmp_path / "tiny-s0"
    run.mkdir()
    recipe = Recipe.parse({"name": "tiny", "data": {"path": str(tmp_path / "d")}})
    (run / "recipe.yaml").write_text(recipe.to_yaml())
    text = write_report(run).read_text()
    assert "end by `<script>x</script>\\x1b[2J'**b**`" in text and "\x1b" not in text


def test_report_with_little_to_say(tmp_path: Path) -> None:
    run = tmp_path / "tiny-s0"
    run.mkdir()
    with pytest.raises(InputError) as caught:
        write_report(run)
    assert caught.value.code == "REPORT_EMPTY"
    (run / "evaluations.jsonl").write_text(json.dumps(evaluation()) + "\n")
    text = write_report(run).read_text()
    assert "| policy, asked 500 | 450 | 202 to 698 | - |" in text
    assert "learning_curve" not in text
