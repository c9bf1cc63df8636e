"""Clipping and AdamW of the kernel's own text, compiled for the CPU, against PyTorch's."""

from __future__ import annotations

import ctypes
import importlib.util
import math
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gear_offline.errors import GearError
from gear_offline.kernels.adamw import (
    COLUMNS,
    JOB,
    JOBS,
    MOST_PARTIALS,
    PIECE,
    RULE_BYTES,
    STEP_BLOCKS_PER_SM,
    THREADS,
    DeviceAdamW,
    cut,
    describe,
    laid_out_alike,
    locate,
    share_norm,
    step_blocks,
)

ROOT = Path(__file__).resolve().parents[1]
STEPS = 5
# One rounding more or less in each operation, over a few steps.
CLOSE: Any = {"rtol": 2e-6, "atol": 2e-7}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    target = tmp_path_factory.mktemp("adamw") / "adamw.so"
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-Wall", "-Werror"]
    include = f"-I{ROOT / 'kernels' / 'cuda'}"
    source = str(ROOT / "tests" / "adamw_on_cpu.cpp")
    subprocess.run([compiler, *flags, include, source, "-o", str(target)], check=True)
    found = ctypes.CDLL(str(target))
    found.adamw.argtypes = found.adamw_shadowed.argtypes = [ctypes.c_void_p]
    found.narrow.argtypes, found.narrow.restype = [ctypes.c_float], ctypes.c_ushort
    sizes = np.zeros(7, np.int64)
    found.sizes(ctypes.c_void_p(sizes.ctypes.data))
    structures = [JOB.itemsize, JOBS.itemsize, 8 * len(COLUMNS), RULE_BYTES]
    assert sizes.tolist() == [*structures, THREADS, PIECE, MOST_PARTIALS]
    assert JOBS.itemsize <= 4096
    return found


def make(sizes: list[int], seed: int) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(size, generator=generator)) for size in sizes]


def gradients(parameters: list[nn.Parameter], seed: int, scale: float) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + seed)
    return [torch.randn(p.shape, generator=generator) * scale for p in parameters]


def reference(
    parameters: list[nn.Parameter],
    options: dict[str, Any],
    rates: list[float],
    scale: float,
    *,
    rounded: bool = False,
) -> tuple[list[float], torch.optim.AdamW]:
    """Do `STEPS` steps as PyTorch does; return the norms and the optimiser."""
    adamw = torch.optim.AdamW(
        parameters, betas=options["betas"], weight_decay=options["weight_decay"], foreach=False
    )
    norms = []
    limit = options["clip_norm"]
    for step in range(STEPS):
        for parameter, gradient in zip(parameters, gradients(parameters, step, scale), strict=True):
            gradient = gradient.bfloat16().float() if rounded else gradient
            parameter.grad = gradient.to(parameter.device)
        norm = nn.utils.clip_grad_norm_(parameters, math.inf if limit is None else limit)
        norms.append(float(norm))
        adamw.param_groups[0]["lr"] = rates[step]
        adamw.step()
    return norms, adamw


options_of = st.fixed_dictionaries(
    {
        "betas": st.sampled_from([(0.9, 0.999), (0.0, 0.5), (0.95, 0.95)]),
        "weight_decay": st.sampled_from([0.0, 1e-4, 0.5]),
        "clip_norm": st.sampled_from([None, 0.25, 1e6]),
    }
)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 2 * PIECE + 3), min_size=1, max_size=4),
    options=options_of,
    scale=st.sampled_from([1e-6, 1.0, 1e4]),
    shadowed=st.booleans(),
)
def test_law_is_that_of_pytorch(
    library: Any, sizes: list[int], options: dict[str, Any], scale: float, shadowed: bool
) -> None:
    rates = [1e-3, 2e-3, 0.0, 1e-2, 5e-3]
    expected = make(sizes, 0)
    run, rounded = library.adamw, False
    if shadowed:  # gradients are bfloat16; the same ones for both
        run, rounded = library.adamw_shadowed, True
    norms, adamw = reference(expected, options, rates, scale, rounded=rounded)

    shadows = [torch.zeros(size, dtype=torch.bfloat16) for size in sizes]
    mine = [p.detach().numpy().copy() for p in make(sizes, 0)]
    moments = [(np.zeros_like(p), np.zeros_like(p)) for p in mine]
    cuts = torch.from_numpy(cut(sizes))
    pieces = torch.zeros(len(cuts), len(COLUMNS), dtype=torch.int64)
    rate_table = np.array(rates, np.float32)
    index, row = np.zeros(1, np.int64), np.array([1])
    window, steps = np.full((STEPS + 2, 2), -1, np.float32), np.zeros(len(sizes), np.float32)
    rows = STEPS  # of the window: the last step's has no place
    loss = np.zeros(1, np.float32)
    for step in range(STEPS):
        found = gradients(make(sizes, 0), step, scale)
        if shadowed:
            found = [g.bfloat16() for g in found]
        addresses = torch.tensor(
            [
                [g.data_ptr(), 0, *(a.ctypes.data for a in (p, *m)), s.data_ptr()]
                for p, m, g, s in zip(mine, moments, found, shadows, strict=True)
            ]
        )
        locate(addresses, cuts, gradient_bytes=found[0].element_size(), out=pieces)
        loss[0] = step
        job = describe(
            pieces=pieces.data_ptr(),
            piece_count=len(pieces),
            rates=rate_table.ctypes.data,
            index=index.ctypes.data,
            row=row.ctypes.data,
            window=window.ctypes.data,
            window_rows=rows,
            loss=loss.ctypes.data,
            steps=steps.ctypes.data,
            tensor_count=len(sizes),
            **options,
        )
        run(job.ctypes.data)
    for one, other in zip(mine, expected, strict=True):
        np.testing.assert_allclose(one, other.detach().numpy(), **CLOSE)
    for one, shadow in zip(mine, shadows, strict=True):
        wanted = torch.from_numpy(one).bfloat16() if shadowed else torch.zeros_like(shadow)
        assert torch.equal(shadow, wanted)
    for (first, second), parameter in zip(moments, expected, strict=True):
        state = adamw.state[parameter]
        np.testing.assert_allclose(first, state["exp_avg"], rtol=1e-5, atol=1e-7 * scale)
        np.testing.assert_allclose(second, state["exp_avg_sq"], rtol=1e-5, atol=1e-9 * scale**2)
    assert index[0] == STEPS and row[0] == STEPS + 1 and (steps == STEPS).all()
    np.testing.assert_allclose(window[1:rows, 1], norms[:-1], rtol=1e-5)
    assert window[1:rows, 0].tolist() == list(range(STEPS - 1))
    assert (window[[0, rows, rows + 1]] == -1).all()


@settings(max_examples=300, deadline=None)
@given(value=st.floats(width=32), bits=st.none() | st.integers(0, 2**32 - 1))
def test_narrowing_is_that_of_pytorch(library: Any, value: float, bits: int | None) -> None:
    single = np.float32(value) if bits is None else np.uint32(bits).view(np.float32)
    wanted = torch.tensor([single]).bfloat16()
    found = torch.tensor([library.narrow(float(single))], dtype=torch.int32).to(torch.int16)
    torch.testing.assert_close(
        found.view(torch.bfloat16), wanted, rtol=0.0, atol=0.0, equal_nan=True
    )


@given(sizes=st.lists(st.integers(1, 5 * PIECE), max_size=5))
def test_pieces_partition_the_tensors(sizes: list[int]) -> None:
    seen = [np.zeros(size, int) for size in sizes]
    for tensor, begin, count in cut(sizes).tolist():
        assert 0 < count <= PIECE
        seen[tensor][begin : begin + count] += 1
    assert all((part == 1).all() for part in seen)


@given(pieces=st.integers(1, 3_000_000))
def test_sums_of_the_norm_are_few_and_of_all_pieces(pieces: int) -> None:
    group, sums = share_norm(pieces)
    assert 0 < sums <= MOST_PARTIALS and (sums - 1) * group < pieces <= sums * group


@given(pieces=st.integers(1, 100_000), processors=st.integers(1, 200), models=st.integers(1, 16))
def test_blocks_of_a_step_run_at_once(pieces: int, processors: int, models: int) -> None:
    blocks = step_blocks(pieces, processors, models=models)
    most = max(1, STEP_BLOCKS_PER_SM * processors // models)
    assert 0 < blocks <= min(pieces, most)
    assert -(-pieces // blocks) == -(-pieces // most), "no more turns than the most blocks take"


gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="run on a machine with a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="needs CuPy"),
]


def on_gpu(sizes: list[int], rates: list[float], options: dict[str, Any]) -> Any:
    parameters = [nn.Parameter(p.detach().cuda()) for p in make(sizes, 0)]
    return parameters, DeviceAdamW(parameters, torch.tensor(rates, device="cuda"), **options)


@pytest.mark.parametrize("sizes", [[1], [3, 70000, 128, 999], [4_000_001, 5]])
class TestOnGpu:
    pytestmark = gpu

    def test_steps_are_those_of_pytorch(self, sizes: list[int]) -> None:
        options: dict[str, Any] = {
            "betas": (0.9, 0.999),
            "weight_decay": 0.1,
            "clip_norm": 0.25,
        }
        rates = [1e-3, 2e-3, 0.0, 1e-2, 5e-3]
        expected = [nn.Parameter(p.detach().cuda()) for p in make(sizes, 0)]
        norms, adamw = reference(expected, options, rates, 1.0)
        results = []
        for offset in (0, 1):  # of gradients: whole loads, and single ones
            mine, device_adamw = on_gpu(sizes, rates, options)
            index, row = (torch.zeros(1, dtype=torch.int64, device="cuda") for _ in range(2))
            window = torch.zeros(STEPS, 2, device="cuda")
            for step in range(STEPS):
                for p, g in zip(mine, gradients(mine, step, 1.0), strict=True):
                    p.grad = torch.cat([torch.zeros(offset), g]).cuda()[offset:]
                loss = torch.full((), float(step), device="cuda")
                device_adamw.enqueue(loss, index=index, row=row, window=window)
            assert int(index) == int(row) == STEPS
            results.append([p.detach().clone() for p in mine])
            for one, other in zip(mine, expected, strict=True):
                torch.testing.assert_close(one, other, **CLOSE)
            for state, parameter in zip(device_adamw.states(), expected, strict=True):
                for kind, value in state.items():
                    theirs = adamw.state[parameter][kind].to(value.device)
                    torch.testing.assert_close(value, theirs, rtol=1e-5, atol=1e-9)
            np.testing.assert_allclose(window[:, 1].cpu(), norms, rtol=1e-5)
            assert window[:, 0].tolist() == list(range(STEPS))
        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other), "the same bits every time, anywhere"

    def test_rows_that_a_window_does_not_have_are_not_written(self, sizes: list[int]) -> None:
        parameters, device_adamw = on_gpu(
            sizes, [0.1] * STEPS, {"betas": (0.9, 0.9), "weight_decay": 0.0, "clip_norm": None}
        )
        index, row = (torch.zeros(1, dtype=torch.int64, device="cuda") for _ in range(2))
        memory = torch.full((STEPS, 2), -1.0, device="cuda")
        for p in parameters:
            p.grad = torch.ones_like(p)
        for _ in range(STEPS):
            loss = torch.zeros((), device="cuda")
            device_adamw.enqueue(loss, index=index, row=row, window=memory[:2])
        assert int(row) == int(index) == STEPS
        assert (memory[:2] >= 0).all() and (memory[2:] == -1).all()

    def test_missing_gradient_is_refused(self, sizes: list[int]) -> None:
        parameters, device_adamw = on_gpu(
            sizes, [0.1], {"betas": (0.9, 0.9), "weight_decay": 0.0, "clip_norm": None}
        )
        place = torch.zeros(1, dtype=torch.int64, device="cuda")
        with pytest.raises(GearError) as caught:
            device_adamw.enqueue(
                torch.zeros((), device="cuda"), index=place, row=place, window=place
            )
        assert caught.value.code == "GRADIENT_LAYOUT" and parameters[0].grad is None


def test_strides_of_single_elements_mean_nothing() -> None:
    plain = torch.empty(8, 1, 3, 3)
    assert laid_out_alike(plain, plain.contiguous(memory_format=torch.channels_last))
    wide = torch.empty(8, 2, 3, 3)
    assert not laid_out_alike(wide, wide.contiguous(memory_format=torch.channels_last))
    assert laid_out_alike(wide, torch.empty_like(wide))
