"""Calls that Linux has and other systems lack, macOS for one, and what does instead."""

from __future__ import annotations

import os
import sys


def usable_cores() -> int:
    """Return the processor cores that this process may use; where nobody tells, all there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def drop_pages(handle: int, offset: int = 0, nbytes: int = 0) -> None:
    """Tell the system that bytes of a file will not be read again soon; 0 bytes: up to its end.

    What of them is to be written Linux begins to write.  Nothing happens elsewhere.
    """
    if sys.platform == "linux" and hasattr(os, "posix_fadvise"):
        os.posix_fadvise(handle, offset, nbytes, os.POSIX_FADV_DONTNEED)


def expect_random_reads(handle: int) -> None:
    """Tell the system that nothing beside what is asked for will be needed of a file."""
    if sys.platform == "linux" and hasattr(os, "posix_fadvise"):
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_RANDOM)


def sync_data(handle: int) -> None:
    """Make the bytes of a file durable."""
    if hasattr(os, "fdatasync"):
        os.fdatasync(handle)
    else:
        os.fsync(handle)
