"""HDF5 files: honest ones give exact bytes, hostile and damaged ones are refused."""

import fcntl
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from h5py import h5d, h5p, h5s, h5t, h5z
from hypothesis import given, settings
from hypothesis import strategies as st

from gear_offline.data.convert.conversion import convert
from gear_offline.data.sources import open_source
from gear_offline.data.sources.base import Source
from gear_offline.data.sources.flags import PAIRS
from tests.hdf5_files import Columns, assert_same, naive_episodes, table, write
from tests.support import one_error, refused

STEPS = 40


def good_columns(steps: int = STEPS) -> Columns:
    columns = table(steps)
    columns["terminals"] = np.arange(steps) % 7 == 6
    columns["timeouts"] = np.zeros(steps, bool)
    return columns


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return write(tmp_path / "hopper.hdf5", good_columns())


LAYOUTS: list[dict[str, Any]] = [
    {},
    {"chunks": True},
    {"compression": "gzip"},
    {"compression": "gzip", "shuffle": True},
    {"compression": "lzf"},
    {"compression": "lzf", "shuffle": True},
    {"fletcher32": True},
    {"compression": "gzip", "shuffle": True, "fletcher32": True},
    {"compression": "lzf", "shuffle": True, "fletcher32": True},
]
DTYPES = ["?", "i1", "u1", "<i2", ">i4", "<u8", "<f2", "<f4", ">f4", "<f8", ">f8", "<c8", "<c16"]


@settings(max_examples=30)
@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(1, 5), max_size=3),
    chunk=st.none() | st.lists(st.integers(1, 9), min_size=4, max_size=4),
    layout=st.sampled_from(LAYOUTS),
    user_block=st.sampled_from([None, 512]),
    compressible=st.booleans(),
    data=st.data(),
)
def test_any_dtype_width_and_storage_has_exact_bytes(
    tmp_path: Path, dtype: str, shape: list[int], chunk: list[int] | None, layout: dict[str, Any],
    user_block: int | None, compressible: bool, data: st.DataObject,
) -> None:  # fmt: skip
    high = 2 if dtype == "?" else 3 if compressible else 120
    shape = shape[:2] if dtype == "u1" else shape  # no frames, which are turned
    rows = np.random.default_rng(len(shape)).integers(0, high, size=(STEPS, *shape)).astype(dtype)
    path = tmp_path / "x.hdf5"
    with h5py.File(path, "w", userblock_size=user_block) as file:
        for name, values in good_columns().items():
            file[name] = values
        del file["observations"]
        own = tuple(min(n, m) for n, m in zip(chunk or [], rows.shape, strict=False))
        options = {**layout, "chunks": own} if chunk else layout
        file.create_dataset("observations", data=rows, **options)
    start = data.draw(st.integers(0, STEPS))
    stop = data.draw(st.integers(start, STEPS))
    with open_source(path) as source:
        for _ in range(2):  # the second time from the decoded chunks
            found = source.read("observations", start, stop)
            wanted = rows[start:stop].astype(found.dtype)
            assert found.dtype == rows.dtype.newbyteorder("=") == source.spec["observations"].dtype
            assert found.shape == wanted.shape and found.tobytes() == wanted.tobytes()


def packed(kind: Any, *codes: int, layout: int = h5d.CHUNKED, **options: Any) -> Callable[..., Any]:
    """Return what makes a dataset of a type behind filters that h5py does not write by name."""

    def make(file: h5py.File) -> Any:
        plan = h5p.create(h5p.DATASET_CREATE)
        plan.set_layout(layout)
        if layout == h5d.CHUNKED:
            plan.set_chunk((7, 2))
        for code in codes:
            plan.set_filter(code, h5z.FLAG_OPTIONAL, (3,) if code == h5z.FILTER_DEFLATE else ())
        space = h5s.create_simple((STEPS, 3))
        return h5py.Dataset(h5d.create(file.id, b"observations", kind, space, dcpl=plan))

    return make


def integer(bits: int, offset: int = 0, kind: Any = h5t.STD_I16LE) -> Any:
    made = kind.copy()
    made.set_precision(bits)
    made.set_offset(offset)
    return made


FILTERED: dict[str, Callable[[h5py.File], Any]] = {
    "scaled": lambda f: f.create_dataset(
        "observations", (STEPS, 3), "<i4", scaleoffset=0, chunks=(7, 2)
    ),
    "scaled, fill": lambda f: f.create_dataset(
        "observations", (STEPS, 3), ">u2", scaleoffset=0, chunks=(7, 2), fillvalue=5
    ),
    "scaled floats": lambda f: f.create_dataset(
        "observations", (STEPS, 3), "<f4", scaleoffset=2, chunks=(7, 2), compression="gzip"
    ),
    "scaled, lzf": lambda f: f.create_dataset(
        "observations", (STEPS, 3), "<f8", scaleoffset=3, chunks=(STEPS, 3), compression="lzf"
    ),
    "nbit": packed(h5t.IEEE_F32LE, h5z.FILTER_NBIT),
    "nbit of 12 bits": packed(integer(12), h5z.FILTER_NBIT, h5z.FILTER_DEFLATE),
    "nbit in the middle": packed(integer(10, 3, h5t.STD_U16BE), h5z.FILTER_NBIT, h5z.FILTER_LZF),
    "12 bits": packed(integer(12), h5z.FILTER_SHUFFLE, h5z.FILTER_FLETCHER32),
    "12 bits, contiguous": packed(integer(12, 2), layout=h5d.CONTIGUOUS),
    "12 bits, compact": packed(integer(12), layout=h5d.COMPACT),
    "compact": packed(h5t.IEEE_F64BE, layout=h5d.COMPACT),
    "checksum first": packed(
        h5t.IEEE_F64LE, h5z.FILTER_FLETCHER32, h5z.FILTER_SHUFFLE, h5z.FILTER_DEFLATE
    ),
}


@pytest.mark.parametrize("kind", FILTERED)
@pytest.mark.parametrize("user_block", [None, 1024])
def test_what_h5py_reads(tmp_path: Path, kind: str, user_block: int | None) -> None:
    path, written = tmp_path / "x.hdf5", np.arange(STEPS * 3).reshape(STEPS, 3)
    with h5py.File(path, "w", userblock_size=user_block) as file:
        for name, values in good_columns().items():
            if name != "observations":
                file[name] = values
        made = FILTERED[kind](file)
        made[...] = written * 7 % 500 if made.dtype.kind in "iu" else written / 8
    with h5py.File(path) as file:
        wanted = file["observations"][()]
    assert np.unique(wanted).size > 40
    with open_source(path) as source:
        for start, stop in ((0, STEPS), (5, 23), (STEPS - 1, STEPS)):
            found = source.read("observations", start, stop)
            assert found.dtype == wanted.dtype.newbyteorder("=")
            np.testing.assert_array_equal(found, wanted[start:stop])


@pytest.mark.parametrize("libver", ["earliest", "latest"])
@pytest.mark.parametrize("most", [(STEPS, None), (None, 12), (None, None)])
@pytest.mark.parametrize("written", [12, 4])
def test_axes_that_may_grow(
    tmp_path: Path, libver: str, most: tuple[int | None, ...], written: int
) -> None:
    path, rows = tmp_path / "x.hdf5", np.arange(STEPS * 12.0).reshape(STEPS, 12) + 1
    with h5py.File(path, "w", libver=libver, userblock_size=512) as file:
        for name, values in good_columns().items():
            file[name] = values
        options = {"chunks": (9, 4), "maxshape": most, "compression": "gzip", "fillvalue": 7}
        file.create_dataset("features", (STEPS, 12), "f8", **options)[:, :written] = rows[
            :, :written
        ]
    with h5py.File(path) as file:
        wanted = file["features"][()]
    with open_source(path) as source:
        parts = [source.read("features", at, min(at + 11, STEPS)) for at in range(0, STEPS, 11)]
        np.testing.assert_array_equal(np.concatenate(parts), wanted)
        notes = source.info.attributes["warnings"]
    assert any("never written" in note for note in notes) == (written < 12)


@pytest.mark.parametrize("kind", [k for k in FILTERED if "compact" not in k and "contig" not in k])
def test_shortened_chunks_are_refused(tmp_path: Path, kind: str) -> None:
    path, rng = tmp_path / "x.hdf5", np.random.default_rng(0)
    for keep in (1, 3, 20, -8):
        with h5py.File(path, "w") as file:
            for name, values in good_columns().items():
                if name != "observations":
                    file[name] = values
            made = FILTERED[kind](file)
            made[...] = rng.integers(0, 500, (STEPS, 3))
            mask, raw = made.id.read_direct_chunk((0, 0))
            made.id.write_direct_chunk((0, 0), raw[: min(keep, len(raw) - 4)], filter_mask=mask)
        refused(path, "SOURCE_READ")


@pytest.mark.parametrize("chunks", [(3750, 1), (1, 11)])  # of rows, as h5py's appending makes them
def test_chunks_across_columns_and_in_single_rows(tmp_path: Path, chunks: tuple[int, int]) -> None:
    steps, path = 30_000, tmp_path / "x.hdf5"
    columns = good_columns(steps) | {"observations": np.arange(steps * 11.0).reshape(steps, 11)}
    rows = columns.pop("observations")
    write(path, columns)
    options = {"compression": "gzip"} if chunks[1] == 1 else {}
    with h5py.File(path, "r+") as file:
        file.create_dataset(
            "observations", data=rows, maxshape=(None, 11), chunks=chunks, **options
        )
    with open_source(path) as source:
        assert source.preferred_rows("observations") % chunks[0] == 0
        ranges = [(at, min(at + 7777, steps)) for at in range(0, steps, 7777)]
        parts = [source.read("observations", *one) for one in ranges]
        assert np.concatenate(parts).tobytes() == rows.tobytes()


def virtual(file: h5py.File) -> None:
    layout = h5py.VirtualLayout((STEPS, 11), "f4")
    layout[:] = h5py.VirtualSource("other.h5", "x", (STEPS, 11))
    file.create_virtual_dataset("observations", layout)


def link_in_metadata(file: h5py.File) -> None:
    file["observations"] = np.zeros((STEPS, 11), "f4")
    file["metadata/x"] = h5py.ExternalLink("other.h5", "x")


def group_cycle(file: h5py.File) -> None:
    file["observations"] = np.zeros((STEPS, 11), "f4")
    file["infos/again"] = file["infos"]


def plugin_filter(file: h5py.File) -> None:
    plan = h5p.create(h5p.DATASET_CREATE)
    plan.set_chunk((STEPS, 11))
    plan.set_filter(32015, h5py.h5z.FLAG_OPTIONAL, ())
    h5d.create(file.id, b"observations", h5t.IEEE_F32LE, h5s.create_simple((STEPS, 11)), dcpl=plan)


def stored(shape: tuple[int, ...], dtype: str = "f4", **options: Any) -> Callable[..., Any]:
    return lambda file: file.create_dataset("observations", shape, dtype, **options)


def value(data: Any) -> Callable[..., Any]:
    return lambda file: file.update({"observations": data})


HOSTILE: dict[str, tuple[str, Callable[[h5py.File], Any]]] = {
    "external storage": (
        "SOURCE_UNSAFE",
        stored((STEPS, 11), external=[("/etc/passwd", 0, STEPS * 44)]),
    ),
    "virtual": ("SOURCE_UNSAFE", virtual),
    "soft link": ("SOURCE_UNSAFE", value(h5py.SoftLink("/next_observations"))),
    "external link": ("SOURCE_UNSAFE", value(h5py.ExternalLink("other.h5", "x"))),
    "link in metadata": ("SOURCE_UNSAFE", link_in_metadata),
    "group cycle": ("SOURCE_UNSAFE", group_cycle),
    "plugin filter": ("SOURCE_UNSAFE", plugin_filter),
    "wide step": (
        "COLUMN",
        stored((STEPS, (64 << 20) + 1), "u1", chunks=(1, 1 << 20), compression="gzip"),
    ),
    "huge chunk": ("SOURCE_UNSAFE", stored((STEPS, 11), chunks=(1 << 24, 11), maxshape=(None, 11))),
    "huge row of chunks": (
        "SOURCE_UNSAFE",
        stored((STEPS, 1 << 12), "u1", chunks=(1 << 20, 1), maxshape=(None, 1 << 12)),
    ),
    "shape bomb": ("SOURCE_LAYOUT", stored((1 << 50, 11), chunks=(1024, 11))),
    "no width": ("COLUMN", stored((STEPS, 0))),
    "scalar": ("COLUMN", value(1.0)),
    "short": ("SOURCE_LAYOUT", stored((STEPS - 1, 11))),
    "strings": ("COLUMN", value(["text"] * STEPS)),
    "compound": ("COLUMN", value(np.zeros(STEPS, [("a", "f4"), ("b", "i4")]))),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_file_is_refused(good: Path, kind: str) -> None:
    open_source(good).close()
    code, make = HOSTILE[kind]
    with h5py.File(good, "r+") as file:
        del file["observations"]
        make(file)
    refused(good, code)


def bomb() -> bytes:
    packer = zlib.compressobj(9)
    return packer.compress(bytes(1 << 24)) + packer.flush()


@pytest.mark.parametrize(
    ("raw", "mask", "filters"),
    [
        (b"\0", 1, {"compression": "gzip"}),
        (zlib.compress(b"abc"), 0, {"compression": "gzip"}),
        (zlib.compress(b"abc"), 0, {"compression": "gzip", "shuffle": True}),
        (zlib.compress(bytes(64_000))[:-4], 0, {"compression": "gzip"}),
        (bomb(), 0, {"compression": "gzip"}),
        (b"\x02abc", 0, {"compression": "lzf"}),
        (b"\xff" * 60_000, 0, {"compression": "lzf"}),
        (b"\0", 0, {}),
        (bytes(64_001), 0, {}),
    ],
)
def test_chunks_that_hold_other_bytes_than_they_claim(
    tmp_path: Path, raw: bytes, mask: int, filters: dict[str, Any]
) -> None:
    """HDF5 fills them up with what was in memory before, and the digests would seal that."""
    path = write(tmp_path / "x.hdf5", good_columns(640) | {"observations": np.ones(640)})
    with h5py.File(path, "r+") as file:
        del file["observations"]
        data = np.arange(640_000, dtype=np.uint64).astype(np.uint8).reshape(640, 1000)
        made = file.create_dataset("observations", data=data, chunks=(64, 1000), **filters)
        made.id.write_direct_chunk((64, 0), raw, filter_mask=mask)
    refused(path, "SOURCE_READ")


def test_parts_never_written_are_a_warning(tmp_path: Path) -> None:
    for steps in (5000, 1 << 40):
        path = tmp_path / "hopper.hdf5"
        with h5py.File(path, "w") as file:
            for name, width, dtype in (
                ("observations", (11,), "f4"),
                ("actions", (3,), "f4"),
                ("rewards", (), "f4"),
                ("terminals", (), "?"),
            ):
                chunks = None if name == "actions" else (4096, *width)
                file.create_dataset(name, (steps, *width), dtype, chunks=chunks)
        if steps > 5000:
            refused(path, "SOURCE_UNSAFE")
            continue
        with open_source(path) as source:
            assert any("never written" in w for w in source.info.attributes["warnings"])
            assert not source.read("actions", 0, steps).any()


def test_what_another_program_writes(tmp_path: Path, good: Path) -> None:
    refused(tmp_path / "absent.hdf5", "SOURCE_READ")
    with good.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # as HDF5 does in a program that writes
        refused(good, "SOURCE_READ", "another program")
    with open_source(good) as source:
        write(good, good_columns())
        with one_error("SOURCE_CHANGED"):
            source.read("rewards", 0, 1)


def test_bytes_of_flags_that_are_neither_true_nor_false(tmp_path: Path, good: Path) -> None:
    with h5py.File(good) as file:
        where = file["timeouts"].id.get_offset()
    raw = bytearray(good.read_bytes())
    raw[where + 3] = 7
    good.write_bytes(raw)
    with one_error("COLUMN", "bytes other than 0 and 1"):
        convert(good, tmp_path / "d", quiet=True)


FLAG_PAIRS = [
    ("terminals", "timeouts"),
    ("terminations", "truncations"),
    ("dones", None),
    ("done", None),
    (None, "timeouts"),
    ("dones", "timeouts"),
    ("terminated", "truncated"),
    ("terminals", "truncations"),
]


@settings(max_examples=30)
@given(steps=st.integers(1, 50), seed=st.integers(0, 2**32 - 1), names=st.sampled_from(FLAG_PAIRS))
def test_explicit_flags(
    tmp_path: Path, names: tuple[str | None, str | None], steps: int, seed: int
) -> None:
    terminal, time = names
    rng = np.random.default_rng(seed)
    columns: dict[str, Any] = table(steps, seed=seed)
    flags = {name: rng.random(steps) < 0.2 for name in names if name}
    columns |= flags
    ends = np.logical_or.reduce(list(flags.values()))
    cuts: Any = flags.get(str(time), ends)
    naive = naive_episodes(
        columns | {"terminals": flags.get(str(terminal), np.zeros(steps, bool))},
        lambda row, _: bool(ends[row]),
    )
    with open_source(write(tmp_path / "mine.h5", columns)) as source:
        assert isinstance(source, Source) and f"{steps} step" in repr(source)
        assert source.info.format == ("d4rl" if names == ("terminals", "timeouts") else "hdf5")
        if names == ("dones", "timeouts") and not (flags["timeouts"] & ~flags["dones"]).any():
            # true at both ends of an episode: the other flag tells which
            assert source.info.rule == "done-and-timeout"
            naive = [replace(e, terminated=e.terminated and not cuts[e.stop - 1]) for e in naive]
        else:
            assert source.info.rule == "|".join(flags)
            pair = len(flags) == 2 and PAIRS.get(str(terminal)) == time
            assert bool(source.info.attributes["warnings"]) != pair
        assert_same(source, columns, naive)


def test_columns_of_the_generic_layout(tmp_path: Path) -> None:
    columns: dict[str, Any] = {
        "observations/camera": np.arange(5 * 12, dtype=np.uint8).reshape(5, 2, 2, 3),
        "observations/state": np.arange(10.0).reshape(5, 2),
        "actions": np.arange(5),
        "rewards": np.ones(5),
        "next_observations/camera": np.zeros((5, 2, 2, 3), np.uint8),
        "terminations": np.zeros(5, bool),
        "truncations": np.zeros(5, bool),
        "weights": np.ones(5, np.float16),
    }
    left_out: dict[str, Any] = {
        "deep": np.ones((5, *[1] * 9)),
        "flat": np.ones((5, 0)),
        "few": np.ones(3),
        "text": np.array([b"a"] * 5),
    }
    renamed = {"Rewards": "Rewards_2", "bottom burner/ü": "bottom_burner/_"}
    extra = {name: np.full(5, float(number)) for number, name in enumerate(renamed)}
    with open_source(write(tmp_path / "x.hdf5", columns | left_out | extra)) as source:
        wanted = columns | {new: extra[old] for old, new in renamed.items()}
        assert_same(source, wanted, naive_episodes(columns, lambda *_: False))
        attributes = source.info.attributes
    assert attributes["unfinished_tail_steps"] == 5
    assert sorted(attributes["left_out"]) == sorted(left_out)
    assert "'bottom burner/ü' is the column bottom_burner/_" in attributes["warnings"]


def test_an_enumeration_in_which_zero_is_true_is_no_flag(tmp_path: Path, good: Path) -> None:
    ends = good_columns()["terminals"]
    for values in ({"FALSE": 0, "TRUE": 1}, {"TRUE": 0, "FALSE": 1}):
        with h5py.File(good, "a") as file:
            del file["terminals"]
            rows = np.where(ends, values["TRUE"], values["FALSE"]).astype("i1")
            file.create_dataset("terminals", data=rows, dtype=h5py.enum_dtype(values, "i1"))
        if values["TRUE"]:
            with open_source(good) as source:
                last = np.cumsum(source.episodes.lengths) - 1
                np.testing.assert_array_equal(last, [*np.flatnonzero(ends), STEPS - 1])
        else:
            refused(good, "COLUMN", "'terminals': it is an enumeration in which")


def test_something_must_end_episodes(tmp_path: Path) -> None:
    path = write(tmp_path / "y.hdf5", table(9))
    refused(path, "COLUMN", "steps=N")
    for rule in ("sometimes", "", "steps=0", "terminals|terminals"):
        refused(path, "SOURCE_LAYOUT", rule=rule)
    with open_source(path, rule="steps=4") as source:
        assert source.episodes.lengths.tolist() == [4, 4, 1]
