"""A directory that appears whole or not at all, beside what other processes do to the same target.

Everything is made in a hidden directory beside the target and renamed into place.  A lock file
beside the target, held with flock, keeps a second writer out; the kernel drops the lock when its
holder dies, so leftovers of a killed run are known to be dead and the next run sweeps them.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from gear_offline.dataset.manifest import MANIFEST_NAME, is_member_name
from gear_offline.errors import NO_SPACE, GearError, InputError

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def write_error(error: OSError, where: str) -> GearError:
    """Wrap an operating-system error met while writing: ``OUTPUT_SPACE`` or ``OUTPUT_WRITE``."""
    if error.errno in NO_SPACE:
        return GearError(
            "OUTPUT_SPACE",
            f"no space left: {error.strerror}",
            where=where,
            remedy="free space or choose another place; what was written has been removed",
        )
    return GearError(
        "OUTPUT_WRITE",
        f"cannot write: {error.strerror or error}",
        where=where,
        remedy="check that the place exists and that you may write there",
    )


@dataclass(frozen=True, kw_only=True)
class Obstacle:
    """What keeps a folder from being made.

    Attributes
    ----------
    what
        Its name and kind.
    remedy
        How to make way.
    """

    what: str
    remedy: str


def obstacle_to(folder: Path) -> Obstacle | None:
    """Return the part of a path that is there and is no folder, so that `folder` cannot be made.

    A link that leads nowhere is one too: mkdir makes nothing where it points to.
    """
    found = next((place for place in (folder, *folder.parents) if os.path.lexists(place)), None)
    if found is None or found.is_dir():
        return None
    if found.exists():
        return Obstacle(what=f"{found} is a file, not a folder", remedy="move that file away")
    return Obstacle(what=f"{found} is a link that leads nowhere", remedy="remove that link")


def check_path(folder: Path, *, output: Path) -> None:
    """Refuse a folder for an output, to be made or there, whose path leads through a file.

    Or through a link that leads nowhere.

    Raises
    ------
    InputError
        ``OUTPUT_FOLDER``.
    """
    obstacle = obstacle_to(folder)
    if obstacle is not None:
        raise InputError(
            "OUTPUT_FOLDER",
            obstacle.what,
            where=str(output),
            remedy=f"choose another place, or {obstacle.remedy}",
        )


def check_folder_of(path: Path) -> None:
    """Refuse a file to be made whose folder is not there.

    Raises
    ------
    InputError
        ``OUTPUT_FOLDER``.
    """
    check_path(path.parent, output=path)
    if not path.parent.is_dir():
        raise InputError(
            "OUTPUT_FOLDER",
            "folder does not exist",
            where=str(path.absolute().parent),
            remedy="make it, or choose another",
        )


def check_new_file(path: Path) -> None:
    """Refuse early what could not be written as a new file hours later.

    Raises
    ------
    InputError
        ``OUTPUT_EXISTS``, ``OUTPUT_FOLDER``.
    """
    if os.path.lexists(path):
        raise InputError(
            "OUTPUT_EXISTS", "output exists", where=str(path), remedy="choose another name"
        )
    check_folder_of(path)
    _check_writable(path.absolute().parent)


def check_new_folder(path: Path) -> None:
    """Refuse early a folder that could not be made, or written to, when the work is done.

    Raises
    ------
    InputError
        ``OUTPUT_FOLDER``.
    """
    check_path(path, output=path)
    there = path.absolute()
    while not os.path.lexists(there):
        there = there.parent
    _check_writable(there)


def _check_writable(folder: Path) -> None:
    if not os.access(folder, os.W_OK | os.X_OK):
        what = "you may not write in the folder"
        raise InputError("OUTPUT_FOLDER", what, where=str(folder), remedy="choose another")


@dataclass(frozen=True, kw_only=True)
class Staging:
    """A place to build a dataset.

    Attributes
    ----------
    target
        Where the dataset will appear, resolved.
    path
        Hidden directory beside the target; write here.
    overwrite
        Whether a dataset at the target may be replaced.
    """

    target: Path
    path: Path
    overwrite: bool

    def publish(self) -> None:
        """Make the finished directory durable and move it to the target in one step.

        Raises
        ------
        InputError
            ``TARGET_EXISTS`` or ``TARGET_KIND`` when something appeared at the target meanwhile.
        """
        _fsync_directory(self.path)
        _check_target(self.target, overwrite=self.overwrite)
        if _is_empty_or_absent(self.target):
            try:
                os.rename(self.path, self.target)
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                    raise _exists(self.target) from error
                raise
        elif not _exchange(self.path, self.target):
            # No atomic exchange on this file system: a kill between the two renames leaves the
            # old dataset under its hidden name, and the next run puts it back.
            os.rename(self.target, _hidden(self.target, "old"))
            os.rename(self.path, self.target)
        _fsync_directory(self.target.parent)


@contextmanager
def staging(target: Path, *, overwrite: bool) -> Iterator[Staging]:
    """Lock `target`, sweep what killed runs left, and offer a fresh directory to build in.

    The directory is removed on leaving, unless `Staging.publish` moved it away.

    Raises
    ------
    InputError
        ``TARGET_BUSY`` while another process writes to the same target, ``TARGET_EXISTS`` and
        ``TARGET_KIND`` when the target may not be replaced, ``OUTPUT_FOLDER`` when its path leads
        through a file.
    GearError
        ``OUTPUT_WRITE``, ``OUTPUT_SPACE``.
    """
    check_path(target.parent, output=target)
    target = target.resolve()
    if not target.name:
        raise InputError(
            "TARGET_KIND",
            "the root of the file system cannot be a dataset",
            where=str(target),
            remedy="choose another target",
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock_path = _hidden(target, "lock")
        lock = _lock(lock_path, target)
    except OSError as error:
        raise write_error(error, str(target)) from error
    path = _hidden(target, f"part-{secrets.token_hex(6)}")
    place = Staging(target=target, path=path, overwrite=overwrite)
    try:
        _sweep(target)
        _check_target(target, overwrite=overwrite)
        place.path.mkdir()
        yield place
    except OSError as error:
        raise write_error(error, str(target)) from error
    finally:
        _put_back(target)  # where publishing ended between its two renames
        for leftover in (place.path, _hidden(target, "old")):
            shutil.rmtree(leftover, ignore_errors=True)
        # Unlinked while still held: whoever opened it meanwhile sees that the name is gone.
        with suppress(OSError):
            lock_path.unlink()
        os.close(lock)


def _hidden(target: Path, what: str) -> Path:
    return target.with_name(f".{target.name}.gear-{what}")


def _lock(path: Path, target: Path) -> int:
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock), os.stat(path, follow_symlinks=False)):
                return lock
        except FileNotFoundError:
            pass  # its holder finished and removed it between our open and our lock
        except BlockingIOError as error:
            os.close(lock)
            raise InputError(
                "TARGET_BUSY",
                "another process is writing this dataset",
                where=str(target),
                remedy="wait for it, or choose another target",
            ) from error
        except OSError:
            os.close(lock)
            raise
        os.close(lock)


def _sweep(target: Path) -> None:
    """Remove leftovers of killed runs; put back an old dataset caught between two renames."""
    _put_back(target)
    old = _hidden(target, "old")
    prefix = _hidden(target, "part-").name
    for name in os.listdir(target.parent):
        if name.startswith(prefix) or name == old.name:
            shutil.rmtree(target.parent / name)


def _put_back(target: Path) -> None:
    """Give an old dataset its name again if no other has it."""
    old = _hidden(target, "old")
    if old.is_dir() and not os.path.lexists(target):
        os.rename(old, target)


def _is_empty_or_absent(target: Path) -> bool:
    if not os.path.lexists(target):
        return True
    return target.is_dir() and not os.listdir(target)


def _exists(target: Path) -> InputError:
    return InputError(
        "TARGET_EXISTS",
        "the target exists",
        where=str(target),
        remedy="choose another target, or allow overwriting (--overwrite)",
    )


def _check_target(target: Path, *, overwrite: bool) -> None:
    """Refuse a target that is not ours to replace: only a dataset and nothing but one is."""
    if _is_empty_or_absent(target):
        return
    names = os.listdir(target) if target.is_dir() else []
    if MANIFEST_NAME not in names or not all(map(is_member_name, names)):
        raise InputError(
            "TARGET_KIND",
            "the target exists and is not a dataset of ours alone",
            where=str(target),
            remedy="choose another target; only a dataset directory is ever overwritten",
        )
    if not overwrite:
        raise _exists(target)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names in one step; ``False`` where the file system or C library cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    names = (os.fsencode(first), os.fsencode(second))
    if renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(second))


def _fsync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
