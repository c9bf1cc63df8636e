"""One table a node, shared by real processes: private, the same pages, and gone with them."""

import gc
import json
import os
import subprocess
import sys
import weakref
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gear_offline.batches.tables.shared import Handle, PublishedTables, SharedMemory, share_table
from gear_offline.batches.tables.table import TableOptions, build_table
from gear_offline.core.system import available_bytes
from gear_offline.data.dataset.dataset import Dataset, open_dataset
from gear_offline.loaders.loader import GearLoader
from tests.segment_oracle import same_bits
from tests.support import failing_code, make_dataset, one_error, run_python

F4 = np.dtype(np.float32)
CREATE = """
import json, sys
from dataclasses import asdict
import numpy as np
from gear_offline.batches.tables.shared import SharedMemory
memory = SharedMemory.create(1 << 20)
rows = memory.allocate((1000, 4), np.dtype(np.float32))
rows[:] = np.arange(4000).reshape(1000, 4)
print(json.dumps(asdict(memory.handle())), flush=True)
sys.stdin.readline()
print(float(rows[7, 3]), flush=True)
sys.stdin.readline()
"""
ATTACH = """
import json, sys
from gear_offline.data.dataset.dataset import open_dataset
from gear_offline.batches.tables import shared
real = shared.build_table
def attach(*arguments, fill=True, **options):
    assert not fill, "it reads the table again"
    return real(*arguments, fill=fill, **options)
shared.build_table = attach
shared.attach_tables(sys.argv[2])
options = shared.TableOptions(context_length=5, gamma=0.5)
table = shared.get_table(open_dataset(sys.argv[1]), options)
print(table.groups[0].rows.tobytes().hex())
"""


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("shared")
    return make_dataset(folder, [30, 1, 7, 55, 20], shard_bytes=3000)


def test_processes_share_the_same_pages_until_the_last_is_gone() -> None:
    piped: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", CREATE], **piped) as owner:
        assert owner.stdin is not None and owner.stdout is not None
        handle = Handle(**json.loads(owner.stdout.readline()))
        path = f"/proc/{owner.pid}/fd/{handle.descriptor}"
        assert os.readlink(path) == "/memfd:gear-table (deleted)"
        assert os.stat(path).st_mode & 0o777 == 0o600
        rows = SharedMemory.attach(handle).allocate((1000, 4), F4)
        rows[7, 3] = -5  # the owner sees it: one copy
        owner.stdin.write("\n")
        owner.stdin.flush()
        assert float(owner.stdout.readline()) == -5
        owner.kill()
        owner.wait()
        assert rows[999, 3] == 3999  # still here, through us alone
        with one_error("MEMORY") as caught:
            SharedMemory.attach(handle)
        assert str(handle.process) in str(caught.value)


def test_nothing_else_is_attached_and_the_size_is_sealed() -> None:
    memory = SharedMemory.create(4096)
    handle = memory.handle()
    with pytest.raises(OSError):
        os.ftruncate(handle.descriptor, 0)
    other = replace(handle, inode=handle.inode + 1)
    assert failing_code(lambda: SharedMemory.attach(other)) == "MEMORY"


def test_too_much_is_refused_before_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < available_bytes() < 1 << 46
    with one_error("MEMORY", r"1.0 PiB .* available"):
        SharedMemory.create(1 << 50)

    def refuse(name: str, flags: int) -> int:
        raise OSError(38, "not here")

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert failing_code(lambda: SharedMemory.create(1)) == "SYSTEM"


def test_a_shared_table_has_the_bits_of_a_private_one_in_one_copy(dataset: Dataset) -> None:
    options = TableOptions(context_length=5, gamma=0.5)
    table, memory = share_table(dataset, options)
    assert same_bits(table.groups[0].rows, build_table(dataset, options).groups[0].rows)
    attached, second = share_table(dataset, options, handle=memory.handle())
    attached.groups[0].rows[5, 0] = 77
    assert table.groups[0].rows[5, 0] == 77 and second.nbytes == memory.nbytes
    wrong, handle = replace(options, context_length=400), memory.handle()
    assert failing_code(lambda: share_table(dataset, wrong, handle=handle)) == "MEMORY"


def test_published_tables_are_attached_by_other_processes(dataset: Dataset) -> None:
    published, loader = PublishedTables(), {"context_length": 5, "gamma": 0.5}
    for more in ({"batch_size": 9}, {}, {"gamma": 1.0}, {"placement": "disk"}):
        published.add(dataset, loader | more)
    handles = json.loads(published.handles())
    assert len(handles) == 2 and {h["process"] for h in handles.values()} == {os.getpid()}
    other = run_python("-c", ATTACH, dataset.path, published.handles())
    rows = build_table(dataset, TableOptions(**loader)).groups[0].rows  # type: ignore[arg-type]
    assert other.stdout.strip() == rows.tobytes().hex(), other.stderr


def test_loaders_of_equal_data_and_options_share_their_rows(
    dataset: Dataset, tmp_path: Path
) -> None:
    """As long as one of them is there; a batch is that of a loader alone, whoever came before."""
    options: dict[str, Any] = {"context_length": 3, "device": "cpu", "batch_size": 5}
    alone = GearLoader(dataset, seed=2, **options)
    expected = next(alone).model_inputs()
    del alone
    gc.collect()
    first = GearLoader(dataset, seed=1, **options)
    second = GearLoader(open_dataset(dataset.path), seed=2, **options)
    assert second.rows.memory is first.rows.memory is copy(second).rows.memory
    for name, tensor in next(second).model_inputs().items():
        assert torch.equal(tensor, expected[name])
    twin = make_dataset(tmp_path / "twin", dataset.episodes.lengths.tolist(), seed=1)
    extra = GearLoader(dataset, extra_columns=["timeouts"], **options)
    others = [
        extra,
        GearLoader(twin, **options),
        GearLoader(dataset, **options | {"gamma": 0.5}),
        GearLoader(dataset, **options | {"context_length": 4}),
        GearLoader(dataset, **options | {"returns_scale": 3.0}),
        GearLoader(dataset, **options | {"normalize_states": True}),
        GearLoader(dataset, **options | {"placement": "disk"}),
    ]
    assert len({id(each.rows.memory) for each in (first, *others)}) == 8
    assert "timeouts" in next(extra)
    rows = weakref.ref(first.rows.memory)
    del first, second
    gc.collect()
    assert rows() is None
