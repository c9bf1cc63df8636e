"""The examples in the docstrings of public names run as they stand, each in a folder of its own."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

import gear_offline

FOLDERS = {"convert": "tiny", "train": "runs/tiny"}
FIRST = {'"tiny"': ["convert"], '"runs/tiny"': ["convert", "train"]}  # what examples begin from


def examples(name: str) -> list[doctest.DocTest]:
    """Return the examples of a public name and of its methods."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    thing = getattr(gear_offline, name)
    found = finder.find(thing, name, globs={"__name__": "__main__"})
    return [test for test in found if test.examples]


def run(test: doctest.DocTest) -> str:
    """Run examples; return what doctest says of those that fail."""
    failures: list[str] = []
    options = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL
    doctest.DocTestRunner(optionflags=options).run(test, out=failures.append)
    return "".join(failures)


WITH_EXAMPLES = [name for name in gear_offline.__all__ if name != "__version__" and examples(name)]
assert {"GearLoader", "convert", "open_dataset", "train", "load_policy"} <= set(WITH_EXAMPLES)


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for test in examples(name):
        used = [makers for text, makers in FIRST.items() if text in (test.docstring or "")]
        for maker in max(used, key=len, default=[]):
            if maker == name:
                break
            if not (tmp_path / FOLDERS[maker]).exists():
                assert run(examples(maker)[0]) == ""
        assert run(test) == ""
