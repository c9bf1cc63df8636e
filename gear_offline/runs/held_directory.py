"""A directory that one process at a time writes to."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from gear_offline.core.closing import Closing
from gear_offline.core.files import obstacle_to
from gear_offline.errors import InputError

LOCK = ".lock"


def _refuse_undecodable(path: Path, code: str) -> None:
    """Refuse a name that is no text: TensorBoard and safetensors fail on it, late."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise InputError(
            code,
            "the name holds bytes that are not UTF-8",
            where=str(path),
            remedy="give another place with --out",
        ) from None


class HeldDirectory(Closing):
    """A directory held for writing; a context manager.

    The lock is the kernel's (``flock``): it ends with the process, however that ends.  Where
    nothing has been added to the directory by its end, the lock's file goes, and the directories
    that were made for it.

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
        self._lock, self._home = -1, path.absolute()
        self._made: list[Path] = []
        _refuse_undecodable(path, unusable)
        try:
            while not self._take(taken):
                pass  # who held it has just removed what it had made
        except OSError as error:
            self._remove_made()
            obstacle = obstacle_to(path)
            why = error.strerror if obstacle is None else obstacle[0]
            cure = "check that you may write there" if obstacle is None else obstacle[1]
            raise InputError(
                unusable,
                f"cannot make the directory: {why}",
                where=str(path),
                remedy=f"give another place with --out, or {cure}",
            ) from error
        self._before = self._content()

    def _take(self, taken: InputError) -> bool:
        """Make the directory and lock it; return False if it has gone meanwhile."""
        place = self._home / LOCK
        self._made = [p for p in (self._home, *self._home.parents) if not os.path.lexists(p)]
        self._home.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            try:
                lock, self._is_new = os.open(place, flags | os.O_EXCL, 0o644), True
            except FileExistsError:
                lock, self._is_new = os.open(place, flags, 0o644), False
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise taken from None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), os.stat(place)):
                self._lock = lock
                return True
        os.close(lock)
        return False

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
