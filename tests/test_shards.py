"""Shard files: layout that other readers understand, digests, opening."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load

from gear_offline.dataset.dataset import open_dataset
from gear_offline.dataset.schema import ColumnSpec
from gear_offline.dataset.shard import (
    ALIGNMENT_BYTES,
    DTYPE_CODES,
    EPISODE_COLUMNS,
    BlockDigests,
    encode_header,
    open_member,
    plan_tensors,
    stored_form,
)
from gear_offline.errors import InputError
from tests.support import failing_code

DTYPES = sorted(d.name for d in DTYPE_CODES.values())


def column(name: str, dtype: str, *shape: int) -> ColumnSpec:
    return ColumnSpec(name=name, dtype=np.dtype(dtype), shape=shape)


columns_strategy = st.lists(
    st.tuples(
        st.sampled_from(DTYPES), st.lists(st.integers(1, 4), max_size=3).map(lambda s: tuple(s))
    ),
    max_size=6,
).map(lambda found: [column(f"c{i}", d, *s) for i, (d, s) in enumerate(found)])


@settings(deadline=None, max_examples=100)
@given(columns=columns_strategy, steps=st.integers(1, 9), episodes=st.integers(1, 4))
def test_the_safetensors_library_reads_what_we_lay_out(
    columns: list[ColumnSpec], steps: int, episodes: int
) -> None:
    tensors = plan_tensors(tuple(columns), steps=steps, episodes=episodes)
    header = encode_header(tensors)
    assert len(header) % ALIGNMENT_BYTES == 0
    data = os.urandom(tensors[-1].stop)
    found = load(header + data)
    assert set(found) == {c.name for c in (*columns, *EPISODE_COLUMNS)}
    for t in tensors:
        assert found[t.name].dtype == t.dtype and found[t.name].shape == t.shape
        assert found[t.name].tobytes() == data[t.start : t.stop]
        assert t.start % t.dtype.itemsize == 0


def test_complex_columns_are_stored_as_pairs() -> None:
    assert stored_form(column("z", "complex64", 3)) == (np.dtype("f4"), (3, 2))
    assert stored_form(column("z", "complex128")) == (np.dtype("f8"), (2,))


@settings(deadline=None, max_examples=100)
@given(data=st.binary(max_size=400), block=st.integers(1, 90), cuts=st.lists(st.integers(0, 400)))
def test_block_digests_do_not_depend_on_pieces(data: bytes, block: int, cuts: list[int]) -> None:
    digests = BlockDigests(block)
    edges = [0, *sorted(min(c, len(data)) for c in cuts), len(data)]
    for a, b in pairwise(edges):
        digests.update(memoryview(data)[a:b])
    blocks = [data[i : i + block] for i in range(0, len(data), block)]
    assert digests.finish() == "".join(xxhash.xxh3_128_hexdigest(b) for b in blocks)


def test_devices_and_other_sizes_are_not_opened(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"data")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("real", "link"):
        os.close(open_member(tmp_path / name, size=4))
    for name in ("folder", "pipe", "absent"):
        with pytest.raises(InputError) as caught:
            open_member(tmp_path / name)
        assert caught.value.code == "DATASET_DAMAGED" and name in str(caught.value)
    with pytest.raises(InputError, match="has 4 bytes, the manifest says 5"):
        open_member(tmp_path / "real", size=5)


def test_opening_a_file_or_nothing_as_a_dataset(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"")
    for name in ("f", "g"):
        assert failing_code(lambda n=name: open_dataset(tmp_path / n)) == "DATASET_NOT_FOUND"  # type: ignore[misc]
