"""Many reads at once: the bytes of each, errors, ends of files, and where there are no queues."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from gear_offline.tables import read_queue
from gear_offline.tables.disk_files import (
    DIRECT_BYTES,
    DiskFile,
    Ranges,
    RangesRead,
    read_ranges,
)
from gear_offline.tables.huge_memory import huge_memory
from gear_offline.tables.read_queue import DEPTH, ReadQueue, open_queue
from tests.support import failing_code

SIZE = 50 * DIRECT_BYTES + 100
PAGES = [3, 0, 40, 7, 7]


@pytest.fixture
def queue() -> Iterator[ReadQueue]:
    found = open_queue()
    if found is None:
        pytest.skip("the kernel gives no queue here: allow io_setup, raise fs.aio-max-nr")
    yield found
    found.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    data = np.random.default_rng(0).integers(0, 256, SIZE, np.uint8)
    (tmp_path / "data").write_bytes(data.tobytes())
    return tmp_path / "data"


def ranges(pages: list[int], end: int | None = None) -> Ranges:
    """Return one page at each place of the file; the last one up to `end`."""
    begin = np.array(pages, np.int64) * DIRECT_BYTES
    stop = begin + DIRECT_BYTES
    if end is not None:
        stop[-1] = end
    place = np.arange(len(pages), dtype=np.int64) * DIRECT_BYTES
    return Ranges(file=np.zeros(len(pages), np.int64), begin=begin, end=stop, place=place)


def test_more_reads_than_the_queue_is_deep(queue: ReadQueue, path: Path) -> None:
    pages = np.random.default_rng(1).integers(0, 50, 5 * DEPTH + 3).tolist()
    buffer = huge_memory(len(pages) * DIRECT_BYTES)
    file = DiskFile(os.open(path, os.O_RDONLY), "data")
    assert file.direct, "the file system of the tests takes direct reads"
    assert read_ranges([file], ranges(pages), buffer, queue) == buffer.size
    data = np.frombuffer(path.read_bytes(), np.uint8)
    for number, page in enumerate(pages):
        expected = data[page * DIRECT_BYTES : (page + 1) * DIRECT_BYTES]
        assert np.array_equal(buffer[number * DIRECT_BYTES :][:DIRECT_BYTES], expected)
    file.close()


@pytest.mark.parametrize("queued", [True, False])
@pytest.mark.parametrize("direct", [True, False])
def test_the_end_of_a_file(queue: ReadQueue, path: Path, queued: bool, direct: bool) -> None:
    """The last page is partly there; what was asked for counts."""
    file = DiskFile(os.open(path, os.O_RDONLY), "data", direct=direct)
    buffer = huge_memory(10 * DIRECT_BYTES)
    used = queue if queued else None
    total = read_ranges([file], ranges([*PAGES, 50], SIZE), buffer, used)
    assert total == len(PAGES) * DIRECT_BYTES + 100
    assert buffer[:total][-100:].tobytes() == path.read_bytes()[-100:]
    late = ranges([*PAGES, 50], SIZE + 1)
    assert failing_code(lambda: read_ranges([file], late, buffer, used)) == "FILE_SIZE"
    beyond = ranges([*PAGES, 60])
    assert failing_code(lambda: read_ranges([file], beyond, buffer, used)) == "FILE_SIZE"
    file.close()


def test_a_refused_read_ends_the_call_when_nothing_is_under_way(
    queue: ReadQueue, path: Path
) -> None:
    file = DiskFile(os.open(path, os.O_RDONLY), "data")
    buffer = huge_memory(2 * DIRECT_BYTES)
    good = int(buffer.__array_interface__["data"][0])
    handles, pages = np.full(2, file.fileno()), np.full(2, DIRECT_BYTES)
    with pytest.raises(OSError, match="Bad address"):
        queue.read(handles, 0 * pages, pages, np.array([good, 1 << 60]))
    assert buffer[:DIRECT_BYTES].tobytes() == path.read_bytes()[:DIRECT_BYTES]
    file.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        queue.read(handles, 0 * pages, pages, np.array([good, good + DIRECT_BYTES]))


def test_what_the_call_refuses_is_read_the_other_way(
    queue: ReadQueue, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(ReadQueue, "begin", refuse)
    file = DiskFile(os.open(path, os.O_RDONLY), "data")
    buffer = huge_memory(len(PAGES) * DIRECT_BYTES)
    assert read_ranges([file], ranges(PAGES), buffer, queue) == buffer.size
    first = path.read_bytes()[3 * DIRECT_BYTES :][:DIRECT_BYTES]
    assert buffer[:DIRECT_BYTES].tobytes() == first
    file.close()


def test_the_memory_stays_until_what_was_begun_has_ended(queue: ReadQueue, path: Path) -> None:
    """Whether it is finished, dropped, or the queue is closed; and the queue can be used again."""
    pages = np.random.default_rng(2).integers(0, 50, 3 * DEPTH).tolist()
    file = DiskFile(os.open(path, os.O_RDONLY), "data")
    buffer = huge_memory(len(pages) * DIRECT_BYTES)
    begun = RangesRead([file], ranges(pages), buffer, queue)
    queue.drop()
    buffer[:] = 7
    assert begun.finish() == buffer.size, "what was dropped is read one by one"
    again = RangesRead([file], ranges(pages), buffer, queue)
    assert again.finish() == buffer.size
    data = path.read_bytes()
    for number, page in enumerate(pages):
        expected = data[page * DIRECT_BYTES : (page + 1) * DIRECT_BYTES]
        assert buffer[number * DIRECT_BYTES :][:DIRECT_BYTES].tobytes() == expected
    RangesRead([file], ranges(pages), buffer, queue)
    file.close()  # the fixture closes the queue


def test_where_there_are_no_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    class Sandbox:
        @staticmethod
        def syscall(*_: object) -> int:
            ctypes.set_errno(errno.ENOSYS)
            return -1

    monkeypatch.setattr(read_queue, "libc", Sandbox)
    assert open_queue() is None
    monkeypatch.undo()
    monkeypatch.setattr(platform, "machine", lambda: "s390x")
    assert open_queue() is None


def test_queues_of_several_threads(path: Path) -> None:
    data = np.frombuffer(path.read_bytes(), np.uint8)
    wrong = list[int]()

    def work(seed: int) -> None:
        queue = open_queue()
        file = DiskFile(os.open(path, os.O_RDONLY), "data")
        buffer = huge_memory(40 * DIRECT_BYTES)
        for _ in range(20):
            pages = np.random.default_rng(seed).integers(0, 50, 40).tolist()
            read_ranges([file], ranges(pages), buffer, queue)
            for number, page in enumerate(pages):
                expected = data[page * DIRECT_BYTES :][:DIRECT_BYTES]
                if not np.array_equal(buffer[number * DIRECT_BYTES :][:DIRECT_BYTES], expected):
                    wrong.append(page)
        file.close()
        if queue is not None:
            queue.close()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
