"""Parts that users bring: models, strategies, environments, trackers, callbacks, edits of episodes.

A part is named ``FILE.py:Name``, ``package.module:Name``, or by an entry point of an installed
package.  Loading one runs its code, so it needs the user's permission.  Who types a name, in a
command, in Python or in a recipe of his own, gives it (`admit`).  It is kept in his home, with the
digest of the file; a run keeps name and digest.  `readmit` admits the names of a run whose files
are the same.  `find_part` imports what is admitted, and nothing else.
"""

from __future__ import annotations

import difflib
import json
import os
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.metadata import EntryPoints, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from gear_offline.core.part_files import (
    FOLDERS,
    PACKAGES,
    PartFiles,
    digest_files,
    digest_object,
    read_files,
)
from gear_offline.core.text import first_line, quote
from gear_offline.errors import GearError, InputError, in_home

OPTIONS = "environment_options"  # before the digest of options, which are permitted as parts are
LINES_SHOWN = 3  # of a user's files, where a part raises
PACKAGE = Path(__file__).parents[1]  # gear_offline itself
STANDARD = Path(import_module.__code__.co_filename).parent
LOADERS = ("<frozen", f"{STANDARD}/", f"{PACKAGES}/torch/")
LIBRARIES = (f"{STANDARD.parent}/", f"{PACKAGE}/")  # whose files are taken one by one


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of parts: where its names are given, and what an error of one is."""

    noun: str
    group: str  # of entry points, behind gear_offline.
    option: str  # of a recipe; of a command, as --map, which is an argument in Python
    argument: str = ""  # of `gear-offline evaluate` and others that read a run
    code: str = "RECIPE"
    own: dict[str, Any]  # the package's by name; a text is loaded as a part is

    @property
    def installed(self) -> EntryPoints:
        """The parts of other packages."""
        return entry_points(group=f"gear_offline.{self.group}")

    def spell(self, name: str) -> str:
        """Return its option with a name, as users type it."""
        return f"{self.option}{' ' if self.option.startswith('--') else '='}{name}"


class Permission:
    """The names that this process may import, and those that its user has typed, now or before."""

    def __init__(self) -> None:
        self.admitted: dict[str, str] = {}  # name -> digest: what may be imported
        self.refused: dict[str, str] = {}  # name -> the reason, of those that a run names
        self.typed: set[tuple[str, str]] = set()  # names and digests, here or in the caller
        # objects of this process that no other one can import; None: as its main module has it
        self.live: dict[str, Any] = {}
        self._lines: set[str] = set()  # of the list in the user's home
        self._read: tuple[Path, int, int] = (Path(), 0, 0)  # the list, its inode, its bytes read

    def is_typed(self, name: str, digest: str) -> bool:
        """Return true if the user has typed a name while its file had a digest.

        Without a digest nothing tells what was typed in another process.
        """
        return (name, digest) in self.typed or bool(digest and self._is_kept(name, digest))

    def admit(self, digests: Mapping[str, str]) -> None:
        """Admit names that the user has typed, or that the caller of this process may import."""
        self.typed.update(digests.items())
        self.admitted.update(digests)
        for name in digests:
            self.refused.pop(name, None)

    def keep(self, digests: Mapping[str, str]) -> None:
        """Write names that the user types, and their digests, into the list in his home."""
        pairs = sorted({(name, digest) for name, digest in digests.items() if digest} - self.typed)
        with suppress(OSError):
            if lines := [json.dumps(pair) for pair in pairs if not self._is_kept(*pair)]:
                _home().parent.mkdir(parents=True, exist_ok=True)
                with _home().open("a", encoding="utf-8") as opened:
                    opened.write("".join(f"{line}\n" for line in lines))

    def _is_kept(self, name: str, digest: str) -> bool:
        """Look into the user's list, of which what is new since the last look is read."""
        with suppress(OSError), (home := _home()).open("rb") as file:
            *list_id, start = self._read
            inode = os.fstat(file.fileno()).st_ino
            start = file.seek(start if list_id == [home, inode] else 0)
            lines, _, _ = file.read().rpartition(b"\n")
            self._lines.update(lines.decode(errors="replace").splitlines())
            self._read = home, inode, start + len(lines) + bool(lines)
        return json.dumps([name, digest]) in self._lines


_permission, _files = Permission(), PartFiles()


def is_part(name: object) -> bool:
    """Return true for a name with something to import."""
    return isinstance(name, str) and ":" in name


def is_same(first: Any, second: Any) -> bool:
    """Return true for equal names, or two names of one part: its file may have moved.

    A part may be named by its file or its module, an environment by its id alone.
    """
    first, second = part_name(first), part_name(second)
    names = [name for name in (first, second) if is_part(name)]
    if first == second or not names or bare_name(first) != bare_name(second):
        return bool(first == second)
    files = [file_of(name.rpartition(":")[0]) for name in names]
    return files[0] == files[-1] or len({digest_of(name) for name in names} - {""}) < 2


def bare_name(name: Any) -> Any:
    """Return a name without its file or module."""
    return name.rpartition(":")[2] if is_part(name) else name


def part_name(value: Any) -> Any:
    """Return the name of a part that is given itself: a class or a function; texts as they are.

    Files are named by their whole path.
    """
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, str):
        origin, colon, name = value.rpartition(":")
        is_file = colon and origin.endswith(".py")
        return f"{os.path.abspath(in_home(origin))}:{name}" if is_file else value
    if not callable(value) or not hasattr(value, "__qualname__"):
        return value
    origin, name = value.__module__, value.__qualname__
    file = getattr(sys.modules.get(origin), "__file__", None)
    is_main = origin in ("__main__", "__mp_main__")
    if file and (is_main or origin.startswith(FOLDERS)):
        origin = os.path.abspath(file)
    if is_main or "<locals>" in name:
        _permission.live[f"{origin}:{name}"] = None if _in_main(name) is value else value
    return f"{origin}:{name}"


def _in_main(name: str) -> Any:
    """Find what the main module has under a name now: a cell may have been run again."""
    value: Any = sys.modules["__main__"]
    for segment in name.split("."):
        value = getattr(value, segment, None)
    return value


def _live_part(name: str) -> Any:
    value = _permission.live[name]
    return _in_main(name.rpartition(":")[2]) if value is None else value


def is_importable(name: str) -> bool:
    """Return true if other processes can import a part, too."""
    return name not in _permission.live


def file_of(origin: str) -> Path | None:
    """Return the file of ``FILE.py`` or of a module, which is not imported; None: unknown."""
    if origin.endswith(".py"):
        return Path(origin)
    path: Any = None
    spec: Any = getattr(sys.modules.get(origin), "__spec__", None)
    with suppress(Exception):
        for end in range(0 if spec else origin.count(".") + 1):  # of each package on the way
            spec = PathFinder.find_spec(".".join(origin.split(".")[: end + 1]), path)
            path = spec and spec.submodule_search_locations
    return Path(spec.origin) if spec is not None and spec.has_location else None


def digest_of(name: str) -> str:
    """Return the digest of a part's content; empty where there is nothing to read.

    That is its file and what it imports from its folder, or the code of a class of a notebook.
    """
    origin = name.rpartition(":")[0]
    if origin == OPTIONS:
        return name.rpartition(":")[2]
    if name in _permission.live and not origin.endswith(".py"):
        return "" if (value := _live_part(name)) is None else digest_object(value)
    file = file_of(origin)
    with suppress(OSError):
        return "" if file is None else digest_files(_contents(origin, file))
    return ""


def _contents(origin: str, file: Path) -> dict[Path, bytes]:
    """Read the file of a part, and what it imports from its folder unless that is a library's."""
    if str(file).startswith((PACKAGES, *LIBRARIES)):
        return {file: file.read_bytes()}
    above = 0 if origin.endswith(".py") else origin.count(".") + (file.stem == "__init__")
    return read_files(file, file.parents[above])


def admit(names: Iterable[str]) -> dict[str, str]:
    """Admit names that the user typed, at the outermost door alone; return their digests."""
    digests = {name: digest_of(name) for name in names if is_part(name)}
    _permission.keep(digests)
    _permission.admit(digests)
    return digests


def readmit(digests: Mapping[str, str]) -> None:
    """Admit the names of a run whose files are still the ones that were typed for it.

    An empty digest says that nobody has typed a name.
    """
    for name, digest in digests.items():
        _permission.admitted.pop(name, None)
        _permission.refused.pop(name, None)
        if not _permission.is_typed(name, digest):
            continue
        if (now := digest_of(name)) == digest:
            _permission.admitted[name] = now
        else:
            how = "has changed since the run began with it" if now else "is not there any more"
            file = None if name in _permission.live else file_of(name.rpartition(":")[0])
            _permission.refused[name] = f"{quote(file or name)} {how}"


def _home() -> Path:
    folder = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(folder, "gear-offline", "parts.jsonl")


def get_admitted() -> dict[str, str]:
    """Return the names and digests that another process of the same work may import."""
    return {name: d for name, d in _permission.admitted.items() if name not in _permission.live}


def admit_digests(digests: Mapping[str, str]) -> None:
    """Admit what the process that called this one was permitted to import."""
    _permission.admit(digests)


def is_admitted(name: str) -> bool:
    """Return true if this process may import a part."""
    return name in _permission.admitted


def admits_module(module: str) -> bool:
    """Return true if this process may import a part of a module."""
    return any(name.rpartition(":")[0] == module for name in _permission.admitted)


def find_part(part_kind: Kind, name: object) -> Any:
    """Return a part by its name: the package's own, an entry point's, or one that is admitted."""
    if not isinstance(name, str):
        raise InputError(part_kind.code, f"{name!r} names no {part_kind.noun}", part_kind.option)
    if name in part_kind.own:
        stored = part_kind.own[name]
        return _attribute(part_kind, stored) if isinstance(stored, str) else stored
    if is_part(name):
        check_admitted(part_kind, name)
        return _live_part(name) if name in _permission.live else _attribute(part_kind, name)
    for entry in part_kind.installed:
        if entry.name == name:
            with calling_part(part_kind, f"loading {entry.value}", name):
                return entry.load()
    names = sorted({*part_kind.own, *(entry.name for entry in part_kind.installed)})
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    remedy = f"did you mean {near[0]!r}? " if near else ""
    remedy += f"there are {', '.join(names)}; " if names else ""
    remedy += f"one of your own: {part_kind.spell('FILE.py:Name')}"
    raise InputError(part_kind.code, f"no {part_kind.noun} {name!r}", part_kind.option, remedy)


def check_admitted(part_kind: Kind, name: str) -> None:
    """Refuse to import what only a run, a dataset or a policy folder names."""
    if name not in _permission.admitted:
        problem = f"{name!r} would import a module that only a run, a dataset or a policy names"
        origin, _, leaf = name.rpartition(":")
        typed_name, option = name, part_kind.option
        remedy = "if you trust it, name it yourself (a recipe.yaml counts as a run's)"
        if origin.endswith(".py") and not Path(origin).is_file():  # of another machine, or moved
            problem = f"{quote(origin)}, which a run, a dataset or a policy names, is not here"
            typed_name = f"{Path(origin).name}:{leaf}"
            remedy = "get that file, and name it where it is"
        words = part_kind.spell(typed_name)
        if name in _permission.live:  # there is a newer one of its name
            words = f"the class itself, as {part_kind.argument.strip('-') or option}={leaf}"
        elif part_kind.argument:
            words += f" with train and sweep, else {part_kind.argument} {typed_name}"
        remedy += f": {words}"
        raise InputError(part_kind.code, _permission.refused.get(name, problem), option, remedy)


def check_part(part_kind: Kind, name: str) -> None:
    """Refuse a part that may not be imported, or has no file; import nothing."""
    check_admitted(part_kind, name)
    if name not in _permission.live:
        _read_part(part_kind, name)


def _read_part(part_kind: Kind, name: str) -> dict[Path, bytes]:
    """Return the files of a part of ``FILE.py`` and their bytes; none of one of a module."""
    origin = name.rpartition(":")[0]
    try:
        return _contents(origin, Path(origin)) if origin.endswith(".py") else {}
    except OSError as error:
        problem = f"{quote(origin)} cannot be read: {error.strerror or error}"
        remedy = "give the file's path"
        raise InputError(part_kind.code, problem, part_kind.option, remedy) from error


def _attribute(part_kind: Kind, name: str) -> Any:
    origin, _, path = name.rpartition(":")
    module = part_module(part_kind, name)
    value: Any = module
    for segment in path.split("."):
        if not hasattr(value, segment):
            near = difflib.get_close_matches(segment, list(vars(module)), n=1)
            problem = f"{quote(origin)} has no {segment!r}"
            problem += f", did you mean {near[0]!r}?" if near else ""
            remedy = f"write {part_kind.spell('FILE.py:Name')} or package.module:Name"
            raise InputError(part_kind.code, problem, part_kind.option, remedy)
        value = getattr(value, segment)
    return value


def part_module(part_kind: Kind, name: str) -> ModuleType:
    """Import the module or the file of a part."""
    origin = name.rpartition(":")[0]
    if not origin.endswith(".py"):
        with calling_part(part_kind, f"importing {origin}", name):
            return import_module(origin)
    file, contents = Path(origin), _read_part(part_kind, name)
    if _permission.admitted[name] != digest_files(contents):
        problem = f"{quote(origin)} has changed meanwhile"
        remedy = f"if you trust it, name it again: {part_kind.spell(quote(name))}"
        raise InputError(part_kind.code, problem, part_kind.option, remedy)
    if _files.is_loading(file):
        remedy = "put what it does, when it is run, behind if __name__ == '__main__':"
        problem = f"{quote(origin)} asks for {quote(name)} while it is imported"
        raise InputError(part_kind.code, problem, name, remedy)
    with calling_part(part_kind, f"importing {quote(origin)}", name):
        return _files.load(file, contents)


@contextmanager
def calling_part(part_kind: Kind, action: str, name: str) -> Iterator[None]:
    """Raise a part's errors as an `InputError` that shows the lines of its own files."""
    try:
        yield
    except GearError:
        raise
    except (Exception, SystemExit) as error:
        raise part_error(part_kind, action, name, error) from error


def part_error(
    part_kind: Kind, action: str, name: str, error: BaseException, remedy: str = ""
) -> InputError:
    """Return the error of what a part raises, with the lines of its own files."""
    text = f"{action} raised {type(error).__name__}: {first_line(error)}"
    lines = find_user_lines(error)
    text += f", at {', from '.join(lines)}" if lines else ""
    if not remedy and not lines and isinstance(error, ImportError):
        remedy = "put the folder of a module on PYTHONPATH, or name a file: "
        remedy += part_kind.spell("FILE.py:Name")
    remedy = remedy or ("mend it there" if lines else "mend it")
    return InputError(part_kind.code, text, name, remedy)


def find_user_lines(error: BaseException, libraries: tuple[str, ...] = ()) -> list[str]:
    """Return the newest lines of a traceback that are neither of ours nor of libraries."""
    cause: BaseException | None = error
    ours = (*LOADERS, *(f"{PACKAGE.parent}/{n}/" for n in (PACKAGE.name, "models", "loaders")))
    lines: list[str] = []
    while cause is not None and not lines:
        trace = reversed(traceback.extract_tb(cause.__traceback__))
        foreign = [f for f in trace if not f.filename.startswith((*ours, *libraries))]
        foreign = [f for f in foreign if not f.filename.startswith(PACKAGES)] or foreign
        frames = foreign[:LINES_SHOWN]
        lines = [f"{quote(frame.filename)}:{frame.lineno} in {frame.name}" for frame in frames]
        cause = cause.__cause__
    return lines
