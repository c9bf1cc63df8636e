"""Lists of names: wrapped on a terminal where they do not fit, a line each elsewhere."""

from __future__ import annotations

import json
import sys

import pytest

from gear_offline.cli import main as cli
from gear_offline.config.recipe import list_recipes

RECIPES = [(item.name, item.description) for item in list_recipes()]


def shown(
    words: list[str],
    columns: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> list[str]:
    """Return the lines of a command on a terminal."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert cli.main(words) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(("words", "rows"), [(["recipes", "ls"], RECIPES)])
@pytest.mark.parametrize("columns", [30, 60, 80])
def test_a_narrow_terminal_gets_whole_words(
    words: list[str],
    rows: list[tuple[str, str]],
    columns: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = shown(words, columns, monkeypatch, capsys)
    assert max(map(len, lines)) <= columns and len(lines) > len(rows)
    found = [line for line in lines if not line.startswith(" ")]
    assert [line.split()[0] for line in found] == [name for name, _ in rows]
    assert " ".join(" ".join(lines).split()) == " ".join(f"{name} {text}" for name, text in rows)


@pytest.mark.parametrize(("words", "rows"), [(["recipes", "ls"], RECIPES)])
def test_lists_as_json(
    words: list[str], rows: list[tuple[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == [{"name": name, "description": text} for name, text in rows]


def test_texts_stand_in_a_column_beside_their_names(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = shown(["recipes", "ls"], 60, monkeypatch, capsys)
    at = max(len(name) for name, _ in RECIPES) + 2
    assert all(line[at - 1] == " " and line[at] != " " for line in lines)


def test_a_wide_terminal_and_a_pipe_get_a_line_each(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = [f"{name:32} {text}" for name, text in RECIPES]
    assert shown(["recipes", "ls"], 200, monkeypatch, capsys) == whole
    monkeypatch.undo()
    monkeypatch.setenv("COLUMNS", "60")
    assert cli.main(["recipes", "ls"]) == 0
    assert capsys.readouterr().out.splitlines() == whole
