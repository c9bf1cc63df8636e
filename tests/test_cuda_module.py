"""Machines without CuPy, with the wrong one, or with an old GPU: one clear error each."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from gear_offline.kernels import cuda_module
from tests.support import one_error


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    caches = (cuda_module._function, cuda_module._module, cuda_module.import_cupy)
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
        cuda_module.load("fill.cu", ("fill_8",), device=0)
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
def test_launches_are_in_the_context_of_the_kernel(before: int, after: int, fails: bool) -> None:
    """Also in a thread that has none yet, and in one that works on another GPU."""
    kernel, driver = SimpleNamespace(kernel=SimpleNamespace(ptr=1)), Driver(before)
    driver.fails = fails
    function = cuda_module.Function(kernel, driver, 7)
    with pytest.raises(RuntimeError) if fails else nullcontext():
        function.launch(1, 32, 0, cuda_module.Parameters(0))
    assert driver.launched == [7] and driver.current == after
