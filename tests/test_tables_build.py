"""Tables: what rows hold and cost, bit for bit against arrays and naive loops; damage; refusals."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gear_offline.batches.tables import returns as returns_module
from gear_offline.batches.tables import table as module
from gear_offline.batches.tables.returns import sum_returns
from gear_offline.batches.tables.table import Table, TableOptions, build_table, table_bytes
from gear_offline.data.convert.conversion import convert
from gear_offline.data.dataset.dataset import Dataset, open_dataset
from gear_offline.errors import InputError
from tests.segment_oracle import MemoryTable, same_bits
from tests.support import ArraySource, failing_code, one_error

LENGTHS = [3, 1, 7, 2]
MANY = [30, 1, 7, 55, 20, 3, 40, 12]


def columns(
    steps: int = sum(LENGTHS), *, state: tuple[int, ...] = (11,), action: tuple[int, ...] = (3,)
) -> dict[str, npt.NDArray[Any]]:
    generator = np.random.default_rng(1)
    return {
        "observations": generator.normal(size=(steps, *state)).astype(np.float32),
        "actions": generator.uniform(-1, 1, size=(steps, *action)).astype(np.float32),
        "rewards": generator.normal(size=steps).astype(np.float32),
    }


def mixed_columns(steps: int) -> dict[str, npt.NDArray[Any]]:
    generator = np.random.default_rng(4)
    return columns(steps) | {
        "observations": generator.normal(size=(steps, 11)),
        "frames": generator.integers(0, 256, (steps, 5, 3), dtype=np.uint8),
        "flags": generator.integers(0, 2, steps).astype(bool),
        "waves": (generator.normal(size=(steps, 2)) + 1j).astype(np.complex64),
    }


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Dataset, MemoryTable]:
    arrays = mixed_columns(sum(MANY))
    target = tmp_path_factory.mktemp("tables") / "dataset"
    convert(ArraySource(arrays, MANY), target, shard_bytes=6000, block_bytes=1024, quiet=True)
    dataset = open_dataset(target, verify=False)
    assert len(dataset.manifest.shards) > 3
    return dataset, MemoryTable(arrays, MANY)


def assert_same(one: Table, other: Table) -> None:
    for a, b in zip(one.groups, other.groups, strict=True):
        assert [f.name for f in a.fields] == [f.name for f in b.fields]
        assert same_bits(a.rows, b.rows)


def naive_returns(
    rewards: npt.NDArray[Any], lengths: list[int], gamma: float, scale: float
) -> npt.NDArray[np.float32]:
    values = rewards.reshape(-1).astype(np.float64).tolist()
    sums: list[float] = []
    at = 0
    for length in lengths:
        rest, back = 0.0, []
        for number, reward in enumerate(reversed(values[at : at + length])):
            rest = reward if number == 0 else reward + gamma * rest
            back.append(rest)
        sums += back[::-1]
        at += length
    with np.errstate(over="ignore"):
        return (np.array(sums, dtype=np.float64) / scale).astype(np.float32)


@pytest.mark.parametrize(
    ("state", "action", "row_bytes"),
    [((11,), (3,), 64), ((17,), (6,), 112), ((), (), 16), ((1,), (2,), 32)],
)
def test_records_are_aligned_and_cost_what_is_stated(
    state: tuple[int, ...], action: tuple[int, ...], row_bytes: int
) -> None:
    arrays = columns(state=state, action=action)
    source = MemoryTable(arrays, LENGTHS)
    table = build_table(
        source, TableOptions(context_length=5, gamma=0.9, returns_scale=4.0), landing_rows=6
    )
    (group,) = table.groups
    assert group.rows.strides == (row_bytes, 4)
    assert group.rows.ctypes.data % 64 == 0
    assert group.rows.nbytes == row_bytes * (13 + 2 * 5 + 6)
    pages = table_bytes(source, TableOptions(context_length=5), landing_rows=6)
    assert group.rows.nbytes <= pages < group.rows.nbytes + 4096
    rows = {f.name: group.rows[5:18, f.offset : f.offset + f.width] for f in group.fields}
    assert same_bits(rows["states"], arrays["observations"].reshape(13, -1))
    assert same_bits(rows["actions"], arrays["actions"].reshape(13, -1))
    assert same_bits(rows["rewards"], arrays["rewards"].reshape(13, 1))
    returns = naive_returns(arrays["rewards"], LENGTHS, 0.9, 4.0)
    assert same_bits(rows["returns_to_go"], returns[:, None])
    assert not group.rows[:5].any() and not group.rows[18:].any()


@settings(max_examples=30)
@given(
    threads=st.sampled_from([1, 2, 16]),
    chunk=st.sampled_from([1, 90, 700, 1 << 20]),
    run=st.sampled_from([1, 50, 1 << 16]),
    gamma=st.sampled_from([1.0, 0.9]),
    normalize=st.booleans(),
)
def test_shards_give_the_bits_of_the_arrays_whatever_is_read_at_a_time(
    data: tuple[Dataset, MemoryTable], monkeypatch: pytest.MonkeyPatch, threads: int, chunk: int,
    run: int, gamma: float, normalize: bool,
) -> None:  # fmt: skip
    dataset, arrays = data
    options: dict[str, Any] = {
        "context_length": 4,
        "gamma": gamma,
        "returns_scale": 3.0,
        "extra_columns": ["frames", "flags", "waves"],
    }
    whole = build_table(arrays, TableOptions(**options), threads=1)
    monkeypatch.setattr(module, "CHUNK_BYTES", chunk)
    monkeypatch.setattr(module, "RUN_STEPS", run)
    table = build_table(
        dataset, TableOptions(normalize_states=normalize, **options), threads=threads
    )
    if normalize:
        wide, moments = arrays.columns["observations"], dataset.statistics["observations"]
        expected = ((wide - moments.mean) / (moments.std + 1e-6)).astype(np.float32)
        assert same_bits(table.groups[0].rows[4:-4, :11], expected)
        table.groups[0].rows[4:-4, :11] = wide.astype(np.float32)
    assert_same(table, whole)


lengths_of = st.one_of(
    st.lists(st.integers(1, 40), min_size=1, max_size=30),  # ragged, several classes
    st.lists(st.integers(33, 60), min_size=1, max_size=30),  # ragged, one class
    st.tuples(st.integers(1, 30), st.integers(1, 40)).map(lambda t: [t[1]] * t[0]),  # equal
)


@settings(max_examples=150)
@given(
    lengths=lengths_of,
    gamma=st.sampled_from([1.0, 0.99, 0.5, 0.0]),
    scale=st.sampled_from([1.0, 3.0, 1000.0]),
    dtype=st.sampled_from([np.float32, np.float64, np.int32, np.bool_]),
    zeros=st.booleans(),
    few=st.sampled_from([0, 8]),
    seed=st.integers(0, 99),
)
def test_returns_to_go_have_the_bits_of_a_loop(
    lengths: list[int], gamma: float, scale: float, dtype: Any, zeros: bool, few: int, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    steps = sum(lengths)
    powers = 10.0 ** generator.integers(-8, 8, steps)
    rewards = (generator.normal(size=steps) * powers).astype(dtype)
    if zeros:
        rewards[generator.random(steps) < 0.7] = -0.0 if rewards.dtype.kind == "f" else 0
    offsets = np.concatenate([[0], np.cumsum(lengths)]) + 7
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(returns_module, "FEW_EPISODES", few)
        returns = sum_returns(rewards[:, None], offsets, gamma=gamma, scale=scale)
    assert same_bits(returns, naive_returns(rewards, lengths, gamma, scale))


def test_infinite_rewards_stay_and_sums_that_overflow_are_refused() -> None:
    rewards = np.array([1.0, np.inf, 2.0, np.nan, 4.0, 5.0], np.float32)
    returns = sum_returns(rewards, [0, 3, 6], gamma=1.0, scale=1.0)
    assert returns.tolist()[:3] == [np.inf, np.inf, 2.0]
    assert np.isnan(returns[3]) and returns.tolist()[4:] == [9.0, 5.0]
    large = np.array([-3e38, 3e38, 3e38], np.float32)
    with one_error("COLUMN", "column rewards, step 11"):
        sum_returns(large, [10, 13], gamma=1.0, scale=1.0)
    assert sum_returns(large, [10, 13], gamma=1.0, scale=2.0).tolist()[1] == np.float32(3e38)


def test_refusals() -> None:
    def code(arrays: dict[str, npt.NDArray[Any]], **options: Any) -> str:
        source = MemoryTable(arrays, LENGTHS)
        return failing_code(lambda: build_table(source, TableOptions(context_length=2, **options)))

    good = columns()
    missing = code({k: v for k, v in good.items() if k != "actions"})
    assert missing == code(good, extra_columns=["nothing"]) and missing.startswith("COLUMN")
    assert code(good, extra_columns=["rewards"]) == "COLUMN"
    assert code(good, extra_columns=["a", "a"]) == "COLUMN"
    assert code({**good, "rewards": np.ones((13, 2))}) == "COLUMN"
    assert code({**good, "observations": np.ones((13, 2), np.complex64)}) == "COLUMN"
    assert code(good, frame_stack=2) == "LOADER_OPTION"
    image = {**good, "observations": np.ones((13, 2, 2), np.uint8)}
    assert code(image, normalize_states=True) == "LOADER_OPTION"
    large = np.ones((13, 2))
    large[9, 1] = 1e300
    with pytest.raises(InputError, match=r"float32 .column observations"):
        build_table(
            MemoryTable({**good, "observations": large}, LENGTHS), TableOptions(context_length=2)
        )
    assert code({**good, "rewards": np.full(13, 1e308)}) == "COLUMN"
