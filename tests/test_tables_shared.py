"""One table a node, shared by real processes: private, the same pages, and gone with them."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gear_offline.core.system import available_bytes
from gear_offline.dataset.dataset import Dataset
from gear_offline.loaders.loader import GearLoader
from gear_offline.tables.shared import Handle, SharedMemory, SharedTables, share_table
from gear_offline.tables.table import TableOptions, build_table
from tests.segment_oracle import same_bits
from tests.support import failing_code, make_dataset, one_error, run_python

F4 = np.dtype(np.float32)
CREATE = """
import json, sys
from dataclasses import asdict
import numpy as np
from gear_offline.tables.shared import SharedMemory
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
from gear_offline.dataset.dataset import open_dataset
from gear_offline.tables import shared
from gear_offline.tables.shared import SharedTables
real = shared.build_table
def attach(*arguments, fill=True, **options):
    assert not fill, "it reads the table again"
    return real(*arguments, fill=fill, **options)
shared.build_table = attach
loader = {"context_length": 5, "gamma": 0.5}
table = SharedTables(json.loads(sys.argv[2])).table(open_dataset(sys.argv[1]), loader)
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
    tables = SharedTables(publish=True)
    loader = {"context_length": 5, "gamma": 0.5}
    table = tables.table(dataset, loader | {"batch_size": 9})
    assert table is not None and tables.table(dataset, loader) is table
    assert tables.table(dataset, loader | {"gamma": 1.0}) is not table
    assert len(tables.handles()) == 2
    other = run_python("-c", ATTACH, dataset.path, json.dumps(tables.handles()))
    assert other.stdout.strip() == table.groups[0].rows.tobytes().hex(), other.stderr
    assert asdict(Handle(**next(iter(tables.handles().values()))))["process"] == os.getpid()


def test_loaders_of_one_table_give_the_batches_of_their_own(
    dataset: Dataset, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"context_length": 3, "device": "cpu", "batch_size": 5}
    first = GearLoader(dataset, seed=1, **options)
    second = GearLoader(dataset, seed=2, table=first.table, **options)
    assert second.table is first.table
    alone = next(GearLoader(dataset, seed=2, **options)).model_inputs()
    for name, tensor in next(second).model_inputs().items():
        assert torch.equal(tensor, alone[name])
    other = make_dataset(tmp_path, [9, 8])
    for source, span in ((other, 3), (dataset, 4)):
        wrong = options | {"context_length": span, "table": first.table}
        assert failing_code(lambda s=source, w=wrong: GearLoader(s, **w)) == "LOADER_OPTION"  # type: ignore[misc]
    twin = make_dataset(tmp_path / "twin", dataset.episodes.lengths.tolist())  # equal lengths
    gamma, disk = options | {"gamma": 0.5}, options | {"placement": "disk"}
    for table, source, wanted in (
        *((first.table, dataset, gamma), (first.table, twin, options)),
        (GearLoader(dataset, **disk).table, dataset, options),
    ):
        call = partial(GearLoader, source, table=table, **wanted)
        assert failing_code(call) == "LOADER_OPTION"
    gone = options | {"table": first.table.without_rows()}  # as where a GPU holds them all
    assert failing_code(lambda: GearLoader(dataset, **gone)) == "LOADER_OPTION"
