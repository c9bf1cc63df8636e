"""Files that a function of the user's reads, of formats that nobody else knows.

A reader gets the path and yields episodes, as `gear_offline.from_episodes` takes them.  They wait
in temporary files, a column each, so memory holds one episode.  The manifest has the digests of
the files that were read and of the file in which the reader stands.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from gear_offline.core.files import writing
from gear_offline.core.parts import Kind, bare_name, digest_of, is_part
from gear_offline.core.text import first_line
from gear_offline.core.types import Array
from gear_offline.data.dataset.shard import byte_view
from gear_offline.data.sources.arrays import SAME, Columns, read_episodes
from gear_offline.data.sources.base import Piece, Source, SourceInfo, SourceRequest
from gear_offline.data.sources.columns import Kinds, common_columns, row_kinds
from gear_offline.data.sources.edit import find_function
from gear_offline.data.sources.flags import FLAGS
from gear_offline.data.sources.input_files import InputFile, misfit
from gear_offline.errors import GearError, InputError

READERS = Kind(
    noun="reader",
    group="readers",
    option="--reader",
    code="USAGE",
    own={"padded": "gear_offline.data.sources.padded:read_padded"},
)
READER, YIELDED = "reader", "yielded"  # facts in the manifest: its name, digest of what it gave
NO_READER = "no reader"
REMEDY = "yield a dict of columns for each episode, as go.from_episodes takes them"

EpisodeReader = Callable[[Path], Iterable[Mapping[str, Any]]]


def open_by_reader(reader: str | EpisodeReader, path: Path, request: SourceRequest) -> Source:
    """Open a file or folder by a reader, or ``FILE.py:function`` that names one."""
    if request.rule:
        problem, remedy = "--rule and --ends are not for a reader", "yield whole episodes"
        raise InputError("USAGE", problem, remedy=f"{remedy} and a flag")
    if flags := [flag for flag, old in request.names.items() if flag in FLAGS and flag != old]:
        problem = f"a reader's ends are read before columns are renamed: {flags[0]}"
        raise InputError("USAGE", problem, remedy="let the reader yield it under that name")
    function, origin = find_function(reader, READERS)
    inside = sorted(path.rglob("*")) if path.is_dir() else [path]
    for link in (p for p in inside if p.is_symlink() and not p.is_file()):
        problem = "a link to a folder, or to nothing: the manifest would not have its files"
        raise InputError("SOURCE_READ", problem, str(link), "put the files themselves there")
    paths = [p for p in inside if p.is_file()]
    files = tuple(InputFile.find(file) for file in paths)
    spool = _Spool()
    try:
        episodes = _call(function, path)
        lengths, terminated, notes = read_episodes(episodes, store=spool.add)
        content = spool.digest_with(np.asarray(lengths, np.int64), terminated)
        info = SourceInfo(
            uri=request.uri,
            format="reader",
            rule="episodes",
            files=files,
            attributes={READER: origin, YIELDED: content},
        )
        source = _Spooled(spool, lengths, terminated, info)
    except BaseException:
        spool.close()
        raise
    source.warn(*notes)
    return source


def name_reader(name: str | None) -> str:
    """Return a reader as the manifest names it: with the digest of its file as that is now."""
    content = digest_of(name) if name is not None and is_part(name) else ""
    return ", ".join(filter(None, [Path(name or NO_READER).name, content]))


def is_same_reader(name: str | None, recorded: str) -> bool:
    """Return true if a reader is the one that a manifest names, and has not changed since.

    Its file may have moved, or be gone.
    """
    before, now = (text.partition(", ") for text in (recorded, name_reader(name)))
    return bare_name(before[0]) == bare_name(now[0]) and now[2] in ("", before[2])


def _call(reader: EpisodeReader, path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield what a reader yields; whatever it raises becomes one error."""
    count = 0
    try:
        for episode in reader(path):
            yield episode
            count += 1
    except GearError:
        raise
    except (Exception, SystemExit) as error:  # whatever a user's function raises
        problem = f"the reader raised {type(error).__name__}: {first_line(error)}"
        where = f"{path.name}, after {count:,} episodes"
        raise InputError("USAGE", problem, where, f"{REMEDY}; see --debug") from error
    if not count:
        raise misfit("the reader yielded no episode", path, REMEDY)


class _Spool:
    """Columns of episodes that came one after the other, in temporary files."""

    def __init__(self) -> None:
        self.kinds: Kinds = {}
        self._files: dict[str, Any] = {}
        self._hash = xxhash.xxh3_128()
        self._count = 0
        self._stack = ExitStack()

    def add(self, columns: Columns) -> int:
        """Append an episode; return its steps."""
        with writing(Path(tempfile.gettempdir())):
            return self._add(columns)

    def _add(self, columns: Columns) -> int:
        kinds = row_kinds(columns)
        if not self._files:
            self.kinds = kinds
            for name in kinds:
                file = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the stack
                self._files[name] = self._stack.enter_context(file)
        tables = [("episode 0", self.kinds), (f"episode {self._count}", kinds)]
        common_columns(tables, remedy=SAME)
        for name, rows in columns.items():
            data = byte_view(np.ascontiguousarray(rows, self.kinds[name][0]))
            self._hash.update(data)
            self._files[name].write(data)
            self._files[name].flush()
        self._count += 1
        return len(next(iter(columns.values())))

    def read(self, name: str, start: int, stop: int) -> Array:
        dtype, shape = self.kinds[name]
        offset = start * prod(shape) * dtype.itemsize
        # of its own, since other threads may read the same file
        rows = np.memmap(self._files[name], dtype, "r", offset, (stop - start, *shape))
        return np.array(rows)

    def digest_with(self, *ends: Array) -> str:
        """Return the digest of all columns and of the ends of their episodes."""
        for values in ends:
            self._hash.update(byte_view(values))
        return f"xxh3-128:{self._hash.hexdigest()}"

    def close(self) -> None:
        self._stack.close()


class _Spooled(Source):
    """Episodes in temporary files, which go when it is closed."""

    def __init__(self, spool: _Spool, lengths: list[int], terminated: Array, info: SourceInfo):
        piece = Piece(read=spool.read, steps=sum(lengths))
        super().__init__([piece], spool.kinds, lengths=lengths, terminated=terminated, info=info)
        self._spool = spool

    def close(self) -> None:
        self._spool.close()
