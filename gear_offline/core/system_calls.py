"""What the system tells and takes, where Linux and others, macOS for one, have other calls."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path


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


def peak_bytes() -> int:
    """Return the most memory that this process has had, 0 where nobody tells."""
    status = Path("/proc/self/status")
    if not status.exists():  # macOS, which counts bytes
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Not getrusage: its maximum survives exec, so it would be the parent's.
    lines = status.read_text().splitlines()
    found = (int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    return next(found, 0)


def most_open(most: int) -> int:
    """Return how many files to keep open: `most`, or a quarter of what the process may have."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if limit < 0 else max(1, min(most, limit // 4))
