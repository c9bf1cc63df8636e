"""Rows that stay on disk: the same bits as from memory, whatever the budget, and bad days."""

from __future__ import annotations

import errno
import gc
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from gear_offline import disk_files, disk_reader, disk_table
from gear_offline.dataset import Dataset, open_dataset
from gear_offline.errors import GearError, InputError
from gear_offline.loaders import disk_choice
from gear_offline.loaders.loader import GearLoader
from gear_offline.world import World
from tests.support import failing_code, hopper_columns, make_dataset
from tests.test_gather import random_column
from tests.test_loader import same, take

LENGTHS = [30, 1, 7, 55, 20, 3] * 8


@pytest.fixture(autouse=True)
def little_of_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a few steps, reads that are split, nothing kept in memory whole."""
    monkeypatch.setattr(disk_table, "CHUNK_BYTES", 1024)
    monkeypatch.setattr(disk_table, "READ_BYTES", 64)
    monkeypatch.setattr(disk_table, "COPY_BYTES", 1024)
    monkeypatch.setattr(disk_table, "RESIDENT_SHARE", 1 << 60)
    monkeypatch.setattr(disk_reader, "GAP_BYTES", 256)
    monkeypatch.setattr(disk_reader, "COPY_BYTES", 1024)
    monkeypatch.setattr(disk_reader, "SINGLE_BYTES", 500)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No thread and no descriptor outlives the loaders of a test."""
    before = _open_files()
    yield
    gc.collect()
    assert not [t.name for t in threading.enumerate() if t.name.startswith("gear-")]
    assert _open_files() <= before


def _open_files() -> set[str]:
    links = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return {os.readlink(link) for link in links if link.is_symlink()}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    columns = hopper_columns(sum(LENGTHS), seed=3)
    columns["infos/qpos"] = np.random.default_rng(0).normal(size=(sum(LENGTHS), 6))
    path = tmp_path_factory.mktemp("disk")
    return make_dataset(path, LENGTHS, columns=columns, shard_bytes=8192)


def least_budget(dataset: Dataset, **options: Any) -> int:
    """Return the smallest budget that is taken, from the message of one that is not."""
    with pytest.raises(InputError, match="too small") as caught:
        GearLoader(dataset, placement="disk", host_budget=1, **options)
    assert caught.value.code == "HOST_BUDGET"
    found = re.search(r"at least (\d+) bytes", caught.value.remedy)
    assert found is not None
    return int(found[1])


def on_disk(dataset: Dataset, *, more: int = 0, **options: Any) -> GearLoader:
    """Return a loader with as little memory as there can be, and `more` bytes."""
    budget = least_budget(dataset, **options) + more
    return GearLoader(dataset, placement="disk", host_budget=budget, **options)


KINDS = [((3,), d) for d in (np.float16, np.float32, np.float64, np.int64, np.uint8)]


@settings(
    max_examples=30,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=25),
    context_length=st.integers(1, 30),
    batch_size=st.integers(1, 9),
    padding=st.sampled_from(["right", "left"]),
    states=st.sampled_from([*KINDS, ((4, 5), np.uint8), ((), np.float32), ((300,), np.float32)]),
    actions=st.sampled_from([((2,), np.float32), ((), np.int8), ((2,), np.float64)]),
    extra=st.sampled_from([None, np.float64, np.bool_, np.complex64, np.uint16]),
    gamma=st.sampled_from([1.0, 0.97, 0.0]),
    normalize=st.booleans(),
    shard_bytes=st.sampled_from([300, 3000, 1 << 20]),
    more=st.sampled_from([0, 3000, 100_000, 10_000_000]),
    resident=st.booleans(),
    selection=st.sampled_from(["uniform_steps", "uniform_episodes"]),
    seed=st.integers(0, 2**64 - 1),
)
def test_bits_equal_those_from_memory(
    lengths: list[int],
    batch_size: int,
    states: Any,
    actions: Any,
    extra: Any,
    normalize: bool,
    shard_bytes: int,
    more: int,
    resident: bool,
    seed: int,
    **options: Any,
) -> None:
    generator = np.random.default_rng(seed)
    steps = sum(lengths)
    columns = {
        "observations": random_column(states[1], (steps, *states[0]), generator),
        "actions": random_column(actions[1], (steps, *actions[0]), generator),
        "rewards": random_column(np.float32, (steps,), generator),
    }
    if extra is not None:
        columns["infos/x"] = generator.integers(0, 2, (steps, 2)).astype(extra)
        options["extra_columns"] = ["infos/x"]
    options |= {"batch_size": batch_size, "device": "cpu", "seed": seed}
    options["normalize_states"] = normalize and states[0] != (4, 5)
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        if resident:
            patch.setattr(disk_table, "RESIDENT_SHARE", 1)
        found = make_dataset(Path(name), lengths, columns=columns, shard_bytes=shard_bytes)
        expected = take(GearLoader(found, **options), 24)
        with on_disk(found, more=more, **options) as loader:
            for one, other in zip(expected, loader, strict=False):
                assert same(one, other)
            assert same(loader.batch_at(3), expected[3])


OPTIONS: dict[str, Any] = {"batch_size": 8, "context_length": 9, "device": "cpu", "gamma": 0.9}


def test_position_moves_as_with_a_table(dataset: Dataset) -> None:
    memory = GearLoader(dataset, **OPTIONS)
    with on_disk(dataset, more=20_000, **OPTIONS) as loader:
        for skipped in (0, 1, 0, 3, 0, 0, 500, 2):
            loader.skip(skipped)
            memory.skip(skipped)
            assert same(next(loader), next(memory)) and loader.step == memory.step
        state = loader.state_dict()
        assert state == memory.state_dict(), "a state goes from one tier to another"
        later = take(loader, 30)
        loader.load_state_dict(state)
        for one, other in zip(later, take(loader, 30), strict=True):
            assert same(one, other)
        loader.load_state_dict(state | {"step": 0})
        assert same(next(loader), memory.batch_at(0))


def test_little_memory_forces_windows_out_and_more_reads_less(dataset: Dataset) -> None:
    counts = []
    for more in (0, 400_000):
        with on_disk(dataset, more=more, **OPTIONS) as loader:
            assert loader.disk is not None and loader.table.owned_bytes > 0
            take(loader, 400)
            counts.append(loader.disk.counts())
    least, ample = counts
    assert least.windows == ample.windows >= 3200
    assert least.read_bytes > 2 * ample.read_bytes > 0
    assert least.window_bytes == ample.window_bytes


def test_ranks_share_each_batch(dataset: Dataset) -> None:
    whole = GearLoader(dataset, **OPTIONS).batch_at(5)
    parts = []
    for rank in (0, 1):
        world = World(rank=rank, nodes=(0, 0))
        with GearLoader(
            dataset, world=world, placement="disk", host_budget=4 << 20, **OPTIONS
        ) as loader:
            loader.skip(5)
            parts.append(next(loader))
    for rank, part in enumerate(parts):
        assert part.segments.tolist() == whole.segments[4 * rank : 4 * rank + 4].tolist()
        assert part.states.equal(whole.states[4 * rank : 4 * rank + 4])


@pytest.mark.parametrize("padding", ["right", "left"])
def test_without_direct_reads_and_with_few_open_files(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch, padding: Any
) -> None:
    monkeypatch.setattr(disk_files, "_make_direct", lambda handle: False)
    monkeypatch.setattr(disk_files, "MAX_OPEN", 1)
    expected = take(GearLoader(dataset, padding=padding, **OPTIONS), 20)
    with on_disk(dataset, padding=padding, **OPTIONS) as loader:
        assert all(same(a, b) for a, b in zip(expected, take(loader, 20), strict=True))


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


def test_a_failing_disk_is_one_error_and_ends_the_threads(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = on_disk(dataset, more=10_000, **OPTIONS)
    take(loader, 2)

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
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
    held, real = threading.Event(), os.preadv

    def slow(*arguments: Any) -> int:
        held.wait(30)
        return real(*arguments)

    monkeypatch.setattr(os, "preadv", slow)
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


@pytest.mark.parametrize("budget", [0, -1, 2.5, "4 GiB", True])
def test_odd_budgets_are_refused(dataset: Dataset, budget: Any) -> None:
    call = lambda: GearLoader(dataset, placement="disk", host_budget=budget, **OPTIONS)  # noqa: E731
    assert failing_code(call) == "HOST_BUDGET"


def test_the_least_budget_is_the_least(dataset: Dataset) -> None:
    least = least_budget(dataset, **OPTIONS)
    GearLoader(dataset, placement="disk", host_budget=least, **OPTIONS).close()
    with pytest.raises(InputError, match="too small"):
        GearLoader(dataset, placement="disk", host_budget=least - 8192, **OPTIONS)
    assert least_budget(dataset, **(OPTIONS | {"batch_size": 80})) > least


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"mode": "mmap"}, "LAYOUT"),
        ({"layout": "records"}, "LAYOUT"),
        ({"placement": "tape"}, "PLACEMENT"),
        ({"extra_columns": ["nothing"]}, "COLUMN_MISSING"),
    ],
)
def test_options_that_do_not_go_together(
    dataset: Dataset, options: dict[str, Any], code: str
) -> None:
    given = {"placement": "disk", "host_budget": 4 << 20} | OPTIONS | options
    assert failing_code(lambda: GearLoader(dataset, **given)) == code


def test_auto_goes_to_disk_where_memory_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = make_dataset(tmp_path, [500] * 20)
    small = least_budget(dataset, **OPTIONS)
    large = GearLoader(dataset, host_budget=1 << 30, **OPTIONS)
    assert large.disk is None and not capsys.readouterr().err
    with GearLoader(dataset, host_budget=small, **OPTIONS) as loader:
        assert loader.disk is not None
    line = capsys.readouterr().err
    assert "placement auto: the rows stay on disk, since they take" in line
    assert "are the budget" in line and line.count("\n") == 1
    monkeypatch.setattr(disk_choice, "RESERVE_BYTES", 0)
    needed = large.table.owned_bytes
    monkeypatch.setattr(disk_choice, "available_bytes", lambda: needed + 16384)
    assert GearLoader(dataset, **OPTIONS).disk is None
    monkeypatch.setattr(disk_choice, "available_bytes", lambda: needed - 16384)
    assert GearLoader(dataset, placement="host", **OPTIONS).disk is None
    assert GearLoader(dataset, mode="mmap", **OPTIONS).disk is None
    assert not capsys.readouterr().err
    with GearLoader(dataset, **OPTIONS) as loader:
        assert loader.disk is not None
        assert same(next(loader), large.batch_at(0))
    assert "are available" in capsys.readouterr().err


def test_no_place_for_the_returns(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    missing = tmp_path / "gone"
    assert failing_code(lambda: disk_files.scratch_file(missing)) == "DISK_SCRATCH"
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    os.close(disk_files.scratch_file(missing))
    assert list(tmp_path.iterdir()) == [], "the file has no name"

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(GearError, match="the disk is full") as caught:
        on_disk(dataset, **OPTIONS)
    assert caught.value.code == "DISK_SCRATCH"


MEMORY = """
import itertools, sys
from pathlib import Path
from gear_offline.loaders.loader import GearLoader

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(l for l in lines if l.startswith("VmHWM")).split()[1]) * 1024

def use(path, budget):
    loader = GearLoader(path, batch_size=32, context_length=20, device="cpu", placement="disk",
                        host_budget=budget)
    for _ in itertools.islice(loader, 2 * loader.disk.sizes.slots // 32):
        pass
    loader.close()
    return loader.disk.sizes.slots

use(sys.argv[1], 8 << 20)
before = peak()
slots = use(sys.argv[2], int(sys.argv[3]))
print(slots, peak() - before)
"""


def test_memory_stays_within_the_budget(tmp_path: Path, dataset: Dataset) -> None:
    """Of a process: its peak over that of the same process with a small table before."""
    large = make_dataset(tmp_path, [500] * 1000, state_dim=40, shard_bytes=8 << 20, verify=False)
    budget = 40 << 20
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(dataset.path), str(large.path), str(budget)],
        capture_output=True,
        timeout=250,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr.decode()
    slots, grown = map(int, done.stdout.split())
    assert 0.5 * budget < slots * 20 * 4 * (40 + 3 + 2) < budget
    assert grown < 1.05 * budget
