"""CUDA streams on disjoint shares of a GPU's multiprocessors, through the driver's green contexts.

A peer of `gear_offline.bench.sweep`.  ``torch.cuda.GreenContext`` asks for a number of
multiprocessors and does not say which, so that two of them may get the same ones.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from gear_offline.errors import UnavailableError

RESOURCE_BYTES = 144  # of CUdevResource: type, 92 bytes, 48 bytes of union
COUNT_AT = 96  # of CUdevSmResource.smCount
SM_RESOURCE = 1
DEFAULT_STREAM, NON_BLOCKING = 1, 1


def green_streams(count: int, multiprocessors: int) -> tuple[list[Any], int]:
    """Return `count` streams, each with its own share, and the multiprocessors of a share.

    Raises
    ------
    UnavailableError
        ``GREEN_CONTEXT`` if the driver does not do it.
    """
    torch.cuda.init()  # type: ignore[no-untyped-call]
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        device = ctypes.c_int()
        _check(driver.cuDeviceGet(ctypes.byref(device), torch.cuda.current_device()), "device")
        whole = ctypes.create_string_buffer(RESOURCE_BYTES)
        _check(driver.cuDeviceGetDevResource(device, whole, SM_RESOURCE), "resource")
        parts = ctypes.create_string_buffer(RESOURCE_BYTES * count)
        groups = ctypes.c_uint(count)
        _check(
            driver.cuDevSmResourceSplitByCount(
                parts, ctypes.byref(groups), whole, None, 0, multiprocessors
            ),
            "split",
        )
    except (OSError, AttributeError) as error:
        raise _unavailable(str(error)) from error
    if groups.value < count:
        raise _unavailable(
            f"{groups.value} shares of {multiprocessors} multiprocessors, not {count}"
        )
    streams = []
    for number in range(count):
        place = ctypes.addressof(parts) + number * RESOURCE_BYTES
        share = ctypes.c_uint.from_address(place + COUNT_AT).value
        if ctypes.c_int.from_address(place).value != SM_RESOURCE or share < multiprocessors:
            raise _unavailable("the driver describes resources otherwise")
        description, context, stream = (ctypes.c_void_p() for _ in range(3))
        _check(
            driver.cuDevResourceGenerateDesc(ctypes.byref(description), ctypes.c_void_p(place), 1),
            "description",
        )
        _check(
            driver.cuGreenCtxCreate(ctypes.byref(context), description, device, DEFAULT_STREAM),
            "context",
        )
        _check(
            driver.cuGreenCtxStreamCreate(ctypes.byref(stream), context, NON_BLOCKING, 0), "stream"
        )
        untyped: Any = torch.cuda
        streams.append(untyped.ExternalStream(stream.value))
    return streams, share


def _check(result: int, what: str) -> None:
    if result != 0:
        raise _unavailable(f"{what}: CUDA error {result}")


def _unavailable(what: str) -> UnavailableError:
    return UnavailableError(
        "GREEN_CONTEXT",
        f"no green contexts: {what}",
        remedy="they need an NVIDIA driver of CUDA 12.4 or newer",
    )
