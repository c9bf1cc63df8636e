"""Machines without CuPy, with the wrong one, or with an old GPU: one clear error each."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from gear_offline.errors import UnavailableError
from gear_offline.kernels import cuda_module


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    caches = (cuda_module._function, cuda_module._module, cuda_module.import_cupy)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def failing() -> UnavailableError:
    with pytest.raises(UnavailableError) as caught:
        cuda_module.load("fill.cu", ("fill_8",), device=0)
    return caught.value


def fake_cupy(monkeypatch: pytest.MonkeyPatch, *, capability: str, module: Any) -> None:
    class Device:
        compute_capability = capability

        def __init__(self, number: int) -> None:
            assert number == 0

        def __enter__(self) -> Device:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    cupy = ModuleType("cupy")
    cupy.cuda = SimpleNamespace(  # type: ignore[attr-defined]
        Device=Device, runtime=SimpleNamespace(getDeviceCount=lambda: 1), driver=None
    )
    cupy.RawModule = module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", cupy)


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        (ModuleNotFoundError("No module named 'cupy'", name="cupy"), "gear-offline[gpu]"),
        (ImportError("libcublas.so.12: cannot open it\n  and a long tail"), "libcublas.so.12"),
    ],
)
def test_no_cupy_or_one_without_its_libraries(
    monkeypatch: pytest.MonkeyPatch, problem: ImportError, said: str
) -> None:
    def find(name: str, *_: object) -> None:
        if name == "cupy":
            raise problem

    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.setattr(sys, "meta_path", [SimpleNamespace(find_spec=find), *sys.meta_path])
    error = failing()
    assert error.code == "PACKAGE_MISSING"
    assert said in str(error) and "long tail" not in str(error)


def test_cupy_of_another_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    def count() -> int:
        raise RuntimeError("cudaErrorInsufficientDriver: driver is too old")

    runtime = SimpleNamespace(getDeviceCount=count)
    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    error = failing()
    assert error.code == "PACKAGE_MISSING" and "InsufficientDriver" in str(error)


def test_gpu_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cupy(monkeypatch, capability="61", module=None)
    error = failing()
    assert error.code == "DEVICE" and "6.1" in str(error)


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
