"""The trials of a sweep: grids, seeds, names, and what is refused before anything starts."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gear_offline.errors import InputError
from gear_offline.sweep.trials import make_trials, parse_options, parse_seeds, trial_name


def settings(*overrides: str, seeds: list[int] | None = None) -> list[tuple[Any, ...]]:
    trials = make_trials("paper", parse_options(overrides), seeds)
    return [(trial.name, dict(trial.settings), trial.recipe.seed) for trial in trials]


def test_lists_are_multiplied_and_seeds_come_last() -> None:
    found = settings("optimizer.learning_rate=1e-3,1e-4", "model.layers=2,3", seeds=[0, 7])
    assert len(found) == 8
    assert found[0] == (
        "learning_rate=0.001,layers=2,s0",
        {"model.layers": 2, "optimizer.learning_rate": 0.001},
        0,
    )
    assert [seed for _, _, seed in found] == [0, 7] * 4
    assert {row[1]["optimizer.learning_rate"] for row in found[:4]} == {0.001}


def test_one_value_is_a_plain_override_and_names_nothing() -> None:
    (trial,) = make_trials("paper", {"model.layers": [5]})
    assert trial.recipe.model.layers == 5
    assert (trial.name, dict(trial.settings), trial.label) == ("s0", {}, "paper")
    (trial,) = make_trials("paper", {"model.layers": [5]}, named=["model.layers"])
    assert (trial.name, dict(trial.settings)) == ("layers=5,s0", {"model.layers": 5})


def test_commas_in_brackets_and_quotes_belong_to_a_value() -> None:
    assert parse_options(["evaluate.targets=[3600, 1800],[100]", 'description="a, b",c']) == {
        "evaluate.targets": [[3600, 1800], [100]],
        "description": ["a, b", "c"],
    }


@given(st.text(alphabet="abAB/ :é.,=0123", min_size=1, max_size=150))
def test_any_label_gives_a_name_that_is_a_directory_of_its_own(label: str) -> None:
    names = {trial_name(label, 0), trial_name(label, 1), trial_name(f"{label}x", 0)}
    assert len(names) == 3
    for name in names:
        assert "/" not in name and len(name) <= 100 and not name.startswith(".")


def test_keys_with_the_same_end_are_told_apart() -> None:
    trials = make_trials("paper", {"evaluate.seed": [1, 2]}, [0])
    assert [trial.name for trial in trials] == ["seed=1,s0", "seed=2,s0"]
    trials = make_trials("paper", {"data.path": ["a", "b"], "data.tasks": [None]}, [0])
    assert [trial.label for trial in trials] == ["path=a", "path=b"]


@pytest.mark.parametrize(
    ("text", "seeds"), [("3", [0, 1, 2]), ("3,5,7", [3, 5, 7]), ("12,", [12]), ("1", [0])]
)
def test_seeds(text: str, seeds: list[int]) -> None:
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "a", ",", "1,-2", "99999999999"])
def test_seeds_that_are_none(text: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_seeds(text)
    assert caught.value.code == "USAGE" and "--seeds" in caught.value.what


@pytest.mark.parametrize(
    ("overrides", "seeds", "code"),
    [
        (["train.stepz=1,2"], None, "RECIPE"),
        (["train.steps=100000,many"], None, "RECIPE"),
        (["model.layers"], None, "USAGE"),
        (["model.layers=2,2"], None, "USAGE"),
        (["model.layers=2,,3"], None, "RECIPE"),
        (["model.layers=2", "model.layers=3"], None, "USAGE"),
        (["seed=1,2"], [0], "USAGE"),
        ([], [1, 1], "USAGE"),
        ([], list(range(10_001)), "USAGE"),
    ],
)
def test_what_is_refused(overrides: list[str], seeds: list[int] | None, code: str) -> None:
    with pytest.raises(InputError) as caught:
        make_trials("paper", parse_options(overrides), seeds)
    assert caught.value.code.startswith(code)
