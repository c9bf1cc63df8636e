"""Rows that stay on disk: the same bits as from memory, within a budget, whatever the disk does."""

import errno
import gc
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from gear_offline.batches.tables import disk, window_reader
from gear_offline.data.dataset.dataset import Dataset, open_dataset
from gear_offline.errors import GearError, InputError
from gear_offline.kernels.gather import CpuGather
from gear_offline.loaders import rows as rows_module
from gear_offline.loaders.loader import GearLoader
from gear_offline.loaders.rows import DiskRows, MemoryRows
from tests.forks import run_forked
from tests.support import Captured, Patch, failing_code, hopper_columns, make_dataset
from tests.test_gather import random_column
from tests.test_loader import same, take

LENGTHS = [30, 1, 7, 55, 20, 3] * 8
OPTIONS: dict[str, Any] = {"batch_size": 8, "context_length": 9, "device": "cpu", "gamma": 0.9}


@pytest.fixture(autouse=True)
def small_and_clean(monkeypatch: Patch) -> Iterator[None]:
    """Chunks of a few steps, nothing kept in memory whole; no thread and no descriptor is left."""
    monkeypatch.setattr(disk, "CHUNK_BYTES", 1024)
    monkeypatch.setattr(disk, "COPY_BYTES", 1024)
    monkeypatch.setattr(disk, "RESIDENT_SHARE", 1 << 60)
    monkeypatch.setattr(window_reader, "GAP_BYTES", 2 * window_reader.PAGE_BYTES)
    monkeypatch.setattr(window_reader, "COPY_BYTES", 1024)
    monkeypatch.setattr(window_reader, "SLICE_BYTES", 500)
    before = open_files()
    yield
    gc.collect()
    assert not [t.name for t in threading.enumerate() if t.name.startswith("gear-")]
    assert open_files() <= before


def open_files() -> set[str]:
    links = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    names = {os.readlink(link) for link in links if link.is_symlink()}
    return {name for name in names if name.startswith("/") and not name.startswith("/dev/")}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    columns = hopper_columns(sum(LENGTHS), seed=3)
    columns["infos/qpos"] = np.random.default_rng(0).normal(size=(sum(LENGTHS), 6))
    return make_dataset(tmp_path_factory.mktemp("disk"), LENGTHS, columns=columns, shard_bytes=8192)


def least_budget(dataset: Dataset, **options: Any) -> int:
    """Return the smallest budget that is taken, from the message of one that is not."""
    with pytest.raises(InputError, match="too small") as caught:
        GearLoader(dataset, placement="disk", host_budget=1, **options)
    found = re.search(r"at least (\d+) bytes", caught.value.remedy)
    assert caught.value.code == "LOADER_OPTION" and found is not None
    return int(found[1])


def on_disk(dataset: Dataset, *, more: int = 0, **options: Any) -> GearLoader:
    """Return a loader with as little memory as there can be, and `more` bytes."""
    budget = least_budget(dataset, **options) + more
    loader = GearLoader(dataset, placement="disk", host_budget=budget, **options)
    assert sum(group.rows.nbytes for group in loader.rows.memory.groups) <= budget
    return loader


def short_reads(monkeypatch: Patch) -> None:
    """Answer as a network file system may: without direct reads, and with fewer bytes."""
    real, generator = os.preadv, np.random.default_rng(0)

    def preadv(handle: int, buffers: Any, offset: int) -> int:
        (buffer,) = buffers
        return real(handle, [buffer[: int(generator.integers(1, len(buffer) + 1))]], offset)

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(window_reader, "_read_directly", lambda handle: None)


FRAMES = ((4, 5), np.uint8)
KINDS = [((3,), d) for d in (np.float16, np.float32, np.float64, np.int64, np.uint8)]


@settings(max_examples=10, phases=[Phase.explicit, Phase.generate])
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=25),
    context_length=st.integers(1, 30),
    batch_size=st.integers(1, 9),
    padding=st.sampled_from(["right", "left"]),
    states=st.sampled_from([*KINDS, *2 * [FRAMES], ((), np.float32), ((300,), np.float32)]),
    actions=st.sampled_from([((2,), np.float32), ((), np.int8), ((2,), np.float64)]),
    extra=st.sampled_from([None, np.float64, np.bool_, np.complex64, np.uint16]),
    gamma=st.sampled_from([1.0, 0.97, 0.0]),
    normalize=st.booleans(),
    shard_bytes=st.sampled_from([300, 3000, 1 << 20]),
    more=st.sampled_from([0, 3000, 100_000, 10_000_000]),
    resident=st.booleans(),
    stack=st.sampled_from([1, 1, 2, 4]),
    selection=st.sampled_from(["uniform_steps", "uniform_episodes"]),
    disk_kind=st.sampled_from(["direct", "short reads"]),
    seed=st.integers(0, 2**64 - 1),
    moves=st.lists(st.integers(0, 40) | st.just(1000), max_size=6),
)
def test_bits_equal_those_from_memory(
    lengths: list[int], batch_size: int, states: Any, actions: Any, extra: Any, normalize: bool,
    shard_bytes: int, more: int, resident: bool, stack: int, disk_kind: str, seed: int,
    moves: list[int], **options: Any,
) -> None:  # fmt: skip
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
    options["frame_stack"] = stack if states[0] == (4, 5) else 1
    options["normalize_states"] = normalize and states[0] != (4, 5)
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        if disk_kind == "short reads":
            short_reads(patch)
        if resident:
            patch.setattr(disk, "RESIDENT_SHARE", 1)
        made = make_dataset(Path(name), lengths, columns=columns, shard_bytes=shard_bytes)
        memory = GearLoader(made, **options)
        with on_disk(made, more=more, **options) as loader:
            for wanted, steps in ((0, 12), *((move, 3) for move in moves)):
                for each in (loader, memory):
                    each.skip(wanted - each.step)
                for _ in range(steps):
                    assert same(next(loader), next(memory))
                assert same(loader.batch_at(3), memory.batch_at(3))
            state = loader.state_dict()
            assert state == memory.state_dict(), "a state goes from one tier to another"
            following = next(loader)
            loader.load_state_dict(state)
            assert same(next(loader), following)


def test_more_memory_reads_less(tmp_path: Path, monkeypatch: Patch) -> None:
    made, real, counts = make_dataset(tmp_path, [500] * 20), os.preadv, list[int]()
    monkeypatch.setattr(disk, "CHUNK_BYTES", 8 << 20)

    def preadv(*arguments: Any) -> int:
        counts.append(real(*arguments))
        return counts[-1]

    monkeypatch.setattr(os, "preadv", preadv)
    read_bytes = []
    for more in (0, 2_000_000):
        with on_disk(made, more=more, **OPTIONS) as loader:
            counts.clear()
            take(loader, 150)
        read_bytes.append(sum(counts))
    least, ample = read_bytes
    assert least > 2 * ample > 0


@pytest.mark.parametrize(
    "options",
    [
        *({"host_budget": budget} for budget in (0, -1, 2.5, "much", True)),
        {"placement": "tape"},
        {"engine": "on"},
        {"selection": "prioritized"},
        {"selection": "d3rlpy"},
    ],
)
def test_what_cannot_be_is_refused_before_the_dataset_is_read(
    dataset: Dataset, options: dict[str, Any], monkeypatch: Patch
) -> None:
    monkeypatch.setattr(Dataset, "verify", lambda self: pytest.fail("it was read"))
    opened = open_dataset(dataset.path, verify=False)
    chosen: dict[str, Any] = {"placement": "disk", "host_budget": 4 << 20, **OPTIONS, **options}
    code = failing_code(lambda: GearLoader(opened, **chosen))
    assert code in ("LOADER_OPTION", "ENGINE_OFF", "DEVICE")


def test_auto_goes_to_disk_where_memory_is_short(
    tmp_path: Path, monkeypatch: Patch, capsys: Captured
) -> None:
    made = make_dataset(tmp_path, [500] * 20)
    small = least_budget(made, **OPTIONS)
    large = GearLoader(made, host_budget="1GiB", **OPTIONS)
    assert isinstance(large.rows, MemoryRows) and not capsys.readouterr().err
    with GearLoader(made, host_budget=small, **OPTIONS) as loader:
        assert isinstance(loader.rows, DiskRows)
    line = capsys.readouterr().err
    assert "placement auto: the rows stay on disk, since they take" in line
    assert "are the budget" in line and line.count("\n") == 1
    monkeypatch.setattr(rows_module, "RESERVE_BYTES", 0)
    needed = sum(group.rows.nbytes for group in large.rows.memory.groups)
    expected = large.batch_at(0)
    monkeypatch.setattr(rows_module, "available_bytes", lambda: needed - 16384)
    assert GearLoader(made, **OPTIONS).rows.memory is large.rows.memory, "they are there"
    del large
    gc.collect()
    monkeypatch.setattr(rows_module, "available_bytes", lambda: needed + 16384)
    assert isinstance(GearLoader(made, **OPTIONS).rows, MemoryRows)
    monkeypatch.setattr(rows_module, "available_bytes", lambda: needed - 16384)
    assert isinstance(GearLoader(made, placement="host", **OPTIONS).rows, MemoryRows)
    assert not capsys.readouterr().err
    with GearLoader(made, **OPTIONS) as loader:
        assert same(next(loader), expected)
    assert "are available" in capsys.readouterr().err


def overwrite(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100] + bytes(100))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def replace(path: Path) -> None:
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data)


@pytest.mark.parametrize("change", [overwrite, cut])
@pytest.mark.parametrize(("verify", "used"), [(True, 0), (True, 3), (False, 0), (False, 3)])
@pytest.mark.parametrize("while_read", [False, True])
def test_a_shard_that_changes_after_it_was_opened_is_refused(
    tmp_path: Path, monkeypatch: Patch, change: Callable[[Path], None], verify: bool,
    used: int, while_read: bool,
) -> None:  # fmt: skip
    made, read = make_dataset(tmp_path, LENGTHS, shard_bytes=8192, verify=verify), os.preadv

    def change_all(*arguments: Any) -> int:
        for shard in made.manifest.shards[1:]:
            change(made.path / shard.name)
        return read(*arguments) if arguments else 0

    with on_disk(made, **OPTIONS) as loader:
        take(loader, used)
        if while_read:
            monkeypatch.setattr(os, "preadv", change_all)
        else:
            change_all()
        for call in (lambda: take(loader, 200), lambda: take(loader, 1)):
            assert failing_code(call) == "DATASET_DAMAGED"
        assert failing_code(lambda: loader.batch_at(0)) == "DATASET_DAMAGED"


@pytest.mark.parametrize("while_read", [False, True])
def test_a_shard_that_is_touched_is_compared_again(
    tmp_path: Path, monkeypatch: Patch, while_read: bool
) -> None:
    """By chmod, touch, a backup of hard links, or an equal file in its place."""
    made, read = make_dataset(tmp_path, LENGTHS, shard_bytes=8192), os.preadv

    def touch_all(*arguments: Any) -> int:
        monkeypatch.undo()
        for number, shard in enumerate(made.manifest.shards):
            path = made.path / shard.name
            os.chmod(path, 0o640)
            os.utime(path)
            os.link(path, tmp_path / f"backup-{number}")
            if number % 2:
                replace(path)
        return read(*arguments) if arguments else 0

    with on_disk(made, **OPTIONS) as loader, on_disk(made, **OPTIONS) as other:
        before = [other.batch_at(step) for step in range(3)]
        if while_read:
            monkeypatch.setattr(os, "preadv", touch_all)
        else:
            touch_all()
        assert all(same(next(loader), batch) for batch in before)
    assert np.array_equal(made.read("rewards", 0, made.spec.steps), made.column("rewards"))


def test_a_relative_path_outlives_a_change_of_the_working_directory(
    dataset: Dataset, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.chdir(dataset.path.parent)
    name = dataset.path.name
    opened = open_dataset(name, verify=False)
    with GearLoader(opened, placement="disk", **OPTIONS) as loader:
        late = open_dataset(name, verify=False)
        monkeypatch.chdir(tmp_path)
        with GearLoader(dataset, placement="host", **OPTIONS) as memory:
            assert all(map(same, take(loader, 3), take(memory, 3)))
        np.testing.assert_array_equal(late.column("rewards"), dataset.column("rewards"))
        assert late.verify().name == name, "messages have what the user wrote"
        assert repr(loader).startswith(f"GearLoader({name!r}: ")


@pytest.mark.parametrize("column", ["observations", "rewards"])
def test_damage_is_found_when_the_loader_is_made(tmp_path: Path, column: str) -> None:
    """However the dataset was opened: no byte of a damaged block reaches a batch."""
    made = make_dataset(tmp_path, LENGTHS, shard_bytes=8192)
    shard = made.manifest.shards[0]
    tensor = next(t for t in made.manifest.tensors(shard) if t.name == column)
    data = bytearray((path := made.path / shard.name).read_bytes())
    data[shard.header_bytes + tensor.start] ^= 1
    path.write_bytes(data)
    opened = open_dataset(made.path, verify=False)
    assert failing_code(lambda: on_disk(opened, **OPTIONS)) == "DATASET_DAMAGED"


def test_a_failing_disk_is_one_error_and_ends_the_threads(
    dataset: Dataset, monkeypatch: Patch
) -> None:
    loader = on_disk(dataset, more=10_000, **OPTIONS)
    take(loader, 2)

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    loader.skip(1000)
    for _ in range(2):
        with pytest.raises(GearError, match="Input/output error"):
            next(loader)
    loader.close()
    loader.close()
    assert failing_code(lambda: next(loader)) == "LOADER_STATE"
    assert failing_code(lambda: loader.batch_at(0)) == "LOADER_STATE"


def test_a_dropped_loader_stops_and_its_batches_stay(dataset: Dataset) -> None:
    loader = on_disk(dataset, **OPTIONS)
    batch = next(loader)
    assert [t for t in threading.enumerate() if t.name.startswith("gear-disk")]
    del loader
    gc.collect()
    assert not [t for t in threading.enumerate() if t.name.startswith("gear-disk")]
    assert same(batch, GearLoader(dataset, **OPTIONS).batch_at(0))


def test_ctrl_c_while_waiting_for_the_disk(dataset: Dataset, monkeypatch: Patch) -> None:
    held, real = threading.Event(), window_reader.WindowReader.read

    def slow(*arguments: Any) -> None:
        held.wait(30)
        real(*arguments)

    monkeypatch.setattr(window_reader.WindowReader, "read", slow)
    loader = on_disk(dataset, **OPTIONS)
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


def test_an_interruption_while_a_thread_starts_costs_nothing(
    dataset: Dataset, monkeypatch: Patch
) -> None:
    start, expected = threading.Thread.start, take(GearLoader(dataset, **OPTIONS), 30)
    for number in range(6):
        started = count()

        def interrupted(thread: threading.Thread) -> None:
            start(thread)
            if next(started) == number:  # noqa: B023
                raise KeyboardInterrupt

        with on_disk(dataset, **OPTIONS) as loader, monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", interrupted)
            for batch in expected:
                try:
                    ours = next(loader)
                except KeyboardInterrupt:
                    ours = next(loader)
                assert same(ours, batch)


def test_ctrl_c_anywhere_in_a_batch_costs_nothing(dataset: Dataset) -> None:
    left, before = 0, sys.gettrace()

    def interrupt(frame: object, event: str, argument: object) -> Any:
        nonlocal left
        left -= event in ("call", "return")  # where Python looks for signals
        if left == 0 and event != "line":
            raise KeyboardInterrupt
        return interrupt

    options = OPTIONS | {"batch_size": 300}  # which are gathered one by one
    with on_disk(dataset, **options) as loader, GearLoader(dataset, **options) as memory:
        next(loader)  # Python's own start of a thread is another matter
        for number in range(1, 120):
            left, step = number, loader.step
            sys.settrace(interrupt)
            try:
                batch = next(loader)
            except KeyboardInterrupt:
                continue
            finally:
                sys.settrace(before)
            assert same(batch, memory.batch_at(step))
        assert same(next(loader), memory.batch_at(loader.step - 1))


def test_close_waits_for_batches_that_are_gathered_ahead(
    dataset: Dataset, monkeypatch: Patch
) -> None:
    gather = CpuGather.gather

    def slow(*arguments: Any) -> Any:
        time.sleep(0.1)
        return gather(*arguments)

    monkeypatch.setattr(CpuGather, "gather", slow)
    loader = on_disk(dataset, **OPTIONS)
    next(loader)
    time.sleep(0.05)  # the next ones are there, and their gather sleeps
    loader.close()
    assert not [t.name for t in threading.enumerate() if t.name.startswith("gear-")]


FORKED = """
import os, sys
from gear_offline.errors import GearError
from gear_offline.loaders.loader import GearLoader
loader = GearLoader(sys.argv[1], batch_size=4, device='cpu', placement='disk', host_budget=8 << 20)
if os.fork():
    os.wait()
else:
    print('before', loader.step, next(loader).segments.shape, flush=True)
    sys.exit()
next(loader)
if os.fork():
    os.wait()
    print('parent', loader.batch_at(1).states.equal(next(loader).states))
else:
    loader.skip()
    try:
        next(loader)
    except GearError as error:
        print(error.code, loader.batch_at(0).segments.shape, flush=True)
"""


def test_a_forked_process_is_told_that_the_threads_stayed_behind(
    dataset: Dataset, tmp_path: Path
) -> None:
    """It waited for them without end; and a script that ends in the middle ends."""
    (script := tmp_path / "forked.py").write_text(FORKED)
    done = run_forked(script, dataset.path)
    size = "torch.Size([4, 2])"
    wanted = f"before 0 {size}\nLOADER_STATE {size}\nparent True\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, wanted, "")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="run on a machine with a CUDA device")
def test_cuda_batches_have_the_same_bits(dataset: Dataset, capsys: Captured) -> None:
    options = OPTIONS | {"device": "cuda"}
    with on_disk(dataset, more=100_000, **options) as loader:
        assert loader.engine is None and "page-locked" in capsys.readouterr().err
        for step, batch in enumerate(take(loader, 30)):
            assert batch.device.type == "cuda"
            assert same(GearLoader(dataset, **OPTIONS).batch_at(step), batch.to("cpu"))
    with pytest.raises(InputError, match="placement='disk'"):
        GearLoader(dataset, placement="disk", engine="on", **options)
