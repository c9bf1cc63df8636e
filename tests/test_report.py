"""Plots are pictures with something on them; the report says what the files of the run say."""

import io
import json
import os
import re
from base64 import b64decode
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from matplotlib import rc_context
from PIL import Image

from gear_offline.config.recipe import Recipe
from gear_offline.core.plots import (
    draw,
    draw_mean,
    from_zero,
    label,
    legend,
    new_figure,
    scale_losses,
    titles,
)
from gear_offline.core.progress import Terminal, print_table
from gear_offline.core.text import markdown, printable, told_apart
from gear_offline.data.convert.conversion import convert
from gear_offline.data.sources import from_arrays
from gear_offline.runs.report import write_report
from tests.support import failing_code, one_error

BLUE = "#0072B2"


def check_picture(path: Path, *colours: str) -> None:
    with Image.open(path) as opened:
        assert opened.format == "PNG"
        picture = np.asarray(opened.convert("RGB")).astype(int)
    assert picture.shape == (675, 1080, 3)

    def close_to(colour: str) -> int:
        wanted = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)])
        return int((np.abs(picture - wanted).max(axis=2) <= 8).sum())

    assert close_to("#ffffff") > 0.5 * 675 * 1080, "a light background"
    for colour in colours:
        assert close_to(colour) > 100, f"something is drawn in {colour}"
    assert not list(path.parent.glob(".*")), "no partial file stays behind"


def target(asked: float, mean: float, *, half: float | None = 248.4) -> dict[str, Any]:
    interval = [None, None] if half is None else [mean - half, mean + half]
    returns = [mean] if half is None else [mean - 100.0, mean, mean, mean, mean + 100.0]
    counts = {"episodes": len(returns), "returns": returns}
    return {"target": asked, "return": mean, "ci95": interval, **counts}


def evaluation(**changes: Any) -> dict[str, Any]:
    targets = [target(3000.0, 2100.0), target(500.0, 450.0), target(1500.0, 1400.0)]
    facts: dict[str, Any] = {"environment": "Hopper-v5", "run": "tiny-s0", "step": 20, "seed": 7}
    facts |= {"confidence": "an interval", "reference": None, "return": 2100.0}
    return {**facts, "targets": targets, **changes}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "tiny-s0").mkdir()
    return tmp_path / "tiny-s0"


ODD_NAMES = (
    *("_x", "$a$", "a_b^c", "{x}", "[red]x[/red]", "<b>", "a|b", "%s", "\x1b[31m", ":fire:", "_"),
    *("a\nb", "x" * 200, "*a* `b` \\* &amp; ~~c~~", "100% $", "![a](b)", "\u202ea", "\u05d0"),
)


def shown_text(page: str) -> list[str]:
    """Return the text of each block of a Markdown page as a reader sees it."""
    blocks = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(page)
    lines = [block.children or [] for block in blocks if block.type == "inline"]
    kinds = ("text", "text_special", "code_inline")  # not of HTML
    return ["".join(part.content for part in line if part.type in kinds) for line in lines]


def write_lines(path: Path, *records: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.mark.parametrize("letters", [10, 90, 400])
def test_titles_fit_the_width(letters: int) -> None:
    figure = new_figure()
    axes = figure.add_subplot()
    titles(figure, "return " * letters, f"{'return ' * letters}: 3 runs")
    figure.canvas.draw()
    for text in (figure._suptitle, axes.title, axes._left_title):  # type: ignore[attr-defined]
        assert text.get_window_extent().x1 <= figure.bbox.width
    assert axes._left_title.get_text().endswith(": 3 runs")  # type: ignore[attr-defined]


@pytest.mark.parametrize("values", [[1.3, 1.4], [0.9, -3.0], [-2.0, -1.0], [0.0, 0.0]])
def test_what_is_negative_is_drawn_too(values: list[float]) -> None:
    """A likelihood's loss, for example."""
    axes = new_figure().add_subplot()
    draw_mean(axes, [1, 2], values, [[float("nan")] * 2] * 2, color="black")
    from_zero(axes)
    low, high = axes.get_ylim()
    assert max(values) < high and (low < min(values) if min(values) < 0 else low == 0.0)


@pytest.mark.parametrize("values", [[0.41, 0.365], [2e-5, 1e-4], [7.0, 0.002], [1200.0, 1.1]])
def test_ticks_of_losses_are_their_values(values: list[float]) -> None:
    figure = new_figure()
    axes = figure.add_subplot()
    axes.plot([1, 2], values)
    scale_losses(axes)
    draw(figure)
    axis = axes.yaxis
    ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
    told = {tick.get_loc(): tick.label1.get_text() for tick in ticks if tick.label1.get_text()}
    assert len(told) >= 2 and all(float(text) == pytest.approx(at) for at, text in told.items())


def write_data(folder: Path, rule: str = "by hand") -> Recipe:
    """Two episodes of 3 and 2 steps with returns 6 and 20, as shards; a recipe that names them."""
    columns = {"observations": np.arange(15.0).reshape(5, 3), "actions": np.zeros((5, 1))}
    columns |= {"rewards": np.array([1.0, 2, 3, 10, 10]), "terminals": np.arange(5) % 2 == 0}
    columns["terminals"][0] = False
    source = from_arrays(columns)
    object.__setattr__(source.info, "rule", rule)
    convert(source, folder / "tiny", quiet=True)
    return Recipe.parse({"name": "tiny", "data": {"path": str(folder / "tiny")}})


@pytest.mark.usefixtures("pictures")
def test_report_of_a_whole_run(tmp_path: Path, run: Path) -> None:
    (run / "recipe.yaml").write_text(write_data(tmp_path).to_yaml())
    write_lines(run / "metrics.jsonl", *({"step": n, "loss": 1.0 / n} for n in (10, 20)))
    failed = {"step": 20, "error": "no", "return": None, "targets": []}
    write_lines(run / "evaluations.jsonl", evaluation(step=10), evaluation(step=15), failed)
    pair = {"name": "hopper-medium-v2", "minimum": 0.0, "maximum": 1000.0, "note": "only a hint"}
    (run / "evaluation.json").write_text(json.dumps(evaluation(reference=pair)))
    text = write_report(run).read_text()
    for name in ("learning_curve", "asked_vs_achieved"):
        check_picture(run / "plots" / f"{name}.png", BLUE)
        assert f"(plots/{name}.png)" in text
    assert "| mean of the data | 13 |  | 1.3 |" in text  # (6 + 20) / 2, of 1000
    assert "| best of the data | 20 |  | 2.0 |" in text
    assert "| policy, asked 3,000 | 2,100 | 1,852 to 2,348 | 210.0 |" in text
    for part in ("only a hint", "2 episodes, 5 steps", "20 steps", f"data: {tmp_path / 'tiny'}"):
        assert part in text
    assert "| random actions, as D4RL measured them | 0 |  | 0.0 |" in text


@pytest.mark.usefixtures("pictures")
def test_data_that_were_appended_to_are_those_of_the_summary(tmp_path: Path, run: Path) -> None:
    recipe = write_data(tmp_path).replace({"data.admissions": 1})
    (run / "recipe.yaml").write_text(recipe.to_yaml())
    (run / "evaluation.json").write_text(json.dumps(evaluation()))
    assert "of the data" not in write_report(run).read_text()
    data = {"episodes": 3, "steps": 9, "return_mean": 11.0, "return_max": 25.0}
    (run / "summary.json").write_text(json.dumps({"steps": 20, "data": data}))
    text = write_report(run).read_text()
    assert "| best of the data | 25 |" in text and "3 episodes, 9 steps" in text


@pytest.mark.usefixtures("pictures")
def test_report_of_several_tasks(run: Path) -> None:
    tasks = {name: evaluation(normalized_score=score, scale="returns of its data")
             for name, score in (("hop", 50.0), ("run", 70.0))}  # fmt: skip
    row = evaluation(targets=[], tasks=tasks, normalized_score=60.0) | {"return": None}
    write_lines(run / "evaluations.jsonl", row | {"step": 10}, row)
    text = write_report(run).read_text()
    assert "| hop | Hopper-v5 | 2,100.0 | 50.0 | returns of its data |" in text
    assert "| 20 | 50.0 | 70.0 | 60.0 |" in text
    check_picture(run / "plots" / "asked_vs_achieved-run.png", BLUE)


@pytest.mark.usefixtures("pictures")
def test_report_of_negative_returns_and_single_episodes(run: Path) -> None:
    rows = [target(-200.0, -900.0, half=None), target(-1000.0, -1100.0, half=None)]
    (run / "evaluation.json").write_text(json.dumps(evaluation(targets=rows, step=None, run=None)))
    assert "| policy, asked -200 | -900 | - | - |" in write_report(run).read_text()
    check_picture(run / "plots" / "asked_vs_achieved.png", BLUE)


def test_text_of_a_dataset_is_no_markup_of_a_report(tmp_path: Path, run: Path) -> None:
    recipe = write_data(tmp_path, rule="<script>x</script>\x1b[2J`**b**`")
    (run / "recipe.yaml").write_text(recipe.to_yaml())
    (paragraph,) = [text for text in shown_text(write_report(run).read_text()) if "end by" in text]
    assert "end by <script>x</script>\\x1b[2J`**b**`" in paragraph


@pytest.mark.parametrize("name", ODD_NAMES)
def test_names_are_shown_as_they_are(name: str) -> None:
    """In Markdown, of which another reader says what it shows; in pictures; on terminals."""
    seen = printable(name)
    page = f"# {markdown(name)}\n\n|a|b|\n|---|---|\n| {markdown(name)} | 2 |\n"
    assert shown_text(page) == [seen.strip(), "a", "b", seen.strip(), "2"]
    figure = new_figure()
    axes = figure.add_subplot()
    axes.plot([1, 2], label=label(name))
    titles(figure, name, name)
    legend(axes)
    content = io.BytesIO()
    with rc_context({"svg.fonttype": "none"}):
        figure.savefig(content, format="svg")
    tree = ElementTree.fromstring(content.getvalue())
    texts = ["".join(one.itertext()) for one in tree.iter("{http://www.w3.org/2000/svg}text")]
    for most in (34, 95):  # in the legend, below the title
        half = (most - 3) // 2
        wanted = seen if len(seen) <= most else f"{seen[:half]}...{seen[-half:]}"
        assert wanted in texts
    out = io.StringIO()
    console = Terminal(file=out, width=300, force_terminal=True)
    console.print(name)
    print_table(console, ["a"], [[name]])
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in out.getvalue().splitlines()]
    assert lines[0] == lines[-1] == seen.rstrip()


@given(st.lists(st.floats(-1e18, 1e18), min_size=1, max_size=4, unique=True))
def test_numbers_are_names(values: list[float]) -> None:
    assert len(set(told_apart(values))) == len(values)


def test_whole_numbers_are_as_written() -> None:
    assert told_apart([1000001.0, 12345678.5, -131.2345678901]) == [
        "1,000,001",
        "12,345,678.5",
        "-131",
    ]


def test_report_with_little_to_say(run: Path) -> None:
    assert failing_code(lambda: write_report(run)) == "RUN_NOT_FOUND"
    write_lines(run / "evaluations.jsonl", evaluation())
    text = write_report(run).read_text()
    assert "| policy, asked 500 | 450 | 202 to 698 | - |" in text
    assert "learning_curve" not in text


DAMAGE = (
    "[" * 100_000,
    '{"step": 3, "loss": {}, "targets": 7}',
    "null",
    "not json",
    '{"step": 1, "loss": 1e999, "targets": [{"target": 1e999, "return": 0}]}',
)


@pytest.mark.parametrize("name", ["metrics.jsonl", "evaluations.jsonl", "evaluation.json"])
def test_damaged_files_of_a_run_are_one_error(run: Path, name: str) -> None:
    """They were INTERNAL errors, and a pipe was waited for."""
    for text in (*DAMAGE, None):
        (run / name).unlink(missing_ok=True)
        if text is None:
            os.mkfifo(run / name)
        else:
            (run / name).write_text(text + "\n")
        with one_error("RUN_DAMAGED") as caught:
            write_report(run)
        assert name in caught.value.where


class Page(HTMLParser):
    """What a browser would fetch, and the texts that it would show."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.sources, self.links, self.texts = list[str](), list[str](), list[str]()
        self.tags = set[str]()
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.sources += [value or "" for name, value in attrs if name == "src"]
        self.links += [value or "" for name, value in attrs if name == "href"]

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())


@pytest.mark.usefixtures("pictures")
def test_a_page_holds_its_pictures_and_shows_foreign_text_as_text(tmp_path: Path) -> None:
    """Nothing is fetched, no script runs, and no file outside the run gets into it."""
    run = tmp_path / "<script>alert(1)<"
    (run / "plots").mkdir(parents=True)
    (run / "recipe.yaml").write_text(write_data(tmp_path, rule="<b>x</b>").to_yaml())
    write_lines(run / "metrics.jsonl", {"step": 10, "loss": 0.5}, {"step": 20, "loss": 0.1})
    for name in ("../secret.png", "plots/film.gif", "plots/film.mp4"):
        (run / name).write_bytes(Path(name).name.encode())
    videos = ["plots/film.gif", "../secret.png", "plots/film.mp4"]
    (run / "evaluation.json").write_text(json.dumps(evaluation(videos=videos)))
    page = Page(write_report(run).with_suffix(".html"))
    assert run.name in page.texts and not page.tags & {"script", "link", "iframe", "object", "b"}
    kinds = [source.partition(";")[0] for source in page.sources]
    assert sorted(kinds) == ["data:image/gif", "data:image/png", "data:image/png", "data:video/mp4"]
    contents = [b64decode(source.partition(",")[2]) for source in page.sources]
    assert b"film.mp4" in contents and b"secret.png" not in contents
    assert {"data.path", str(tmp_path / "tiny"), "recipe.yaml"} <= {*page.texts}
