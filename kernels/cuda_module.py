"""The CUDA sources of this folder, compiled once a process through CuPy, and launched."""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gear_offline.core.text import first_line
from gear_offline.errors import UnavailableError

T = TypeVar("T")
FOLDER = Path(__file__).resolve().parent / "cuda"
OPTIONS = ("--std=c++17", "--fmad=false", f"-I{FOLDER}")  # fmad: casts round as NumPy's
# Threads beside the one that trains hold it while they use a stream of torch's, of which there are
# 32 for all: on one that a capture has joined, nobody else may launch, copy or wait.
capture_lock = threading.RLock()
LEAST_CAPABILITY = 70  # __grid_constant__ and the memory model that the kernels rely on


def numbered_device(device: torch.device) -> torch.device:
    """Return a device; of ``"cuda"`` torch's current GPU with its number."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


class Kernel:
    """A kernel that takes one structure by value.

    Launching goes to the driver: about a microsecond of host time, where CuPy's own call takes six.
    """

    def __init__(self, function: Any, driver: Any, context: int, device: int) -> None:
        self._function = function  # keeps the module loaded
        self._handle = int(function.kernel.ptr)
        self._driver, self._context, self._device = driver, context, device

    def launch(self, blocks: int, threads: int, structure: npt.NDArray[Any]) -> None:
        """Launch on torch's current stream; the structure is copied at once.

        The driver launches in the calling thread's context.  A thread that has not used CUDA yet
        has none, and one that works on another GPU has that one's: it gets the kernel's meanwhile.
        """
        driver, stream = self._driver, torch.cuda.current_stream(self._device).cuda_stream
        parameters = (ctypes.c_void_p * 1)(structure.ctypes.data)
        before = driver.ctxGetCurrent()
        if before != self._context:
            driver.ctxSetCurrent(self._context)
        try:
            address = ctypes.addressof(parameters)
            driver.launchKernel(self._handle, blocks, 1, 1, threads, 1, 1, 0, stream, address, 0)
        finally:
            if before and before != self._context:
                driver.ctxSetCurrent(before)


@contextmanager
def capturing(graph: Any, stream: Any) -> Iterator[None]:
    """Capture launches as a CUDA graph, with `capture_lock`; raise the first error.

    Ending a capture fails as well then, and would hide it.  Other threads may ask for events
    meanwhile: NCCL's watchdog does all the time.
    """
    first: Exception | None = None
    try:
        with (
            capture_lock,
            torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
        ):
            try:
                yield
            except Exception as error:
                first = error
                raise
    except Exception:
        if first is None:
            raise
    if first is not None:
        raise first


class CapturedCall(Generic[T]):
    """The launches of a function as a CUDA graph, on a stream that others may have too.

    Another thread may capture meanwhile, so each use of the stream holds `capture_lock`.  Products
    are TF32's.  The function may draw from `generators` of its own.
    """

    def __init__(
        self,
        run: Callable[[], T],
        device: torch.device,
        generators: Sequence[torch.Generator] = (),
    ) -> None:
        self._graph: Any = torch.cuda.CUDAGraph()
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        try:
            with capture_lock:
                self._stream.wait_stream(torch.cuda.current_stream(device))
                with torch.cuda.stream(self._stream):
                    for _ in range(2):  # libraries choose their algorithms and allocate
                        run()
                    for generator in generators:
                        self._graph.register_generator_state(generator)
                    with capturing(self._graph, self._stream):
                        self.result = run()  # where each replay puts it
        finally:
            torch.set_float32_matmul_precision(precision)

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Work on the graph's stream."""
        with capture_lock, torch.cuda.stream(self._stream):
            yield

    def replay(self) -> None:
        """Launch the graph; within `stream`."""
        self._graph.replay()


def load(source: str, names: Sequence[str], *, device: int) -> dict[str, Kernel]:
    """Compile ``cuda/SOURCE`` for a device and return these of its kernels by name.

    Load them before a graph is captured: meanwhile no module can be loaded.
    """
    return {name: _kernel(source, name, device) for name in names}


@cache
def _kernel(source: str, name: str, device: int) -> Kernel:
    cupy = import_cupy()
    module, driver = _module(source, device), cupy.cuda.driver
    with cupy.cuda.Device(device):
        cupy.cuda.runtime.free(0)  # does nothing, but gives this thread the device's context
        return Kernel(module.get_function(name), driver, driver.ctxGetCurrent(), device)


@cache
def _module(source: str, device: int) -> Any:
    cupy = import_cupy()
    with cupy.cuda.Device(device) as gpu:
        capability = int(gpu.compute_capability)
        if capability < LEAST_CAPABILITY:
            problem = f"the GPU has compute capability {capability / 10}, the kernels need "
            problem += f"{LEAST_CAPABILITY / 10}"
            raise UnavailableError("DEVICE", problem, remedy="use engine='off'")
        module = cupy.RawModule(
            code=(FOLDER / source).read_text(), options=OPTIONS, backend="nvrtc"
        )
        try:
            module.compile()
        except Exception as error:
            raise _cupy_error(f"compiling {source} failed: {first_line(error)}") from error
        return module


@cache
def import_cupy() -> Any:
    """Import CuPy, with one clear error where that is not possible."""
    try:
        import cupy

        cupy.cuda.runtime.getDeviceCount()
    except Exception as error:
        raise _cupy_error(f"CuPy cannot be used: {first_line(error)}") from error
    return cupy


def _cupy_error(problem: str) -> UnavailableError:
    remedy = "install the CuPy for your CUDA: gear-offline[gpu] for CUDA 13, [gpu-cuda12] for "
    remedy += "CUDA 12; or use engine='off'"
    return UnavailableError("PACKAGE_MISSING", problem, remedy=remedy)


_NUMBERS = {"i64": np.int64, "u64": np.uint64, "double": np.float64, "float": np.float32}


@cache
def structure(name: str) -> np.dtype[Any]:
    """Return the dtype of a structure that a source declares: of numbers, pointers, structures."""
    files = sorted(FOLDER.glob("*.cu*"))
    text = re.sub("//.*", "", "".join(file.read_text() for file in files))
    (body,) = re.findall(rf"struct (?:alignas\(16\) )?{name} {{(.*?)\n}};", text, re.DOTALL)
    fields = list[Any]()
    for type_name, members, most in re.findall(r"(\w+\*?) ([\w, ]+)(?:\[(\w+)\])?;", body):
        dtype = np.uint64 if "*" in type_name else _NUMBERS.get(type_name) or structure(type_name)
        shape = re.findall(rf"\b{most} = (\d+)", text)[:1] if most else ()
        fields += [(member, dtype, tuple(map(int, shape))) for member in members.split(", ")]
    return np.dtype(fields, align=True)


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
