"""The points of a sweep: grids, seeds, names, and what is refused before anything starts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gear_offline.config.recipe import load_recipe
from gear_offline.errors import InputError
from gear_offline.sweep.plots import short_label
from gear_offline.sweep.points import (
    flat,
    grid,
    name_points,
    parse_points,
    parse_seeds,
    plain_label,
)


def settings(*overrides: str, seeds: list[int] | None = None) -> list[tuple[Any, ...]]:
    points = name_points(parse_points("paper", overrides, seeds=seeds))
    return [(point.name, dict(point.settings), point.recipe.seed) for point in points]


def test_lists_are_multiplied_and_seeds_come_last() -> None:
    found = settings("optimizer.learning_rate=1e-3,1e-4", "model.layers=2,3", seeds=[0, 7])
    assert len(found) == 8
    assert found[0] == (
        "layers=2,learning_rate=0.001,s0",
        {"model.layers": 2, "optimizer.learning_rate": 0.001},
        0,
    )
    assert [seed for _, _, seed in found] == [0, 7] * 4
    assert {row[1]["optimizer.learning_rate"] for row in found[:4]} == {0.001}


def test_one_value_is_a_plain_override_and_names_nothing() -> None:
    (only,) = parse_points("paper", ["model.layers=5"])
    assert only.model.layers == 5
    (point,) = name_points([only])
    assert (point.name, dict(point.settings), point.label) == ("s0", {}, "paper")


def test_commas_in_brackets_and_quotes_belong_to_a_value() -> None:
    two = parse_points("paper", ["evaluate.targets=[3600, 1800],[100]"])
    assert [point.evaluate.targets for point in two] == [(3600.0, 1800.0), (100.0,)]
    two = parse_points("paper", ['description="a, b",c'])
    assert [point.description for point in two] == ["a, b", "c"]


def test_options_of_a_strategy_are_settings_of_their_own() -> None:
    found = settings("selection={strategy: top_k, k: 3},{strategy: top_k, k: 4}")
    assert [row[:2] for row in found] == [
        ("k=3,s0", {"selection.options.k": 3}),
        ("k=4,s0", {"selection.options.k": 4}),
    ]


@given(st.lists(st.sampled_from("abAB/ :é.,=0123"), min_size=1, max_size=150))
def test_any_text_gives_a_name_that_is_a_directory(signs: list[str]) -> None:
    base = load_recipe("paper")
    text = "".join(signs)
    recipes = [base.replace(data__path=text), base.replace(data__path=text + "x")]
    one, other = name_points(recipes)
    assert one.name != other.name
    assert "/" not in one.name and len(one.name) <= 100 and not one.name.startswith(".")


def test_keys_with_the_same_end_are_told_apart() -> None:
    recipes = grid(load_recipe("paper"), {"seed": [0], "evaluate.seed": [1, 2]})
    assert [point.name for point in name_points(recipes)] == ["seed=1,s0", "seed=2,s0"]
    both: dict[str, list[Any]] = {
        "data.path": ["a", "b"],
        "data.source": ["c"],
        "model.layers": [1, 2],
    }
    assert len(grid(load_recipe("paper"), both, seeds=[1, 2, 3])) == 12


def test_flat_names_every_leaf() -> None:
    assert flat({"a": {"b": 1, "c": {}}, "d": [1]}) == {"a.b": 1, "a.c": {}, "d": [1]}


def test_labels_lose_their_sections_and_keep_their_values() -> None:
    recipe = load_recipe("smoke")
    points = name_points(
        grid(recipe, {"optimizer.learning_rate": [1e-3, 0.5], "evaluate.targets": [[1.5, 2.5]]})
    )
    assert [plain_label(point.label) for point in points] == [
        "learning_rate=0.001",
        "learning_rate=0.5",
    ]
    assert plain_label("evaluate.targets=[1.5, 2.5], a.b.c=x.y") == "targets=[1.5, 2.5], c=x.y"
    assert plain_label("made-up.v2") == "made-up.v2"


@pytest.mark.parametrize(
    ("text", "seeds"),
    [("3", [0, 1, 2]), ("3,5,7", [3, 5, 7]), ("12,", [12]), ("1", [0]), ("1e1", list(range(10)))],
)
def test_seeds(text: str, seeds: list[int]) -> None:
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "a", "1,1", ",", "1,-2", "99999999999"])
def test_seeds_that_are_none(text: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_seeds(text)
    assert caught.value.code == "USAGE" and "--seeds" in caught.value.what


@pytest.mark.parametrize(
    ("overrides", "seeds", "code"),
    [
        (["train.stepz=1,2"], None, "RECIPE"),
        (["train.steps=100000,many"], None, "RECIPE"),
        (["optimizer.learning_rate=1e-3,-1"], None, "RECIPE"),
        (["model.layers"], None, "RECIPE"),
        (["model.layers=2,2"], None, "SWEEP_POINTS"),
        (["model.layers=2,"], None, "SWEEP_POINTS"),
        (["model.layers=2", "model.layers=3"], None, "SWEEP_POINTS"),
        (["seed=1,2"], [0], "SWEEP_POINTS"),
        ([], list(range(10_001)), "SWEEP_POINTS"),
    ],
)
def test_what_is_refused(overrides: list[str], seeds: list[int] | None, code: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_points("paper", overrides, seeds=seeds)
    assert caught.value.code == code


@given(chosen=st.sets(st.integers(0, 7), min_size=1))
def test_some_points_of_a_grid_are_called_as_in_the_whole(chosen: set[int]) -> None:
    """With the options that name the whole, also where a law's option is no leaf of any of them."""
    words = ["selection.strategy=uniform_steps,uniform_episodes", "model.layers=1,2"]
    recipes = parse_points("paper", words, seeds=[0, 3])
    ranked = recipes[7].replace(selection__strategy="top_k", selection__options={"k": 5})
    whole = [*recipes[:7], ranked]
    points = name_points(whole)
    options = tuple(points[0].settings)
    assert {"selection.strategy", "selection.options.k", "model.layers"} <= set(options)
    found = name_points([whole[number] for number in sorted(chosen)], options=options)
    assert found == tuple(points[number] for number in sorted(chosen))


def test_points_and_names_that_do_not_fit() -> None:
    base = load_recipe("paper")
    other = base.replace(seed=1)
    cases: list[tuple[Any, Any]] = [
        ([], None),
        ([base, base], None),
        ([base], ["a", "b"]),
        ([base, other], ["a", "a"]),
        ([base], [".."]),
        ([base], ["a/b"]),
    ]
    for recipes, names in cases:
        with pytest.raises(InputError) as caught:
            name_points(recipes, names)
        assert caught.value.code == "SWEEP_POINTS"


@pytest.mark.parametrize(
    ("label", "short"),
    [
        ("optimizer.learning_rate=0.001", "learning_rate=0.001"),
        (
            "optimizer.learning_rate=0.0003, loader.batch_size=128",
            "learning_r.=0.0003, batch_size=128",
        ),
        (
            "loader.context_length=20, model.layers=3, model.dropout=0.1",
            "context.=20, layers=3, dropout=0.1",
        ),
        ("a" * 40, f"{'a' * 15}...{'a' * 16}"),
    ],
)
def test_names_in_plots_keep_their_values(label: str, short: str) -> None:
    assert short_label(label) == short
