"""Memory in large pages: where it lies, how much of it there is, and without large pages."""

from __future__ import annotations

import mmap
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gear_offline.tables.huge_memory import HUGE_BYTES, huge_memory


@given(nbytes=st.one_of(st.integers(0, 10_000), st.integers(HUGE_BYTES - 2, 3 * HUGE_BYTES)))
def test_zeros_from_a_large_page_on(nbytes: int) -> None:
    memory = huge_memory(nbytes)
    assert memory.size == nbytes and not memory.any()
    assert int(memory.__array_interface__["data"][0]) % HUGE_BYTES == 0
    memory[:] = 255
    assert memory.sum() == 255 * nbytes


def test_advice_covers_whole_large_pages_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more at the end would take memory beyond what was asked for."""
    advised = list[int]()

    class Map(mmap.mmap):
        def madvise(self, advice: int, start: int = 0, length: int = 0) -> None:
            assert advice == mmap.MADV_HUGEPAGE
            advised.append(length)

    monkeypatch.setattr(mmap, "mmap", Map)
    for nbytes in (0, 100, HUGE_BYTES - 1, HUGE_BYTES, 3 * HUGE_BYTES + 5):
        huge_memory(nbytes)
    assert advised == [HUGE_BYTES, 3 * HUGE_BYTES]


def test_a_kernel_without_large_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    class Map(mmap.mmap):
        def madvise(self, *_: Any) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Map)
    assert huge_memory(5 * HUGE_BYTES).sum() == 0
