"""The CUDA sources compile for every architecture that is supported; no GPU is needed."""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from gear_offline.kernels.cuda_module import FOLDER, OPTIONS

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
