"""The examples in the docstrings of public names run as they stand, each in a folder of its own."""

from __future__ import annotations

import ast
import doctest
import functools
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import gear_offline
from tests.docs_support import PAGES, ROOT, blocks
from tests.reference import names_of, reference

OPTIONS = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL
NAMES = (  # what users begin with
    *("DecisionTransformer", "GearLoader", "build_model", "convert", "export_hdf5"),
    *("from_arrays", "from_episodes", "load_policy", "load_recipe", "make_selection"),
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


def shown() -> Iterator[tuple[str, str, str]]:
    """Yield what pages and examples import: where, module, name."""
    codes = [(p, b.text) for p in PAGES for b in blocks(p.read_text()) if b.language == "python"]
    codes += [(p, p.read_text()) for p in sorted((ROOT / "examples").glob("*.py"))]
    for page, code in codes:
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gear_offline"):
                for alias in node.names:
                    yield page.name, str(node.module), alias.name


def test_what_pages_and_examples_import_is_in_the_reference() -> None:
    known = [thing for module in reference() for thing in names_of(module).values()]
    found = list(shown())
    missing = [
        f"{page}: {module}.{name}"
        for page, module, name in found
        if not any(getattr(import_module(module), name) is thing for thing in known)
    ]
    assert len(found) > 20
    assert missing == []


def test_the_package_lists_the_pages_of_the_reference() -> None:
    listed = set(re.findall(r"`(gear_offline\.[\w.]+)`", gear_offline.__doc__ or ""))
    assert listed == set(reference()) - {"gear_offline"}
