"""Files of servers: fetched into a cache, resumed after a break, refused if they change midway.

`read_range` reads a part of one and keeps nothing; whoever calls it knows the part's digest.
``https://`` and ``http://`` are read by urllib, other protocols by their packages for fsspec.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import os
import re
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from http.client import HTTPResponse
from pathlib import Path
from threading import Lock, Thread, local
from typing import Generic, NamedTuple, Protocol, TypeVar
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from gear_offline.core.address import check_address, hide_secrets
from gear_offline.core.files import check_new_file, sync_directory, turn_of, write_all, writing
from gear_offline.core.interruption import Aborted, StopRequest
from gear_offline.core.progress import Progress
from gear_offline.core.text import first_line, say, size_text
from gear_offline.errors import GearError, InputError, UnavailableError, without_secrets

TIMEOUT_SECONDS = 30.0  # without a byte of the server
BLOCK_BYTES = 8 << 20  # of a request for a range through fsspec
ATTEMPTS, WAIT_SECONDS = 4, 1.0  # to read a range; the wait after the first, and twice the last
LEAST_RATE = 64 << 10  # bytes a second of a range, after `TIMEOUT_SECONDS`
PATIENCE_SECONDS = 120.0  # with a package that tries again by itself
CACHE_VARIABLE = "GEAR_OFFLINE_CACHE"
TOLD_AFTER_SECONDS = 10.0
TURN_SECONDS = 0.1  # of waiting for what may come late
STOP_SECONDS = 1.0  # for a server's answer, once a stop is requested: a step may then be completed
VERSION_FACTS = "etag|hash|md5|sha|blob_id|generation|creat|modif|mtime|updated"  # of fsspec's info


S = TypeVar("S")
T = TypeVar("T")
_THREAD = local()


class NoRangesError(InputError):
    """A server that sends whole files alone."""


class Answer(Generic[T]):
    """The result of a call that another thread makes.  A Ctrl-C leaves no lock of it taken."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call, self._is_under_way, self.is_there = call, Lock(), False
        self._is_under_way.acquire()
        self._error: BaseException | None = None

    def make(self) -> None:
        """Make the call, in the other thread."""
        try:
            self._result = self._call()
        except BaseException as error:
            self._error = error
        self.is_there = True
        self._is_under_way.release()
        del self  # from a frame that an error refers to: a cycle would keep what the call has

    def wait(self, check: Callable[[], object] = bool) -> T:
        """Wait for the result and return it, or raise the call's error.

        In turns, with a `check` after each: a Ctrl-C just before a wait is seen only behind it.
        """
        while not self.is_there:
            if self._is_under_way.acquire(timeout=TURN_SECONDS):
                self._is_under_way.release()
            else:
                check()
        if self._error is not None:
            raise self._error
        return self._result


def leave_servers_if(has_ended: Callable[[], bool]) -> None:
    """Let this thread wait for no server once `has_ended` is true."""
    _THREAD.has_ended = has_ended


def map_in_threads(
    call: Callable[[S], T], items: Iterable[S], threads: int, name: str = "gear-request"
) -> Generator[T]:
    """Yield the results of calls, in order; no thread waits for a server once the caller fails."""
    has_ended, answers = False, deque([Answer(partial(call, item)) for item in items])
    waiting = answers.copy()

    def run() -> None:
        leave_servers_if(lambda: has_ended)
        with suppress(IndexError):
            while not has_ended:
                waiting.popleft().make()

    team = [Thread(target=run, daemon=True, name=name) for _ in range(min(threads, len(answers)))]
    try:
        for thread in team:
            thread.start()
        while answers:
            yield answers.popleft().wait()
    finally:
        has_ended = True
        for thread in team:
            while thread.is_alive():
                thread.join(TURN_SECONDS)


class Version(NamedTuple):
    """A server's facts of a file; another content has another version."""

    tag: str  # "": the server tells none
    size: int | None


class RemoteFile(Protocol):
    """A file of a server."""

    def look_up(self) -> Version:
        """Ask for the version."""

    def read(self, version: Version, offset: int) -> Iterator[bytes]:
        """Yield the bytes from `offset` on, in order; there is at least one."""

    def read_range(self, begin: int, end: int) -> Generator[bytes]:
        """Yield the bytes ``[begin, end)`` of any version, in order."""


def cache_folder(*key: object) -> Path:
    """Return the folder of the cache that belongs to a key."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    cache = os.environ.get(CACHE_VARIABLE) or f"{home}/gear_offline"
    return Path(cache).expanduser().absolute() / hashlib.sha256(repr(key).encode()).hexdigest()[:32]


def fetch_file(address: str, code: str, check: Callable[[Path], object] | None = None) -> Path:
    """Return the place in the cache of a file of a server, which is fetched if it is not there.

    The server is asked each time whether it changed.  `check` is that of `download`, `code` of
    errors; ``SOURCE_CHANGED``, ``PACKAGE_MISSING``, ``OUTPUT_WRITE``.
    """
    check_address(address, code)
    file, version = _look_up(address, code)
    name = re.sub(r"[\0/]", "_", unquote(hide_secrets(address).rpartition("/")[2]))
    key = cache_folder(hide_secrets(address), urlsplit(address).query, version)
    target = key / (name.strip(".") or "file")
    if not (version.tag and target.is_file()):
        download(address, target, code, check=check, looked_up=(file, version))
    return target


def download(
    address: str,
    target: Path,
    code: str,
    *,
    size: int | None = None,
    check: Callable[[Path], object] | None = None,
    looked_up: tuple[RemoteFile, Version] | None = None,
) -> None:
    """Fetch a file to `target`, which appears when it is complete and `check` has taken it.

    What was fetched before a break waits beside it under a hidden name.  The file must have `size`
    bytes (``DATASET_DAMAGED``), and without `check` the same version at the end as at first.
    """
    file, version = looked_up or _look_up(address, code)

    def check_size(actual: int | None) -> None:
        if None not in (size, actual) and size != actual:
            problem = f"the file has {actual} bytes, the manifest says {size}"
            remedy = "put the dataset on the server again"
            raise InputError("DATASET_DAMAGED", problem, address, remedy)

    check_size(version.size)
    with turn_of(target, quiet=False):
        check_new_file(target, overwrite=True)
        if version.tag and target.is_file():
            return  # another process has fetched it
        stem = f".{target.name}.fetched-"
        partial = target.with_name(stem + hashlib.sha256(repr(version).encode()).hexdigest()[:12])
        for leftover in target.parent.iterdir():
            is_other = leftover != partial or not version.tag
            if is_other and leftover.name.startswith(stem):
                leftover.unlink()
        try:
            _append(file, version, partial, address, code)
            check_size(partial.stat().st_size)
            if check is not None:
                check(partial)
            elif _look_up(address, code)[1] != version:
                raise _changed_error(address)
        except UnavailableError:  # it can go on from there
            raise
        except GearError:
            partial.unlink(missing_ok=True)
            raise
        with writing(target):
            partial.replace(target)
            sync_directory(target.parent)


def read_range(address: str, begin: int, end: int, code: str) -> bytearray:
    """Return the bytes ``[begin, end)`` of a file of a server; a failure is tried again.

    What refuses, or takes no ranges, is an `InputError` with `code` at once.
    """
    traffic = _TRAFFIC.setdefault(urlsplit(address).hostname, _Traffic())
    started, attempt = time.monotonic(), 0
    while attempt < ATTEMPTS and time.monotonic() < started + PATIENCE_SECONDS:
        attempt += 1
        try:
            with _server_errors(address, code):
                content = _wait_for(lambda: _read_range(_open(address), begin, end), end - begin)
            traffic.count(len(content), address)
            return content
        except UnavailableError as error:
            failure = error
        if attempt < ATTEMPTS:
            if not traffic.has_failed:
                say(f"warning: {failure.problem} ({failure.where}): trying up to {ATTEMPTS} times")
            traffic.has_failed = True
            time.sleep(WAIT_SECONDS * 2 ** (attempt - 1))
    problem = f"{failure.problem}, {attempt} times" if attempt > 1 else failure.problem
    raise UnavailableError(code, problem, failure.where, failure.remedy) from failure


def _read_range(file: RemoteFile, begin: int, end: int) -> bytearray:
    content, size, started = bytearray(), end - begin, time.monotonic()
    with closing(file.read_range(begin, end)) as blocks:
        for block in blocks:
            content += block
            seconds = time.monotonic() - started
            if seconds > TIMEOUT_SECONDS + len(content) / LEAST_RATE or len(content) > size:
                break
    if len(content) != size:
        took = f"in {time.monotonic() - started:.0f} seconds"
        raise OSError(f"it sent {len(content)} bytes for the {size} from byte {begin} on, {took}")
    return content


def _wait_for(call: Callable[[], T], nbytes: int = 0) -> T:
    """Return what a call returns, in time: in a thread of its own, which is left behind if not.

    `Aborted` once this thread's work has ended, or a stop is requested.
    """
    answer, started = Answer(call), time.monotonic()
    Thread(target=answer.make, daemon=True, name="server").start()
    seconds, has_ended = PATIENCE_SECONDS + nbytes / LEAST_RATE, getattr(_THREAD, "has_ended", bool)

    def check() -> None:
        if has_ended() or time.monotonic() - max(started, StopRequest.asked_at) > STOP_SECONDS:
            raise Aborted
        if time.monotonic() > started + seconds:
            raise TimeoutError(f"no answer in {seconds:.0f} seconds")

    return answer.wait(check)


class _Traffic:
    """The ranges that were read of a server, of which is told more and more seldom."""

    def __init__(self) -> None:
        self.has_failed, self._nbytes, self._told_after = False, 0, TOLD_AFTER_SECONDS
        self._began = time.monotonic()

    def count(self, nbytes: int, address: str) -> None:
        self._nbytes += nbytes
        if (seconds := time.monotonic() - self._began) > self._told_after:
            self._told_after = 2 * seconds
            say(f"{size_text(self._nbytes)} fetched in {seconds:.0f} seconds, now of {address}")


_TRAFFIC = dict[str | None, _Traffic]()


def _append(file: RemoteFile, version: Version, begun: Path, address: str, code: str) -> None:
    """Fetch what a partial file lacks; go on after a break as long as each attempt gets further."""
    name = hide_secrets(address).rpartition("/")[2]
    with ExitStack() as stack:
        with writing(begun):
            out = stack.enter_context(open(begun, "ab", buffering=0))
        begin, total = out.tell(), version.size or 0
        bar = Progress(f"download {name}", total=total, unit="bytes", done=begin)
        progress = stack.enter_context(bar)
        while version.size is None or out.tell() < version.size:
            begin = out.tell()
            try:
                with _server_errors(address, code):
                    blocks = file.read(version, begin)
                    while block := _wait_for(partial(next, blocks, b""), BLOCK_BYTES):
                        with writing(begun):
                            write_all(out.fileno(), block)
                        progress.advance(len(block))
                    if version.size not in (None, out.tell()):
                        raise OSError(f"it sent {out.tell()} of {version.size} bytes")
                break
            except UnavailableError:
                if out.tell() == begin or not version.tag:
                    raise
        with writing(begun):
            os.fsync(out.fileno())


def _look_up(address: str, code: str) -> tuple[RemoteFile, Version]:
    with _server_errors(address, code):
        file = _open(address)
        return file, _wait_for(file.look_up)


def _changed_error(address: str) -> InputError:
    problem = "the file changed on the server while it was fetched"
    return InputError("SOURCE_CHANGED", problem, address, "try again")


def _open(address: str) -> RemoteFile:
    return (_HttpFile if re.match("https?:", address, re.IGNORECASE) else _FsspecFile)(address)


class _HttpFile:
    """A file of a web server."""

    def __init__(self, address: str) -> None:
        parts = urlsplit(address)
        user, _, host = parts.netloc.rpartition("@")
        # blanks and letters of other alphabets, as browsers do
        path, query = (quote(text, safe="%/:?&=+;,$@!*'()[]~|") for text in parts[2:4])
        parts = parts._replace(netloc=host, path=path, query=query, fragment="")
        self._address = urlunsplit(parts)
        self._login = base64.b64encode(unquote(user).encode()).decode() if user else None

    def look_up(self) -> Version:
        with self._ask({}) as answer:  # not HEAD: signed addresses may allow GET alone
            return _version(answer)

    def read(self, version: Version, offset: int) -> Iterator[bytes]:
        with self._ask({"Range": f"bytes={offset}-"} if offset else {}) as answer:
            if _version(answer) != version:
                raise _changed_error(self._address)
            begin = int(re.findall(r"\d+", answer.headers["Content-Range"] or "0")[0])
            while begin < offset and (block := answer.read(min(offset - begin, 1 << 20))):
                begin += len(block)  # of a server without ranges
            if begin != offset:
                raise OSError(f"it sent the bytes from {begin} on, not from {offset}")
            while block := answer.read(1 << 20):
                yield block

    def read_range(self, begin: int, end: int) -> Generator[bytes]:
        with self._ask({"Range": f"bytes={begin}-{end - 1}"}) as answer:
            if answer.status != 206:
                problem = f"the server reads no ranges: it answers {answer.status} to one"
                remedy = "go.open_dataset(ADDRESS) fetches all once: leave `cache` out then, "
                remedy += "or use another server"
                raise NoRangesError("SOURCE_READ", problem, self._address, remedy)
            if not (answer.headers["Content-Range"] or "").lower().startswith(f"bytes {begin}-"):
                raise OSError(f"it sent {answer.headers['Content-Range']}, not from byte {begin}")
            while block := answer.read1(1 << 20):  # as it comes
                yield block

    def _ask(self, headers: dict[str, str]) -> HTTPResponse:
        request = urllib.request.Request(self._address, headers=headers)
        if self._login:  # not for a server that this one redirects to
            request.add_unredirected_header("Authorization", f"Basic {self._login}")
        answer: HTTPResponse = urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS)
        coding = answer.headers["Content-Encoding"] or "identity"
        keeps_packed = re.search(r"\.(t?gz|bz2|xz|zst|br|Z)$", urlsplit(self._address).path)
        if coding.lower() != "identity" and not keeps_packed:  # servers say so of a file.gz too
            answer.close()
            problem, where = f"the server sends it packed ({coding})", self._address
            remedy = f"put it there without Content-Encoding: {coding}, or fetch and unpack it"
            raise InputError("SOURCE_READ", problem, where, remedy)
        return answer


def _version(answer: HTTPResponse) -> Version:
    tag = answer.headers["ETag"] or answer.headers["Last-Modified"] or ""
    size = answer.headers["Content-Length"]
    if answer.status == 206:
        size = answer.headers["Content-Range"].rpartition("/")[2]
    return Version(tag, int(size) if size and size.isdecimal() else None)


class _FsspecFile:
    """A file of a file system of fsspec."""

    def __init__(self, address: str) -> None:
        from fsspec.core import url_to_fs

        self._files, self._path = url_to_fs(address)
        if not self._path.endswith(name := address.rpartition("/")[2]):
            problem = f"{type(self._files).__name__} reads {self._path} in place of {name}"
            raise InputError("SOURCE_READ", problem, address, "give it a name without ? and #")
        log = logging.getLogger(type(self._files).__module__.partition(".")[0])
        if not log.handlers:  # else Python prints what it logs: a traceback beside our error
            log.addHandler(logging.NullHandler())
        # others open a file for it, and would read megabytes ahead
        self._options = {} if self._files.async_impl else {"cache_type": "none"}

    def look_up(self) -> Version:
        self._files.invalidate_cache()
        facts = self._files.info(self._path)
        if facts["type"] != "file":
            raise FileNotFoundError(self._path)
        names = (name for name in facts if re.search(VERSION_FACTS, name, re.IGNORECASE))
        return Version(" ".join(f"{name}={facts[name]}" for name in sorted(names)), facts["size"])

    def read(self, version: Version, offset: int) -> Iterator[bytes]:
        for start in range(offset, version.size or 0, BLOCK_BYTES):
            stop = min(start + BLOCK_BYTES, version.size or 0)
            yield from self.read_range(start, stop)

    def read_range(self, begin: int, end: int) -> Generator[bytes]:
        yield self._files.cat_file(self._path, start=begin, end=end, **self._options)


def _status(error: Exception) -> int:
    """Return the status of HTTP that an error of some package holds, or 0."""
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", getattr(error, "code", 0))
    if reason := re.match("(Forbidden|Unauthorized)", str(error)):  # of gcsfs
        status = 403 if reason[1] == "Forbidden" else 401
    return status if isinstance(status, int) else 0


@contextmanager
def _server_errors(address: str, code: str) -> Iterator[None]:
    """Raise what a server, or a package that asks it, says as one error without secrets."""
    try:
        yield
    except GearError:
        raise
    except Exception as error:  # packages of fsspec have their own
        reason, where, status = first_line(error), address, _status(error)
        parts = urlsplit(address)
        for secret in filter(None, (parts.query, parts.netloc.rpartition("@")[0], parts.password)):
            reason = reason.replace(secret, "***")
        is_secret = not reason == first_line(error) == without_secrets(reason)  # or a redirect's
        if isinstance(error, urllib.error.HTTPError):
            error.close()  # it holds the connection
        found: GearError
        if status in (404, 410) or isinstance(error, FileNotFoundError):
            problem, remedy = "the server has no such file", "check the address"
            remedy += ": of a file, or of a folder with the manifest.json of GEAR shards"
            if parts.scheme == "hf":
                remedy += "; to see what is private, log in: hf auth login, or set HF_TOKEN"
            found = InputError(code, problem, where, remedy)
        elif status in (401, 403) or isinstance(error, PermissionError):
            remedy = "give an address that you may read, or log in as its package asks for"
            found = InputError(code, f"the server refuses: {reason}", where, remedy)
        elif status == 416:
            problem, remedy = "the file is shorter on the server", "put it there again, whole"
            found = InputError("SOURCE_CHANGED", problem, where, remedy)
        else:
            problem = f"the server does not answer as it should: {reason}"
            remedy = "check the network, then try again: it goes on where it broke off"
            found = UnavailableError("SOURCE_READ", problem, where, remedy)
        raise found from (None if is_secret else error)
