"""Files from outside are opened here; files and directories appear here whole or not at all.

Something new is written beside its place under a hidden name, made durable and renamed.  While
its writer lives it is locked (``flock``, which the kernel drops with the process), so that the
next writer of the same place can tell what a killed one left and remove it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gear_offline.errors import NO_SPACE, GearError, InputError

FileIdentity = tuple[int, ...]


def open_regular(
    path: str | os.PathLike[str], *, links: bool = True, folder: int | None = None
) -> int:
    """Open a regular file, a path in the open `folder`; ``EINVAL`` for anything else.

    A FIFO would wait for ever, a device give bytes without end.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    handle = os.open(path, flags if links else flags | os.O_NOFOLLOW, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    return handle


def read_regular(path: Path, *, most: int) -> bytes:
    """Return the content of a regular file of at most `most` bytes; raises OSError, ValueError."""
    try:
        handle = open_regular(path)
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise ValueError("not a regular file") from error
        raise
    with open(handle, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise ValueError(f"{size} bytes long, more than {most}")
        return file.read(most + 1)


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
    """Return what another file, or another content, has not: device, inode, size, change times."""
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
    except BaseException as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno and not error.filename:
            error.filename = str(path)  # writing does not say where
        raise
    sync_directory(path.parent)


@contextmanager
def new_file(path: Path, *, overwrite: bool) -> Iterator[Path]:
    """Give the hidden name of a file to write, which takes the name `path` when the body ends.

    The body makes the file durable.  Nothing is left after an error.
    """
    check_folder_of(path)
    _check_free(path, overwrite=overwrite)
    with writing(path):
        _remove_leftovers(path)
        part = _hidden(path)
        lock = os.open(part, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield part
            if overwrite:
                part.replace(path)
            else:
                _rename_new(part, path)
            sync_directory(path.parent)
        finally:
            part.unlink(missing_ok=True)
            os.close(lock)


@contextmanager
def new_directory(path: Path, *, replaceable: Callable[[Path], bool] | None) -> Iterator[Path]:
    """Give the hidden name of a directory to fill, which takes the name `path` at the body's end.

    The body makes the files in it durable.  Nothing is left after an error.  `replaceable` says
    whether what stands at `path` may be replaced; ``None``: nothing but an empty directory.
    """
    check_path(path.parent, output=path)
    path = path.resolve()
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(path)
        _check_replaceable(path, replaceable)
        part = _hidden(path)
        part.mkdir()
        lock = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        old = _hidden(path, "old")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield part
            os.fsync(lock)
            _check_replaceable(path, replaceable)
            if path.is_dir() and os.listdir(path):
                # A kill between the two renames leaves the old one under its hidden name; the
                # next writer puts it back.
                path.rename(old)
            part.rename(path)
            sync_directory(path.parent)
        finally:
            if old.is_dir() and not os.path.lexists(path):
                old.rename(path)
            for leftover in (part, old):
                shutil.rmtree(leftover, ignore_errors=True)
            os.close(lock)


def write_error(error: OSError, where: str) -> GearError:
    """Return the error ``OUTPUT_WRITE`` for what the system said."""
    if error.errno in NO_SPACE:
        what = f"no space left: {error.strerror}"
        remedy = "free space or choose another place; what was written has been removed"
    else:
        what = f"cannot write: {error.strerror or error}"
        remedy = "check that the place exists and that you may write there"
    return GearError("OUTPUT_WRITE", what, where=where, remedy=remedy)


def obstacle_to(folder: Path) -> tuple[str, str] | None:
    """Return which part of its path keeps a folder from being made, and the remedy."""
    lowest = _lowest(folder)
    if lowest.is_dir():
        return None
    if lowest.exists():
        return f"{lowest} is a file, not a folder", "move that file away"
    return f"{lowest} is a link that leads nowhere", "remove that link"  # mkdir makes no target


def check_path(folder: Path, *, output: Path) -> None:
    """Refuse (``OUTPUT_WRITE``) a folder, there or to be made, whose path leads through a file."""
    obstacle = obstacle_to(folder)
    if obstacle is not None:
        what, cure = obstacle
        raise InputError("OUTPUT_WRITE", what, str(output), f"choose another place, or {cure}")


def check_folder_of(path: Path) -> None:
    """Refuse (``OUTPUT_WRITE``) a file to be made whose folder is not there."""
    check_path(path.parent, output=path)
    if not path.parent.is_dir():
        where, remedy = str(path.absolute().parent), "make it, or choose another"
        raise InputError("OUTPUT_WRITE", "folder does not exist", where, remedy)


def check_new_file(path: Path) -> None:
    """Refuse early what could not be written as a new file hours later."""
    _check_free(path, overwrite=False)
    check_folder_of(path)
    check_new_folder(path.absolute().parent)


def check_new_folder(path: Path) -> None:
    """Refuse early a folder that could not be made, or written to, when the work is done."""
    check_path(path, output=path)
    lowest = _lowest(path.absolute())
    if not os.access(lowest, os.W_OK | os.X_OK):
        what = "you may not write in the folder"
        raise InputError("OUTPUT_WRITE", what, str(lowest), "choose another")


def _lowest(folder: Path) -> Path:
    return next(p for p in (folder, *folder.parents, Path()) if os.path.lexists(p))


def _check_free(path: Path, *, overwrite: bool) -> None:
    if path.is_dir():
        what, remedy = "the output is a directory", "choose another name"
    elif os.path.lexists(path) and not overwrite:
        what, remedy = "output exists", "choose another name, or overwrite it (--overwrite)"
    else:
        return
    raise InputError("OUTPUT_EXISTS", what, where=str(path), remedy=remedy)


def _check_replaceable(path: Path, replaceable: Callable[[Path], bool] | None) -> None:
    if not os.path.lexists(path) or (path.is_dir() and not os.listdir(path)):
        return
    what, remedy = "the output exists", "choose another place, or allow it (--overwrite)"
    if replaceable is not None:
        if replaceable(path):
            return
        what, remedy = "the output exists and is not ours to replace", "choose another place"
    raise InputError("OUTPUT_EXISTS", what, where=str(path), remedy=remedy)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise each `OSError` of the body as ``OUTPUT_WRITE``."""
    try:
        yield
    except OSError as error:
        raise write_error(error, str(path)) from error


def _hidden(path: Path, kind: str = "part") -> Path:
    return path.with_name(f".{path.name}.gear-{kind}-{secrets.token_hex(6)}")


def _rename_new(part: Path, path: Path) -> None:
    """Rename without replacing: unlike a rename, a link fails where there is a file."""
    try:
        os.link(part, path)
    except OSError:  # a file system without hard links, or the file is there
        _check_free(path, overwrite=False)
        part.rename(path)


def _remove_leftovers(path: Path) -> None:
    """Remove what killed writers of `path` left; put back what one had moved away."""
    name = re.compile(rf"\.{re.escape(path.name)}\.gear-(part|old)-[0-9a-f]{{12}}")
    for entry in list(os.scandir(path.parent)):
        match = name.fullmatch(entry.name)
        if match is None or not (entry.is_file(follow_symlinks=False) or _is_folder(entry)):
            continue
        if match[1] == "old" and not os.path.lexists(path):
            os.rename(entry.path, path)
            continue
        with suppress(OSError):  # its writer lives, or has just removed it
            lock = os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(entry.path) if _is_folder(entry) else os.unlink(entry.path)
            finally:
                os.close(lock)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir(follow_symlinks=False)
