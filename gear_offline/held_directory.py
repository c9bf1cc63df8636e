"""A directory that one process at a time writes to."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from gear_offline.closing import Closing
from gear_offline.errors import InputError

LOCK = ".lock"


class HeldDirectory(Closing):
    """A directory held for writing; a context manager.

    The lock is the kernel's (``flock``): it ends with the process, however that ends.

    Parameters
    ----------
    path
        Created when missing.
    unusable
        Code of the error of a directory that cannot be made.
    taken
        The error when another process holds it.

    Raises
    ------
    InputError
        Those two.
    """

    def __init__(self, path: Path, *, unusable: str, taken: InputError) -> None:
        self.path = path
        self._lock = -1
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise InputError(
                unusable,
                f"cannot make the directory: {error.strerror}",
                where=str(path),
                remedy="give another place with --out, or check that you may write there",
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise taken from None

    def close(self) -> None:
        """Let others write."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
