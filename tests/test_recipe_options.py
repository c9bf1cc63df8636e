"""Options of recipes: each has a text and a row in the docs, and takes or refuses any value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field, ValidationError

from gear_offline.config.problems import dotted_fields, entry_model, section_model, to_input_error
from gear_offline.config.recipe import Recipe
from gear_offline.config.sections import Section
from gear_offline.config.strict_yaml import parse_yaml
from gear_offline.errors import InputError


def option_rows() -> list[str]:
    """Return the lines of docs/recipes.md's tables, made from the typed options."""
    rows: list[str] = []
    entries: list[tuple[type[BaseModel], str]] = []
    defaults = Recipe(name="x").to_dict()

    def add(model: type[BaseModel], prefix: str, values: dict[str, Any]) -> None:
        for name, field in model.model_fields.items():
            section = section_model(field.annotation)
            if section is not None:
                rows.append(
                    f"\n### {prefix}{name}\n\n| option | default | meaning |\n|---|---|---|"
                )
                add(section, f"{prefix}{name}.", values.get(name) or {})
                continue
            entry = entry_model(field.annotation)
            if entry is not None:
                of_each = ".NAME" if "dict" in str(field.annotation) else ""
                entries.append((entry, f"{prefix}{name}{of_each}"))
            default = values.get(name, field.default)
            shown = "required" if field.is_required() else f"`{json.dumps(default)}`"
            rows.append(f"| `{name}` | {shown} | {field.description} |")

    add(Recipe, "", defaults)
    for model, title in entries:
        rows.append(f"\n### {title}\n\n| option | default | meaning |\n|---|---|---|")
        for name, field in model.model_fields.items():
            shown = "required" if field.is_required() else f"`{json.dumps(field.default)}`"
            rows.append(f"| `{name}` | {shown} | {field.description} |")
    return rows


def test_every_option_is_documented() -> None:
    page = (Path(__file__).parents[1] / "docs" / "recipes.md").read_text()
    assert len(option_rows()) > 50
    for row in option_rows():
        assert row in page, f"docs/recipes.md lacks {row}"


def test_every_option_has_a_text() -> None:
    def check(model: type[BaseModel]) -> int:
        count = 0
        for name, field in model.model_fields.items():
            section = section_model(field.annotation)
            assert section or field.description, f"{model.__name__}.{name} has no text"
            count += 1 if section is None else check(section)
        return count

    assert check(Recipe) == len(list(dotted_fields(Recipe)))


class Triples(Section):
    """Options of so many numbers, wherever they may stand."""

    limits: tuple[int, int, int] | None = Field(default=None, strict=False)
    parts: dict[str, Triples] | None = None


@pytest.mark.parametrize("value", [[], [1], [1, 2], [1, 2, 3, 4]])
@pytest.mark.parametrize("place", ["limits", "parts.x.limits"])
def test_a_list_of_so_many_numbers_is_told_as_one(place: str, value: list[int]) -> None:
    inner: dict[str, Any] = {"limits": value}
    with pytest.raises(ValidationError) as caught:
        Triples.model_validate(inner if place == "limits" else {"parts": {"x": inner}})
    error = to_input_error(Triples, caught.value, where="x.yaml")
    assert (error.code, error.remedy) == ("RECIPE_VALUE", f"write it like {place}=[1,2,3]")
    assert error.what == f"{place} must be a list of three numbers, got {value}"


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.dictionaries(
        st.sampled_from(list(dotted_fields(Recipe))),
        st.integers() | st.text(max_size=5) | st.floats(),
        max_size=3,
    )
)
def test_any_values_are_accepted_or_refused_with_a_code(values: dict[str, Any]) -> None:
    nested: dict[str, Any] = {"name": "x"}
    for option, value in values.items():
        place = nested
        *sections, leaf = option.split(".")
        for section in sections:
            place = place.setdefault(section, {})
        place[leaf] = value
    try:
        recipe = Recipe.parse(nested)
    except InputError as error:
        assert error.code.startswith("RECIPE_")
    else:
        assert Recipe.parse(parse_yaml(recipe.to_yaml(), where="x")) == recipe
