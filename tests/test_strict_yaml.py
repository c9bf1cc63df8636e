"""Strict YAML: YAML 1.2 scalars, and one clear error for everything a recipe should not hold."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gear_offline.config.strict_yaml import MAX_BYTES, MAX_DEPTH, dump_yaml, parse_yaml
from gear_offline.errors import InputError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1e-4", 1e-4),  # YAML 1.1 reads a string
        ("1.0e-4", 1e-4),
        (".5", 0.5),
        ("1.", 1.0),
        ("-3", -3),
        ("010", 10),  # YAML 1.1 reads eight
        ("1:30", "1:30"),  # YAML 1.1 reads ninety
        ("no", "no"),  # YAML 1.1 reads false
        ("on", "on"),
        ("true", True),
        ("~", None),
        ("", None),
        ("2020-01-01", "2020-01-01"),
        ("0x10", "0x10"),
        ("1_000", "1_000"),
        ("<<", "<<"),
        ("[1, 2.5, x]", [1, 2.5, "x"]),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, expected: Any) -> None:
    found = parse_yaml(text, where="test")
    assert found == expected
    assert type(found) is type(expected)


BILLION_LAUGHS = "a: &a [x,x,x,x]\nb: &b [*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b]\nd: [*c,*c,*c,*c]\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\na: 2", "'a' is given twice"),
        ("a:\n  b: 1\n  b: 2", "'b' is given twice"),
        (BILLION_LAUGHS, "anchors and aliases"),
        ("a: *missing", "anchors and aliases"),
        ("a: !!python/object/apply:os.system [echo]", "tag"),
        ("a: !!binary aGk=", "tag"),
        ("1: 2", "not a name"),
        ("[1]: 2", "not a name"),
        ("a: [1", "expected"),
        ("a: b: c", "mapping values"),
        ("--- 1\n--- 2", "single document"),
        ("a: \x07", "unacceptable character"),
        ("a: " + "9" * 5000, "integer string conversion"),
        ("[" * 5000, f"more than {MAX_DEPTH} nested levels"),
        ("a: " + "x" * MAX_BYTES, "larger than"),
    ],
)
def test_what_is_not_plain_is_refused_with_one_error(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said) as caught:
        parse_yaml(text, where="file.yaml")
    assert caught.value.code == "RECIPE_SYNTAX"
    assert "file.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(10**18), 10**18)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=("Cc", "Cs", "Cn")), max_size=12)
    | st.sampled_from(["1e5", "no", "null", "~", "010", "-", "1:30", "a: b", "#x", "*a", "&a"])
)
DOCUMENTS = st.dictionaries(
    st.text("abcdefgh_", min_size=1, max_size=6),
    st.recursive(
        SCALARS,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.text("xyz", min_size=1, max_size=3), inner, max_size=3)
        ),
        max_leaves=6,
    ),
    max_size=5,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(DOCUMENTS)
def test_what_is_dumped_is_read_back_equal(document: dict[str, Any]) -> None:
    assert parse_yaml(dump_yaml(document), where="test") == document
    # equality is blind to 1 == 1.0 == True
    assert repr(parse_yaml(dump_yaml(document), where="test")) == repr(document)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.text(max_size=60))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        parse_yaml(text, where="test")
    except InputError as error:
        assert error.code == "RECIPE_SYNTAX"
