"""Python files of users: their digests, and the modules that they import from their folders.

A folder of such files is a package of its own, so no folder gets the helpers of another one.  The
digest of a file covers the helpers that it imports, also those that a function imports later.
"""

from __future__ import annotations

import ast
import builtins
import dis
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from importlib import import_module
from importlib.abc import MetaPathFinder, SourceLoader
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from threading import get_ident
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

import xxhash

FOLDERS = "gear_offline_parts_"  # before the names of packages that stand for folders of files
PACKAGES = str(Path(xxhash.__file__).parents[1])  # what is installed
LOADS = ("LOAD_GLOBAL", "LOAD_NAME")
WRITTEN = ("__dict__", "__weakref__", "__doc__", "__module__")  # by Python, not what a class does
NOT_BESIDE = sys.stdlib_module_names | {"gear_offline"}  # no file of a folder is taken for these


def read_files(file: Path, folder: Path) -> dict[Path, bytes]:
    """Read a file and all that it imports from a folder; raises OSError."""
    contents, waiting = dict[Path, bytes](), [file]
    while waiting:
        if (path := waiting.pop()) not in contents:
            contents[path] = path.read_bytes()
            for name in _imports(contents[path]) if path.suffix == ".py" else ():
                bare = name.lstrip(".")
                base = path.parents[len(name) - len(bare) - 1] if bare != name else folder
                if bare != name or bare.partition(".")[0] not in NOT_BESIDE:
                    waiting += _files_of(bare, base)
    return contents


def digest_files(contents: Mapping[Path, bytes]) -> str:
    """Return the digest of a file, the first, and of those that it imports."""
    (file, content), *helpers = contents.items()
    digest = xxhash.xxh3_128(content)
    for path, more in sorted(helpers):
        digest.update(f"\0{os.path.relpath(path, file.parent)}\0".encode() + more)
    return f"xxh3-128:{digest.hexdigest()}"


def digest_object(definition: Any) -> str:
    """Return the digest of a class or function without a file: its code, and what that uses."""
    words = "\0".join(_words(definition, definition.__module__, set()))
    return f"code-xxh3-128:{xxhash.xxh3_128_hexdigest(words.encode(errors='replace'))}"


def _words(value: Any, module: str, visited: set[int]) -> Iterator[str]:
    """Yield the content of a value in words; of another module's definitions, the name."""
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    if isinstance(value, property):
        value = (value.fget, value.fset)
    if isinstance(value, type | FunctionType):
        yield f"{value.__module__}.{value.__qualname__}"
        if value.__module__ != module or id(value) in visited:
            return
        visited.add(id(value))
    if isinstance(value, type):
        members = {name: each for name, each in vars(value).items() if name not in WRITTEN}
        yield from _words((value.__bases__, members), module, visited)
    elif isinstance(value, FunctionType):
        cells = [*map(_content_of, value.__closure__ or ())]
        loads = [i.argval for i in _instructions(value.__code__) if i.opname in LOADS]
        used = {name: value.__globals__.get(name) for name in sorted({*loads})}
        contents = value.__code__, value.__defaults__, value.__kwdefaults__, cells, used
        yield from _words(contents, module, visited)
    elif isinstance(value, CodeType):
        yield value.co_code.hex()
        names = value.co_names, value.co_varnames, value.co_freevars
        yield from _words((*names, *value.co_consts), module, visited)
    elif isinstance(value, Mapping):
        yield from _words([*value.items()], module, visited)
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _words(each, module, visited)
    elif isinstance(value, set | frozenset):
        yield repr(sorted(map(repr, value)))
    elif isinstance(value, str | bytes | int | float | complex | None):
        yield repr(value)


def _content_of(cell: CellType) -> Any:
    with suppress(ValueError):  # an empty one
        return cell.cell_contents


def _instructions(code: CodeType) -> Iterator[dis.Instruction]:
    """Yield the instructions of a function, and of those within it."""
    yield from dis.get_instructions(code)
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _instructions(each)


@lru_cache(maxsize=1024)
def _imports(content: bytes) -> tuple[str, ...]:
    """Return the modules that a source may import, with a dot for each level up."""
    try:
        nodes = list(ast.walk(ast.parse(content)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()
    names = dict[str, None]()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= dict.fromkeys(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            dot = "." if node.module else ""
            names |= dict.fromkeys([base, *(f"{base}{dot}{alias.name}" for alias in node.names)])
    return tuple(name for name in names if name.strip("."))


def _files_of(name: str, folder: str | Path) -> Iterator[Path]:
    """Yield the files of a dotted name in a folder: its packages on the way, and its module."""
    places: Sequence[str] | None = [str(folder)]
    for segment in name.split("."):
        spec = PathFinder.find_spec(segment, places)
        if spec is None:
            return
        if spec.has_location and spec.origin:
            yield Path(spec.origin)
        if (places := spec.submodule_search_locations) is None:
            return
        places = list(places)


class PartFiles(MetaPathFinder):
    """The files of users that run in this process; finds their modules for Python."""

    def __init__(self) -> None:
        self.contents: dict[Path, bytes] = {}  # as they were when their digests were taken
        self._files: dict[str, Path] = {}  # module name -> file, of those that a part names
        self._loading: dict[Path, int] = {}  # file -> thread that imports it

    def load(self, file: Path, contents: Mapping[Path, bytes]) -> ModuleType:
        """Run a file as a module, unless it runs already with the same contents."""
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        package = self._package(str(file.parent))
        if any(self.contents.get(path) != content for path, content in contents.items()):
            for name, module in list(sys.modules.items()):
                module_file = getattr(module, "__file__", None)
                if name.startswith(f"{package}.") and module_file and Path(module_file) in contents:
                    parent, _, leaf = name.rpartition(".")
                    vars(sys.modules.get(parent, module)).pop(leaf, None)
                    del sys.modules[name]
            self.contents |= contents
        name = self.module_name(file)
        self._files[name], self._loading[file] = file, get_ident()
        try:
            return import_module(name)
        finally:
            self._loading.pop(file, None)

    def is_loading(self, file: Path) -> bool:
        """Return true while this thread imports a file."""
        return self._loading.get(file) == get_ident()

    @staticmethod
    def module_name(file: Path) -> str:
        """Return the name of a file's module."""
        folder = xxhash.xxh3_64_hexdigest(str(file.parent).encode())
        return f"{FOLDERS}{folder}.{file.stem.replace('.', ':')}"

    def _package(self, folder: str) -> str:
        """Return the package that stands for a folder."""
        name = self.module_name(Path(folder, "any")).rpartition(".")[0]
        if name not in sys.modules:
            package = ModuleType(name)
            package.__path__ = [folder]
            sys.modules[name] = package
            if folder not in sys.path:  # what is imported by its name as a text
                sys.path.append(folder)
        return name

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(FOLDERS) or path is None:
            return None
        if file := self._files.get(fullname):
            return spec_from_file_location(fullname, file, loader=_Source(self, str(file)))
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Source(self, str(spec.origin))
        return spec


class _Source(SourceLoader):
    """Runs the content whose digest was taken, and writes nothing beside the file."""

    def __init__(self, files: PartFiles, path: str) -> None:
        self._files, self._path = files, path

    def get_filename(self, fullname: str) -> str:
        return self._path

    def get_data(self, path: Any) -> bytes:
        content = self._files.contents.get(Path(path))
        return Path(path).read_bytes() if content is None else content

    def exec_module(self, module: ModuleType) -> None:
        package = module.__name__.partition(".")[0]
        overrides = {"__import__": partial(_import_beside, package)}
        vars(module)["__builtins__"] = vars(builtins) | overrides
        super().exec_module(module)


def _import_beside(
    package: str,
    name: str,
    globals: Mapping[str, Any] | None = None,
    locals: Mapping[str, Any] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> Any:
    """Import as a file of a package does: what lies in its folder before anything else."""
    top, folder = name.partition(".")[0], sys.modules[package].__path__[0]
    is_installed = str(getattr(sys.modules.get(top), "__file__", None)).startswith(PACKAGES)
    names = [name, *(f"{name}.{each}" for each in fromlist or ())]
    if (
        level
        or top in NOT_BESIDE
        or is_installed
        or not any(file for each in names for file in _files_of(each, folder))
    ):
        return __import__(name, globals, locals, fromlist or (), level)
    module = __import__(f"{package}.{name}", globals, locals, fromlist or ())
    return module if fromlist else sys.modules[f"{package}.{top}"]
