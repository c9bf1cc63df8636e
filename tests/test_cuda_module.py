"""Machines without CuPy, with the wrong one, or with an old GPU; sources for every architecture."""

import ctypes
import ctypes.util
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gear_offline.kernels import cuda_module
from gear_offline.kernels.cuda_module import FOLDER, OPTIONS
from tests.support import one_error


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    caches = (cuda_module._kernel, cuda_module._module, cuda_module.import_cupy)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def no_cupy(problem: ImportError) -> dict[str, Any]:
    """Importing CuPy fails so."""

    def find(name: str, *_: object) -> None:
        if name == "cupy":
            raise problem

    return {"meta_path": [SimpleNamespace(find_spec=find), *sys.meta_path]}


def cupy(count: Any, capability: str = "") -> dict[str, Any]:
    """A CuPy that counts devices so, of that capability."""

    device = nullcontext(SimpleNamespace(compute_capability=capability))
    runtime = SimpleNamespace(getDeviceCount=count)
    cuda = SimpleNamespace(Device=lambda number: device, runtime=runtime, driver=None)
    return {"cupy": SimpleNamespace(cuda=cuda, RawModule=None)}


def old_driver() -> int:
    raise RuntimeError("cudaErrorInsufficientDriver: driver is too old")


MISSING = ModuleNotFoundError("No module named 'cupy'", name="cupy")
BROKEN = ImportError("libcublas.so.12: cannot open it\n  and a long tail")


@pytest.mark.parametrize(
    ("machine", "code", "said"),
    [
        (no_cupy(MISSING), "PACKAGE_MISSING", "gear-offline[gpu]"),
        (no_cupy(BROKEN), "PACKAGE_MISSING", "libcublas.so.12"),
        (cupy(old_driver), "PACKAGE_MISSING", "InsufficientDriver"),
        (cupy(lambda: 1, "61"), "DEVICE", "6.1"),
    ],
)
def test_what_is_missing_is_one_clear_error(
    machine: dict[str, Any], code: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    if "cupy" in machine:
        monkeypatch.setitem(sys.modules, "cupy", machine["cupy"])
    else:
        monkeypatch.setattr(sys, "meta_path", machine["meta_path"])
    with one_error(code) as caught:
        cuda_module.load("fill.cu", ("fill_each",), device=0)
    assert said in str(caught.value) and "long tail" not in str(caught.value)


class Driver:
    """Remembers the context of every launch."""

    def __init__(self, current: int) -> None:
        self.current, self.launched = current, list[int]()
        self.fails = False

    def ctxGetCurrent(self) -> int:
        return self.current

    def ctxSetCurrent(self, context: int) -> None:
        self.current = context

    def launchKernel(self, *arguments: int) -> None:
        self.launched.append(self.current)
        if self.fails:
            raise RuntimeError("CUDA_ERROR_INVALID_VALUE")


@pytest.mark.parametrize(("before", "after"), [(7, 7), (0, 7), (8, 8)])
@pytest.mark.parametrize("fails", [False, True])
def test_launches_are_in_the_context_of_the_kernel(
    before: int, after: int, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a thread that has none yet, and in one that works on another GPU."""
    kernel, driver = SimpleNamespace(kernel=SimpleNamespace(ptr=1)), Driver(before)
    driver.fails = fails
    stream = SimpleNamespace(cuda_stream=5)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    with pytest.raises(RuntimeError) if fails else nullcontext():
        cuda_module.Kernel(kernel, driver, 7, 0).launch(1, 32, np.zeros(1))
    assert driver.launched == [7] and driver.current == after


ARCHITECTURES = ("sm_80", "sm_90", "sm_100")


def nvrtc() -> Any:
    """Return the runtime compiler: of a pip package, or the system's."""
    found: list[str] = []
    for package in ("nvidia.cu13", "nvidia.cuda_nvrtc"):
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            continue
        for folder in spec.submodule_search_locations or [] if spec else []:
            found += map(str, sorted(Path(folder).glob("lib*/libnvrtc.so.*")))
    found += filter(None, [ctypes.util.find_library("nvrtc")])
    for name in found:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    pytest.skip("needs NVRTC: pip install nvidia-cuda-nvrtc")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("source", sorted(FOLDER.glob("*.cu")), ids=lambda p: str(p.name))
def test_source_compiles(source: Path, architecture: str) -> None:
    library, program = nvrtc(), ctypes.c_void_p()
    text = source.read_bytes()
    assert library.nvrtcCreateProgram(ctypes.byref(program), text, b"source.cu", 0, None, None) == 0
    options = [f"--gpu-architecture={architecture}", *OPTIONS]
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    if (major.value, minor.value) >= (12, 8):  # whether it compiles is asked, not how well
        options.append("--Ofast-compile=max")
    words = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    result = library.nvrtcCompileProgram(program, len(options), words)
    size = ctypes.c_size_t()
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    assert result == 0, log.value.decode()
