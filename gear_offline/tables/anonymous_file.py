"""Files without a name in any folder, whose size is sealed: memory that processes share."""

from __future__ import annotations

import errno
import fcntl
import os
import sys


def anonymous_file(name: str, nbytes: int) -> int:
    """Return the descriptor of a file of zeros without a name in any folder, sealed."""
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(descriptor, 0o600)
        os.ftruncate(descriptor, nbytes)
        # Nobody can make it shorter: reading it never ends in SIGBUS.
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def is_sealed(descriptor: int) -> bool:
    """Whether a descriptor is of such a file."""
    if sys.platform != "linux":
        return False
    wanted = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    try:
        return fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & wanted == wanted
    except OSError:
        return False


def shares_memory() -> bool:
    """Whether this system has blocks that processes share: Linux does.

    Elsewhere each process has tables of its own.
    """
    return hasattr(os, "memfd_create")
