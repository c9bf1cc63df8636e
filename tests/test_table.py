"""Tables: memory, returns-to-go, normalisation, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gear_offline.errors import InputError
from gear_offline.tables import table as module
from gear_offline.tables import table_filling
from gear_offline.tables.fields import standard_fields
from gear_offline.tables.table import build_table, returns_to_go
from tests.segment_oracle import MemoryTable, same_bits

LENGTHS = [3, 1, 7, 2]


def columns(
    steps: int = sum(LENGTHS), *, state: tuple[int, ...] = (11,), action: tuple[int, ...] = (3,)
) -> dict[str, npt.NDArray[Any]]:
    generator = np.random.default_rng(1)
    return {
        "observations": generator.normal(size=(steps, *state)).astype(np.float32),
        "actions": generator.uniform(-1, 1, size=(steps, *action)).astype(np.float32),
        "rewards": generator.normal(size=steps).astype(np.float32),
    }


@pytest.mark.parametrize(
    ("state", "action", "row_bytes"),
    [((11,), (3,), 64), ((17,), (6,), 112), ((), (), 16), ((1,), (2,), 32)],
)
def test_records_are_aligned_and_cost_what_is_stated(
    state: tuple[int, ...], action: tuple[int, ...], row_bytes: int
) -> None:
    data = columns(state=state, action=action)
    table = build_table(MemoryTable(data, LENGTHS), context_length=5)
    (group,) = table.groups
    assert group.rows.strides == (row_bytes, 4)
    assert group.rows.ctypes.data % 64 == 0
    assert table.owned_bytes == row_bytes * (13 + 2 * 5)
    found = {
        field.name: group.rows[5:18, field.offset :][:, : field.width] for field in group.fields
    }
    assert same_bits(found["states"], data["observations"].reshape(13, -1))
    assert same_bits(found["actions"], data["actions"].reshape(13, -1))
    assert same_bits(found["rewards"], data["rewards"].reshape(13, 1))
    assert not group.rows[:5].any() and not group.rows[18:].any()


def test_wide_discrete_and_extra_columns_stand_alone_in_their_dtype() -> None:
    data = columns()
    data["observations"] = np.arange(13 * 4 * 4 * 3, dtype=np.uint8).reshape(13, 4, 4, 3)
    data["actions"] = np.arange(13, dtype=np.int8)
    data["infos/qpos"] = np.arange(26, dtype=np.float64).reshape(13, 2)
    table = build_table(MemoryTable(data, LENGTHS), context_length=2, extra_columns=["infos/qpos"])
    dtypes = {group.fields[0].name: group.dtype for group in table.groups}
    assert dtypes == {
        "rewards": np.dtype(np.float32),
        "states": np.dtype(np.uint8),
        "actions": np.dtype(np.int8),
        "extras/infos/qpos": np.dtype(np.float64),
    }
    assert table.owned_bytes == (16 + 48 + 1 + 16) * (13 + 4)


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    gamma=st.sampled_from([1.0, 0.99, 0.5, 0.0]),
    scale=st.sampled_from([1.0, 1000.0, 0.25]),
    dtype=st.sampled_from([np.float32, np.float64, np.int32]),
)
def test_returns_to_go_equal_naive_loops_bit_for_bit(
    lengths: list[int], gamma: float, scale: float, dtype: type[np.generic]
) -> None:
    rewards = np.random.default_rng(len(lengths)).normal(scale=3, size=sum(lengths)).astype(dtype)
    source = MemoryTable({"rewards": rewards}, lengths)
    expected = []
    at = 0
    for length in lengths:
        rest, episode = 0.0, []
        for reward in rewards[at : at + length][::-1].tolist():
            rest = reward + gamma * rest
            episode.append(rest / scale)
        expected += episode[::-1]
        at += length
    found = returns_to_go(source, gamma=gamma, scale=scale)
    assert same_bits(found, np.array(expected, dtype=np.float64).astype(np.float32)[:, None])


def test_returns_to_go_do_not_depend_on_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    rewards = np.random.default_rng(0).normal(size=100).astype(np.float32)
    source = MemoryTable({"rewards": rewards}, [5] * 20)
    whole = returns_to_go(source, gamma=0.9, scale=1.0)
    for chunk in (1, 44, 100, 1000):
        monkeypatch.setattr(module, "CHUNK_BYTES", chunk)
        assert same_bits(returns_to_go(source, gamma=0.9, scale=1.0), whole)


def test_columns_are_read_in_chunks_with_their_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    source = MemoryTable(columns(), LENGTHS)
    whole = build_table(source, context_length=3)
    monkeypatch.setattr(table_filling, "PIECE_BYTES", 100)
    parts = build_table(source, context_length=3)
    for one, other in zip(whole.groups, parts.groups, strict=True):
        assert same_bits(one.rows, other.rows)
    before = source.checked_reads
    source.checked = False
    build_table(source, context_length=3)
    assert before > 0 and source.checked_reads == before


def test_normalisation_is_rounded_once_from_float64() -> None:
    data = columns()
    data["observations"][:, 4] = 2.5  # no deviation: the floor keeps it finite
    source = MemoryTable(data, LENGTHS)
    table = build_table(source, context_length=2, normalize_states=True)
    rows = table.groups[0].rows
    wide = data["observations"].astype(np.float64)
    expected = ((wide - wide.mean(0)) / (wide.std(0) + 1e-6)).astype(np.float32)
    assert same_bits(rows[2:-2, :11], expected)
    assert not rows[2:-2, 4].any()
    assert not rows[:2].any() and not rows[-2:].any()


@pytest.mark.parametrize(
    ("dtype", "shape", "expected"),
    [
        (np.float32, (3,), (np.float32, (3,))),
        (np.float64, (), (np.float32, (1,))),
        (np.int64, (2, 2), (np.float32, (2, 2))),
        (np.uint8, (4,), (np.float32, (4,))),
        (np.uint8, (4, 4), (np.uint8, (4, 4))),
        (np.bool_, (3,), (np.float32, (3,))),
    ],
)
def test_kinds_of_states(dtype: Any, shape: tuple[int, ...], expected: tuple[Any, Any]) -> None:
    data = columns()
    data["observations"] = np.ones((13, *shape), dtype=dtype)
    field = standard_fields(MemoryTable(data, LENGTHS), normalize_states=False)["observations"]
    assert (field.dtype, field.shape) == (np.dtype(expected[0]), expected[1])


@pytest.mark.parametrize(
    ("dtype", "shape", "expected"),
    [
        (np.float64, (3,), (np.float32, (3,))),
        (np.float32, (), (np.float32, (1,))),
        (np.int8, (), (np.int64, ())),
        (np.uint16, (1,), (np.int64, ())),
        (np.int32, (2,), (np.int64, (2,))),
        (np.bool_, (), (np.int64, ())),
    ],
)
def test_kinds_of_actions(dtype: Any, shape: tuple[int, ...], expected: tuple[Any, Any]) -> None:
    data = columns()
    data["actions"] = np.ones((13, *shape), dtype=dtype)
    field = standard_fields(MemoryTable(data, LENGTHS), normalize_states=False)["actions"]
    assert (field.dtype, field.shape) == (np.dtype(expected[0]), expected[1])


def test_refusals() -> None:
    def code(data: dict[str, npt.NDArray[Any]], **options: Any) -> str:
        with pytest.raises(InputError) as caught:
            build_table(MemoryTable(data, LENGTHS), context_length=2, **options)
        return caught.value.code

    good = columns()
    assert code({k: v for k, v in good.items() if k != "rewards"}) == "COLUMN"
    assert code(good, extra_columns=["nothing"]) == "COLUMN"
    assert code(good, extra_columns=["rewards"]) == "EXTRA_COLUMN"
    assert code(good, extra_columns=["a", "a"]) == "EXTRA_COLUMN"
    assert code({**good, "rewards": np.ones((13, 2))}) == "COLUMN_KIND"
    assert code({**good, "observations": np.ones((13, 2), np.complex64)}) == "COLUMN_KIND"
    image = {**good, "observations": np.ones((13, 2, 2), np.uint8)}
    assert code(image, normalize_states=True) == "NORMALIZE_IMAGES"
    large = np.ones((13, 2))
    large[9, 1] = 1e300
    assert code({**good, "observations": large}) == "CAST_OVERFLOW"
    with pytest.raises(InputError, match="column observations, step 9"):
        build_table(MemoryTable({**good, "observations": large}, LENGTHS), context_length=2)
    assert code({**good, "rewards": np.full(13, 1e308)}) == "CAST_OVERFLOW"
