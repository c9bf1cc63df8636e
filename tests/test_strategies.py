"""`gear-offline strategies`: figures against plain counting, the page, errors, the command."""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from dataclasses import asdict, fields
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from rich.console import Console

from gear_offline.analysis.candidates import parse_candidates
from gear_offline.analysis.page import render
from gear_offline.analysis.strategies import _parts, compare, row_bytes, write_comparison
from gear_offline.analysis.text import COLUMNS, print_comparison
from gear_offline.cli import main as cli
from gear_offline.config.recipe import Recipe, load_recipe
from gear_offline.convert import convert
from gear_offline.dataset.dataset import Dataset, open_dataset
from gear_offline.errors import GearError, InputError
from gear_offline.sampling import make_sampler, sampler_class, strategy_names
from gear_offline.sampling.base import _SAMPLERS
from tests.sampling_support import keys
from tests.support import ArraySource, failing_code, hopper_columns, make_dataset

LENGTHS = [3, 8, 1, 12, 6]
BATCHES, BATCH, SPAN = 60, 4, 5
NAMES = "uniform_steps,top_k:k=2,d3rlpy,shuffled_epochs,fifo,uniform_episodes"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_dataset(tmp_path_factory.mktemp("strategies"), LENGTHS)


def recipe_of(dataset: Dataset, *overrides: str) -> Recipe:
    settings = [
        f"data.path={dataset.path}",
        f"loader.batch_size={BATCH}",
        f"loader.context_length={SPAN}",
        f"train.steps={BATCHES}",
        "optimizer.warmup_steps=1",
    ]
    return load_recipe("paper", [*settings, *overrides])


@pytest.fixture(scope="module")
def document(dataset: Dataset) -> dict[str, Any]:
    return compare(recipe_of(dataset), strategies=NAMES, quiet=True)


def row_of(document: dict[str, Any], label: str) -> dict[str, Any]:
    (found,) = (row for row in document["strategies"] if row["label"] == label)
    return dict(found)


@pytest.mark.parametrize("label", ["uniform_steps", "top_k k=2", "d3rlpy", "fifo"])
def test_figures_are_those_of_counting_one_by_one(
    dataset: Dataset, document: dict[str, Any], label: str
) -> None:
    row = row_of(document, label)
    law = make_sampler(row["strategy"], dataset, context_length=SPAN, **row["options"])
    drawn, repeats, episodes_again, shown = Counter[Any](), 0, 0, Counter[Any]()
    returns, weights, places, real = [], [], [], 0
    first = np.cumsum([0, *LENGTHS]).tolist()
    for step in range(BATCHES):
        segments = law.sample(0, step, 1, BATCH)[0]
        named = keys(segments, LENGTHS, SPAN)
        starts = [(e, s) for e, s, _ in named]
        repeats += len(starts) - len(set(starts))
        episodes_again += len(starts) - len({e for e, _ in starts})
        drawn.update(starts)
        for e, s, n in named:
            shown.update((e, s + i) for i in range(n))
            returns.append(dataset.returns[e])
            places.append(1 - (first[e] + s + 0.5) / sum(LENGTHS))
            real += n
        weights += [1 / p for p in segments.probability.tolist()]
    draws, steps = BATCHES * BATCH, sum(LENGTHS)
    assert row["draws"] == draws
    expected = {
        "coverage_starts": len(drawn) / steps,
        "coverage_steps": len(shown) / steps,
        "coverage_episodes": len({e for e, _ in drawn}) / len(LENGTHS),
        "duplicate_starts": repeats / draws,
        "duplicate_episodes": episodes_again / draws,
        "padding": 1 - real / draws / SPAN,
        "mean_return": float(np.mean(returns)),
        "effective_sample_share": sum(weights) ** 2 / sum(w * w for w in weights) / draws,
        "most_shown_over_mean": max(shown.values()) * steps / sum(shown.values()),
        "window_bytes_per_batch": real * row_bytes(dataset) / BATCHES,
    }
    for key, value in expected.items():
        assert row[key] == pytest.approx(value, rel=1e-9), key
    assert row["age_quartiles"][1] == pytest.approx(float(np.median(places)), abs=1.5 / steps)
    assert sum(row["returns"]) == pytest.approx(1) and sum(row["ages"]) == pytest.approx(1)
    assert row["coverage"][-1] == [BATCHES, row["coverage_starts"], row["coverage_steps"]]
    batches, starts_seen, steps_seen = zip(*row["coverage"], strict=True)
    assert list(batches) == sorted(set(batches))
    assert list(starts_seen) == sorted(starts_seen) and list(steps_seen) == sorted(steps_seen)


@pytest.mark.parametrize("steps", [1, 7, 20, 30, 41])
def test_starts_that_are_drawn_alike_have_equal_shares_of_all_twentieths(steps: int) -> None:
    """Parts of whole steps made one half of a table of 30 steps look drawn twice as often."""
    parts = _parts(np.full(steps, 3), 20)
    np.testing.assert_allclose(parts, 3 * steps / 20)
    counts = np.random.default_rng(steps).integers(0, 9, steps)
    fine = np.repeat(counts / 20, 20).reshape(20, steps).sum(axis=1)
    np.testing.assert_allclose(_parts(counts, 20), fine)


def test_effective_starts(document: dict[str, Any]) -> None:
    assert row_of(document, "uniform_steps")["effective_segments"] == pytest.approx(30)
    assert row_of(document, "fifo")["effective_segments"] == 30
    best = row_of(document, "top_k k=2")["effective_segments"]
    assert best == pytest.approx(30 * row_of(document, "top_k k=2")["coverage_starts"])
    found = row_of(document, "uniform_episodes")["effective_segments"]
    exact = 1 / sum(1 / (25 * length) for length in LENGTHS)
    assert found == pytest.approx(exact, rel=0.15), "from 240 draws"
    assert row_of(document, "shuffled_epochs")["coverage_starts"] == 1


def test_predictions(document: dict[str, Any]) -> None:
    plain = row_of(document, "uniform_steps")
    assert plain["hbm_budget_bytes"] == 30 * 64 // 2, "11 + 3 + 2 floats a step, half of them"
    assert 0.3 < plain["hbm_share"] < 0.8
    assert set(plain["moved_share"]) == {"2", "4", "8"}
    assert plain["moved_share"]["8"] is None, "a batch of 4 has no share for 8 ranks"
    assert 0 <= plain["moved_share"]["2"] < 0.5
    assert row_of(document, "fifo")["moved_share"]["2"] > plain["moved_share"]["2"]


def test_a_strategy_that_cannot_run_is_named_and_the_others_go_on(dataset: Dataset) -> None:
    recipe = recipe_of(dataset, "loader.batch_size=6", "train.steps=3")
    found = compare(recipe, strategies="min_dt,top_percent", quiet=True)
    plain, failed, last = found["strategies"]
    assert plain["strategy"] == "uniform_steps" and last["strategy"] == "top_percent"
    assert "5 episodes make no batch of 6" in failed["error"]
    assert "left out" in render(found)
    console = Console(width=90, record=True, file=io.StringIO())
    print_comparison(found, console=console)
    assert "5 episodes make no batch of 6" in " ".join(console.export_text().split())


def test_returns_that_are_not_finite_are_refused_in_words(tmp_path: Path) -> None:
    columns = hopper_columns(9)
    columns["rewards"][[1, 2, 8]] = np.nan, 1.0, np.inf
    convert(ArraySource(columns, [3, 3, 3]), tmp_path / "d", allow_nonfinite=True, quiet=True)
    with pytest.raises(InputError) as caught:
        compare(recipe_of(open_dataset(tmp_path / "d")), strategies="fifo", quiet=True)
    assert caught.value.code == "COLUMN" and "2 episodes" in caught.value.what


def test_candidates() -> None:
    recipe = load_recipe("paper", ["selection={strategy: top_k, k: 3}"])
    named = "top_k:k=3, return_weighted:rule=rank:temperature=2,top_k:k=3"
    found = parse_candidates(named, recipe)
    assert [c.label for c in found] == ["top_k k=3", "return_weighted rule=rank temperature=2"]
    assert found[1].options == {"rule": "rank", "temperature": 2}
    assert len(parse_candidates(None, recipe)) == 9
    with pytest.raises(InputError, match="top_k:k=50") as caught:
        parse_candidates("top_k:50", recipe)
    assert caught.value.code == "USAGE"
    assert failing_code(lambda: parse_candidates("uniform", recipe)) == "SELECTION"
    with pytest.raises(InputError, match="did you mean 'top_k'"):
        parse_candidates("top_kk:k=3", recipe)
    for text in (" ,", "", "top_k:k=5:k=6"):
        assert failing_code(partial(parse_candidates, text, recipe)) == "USAGE"


def test_options_that_do_not_fit_stop_the_command(dataset: Dataset) -> None:
    recipe = recipe_of(dataset)
    assert failing_code(lambda: compare(recipe, strategies="top_k:q=1", quiet=True)) == "SELECTION"


class Page(HTMLParser):
    """Collects what a page loads, and that its elements are closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.open: list[str] = []
        self.tags = Counter[str]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.loads += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "wbr"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_stands_alone(document: dict[str, Any]) -> None:
    hostile = json.loads(json.dumps(document))
    hostile["strategies"][0]["label"] = "<script>alert(1)</script>"
    hostile["data"]["path"] = "data/<b>"
    text = render(hostile)
    page = Page()
    page.feed(text)
    assert page.open == [] and page.loads == []
    assert page.tags["script"] == page.tags["link"] == page.tags["b"] == 0
    assert page.tags["section"] == 6 and page.tags["svg"] == 18
    assert "prefers-color-scheme: dark" in text and "width=device-width" in text
    assert not re.search(r"(https?:)?//|url\(|@import", text)
    for column in COLUMNS:
        assert text.count(column.title) >= 7, "in the table and in every card"
    assert not re.search(r"\bnan\b|\binf\b", text)


@pytest.mark.parametrize(
    ("heights", "top", "cuts"),
    [((6, 5), 6, 0), ((6, 20), 6, 1), ((5, 5), 5, 0), ((8, 5), 5, 1), ((7, 10), 10, 0)],
)
def test_bars_are_cut_only_where_that_makes_room(
    document: dict[str, Any], heights: tuple[int, int], top: int, cuts: int
) -> None:
    changed = json.loads(json.dumps(document))
    changed["data"]["returns"] = [0.02] * len(changed["data"]["returns"])
    for row in changed["strategies"]:
        row["returns"], row["ages"] = [0.01] * len(row["returns"]), [0.05] * len(row["ages"])
    for row, percent in zip(changed["strategies"], heights, strict=False):
        row["returns"][0] = percent / 100  # 5 is where bars may be cut
    text = render(changed)
    assert text.count("cut here") == cuts and f">{top} %" in text


def test_returns_that_are_equal_but_for_rounding(tmp_path: Path) -> None:
    """NumPy refuses a histogram whose range spans fewer floats than it has bins."""
    columns = hopper_columns(6)
    columns["rewards"] = np.array([0.1, 0.2, 0.3, 0.3, 0.2, 0.1])
    columns["terminals"][[2, 5]] = True
    dataset = make_dataset(tmp_path, [3, 3], columns=columns)
    assert 0 < np.ptp(dataset.returns) < 1e-15
    found = compare(recipe_of(dataset), strategies="top_k:k=1", quiet=True)
    for shares in (found["data"]["returns"], *(row["returns"] for row in found["strategies"])):
        assert sum(shares) == pytest.approx(1)
    assert "Returns of the episodes drawn" in render(found)


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_table_fits_the_terminal(document: dict[str, Any], width: int) -> None:
    console = Console(width=width, record=True, file=io.StringIO())
    print_comparison(document, console=console)
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    assert f"{100 * row_of(document, 'd3rlpy')['duplicate_starts']:.1f} %" in text


def test_the_command(dataset: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"data.path={dataset.path}", "train.steps=5", "optimizer.warmup_steps=1"]
    words += ["loader.batch_size=3", "--strategies", "fifo,corl", "--out", str(tmp_path / "out")]
    assert cli.main(["strategies", "paper", *words, "--json", "-q"]) == 0
    streams = capsys.readouterr()
    shown = json.loads(streams.out)
    assert streams.err == ""
    assert [row["strategy"] for row in shown["strategies"]] == ["uniform_steps", "fifo", "corl"]
    assert json.loads((tmp_path / "out" / "strategies.json").read_text()) == shown
    assert (tmp_path / "out" / "strategies.html").read_text() == render(shown)
    assert cli.main(["strategies", "paper", *words]) == 0
    assert "strategies.html" in capsys.readouterr().out


def test_a_place_that_cannot_be_written_is_refused_before_the_work(
    dataset: Dataset,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = ["strategies", "paper", f"data.path={dataset.path}", "loader.batch_size=3"]
    (tmp_path / "file").touch()
    with monkeypatch.context() as patch:
        patch.setattr(
            "gear_offline.analysis.strategies.compare", lambda *_, **__: pytest.fail("worked")
        )
        for place in ("file", "file/below"):
            assert cli.main([*words, "--out", str(tmp_path / place)]) == 2
            error = capsys.readouterr().err
            said = f"error[OUTPUT_WRITE]: {tmp_path / 'file'} is a file, not a folder"
            assert error.startswith(said)
    with pytest.raises(GearError) as caught:
        write_comparison(
            compare(load_recipe("paper", words[2:]), strategies="fifo"), Path("/proc/x")
        )
    assert caught.value.code == "OUTPUT_WRITE"


def test_the_strategy_in_the_documents_works(dataset: Dataset) -> None:
    page = (Path(__file__).parents[1] / "docs" / "strategies.md").read_text()
    (code,) = (
        block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "@reg" in block
    )
    try:
        exec(compile(code, "strategies.md", "exec"), {})
        law = make_sampler("recent", dataset, half_life=1.0)
        drawn = law.sample(0, 0, 10, 500)
    finally:
        _SAMPLERS.pop("recent", None)
    shares = np.bincount(drawn.episodes.reshape(-1), minlength=5) / drawn.episodes.size
    np.testing.assert_allclose(shares, 2.0 ** np.arange(5) / 31, atol=0.02)
    assert asdict(law.options) == {"half_life": 1.0}


def test_the_file_in_the_documents_starts_commands(
    dataset: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    page = (Path(__file__).parents[1] / "docs" / "strategies.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    parts = [block for block in blocks if "@reg" in block or "__main__" in block]
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(recipe_of(dataset).to_yaml())
    words = ["strategies", str(recipe), "--strategies", "recent:half_life=2", "--json", "-q"]
    monkeypatch.setattr("sys.argv", ["recent.py", *words, "--out", str(tmp_path / "out")])
    code = compile("import sys\n" + "\n".join(parts), "recent.py", "exec")
    try:
        with pytest.raises(SystemExit) as caught:
            exec(code, {"__name__": "__main__"})
    finally:
        _SAMPLERS.pop("recent", None)
    assert len(parts) == 2 and caught.value.code == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["strategies"][1]["options"] == {"half_life": 2}


def test_every_strategy_and_option_is_documented() -> None:
    page = (Path(__file__).parents[1] / "docs" / "strategies.md").read_text()
    for name in strategy_names():
        assert f"`{name}`" in page, name
        for option in (field.name for field in fields(cast(Any, sampler_class(name).Options))):
            assert f"`{option}`" in page or f"{option}:" in page, f"{name}: {option}"
