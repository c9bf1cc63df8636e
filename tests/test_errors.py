"""Errors are one line with a code, a place and a remedy; every code is documented."""

from __future__ import annotations

import re
from pathlib import Path

from gear_offline.errors import GearError, InputError, UnavailableError

ROOT = Path(__file__).resolve().parents[1]
RAISED = re.compile(r"(?:InputError|UnavailableError|GearError)\(\s*\"([A-Z0-9_]+)\"")
DOCUMENTED = re.compile(r"^\| `([A-Z0-9_]+)` \|", re.MULTILINE)


def codes_in_source() -> set[str]:
    folders = ("gear_offline", "models", "loaders", "kernels")
    files = [p for f in folders for p in (ROOT / f).rglob("*.py")]
    return {code for path in files for code in RAISED.findall(path.read_text())}


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
    assert len(raised) > 20
    assert raised - documented == set(), "add these to docs/errors.md"
    assert documented - raised - {"USAGE", "INTERNAL", "INTERRUPTED"} == set(), "no longer raised"
