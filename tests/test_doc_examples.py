"""The examples in the docstrings of public names run as they stand, each in a folder of its own."""

from __future__ import annotations

import doctest
import functools
from pathlib import Path

import pytest

from tests.reference import names_of, reference

OPTIONS = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL
NAMES = (  # what users begin with
    *("DecisionTransformer", "GearLoader", "build_model", "convert", "export_hdf5"),
    *("from_arrays", "from_episodes", "load_policy", "load_recipe", "make_sampler"),
    *("normalized_score", "open_dataset", "train"),
)
MADE_BY = {'"tiny"': ["convert"], '"runs/tiny"': ["convert", "train"]}  # what examples begin from


@functools.cache
def examples() -> dict[str, doctest.DocTest]:
    """Return the docstrings with examples, of functions, classes and their methods, by name."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    found: dict[str, doctest.DocTest] = {}
    for module in reference():
        for name, thing in names_of(module).items():
            if str(getattr(thing, "__module__", "")).startswith("gear_offline"):
                tests = finder.find(thing, name, globs={"__name__": "__main__"})
                found |= {test.name: test for test in tests if test.examples}
    return found


def run(name: str) -> str:
    """Run one docstring's examples; return what doctest says of those that fail."""
    said: list[str] = []
    test = examples()[name]
    fresh = doctest.DocTest(
        test.examples, test.globs.copy(), test.name, test.filename, test.lineno, test.docstring
    )
    doctest.DocTestRunner(optionflags=OPTIONS).run(fresh, out=said.append)
    return "".join(said)


@pytest.mark.parametrize("name", NAMES)
def test_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = examples()[name].docstring or ""
    first = {maker: None for made, makers in MADE_BY.items() if made in text for maker in makers}
    for before in first:
        if before == name:
            break
        assert run(before) == ""
    assert run(name) == ""


def test_a_wrong_example_is_found() -> None:
    example = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, None)
    said: list[str] = []
    doctest.DocTestRunner(optionflags=OPTIONS).run(example, out=said.append)
    assert "Expected:\n    3" in "".join(said)


def test_all_examples_are_run() -> None:
    assert sorted(examples()) == sorted(NAMES)
