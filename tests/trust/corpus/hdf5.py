"""HDF5 files that are not what they should be."""

from __future__ import annotations

import math
import os
import socket
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from tests.hostile_hdf5 import HOSTILE
from tests.trust.corpus.case import STEPS, Case, Make, good_columns, good_hdf5

FILE = "x.hdf5"


def case(name: str, code: str, make: Make, *options: str, says: str = FILE) -> Case:
    return Case(
        name=f"hdf5/{name}",
        code=code,
        arguments=["convert", FILE, "out", "--quiet", *options],
        make=make,
        says=says if code else "",
    )


def hostile(make: Callable[[h5py.File, Path], None]) -> Make:
    def spoil(folder: Path) -> None:
        good_hdf5(folder / FILE)
        with h5py.File(folder / FILE, "r+") as file:
            if (
                make.__name__ not in ("link_in_metadata", "group_cycle", "missing")
                or make.__name__ != "missing"
            ):
                del file["observations"]
            make(file, folder)

    return spoil


def changed(**columns: Any) -> Make:
    return lambda folder: good_hdf5(folder / FILE, **columns)


def content(raw: bytes) -> Make:
    return lambda folder: (folder / FILE).write_bytes(raw)


def cut(keep: float) -> Make:
    def spoil(folder: Path) -> None:
        path = good_hdf5(folder / FILE)
        os.truncate(path, int(path.stat().st_size * keep))

    return spoil


def edited(edit: Callable[[h5py.File], object]) -> Make:
    def spoil(folder: Path) -> None:
        good_hdf5(folder / FILE)
        with h5py.File(folder / FILE, "r+") as file:
            edit(file)

    return spoil


def with_value(column: str, value: float, row: int = 7) -> Make:
    values = good_columns()[column].copy()
    values[row] = value
    return changed(**{column: values})


def bomb(*, chunks: bool, compression: str | None = None) -> Make:
    """Every column claims 2^40 rows."""

    def spoil(folder: Path) -> None:
        with h5py.File(folder / FILE, "w") as file:
            for name, values in good_columns().items():
                file.create_dataset(
                    name,
                    (1 << 40, *values.shape[1:]),
                    values.dtype,
                    chunks=(1024, *values.shape[1:]) if chunks else None,
                    compression=compression,
                )

    return spoil


def zeros(folder: Path) -> None:
    """Chunks of zeros that compress a thousand to one: 8.8 GB in 8.6 MB."""
    rows, wide = 1 << 20, 2048
    with h5py.File(folder / FILE, "w") as file:
        for name in ("observations", "actions", "rewards", "terminals", "timeouts"):
            shape = (rows, wide) if name == "observations" else (rows,)
            dtype = good_columns()[name].dtype
            chunk = (4096, *shape[1:])
            made = file.create_dataset(name, shape, dtype, chunks=chunk, compression="gzip")
            packed = zlib.compress(bytes(dtype.itemsize * math.prod(chunk)), 9)
            for start in range(0, rows, 4096):
                made.id.write_direct_chunk((start, 0)[: len(shape)], packed)


def one_chunk(nbytes: int) -> Make:
    """Every column in chunks of `nbytes`, most of them never written."""

    def spoil(folder: Path) -> None:
        with h5py.File(folder / FILE, "w") as file:
            for name, values in good_columns().items():
                width = values[0].nbytes
                file.create_dataset(
                    name,
                    data=values,
                    chunks=(nbytes // width, *values.shape[1:]),
                    maxshape=(None, *values.shape[1:]),
                    compression="gzip",
                )

    return spoil


def nested(folder: Path) -> None:
    good_hdf5(folder / FILE)
    with h5py.File(folder / FILE, "r+") as file:
        group = file["infos"]
        for _ in range(2_000):
            group = group.create_group("g")


def many(folder: Path) -> None:
    with h5py.File(folder / FILE, "w", libver="latest") as file:
        for name, values in good_columns().items():
            file[name] = values
        for index in range(20_001):
            file.create_group(f"infos/g{index}")


def enumeration(folder: Path) -> None:
    """A bool column whose bytes are 0 to 9."""
    good_hdf5(folder / FILE)
    with h5py.File(folder / FILE, "r+") as file:
        offset = file["timeouts"].id.get_offset()
    with open(folder / FILE, "r+b") as raw:
        raw.seek(offset)
        raw.write(bytes(range(10)) * (STEPS // 10))


def pipe(folder: Path) -> None:
    os.mkfifo(folder / FILE)


def door(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        here = os.getcwd()
        try:
            os.chdir(folder)  # names of sockets are short
            server.bind(FILE)
        finally:
            os.chdir(here)


def link(target: str) -> Make:
    return lambda folder: (folder / FILE).symlink_to(target)


ROWS = np.arange(STEPS)
REQUIRED = ("observations", "actions", "rewards")
WRONG_TYPES: dict[str, tuple[Any, str]] = {
    "strings": (["text"] * STEPS, "HDF5_DTYPE"),
    "bytes": (np.array([b"ab"] * STEPS), "HDF5_DTYPE"),
    "opaque": (np.zeros(STEPS, "V7"), "HDF5_DTYPE"),
    "compound": (np.zeros(STEPS, [("a", "f4")]), "HDF5_DTYPE"),
    "short": (np.zeros(STEPS - 1, "f4"), "HDF5_LENGTHS"),
    "long": (np.zeros(STEPS + 1, "f4"), "HDF5_LENGTHS"),
    "scalar": (np.float32(1), "HDF5_LENGTHS"),
    "no-rows": (np.zeros(0, "f4"), "HDF5_LENGTHS"),
}

CASES: tuple[Case, ...] = (
    *(case(m.__name__.replace("_", "-"), code, hostile(m)) for m, code in HOSTILE),
    *(case(f"{c}-missing", "COLUMN_MISSING", changed(**{c: None})) for c in REQUIRED),
    *(
        case(f"{column}-{name}", code, changed(**{column: values}))
        for column in REQUIRED
        for name, (values, code) in WRONG_TYPES.items()
    ),
    *(
        case(f"{column}-{name}", "NONFINITE", with_value(column, value), says=column)
        for column in (*REQUIRED, "infos/qpos")
        for name, value in (("nan", np.nan), ("inf", np.inf))
    ),
    *(case(f"cut-at-{keep}", "HDF5_UNREADABLE", cut(keep)) for keep in (0.01, 0.1, 0.5, 0.9, 0.99)),
    case("empty", "HDF5_UNREADABLE", content(b"")),
    case("text", "HDF5_UNREADABLE", content(b"not a dataset\n" * 100)),
    case("zeros", "HDF5_UNREADABLE", content(bytes(10_000))),
    case("magic-alone", "HDF5_UNREADABLE", content(b"\x89HDF\r\n\x1a\n")),
    case("magic-and-ones", "HDF5_UNREADABLE", content(b"\x89HDF\r\n\x1a\n" + b"\xff" * 5000)),
    case("pickle", "HDF5_UNREADABLE", content(b"\x80\x04cos\nsystem\n(S'touch pwned'\ntR.")),
    case("zip", "HDF5_UNREADABLE", content(b"PK\x03\x04" + bytes(500))),
    case("shape-bomb-contiguous", "HDF5_SHAPE", bomb(chunks=False)),
    case("shape-bomb-chunked", "HDF5_SHAPE", bomb(chunks=True)),
    case("shape-bomb-gzip", "HDF5_SHAPE", bomb(chunks=True, compression="gzip")),
    case("compression-bomb", "HDF5_SHAPE", zeros),
    case("chunk-bomb", "HDF5_SHAPE", one_chunk(200 << 20)),
    case("nested-groups", "HDF5_OBJECTS", nested),
    case("many-objects", "HDF5_OBJECTS", many),
    case("impossible-bool", "HDF5_VALUE", enumeration),
    case("nan-flag", "HDF5_VALUE", changed(terminals=np.where(ROWS == 3, np.nan, 0.0))),
    case("string-flag", "HDF5_DTYPE", changed(terminals=["no"] * STEPS)),
    case("wide-flag", "HDF5_SHAPE", changed(terminals=np.zeros((STEPS, 3), bool))),
    case("wide-rewards", "HDF5_SHAPE", changed(rewards=np.zeros((STEPS, 2), "f4"))),
    case("complex-rewards", "REWARDS", changed(rewards=np.zeros(STEPS, "c8"))),
    case("no-flags", "COLUMN_MISSING", changed(terminals=None, timeouts=None), says="steps=N"),
    case(
        "reserved-column",
        "COLUMN_NAME",
        changed(episode_lengths=ROWS),
        says="episode_lengths",
    ),
    case("good-column-clash", "", changed(**{"infos/QPOS": ROWS.astype("f4")})),
    case("only-groups", "COLUMN_MISSING", lambda f: h5py.File(f / FILE, "w").close()),
    case("self-link", "HDF5_LINK", edited(lambda f: f.__setitem__("a", h5py.SoftLink("/a")))),
    case("root-in-itself", "HDF5_LINK", edited(lambda f: f.__setitem__("infos/r", f["/"]))),
    case(
        "passwd-link",
        "HDF5_LINK",
        edited(lambda f: f.__setitem__("p", h5py.ExternalLink("/etc/passwd", "x"))),
    ),
    case("no-such-file", "FILE_MISSING", lambda folder: None),
    case("directory", "SOURCE_UNKNOWN", lambda folder: (folder / FILE).mkdir()),
    case("pipe", "HDF5_UNREADABLE", pipe),
    case("socket", "HDF5_UNREADABLE", door),
    case("device", "HDF5_UNREADABLE", link("/dev/zero")),
    case("dangling", "FILE_MISSING", link("nowhere")),
    case("link-loop", "SOURCE_READ", link(FILE)),
    case("rule-unknown", "RULE_UNKNOWN", changed(), "--rule", "sometimes", says="sometimes"),
    case("rule-zero", "RULE_UNKNOWN", changed(), "--rule", "steps=0", says="steps=0"),
    case("rule-flag", "RULE_FLAG", changed(), "--rule", "truncations"),
    case("columns-unknown", "COLUMN_MISSING", changed(), "--columns", "nope", says="nope"),
    case("good", "", changed()),
    case("good-large-chunks", "", one_chunk(4 << 20)),
    case("good-big-endian", "", changed(**{n: good_columns()[n].astype(">f8") for n in REQUIRED})),
    case("good-nan-allowed", "", with_value("actions", np.nan), "--allow-nonfinite"),
    case("good-odd-names", "", changed(**{"infos/..": ROWS, "infos/a b": ROWS, "x\x1b[2J": ROWS})),
)
