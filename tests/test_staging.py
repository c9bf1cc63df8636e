"""Where conversions write: targets, failing disks, live neighbours.

Kills at any point, of workers too: tests/trust/kill_convert.py.
"""

import errno
import fcntl
import os
import resource
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy.typing as npt
import pytest

from gear_offline.core.files import new_directory, open_regular, read_at, read_regular
from gear_offline.core.system import available_bytes
from gear_offline.data.convert.conversion import convert
from gear_offline.data.dataset.dataset import open_dataset
from gear_offline.data.dataset.manifest import MANIFEST_NAME
from gear_offline.errors import GearError
from tests.support import (
    ArraySource,
    contents,
    failing_code,
    hopper_columns,
    make_dataset,
    run_python,
    write_hdf5,
)
from tests.test_convert import LENGTHS, STEPS, source


def test_existing_targets(tmp_path: Path) -> None:
    first = make_dataset(tmp_path, [3, 4], seed=1)
    before = contents(first.path)
    again = lambda: convert(source(), first.path, quiet=True)  # noqa: E731
    assert failing_code(again) == "OUTPUT_EXISTS"
    assert contents(first.path) == before
    convert(source(), first.path, overwrite=True, quiet=True)
    assert open_dataset(first.path).spec.steps == STEPS
    (tmp_path / "empty").mkdir()
    convert(source(), tmp_path / "empty", quiet=True)
    assert sorted(os.listdir(tmp_path)) == ["dataset", "empty"]


def test_what_is_no_dataset_is_not_overwritten(tmp_path: Path) -> None:
    mine = ["file", "folder/notes.txt", "dataset/notes.txt", f"app/{MANIFEST_NAME}"]
    make_dataset(tmp_path, [3])
    for name in mine:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"name": "mine"}')
    before = sorted(tmp_path.rglob("*"))
    refused = {tmp_path / name.partition("/")[0]: "OUTPUT_EXISTS" for name in mine}
    refused |= {Path("/"): "OUTPUT_EXISTS", Path("/proc/d"): "OUTPUT_WRITE"}
    refused |= {tmp_path / "file" / "d": "OUTPUT_WRITE", tmp_path / ("x" * 250): "OUTPUT_WRITE"}
    for target, code in refused.items():
        call = lambda t=target: convert(source(), t, overwrite=True, quiet=True)  # noqa: E731
        assert failing_code(call) == code, target
    assert sorted(tmp_path.rglob("*")) == before
    assert all((tmp_path / name).read_text() == '{"name": "mine"}' for name in mine)


def test_a_link_as_target_keeps_pointing(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "d")
    convert(source(), tmp_path / "link", quiet=True)
    convert(source(seed=1), tmp_path / "link", overwrite=True, quiet=True)
    assert (tmp_path / "link").is_symlink()
    assert os.listdir(tmp_path / "disk") == ["d"]


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()])
def test_an_overwrite_that_ends_between_its_two_renames_keeps_the_old_dataset(
    tmp_path: Path, monkeypatch: Any, error: BaseException
) -> None:
    first = make_dataset(tmp_path, [3, 4], seed=1)
    before, rename = contents(first.path), os.rename

    def failing(old: Path, new: Path) -> None:
        if "gear-part" in Path(old).name:
            raise error
        rename(old, new)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises((GearError, KeyboardInterrupt)):
        convert(source(), first.path, overwrite=True, quiet=True)
    assert contents(first.path) == before and os.listdir(tmp_path) == ["dataset"]


@pytest.mark.parametrize("call", ["pwrite", "fsync"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_disk_errors(tmp_path: Path, monkeypatch: Any, call: str, number: int) -> None:
    def fail(*values: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, fail)
    assert failing_code(lambda: convert(source(), tmp_path / "d", quiet=True)) == "OUTPUT_WRITE"
    monkeypatch.undo()
    assert os.listdir(tmp_path) == []


def test_a_real_file_size_limit(tmp_path: Path) -> None:
    """The kernel refuses to write more: one error, nothing left, also with workers."""
    path = write_hdf5(tmp_path / "x.hdf5")
    script = (
        "import sys\nfrom pathlib import Path\nfrom gear_offline import convert\n"
        "from gear_offline.errors import GearError\n"
        "try:\n    convert(sys.argv[1], Path(sys.argv[2]), shard_bytes=30_000, quiet=True,"
        " workers=int(sys.argv[3]))\nexcept GearError as error:\n    print(error.code)\n"
    )
    for workers in ("1", "2"):
        limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (9_000, 9_000))
        found = run_python("-c", script, path, tmp_path / "d", workers, preexec_fn=limit)
        assert found.stdout.split() == ["OUTPUT_WRITE"]
        assert os.listdir(tmp_path) == ["x.hdf5"]


def test_an_old_dataset_caught_between_two_renames_is_put_back(tmp_path: Path) -> None:
    path = make_dataset(tmp_path, [3, 4]).path
    before = contents(path)
    path.rename(tmp_path / ".dataset.gear-old-0123456789ab")
    (tmp_path / ".dataset.gear-part-0123456789ab").mkdir()
    assert failing_code(lambda: convert(source(), path, quiet=True)) == "OUTPUT_EXISTS"
    assert contents(path) == before and os.listdir(tmp_path) == ["dataset"]


class Paused(ArraySource):
    """A source that waits in its first read until it is told to go on."""

    def __init__(self, *values: Any) -> None:
        super().__init__(*values)
        self.reading, self.go_on = threading.Event(), threading.Event()

    def read(self, column: str, start: int, stop: int) -> npt.NDArray[Any]:
        self.reading.set()
        assert self.go_on.wait(30), "nobody let the source go on"
        return super().read(column, start, stop)


def test_what_appears_at_the_target_meanwhile_is_kept(tmp_path: Path) -> None:
    paused = Paused(hopper_columns(STEPS), LENGTHS)
    codes: list[str] = []
    thread = threading.Thread(
        target=lambda: codes.append(
            failing_code(lambda: convert(paused, tmp_path / "d", quiet=True))
        )
    )
    thread.start()
    assert paused.reading.wait(30)
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "mine").write_text("x")
    paused.go_on.set()
    thread.join(30)
    assert codes == ["OUTPUT_EXISTS"]
    assert os.listdir(tmp_path / "d") == ["mine"] and os.listdir(tmp_path) == ["d"]


# files from outside, and memory ----------------------------------------------------------------


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
