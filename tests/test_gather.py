"""Gathers against naive loops written from the paper's text, bit for bit.

One body for each gather: NumPy and torch on the CPU, the CUDA text compiled for the CPU, the GPU.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gear_offline.batches.tables.table import Table, TableOptions, build_table
from gear_offline.data.dataset.schema import EpisodeIndex
from gear_offline.kernels.columns import ColumnGroup, Field
from gear_offline.kernels.draws import Segments
from gear_offline.kernels.gather import Padding, Windows
from gear_offline.kernels.gather_gpu import StaticFill
from tests.gpu_support import NEEDS_CUPY, ON_GPU
from tests.image_support import image_columns
from tests.kernels_on_cpu import gpu_gather, on_cpu
from tests.segment_oracle import (
    Array,
    MemoryTable,
    all_segments,
    bits,
    cpu_gather,
    expect,
    memory_table,
    oracle_window,
    same_bits,
)
from tests.support import one_error

GATHERS = ["cpu", "text", pytest.param("cuda", marks=[*ON_GPU, NEEDS_CUPY])]
NUMERIC = [np.float16, np.float32, np.float64, np.int8, np.int64, np.uint8, np.uint16, np.bool_]
LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=8)
PADDINGS: Any = st.sampled_from(["right", "left"])

Cut = Callable[..., Windows]


@contextmanager
def device(kind: str, kernels: Any) -> Iterator[str]:
    """Yield the device of a GPU gather; of the CUDA text it is the CPU."""
    if kind == "cuda":
        yield "cuda"
    else:
        with on_cpu(kernels):
            yield "cpu"


@pytest.fixture(scope="module", params=GATHERS)
def cut(request: pytest.FixtureRequest) -> Cut:
    """Cut segments out of a table: ``cut(table, segments, landing, K, padding)``."""

    def by_cpu(
        table: Table, segments: Segments, landing: Any, span: int, padding: Any, **local: Any
    ) -> Windows:
        return cpu_gather(table, span, padding, **local).gather(segments, landing)

    if request.param == "cpu":
        return by_cpu
    kernels = request.getfixturevalue("kernels")

    def by_gpu(
        table: Table, segments: Segments, landing: Any, span: int, padding: Any, **local: Any
    ) -> Windows:
        with device(request.param, kernels) as place:
            gather = gpu_gather(
                table, device=place, context_length=span, padding=padding, rank_batch=1, **local
            )
            windows = gather.gather(segments, landing)
        return windows.map(lambda tensor: tensor.cpu())

    return by_gpu


def random_column(dtype: Any, shape: tuple[int, ...], generator: np.random.Generator) -> Array:
    """Return random values of a dtype, without NaN where arithmetic will see them."""
    kind = np.dtype(dtype).kind
    if kind in "iub":
        return generator.integers(0, 2 if kind == "b" else 100, size=shape).astype(dtype)
    return generator.normal(size=shape).astype(dtype)


Kind = tuple[tuple[int, ...], Any]  # per-step shape, dtype


def expected_kinds(states: Kind, actions: Kind) -> dict[str, tuple[str, Any, tuple[int, ...]]]:
    """Return, per field of a batch, its column, dtype and per-step shape."""
    image = states[1] is np.uint8 and len(states[0]) == 2
    discrete = np.dtype(actions[1]).kind in "iub"
    whole = actions[0] if discrete else (math.prod(actions[0]),)
    return {
        "states": ("observations", np.uint8 if image else np.float32, states[0] or (1,)),
        "actions": (
            "actions",
            np.int64 if discrete else np.float32,
            () if discrete and actions[0] == (1,) else whole,
        ),
        "rewards": ("rewards", np.float32, (1,)),
        "returns_to_go": ("returns_to_go", np.float32, (1,)),
    }


@settings(max_examples=80)
@given(
    lengths=LENGTHS,
    span=st.integers(1, 15),
    padding=PADDINGS,
    states=st.sampled_from(
        [((3,), d) for d in NUMERIC]
        + [((2, 3), np.uint8), ((), np.float64), ((300,), np.float32), ((4100,), np.float64)]
    ),
    actions=st.sampled_from(
        [((n,), d) for n in (2, 3) for d in (np.float32, np.float64, np.int32)]
        + [((), np.int8), ((), np.float32), ((2, 3), np.float64), ((2, 200), np.float32)]
        + [((), np.bool_), ((1,), np.uint16)]
    ),
    gamma=st.sampled_from([1.0, 0.9]),
    normalize=st.booleans(),
    extra=st.sampled_from([*NUMERIC, *map(np.dtype, ("i2", "i4", "u4", "u8", "c8", "c16"))]),
)
def test_every_field_of_every_segment_equals_the_oracle(
    cut: Cut, lengths: list[int], span: int, padding: Padding, states: Kind, actions: Kind,
    gamma: float, normalize: bool, extra: Any,
) -> None:  # fmt: skip
    """Extra columns keep every bit: NaN payloads, negative zeros and subnormals included."""
    generator, total = np.random.default_rng(sum(lengths)), sum(lengths)
    raw = generator.integers(0, 256, (total, 2 * np.dtype(extra).itemsize), np.uint8)
    columns: dict[str, Array] = {
        "observations": random_column(states[1], (total, *states[0]), generator),
        "actions": random_column(actions[1], (total, *actions[0]), generator),
        "rewards": random_column(np.float32, (total,), generator),
        "infos/x": (raw & 1 if extra is np.bool_ else raw).view(extra),
    }
    kinds = expected_kinds(states, actions) | {"extras/infos/x": ("infos/x", extra, (2,))}
    normalize = normalize and kinds["states"][1] is np.float32
    scale: dict[str, Any] = {"gamma": gamma, "returns_scale": 10.0 if normalize else 1.0}
    table = build_table(
        MemoryTable(columns, lengths),
        TableOptions(
            context_length=span, normalize_states=normalize, extra_columns=["infos/x"], **scale
        ),
    )
    segments = all_segments(lengths)
    windows = cut(table, segments, None, span, padding)
    values = windows.tensors()
    assert set(values) == set(kinds)
    if normalize:
        wide = columns["observations"].astype(np.float64)
        columns["observations"] = (wide - wide.mean(0)) / (wide.std(0) + 1e-6)
    for i, (episode, start) in enumerate(windows.segments.tolist()):
        assert (episode, start) == (segments.episodes[i], segments.starts[i])
        window = oracle_window(
            columns, lengths, episode, start, context_length=span, padding=padding, **scale
        )
        for name, (column, dtype, shape) in kinds.items():
            assert same_bits(values[name][i].numpy(), expect(window[column], dtype, shape)), name
        times = window["timesteps"]
        assert windows.timesteps[i].tolist() == [t or 0 for t in times]
        assert windows.attention_mask[i].tolist() == [int(t is not None) for t in times]
    assert windows.timesteps.dtype == windows.attention_mask.dtype == torch.int64


def frames_table(lengths: list[int], frame: tuple[int, ...], span: int, stack: int) -> Any:
    columns: Any = image_columns(sum(lengths), frame)
    if len(frame) == 3 and frame[0] > 9:  # floats of 64 bits are cast, stacks too
        columns["observations"] = columns["observations"] / 7
    table = build_table(
        MemoryTable(columns, lengths), TableOptions(context_length=span, frame_stack=stack)
    )
    return columns["observations"], table


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    span=st.integers(1, 11),
    stack=st.integers(2, 6),
    frame=st.sampled_from([(4, 4), (3, 5), (2, 3, 3), (40, 31), (16, 17, 2)]),
    padding=PADDINGS,
)
def test_stacks_of_frames_hold_the_frames_before_each_step(
    cut: Cut, lengths: list[int], span: int, stack: int, frame: tuple[int, ...], padding: Padding
) -> None:
    frames, table = frames_table(lengths, frame, span, stack)
    windows = cut(table, all_segments(lengths), None, span, padding)
    states = windows.tensors()["states"].numpy()
    assert states.shape[1:] == (span, stack, *frame)
    assert span + stack - 1 in [buffer.shape[1] for buffer in windows.buffers], "each frame once"
    offsets = np.concatenate([[0], np.cumsum(lengths)]).tolist()
    for i, (episode, start) in enumerate(windows.segments.tolist()):
        own = frames[offsets[episode] : offsets[episode + 1]]
        real = min(span, lengths[episode] - start)
        first = 0 if padding == "right" else span - real
        for k in range(real):
            expected = np.zeros((stack, *frame), states.dtype)
            for place in range(max(stack - 1 - start - k, 0), stack):
                expected[place] = own[start + k - (stack - 1) + place]
            assert np.array_equal(states[i, first + k], expected)


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=2, max_size=8),
    span=st.integers(1, 9),
    stack=st.sampled_from([1, 3]),
    padding=PADDINGS,
    data=st.data(),
)
def test_rows_that_landed_are_read_like_any_other(
    cut: Cut, lengths: list[int], span: int, stack: int, padding: Padding, data: st.DataObject
) -> None:
    """Some episodes are here, windows of all others are in landing rows: the same windows."""
    held = np.array(
        data.draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
    )
    _, whole = frames_table(lengths, (3, 5), span, stack)
    segments = all_segments(lengths)
    slot, before = span + stack - 1, np.minimum(segments.starts, stack - 1)
    real = np.minimum(np.asarray(lengths)[segments.episodes] - segments.starts, span)
    order = data.draw(st.permutations(range(len(real))))
    groups, offsets = [], whole.episodes.offsets
    landing = np.full(len(real), -1)
    generator = np.random.default_rng(1)
    for group in whole.groups:
        own = [np.arange(offsets[e], offsets[e + 1]) for e in np.flatnonzero(held).tolist()]
        kept = np.concatenate([*own, np.zeros(0, int)]) + whole.margin
        steps = len(kept)
        rows = generator.integers(1, 9, (2 * whole.margin + steps + slot * len(real), group.width))
        rows = rows.astype(group.dtype)  # what nobody has written may be anything
        rows[: whole.margin] = rows[whole.margin + steps :][: whole.margin] = 0
        rows[whole.margin : whole.margin + steps] = group.rows[kept]
        for i in np.flatnonzero(~held[segments.episodes]).tolist():
            base = 2 * whole.margin + steps + slot * order[i] + stack - 1
            landing[i] = base = base + (span - real[i]) * (padding == "left")
            low = whole.margin + offsets[segments.episodes[i]] + segments.starts[i]
            rows[base - before[i] : base + real[i]] = group.rows[low - before[i] : low + real[i]]
        groups.append(ColumnGroup(fields=group.fields, rows=rows))
    index = EpisodeIndex(np.asarray(lengths)[held])
    part = Table(episodes=index, groups=tuple(groups), margin=whole.margin)
    expected = cpu_gather(whole, span, padding).gather(segments)
    windows = cut(part, segments, landing, span, padding, offsets=offsets, local=held)
    assert bits(windows) == bits(expected)


@pytest.mark.parametrize("padding", ["right", "left"])
def test_windows_of_given_lengths_and_of_any_leading_shape(cut: Cut, padding: Padding) -> None:
    table, flat = memory_table([4, 9], 6), all_segments([4, 9])
    lengths = np.arange(12) % 4
    grid = Segments(
        episodes=flat.episodes[:12].reshape(3, 4),
        starts=flat.starts[:12].reshape(3, 4),
        probability=flat.probability[:12].reshape(3, 4),
        lengths=lengths.reshape(3, 4),
    )
    whole = cut(table, flat[:12], None, 3, padding)  # shorter than the margin
    shorter = cut(table, grid, None, 3, padding)
    assert shorter.timesteps.shape == (3, 4, 3) and shorter.segments.shape == (3, 4, 2)
    assert shorter.tensors()["actions"].shape == (3, 4, 3, 2)
    real = np.minimum(whole.attention_mask.numpy().sum(1), np.maximum(lengths, 1))
    assert shorter.attention_mask.flatten(0, 1).sum(1).tolist() == real.tolist()
    for i, count in enumerate(real.tolist()):
        one = whole.tensors()["states"][i][whole.attention_mask[i].bool()]
        other = shorter.tensors()["states"].flatten(0, 1)[i]
        at = slice(count) if padding == "right" else slice(3 - count, None)
        assert torch.equal(other[at], one[:count]) and int((other != 0).any(1).sum()) == count
    empty = cut(table, grid[:0], None, 3, padding)
    assert empty.tensors()["states"].shape == (0, 4, 3, 3)


@pytest.mark.parametrize(("episode", "start"), [(-1, 0), (2, 0), (0, 4), (0, -1), (1, 2**62)])
def test_segments_outside_the_dataset_are_refused(cut: Cut, episode: int, start: int) -> None:
    segment = Segments(
        episodes=np.array([0, episode]), starts=np.array([0, start]), probability=np.ones(2)
    )
    with one_error("SELECTION"):
        cut(memory_table([4, 1], 3), segment, None, 3, "right")


@pytest.mark.parametrize("kind", GATHERS[1:])
def test_a_ring_of_segments_is_read_at_the_step_of_the_counter(kernels: Any, kind: str) -> None:
    lengths, table = [4, 9, 2], memory_table([4, 9, 2], 3)
    options: dict[str, Any] = {"rank_batch": 4, "context_length": 3}
    drawn = np.random.default_rng(5).integers(0, 15, (20, 4))
    every = all_segments(lengths)
    named = [every[row] for row in drawn]
    with device(kind, kernels) as place:
        fill = StaticFill(gpu_gather(table, device=place, **options), ring=6)
        fill.enqueue()  # before anything is written: some window, and no foreign memory
        first = 2**33 + 1
        fill.set_step(first)
        for block in range(0, 20, 2):
            both = Segments(
                episodes=np.stack([named[block].episodes, named[block + 1].episodes]),
                starts=np.stack([named[block].starts, named[block + 1].starts]),
                probability=np.ones((2, 4)),
            )
            fill.write(first + block, both)
            for step in (block, block + 1):
                fill.enqueue()
                assert int(fill.counter) == first + step + 1
                assert bits(fill.windows) == bits(cpu_gather(table, 3).gather(named[step]))


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
    windows = cpu_gather(table, 3).gather(
        Segments(episodes=np.array([1, 0]), starts=np.array([8, 0]), probability=np.ones(2))
    )
    states = windows.tensors()["states"]
    assert states[0, :, 31, 31].tolist() == [7, 9, 0]
    assert not states[1].any()
