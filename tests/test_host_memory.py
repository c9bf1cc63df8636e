"""Host memory shared by real processes: private, and gone with them."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from gear_offline.core.system import available_bytes
from gear_offline.errors import GearError
from gear_offline.tables import host_memory as module
from gear_offline.tables.host_memory import HostBlock, HostHandle
from tests.support import failing_code

ROOT = Path(__file__).resolve().parents[1]
F4 = np.dtype(np.float32)
CREATE = """
import json, sys, time
import numpy as np
from gear_offline.tables.host_memory import HostBlock
block = HostBlock.create(1 << 20)
rows = block.allocate((1000, 4), np.dtype(np.float32))
rows[:] = np.arange(4000).reshape(1000, 4)
print(json.dumps(block.handle().to_json()), flush=True)
sys.stdin.readline()
print(float(rows[7, 3]), flush=True)
sys.stdin.readline()
"""
ATTACH = """
import json, sys
import numpy as np
from gear_offline.tables.host_memory import HostBlock, HostHandle
block = HostBlock.attach(HostHandle.from_json(json.loads(sys.argv[1])))
rows = block.allocate((1000, 4), np.dtype(np.float32))
print(float(rows.sum()))
"""


@contextmanager
def python(code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def say(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def test_processes_share_the_same_pages_until_the_last_is_gone() -> None:
    with python(CREATE) as owner:
        text = line(owner)
        handle = HostHandle.from_json(json.loads(text))
        with python(ATTACH, text) as other:
            assert float(line(other)) == sum(range(4000))
        block = HostBlock.attach(handle)
        rows = block.allocate((1000, 4), F4)
        rows[7, 3] = -5  # the owner sees it: one copy
        say(owner)
        assert float(line(owner)) == -5
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        assert rows[999, 3] == 3999  # still here, through us alone
        with pytest.raises(GearError) as caught:
            HostBlock.attach(handle)
        assert caught.value.code == "HOST_ATTACH" and str(handle.process) in str(caught.value)


def test_nothing_is_left_in_the_file_system() -> None:
    before = set(os.listdir("/dev/shm"))
    with python(CREATE) as owner:
        handle = HostHandle.from_json(json.loads(line(owner)))
        path = f"/proc/{owner.pid}/fd/{handle.descriptor}"
        assert os.readlink(path) == "/memfd:gear-table (deleted)"
        assert os.stat(path).st_mode & 0o777 == 0o600
        assert set(os.listdir("/dev/shm")) <= before
        owner.kill()
        owner.wait()
        assert not os.path.exists(path)


def test_a_descriptor_over_a_socket() -> None:
    block = HostBlock.create(10_000)
    block.allocate((3,), F4)[:] = [1, 2, 3]
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        socket.send_fds(ours, [b"x"], [block.fileno()])
        _, (descriptor,), _, _ = socket.recv_fds(theirs, 1, 1)
    attached = HostBlock.from_descriptor(descriptor)
    assert attached.nbytes == block.nbytes == 3 * 4096
    assert attached.allocate((3,), F4).tolist() == [1, 2, 3]


def test_only_our_blocks_are_attached(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(8192))
    descriptor = os.open(tmp_path / "file", os.O_RDWR)
    assert failing_code(lambda: HostBlock.from_descriptor(descriptor)) == "HOST_ATTACH"
    block = HostBlock.create(4096)
    handle = block.handle()
    other = HostHandle.from_json({**handle.to_json(), "inode": handle.inode + 1})
    assert failing_code(lambda: HostBlock.attach(other)) == "HOST_ATTACH"
    with pytest.raises(OSError):
        os.ftruncate(block.fileno(), 0)


def test_arrays_begin_at_pages_and_outlive_the_block() -> None:
    block = HostBlock.create(4096 + 8192)
    small, large = block.allocate((3, 1), F4), block.allocate((1025,), F4)
    assert small.ctypes.data % 4096 == large.ctypes.data % 4096 == 0
    assert large.ctypes.data - small.ctypes.data == 4096
    assert failing_code(lambda: block.allocate((1,), F4)) == "HOST_MEMORY"
    large[:] = 7
    block.close()
    block.close()
    assert large.sum() == 7 * 1025


@pytest.mark.parametrize("advice", [module.MADV_POPULATE_WRITE, 9999])
def test_populating_takes_the_memory_and_keeps_the_content(
    advice: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MADV_POPULATE_WRITE", advice)  # an old kernel knows no 9999
    monkeypatch.setattr(module, "POPULATE_BYTES", 1 << 20)
    block = HostBlock.create(5 << 20)
    rows = block.allocate((1 << 20,), F4)
    rows[5] = 3
    block.populate(threads=2)
    assert os.fstat(block.fileno()).st_blocks * 512 == 5 << 20
    assert rows[5] == 3 and rows.sum() == 3


def test_too_much_is_refused_before_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < available_bytes() < 1 << 46
    with pytest.raises(GearError) as caught:
        HostBlock.create(1 << 50)
    assert caught.value.code == "HOST_MEMORY"
    assert "1024.0 TiB" in str(caught.value) and "available" in str(caught.value)

    def refuse(name: str, flags: int) -> int:
        raise OSError(38, "not here")

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert failing_code(lambda: HostBlock.create(1)) == "HOST_SHARED"


def test_writing_through_the_file_is_seen_in_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    block = HostBlock.create(1 << 20)
    block.allocate((1,), F4)
    rows = block.allocate((40_000, 4), F4)
    part = rows[3:39_000]  # begins and ends inside pages
    assert block.place(rows) == 4096 and block.place(part) == 4096 + 48
    assert module.block_of(part) is block
    assert module.block_of(np.zeros(4, np.float32)) is None
    values = np.random.default_rng(0).normal(size=part.shape).astype(np.float32)
    rows[0], rows[39_500] = 7, 8
    real = os.pwrite

    def short(descriptor: int, data: memoryview, offset: int) -> int:
        return real(descriptor, data[: max(len(data) // 2, 1)], offset)

    monkeypatch.setattr(os, "pwrite", short)
    module.write_through(block, part, values)
    assert (part == values).all()
    assert (rows[0] == 7).all() and (rows[39_500] == 8).all()
    assert not rows[1:3].any() and not rows[39_000:39_500].any() and not rows[39_501:].any()

    def full(descriptor: int, data: memoryview, offset: int) -> int:
        raise OSError(errno.ENOSPC, "no")

    monkeypatch.setattr(os, "pwrite", full)
    assert failing_code(lambda: module.write_through(block, part, values)) == "HOST_MEMORY"
    block.close()
    assert module.block_of(part) is None


def test_touching_takes_the_pages_inside_an_array_and_keeps_their_content() -> None:
    block = HostBlock.create(1 << 20)
    rows = block.allocate((1 << 18,), F4)
    rows[5000] = 3  # takes one page, in the middle
    assert module.touch(rows[1000:9000])  # pages 1 to 7 lie wholly in these
    assert os.fstat(block.fileno()).st_blocks * 512 == 7 * 4096
    assert module.touch(rows[1:5])  # no whole page
    assert rows.sum() == rows[5000] == 3
