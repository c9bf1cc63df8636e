"""Sources of a run's bits: random numbers of its ranks, kernels with one order.

On a GPU torch picks kernels for speed; some add up in an order that differs from run to run, and
libraries may time several and keep the fastest.  `deterministic` leaves kernels with one order.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gear_offline.distributed.world import World

CUBLAS_WORKSPACE = ":4096:8"  # buffers of cuBLAS that let it keep one order of sums


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Let torch use deterministic kernels only while inside, if `wanted`.

    - ``torch.use_deterministic_algorithms``: an operation without a deterministic kernel raises.
    - cuBLAS with fixed workspaces, cuDNN without timing, no TF32 anywhere.
    - Attention by the flash kernel (whose backward torch then runs in one order) or plain
      matrix products; never by cuDNN or the memory-efficient kernel, which have no such order.
    """
    if not wanted:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACE)
    cudnn = torch.backends.cudnn
    algorithms = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark, one_order, tf32 = cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32
    precision = torch.get_float32_matmul_precision()
    try:
        torch.use_deterministic_algorithms(True)
        cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32 = False, True, False
        torch.set_float32_matmul_precision("highest")
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            yield
    finally:
        torch.use_deterministic_algorithms(algorithms, warn_only=warn_only)
        cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32 = benchmark, one_order, tf32
        torch.set_float32_matmul_precision(precision)


@contextmanager
def own_random(device: torch.device) -> Iterator[None]:
    """Put the random numbers of torch, NumPy and Python back at the end."""
    numpy_state, python_state = np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        np.random.set_state(numpy_state)
        random.setstate(python_state)


def seed_host(*words: int) -> None:
    """Seed the random numbers of NumPy and Python by integers below ``2**64``."""
    halves = [half for word in words for half in (word & 0xFFFFFFFF, word >> 32)]
    np.random.seed(halves)
    random.seed(repr(halves))


def seed_all(seed: int) -> None:
    """Seed the random numbers of torch, NumPy and Python."""
    torch.manual_seed(seed)
    seed_host(seed)


def host_random(device: torch.device) -> dict[str, Any]:
    """Return the states of the random numbers that no CUDA graph of the device draws."""
    numbers: Any = np.random.get_state()
    states: dict[str, Any] = {"Python's random": random.getstate()}
    states["numpy.random"] = (numbers[1].tobytes(), numbers[2])
    if device.type == "cuda":
        states["torch's generator of the CPU"] = bytes(torch.get_rng_state().numpy())
    return states


def random_states(world: World, device: torch.device) -> dict[str, Tensor]:
    """Return the states of torch's random numbers of all ranks, by name."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return {
        _name(kind, rank): tensor
        for kind, state in states.items()
        for rank, tensor in enumerate(world.gather_tensor(state))
    }


def restore_random(tensors: Mapping[str, Tensor], world: World, device: torch.device) -> None:
    """Take over this rank's states, as far as they were saved."""
    cpu: Any = tensors.get(_name("cpu", world.rank))
    if cpu is not None:
        torch.set_rng_state(cpu)
    cuda = tensors.get(_name("cuda", world.rank))
    if device.type == "cuda" and cuda is not None:
        torch.cuda.set_rng_state(cuda, device)


def _name(kind: str, rank: int) -> str:
    return f"random/{kind}" if rank == 0 else f"random/{kind}/{rank}"
