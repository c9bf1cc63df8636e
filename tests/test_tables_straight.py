"""Rows that are read straight into a GPU's memory: bytes of arrays, batches, memory, errors.

The GPU's memory is ordinary memory, and its kernels run here.  On a GPU: tests/test_loader_gpu.py.
"""

import ctypes
import gc
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gear_offline.batches.tables import device as device_module
from gear_offline.batches.tables import placement, table
from gear_offline.batches.tables.device import too_large
from gear_offline.data.dataset.dataset import Dataset, view_episodes
from gear_offline.errors import GearError
from gear_offline.kernels.gather import CpuGather
from gear_offline.loaders import loader as loader_module
from gear_offline.loaders.loader import GearLoader
from gear_offline.loaders.rows import MemoryRows, RowOpener
from tests.image_support import image_columns
from tests.kernels_on_cpu import on_cpu
from tests.placement_support import FakeMemory
from tests.support import Patch, hopper_columns, make_dataset, one_error
from tests.task_support import join, make_parts

LENGTHS = [4, 1, 30, 7, 19, 2, 60]
OPTIONS: dict[str, Any] = {"batch_size": 9, "context_length": 4, "seed": 3, "device": "cpu"}


def open_on(
    memory: FakeMemory, data: Any, placement: str, kernels: Any, **options: Any
) -> MemoryRows:
    """Return the rows of a loader for a GPU of that memory."""
    openers = list[RowOpener]()

    class Held(RowOpener):
        def open(self) -> Any:
            openers.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader_module, "RowOpener", Held)
        GearLoader(data, **OPTIONS | options)
        patch.setattr(device_module, "DeviceMemory", lambda _: memory)
        (opener,) = openers
        given = opener.options.model_copy(update={"placement": placement})
        gpu = replace(opener, device=torch.device("cuda"), options=given)
        with on_cpu(kernels):
            rows = RowOpener.open(gpu)
    assert isinstance(rows, MemoryRows)
    return rows


def assert_same_batches(rows: MemoryRows, cpu: GearLoader, kernels: Any) -> None:
    with on_cpu(kernels):
        mine = rows.windows(5, 3, ahead=False)
    other = cpu.rows.windows(5, 3, ahead=False)
    assert list(mine.tensors()) == list(other.tensors())
    for name, tensor in (mine.tensors() | {"mask": mine.attention_mask}).items():
        expected = (other.tensors() | {"mask": other.attention_mask})[name]
        assert tensor.numpy().tobytes() == expected.numpy().tobytes(), name


def of_columns(folder: Path) -> Dataset:
    """Return several shards of vectors, frames, flags, and what is normalised."""
    steps, generator = sum(LENGTHS), np.random.default_rng(0)
    columns = hopper_columns(steps)
    columns["observations"] = generator.normal(3.0, 2.0, (steps, 11))
    columns["frames"] = generator.integers(0, 256, (steps, 5, 3), dtype=np.uint8)
    columns["wide"] = generator.normal(size=(steps, 300)).astype(np.float32)
    return make_dataset(folder, LENGTHS, columns=columns, shard_bytes=60_000)


def of_histories(numbers: list[int]) -> Callable[[Path], Dataset]:
    def make(folder: Path) -> Dataset:
        data = make_dataset(folder, LENGTHS, shard_bytes=3000)
        vars(data)["histories"] = np.array(numbers)
        return data

    return make


KINDS: dict[str, tuple[Callable[[Path], Any], dict[str, Any]]] = {
    "plain": (lambda folder: make_dataset(folder, LENGTHS, shard_bytes=3000), {"gamma": 0.9}),
    "columns": (
        of_columns,
        {
            "normalize_states": True,
            "extra_columns": ["frames", "wide", "next_states", "terminated", "has_next"],
        },
    ),
    "chunks": (lambda folder: make_dataset(folder, LENGTHS, shard_bytes=3000), {"chunk": 9}),
    "frames": (
        lambda folder: make_dataset(
            folder, LENGTHS, columns=image_columns(sum(LENGTHS), (6, 5)), shard_bytes=1000
        ),
        {"frame_stack": 3},
    ),
    "tasks": (lambda folder: join(make_parts(folder)), {"normalize_states": True}),
    "view": (  # the first shards have nothing of it
        lambda folder: view_episodes(
            make_dataset(folder, LENGTHS, shard_bytes=800), np.array([3, 5, 6])
        ),
        {"extra_columns": ["next_states"]},
    ),
    "histories": (of_histories([0, 0, 1, 1, 1, 2, 2]), {"span": "history"}),
    "mixed histories": (of_histories([0, 1, 0, 1, 1, 2, 0]), {"span": "history"}),
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: Patch) -> None:
    for module in (table, placement):
        monkeypatch.setattr(module, "CHUNK_BYTES", 700)


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_those_of_a_table_in_host_memory(
    tmp_path: Path, kernels: Any, kind: str, pinned: bool
) -> None:
    """Also where scratch cannot be page-locked."""
    make, options = KINDS[kind]
    data = make(tmp_path)
    memory = FakeMemory(refuse="" if pinned else "hostRegister")
    rows = open_on(memory, data, "hbm", kernels, **options)
    cpu = GearLoader(data, **OPTIONS | options)
    host = cpu.rows.memory
    for mine, theirs in zip(rows.memory.groups, host.groups, strict=True):
        firsts, lengths = host.first_rows(), data.episodes.lengths
        for address, first, length in zip(mine.addresses, firsts, lengths, strict=True):
            expected = theirs.rows[first : first + length]
            assert ctypes.string_at(int(address), expected.nbytes) == expected.tobytes()
    assert_same_batches(rows, cpu, kernels)
    gc.collect()
    assert not memory.registered


def test_rows_on_the_gpu_are_the_columns(tmp_path: Path, kernels: Any) -> None:
    """By NumPy alone: of the arrays that were converted."""
    columns = hopper_columns(sum(LENGTHS))
    data = make_dataset(tmp_path, LENGTHS, columns=columns, shard_bytes=3000)
    rows = open_on(FakeMemory(), data, "auto", kernels)
    (group,) = rows.memory.groups
    ends = np.cumsum(LENGTHS)
    for address, length, end in zip(group.addresses, LENGTHS, ends, strict=True):
        raw = ctypes.string_at(int(address), length * group.group.row_bytes)
        found = np.frombuffer(raw, np.float32).reshape(length, -1)
        steps = slice(end - length, end)
        rewards = columns["rewards"][steps].reshape(-1).astype(np.float64)
        sums = np.cumsum(rewards[::-1])[::-1]
        for field in group.group.fields:
            name = {"states": "observations"}.get(field.name, field.name)
            values = sums if name == "returns_to_go" else columns[name][steps]
            expected = values.astype(np.float32).reshape(length, -1)
            assert np.array_equal(found[:, field.offset :][:, : field.width], expected), name


@pytest.mark.parametrize("where", ["hbm", "auto", "host"])
def test_the_host_never_holds_what_goes_to_the_gpu(
    tmp_path: Path, kernels: Any, where: str, monkeypatch: Patch
) -> None:
    for module in (table, placement):
        monkeypatch.setattr(module, "CHUNK_BYTES", 16 << 10)
    data, memory = make_dataset(tmp_path, [200] * 500, shard_bytes=100_000), FakeMemory()
    tracemalloc.start()
    try:
        rows = open_on(memory, data, where, kernels)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    nbytes = 64 * data.spec.steps
    assert rows.memory.reads_host == (where == "host")
    assert (peak - memory.allocated > nbytes) == (where == "host")
    if where != "host":
        assert nbytes <= memory.allocated and peak - memory.allocated < nbytes / 2


class Failing(FakeMemory):
    """Memory in which there is no room, or to which the fifth copy fails."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error, self.copies = error, 0

    def allocate(self, nbytes: int) -> tuple[int, Any]:
        if isinstance(self.error, GearError):
            raise self.error
        return super().allocate(nbytes)

    def upload(self, address: int, rows: Any, stream: Any) -> None:
        self.copies += 1
        if self.copies == 5:
            raise self.error
        super().upload(address, rows, stream)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("no GPU")])
def test_nothing_stays_locked_after_an_error(
    tmp_path: Path, kernels: Any, error: BaseException
) -> None:
    data, memory = make_dataset(tmp_path, LENGTHS, shard_bytes=3000), Failing(error)
    with pytest.raises(type(error)):
        open_on(memory, data, "hbm", kernels)
    error.__traceback__ = None
    gc.collect()
    assert memory.copies >= 5 and not memory.registered


def test_without_room_the_cpu_gathers_from_the_host(
    tmp_path: Path, kernels: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    data = make_dataset(tmp_path, LENGTHS, shard_bytes=3000)
    memory = Failing(too_large(9, 1, "free on the device"))
    with one_error("MEMORY", "9 B of GPU memory"):
        open_on(memory, data, "hbm", kernels)
    rows = open_on(memory, data, "auto", kernels)
    assert "batches are gathered by the CPU" in capsys.readouterr().err
    assert isinstance(rows.gather, CpuGather)
    assert rows.memory is GearLoader(data, **OPTIONS).rows.memory
