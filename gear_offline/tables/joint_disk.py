"""Rows of several tasks that stay on disk: padded once, into a file without a name.

The shards of the tasks hold rows of their own widths; a window is read in one go only where all
rows of a column have one.  So the columns are copied at the start, as they would be filled into a
table: padded, states normalised, digests compared.  The file takes the bytes of the padded table
and is gone with the process that made it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from gear_offline.dataset.dataset import Dataset
from gear_offline.dataset.verification import thread_count
from gear_offline.kernels.columns import Array
from gear_offline.tables.disk_files import DiskFile, ShardFiles
from gear_offline.tables.joint import tasks_of

COPY_BYTES = 8 << 20  # of a column at a time, by each thread


def folder_of(dataset: Dataset) -> Path:
    """Return where a file beside a dataset may lie; of several tasks, beside the first."""
    tasks = tasks_of(dataset)
    return tasks[0].dataset.path if tasks else dataset.path


def scales_of(dataset: Dataset) -> tuple[float, ...]:
    """Return what the returns-to-go of each shard are divided by, besides the scale of all."""
    shards = len(dataset.manifest.shards)
    return getattr(dataset, "returns_scales", None) or (1.0,) * shards


def copy_column(dataset: Dataset, name: str, put: Callable[[int, Array], None]) -> None:
    """Read a whole column and `put` its rows with their first step, a piece at a time.

    Raises
    ------
    GearError
        What reading and `put` raise.
    """
    firsts, spec = dataset.first_steps.tolist(), dataset.spec[name]
    rows = max(COPY_BYTES // spec.step_bytes, 1)

    def work(index: int) -> None:
        with dataset.reader(index, [name], check=dataset.checked) as reader:
            for first in range(firsts[index], firsts[index + 1], rows):
                piece = np.empty(
                    (min(rows, firsts[index + 1] - first), *spec.shape), dtype=spec.dtype
                )
                reader.read(name, piece)
                put(first, piece)

    shards = range(len(firsts) - 1)
    with ThreadPoolExecutor(min(thread_count(None), len(shards))) as pool:
        for done in [pool.submit(work, index) for index in shards]:
            done.result()


class CopiedShards:
    """In the place of `ShardFiles` where every column was copied: there is nothing to open.

    Parameters
    ----------
    copies
        The file of the copies; None if all columns are in memory.
    """

    def __init__(self, copies: DiskFile | None) -> None:
        self._copies = copies

    @contextmanager
    def opened(self, *indices: int) -> Iterator[list[DiskFile]]:
        """Give a file for each shard; none of them is read."""
        yield [] if self._copies is None else [self._copies] * len(indices)

    def close(self) -> None:
        """Nothing is held open."""


def open_shards(
    dataset: Dataset, scratch: DiskFile | None, *, direct: bool
) -> ShardFiles | CopiedShards:
    """Return the files of a dataset's shards, for reading windows."""
    if tasks_of(dataset):
        return CopiedShards(scratch)
    return ShardFiles(dataset, direct=direct)
