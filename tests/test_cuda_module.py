"""Machines without CuPy, with the wrong one, or with an old GPU; sources for every architecture."""

import ctypes
import ctypes.util
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

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


COUNTED = """
from contextlib import nullcontext
from types import SimpleNamespace as N
def count():
    {}
RawModule, device = None, nullcontext(N(compute_capability="61"))
cuda = N(Device=lambda number: device, driver=None, runtime=N(getDeviceCount=count))
"""
OLD = "raise RuntimeError('cudaErrorInsufficientDriver: driver is too old')"


@pytest.mark.parametrize(
    ("cupy", "code", "said"),  # what importing CuPy does
    [
        (None, "PACKAGE_MISSING", "gear-offline[gpu]"),
        (
            "raise ImportError('libcublas.so.12\\n  long tail')",
            "PACKAGE_MISSING",
            "libcublas.so.12",
        ),
        (COUNTED.format(OLD), "PACKAGE_MISSING", "InsufficientDriver"),
        (COUNTED.format("return 1"), "DEVICE", "6.1"),
    ],
)
def test_what_is_missing_is_one_clear_error(
    cupy: str | None, code: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    if cupy is None:
        monkeypatch.setitem(sys.modules, "cupy", None)
    else:
        (tmp_path / "cupy.py").write_text(cupy)
        monkeypatch.syspath_prepend(str(tmp_path))
    with one_error(code) as caught:
        cuda_module.load("fill.cu", ("fill_each",), device=0)
    assert said in str(caught.value) and "long tail" not in str(caught.value)
    sys.modules.pop("cupy", None)


ARCHITECTURES = ("sm_80", "sm_100")  # no source asks which one it is: the oldest, the newest


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
