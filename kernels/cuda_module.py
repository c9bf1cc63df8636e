"""The CUDA sources of this folder, compiled once a process through CuPy, and launched."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gear_offline.core.text import first_line
from gear_offline.errors import UnavailableError

FOLDER = Path(__file__).resolve().parent / "cuda"
OPTIONS = ("--std=c++17", "--fmad=false", f"-I{FOLDER}")  # fmad: casts round as NumPy's
LEAST_CAPABILITY = 70  # __grid_constant__ and the memory model that the kernels rely on


class Function:
    """A kernel that takes one structure by value.

    Launching goes to the driver with memory prepared here: about a microsecond of host time,
    where CuPy's own call takes six.
    """

    def __init__(self, kernel: Any, driver: Any, context: int) -> None:
        self._kernel = kernel  # keeps the module loaded
        self._handle = int(kernel.kernel.ptr)
        self._driver, self._context = driver, context

    def launch(self, blocks: int, threads: int, stream: int, parameters: Parameters) -> None:
        """Launch on the CUDA stream `stream`; the parameters are copied at once.

        The driver launches in the calling thread's context.  A thread that has not used CUDA yet
        has none, and one that works on another GPU has that one's: it gets the kernel's meanwhile.
        """
        driver = self._driver
        before = driver.ctxGetCurrent()
        if before != self._context:
            driver.ctxSetCurrent(self._context)
        try:
            driver.launchKernel(
                self._handle, blocks, 1, 1, threads, 1, 1, 0, stream, parameters.pointer, 0
            )
        finally:
            if before and before != self._context:
                driver.ctxSetCurrent(before)


class Parameters:
    """The parameter list of a kernel with one structure: an array of one pointer to it."""

    def __init__(self, structure_address: int) -> None:
        self._list = (ctypes.c_void_p * 1)(structure_address)
        self.pointer = ctypes.addressof(self._list)


def load(source: str, names: tuple[str, ...], *, device: int) -> dict[str, Function]:
    """Compile ``cuda/SOURCE`` for a device and return its kernels by name."""
    return {name: _function(source, name, device) for name in names}


@cache
def _function(source: str, name: str, device: int) -> Function:
    cupy = import_cupy()
    module = _module(source, device)
    driver = cupy.cuda.driver
    with cupy.cuda.Device(device):
        cupy.cuda.runtime.free(0)  # does nothing, but gives this thread the device's context
        return Function(module.get_function(name), driver, driver.ctxGetCurrent())


@cache
def _module(source: str, device: int) -> Any:
    cupy = import_cupy()
    with cupy.cuda.Device(device) as chosen:
        capability = int(chosen.compute_capability)
        if capability < LEAST_CAPABILITY:
            raise UnavailableError(
                "DEVICE",
                f"the GPU has compute capability {capability / 10}, the kernels need "
                f"{LEAST_CAPABILITY / 10}",
                remedy="use engine='off'",
            )
        module = cupy.RawModule(
            code=(FOLDER / source).read_text(), options=OPTIONS, backend="nvrtc"
        )
        try:
            module.compile()
        except Exception as error:
            raise _broken(f"compiling {source} failed: {first_line(error)}") from error
        return module


@cache
def import_cupy() -> Any:
    """Import CuPy, with one clear error where that is not possible."""
    try:
        import cupy

        cupy.cuda.runtime.getDeviceCount()
    except Exception as error:
        raise _broken(f"CuPy cannot be used: {first_line(error)}") from error
    return cupy


def _broken(what: str) -> UnavailableError:
    return UnavailableError(
        "PACKAGE_MISSING",
        what,
        remedy="install the CuPy for your CUDA: gear-offline[gpu] for CUDA 13, [gpu-cuda12] for "
        "CUDA 12; or use engine='off'",
    )


class DeviceArrays:
    """Copies of arrays on a device, for as long as this lives."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._tensors: list[Tensor] = []

    def keep(self, values: npt.NDArray[Any]) -> int:
        """Return the address of a copy."""
        copied = np.array(values)
        # torch has few operations on uint64; nothing here computes with it
        signed = copied.view(np.int64) if copied.dtype == np.uint64 else copied
        self._tensors.append(torch.from_numpy(signed).to(self.device))
        return int(self._tensors[-1].data_ptr())
