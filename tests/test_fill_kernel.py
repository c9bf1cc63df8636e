"""The fill kernel's own text, compiled for the CPU, against the CPU selection and gather.

What is left to the GPU tests is how threads share the tasks, and the compiler.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gear_offline.dataset.schema import EpisodeIndex
from gear_offline.kernels.columns import ColumnGroup
from gear_offline.kernels.draws import CumulativeWeights
from gear_offline.kernels.gather import CpuGather, Padding, Windows, torch_dtype
from gear_offline.kernels.guide import guide
from gear_offline.kernels.job import JOB, TYPES, describe_group, describe_job
from gear_offline.kernels.rules import CHOSEN, WEIGHTED_EPISODES
from gear_offline.sampling import Facts, Sampler, Segments, make_sampler
from gear_offline.tables.table import Table, build_table
from tests.segment_oracle import MemoryTable

ROOT = Path(__file__).resolve().parents[1]
LAWS = ("uniform_steps", "uniform_episodes", "original", "huggingface", "corl")
DTYPES = [*(str(dtype) for dtype in TYPES if dtype != np.bool_), "bool"]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    target = tmp_path_factory.mktemp("fill") / "fill.so"
    source = ROOT / "tests" / "fill_on_cpu.cpp"
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-Wall", "-Werror"]
    include = f"-I{ROOT / 'kernels' / 'cuda'}"
    subprocess.run([compiler, *flags, include, str(source), "-o", str(target)], check=True)
    found = ctypes.CDLL(str(target))
    found.fill.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int]
    found.job_bytes.restype = ctypes.c_longlong
    assert found.job_bytes() == JOB.itemsize
    return found


class Emulated:
    """What `DeviceEngine` does, with memory of this process for device memory."""

    def __init__(self, table: Table, *, padding: Padding, span: int, per_step: int) -> None:
        self.table, self.span, self.per_step = table, span, per_step
        self.kept: list[npt.NDArray[Any]] = []
        offsets = table.episodes.offsets
        guides, shift = guide(offsets)
        self.wrong = np.zeros(1, np.int64)
        self.job = describe_job(
            [self.row(group) for group in table.groups],
            offsets=self.keep(offsets),
            guide=self.keep(guides),
            shift=shift,
            episodes=table.episodes.episodes,
            steps=table.episodes.steps,
            per_step=per_step,
            span=span,
            left=int(padding == "left"),
            wrong=self.wrong.ctypes.data,
        )

    def keep(self, values: npt.NDArray[Any]) -> int:
        self.kept.append(np.ascontiguousarray(values))
        return self.kept[-1].ctypes.data

    def row(self, group: ColumnGroup) -> Any:
        assert group.rows is not None
        first = self.table.margin + self.table.episodes.offsets[:-1]
        addresses = group.rows.ctypes.data + first * group.rows.strides[0]
        field, moments = group.fields[0], (0, 0)
        if field.mean is not None and field.divisor is not None:
            moments = (self.keep(field.mean), self.keep(field.divisor))
        return describe_group(
            group, addresses=self.keep(addresses), moments=moments, span=self.span
        )

    def run(self, library: Any, count: int, *, step: int = 0, lanes: int = 32, **job: int) -> Any:
        """Return (fields' buffers, timesteps, mask, names), as bytes and int64."""
        for name, value in job.items():
            self.job[name] = np.uint64(value)
        outputs = []
        for number, group in enumerate(self.table.groups):
            shape = (count, self.span + group.history, group.width)
            outputs.append(np.full(shape, 0x55, np.uint8).astype(group.final_dtype))
            self.job["store"]["out"][0, number] = outputs[-1].ctypes.data
        times, mask = (np.full((count, self.span), -7, np.int64) for _ in range(2))
        names = np.full((count, 2), -7, np.int64)
        self.job["timesteps"], self.job["mask"] = times.ctypes.data, mask.ctypes.data
        self.job["names"], self.job["segments"] = names.ctypes.data, count
        library.fill(self.job.ctypes.data, step, lanes)
        return outputs, times, mask, names


def same(found: Any, expected: Windows) -> None:
    outputs, times, mask, names = found
    for mine, theirs in zip(outputs, expected.buffers, strict=True):
        flat = theirs.numpy().reshape(mine.shape)
        assert mine.dtype == flat.dtype and torch_dtype(mine.dtype) == theirs.dtype
        assert mine.tobytes() == flat.tobytes()
    assert np.array_equal(times, expected.timesteps.numpy().reshape(times.shape))
    assert np.array_equal(mask, expected.attention_mask.numpy().reshape(mask.shape))
    assert np.array_equal(names, expected.segments.numpy().reshape(names.shape))


def make_source(
    lengths: list[int], *, states: int, dtype: str, actions: str, extra: tuple[str, tuple[int, ...]]
) -> MemoryTable:
    total, generator = sum(lengths), np.random.default_rng(sum(lengths) + states)

    def values(name: str, *shape: int) -> npt.NDArray[Any]:
        raw = generator.integers(0, 2 if name == "bool" else 100, size=(total, *shape))
        scaled = raw / 3.0 - 11.0 if name.startswith("f") else raw
        return scaled.astype(name)

    columns = {
        "observations": values(dtype, states),
        "actions": values(actions, 3) if actions.startswith("f") else values(actions),
        "rewards": values("float64"),
        "extra": values(extra[0], *extra[1]),
    }
    return MemoryTable(columns, lengths)


LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=12)
EXTRAS = st.tuples(st.sampled_from(DTYPES), st.sampled_from([(), (1,), (5,), (3, 7), (16,)]))


@settings(deadline=None, max_examples=60)
@given(
    lengths=LENGTHS,
    span=st.integers(1, 24),
    states=st.sampled_from([1, 2, 7, 11, 300]),
    dtype=st.sampled_from(DTYPES[:-1]),
    actions=st.sampled_from(["float32", "float64", "int32", "uint8"]),
    extra=EXTRAS,
    padding=st.sampled_from(["right", "left"]),
    law=st.sampled_from(sorted(LAWS)),
    normalize=st.booleans(),
    lanes=st.sampled_from([8, 16, 32]),
    step=st.integers(0, 2**63 - 10),
    seed=st.integers(0, 2**64 - 1),
)
def test_the_kernel_gives_the_bits_of_its_twin(
    library: Any,
    lengths: list[int],
    span: int,
    states: int,
    dtype: str,
    actions: str,
    extra: tuple[str, tuple[int, ...]],
    padding: Padding,
    law: str,
    normalize: bool,
    lanes: int,
    step: int,
    seed: int,
) -> None:
    source = make_source(lengths, states=states, dtype=dtype, actions=actions, extra=extra)
    table = build_table(
        source,
        context_length=span,
        normalize_states=normalize,
        extra_columns=["extra"],
    )
    engine = Emulated(table, padding=padding, span=span, per_step=5)
    selection = make_sampler(law, EpisodeIndex(lengths=np.asarray(lengths, np.int64)))
    segments = selection.sample(seed, step, 3, 5)
    expected = CpuGather(table, context_length=span, padding=padding).fill(segments)
    same(
        engine.run(library, 15, step=step, lanes=lanes, **drawing(engine, selection, seed)),
        expected,
    )


@settings(deadline=None, max_examples=60)
@given(
    lengths=LENGTHS,
    span=st.integers(1, 12),
    frame=st.sampled_from([(1, 1), (3, 5), (4, 4), (2, 3, 2), (40, 31)]),
    stack=st.integers(1, 7),
    padding=st.sampled_from(["right", "left"]),
    lanes=st.sampled_from([8, 16, 32]),
    cast=st.booleans(),
    seed=st.integers(0, 2**64 - 1),
)
def test_frames_before_a_window_are_those_of_the_twin(
    library: Any,
    lengths: list[int],
    span: int,
    frame: tuple[int, ...],
    stack: int,
    padding: Padding,
    lanes: int,
    cast: bool,
    seed: int,
) -> None:
    source = make_source(lengths, states=1, dtype="int8", actions="uint8", extra=("int8", ()))
    frames = np.random.default_rng(seed).integers(0, 256, size=(sum(lengths), *frame))
    source = MemoryTable(source.columns | {"observations": frames.astype(np.uint8)}, lengths)
    table = build_table(source, context_length=span, frame_stack=stack)
    if cast:  # no column needs it today; the kernel can
        table = replace(table, groups=tuple(as_float(group) for group in table.groups))
    engine = Emulated(table, padding=padding, span=span, per_step=9)
    law = make_sampler("uniform_steps", table.episodes)
    segments = law.sample(seed, 3, 2, 9)
    expected = CpuGather(table, context_length=span, padding=padding).fill(segments)
    assert max(buffer.shape[2] for buffer in expected.buffers) == span + stack - 1
    job = drawing(engine, law, seed)
    same(engine.run(library, 18, step=3, lanes=lanes, **job), expected)


def drawing(engine: Emulated, sampler: Sampler, seed: int) -> dict[str, Any]:
    """Return how `DeviceEngine` tells the kernel to draw."""
    assert isinstance(sampler.gpu, CumulativeWeights)
    search = sampler.gpu.search
    return {
        "law": WEIGHTED_EPISODES,
        "thresholds": engine.keep(search.table),
        "episodes": search.last + 1,
        "seed": seed,
    }


def as_float(group: ColumnGroup) -> ColumnGroup:
    """Return the group with frames cast to float32."""
    if not group.history:
        return group
    return replace(group, fields=(replace(group.fields[0], dtype=np.dtype(np.float32)),))


def test_chosen_segments_and_those_outside_of_the_table(library: Any) -> None:
    source = make_source([4, 2], states=2, dtype="float32", actions="float32", extra=("int8", ()))
    table = build_table(source, context_length=3, extra_columns=["extra"])
    engine = Emulated(table, padding="right", span=3, per_step=4)
    good = Segments(
        episodes=np.array([0, 1, 0, 1]), starts=np.array([3, 0, 1, 1]), probability=np.ones(4)
    )
    chosen = {
        "chosen_episodes": good.episodes.ctypes.data,
        "chosen_starts": good.starts.ctypes.data,
    }
    found = engine.run(library, 4, law=CHOSEN, **chosen)
    same(found, CpuGather(table, context_length=3).fill(good))
    assert engine.wrong[0] == 0
    for episode, start in ((2, 0), (-1, 0), (0, 4), (1, -1), (1, 2), (0, 2**62)):
        engine.wrong[0] = 0
        good.episodes[1], good.starts[1] = episode, start
        outputs, _, mask, _ = engine.run(library, 4, law=CHOSEN, **chosen)
        assert engine.wrong[0] == 2 and mask[1].sum() == 0 and mask[0].sum() == 1
        assert not any(output[1].any() for output in outputs), "zeros, not foreign memory"


@given(lengths=LENGTHS, seed=st.integers(0, 2**64 - 1), k=st.integers(1, 4))
@settings(deadline=None, max_examples=30)
@pytest.mark.parametrize("law", ["return_weighted", "top_k"])
def test_weighted_laws_are_their_twins(
    library: Any, law: str, lengths: list[int], seed: int, k: int
) -> None:
    """As `DeviceEngine` tells the kernel: thresholds, searched up to the last that has a mass."""
    source = make_source(lengths, states=1, dtype="int8", actions="uint8", extra=("int8", ()))
    table = build_table(source, context_length=3)
    engine = Emulated(table, padding="left", span=3, per_step=16)
    returns = np.array([(5 * e) % 7 for e in range(len(lengths))], dtype=np.float64)
    selection = make_sampler(
        law,
        Facts(episodes=table.episodes, returns=returns),
        **({"k": k} if law == "top_k" else {"temperature": 0.3}),
    )
    job = drawing(engine, selection, seed)
    segments = selection.sample(seed, 9, 3, 16)
    expected = CpuGather(table, context_length=3, padding="left").fill(segments)
    same(engine.run(library, 48, step=9, **job), expected)
