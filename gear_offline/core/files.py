"""Files from outside are opened here; files and directories appear here whole or not at all.

Something new is written beside its place under a hidden name, made durable and renamed.  While
its writer lives it is locked (``flock``): the next writer removes what a killed one left.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from io import FileIO
from pathlib import Path
from typing import Self

from gear_offline.core.text import say
from gear_offline.errors import NO_SPACE, GearError, InputError

LOCK = ".lock"  # of a `HeldDirectory`
NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)
REMEDIES = {  # what to do about an error of the system; where it says nothing of these: `CHECK`
    **dict.fromkeys(NO_SPACE, "free space or choose another place; nothing half-written is left"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "allow more open files: ulimit -n $(ulimit -Hn)"),
    errno.EROFS: "the file system is read-only: choose a place on another one",
    **dict.fromkeys((errno.EACCES, errno.EPERM), "change its permissions or choose another place"),
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EIO: "the disk or the network fails: check it, then try again",
    errno.ESTALE: "the file server has lost it: mount it again, then try again",
}
CHECK = "check that the place exists and that you may write there"
TURN_SECONDS = 0.2  # between two looks whether it is one's turn
FileIdentity = tuple[int, ...]


class Closing(ABC):
    """A context manager that closes itself at the end, after an error too."""

    @abstractmethod
    def close(self) -> None:
        """Give back what is held; may be called again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: object, error: object, trace: object) -> None:
        self.close()


def open_regular(path: str | os.PathLike[str], *, links: bool = True) -> int:
    """Open a regular file; ``EINVAL`` for a FIFO, which would wait for ever, or a device."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    handle = os.open(path, flags if links else flags | os.O_NOFOLLOW)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    return handle


def read_regular(path: Path, *, most: int) -> bytes:
    """Return the content of a regular file of at most `most` bytes; raises OSError, ValueError."""
    with open(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise ValueError(f"{size} bytes long, more than {most}")
        return file.read(size + 1)  # of a larger number Python makes room at once


def read_at(handle: int, buffer: memoryview, offset: int) -> int:
    """Fill `buffer` (bytes) from byte `offset` of a file; return the bytes that were there."""
    done = 0
    while done < len(buffer):
        count = os.preadv(handle, [buffer[done:]], offset + done)
        if not count:
            break
        done += count
    return done


def file_identity(file: int | Path) -> FileIdentity:
    """Return a file's device, inode, size and change times."""
    status = os.stat(file)
    times = (status.st_mtime_ns, status.st_ctime_ns)  # a program can set mtime back, not ctime
    return (status.st_dev, status.st_ino, status.st_size, *times)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_file(path: Path, content: bytes) -> None:
    """Write `content` to `path` so that a reader, or a crash, finds all of it or none."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open(partial, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        error.filename = error.filename or str(path)  # writing does not say where
        raise
    finally:
        partial.unlink(missing_ok=True)
    sync_directory(path.parent)


@contextmanager
def new_file(path: Path, *, overwrite: bool) -> Iterator[Path]:
    """Give the hidden name of a file to write, which takes the name `path` if the body succeeds."""
    check_new_file(path, overwrite=overwrite)
    with ExitStack() as stack:
        with writing(path):
            remove_leftovers(path.parent, path.name)
            temporary, file = stack.enter_context(new_hidden_file(path))
        yield temporary
        with writing(path):
            os.fsync(file.fileno())
            check_new_file(path, overwrite=overwrite)
            temporary.replace(path)
            sync_directory(path.parent)


@contextmanager
def new_hidden_file(path: Path) -> Iterator[tuple[Path, FileIO]]:
    """Give a new file under a hidden name, which the body writes and renames."""
    temporary, lock = _make_locked(path, lambda hidden: hidden.touch(exist_ok=False), os.O_RDWR)
    with open(lock, "r+b", buffering=0) as file:
        try:
            yield temporary, file
        finally:
            temporary.unlink(missing_ok=True)


def write_all(file: int, content: bytes | memoryview) -> None:
    """Write all of `content`: on a nearly full disk a call may write less."""
    unwritten = memoryview(content)
    while unwritten:
        unwritten = unwritten[os.write(file, unwritten) :]


@contextmanager
def new_directory(
    path: Path, *, replaceable: Callable[[Path], bool] = lambda path: False
) -> Iterator[Path]:
    """Give the hidden name of a directory to fill, which takes the name `path` at the body's end.

    The body makes the files in it durable.  Nothing is left after an error.  `replaceable` says
    whether what stands at `path` may be replaced; an empty directory always may.
    """
    check_folder(path.parent, output=path)
    try:
        path = path.resolve()
    except RuntimeError:
        raise place_error(path, "it is a link that leads to itself") from None
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path.parent, path.name)
        check_replaceable(path, replaceable)
        replaced = _hidden_path(path, "old")
        temporary, lock = _make_locked(path, Path.mkdir, os.O_RDONLY | os.O_DIRECTORY)
        try:
            yield temporary
            os.fsync(lock)
            check_replaceable(path, replaceable)
            if path.is_dir() and os.listdir(path):
                # A kill between the two renames leaves the old one under its hidden name; the
                # next writer puts it back.
                path.rename(replaced)
            temporary.rename(path)
            sync_directory(path.parent)
        finally:
            if replaced.is_dir() and not os.path.lexists(path):
                replaced.rename(path)
            for leftover in (temporary, replaced):
                shutil.rmtree(leftover, ignore_errors=True)
            os.close(lock)


def check_new_file(path: Path, *, overwrite: bool = False) -> None:
    """Refuse early what could not be written as a new file hours later."""
    if path.is_dir() or (os.path.lexists(path) and not overwrite):
        remedy = "choose another name; --overwrite, where the command has it, replaces a file"
        raise InputError("OUTPUT_EXISTS", "output exists", str(path), remedy)
    check_folder(path.parent, output=path)
    if not path.parent.is_dir():
        remedy = "make it, or choose another place"
        raise place_error(path.absolute().parent, "the folder does not exist", remedy)


def check_folder(folder: Path, *, output: Path) -> None:
    """Refuse (``OUTPUT_WRITE``) a folder of `output` that could not be made, or written to."""
    lowest = next(p for p in (folder, *folder.parents) if os.path.lexists(p))
    if not lowest.is_dir():  # a file, or a link that leads nowhere
        raise place_error(output, f"{lowest} is not a folder")
    if not os.access(lowest, os.W_OK | os.X_OK):
        raise place_error(output, f"you may not write in {lowest.absolute()}")


def place_error(path: Path, problem: str, remedy: str = "choose another place") -> InputError:
    """Return the error (``OUTPUT_WRITE``) of a path that is no place for an output."""
    return InputError("OUTPUT_WRITE", problem, str(path), remedy)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise each `OSError` of the body as ``OUTPUT_WRITE``."""
    try:
        yield
    except OSError as error:
        raise write_error(error, str(path)) from error


def write_error(error: OSError, where: str) -> GearError:
    """Return ``OUTPUT_WRITE`` for an error of the system."""
    problem = "no space left" if error.errno in NO_SPACE else "cannot write"
    problem, remedy = f"{problem}: {error.strerror or error}", REMEDIES.get(error.errno or 0, CHECK)
    return GearError("OUTPUT_WRITE", problem, where, remedy)


def check_replaceable(path: Path, replaceable: Callable[[Path], bool] = lambda path: False) -> None:
    """Refuse (``OUTPUT_EXISTS``) to replace what is no empty folder, nor `replaceable`."""
    is_free = not os.path.lexists(path) or (path.is_dir() and not os.listdir(path))
    if not is_free and not replaceable(path):
        remedy = "choose another place; --overwrite replaces only what gear-offline wrote"
        raise InputError("OUTPUT_EXISTS", "the output exists", str(path), remedy)


def _hidden_path(path: Path, role: str) -> Path:
    return path.with_name(f".{path.name}.gear-{role}-{secrets.token_hex(6)}")


def _make_locked(path: Path, make: Callable[[Path], None], flags: int) -> tuple[Path, int]:
    """Make something under a hidden name and lock it, before another process takes it away."""
    while True:
        temporary = _hidden_path(path, "part")
        make(temporary)
        with suppress(FileNotFoundError):
            lock = os.open(temporary, flags | os.O_CLOEXEC)
            if try_lock(lock) is not False and os.path.lexists(temporary):
                return temporary, lock
            os.close(lock)


def remove_leftovers(folder: Path, name: str | None = None) -> None:
    """Remove, or put back, what killed writers of `name`, or of anything, left in a folder."""
    hidden = re.compile(r"\.(.+)\.gear-(part|old)-[0-9a-f]{12}")
    for entry in list(os.scandir(folder)):
        match, is_folder = hidden.fullmatch(entry.name), entry.is_dir(follow_symlinks=False)
        is_plain = is_folder or entry.is_file(follow_symlinks=False)
        if match is None or not is_plain or name not in (None, match[1]):
            continue
        if match[2] == "old" and not os.path.lexists(folder / match[1]):
            os.rename(entry.path, folder / match[1])
            continue
        with suppress(OSError):  # its writer lives, or has just removed it
            lock = os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if try_lock(lock):
                    shutil.rmtree(entry.path) if is_folder else os.unlink(entry.path)
            finally:
                os.close(lock)


def try_lock(handle: int) -> bool | None:
    """Lock an open file if nobody else has; None, and a line once, where there are no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        _say_no_locks(str(error.strerror))
        return None
    return True


@cache
def _say_no_locks(reason: str) -> None:
    warning = f"warning: this file system has no file locks ({reason}): see yourself that no two"
    say(f"{warning} processes write one place, or mount it with locks (Lustre: -o flock)")


def take_lock(path: Path, flags: int = 0) -> int:
    """Open and lock a file, made if missing; -1 if another process holds it or just removed it."""
    flags |= os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    lock = os.open(path, flags, 0o644)
    with suppress(FileNotFoundError):
        if try_lock(lock) is not False and os.path.samestat(os.fstat(lock), os.stat(path)):
            return lock
    os.close(lock)
    return -1


@contextmanager
def turn_of(path: Path, *, quiet: bool, seconds: float = TURN_SECONDS) -> Iterator[None]:
    """Let one process at a time make what is to appear at `path`; another waits, and says so."""
    lock_path, is_told = path.with_name(f".{path.name}.making"), False
    check_folder(path.parent, output=path)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        while (lock := take_lock(lock_path)) < 0:
            if not is_told:
                say(f"{path}: waits for another process, which makes it", quiet=quiet)
            is_told = True
            time.sleep(seconds)
    try:
        yield
    finally:
        lock_path.unlink(missing_ok=True)
        os.close(lock)


def _identity(path: Path) -> tuple[int, int] | None:
    with suppress(OSError):
        return (status := os.stat(path)).st_dev, status.st_ino
    return None


class HeldDirectory(Closing):
    """A directory that one process at a time writes to; a second one gets the error `in_use`.

    It is made when missing.  If it is empty at the end, it goes with the folders made for it.
    """

    def __init__(self, path: Path, *, in_use: InputError) -> None:
        self.path = path
        self._lock, self._home = -1, path.absolute()
        try:
            str(path).encode()
        except UnicodeEncodeError:  # TensorBoard and safetensors fail on it, late
            raise place_error(path, "the name holds bytes that are not UTF-8") from None
        check_folder(path, output=path)
        self._made = [p for p in (self._home, *self._home.parents) if not os.path.lexists(p)]
        try:
            self._home.mkdir(parents=True, exist_ok=True)
            self._lock = take_lock(self._home / LOCK)
        except OSError as error:
            self._remove_made()
            problem = write_error(error, "")
            raise place_error(path, problem.problem, problem.remedy) from error
        if self._lock < 0:
            raise in_use
        self._identity = _identity(self._home)

    def check_place(self) -> None:
        """Refuse to write on after the directory was moved or removed."""
        if _identity(self._home) != self._identity:
            problem, remedy = "the directory was moved or removed", "move it back, and go on"
            raise InputError("OUTPUT_WRITE", problem, str(self.path), remedy)

    def close(self) -> None:
        """Let others write."""
        if self._lock >= 0:
            with suppress(OSError):
                if os.listdir(self._home) == [LOCK]:
                    os.unlink(self._home / LOCK)  # while it is held: who waits for it finds it gone
                    self._remove_made()
            os.close(self._lock)
            self._lock = -1

    def _remove_made(self) -> None:
        """Remove the directories that were made, as far as they are empty."""
        for folder in self._made:
            with suppress(OSError):
                folder.rmdir()
