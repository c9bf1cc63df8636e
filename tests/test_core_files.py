"""Files from outside, and files and directories that appear whole or not at all."""

import errno
import fcntl
import os
from pathlib import Path

import pytest

from gear_offline.core.files import new_directory, open_regular, read_at, read_regular
from gear_offline.core.system import available_bytes

TOKEN = "0123456789ab"


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abcdef")
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "fifo")
    for bad in (tmp_path / "fifo", tmp_path, Path("/dev/zero")):
        with pytest.raises(OSError, match="regular"):
            open_regular(bad)
    with pytest.raises(OSError) as caught:
        open_regular(tmp_path / "link", links=False)
    assert caught.value.errno == errno.ELOOP
    assert read_regular(tmp_path / "link", most=6) == b"abcdef"
    with pytest.raises(ValueError, match="more than 5"):
        read_regular(tmp_path / "file", most=5)
    handle, buffer = open_regular(tmp_path / "file"), bytearray(4)
    assert read_at(handle, memoryview(buffer), 1) == 4 and buffer == b"bcde"
    assert read_at(handle, memoryview(buffer), 4) == 2 and buffer[:2] == b"ef"
    os.close(handle)


def test_only_our_own_leftovers_of_the_dead_are_removed(tmp_path: Path) -> None:
    dead, alive = (tmp_path / f".out.gear-part-{token}" for token in (TOKEN, TOKEN[::-1]))
    named = tmp_path / ".out.gear-part-mine"
    for folder in (dead, alive, named):
        folder.mkdir()
        (folder / "file").write_text("x")
    (tmp_path / ".out.gear-part-000000000000").symlink_to(named)
    (tmp_path / ".out.gear-part-x").write_text("a file does not block the place")
    lock = os.open(alive, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with new_directory(tmp_path / "out"):
        pass
    os.close(lock)
    assert not dead.exists() and alive.exists() and (named / "file").exists()
    assert (tmp_path / ".out.gear-part-x").exists()


def test_limits_of_nested_cgroups_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = tmp_path / "job" / "step"
    group.mkdir(parents=True)
    for place, limit in ((tmp_path, "max"), (tmp_path / "job", "5000000"), (group, "max")):
        (place / "memory.max").write_text(f"{limit}\n")
        (place / "memory.current").write_text("2000000\n")
        (place / "memory.stat").write_text("anon 1\ninactive_file 300000\nactive_file 200000\n")
    own = tmp_path / "cgroup"
    own.write_text("0::/job/step\n")
    monkeypatch.setattr("gear_offline.core.system._CGROUPS", tmp_path)
    assert available_bytes() > 5_000_000
    monkeypatch.setattr("gear_offline.core.system._OWN_CGROUP", own)
    assert available_bytes() == 5_000_000 - (2_000_000 - 500_000)
