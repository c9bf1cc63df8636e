"""Write columns of steps as an HDF5 file: streamed, and whole or not there at all.

Rows go to a temporary file beside the target, which takes the target's name only when it is
complete and on disk.  A temporary file is locked while its writer lives; the next writer of the
same target removes those that are not.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from gear_offline.core.closing import Closing
from gear_offline.core.staging import check_folder_of, write_error
from gear_offline.errors import InputError

CHUNK_ROWS = 4096  # and rows that are held before they are written
CHUNK_BYTES = 1 << 20  # fewer rows where they are wide, such as frames
HELD_BYTES = 64 << 20  # the same for what is held
GZIP_LEVEL = 1  # higher levels cost time and gain 2 %; shuffling gains 13 %

AnyArray = npt.NDArray[Any]


class _Output:
    """The file as HDF5 sees it: never an error, which HDF5 answers with a crash of the process.

    The first error is kept for `check`; what comes after it is dropped.

    Parameters
    ----------
    handle
        Open file descriptor, read and write; stays open.
    """

    def __init__(self, handle: int) -> None:
        self._handle, self._place = handle, 0
        self._error: BaseException | None = None

    def check(self) -> None:
        """Raise the error that was met, if one was."""
        if self._error is not None:
            raise self._error

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._place}.get(whence)
        self._place = offset + (os.fstat(self._handle).st_size if base is None else base)
        return self._place

    def tell(self) -> int:
        return self._place

    def readinto(self, buffer: memoryview) -> int:
        found = os.pread(self._handle, len(buffer), self._place)
        buffer[:] = found.ljust(len(buffer), b"\0")  # dropped bytes read as zeros
        self._place += len(buffer)
        return len(buffer)

    def read(self, size: int = -1) -> bytes:
        raise NotImplementedError("HDF5 uses readinto; h5py only looks for the name")

    def write(self, content: memoryview) -> int:
        done, size = 0, len(content)
        try:
            while self._error is None and done < size:
                done += os.pwrite(self._handle, content[done:], self._place + done)
        except BaseException as error:  # Ctrl-C as well
            self._error = error
        self._place += size
        return size

    def truncate(self, size: int) -> int:
        try:
            if self._error is None:
                os.truncate(self._handle, size)
        except BaseException as error:  # Ctrl-C as well
            self._error = error
        return size

    def flush(self) -> None:
        """Nothing is held back."""


class Hdf5Writer(Closing):
    """Writes rows of columns, part after part; a context manager.

    Leaving the context without `complete` and `publish` removes everything.

    Parameters
    ----------
    path
        The file to make.
    overwrite
        Replace `path` if it exists.

    Raises
    ------
    InputError
        ``OUTPUT_EXISTS`` when `path` exists and may not be replaced, ``OUTPUT_FOLDER`` when its
        folder does not exist.
    GearError
        ``OUTPUT_SPACE``, ``OUTPUT_WRITE`` when the operating system refuses to write.
    """

    def __init__(self, path: Path, *, overwrite: bool = False) -> None:
        self.path, self.overwrite = path, overwrite
        check_folder_of(path)
        self._refuse_existing()
        self._temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
        with self.writing():
            _sweep(path)
            self._lock = os.open(self._temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
            self._begin()
        self.held: dict[str, list[AnyArray]] = {}
        self._held_rows = self._held_bytes = 0

    def _begin(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._output = _Output(self._lock)
            # HDF5's own lock would conflict with ours, which also covers the time after closing.
            self._file = h5py.File(self._output, "w", locking=False)
        except BaseException:
            self._remove()
            raise

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Map what the operating system says when it cannot write."""
        try:
            yield
        except OSError as error:
            raise write_error(error, str(self.path)) from error

    def hold(self, part: Mapping[str, AnyArray], steps: int) -> None:
        """Add `steps` rows of every column; they are written when there are enough."""
        for name, column in part.items():
            self.held.setdefault(name, []).append(column)
            self._held_bytes += column.nbytes
        self._held_rows += steps
        if self._held_rows >= CHUNK_ROWS or self._held_bytes >= HELD_BYTES:
            with self.writing():
                self._flush()

    def _flush(self) -> None:
        for name, parts in self.held.items():
            if not parts:
                continue
            rows = np.concatenate(parts)
            if name not in self._file:
                row_bytes = math.prod(rows.shape[1:]) * rows.dtype.itemsize
                chunk = max(min(CHUNK_ROWS, CHUNK_BYTES // row_bytes), 1)
                self._file.create_dataset(
                    name,
                    shape=(0, *rows.shape[1:]),
                    maxshape=(None, *rows.shape[1:]),
                    chunks=(chunk, *rows.shape[1:]),
                    dtype=rows.dtype,
                    compression="gzip",
                    compression_opts=GZIP_LEVEL,
                    shuffle=True,
                )
            dataset = self._file[name]
            start = dataset.shape[0]
            dataset.resize(start + len(rows), axis=0)
            dataset[start:] = rows
            parts.clear()
        self._held_rows = self._held_bytes = 0
        self._output.check()

    def complete(
        self, attributes: Mapping[str, Any], details: Mapping[str, AnyArray | str | bytes]
    ) -> None:
        """Write what is held, the attributes and further datasets, to the disk; then `publish`.

        Mappings and lists among the attributes are stored as JSON, text as bytes, as D4RL does.
        """
        self._flush()
        for key, value in attributes.items():
            structured = isinstance(value, (Mapping, list, tuple))
            self._file.attrs[key] = json.dumps(value) if structured else value
        for name, content in details.items():
            stored = np.bytes_(content.encode()) if isinstance(content, str) else content
            self._file.create_dataset(name, data=stored)
        self._file.close()
        self._output.check()
        os.fsync(self._lock)

    def publish(self) -> None:
        """Give the file its name."""
        if self.overwrite:
            self._temporary.replace(self.path)
        else:
            try:
                os.link(self._temporary, self.path)  # unlike a rename, it never replaces a file
            except FileExistsError:
                self._refuse_existing()
            except OSError:  # a file system without hard links
                self._refuse_existing()
                self._temporary.rename(self.path)
        folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _refuse_existing(self) -> None:
        folder = self.path.is_dir()
        if folder or (not self.overwrite and os.path.lexists(self.path)):
            raise InputError(
                "OUTPUT_EXISTS",
                "the output is a directory" if folder else "output exists",
                where=str(self.path),
                remedy="choose another name"
                + ("" if folder else ", or overwrite it (--overwrite)"),
            )

    def _remove(self) -> None:
        if self._lock >= 0:
            self._temporary.unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = -1

    def close(self) -> None:
        """Remove what is not published; may be called again."""
        if self._file:
            self._file.close()
        self._remove()


def _sweep(path: Path) -> None:
    """Remove temporary files of killed writers of `path`."""
    prefix, suffix = f".{path.name}.", ".partial"
    for other in path.parent.iterdir():
        token = other.name.removeprefix(prefix).removesuffix(suffix)
        if other.name != f"{prefix}{token}{suffix}" or len(token) != 8 or other.is_symlink():
            continue
        try:
            lock = os.open(other, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            other.unlink(missing_ok=True)
        except OSError:
            pass  # its writer lives
        finally:
            os.close(lock)
