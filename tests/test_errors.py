"""Errors are one line with a code, a place and a remedy."""

import ast
import pickle
import re
from typing import Any

from gear_offline.errors import GearError, InputError, UnavailableError
from tests.support import ROOT

ROOMS = ("gear_offline", "models", "loaders", "kernels")


def test_an_error_is_one_line_with_code_place_and_remedy() -> None:
    error = InputError("A_CODE", "it is\nwrong", where="file x", remedy="do y")
    assert str(error) == "[A_CODE] it is wrong (file x); do y"
    assert error.message == "it is wrong (file x); do y"
    assert (error.code, error.exit_code) == ("A_CODE", 2)
    assert str(GearError("A_CODE", "it is wrong")) == "[A_CODE] it is wrong"
    assert str(pickle.loads(pickle.dumps(error))) == str(error), "workers send theirs"


def test_kinds_are_also_the_builtin_kinds() -> None:
    assert issubclass(InputError, ValueError)
    assert issubclass(UnavailableError, RuntimeError)
    assert UnavailableError("A", "b").exit_code == 1


def codes_in_source() -> tuple[set[str], set[str]]:
    """Return what is the first argument of an error, and every text that could be a code."""
    raised, texts = set(), set()
    paths = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    for node in (node for path in paths for node in ast.walk(ast.parse(path.read_text()))):
        if isinstance(node, ast.Constant):
            texts.add(str(node.value))
        is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        call: Any = node if is_call else None
        if call and call.args and re.search("(Error|Interrupted)$", call.func.id):
            raised.add(str(getattr(call.args[0], "value", "")))
    return {code for code in raised if re.fullmatch(r"[A-Z_]+", code)}, texts


def test_the_page_has_the_codes_that_the_source_has() -> None:
    page = (ROOT / "docs" / "reference" / "errors.md").read_text()
    listed = set(re.findall(r"(?m)^\| `([A-Z_]+)` \|", page))
    raised, texts = codes_in_source()
    assert raised - listed == set() and listed - texts == set()
