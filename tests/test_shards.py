"""Shard files: layout, header parsing, digests, opening."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load

from gear_offline.dataset.schema import ColumnSpec
from gear_offline.dataset.shards import (
    ALIGNMENT_BYTES,
    DTYPE_CODES,
    EPISODE_COLUMNS,
    BlockDigests,
    encode_header,
    open_directory,
    open_member,
    parse_header,
    plan_tensors,
    read_into,
    stored_form,
)
from gear_offline.errors import InputError

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
    tensors = plan_tensors(columns, steps=steps, episodes=episodes)
    header = encode_header(tensors)
    assert len(header) % ALIGNMENT_BYTES == 0
    data = os.urandom(tensors[-1].stop)
    found = load(header + data)
    assert set(found) == {c.name for c in (*columns, *EPISODE_COLUMNS)}
    for t in tensors:
        assert found[t.name].dtype == t.dtype and found[t.name].shape == t.shape
        assert found[t.name].tobytes() == data[t.start : t.stop]
        assert t.start % t.dtype.itemsize == 0
    assert parse_header(header, file_bytes=len(header) + len(data), where="x") == tensors


def test_complex_columns_are_stored_as_pairs() -> None:
    assert stored_form(column("z", "complex64", 3)) == (np.dtype("f4"), (3, 2))
    assert stored_form(column("z", "complex128")) == (np.dtype("f8"), (2,))


def header_of(document: Any, *, text: str | None = None) -> bytes:
    raw = (json.dumps(document) if text is None else text).encode()
    return len(raw).to_bytes(8, "little") + raw


def entry(dtype: Any = "U8", shape: Any = (4,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


BAD_HEADERS = {
    "hole": header_of({"a": entry(), "b": entry(offsets=(5, 9))}),
    "overlap": header_of({"a": entry(), "b": entry(offsets=(3, 7))}),
    "same bytes twice": header_of({"a": entry(), "b": entry()}),
    "does not start at 0": header_of({"a": entry(offsets=(1, 5))}),
    "shape does not fit": header_of({"a": entry(shape=(5,))}),
    "reversed offsets": header_of({"a": entry(offsets=(4, 0))}),
    "three offsets": header_of({"a": entry(offsets=(0, 4, 4))}),
    "unknown dtype": header_of({"a": entry(dtype="F8_E4M3")}),
    "dtype is a list": header_of({"a": entry(dtype=["U8"])}),
    "negative size": header_of({"a": entry(shape=(-4,))}),
    "boolean size": header_of({"a": entry(shape=(True,), offsets=(0, 1))}),
    "fraction": header_of({"a": entry(shape=(4.0,))}),
    "product overflows 64 bits": header_of({"a": entry(shape=(1 << 62, 1 << 62))}),
    "33 dimensions": header_of({"a": entry(shape=(1,) * 33, offsets=(0, 1))}),
    "huge number": header_of(None, text='{"a": {"dtype": "U8", "shape": [' + "9" * 5000 + "]}}"),
    "missing key": header_of({"a": {"dtype": "U8", "shape": [4]}}),
    "extra key": header_of({"a": {**entry(), "x": 1}}),
    "tensor is a number": header_of({"a": 3}),
    "array": header_of([1, 2]),
    "repeated tensor": header_of(
        None, text='{"a": ' + json.dumps(entry()) + ', "a": ' + json.dumps(entry()) + "}"
    ),
    "leading space": header_of(None, text=" " + json.dumps({"a": entry()})),
    "not JSON": header_of(None, text="{hello"),
    "deep nesting": header_of(None, text='{"a":' * 100_000),
    "not UTF-8": (4).to_bytes(8, "little") + b'{"\xff"',
    "length field lies": (99).to_bytes(8, "little") + b"{}",
    "empty": b"",
}


@pytest.mark.parametrize("name", BAD_HEADERS)
def test_bad_headers_are_refused(name: str) -> None:
    for total in (4, 8, 9):
        with pytest.raises(InputError) as caught:
            parse_header(BAD_HEADERS[name], file_bytes=len(BAD_HEADERS[name]) + total, where="f")
        assert caught.value.code == "SHARD_HEADER"
        assert "\n" not in str(caught.value)


def test_tensors_must_end_where_the_file_ends() -> None:
    good = header_of({"a": entry()})
    assert parse_header(good, file_bytes=len(good) + 4, where="f")[0].name == "a"
    for wrong in (3, 5):
        with pytest.raises(InputError, match="tensors end"):
            parse_header(good, file_bytes=len(good) + wrong, where="f")


@settings(deadline=None, max_examples=300)
@given(raw=st.binary(max_size=200), seed=st.binary(max_size=60))
def test_random_headers_never_crash(raw: bytes, seed: bytes) -> None:
    for text in (raw, seed + json.dumps({"a": entry()}).encode()[len(seed) :]):
        whole = len(text).to_bytes(8, "little") + text
        try:
            parse_header(whole, file_bytes=len(whole) + 4, where="f")
        except InputError as error:
            assert error.code == "SHARD_HEADER"


@settings(deadline=None, max_examples=100)
@given(data=st.binary(max_size=400), block=st.integers(1, 90), cuts=st.lists(st.integers(0, 400)))
def test_block_digests_do_not_depend_on_pieces(data: bytes, block: int, cuts: list[int]) -> None:
    found = BlockDigests(block)
    edges = [0, *sorted(min(c, len(data)) for c in cuts), len(data)]
    for a, b in pairwise(edges):
        found.update(memoryview(data)[a:b])
    blocks = [data[i : i + block] for i in range(0, len(data), block)]
    assert found.finish() == tuple(xxhash.xxh3_128_hexdigest(b) for b in blocks)


def test_links_and_devices_are_not_opened(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"data")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    directory = open_directory(tmp_path)
    try:
        handle = open_member(directory, "real", where="real", size=4)
        os.close(handle)
        for name, code in (
            ("link", "FILE_KIND"),
            ("folder", "FILE_KIND"),
            ("pipe", "FILE_KIND"),
            ("absent", "FILE_MISSING"),
        ):
            with pytest.raises(InputError) as caught:
                open_member(directory, name, where=name)
            assert caught.value.code == code
        with pytest.raises(InputError) as caught:
            open_member(directory, "real", where="real", size=5)
        assert caught.value.code == "FILE_SIZE"
    finally:
        os.close(directory)


def test_a_file_that_ends_early_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"12345")
    handle = os.open(path, os.O_RDONLY)
    try:
        buffer = bytearray(4)
        read_into(handle, memoryview(buffer), 1, where="f")
        assert buffer == b"2345"
        with pytest.raises(InputError) as caught:
            read_into(handle, memoryview(buffer), 2, where="f")
        assert caught.value.code == "FILE_SIZE"
    finally:
        os.close(handle)


def test_opening_a_file_or_nothing_as_a_dataset(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"")
    for name, code in (("f", "DATASET_KIND"), ("g", "DATASET_MISSING")):
        with pytest.raises(InputError) as caught:
            open_directory(tmp_path / name)
        assert caught.value.code == code
