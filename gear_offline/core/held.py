"""A directory that one process at a time writes to."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from gear_offline.core.closing import Closing
from gear_offline.core.files import check_folder
from gear_offline.errors import InputError

LOCK = ".lock"


class HeldDirectory(Closing):
    """A directory that one process at a time writes to, made when missing; else the error `taken`.

    The lock is the kernel's (``flock``): it ends with the process, however that ends.  Where
    nothing has been added to the directory by its end, the lock's file goes, and the directories
    that were made for it.
    """

    def __init__(self, path: Path, *, taken: InputError) -> None:
        self.path = path
        self._lock, self._home = -1, path.absolute()
        try:
            str(path).encode()
        except UnicodeEncodeError:  # TensorBoard and safetensors fail on it, late
            raise unusable(path, "the name holds bytes that are not UTF-8") from None
        check_folder(path, output=path)
        self._made = [p for p in (self._home, *self._home.parents) if not os.path.lexists(p)]
        try:
            self._home.mkdir(parents=True, exist_ok=True)
            self._before = self._content()
            self._is_new = not os.path.lexists(self._home / LOCK)
            self._lock = self._take()
        except OSError as error:
            self._remove_made()
            raise unusable(path, f"cannot make the directory: {error.strerror}") from error
        if self._lock < 0:
            raise taken

    def _take(self) -> int:
        """Return the lock, or -1 if another process holds it, or has just removed its file."""
        place = self._home / LOCK
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        lock = os.open(place, flags, 0o644)
        with suppress(BlockingIOError, FileNotFoundError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock), os.stat(place)):
                return lock
        os.close(lock)
        return -1

    def close(self) -> None:
        """Let others write."""
        if self._lock >= 0:
            with suppress(OSError):
                if self._is_new and self._content() == self._before:
                    os.unlink(self._home / LOCK)  # while it is held: who waits for it finds it gone
                    self._remove_made()
            os.close(self._lock)
            self._lock = -1

    def _content(self) -> set[str]:
        return set(os.listdir(self._home)) - {LOCK}

    def _remove_made(self) -> None:
        """Remove the directories that were made, as far as they are empty."""
        for place in self._made:
            with suppress(OSError):
                place.rmdir()


def unusable(path: Path, what: str) -> InputError:
    """Return the error of a path that is no place for a command's output."""
    return InputError("OUTPUT_WRITE", what, str(path), "give another place with --out")
