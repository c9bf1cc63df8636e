"""The examples in the help of commands: there for each, unbroken on narrow terminals, and valid."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
import typer

from gear_offline.cli import main as cli
from gear_offline.cli.examples import EXAMPLES
from gear_offline.config.recipe import list_recipes
from gear_offline.dataset.scores import dataset_names
from tests.docs_checks import command_findings


def commands() -> dict[str, Any]:
    """Return every command of the app by its words, groups and the program itself included."""
    found: dict[str, Any] = {}

    def walk(command: Any, path: str) -> None:
        found[path] = command
        for name, child in getattr(command, "commands", {}).items():
            walk(child, f"{path} {name}".strip())

    walk(typer.main.get_command(cli.app), "")
    return found


def examples_of(text: str) -> list[list[str]]:
    """Return the words of each example; a line that ends in a backslash goes on."""
    return [shlex.split(line) for line in text.replace("\\\n", " ").strip().splitlines()]


def shown(words: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the lines of a command's help after "Examples:"."""
    assert cli.main([*words.split(), "--help"]) == 0
    _, title, rest = capsys.readouterr().out.partition("  Examples:\n")
    assert title, f"no examples: {words}"
    return rest.splitlines()


def test_every_command_has_examples() -> None:
    assert commands().keys() == EXAMPLES.keys() and len(EXAMPLES) > 10


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_examples_are_commands_that_exist(name: str) -> None:
    found = examples_of(EXAMPLES[name])
    assert 1 <= len(found) <= 3
    start = ["gear-offline", *name.split()]
    least = len(start) + hasattr(commands()[name], "commands")  # a group's name one of its commands
    for words in found:
        assert words[: len(start)] == start and len(words) >= least
        assert command_findings(words) == []
    assert min(found, key=len) is found[0], "the plainest comes first"


def test_what_examples_name_is_there() -> None:
    recipes = {item.name for item in list_recipes()}
    words = [word for text in EXAMPLES.values() for line in examples_of(text) for word in line]
    runs = [match[1] for word in words if (match := re.fullmatch(r"runs/([\w-]+)-s\d+", word))]
    assert runs and set(runs) <= recipes
    sources = [word.removeprefix("d4rl:") for word in words if word.startswith("d4rl:")]
    assert sources and set(sources) <= set(dataset_names())


@pytest.mark.parametrize("name", sorted(EXAMPLES))
@pytest.mark.parametrize("columns", ["60", "80", "200"])
def test_lines_of_examples_stay_whole(
    name: str, columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    lines = shown(name, capsys)
    assert lines == [f"    {line}" for line in EXAMPLES[name].strip().splitlines()]
    assert max(map(len, lines)) <= 60
    assert examples_of("\n".join(lines)) == examples_of(EXAMPLES[name]), "as copied"


def test_a_wrong_example_is_found() -> None:
    for words in ("train smoke train.stepz=1", "train smoke --nope", "recipes show", "train nope"):
        assert command_findings(["gear-offline", *words.split()]) != []
