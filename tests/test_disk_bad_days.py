"""Rows that stay on disk, on bad days: changes, damage, errors of the disk, Ctrl-C."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gear_offline.dataset.dataset import Dataset, open_dataset
from gear_offline.loaders.loader import GearLoader
from gear_offline.tables.read_queue import Int64Array, ReadQueue
from gear_offline.tables.window_reader import WindowReader
from tests import disk_support
from tests.disk_support import LENGTHS, OPTIONS, on_disk
from tests.support import failing_code, make_dataset
from tests.test_loader import same, take


@pytest.fixture(autouse=True)
def small_and_clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    disk_support.little_of_everything(monkeypatch)
    with disk_support.nothing_is_left():
        yield


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return disk_support.several_shards(tmp_path_factory.mktemp("disk"))


def copied(tmp_path: Path, **options: Any) -> Dataset:
    return make_dataset(tmp_path, LENGTHS, shard_bytes=8192, **options)


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.write(b"\x01")


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def replace(path: Path) -> None:
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data)


@pytest.mark.parametrize("change", [overwrite, cut])
def test_a_shard_that_changes_in_use_is_refused(tmp_path: Path, change: Any) -> None:
    dataset = copied(tmp_path)
    with on_disk(dataset, **OPTIONS) as loader:
        take(loader, 3)
        for shard in dataset.manifest.shards:
            change(dataset.path / shard.name)
        codes = {failing_code(lambda: take(loader, 200)) for _ in range(2)}
        assert codes <= {"DATASET_CHANGED", "FILE_SIZE"} and len(codes) == 1
        assert failing_code(lambda: loader.batch_at(0)) in {"DATASET_CHANGED", "FILE_SIZE"}


@pytest.mark.parametrize("change", [overwrite, replace])
@pytest.mark.parametrize("verify", [True, False])
def test_a_shard_that_changed_since_it_was_opened_is_refused(
    tmp_path: Path, change: Any, verify: bool
) -> None:
    dataset = copied(tmp_path, verify=verify)
    loader = on_disk(dataset, **OPTIONS)
    change(dataset.path / dataset.manifest.shards[1].name)
    assert failing_code(lambda: take(loader, 200)) == "DATASET_CHANGED"
    loader.close()
    again = open_dataset(dataset.path, verify=False)
    if change is replace:
        with on_disk(again, **OPTIONS) as loader:
            take(loader, 20)


def test_damage_of_the_rewards_is_found_when_the_loader_is_made(tmp_path: Path) -> None:
    dataset = copied(tmp_path)
    shard = dataset.manifest.shards[0]
    tensor = next(t for t in dataset.manifest.tensors(shard) if t.name == "rewards")
    path = dataset.path / shard.name
    data = bytearray(path.read_bytes())
    data[shard.header_bytes + tensor.start] ^= 1
    path.write_bytes(data)
    assert failing_code(lambda: on_disk(dataset, **OPTIONS)) == "SHARD_DIGEST"


def refused(queue: ReadQueue, *_: Int64Array) -> Int64Array:
    """Answer as a disk that fails, whose reads were begun."""
    queue.drop()
    return np.full(1, -errno.EIO, np.int64)


def test_a_failing_disk_is_one_error_and_ends_the_threads(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = on_disk(dataset, more=10_000, **OPTIONS)
    take(loader, 2)

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    monkeypatch.setattr(ReadQueue, "finish", refused)
    loader.skip(1000)
    assert failing_code(lambda: next(loader)) == "DATASET_READ"
    assert failing_code(lambda: next(loader)) == "DATASET_READ"
    loader.close()
    loader.close()
    assert failing_code(lambda: next(loader)) == "LOADER_CLOSED"
    assert failing_code(lambda: loader.batch_at(0)) == "LOADER_CLOSED"


def test_a_dropped_loader_stops_and_its_batches_stay(dataset: Dataset) -> None:
    loader = on_disk(dataset, **OPTIONS)
    batch = next(loader)
    assert [t for t in threading.enumerate() if t.name.startswith("gear-disk")]
    del loader
    gc.collect()
    assert not [t for t in threading.enumerate() if t.name.startswith("gear-disk")]
    assert same(batch, GearLoader(dataset, **OPTIONS).batch_at(0))


def test_ctrl_c_while_waiting_for_the_disk(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = on_disk(dataset, **OPTIONS)
    held, real = threading.Event(), WindowReader.finish

    def slow(*arguments: Any) -> tuple[int, int]:
        held.wait(30)
        return real(*arguments)

    monkeypatch.setattr(WindowReader, "finish", slow)
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(0.3, lambda: signal.pthread_kill(main, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        next(loader)
    held.set()
    assert same(next(loader), GearLoader(dataset, **OPTIONS).batch_at(0)), "it goes on"
    loader.close()
    timer.join()


def test_asking_whether_the_loader_goes_on_takes_no_lock(dataset: Dataset) -> None:
    """Ctrl-C between taking it and the block that gives it back stopped the reading threads."""
    with on_disk(dataset, **OPTIONS) as loader, ThreadPoolExecutor(1) as pool:
        assert loader.disk is not None
        reader = loader.disk._reader
        with reader._changed:
            pool.submit(reader.check, ahead=True).result(10)


def test_a_forked_process_is_told_that_the_threads_stayed_behind(dataset: Dataset) -> None:
    """It waited for them without end."""
    code = (
        "import os, sys\n"
        "from gear_offline.errors import GearError\n"
        "from gear_offline.loaders.loader import GearLoader\n"
        "loader = GearLoader(sys.argv[1], batch_size=4, device='cpu', placement='disk',\n"
        "                    host_budget=8 << 20)\n"
        "if os.fork():\n"
        "    os.wait()\n"
        "else:\n"
        "    print('before', loader.step, next(loader).segments.shape, flush=True)\n"
        "    sys.exit()\n"
        "next(loader)\n"
        "if os.fork():\n"
        "    os.wait()\n"
        "    print('parent', loader.batch_at(1).states.equal(next(loader).states))\n"
        "else:\n"
        "    loader.skip()\n"
        "    try:\n"
        "        next(loader)\n"
        "    except GearError as error:\n"
        "        print(error.code, loader.batch_at(0).segments.shape, flush=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(dataset.path)], capture_output=True, timeout=60
    )
    size = b"torch.Size([4, 2])"
    wanted = b"before 0 " + size + b"\nLOADER_CLOSED " + size + b"\nparent True\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, wanted, b"")


def test_a_script_that_ends_in_the_middle_ends(dataset: Dataset) -> None:
    code = (
        "import sys; from gear_offline.loaders.loader import GearLoader\n"
        "loader = GearLoader(sys.argv[1], batch_size=4, device='cpu', placement='disk',\n"
        "                    host_budget=8 << 20)\n"
        "next(loader); print('done')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(dataset.path)], capture_output=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"done\n", b"")
