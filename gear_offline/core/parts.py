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
from importlib.abc import SourceLoader
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import EntryPoints, entry_points
from importlib.util import module_from_spec
from pathlib import Path
from threading import get_ident
from types import ModuleType
from typing import Any

import xxhash

from gear_offline.core.text import first_line
from gear_offline.errors import GearError, InputError, in_home

LINES_SHOWN = 3  # of a user's files, where a part raises
PACKAGE = Path(__file__).parents[1]  # gear_offline itself
PACKAGES = str(Path(xxhash.__file__).parents[1])  # what is installed
LOADERS = ("<frozen", f"{Path(import_module.__code__.co_filename).parent}/", f"{PACKAGES}/torch/")
FOLDERS = "gear_offline_parts_"  # before the names of packages that stand for folders of files
NOT_BESIDE = (FOLDERS, "__main__")


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of parts: where its names are given, and what an error of one is."""

    noun: str
    group: str  # of entry points, behind gear_offline.
    option: str  # of a recipe
    argument: str = ""  # of `gear-offline evaluate` and others that read a run
    code: str = "RECIPE"
    own: dict[str, Any]  # the package's by name; a text is loaded as a part is

    @property
    def installed(self) -> EntryPoints:
        """The parts of other packages."""
        return entry_points(group=f"gear_offline.{self.group}")


_admitted: dict[str, str] = {}  # name -> digest: what this process may import
_refused: dict[str, str] = {}  # name -> the reason, of those that a run names
_typed: set[tuple[str, str]] = set()  # names and digests that were typed here, or by the caller
_live: dict[str, Any] = {}  # objects of this process that no other one can import
_modules: dict[str, tuple[str, ModuleType]] = {}  # file -> digest, or who imports it, module


def is_part(name: object) -> bool:
    """Return true for a name with something to import."""
    return isinstance(name, str) and ":" in name


def is_same(name: Any, other: Any) -> bool:
    """Return true for two names of one part, whose file may have moved; or for what is equal."""
    names = part_name(name), part_name(other)
    parts = [each for each in names if is_part(each)]
    bare = [each.rpartition(":")[2] if is_part(each) else each for each in names]
    digests = {digest_of(part) for part in parts} - {""}  # of what is there
    return names[0] == names[1] or bool(parts and bare[0] == bare[1] and len(digests) < 2)


def is_same_environment(name: str | None, other: str | None) -> bool:
    """True if two ids are of one environment: one may have its module before it."""
    name, other = name or "", other or ""
    return name == other or f":{name}".endswith(f":{other}") or f":{other}".endswith(f":{name}")


def part_name(part: Any) -> Any:
    """Return the name of a part that is given itself: a class or a function; texts as they are.

    Files are named by their whole path.
    """
    if isinstance(part, os.PathLike):
        part = os.fspath(part)
    if isinstance(part, str):
        place, colon, name = part.rpartition(":")
        is_file = colon and place.endswith(".py")
        return f"{os.path.abspath(in_home(place))}:{name}" if is_file else part
    if not callable(part) or not hasattr(part, "__qualname__"):
        return part
    place, name = part.__module__, part.__qualname__
    file = getattr(sys.modules.get(place), "__file__", None)
    is_main = place in ("__main__", "__mp_main__")
    if file and (is_main or place.startswith(FOLDERS)):
        place = os.path.abspath(file)
    if is_main or "<locals>" in name:
        _live[f"{place}:{name}"] = part
    return f"{place}:{name}"


def is_importable(name: str) -> bool:
    """Return true if other processes can import a part, too."""
    return name not in _live


def file_of(place: str) -> Path | None:
    """Return the file of ``FILE.py`` or of a module, which is not imported; None: unknown."""
    if place.endswith(".py"):
        return Path(place)
    path: Any = None
    spec: Any = getattr(sys.modules.get(place), "__spec__", None)
    with suppress(Exception):
        for end in range(0 if spec else place.count(".") + 1):  # of each package on the way
            spec = PathFinder.find_spec(".".join(place.split(".")[: end + 1]), path)
            path = spec and spec.submodule_search_locations
    return Path(spec.origin) if spec is not None and spec.has_location else None


def digest_of(name: str) -> str:
    """Return the digest of the file that a part stands in; empty where there is no file to read."""
    file = file_of(name.rpartition(":")[0])
    with suppress(OSError):
        return "" if file is None else f"xxh3-128:{xxhash.xxh3_128_hexdigest(file.read_bytes())}"
    return ""


def admit(names: Iterable[str]) -> dict[str, str]:
    """Admit names that the user typed; return their digests."""
    digests = {name: digest_of(name) for name in names if is_part(name)}
    new = set(digests.items()) - _typed
    admit_digests(digests)
    with suppress(OSError):
        if lines := [line for pair in sorted(new) if (line := json.dumps(pair)) not in _kept()]:
            _home().parent.mkdir(parents=True, exist_ok=True)
            with _home().open("a", encoding="utf-8") as opened:
                opened.write("".join(f"{line}\n" for line in lines))
    return digests


def readmit(digests: Mapping[str, str | None]) -> None:
    """Admit the names of a run whose files are still the ones that were typed for it.

    None: the run does not say that they were.
    """
    known = _kept() if digests else set()
    for name, digest in digests.items():
        _admitted.pop(name, None)
        _refused.pop(name, None)
        file, now = file_of(name.rpartition(":")[0]), digest_of(name)
        is_told = (name, digest) in _typed or json.dumps([name, digest]) in known
        if is_told and digest == now:
            _admitted[name] = now
        elif is_told:
            how = "has changed since the run began with it" if now else "is not there any more"
            _refused[name] = f"{file} {how}"


def _home() -> Path:
    folder = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(folder, "gear-offline", "parts.jsonl")


def _kept() -> set[str]:
    """Return the lines of the names and digests that this user has typed before."""
    with suppress(OSError):
        return set(_home().read_text("utf-8").splitlines())
    return set()


def admitted() -> dict[str, str]:
    """Return the names and digests that another process of the same work may import."""
    return {name: digest for name, digest in _admitted.items() if name not in _live}


def admit_digests(digests: Mapping[str, str]) -> None:
    """Admit what this process, or the one that called it, was permitted to import."""
    _typed.update(digests.items())
    _admitted.update(digests)
    for name in digests:
        _refused.pop(name, None)


def is_admitted(name: str) -> bool:
    """Return true if this process may import a part."""
    return name in _admitted


def admits_module(module: str) -> bool:
    """Return true if this process may import a part of a module."""
    return any(name.rpartition(":")[0] == module for name in _admitted)


def find_part(kind: Kind, name: object) -> Any:
    """Return a part by its name: the package's own, an entry point's, or one that is admitted."""
    if not isinstance(name, str):
        raise InputError(kind.code, f"{name!r} names no {kind.noun}", kind.option)
    if name in kind.own:
        own = kind.own[name]
        return _attribute(kind, own) if isinstance(own, str) else own
    if is_part(name):
        check_admitted(kind, name)
        return _live[name] if name in _live else _attribute(kind, name)
    for entry in kind.installed:
        if entry.name == name:
            with calling_part(kind, f"loading {entry.value}", name):
                return entry.load()
    known = sorted({*kind.own, *(entry.name for entry in kind.installed)})
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    remedy = f"did you mean {near[0]!r}? " if near else ""
    remedy += f"there are {', '.join(known)}; one of your own: {kind.option}=FILE.py:Name"
    raise InputError(kind.code, f"no {kind.noun} {name!r}", kind.option, remedy)


def check_admitted(kind: Kind, name: str) -> None:
    """Refuse to import what only a run, a dataset or a policy folder names."""
    if name not in _admitted:
        what = f"{name!r} would import a module that only a run, a dataset or a policy names"
        place, _, own = name.rpartition(":")
        shown, remedy = name, "if you trust it, name it yourself"
        if place.endswith(".py") and not Path(place).is_file():  # of another machine, or moved
            what = f"{place}, which a run, a dataset or a policy names, is not here"
            shown, remedy = f"{Path(place).name}:{own}", "get that file, and name it where it is"
        typed = f"{kind.option}={shown}"
        if kind.argument:
            typed += f" with train and sweep, else {kind.argument} {shown}"
        remedy += f": {typed}"
        raise InputError(kind.code, _refused.get(name, what), kind.option, remedy)


def _attribute(kind: Kind, name: str) -> Any:
    place, _, path = name.rpartition(":")
    module = part_module(kind, name)
    value: Any = module
    for part in path.split("."):
        if not hasattr(value, part):
            near = difflib.get_close_matches(part, list(vars(module)), n=1)
            what = f"{place} has no {part!r}" + (f", did you mean {near[0]!r}?" if near else "")
            remedy = f"write {kind.option}=FILE.py:Name or package.module:Name"
            raise InputError(kind.code, what, kind.option, remedy)
        value = getattr(value, part)
    return value


def part_module(kind: Kind, name: str) -> ModuleType:
    """Import the module or the file of a part."""
    place = name.rpartition(":")[0]
    if not place.endswith(".py"):
        with calling_part(kind, f"importing {place}", name):
            return import_module(place)
    try:
        content = Path(place).read_bytes()
    except OSError as error:
        what = f"{place} cannot be read: {error.strerror or error}"
        raise InputError(kind.code, what, kind.option, "give the file's path") from error
    digest = f"xxh3-128:{xxhash.xxh3_128_hexdigest(content)}"
    if _admitted[name] != digest:
        remedy = f"if you trust it, name it again: {kind.option}={name}"
        raise InputError(kind.code, f"{place} has changed meanwhile", kind.option, remedy)
    known, module = _modules.get(place, ("", ModuleType("")))
    if known == (loading := f"by thread {get_ident()}"):
        remedy = "put what it does, when it is run, behind if __name__ == '__main__':"
        raise InputError(kind.code, f"{place} asks for {name} while it is imported", name, remedy)
    if known != digest:
        _modules[place] = loading, module
        with calling_part(kind, f"importing {place}", name):
            module = _execute(Path(place), content)
        _modules[place] = digest, module
    return module


class _Content(SourceLoader):
    """Runs the content whose digest was taken, and writes nothing beside the file."""

    def __init__(self, path: Path, content: bytes) -> None:
        self._path, self._content = str(path), content

    def get_filename(self, fullname: str) -> str:
        return self._path

    def get_data(self, path: Any) -> bytes:
        return self._content


def _execute(path: Path, content: bytes) -> ModuleType:
    """Run a file as a module of a package that stands for its folder."""
    folder = str(path.parent)
    package = f"{FOLDERS}{xxhash.xxh3_64_hexdigest(folder.encode())}"
    if package not in sys.modules:
        sys.modules[package] = ModuleType(package)
        sys.modules[package].__path__ = [folder]
    loader = _Content(path, content)
    module = module_from_spec(ModuleSpec(f"{package}.{path.stem}", loader, origin=str(path)))
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    try:
        with _beside(folder):
            loader.exec_module(module)
    except BaseException:
        del sys.modules[module.__name__]
        _modules.pop(str(path), None)
        raise
    return module


@contextmanager
def _beside(folder: str) -> Iterator[None]:
    """Let a file import those beside it, by names that files of other folders may have as well."""
    packages = [m for name, m in list(sys.modules.items()) if name.startswith(FOLDERS)]
    folders = {f"{p.__path__[0]}/" for p in packages if hasattr(p, "__path__")}
    others = tuple(folders - {f"{folder}/"})
    for name, module in list(sys.modules.items()) if others else ():
        top, file = name.partition(".")[0], str(getattr(module, "__file__", None) or "")
        is_others = file.startswith(others) and not name.startswith(NOT_BESIDE)
        if is_others and any(Path(folder, place).exists() for place in (top, f"{top}.py")):
            del sys.modules[name]
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
        if folder not in sys.path:  # what is imported later, when the part works
            sys.path.append(folder)


@contextmanager
def calling_part(kind: Kind, what: str, name: str) -> Iterator[None]:
    """Raise a part's errors as an `InputError` that shows the lines of its own files."""
    try:
        yield
    except GearError:
        raise
    except (Exception, SystemExit) as error:
        raise part_error(kind, what, name, error) from error


def part_error(
    kind: Kind, what: str, name: str, error: BaseException, remedy: str = ""
) -> InputError:
    """Return the error of what a part raises, with the lines of its own files."""
    text = f"{what} raised {type(error).__name__}: {first_line(error)}"
    lines = own_lines(error)
    text += f", at {', from '.join(lines)}" if lines else ""
    if not remedy and not lines and isinstance(error, ImportError):
        remedy = "put the folder of a module on PYTHONPATH, or name a file: "
        remedy += f"{kind.option}=FILE.py:Name"
    return InputError(kind.code, text, name, remedy or ("mend it there" if lines else "mend it"))


def own_lines(error: BaseException, libraries: tuple[str, ...] = ()) -> list[str]:
    """Return the newest lines of a traceback that are neither of ours nor of libraries."""
    cause: BaseException | None = error
    ours = (*LOADERS, *(f"{PACKAGE.parent}/{n}/" for n in (PACKAGE.name, "models", "loaders")))
    lines: list[str] = []
    while cause is not None and not lines:
        frames = reversed(traceback.extract_tb(cause.__traceback__))
        own = [f for f in frames if not f.filename.startswith((*ours, *libraries))]
        own = [f for f in own if not f.filename.startswith(PACKAGES)] or own
        lines = [f"{line.filename}:{line.lineno} in {line.name}" for line in own[:LINES_SHOWN]]
        cause = cause.__cause__
    return lines
