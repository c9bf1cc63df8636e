"""Opens a foreign file in a process that may die of it, before this process opens it.

HDF5's own parser can be made to loop for ever by one changed byte (docs/reliability.md), and bugs
of its memory handling are found every year.  A child with bounded memory and processor time opens
the source and reads a little of every column; only what it survives is opened here.  The child
guards against hangs, crashes and exhausted memory.  It is not a sandbox: it may call what this
process may call, and this process then parses the same bytes.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from gear_offline.core.processes import die_with_parent, interrupts_kept_from_children
from gear_offline.errors import GearError, InputError, UnavailableError

MEMORY_BYTES = 2 << 30  # of address space, beyond what the process has already
SECONDS = 3  # of processor time for a file of any size ...
BYTES_PER_SECOND = 1 << 20  # ... and one more for each so many bytes of it
FILES_PER_SECOND = 20  # ... or files, of a folder, or of episodes that Minari stores apart
Opening = tuple[str, str | None, dict[str, str]]  # what `open_source` gets: uri, rule, names
_KINDS = {kind.__name__: kind for kind in (GearError, InputError, UnavailableError)}
_REMEDY = "the file is damaged or made to do harm: get it again from a place that you trust"


def check_source(
    uri: str | Path, *, rule: str | None = None, names: Mapping[str, str] | None = None
) -> None:
    """Open `uri` in a confined child and read the ends of every column.

    Parameters
    ----------
    uri, rule, names
        As `gear_offline.sources.open_source` takes them; a ``d4rl:`` name is downloaded first.

    Raises
    ------
    GearError
        What `open_source` and reading raise; also ``SOURCE_READ`` when the child crashed, or
        used up its memory or its time.
    """
    text = str(uri.absolute()) if isinstance(uri, Path) else uri
    size, files = _source_size(text)
    seconds = SECONDS + size // BYTES_PER_SECOND + files // FILES_PER_SECOND
    opening: Opening = (text, rule, dict(names or {}))
    # A fork takes milliseconds; beside other threads, which may hold locks, it takes a new process.
    # So it does where libraries of the system do not survive a fork, as those of macOS.
    forks = threading.active_count() == 1 and sys.platform == "linux"
    status, reply = (_forked if forks else _spawned)(opening, seconds)
    if reply:
        kind, code, what, where, remedy = json.loads(reply)
        raise _KINDS[kind](code, what, where=where, remedy=remedy)
    if status == 0:
        return
    what = "reading it failed in a confined process"
    if status < 0:
        name = signal.Signals(-status).name
        what = f"reading it ended a confined process with {name}"
        if -status in (signal.SIGXCPU, signal.SIGKILL):
            what = f"reading it takes more than {seconds} s of processor time"
    raise InputError("SOURCE_READ", what, where=text, remedy=_REMEDY)


def _parts(uri: str) -> Sequence[str | Path]:
    """Return the files of a folder of HDF5 files; nothing for any other source."""
    from gear_offline.sources.folder import hdf5_files
    from gear_offline.sources.minari_metadata import data_directory
    from gear_offline.sources.shards import is_dataset

    path = Path(uri)
    with suppress(OSError, ValueError):
        if path.is_dir() and data_directory(path) is None and not is_dataset(path):
            return hdf5_files(path)
    return []


def _source_size(uri: str) -> tuple[int, int]:
    """Return the bytes of the files of a source, and how many files a directory has."""
    scheme, _, name = uri.partition(":")
    path = Path(uri)
    with suppress(OSError, ValueError, GearError):
        if scheme == "d4rl" and name:
            from gear_offline.sources.d4rl_files import locate

            path = locate(name)
        elif scheme == "minari" and name:
            from gear_offline.sources.minari_metadata import find_directory

            path = find_directory(name)
        if path.is_dir():
            sizes = [file.stat().st_size for file in path.rglob("*") if file.is_file()]
            return sum(sizes), len(sizes)
        return path.stat().st_size, 1
    return 0, 0


def _forked(opening: Opening, seconds: int) -> tuple[int, bytes]:
    reader, writer = os.pipe()
    parent = os.getpid()
    with warnings.catch_warnings():
        # Python 3.12 warns of threads of C libraries; those hold no lock of what runs here.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            die_with_parent(parent)
            _probe(opening, seconds, writer)
        finally:
            os._exit(1)
    os.close(writer)
    status = None
    try:
        with os.fdopen(reader, "rb") as pipe:
            reply = pipe.read()
        status = os.waitpid(child, 0)[1]
    finally:
        if status is None:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), reply


def _spawned(opening: Opening, seconds: int) -> tuple[int, bytes]:
    request = json.dumps([opening, seconds, os.getpid()])
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    with interrupts_kept_from_children():
        started = subprocess.Popen(
            # Safe path: a file named like one of our modules where we work is not imported.
            [sys.executable, "-P", "-m", "gear_offline.sources.confined", request],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
    with started as process:
        try:
            reply = process.communicate()[0]
        finally:
            process.kill()
    return process.returncode, reply


def _probe(opening: Opening, seconds: int, reply: int) -> None:
    """Open and read in this process, under limits, and end it; errors go to `reply` as JSON."""
    from gear_offline.sources import open_source

    with open(os.devnull, "r+b") as nothing:
        for number in (1, 2):  # what libraries print is of no use to the user
            os.dup2(nothing.fileno(), number)
    _confine(seconds)
    code = 0
    try:
        uri, rule, names = opening
        for part in _parts(uri) or [uri]:
            with open_source(part, rule=rule, names=names) as source:
                steps = source.spec.steps
                for column in source.spec:
                    rows = min(source.preferred_rows(column.name), steps)
                    source.read(column.name, 0, rows)
                    source.read(column.name, max(rows, steps - rows), steps)
    except GearError as error:
        found = [type(error).__name__, error.code, error.what, error.where, error.remedy]
        os.write(reply, json.dumps(found).encode())
    except MemoryError:
        what = f"reading it takes more than {MEMORY_BYTES >> 30} GiB of memory"
        os.write(
            reply, json.dumps(["InputError", "SOURCE_READ", what, opening[0], _REMEDY]).encode()
        )
    except Exception:
        code = 0  # a defect of ours: the parent meets it again and shows it
    os._exit(code)


def _confine(seconds: int) -> None:
    """Limit memory and processor time of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    spent = int(used.ru_utime + used.ru_stime)
    _lower(resource.RLIMIT_CPU, spent + seconds)
    _lower(resource.RLIMIT_CORE, 0)
    with suppress(OSError, ValueError, IndexError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        _lower(resource.RLIMIT_AS, pages * resource.getpagesize() + MEMORY_BYTES)


def _lower(which: int, limit: int) -> None:
    hard = resource.getrlimit(which)[1]
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(which, (limit, limit if which != resource.RLIMIT_CPU else limit + 1))


def main() -> None:
    """Probe the source that the one argument describes."""
    (uri, rule, names), seconds, parent = json.loads(sys.argv[1])
    die_with_parent(parent)
    _probe((uri, rule, names), seconds, os.dup(1))


if __name__ == "__main__":
    main()
