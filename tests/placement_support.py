"""GPUs of this process: their memory is ordinary memory, so that addresses can be followed."""

import ctypes
import json
from contextlib import AbstractContextManager, nullcontext
from threading import Barrier, Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gear_offline.batches.tables.device import DeviceMemory
from gear_offline.batches.tables.placement import PlacedTable, Ranks, place_table
from gear_offline.batches.tables.table import Table, TableOptions, build_table
from gear_offline.core.types import Array
from tests.segment_oracle import MemoryTable


class FakeRuntime:
    """CuPy's calls; the device sees host memory at its own address."""

    class CUDARuntimeError(Exception):
        """As CuPy's."""

    def __init__(self, *, refuse: str = "") -> None:
        self.registered: dict[int, int] = {}
        self.allocated: list[npt.NDArray[np.uint8]] = []
        self._refuse = refuse

    def malloc(self, nbytes: int) -> int:
        self._check("malloc")
        spare = np.full(nbytes + 256, 0xAB, dtype=np.uint8)
        self.allocated.append(spare[-spare.ctypes.data % 256 :][:nbytes])
        return self.allocated[-1].ctypes.data

    def ipcGetMemHandle(self, address: int) -> bytes:
        self._check("ipcGetMemHandle")
        return address.to_bytes(8, "little")

    def ipcOpenMemHandle(self, handle: bytes, flags: int) -> int:
        self._check("ipcOpenMemHandle")
        return int.from_bytes(handle, "little")

    def hostRegister(self, address: int, nbytes: int, flags: int) -> None:
        self._check("hostRegister")
        assert address not in self.registered
        self.registered[address] = nbytes

    def hostUnregister(self, address: int) -> None:
        del self.registered[address]

    def pointerGetAttributes(self, address: int) -> Any:
        return SimpleNamespace(devicePointer=address)

    def _check(self, call: str) -> None:
        if call == self._refuse:
            raise self.CUDARuntimeError(f"{call} is refused")


class FakeMemory(DeviceMemory):
    """A GPU without a GPU."""

    def __init__(self, free: int = 1 << 30, *, refuse: str = "") -> None:
        self.device = torch.device("cpu")
        self.free, self.waits = free, 0
        self._runtime = FakeRuntime(refuse=refuse)

    def free_bytes(self) -> int:
        return self.free

    def allocate(self, nbytes: int) -> tuple[int, Any]:
        return self._runtime.malloc(nbytes), None

    def copy_stream(self) -> Any:
        return None

    def upload(self, address: int, rows: Array, stream: Any) -> None:
        ctypes.memmove(address, rows.ctypes.data, rows.nbytes)

    def wait(self) -> None:
        self.waits += 1

    def _current(self) -> AbstractContextManager[Any]:
        return nullcontext()

    @property
    def registered(self) -> dict[int, int]:
        registered: dict[int, int] = self._runtime.registered
        return registered

    @property
    def allocated(self) -> int:
        return sum(buffer.nbytes for buffer in self._runtime.allocated)


def make_table(lengths: list[int]) -> Table:
    """Return a table of several groups, of rows of 64, 16 and 7 bytes."""
    steps, generator = sum(lengths), np.random.default_rng(2)
    columns: dict[str, Any] = {
        "observations": generator.normal(size=(steps, 11)).astype(np.float32),
        "actions": generator.normal(size=(steps, 3)).astype(np.float32),
        "rewards": generator.normal(size=steps).astype(np.float32),
        "infos/qpos": generator.normal(size=(steps, 2)),
        "frames": generator.integers(0, 256, (steps, 7), dtype=np.uint8),
    }
    source = MemoryTable(columns, lengths)
    return build_table(
        source, TableOptions(context_length=3, extra_columns=["infos/qpos", "frames"])
    )


def place_all(
    table: Table | list[Table], memories: list[FakeMemory], nodes: list[int], **options: Any
) -> list[PlacedTable | Exception]:
    """Place a table, or each rank its own, at once; a rank that waits for others for 10 s fails."""
    tables = table if isinstance(table, list) else [table] * len(nodes)
    barrier, words = Barrier(len(nodes), timeout=10), [None] * len(nodes)
    results: list[PlacedTable | Exception] = [RuntimeError("not begun")] * len(nodes)

    def run(rank: int) -> None:
        def gather(value: Any) -> list[Any]:
            words[rank] = json.loads(json.dumps(value))  # as a world sends it
            barrier.wait()
            answers = list(words)
            barrier.wait()
            return answers

        ranks = Ranks(rank=rank, nodes=tuple(nodes), gather=gather)
        try:
            results[rank] = place_table(tables[rank], memories[rank], ranks=ranks, **options)
        except Exception as error:
            results[rank] = error

    threads = [Thread(target=run, args=(rank,)) for rank in range(len(nodes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
