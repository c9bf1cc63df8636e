"""Errors are one line with a code, a place and a remedy; every code is documented."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from gear_offline.errors import GearError, InputError, UnavailableError

ROOT = Path(__file__).resolve().parents[1]
CODE = re.compile(r"[A-Z][A-Z0-9_]{3,}")
RAISERS = re.compile(r"\w+(Error|Interrupted)|_refuse|show")
DOCUMENTED = re.compile(r"^\| `([A-Z0-9_]+)` \|", re.MULTILINE)


def codes_in_source() -> set[str]:
    folders = ("gear_offline", "models", "loaders", "kernels")
    files = [p for f in folders for p in (ROOT / f).rglob("*.py")]
    calls = [
        n for p in files for n in ast.walk(ast.parse(p.read_text())) if isinstance(n, ast.Call)
    ]
    return {
        first.value
        for call in calls
        if call.args and RAISERS.fullmatch(ast.unparse(call.func).rpartition(".")[2])
        for first in call.args[:1]
        if isinstance(first, ast.Constant) and isinstance(first.value, str)
        if CODE.fullmatch(first.value)
    }


def test_error_is_one_line_with_place_and_remedy() -> None:
    error = InputError("A_CODE", "it is\nwrong", where="file x", remedy="do y")
    assert str(error) == "it is wrong (file x); do y"
    assert (error.code, error.exit_code) == ("A_CODE", 2)


def test_place_and_remedy_may_be_empty() -> None:
    assert str(GearError("A_CODE", "it is wrong")) == "it is wrong"


def test_kinds_are_also_the_builtin_kinds() -> None:
    assert issubclass(InputError, ValueError)
    assert issubclass(UnavailableError, RuntimeError)
    assert UnavailableError("A", "b").exit_code == 1


def test_every_code_in_the_source_is_documented_and_the_reverse() -> None:
    documented = set(DOCUMENTED.findall((ROOT / "docs" / "errors.md").read_text()))
    raised = codes_in_source()
    assert len(raised) > 100
    assert raised - documented == set(), "add these to docs/errors.md"
    assert documented - raised == set(), "no longer raised"
