"""What the tests share of rows that stay on disk."""

from __future__ import annotations

import gc
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gear_offline.dataset.dataset import Dataset
from gear_offline.errors import InputError
from gear_offline.loaders.loader import GearLoader
from gear_offline.tables import disk_sizes, window_reader
from tests.support import hopper_columns, make_dataset

LENGTHS = [30, 1, 7, 55, 20, 3] * 8
OPTIONS: dict[str, Any] = {"batch_size": 8, "context_length": 9, "device": "cpu", "gamma": 0.9}


def little_of_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a few steps, reads that are split, nothing kept in memory whole."""
    monkeypatch.setattr(disk_sizes, "CHUNK_BYTES", 1024)
    monkeypatch.setattr(disk_sizes, "READ_BYTES", 64)
    monkeypatch.setattr(disk_sizes, "COPY_BYTES", 1024)
    monkeypatch.setattr(disk_sizes, "RESIDENT_SHARE", 1 << 60)
    monkeypatch.setattr(window_reader, "COPY_BYTES", 1024)
    monkeypatch.setattr(window_reader, "SLICE_BYTES", 500)


@contextmanager
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


def several_shards(path: Path) -> Dataset:
    """Make a dataset of hopper-like columns and one more."""
    columns = hopper_columns(sum(LENGTHS), seed=3)
    columns["infos/qpos"] = np.random.default_rng(0).normal(size=(sum(LENGTHS), 6))
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
