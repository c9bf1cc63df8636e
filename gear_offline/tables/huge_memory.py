"""Memory of one process in large pages, where the system gives them.

The kernel maps memory in pages of 4 KiB, or of 2 MiB where a program asks for it.  A disk that is
told to read into 2 MiB gets one run of memory instead of 512 of them, and copies to and from
places far apart need no walk through the page tables for each.
"""

from __future__ import annotations

import mmap
import sys
from contextlib import suppress

import numpy as np
import numpy.typing as npt

HUGE_BYTES = 2 << 20  # on x86-64, and on ARM with pages of 4 KiB

UInt8Array = npt.NDArray[np.uint8]


def huge_memory(nbytes: int) -> UInt8Array:
    """Return (nbytes,) uint8 zeros of this process alone, from a multiple of `HUGE_BYTES` on.

    Only address space is taken at first.  What is touched takes memory by whole large pages, but
    never more than `nbytes` and a page of 4 KiB in all.  Where there are no large pages, or none
    is free, small ones are used.
    """
    # Private: shared memory gets large pages only where the administrator says so.
    memory = mmap.mmap(-1, nbytes + HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    everything = np.frombuffer(memory, np.uint8)
    begin = -int(everything.__array_interface__["data"][0]) % HUGE_BYTES
    whole = nbytes - nbytes % HUGE_BYTES  # a large page at the end would reach beyond it
    if whole and sys.platform == "linux":
        with suppress(OSError, AttributeError, ValueError):  # a kernel or system without them
            memory.madvise(mmap.MADV_HUGEPAGE, begin, whole)
    return everything[begin : begin + nbytes]
