"""The errors a user sees: one line, a stable code, the place and the remedy.

Every error that a user can cause or cure is a `GearError`.  The command line prints it as
``error[CODE]: what was wrong (where); what to do`` and exits with `exit_code`.  Codes are stable
and listed in docs/reference/errors.md; messages may change.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # of the system's error numbers
# how torch, CUDA and their libraries say it, on the CPU and on a GPU
OUT_OF_MEMORY = (
    "can't allocate memory",
    "out of memory",
    "Storage size calculation overflow",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
# at most 200 characters of module:namespace/name-vN
ENVIRONMENT_ID = re.compile(r"(?!.{201})(?:[\w.]+:)?(?:[\w:-]+/)?[\w:.-]+", re.ASCII)

# an option of a command with what can only be its value; commands and what is quoted stay
_OPTION = re.compile(
    r"(?P<kept>`[^`]*`|(?<!\w)'[^']*'(?!\w)|\"[^\"]*\""
    r"|\b(?:gear-offline|pip|torchrun|docker|ray start) [^;`]*)"
    r"|(?<![\w-])--(?P<name>(?!debug|json|nproc)[a-z]+(?:-[a-z]+)*)"
    r"(?: (?P<value>'[^']*'|(?=[^\s;)]*[^a-z\s;)(,.'-])[^\s;)]*[^\s;),.:]"
    r"|(?:none|done-only|terminals|actions|padded)\b))?"
)
_SWITCHES = ("allow-nonfinite", "exact", "overwrite", "private", "resume", "train")
_LOGIN = re.compile(r"(\w[\w+.-]+:/{1,2})[^/?#\s]*@")  # of an address
# of a web server's: signatures and tokens; the sentence around it goes on
_QUERY = re.compile(r"(https?:/[^\s?]*)\?[^\s'\"<>]*?(?=[)\]},;:.]*(?:[\s'\"<>]|$))", re.IGNORECASE)
_callers = ["Python"]


@contextmanager
def at_the_command_line() -> Iterator[None]:
    """Word messages for a caller who types options, not for one who writes Python."""
    _callers.append("command line")
    try:
        yield
    finally:
        _callers.pop()


def for_caller(text: str) -> str:
    """Return a message with its options as keyword arguments, unless they are typed."""
    return text if _callers[-1] == "command line" else _OPTION.sub(_argument, text)


def _argument(option: re.Match[str]) -> str:
    """Return the keyword argument that an option of the command line is in Python."""
    if option["kept"]:
        return option["kept"]
    name, value = option["name"].replace("-", "_"), (option["value"] or "").strip("'")
    if name == "shard_size":
        name = "shard_bytes"
    if name == "ends" and value:  # every function that reads a source has a rule
        name = "rule"
    if option["name"] in _SWITCHES:
        return f"{name}=True"
    items = value.split(",")
    if name in ("columns", "discrete") and value:
        return f"{name}={items}"
    if name in ("rename", "shift") and value:
        pairs = (part.rpartition("=") for part in items)
        return f"{name}={ {old: int(new) if new.isdecimal() else new for old, _, new in pairs} }"
    if name == "targets" and value:
        return f"{name}=[{', '.join(items)}]"
    return f"{name}={value if value.isdecimal() else repr(value)}" if value else name


def without_secrets(text: str) -> str:
    """Return a text whose addresses have no user, password or query."""
    return _QUERY.sub(r"\1", _LOGIN.sub(r"\1", text)) if ":/" in text else text


class GearError(Exception):
    """An error with a stable code, a place and a remedy.

    Parameters
    ----------
    code
        Stable upper-case identifier, e.g. ``"DATASET_DAMAGED"``.
    problem
        What is wrong, a clause without a final full stop.
    where
        File, column, step or dotted option the error belongs to; may be empty.
    remedy
        What the user can do about it.
    """

    exit_code = 1

    def __init__(self, code: str, problem: str, where: str = "", remedy: str = "") -> None:
        where = re.sub(r"(?is)^(https?:/[^?]*).*", r"\1", where)  # blanks in a query too
        problem, where, remedy = map(without_secrets, (problem, where, remedy))
        self.code = code
        self.problem = problem
        self.where = where
        self.remedy = remedy
        origin = for_caller(where) if where.startswith("--") else where  # files are others' text
        suffix = f" ({origin})" if where else ""
        advice = f"; {remedy}" if remedy else ""
        # Problem, place and the remedy in one line.  Not a property: torch gives exceptions of
        # workers whose class has a `message` back by that keyword.
        text = f"{for_caller(problem)}{suffix}{for_caller(advice)}"
        self.message = " ".join(text.split())
        super().__init__(code, problem, where, remedy)

    def __str__(self) -> str:
        return f"[{self.code}] {self.message}"


class InputError(GearError, ValueError):
    """A file, option or value from the user that cannot be used (exit code 2)."""

    exit_code = 2


class UnavailableError(GearError, RuntimeError):
    """Something the request needs is not here: a package, a device, a file system feature."""


@contextmanager
def reading_errors(file_type: str, where: Path | str) -> Iterator[None]:
    """Turn whatever a library raises of a foreign file into one error (``SOURCE_READ``)."""
    try:
        yield
    except GearError:
        raise
    except Exception as error:
        why = " ".join(str(error).split())[:200] or type(error).__name__
        problem = f"not a readable {file_type} file: {why}"
        remedy = "it is damaged or cut short: get it again"
        raise InputError("SOURCE_READ", problem, str(where), remedy) from error


@contextmanager
def package_needed(problem: str, extra: str) -> Iterator[None]:
    """Tell a package that is not installed by the extra that has it (``PACKAGE_MISSING``)."""
    try:
        yield
    except ImportError as error:
        remedy = f"pip install 'gear-offline[{extra}]'"
        raise UnavailableError("PACKAGE_MISSING", f"{problem}: {error}", remedy=remedy) from error


def given_path(given: str | os.PathLike[str], code: str, *, where: str) -> Path:
    """Return the caller's argument `where` as a path, from the home if it begins with ``~``.

    An argument that cannot be a path, as None, or an output at an address is refused with `code`.
    """
    try:
        path = Path(in_home(os.fspath(given)))
    except TypeError as error:
        problem = f"a {type(given).__name__} is not a path"
        raise InputError(code, problem, where, "give a str or a pathlib.Path") from error
    if code == "OUTPUT_WRITE" and re.match(r"\w[\w+-]+:/", str(path)):
        raise InputError(code, "nothing is written to a server", str(path), "give a local path")
    return path


def in_home(text: str) -> str:
    """Return a path with its ``~`` or ``~user`` as that home; a scheme may stand before it."""
    scheme = "robomimic:" if text.startswith("robomimic:~") else ""
    path = os.path.expanduser(text.removeprefix(scheme))
    if path.startswith("~"):
        remedy = "write ./~ for a file or folder whose name begins so"
        raise InputError("USAGE", f"nobody here has the home {path.split(os.sep)[0]}", path, remedy)
    return scheme + path


def check_environment_id(name: str | None, *, where: str = "") -> None:
    """Refuse a text that cannot be the id of a Gymnasium environment, known or not."""
    if name is not None and ".py:" not in name and not ENVIRONMENT_ID.fullmatch(name):
        problem = f"{name[:60]!r} cannot be the id of a Gymnasium environment"
        raise InputError(
            "ENVIRONMENT", problem, where, "ids look like Hopper-v5 or namespace/Name-v0"
        )


def together(gather: Callable[[Any], list[Any]], make: Callable[[], Any]) -> list[Any]:
    """Return the JSON-able results of `make` on all ranks; an error of one is one of all.

    `gather` returns every rank's value, in the order of ranks, as `World.gather` does.
    """
    result, error = None, None
    try:
        result = make()
    except GearError as caught:
        error = caught
    answers = gather([error and error.problem, result])
    if error is not None:
        raise error
    for rank, (failure, _) in enumerate(answers):
        if failure is not None:
            problem, remedy = f"rank {rank} failed: {failure}", "see its own message"
            raise GearError("RANK_FAILED", problem, remedy=remedy)
    return [answer for _, answer in answers]


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return true if an error, or one that it hides as captures do, says that memory is short."""
    if isinstance(error, MemoryError) or any(text in str(error) for text in OUT_OF_MEMORY):
        return True
    return error is not None and is_out_of_memory(error.__cause__ or error.__context__)
