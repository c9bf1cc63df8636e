"""Rows that stay on disk: the same bits as from memory, whatever the budget; options, memory."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from gear_offline.dataset.dataset import Dataset
from gear_offline.distributed.world import World
from gear_offline.errors import GearError, InputError
from gear_offline.loaders import disk_choice
from gear_offline.loaders.loader import GearLoader
from gear_offline.tables import disk_files, disk_sizes, window_reader
from tests import disk_support
from tests.disk_support import OPTIONS, least_budget, on_disk
from tests.support import failing_code, make_dataset
from tests.test_gather import random_column
from tests.test_loader import same, take


@pytest.fixture(autouse=True)
def small_and_clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    disk_support.little_of_everything(monkeypatch)
    with disk_support.nothing_is_left():
        yield


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return disk_support.several_shards(tmp_path_factory.mktemp("disk"))


FRAMES = ((4, 5), np.uint8)
KINDS = [((3,), d) for d in (np.float16, np.float32, np.float64, np.int64, np.uint8)]


@settings(
    max_examples=20,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
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
    stack: int,
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
    options["frame_stack"] = stack if states[0] == (4, 5) else 1
    options["normalize_states"] = normalize and states[0] != (4, 5)
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        if seed % 3 == 0:  # a sandbox that lacks the calls
            patch.setattr(window_reader, "open_queue", lambda: None)
        if resident:
            patch.setattr(disk_sizes, "RESIDENT_SHARE", 1)
        found = make_dataset(Path(name), lengths, columns=columns, shard_bytes=shard_bytes)
        expected = take(GearLoader(found, **options), 24)
        with on_disk(found, more=more, **options) as loader:
            for one, other in zip(expected, loader, strict=False):
                assert same(one, other)
            assert same(loader.batch_at(3), expected[3])


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


@pytest.mark.parametrize("budget", [0, -1, 2.5, "4 GiB", True])
def test_odd_budgets_are_refused(dataset: Dataset, budget: Any) -> None:
    call = lambda: GearLoader(dataset, placement="disk", host_budget=budget, **OPTIONS)  # noqa: E731
    assert failing_code(call) == "HOST_BUDGET"


def test_the_least_budget_is_the_least(dataset: Dataset) -> None:
    least = least_budget(dataset, **OPTIONS)
    numpy_ = np.int64(least)
    GearLoader(dataset, placement="disk", host_budget=numpy_, **OPTIONS).close()  # type: ignore[arg-type]
    with pytest.raises(InputError, match="too small"):
        GearLoader(dataset, placement="disk", host_budget=least - 8192, **OPTIONS)
    assert least_budget(dataset, **(OPTIONS | {"batch_size": 80})) > least


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"placement": "tape"}, "PLACEMENT"),
        ({"extra_columns": ["nothing"]}, "COLUMN_MISSING"),
    ],
)
def test_options_that_do_not_go_together(
    dataset: Dataset, options: dict[str, Any], code: str
) -> None:
    given: dict[str, Any] = {"placement": "disk", "host_budget": 4 << 20, **OPTIONS, **options}
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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="run on a machine with a CUDA device")
def test_cuda_batches_have_the_same_bits(
    dataset: Dataset, capsys: pytest.CaptureFixture[str]
) -> None:
    options = OPTIONS | {"device": "cuda"}
    with on_disk(dataset, more=100_000, **options) as loader:
        assert loader.engine is None and "page-locked" in capsys.readouterr().err
        for step, batch in enumerate(take(loader, 30)):
            assert batch.device.type == "cuda"
            assert same(GearLoader(dataset, **OPTIONS).batch_at(step), batch.to("cpu"))
    with pytest.raises(InputError, match="engine='on'") as caught:
        GearLoader(dataset, placement="disk", engine="on", **options)
    assert caught.value.code == "PLACEMENT"
