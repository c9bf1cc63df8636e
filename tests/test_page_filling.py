"""Pages of shared memory that are made of bytes: every byte, nothing else, from many threads."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gear_offline.errors import GearError
from gear_offline.tables import page_filling as module
from gear_offline.tables.host_memory import PAGE_BYTES, HostBlock, block_of
from gear_offline.tables.page_filling import PageFiller, fill_pages
from tests.support import userfaultfd_is_allowed

U8 = np.dtype(np.uint8)
PAGES = 12


needs_call = pytest.mark.skipif(
    not userfaultfd_is_allowed(), reason="userfaultfd is not allowed here"
)


@pytest.fixture
def rows() -> Iterator[Any]:
    block = HostBlock.create((PAGES + 2) * PAGE_BYTES)
    block.allocate((1,), U8)  # they begin in the middle of the block
    yield block.allocate((PAGES * PAGE_BYTES - 100,), U8)
    block.close()


@needs_call
@given(data=st.data())
def test_parts_in_any_order_give_the_bytes(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, PAGES * PAGE_BYTES), label="size")
    near = st.sampled_from([0, 1, PAGE_BYTES - 1, PAGE_BYTES, 3 * PAGE_BYTES, size // 2])
    cuts = data.draw(st.lists(st.integers(0, size) | near, max_size=6), label="cuts")
    bounds = sorted({0, size, *(min(cut, size) for cut in cuts)})
    parts = data.draw(st.permutations(list(pairwise(bounds))), label="parts")
    left_out = data.draw(st.integers(0, len(parts) - 1), label="left out")
    there = data.draw(st.lists(st.integers(0, (size - 1) // PAGE_BYTES), max_size=3), label="there")
    values = np.random.default_rng(size).integers(1, 255, size, np.uint8)
    block = HostBlock.create((PAGES + 1) * PAGE_BYTES)
    rows = block.allocate((size,), U8)
    for page in there:  # pages that are there before, with other bytes
        rows[page * PAGE_BYTES] = 255
    with fill_pages([rows]) as filler:
        assert filler is not None
        for begin, end in parts[left_out:]:
            filler.fill(rows[begin:end], values[begin:end])
    expected = np.zeros(size, np.uint8)
    expected[[page * PAGE_BYTES for page in there]] = 255
    for begin, end in parts[left_out:]:
        expected[begin:end] = values[begin:end]
    assert (rows == expected).all()
    rows[:] = 1  # memory as any other


@needs_call
def test_many_threads_and_another_mapping(rows: Any) -> None:
    """Parts meet inside pages; another process, here a second mapping, sees the same bytes."""
    values = np.random.default_rng(0).integers(0, 255, len(rows), np.uint8)
    bounds = np.linspace(0, len(rows), 41).astype(int).tolist()
    with fill_pages([rows]) as filler, ThreadPoolExecutor(8) as pool:
        assert filler is not None
        parts = [slice(*pair) for pair in pairwise(bounds)]
        list(pool.map(lambda part: filler.fill(rows[part], values[part]), parts))
    assert (rows == values).all()
    block = block_of(rows)
    assert block is not None
    other = HostBlock.from_descriptor(os.dup(block.fileno()))
    assert (other.allocate((1,), U8) == 0).all()
    assert (other.allocate((len(rows),), U8) == values).all()


@needs_call
def test_all_arrays_of_a_block_are_filled(rows: Any) -> None:
    block = block_of(rows)
    assert block is not None
    more = block.allocate((3, 16), np.dtype(np.float32))
    with fill_pages([rows, more]) as filler:
        assert filler is not None
        filler.fill(more, np.full((3, 16), 2.5, np.float32))
        filler.fill(rows[:0], rows[:0])
    assert (more == 2.5).all() and not rows.any()


@pytest.mark.parametrize("how", ["machine", "refused", "memory"])
def test_where_the_system_refuses_there_is_no_filler(
    rows: Any, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "machine":
        monkeypatch.setattr(module, "SYSTEM_CALL", {})
    elif how == "refused":
        monkeypatch.setattr(module, "SYSTEM_CALL", dict.fromkeys(module.SYSTEM_CALL, 99_999))
    else:
        monkeypatch.setattr(module, "CAN_COPY", 1 << 40)
    before = len(os.listdir("/proc/self/fd"))
    with fill_pages([rows]) as filler:
        assert filler is None
    assert len(os.listdir("/proc/self/fd")) == before
    rows[:] = 1


def test_memory_that_is_in_no_block_or_in_two_has_no_filler(rows: Any) -> None:
    other = HostBlock.create(PAGE_BYTES)
    for arrays in ([np.zeros(5000)], [rows, np.zeros(5000)], [rows, other.allocate((9,), U8)], []):
        with fill_pages(arrays) as filler:
            assert filler is None


class Kernel:
    """Answers copies with errors first, each after some bytes."""

    def __init__(self, *errors: tuple[int, int]) -> None:
        self.errors = list(errors)
        self.real = PageFiller._ask

    def ask(self, filler: PageFiller, request: int, argument: Any) -> None:
        if request != module.COPY or not self.errors:
            return self.real(filler, request, argument)
        error, pages = self.errors.pop(0)
        if pages:
            argument.length = pages * PAGE_BYTES
            self.real(filler, request, argument)
        argument.copied = pages * PAGE_BYTES or -error
        raise OSError(error, os.strerror(error))


@needs_call
def test_a_copy_that_is_interrupted_goes_on(rows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel((errno.EAGAIN, 0), (errno.EAGAIN, 3), (errno.EAGAIN, 1), (errno.EEXIST, 0))
    monkeypatch.setattr(
        PageFiller, "_ask", lambda filler, request, argument: kernel.ask(filler, request, argument)
    )
    values = np.random.default_rng(1).integers(1, 255, len(rows), np.uint8)
    with fill_pages([rows]) as filler:
        assert filler is not None
        filler.fill(rows, values)
    assert (rows == values).all() and not kernel.errors


@needs_call
@pytest.mark.parametrize("error", [errno.ENOMEM, errno.ENOSPC])
def test_no_memory_is_one_error(rows: Any, error: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel((error, 2))
    monkeypatch.setattr(
        PageFiller, "_ask", lambda filler, request, argument: kernel.ask(filler, request, argument)
    )
    values = np.ones(len(rows), np.uint8)
    with pytest.raises(GearError) as caught, fill_pages([rows]) as filler:
        assert filler is not None
        filler.fill(rows, values)
    assert caught.value.code == "HOST_MEMORY"
    rows[:] = 1  # closed by the error


def test_structures_are_those_of_the_kernel() -> None:
    """Sizes and offsets of ``linux/userfaultfd.h``."""
    assert [ctypes.sizeof(kind) for kind in (module._Greeting, module._Register, module._Copy)] == [
        24,
        32,
        40,
    ]
    assert module.GREET == 0xC018AA3F
    assert module.REGISTER == 0xC020AA00
    assert module.COPY == 0xC028AA03
