"""Options of strategies: refused before data are read, with the option's name and what it takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from gear_offline.errors import InputError
from gear_offline.sampling.selection import make_selection, misfit, option_names, selection_names
from tests.law_support import CONTEXT, facts

BAD: list[tuple[str, dict[str, Any], str]] = [
    ("return_weighted", {"rule": "soft"}, "rule must be one of softmax, rank, percentile"),
    ("return_weighted", {"temperature": 0}, "temperature must be a number above 0, got 0"),
    ("return_weighted", {"temperature": "warm"}, "temperature must be a number above 0"),
    ("return_weighted", {"temperature": True}, "temperature must be a number"),
    ("return_weighted", {"temperature": float("inf")}, "temperature must be a number"),
    ("return_weighted", {"unit": "windows"}, "unit must be one of steps, episodes"),
    ("return_weighted", {"returns": [1.0]}, "'returns'"),
    ("top_percent", {"percent": 101}, "percent must be a number above 0 and at most 100"),
    ("top_percent", {"percent": 0.0}, "percent must be a number"),
    ("top_percent", {"of": 3}, "of must be one of"),
    ("top_k", {}, "missing a required argument: 'k'"),
    ("top_k", {"k": 0}, "k must be an integer of at least 1, got 0"),
    ("top_k", {"k": 2.0}, "k must be an integer"),
    ("top_k", {"k": None}, "k must be given"),
    ("stratified_return", {"strata": 0}, "strata must be an integer from 1 to 1024"),
    ("prioritized", {"alpha": -1}, "alpha must be a number at least 0"),
    ("prioritized", {"beta": 1.5}, "beta must be"),
    ("prioritized", {"beta_steps": 0}, "beta_steps must be an integer"),
    ("prioritized", {"largest": 0}, "largest must be"),
    ("prioritized", {"initial": 200}, "initial must be a number above 0 and at most 100"),
    ("prioritized", {"epsilon": -1e-9}, "epsilon must be"),
    ("d3rlpy", {"context_length": 3}, "'context_length'"),
    ("fifo", {"temperature": 1}, "'temperature'"),
]


@pytest.mark.parametrize(("name", "options", "message"), BAD)
def test_bad_options(name: str, options: Mapping[str, Any], message: str) -> None:
    problem, taken = misfit(name, options)
    assert message in problem and taken == option_names(name)
    if "context_length" not in options:
        with pytest.raises(InputError) as caught:
            make_selection(name, facts([3, 4]), context_length=CONTEXT, **options)
        assert caught.value.code == "SELECTION_OPTIONS"
        assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("top_k", "k", np.int64(1)),
        ("return_weighted", "temperature", np.float32(0.5)),
        ("prioritized", "beta_steps", np.int32(9)),
    ],
)
def test_numpy_numbers_are_numbers(name: str, option: str, value: Any) -> None:
    found = make_selection(name, facts([3, 4]), **{option: value}).options[option]
    assert found == value and type(found) in (int, float)


def test_defaults_fit() -> None:
    fine: dict[str, dict[str, Any]] = {
        "top_k": {"k": 1},
        "mixture": {"parts": [{"strategy": "corl", "weight": 1}]},
    }
    for name in selection_names():
        assert misfit(name, fine.get(name, {})) == ("", option_names(name))
