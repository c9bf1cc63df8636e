"""The CPU gather against naive loops written from the paper's text, bit for bit."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gear_offline.dataset.schema import EpisodeIndex
from gear_offline.errors import InputError
from gear_offline.kernels import gather as module
from gear_offline.kernels.arena import ALIGNMENT_BYTES, Arena, carve
from gear_offline.kernels.columns import ColumnGroup, Field
from gear_offline.kernels.gather import CpuGather, Windows
from gear_offline.sampling import Segments
from gear_offline.tables.fields import TableSource
from gear_offline.tables.table import Table, build_table
from tests.segment_oracle import Array, MemoryTable, expect, oracle_window, same_bits

NUMERIC = [np.float16, np.float32, np.float64, np.int8, np.int64, np.uint8, np.uint16, np.bool_]
LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=8)


def random_column(dtype: Any, shape: tuple[int, ...], generator: np.random.Generator) -> Array:
    """Return random bits of a dtype, without NaN where arithmetic will see them."""
    kind = np.dtype(dtype).kind
    if kind == "b":
        return generator.integers(0, 2, size=shape).astype(bool)
    if kind in "iu":
        return generator.integers(0, 100, size=shape).astype(dtype)
    return generator.normal(size=shape).astype(dtype)


def all_segments(lengths: list[int]) -> Segments:
    """Return every (episode, start) of the table."""
    pairs = [(e, s) for e, length in enumerate(lengths) for s in range(length)]
    episodes, starts = np.array(pairs, dtype=np.int64).T
    return Segments(episodes=episodes.copy(), starts=starts.copy(), probability=np.ones(len(pairs)))


def gathered(source: TableSource, segments: Segments, **options: Any) -> Windows:
    span, padding = options.pop("context_length"), options.pop("padding", "right")
    table = build_table(source, context_length=span, **options)
    return CpuGather(table, context_length=span, padding=padding).fill(segments)


Kind = tuple[tuple[int, ...], Any]  # per-step shape, dtype


def expected_kinds(states: Kind, actions: Kind) -> dict[str, tuple[str, Any, tuple[int, ...]]]:
    """Return, per field of a batch, its column, dtype and per-step shape."""
    image = states[1] is np.uint8 and len(states[0]) == 2
    discrete = np.dtype(actions[1]).kind == "i"
    return {
        "states": ("observations", np.uint8 if image else np.float32, states[0] or (1,)),
        "actions": (
            "actions",
            np.int64 if discrete else np.float32,
            actions[0] if discrete else actions[0] or (1,),
        ),
        "rewards": ("rewards", np.float32, (1,)),
        "returns_to_go": ("returns_to_go", np.float32, (1,)),
        "extras/infos/x": ("infos/x", np.float64, (2,)),
    }


@settings(max_examples=120)
@given(
    lengths=LENGTHS,
    context_length=st.integers(1, 15),
    padding=st.sampled_from(["right", "left"]),
    pieces=st.integers(1, 4),
    states=st.sampled_from([((3,), d) for d in NUMERIC] + [((2, 3), np.uint8), ((), np.float64)]),
    actions=st.sampled_from(
        [((2,), np.float32), ((2,), np.float64), ((), np.int8), ((3,), np.int32), ((), np.float32)]
    ),
    gamma=st.sampled_from([1.0, 0.9]),
    returns_scale=st.sampled_from([1.0, 1000.0]),
)
def test_every_field_of_every_segment_equals_the_oracle(
    lengths: list[int],
    context_length: int,
    padding: str,
    pieces: int,
    states: tuple[tuple[int, ...], Any],
    actions: tuple[tuple[int, ...], Any],
    gamma: float,
    returns_scale: float,
) -> None:
    generator = np.random.default_rng(sum(lengths))
    total = sum(lengths)
    columns: dict[str, Array] = {
        "observations": random_column(states[1], (total, *states[0]), generator),
        "actions": random_column(actions[1], (total, *actions[0]), generator),
        "rewards": random_column(np.float32, (total,), generator),
        "infos/x": random_column(np.float64, (total, 2), generator),
    }
    segments = all_segments(lengths)
    windows = gathered(
        MemoryTable(columns, lengths, pieces=pieces),
        segments,
        context_length=context_length,
        padding=padding,
        gamma=gamma,
        returns_scale=returns_scale,
        extra_columns=["infos/x"],
    )
    dtypes = expected_kinds(states, actions)
    found = windows.tensors()
    assert set(found) == set(dtypes)
    for i, (episode, start) in enumerate(windows.segments.tolist()):
        assert (episode, start) == (segments.episodes[i], segments.starts[i])
        window = oracle_window(
            columns,
            lengths,
            episode,
            start,
            context_length=context_length,
            padding=padding,
            gamma=gamma,
            returns_scale=returns_scale,
        )
        for name, (column, dtype, shape) in dtypes.items():
            assert same_bits(found[name][i].numpy(), expect(window[column], dtype, shape)), name
        times = window["timesteps"]
        assert windows.timesteps[i].tolist() == [t or 0 for t in times]
        assert windows.attention_mask[i].tolist() == [int(t is not None) for t in times]
    assert windows.timesteps.dtype == windows.attention_mask.dtype == torch.int64


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("shape", [(3,), (2, 2)])
def test_normalised_states_equal_the_formula_and_padding_stays_zero(
    padding: str, shape: tuple[int, ...]
) -> None:
    lengths, generator = [4, 1, 6], np.random.default_rng(0)
    columns: dict[str, Array] = {
        "observations": generator.normal(5, 3, size=(11, *shape)),
        "actions": generator.normal(size=(11, 1)).astype(np.float32),
        "rewards": generator.normal(size=11),
    }
    windows = gathered(
        MemoryTable(columns, lengths, pieces=2),
        all_segments(lengths),
        context_length=5,
        padding=padding,
        normalize_states=True,
    )
    wide = columns["observations"]
    final = ((wide - wide.mean(0)) / (wide.std(0) + 1e-6)).astype(np.float32)
    for i, (episode, start) in enumerate(windows.segments.tolist()):
        window = oracle_window(
            {"rewards": columns["rewards"], "final": final},
            lengths,
            episode,
            start,
            context_length=5,
            padding=padding,
        )
        expected = expect(window["final"], np.float32, shape)
        assert same_bits(windows.tensors()["states"][i].numpy(), expected)


@pytest.mark.parametrize(
    "dtype", [*NUMERIC, np.int16, np.int32, np.uint32, np.uint64, np.complex64, np.complex128]
)
def test_extra_columns_keep_every_bit(dtype: Any) -> None:
    """Random bytes: NaN payloads, negative zeros and subnormals included."""
    lengths, size = [5, 2, 9], np.dtype(dtype).itemsize
    raw = np.random.default_rng(3).integers(0, 256, size=(16, 3 * size), dtype=np.uint8)
    if dtype is np.bool_:
        raw &= 1
    columns: dict[str, Array] = {
        "observations": np.ones((16, 1), np.float32),
        "actions": np.ones((16, 1), np.float32),
        "rewards": np.ones(16, np.float32),
        "extra": raw.view(dtype),
    }
    windows = gathered(
        MemoryTable(columns, lengths, pieces=3),
        all_segments(lengths),
        context_length=4,
        extra_columns=["extra"],
    )
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    for i, (episode, start) in enumerate(windows.segments.tolist()):
        stop = min(start + 4, lengths[episode])
        expected = np.zeros((4, 3 * size), np.uint8)
        expected[: stop - start] = raw[offsets[episode] + start : offsets[episode] + stop]
        found = windows.tensors()["extras/extra"][i].numpy()
        assert found.dtype == dtype and found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("width", [1, 2, 3, 4, 8])
def test_float_states_keep_their_bits_too(width: int) -> None:
    raw = np.random.default_rng(0).integers(0, 256, size=(20, 4 * width), dtype=np.uint8)
    columns: dict[str, Array] = {
        "observations": raw.view(np.float32),
        "actions": np.ones((20, 1), np.float32),
        "rewards": np.ones(20, np.float32),
    }
    windows = gathered(MemoryTable(columns, [20]), all_segments([20]), context_length=1)
    assert windows.tensors()["states"].numpy().tobytes() == raw.tobytes()


def test_no_future_and_no_neighbour_leaks() -> None:
    """Changing anything outside a window, but the rewards after it, changes nothing in it."""
    lengths, span = [6, 3, 8], 4
    generator = np.random.default_rng(0)
    columns: dict[str, Array] = {
        "observations": generator.normal(size=(17, 2)).astype(np.float32),
        "actions": generator.normal(size=(17, 2)).astype(np.float32),
        "rewards": generator.normal(size=17).astype(np.float32),
    }
    offsets = [0, 6, 9]
    for padding in ("right", "left"):
        for episode, start in ((0, 0), (0, 5), (1, 0), (1, 1), (2, 6), (2, 0)):
            first = offsets[episode] + start
            last = offsets[episode] + min(start + span, lengths[episode])
            spoiled = {name: values.copy() for name, values in columns.items()}
            for name in ("observations", "actions"):
                spoiled[name][:first] = spoiled[name][last:] = np.nan
            spoiled["rewards"][:first] = np.nan  # the past, and other episodes
            spoiled["rewards"][offsets[episode] + lengths[episode] :] = np.nan
            segment = Segments(
                episodes=np.array([episode]), starts=np.array([start]), probability=np.ones(1)
            )
            one, other = (
                gathered(
                    MemoryTable(data, lengths), segment, context_length=span, padding=padding
                ).tensors()
                for data in (columns, spoiled)
            )
            for name in one:
                assert same_bits(one[name].numpy(), other[name].numpy())
                assert torch.isfinite(one[name]).all()


@pytest.mark.parametrize("padding", ["right", "left"])
def test_timesteps_of_long_episodes_are_computed(
    padding: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [9, 2]
    columns = {name: np.ones((11, 1)) for name in ("observations", "actions", "rewards")}
    table = build_table(MemoryTable(columns, lengths), context_length=4)
    copied = CpuGather(table, context_length=4, padding=padding)
    monkeypatch.setattr(module, "CLOCK_STEPS", 8)
    computed = CpuGather(table, context_length=4, padding=padding)
    assert copied._clock is not None and computed._clock is None
    segments = all_segments(lengths)
    assert torch.equal(copied.fill(segments).timesteps, computed.fill(segments).timesteps)


def test_any_leading_shape() -> None:
    lengths = [4, 9]
    columns: dict[str, Array] = {
        "observations": np.arange(26, dtype=np.float32).reshape(13, 2),
        "actions": np.arange(13, dtype=np.int64),
        "rewards": np.ones(13, np.float32),
    }
    table = build_table(MemoryTable(columns, lengths), context_length=6)
    gather = CpuGather(table, context_length=3)  # shorter than the margin
    flat = all_segments(lengths)
    grid = Segments(
        episodes=flat.episodes[:12].reshape(3, 4),
        starts=flat.starts[:12].reshape(3, 4),
        probability=flat.probability[:12].reshape(3, 4),
    )
    one, other = gather.fill(flat[:12]), gather.fill(grid)
    assert other.timesteps.shape == (3, 4, 3) and other.segments.shape == (3, 4, 2)
    assert other.tensors()["actions"].shape == (3, 4, 3)
    for name, values in one.tensors().items():
        assert same_bits(values.numpy(), other.tensors()[name].flatten(0, 1).numpy())
    empty = gather.fill(grid[:0])
    assert empty.tensors()["states"].shape == (0, 4, 3, 2)


@pytest.mark.parametrize(("episode", "start"), [(-1, 0), (2, 0), (0, 4), (0, -1), (1, 2**62)])
def test_segments_outside_the_table_are_refused(episode: int, start: int) -> None:
    columns = {name: np.ones((5, 1)) for name in ("observations", "actions", "rewards")}
    table = build_table(MemoryTable(columns, [4, 1]), context_length=3)
    segment = Segments(
        episodes=np.array([0, episode]), starts=np.array([0, start]), probability=np.ones(2)
    )
    with pytest.raises(InputError) as caught:
        CpuGather(table, context_length=3).fill(segment)
    assert caught.value.code == "SEGMENT_RANGE"
    with pytest.raises(InputError) as caught:
        CpuGather(table, context_length=4)
    assert caught.value.code == "CONTEXT_LENGTH"


def test_rows_beyond_two_gibibytes_are_reached() -> None:
    """Byte offsets need 64 bits.  Zeros that nobody wrote take address space, not memory."""
    steps, margin = 3 << 20, 3
    rows = np.zeros((steps + 2 * margin, 1024), np.uint8)
    rows[-2 - margin :][:2] = [[7], [9]]
    field = Field(name="states", dtype=rows.dtype, shape=(32, 32))
    table = Table(
        episodes=EpisodeIndex(np.array([steps - 10, 10])),
        groups=(ColumnGroup(fields=(field,), rows=rows),),
        margin=margin,
    )
    windows = CpuGather(table, context_length=3).fill(
        Segments(episodes=np.array([1, 0]), starts=np.array([8, 0]), probability=np.ones(2))
    )
    states = windows.tensors()["states"]
    assert states[0, :, 31, 31].tolist() == [7, 9, 0]
    assert not states[1].any()


def test_arena_lends_a_block_until_its_last_tensor_is_gone() -> None:
    arena = Arena()
    one, two = carve(arena, [((3, 5), torch.int16), ((4,), torch.float64)])
    assert one.shape == (3, 5) and two.dtype == torch.float64
    assert one.data_ptr() % ALIGNMENT_BYTES == two.data_ptr() % ALIGNMENT_BYTES == 0
    address = one.data_ptr()
    one.fill_(3)
    held = one[1].view(5)  # a view of a view keeps the block
    del one, two
    gc.collect()
    (other,) = carve(arena, [((5,), torch.int64)])
    assert not address <= other.data_ptr() < address + 100
    other.fill_(-1)
    assert held.tolist() == [3] * 5
    as_numpy = held.numpy()  # and so does an array over it
    del held
    gc.collect()
    (third,) = carve(arena, [((5,), torch.int64)])
    third.fill_(-1)
    assert as_numpy.tolist() == [3] * 5
    del as_numpy
    gc.collect()
    (again,) = carve(arena, [((3, 5), torch.int16), ((4,), torch.float64)])[:1]
    assert again.data_ptr() == address
