"""Files of JSON lines that survive a kill, for a run's measurements.

Each record is written with one system call, so a killed run leaves whole lines and at most one torn
last line.  Readers ignore it and a resumed run removes it.
"""

from __future__ import annotations

import json
import os
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from gear_offline.core.files import Closing, open_regular, read_regular
from gear_offline.core.text import finite, first_line
from gear_offline.errors import NO_SPACE, InputError

MOST_STEPS = 1 << 62  # train.steps is below
MOST_BYTES = 64 << 20  # of a summary or an evaluation
TAIL_BYTES = 64 << 10  # that mostly hold a record
FILES = ("metrics.jsonl", "evaluations.jsonl")
R = TypeVar("R", bound=BaseModel)


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the records of a JSON-lines file, without a torn last line; [] when missing.

    A line that is no record with a step, other than a torn last one, and a file that is a link or
    no regular file are ``RUN_DAMAGED``.
    """
    return [parse_record(line, where) for line, where, _ in whole_lines(path)]


def last_record(path: Path) -> dict[str, Any] | None:
    """Return the last of the records; of a long file its end alone is read."""
    for after in (-TAIL_BYTES, 0):
        if last := deque(whole_lines(path, after=after), maxlen=1):
            return parse_record(*last[0][:2])
    return None


def whole_lines(path: Path, *, after: int = 0) -> Iterator[tuple[bytes, str, int]]:
    """Yield each line, its place for messages and the offset of the first byte after it.

    From the first line on that begins behind the byte `after`, which counts from the end if it is
    negative.
    """
    try:
        with open(open_regular(path, links=False), "rb") as file:
            offset = file.seek(max(0, after + (file.seek(0, os.SEEK_END) if after < 0 else 0)))
            offset += len(file.readline()) if offset else 0
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    return
                offset += len(line)
                where = f"{path} line {number}" if not after else f"{path}, near its end"
                yield line, where, offset
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:  # a link, a directory, a device
        problem = f"it is no file of a run ({os.strerror(error.errno or 0)})"
        raise _damage_error(problem, str(path), "it") from error


def read_lines(path: Path, kind: type[R]) -> Iterator[R]:
    """Yield the records of a JSON-lines file, without a torn last line; none when missing."""
    for line, where, _ in whole_lines(path):
        try:
            record = kind.model_validate_json(line)  # five times as fast as in two steps
        except ValidationError as error:
            parse_record(line, where)  # what is no record at all has its own error
            raise _unlike(path, error) from error
        step = getattr(record, "step", None)
        if step is None or not 0 <= step < MOST_STEPS:
            parse_record(line, where)
        yield record


def parse_record(line: bytes, where: str) -> dict[str, Any]:
    """Return a record with a step; refuse another line (``RUN_DAMAGED``)."""
    try:
        record: dict[str, Any] = json.loads(line)
        record["step"] = int(record["step"])
        if not 0 <= record["step"] < MOST_STEPS:
            raise ValueError
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise _damage_error("a line is not a record with a step", where, "that line") from error
    return record


def _damage_error(problem: str, where: str, cause: str) -> InputError:
    return InputError("RUN_DAMAGED", problem, where=where, remedy=f"remove {cause}")


def truncate_records(folder: Path, *, last_step: int) -> None:
    """Cut a run's records after `last_step` and torn last lines; nothing if a file is damaged."""
    ends = {}
    for path in (folder / name for name in FILES):
        lines = ((parse_record(line, where), end) for line, where, end in whole_lines(path))
        known = takewhile(lambda entry: entry[0]["step"] <= last_step, lines)
        ends[path] = max((end for _, end in known), default=0)
    for path, end in ends.items():
        if path.exists():
            os.truncate(path, end)


class AppendedFile(Closing):
    """A file that is only appended to, each time by one system call; it is made when missing."""

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file, self._rest = os.open(path, flags, 0o644), b""
        self._lock = threading.Lock()  # `sync` is called by the thread that saves

    def write(self, content: bytes) -> None:
        """Append `content`; what a full disk does not take comes before what is appended next."""
        try:
            self._write(content)
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise

    def _write(self, content: bytes = b"") -> None:
        with self._lock:
            self._rest += content
            while self._rest:
                self._rest = self._rest[os.write(self._file, self._rest) :]

    def append(self, record: Mapping[str, Any]) -> None:
        """Append a line of JSON; NaN and infinity become null."""
        self.write(json.dumps(finite(record), allow_nan=False).encode() + b"\n")

    def sync(self) -> None:
        """Make what was written survive a power loss."""
        self._write()
        os.fsync(self._file)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def read_document(path: Path, kind: type[R]) -> R | None:
    """Return the content of a JSON file; None when missing."""
    try:
        return kind.model_validate_json(read_regular(path, most=MOST_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise _unlike(path, error) from error


def _unlike(path: Path, error: Exception) -> InputError:
    problem = f"the file is damaged: {first_line(error)}"
    return InputError("RUN_DAMAGED", problem, where=str(path), remedy="remove the file")
