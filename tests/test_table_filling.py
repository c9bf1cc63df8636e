"""Tables filled straight from the shards: the same bits with any number of threads, verified."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gear_offline.convert import convert
from gear_offline.dataset.dataset import Dataset, open_dataset
from gear_offline.errors import GearError, InputError
from gear_offline.tables import column_lane, host_memory, page_filling
from gear_offline.tables import table_filling as module
from gear_offline.tables.host_memory import PAGE_BYTES, HostBlock
from gear_offline.tables.host_table import host_table
from gear_offline.tables.table import Table, build_table
from gear_offline.tables.table_filling import cut_pieces
from tests.segment_oracle import MemoryTable, cpu_gather, same_bits
from tests.support import ArraySource, make_dataset
from tests.test_host_memory import line, python

LENGTHS = [30, 1, 7, 55, 20, 3, 40, 12]


def mixed_columns(steps: int) -> dict[str, npt.NDArray[Any]]:
    generator = np.random.default_rng(4)
    return {
        "observations": generator.normal(size=(steps, 11)).astype(np.float64),
        "actions": generator.normal(size=(steps, 3)).astype(np.float32),
        "rewards": generator.normal(size=steps).astype(np.float32),
        "frames": generator.integers(0, 256, (steps, 5, 3), dtype=np.uint8),
        "flags": generator.integers(0, 2, steps).astype(bool),
        "waves": (generator.normal(size=(steps, 2)) + 1j).astype(np.complex64),
    }


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Dataset, MemoryTable]:
    columns = mixed_columns(sum(LENGTHS))
    target = tmp_path_factory.mktemp("filling") / "dataset"
    convert(ArraySource(columns, LENGTHS), target, shard_bytes=6000, block_bytes=1024, quiet=True)
    dataset = open_dataset(target, verify=False)
    assert len(dataset.manifest.shards) > 3
    return dataset, MemoryTable(columns, LENGTHS)


def assert_same(one: Table, other: Table) -> None:
    for a, b in zip(one.groups, other.groups, strict=True):
        assert a.rows is not None and b.rows is not None
        assert [f.name for f in a.fields] == [f.name for f in b.fields]
        assert same_bits(a.rows, b.rows)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    threads=st.sampled_from([1, 2, 3, 16]),
    verify=st.booleans(),
    piece=st.sampled_from([1, 90, 700, 1 << 20]),
    page=st.sampled_from([16, 64, 4096]),
    gamma=st.sampled_from([1.0, 0.9]),
    normalize=st.booleans(),
)
def test_any_number_of_threads_gives_the_bits_of_the_arrays(
    data: tuple[Dataset, MemoryTable],
    monkeypatch: pytest.MonkeyPatch,
    threads: int,
    verify: bool,
    piece: int,
    page: int,
    gamma: float,
    normalize: bool,
) -> None:
    dataset, arrays = data
    monkeypatch.setattr(module, "PIECE_BYTES", piece)
    monkeypatch.setattr(module, "DIRECT_BYTES", piece)
    monkeypatch.setattr(module, "PAGE_BYTES", page)
    monkeypatch.setattr(module, "RUN_BYTES", 8 * piece)
    monkeypatch.setattr(module, "LAID_BYTES", piece // 3)
    options: dict[str, Any] = {
        "context_length": 4,
        "gamma": gamma,
        "returns_scale": 3.0,
        "extra_columns": ["frames", "flags", "waves"],
    }
    found = build_table(dataset, threads=threads, verify=verify, **options)
    assert_same(found, build_table(arrays, threads=1, **options))
    if normalize:
        options["normalize_states"] = True
        one = build_table(dataset, threads=threads, **options)
        assert_same(one, build_table(dataset, threads=1, **options))


@given(
    low=st.integers(0, 10**9),
    steps=st.integers(0, 10**5),
    count=st.integers(300, 10**5),
    margin=st.integers(0, 100),
    widths=st.lists(st.integers(1, 200).map(lambda n: 4 * n), min_size=1, max_size=2),
)
def test_pieces_end_where_pages_end(
    low: int, steps: int, count: int, margin: int, widths: list[int]
) -> None:
    found = list(cut_pieces(low, low + steps, count, margin=margin, row_bytes=widths))
    assert [start for start, _ in found] == [low, *(stop for _, stop in found)][: len(found)]
    assert found[-1][1] == low + steps if steps else not found
    assert all(0 < stop - start <= count for start, stop in found)
    rows = [margin + stop for _, stop in found[:-1]]
    if count >= 2 * PAGE_BYTES:
        assert all(row * width % PAGE_BYTES == 0 for row in rows for width in widths)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    threads=st.sampled_from([1, 2, 16]),
    piece=st.sampled_from([1, 700, 5000, 1 << 20]),
    old_kernel=st.booleans(),
    paged=st.booleans(),
)
def test_shared_memory_has_the_same_bits_and_nothing_else(
    data: tuple[Dataset, MemoryTable],
    monkeypatch: pytest.MonkeyPatch,
    threads: int,
    piece: int,
    old_kernel: bool,
    paged: bool,
) -> None:
    dataset, arrays = data
    monkeypatch.setattr(module, "PIECE_BYTES", piece)
    monkeypatch.setattr(module, "PAGED_BYTES", piece)
    monkeypatch.setattr(page_filling, "SYSTEM_CALL", page_filling.SYSTEM_CALL if paged else {})
    monkeypatch.setattr(host_memory, "MADV_POPULATE_WRITE", 9999 if old_kernel else 23)
    options: dict[str, Any] = {"context_length": 4, "extra_columns": ["frames"]}
    table, block = host_table(dataset, threads=threads, **options)
    assert_same(table, build_table(arrays, **options))
    assert block.place(table.groups[0].rows) == 0


def test_one_thread_writes_through_the_file(
    data: tuple[Dataset, MemoryTable], monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    real = host_memory.write_through

    def counted(block: HostBlock, target: npt.NDArray[Any], values: npt.NDArray[Any]) -> None:
        written.append(target.nbytes)
        real(block, target, values)

    monkeypatch.setattr(column_lane, "write_through", counted)
    monkeypatch.setattr(page_filling, "SYSTEM_CALL", {})
    dataset, _ = data
    table, _ = host_table(dataset, context_length=4, threads=1)
    rows = table.groups[0].rows
    assert rows is not None and sum(written) == rows[4:-4].nbytes
    written.clear()
    build_table(dataset, context_length=4, threads=1)  # memory without a file
    assert not written


def test_a_thread_that_finds_two_writers_copies_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    block = HostBlock.create(1 << 16)
    rows = block.allocate((1000, 16), np.dtype(np.float32))
    target = column_lane.Rows(rows, 700, scratch=column_lane.Scratch(), use="rows", block=block)
    values = np.random.default_rng(0).normal(size=(600, 16)).astype(np.float32)
    target.array[:600] = values
    assert block.writers.acquire(blocking=False) and block.writers.acquire(blocking=False)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda *_: pytest.fail("a third writer"))
        target.end(200, 800)
    assert same_bits(rows[200:800], values)
    assert not rows[:200].any() and not rows[800:].any()
    block.writers.release()
    target.end(0, 600)  # now through the file, and its place is free again
    assert same_bits(rows[:600], values) and same_bits(rows[600:800], values[400:])
    assert block.writers.acquire(blocking=False)


def test_values_that_are_not_float32_are_cast_and_normalised_alike(
    data: tuple[Dataset, MemoryTable],
) -> None:
    dataset, arrays = data
    table = build_table(dataset, context_length=4, threads=1, normalize_states=True)
    wide = arrays.columns["observations"]
    moments = dataset.statistics["observations"]
    expected = ((wide - moments.mean) / (moments.std + 1e-6)).astype(np.float32)
    rows = table.groups[0].rows
    assert rows is not None and same_bits(rows[4:-4, :11], expected)
    assert not rows[:, 16:].any()
    plain = build_table(dataset, context_length=4, threads=1).groups[0].rows
    assert plain is not None and same_bits(plain[4:-4, :11], wide.astype(np.float32))


def test_infinities_of_the_source_stay(tmp_path: Path) -> None:
    columns = mixed_columns(30)
    columns["observations"][7, 2] = -np.inf
    columns["observations"][8, 3] = np.nan
    rows = build_table(MemoryTable(columns, [30]), context_length=2).groups[0].rows
    assert rows is not None
    assert rows[9, 2] == -np.inf and np.isnan(rows[10, 3])


def test_damage_is_found_on_the_way_in_every_column(tmp_path: Path) -> None:
    columns = mixed_columns(sum(LENGTHS))
    convert(ArraySource(columns, LENGTHS), tmp_path / "d", block_bytes=1024, quiet=True)
    dataset = open_dataset(tmp_path / "d", verify=False)
    (shard,) = dataset.manifest.shards
    file = tmp_path / "d" / shard.name
    extra = ["frames", "flags", "waves"]
    for tensor in dataset.manifest.tensors(shard):
        if tensor.name not in columns:
            continue
        for place in (tensor.start, tensor.stop - 1):
            raw = bytearray(file.read_bytes())
            raw[shard.header_bytes + place] ^= 1
            file.write_bytes(raw)
            changed = open_dataset(tmp_path / "d", verify=False)
            with pytest.raises(InputError, match=tensor.name) as caught:
                build_table(changed, context_length=2, extra_columns=extra, threads=2)
            assert caught.value.code == "DATASET_DAMAGED"
            raw[shard.header_bytes + place] ^= 1
            file.write_bytes(raw)


def test_a_cut_or_replaced_dataset_is_refused(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path, LENGTHS)
    file = tmp_path / "dataset" / dataset.manifest.shards[0].name
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(InputError) as caught:
        build_table(dataset, context_length=2)
    assert caught.value.code == "DATASET_DAMAGED"
    (tmp_path / "dataset").rename(tmp_path / "old")
    make_dataset(tmp_path, LENGTHS)
    with pytest.raises(InputError) as caught:
        build_table(dataset, context_length=2)
    assert caught.value.code == "DATASET_DAMAGED"


ATTACH = """
import json, sys
import numpy as np
from gear_offline.dataset.dataset import open_dataset
from gear_offline.tables.host_memory import HostHandle
from gear_offline.tables.host_table import host_table
from gear_offline.kernels.gather import CpuGather
from gear_offline.sampling import make_sampler
dataset = open_dataset(sys.argv[1], verify=False)
handle = HostHandle.from_json(json.loads(sys.argv[2]))
table, block = host_table(dataset, context_length=5, gamma=0.5, share=handle)
segments = make_sampler("uniform_steps", dataset).sample(1, 2, 1, 32)[0]
gather = CpuGather(table.groups, table.episodes.offsets, margin=table.margin, context_length=5)
windows = gather.fill(segments)
print(windows.buffers[0].numpy().tobytes().hex())
"""


def test_one_table_for_two_processes(tmp_path: Path) -> None:
    from gear_offline.sampling import make_sampler

    dataset = make_dataset(tmp_path, LENGTHS)
    table, block = host_table(dataset, context_length=5, gamma=0.5, threads=2)
    assert_same(table, build_table(dataset, context_length=5, gamma=0.5))
    segments = make_sampler("uniform_steps", dataset).sample(1, 2, 1, 32)[0]
    expected = cpu_gather(table, 5).fill(segments).buffers[0].numpy()
    text = json.dumps(block.handle().to_json())
    with python(ATTACH, str(tmp_path / "dataset"), text) as other:
        assert line(other).strip() == expected.tobytes().hex()
    before = os.fstat(block.fileno()).st_blocks
    attached, second = host_table(dataset, context_length=5, share=block.handle())
    assert_same(attached, table)
    assert os.fstat(second.fileno()).st_blocks == before  # the same pages
    with pytest.raises(GearError) as caught:
        host_table(dataset, context_length=400, share=block.handle())
    assert caught.value.code == "HOST_ATTACH"


def test_rows_that_the_block_cannot_hold() -> None:
    block = HostBlock.create(4096)
    source = MemoryTable(mixed_columns(sum(LENGTHS)), LENGTHS)
    with pytest.raises(GearError) as caught:
        build_table(source, context_length=2, allocate=block.allocate)
    assert caught.value.code == "HOST_MEMORY"
