"""Errors are one line with a code, a place and a remedy."""

from __future__ import annotations

import pickle

from gear_offline.errors import GearError, InputError, UnavailableError


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
