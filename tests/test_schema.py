"""Columns, tables and the episode index: what they accept, refuse and compute."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gear_offline.dataset.schema import ColumnSpec, EpisodeIndex, TableSpec
from gear_offline.errors import InputError
from tests.support import failing_code


@pytest.mark.parametrize(
    "given",
    [
        *({"dtype": d} for d in ("O", "S5", "U3", "M8[s]", "m8[s]", [("a", "f4")], "g", "V4")),
        *({"name": n} for n in ("", "/x", "x/", "a//b", "../x", "a/../b", "a b", "é", "x" * 201)),
        *({"shape": s} for s in ((0,), (-1,), (1,) * 9, (1 << 40,))),
    ],
)
def test_a_column_refuses_other_dtypes_names_and_shapes(given: dict[str, Any]) -> None:
    values: dict[str, Any] = {"name": "x", "dtype": "f4", **given}
    assert failing_code(lambda: ColumnSpec(**values)) == "COLUMN"


def test_big_endian_becomes_native() -> None:
    assert ColumnSpec(name="x", dtype=np.dtype(">f8")).dtype == np.dtype("=f8")


def test_table_refuses_names_that_differ_by_case_only() -> None:
    columns = tuple(ColumnSpec(name=n, dtype=np.dtype("f4")) for n in ("x", "X"))
    with pytest.raises(InputError):
        TableSpec(columns=columns, steps=1, episodes=1)


def test_table_names_the_columns_it_has() -> None:
    table = TableSpec(
        columns=(ColumnSpec(name="rewards", dtype=np.dtype("f4")),), steps=3, episodes=1
    )
    assert "rewards" in table and "actions" not in table
    assert table.step_bytes == 4
    with pytest.raises(InputError, match="columns here: rewards"):
        table["actions"]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=20))
def test_episode_index_equals_a_plain_loop(lengths: list[int]) -> None:
    index = EpisodeIndex(np.array(lengths))
    assert index.offsets.tolist() == [sum(lengths[:e]) for e in range(len(lengths) + 1)]
    assert (index.steps, index.episodes) == (sum(lengths), len(lengths))


def test_episode_index_holds_more_than_32_bits() -> None:
    assert EpisodeIndex(np.array([1 << 40, 5])).offsets.tolist() == [0, 1 << 40, (1 << 40) + 5]


@pytest.mark.parametrize("lengths", [[0], [3, -1], [1 << 62, 1 << 62], [[1, 2]]])
def test_episode_index_refuses_what_is_no_length(lengths: list[Any]) -> None:
    assert failing_code(lambda: EpisodeIndex(np.array(lengths))) == "SOURCE_LAYOUT"
