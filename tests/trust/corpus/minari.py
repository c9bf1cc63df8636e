"""Folders that pass for Minari datasets."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from tests.trust.corpus.case import Case, Make
from tests.trust.seeds import minari_seed


def case(name: str, code: str, make: Make, *, says: str = "m") -> Case:
    return Case(
        name=f"minari/{name}",
        code=code,
        arguments=["convert", "m", "out", "--quiet"],
        make=make,
        says=says if code else "",
    )


def good(folder: Path) -> Path:
    metadata, data = minari_seed()
    (folder / "m").mkdir()
    (folder / "m" / "metadata.json").write_bytes(metadata)
    (folder / "m" / "main_data.hdf5").write_bytes(data)
    return folder / "m"


def metadata(raw: bytes) -> Make:
    return lambda folder: (good(folder) / "metadata.json").write_bytes(raw)


def said(**changes: Any) -> Make:
    document = {**json.loads(minari_seed()[0]), **changes}
    return metadata(json.dumps(document).encode())


def data(edit: Callable[[h5py.File], object]) -> Make:
    def spoil(folder: Path) -> None:
        with h5py.File(good(folder) / "main_data.hdf5", "r+") as file:
            edit(file)

    return spoil


def replaced(name: str, values: Any, **options: Any) -> Make:
    def edit(file: h5py.File) -> None:
        del file[name]
        file.create_dataset(name, data=values, **options)

    return data(edit)


def external(file: h5py.File) -> None:
    del file["episode_0/actions"]
    file.create_dataset("episode_0/actions", (3, 2), "f4", external=[("/etc/passwd", 0, 24)])


def virtual(file: h5py.File) -> None:
    del file["episode_0/actions"]
    layout = h5py.VirtualLayout((3, 2), "f4")
    layout[:] = h5py.VirtualSource("/etc/passwd", "x", (3, 2))
    file.create_virtual_dataset("episode_0/actions", layout)


def huge(file: h5py.File) -> None:
    for name, shape in (("observations", ((1 << 40) + 1, 2)), ("actions", (1 << 40, 2))):
        del file[f"episode_0/{name}"]
        file.create_dataset(f"episode_0/{name}", shape, "f4")
    for name in ("rewards", "terminations", "truncations"):
        dtype = file[f"episode_0/{name}"].dtype
        del file[f"episode_0/{name}"]
        file.create_dataset(f"episode_0/{name}", (1 << 40,), dtype)


def jpeg(folder: Path) -> None:
    frames = {**SPACE, "dtype": "uint8", "shape": [40, 40], "low": 0, "high": 255}
    document = {**json.loads(minari_seed()[0]), "observation_space": frames}
    (good(folder) / "metadata.json").write_bytes(json.dumps(document).encode())
    with h5py.File(folder / "m" / "main_data.hdf5", "r+") as file:
        for episode in ("episode_0", "episode_1"):
            rows = len(file[f"{episode}/observations"])
            del file[f"{episode}/observations"]
            made = file.create_dataset(f"{episode}/observations", (rows,), h5py.vlen_dtype("u1"))
            for row in range(rows):
                made[row] = np.frombuffer(b"\xff\xd8\xff", np.uint8)


def arrow(raw: bytes) -> Make:
    def spoil(folder: Path) -> None:
        said(data_format="arrow")(folder)
        (folder / "m" / "main_data.hdf5").unlink()
        (folder / "m" / "0").mkdir()
        (folder / "m" / "0" / "part-0.arrow").write_bytes(raw)

    return spoil


def parquet(raw: bytes) -> Make:
    def spoil(folder: Path) -> None:
        said(data_format="parquet")(folder)
        (folder / "m" / "0").mkdir()
        (folder / "m" / "0" / "part-0.parquet").write_bytes(raw)

    return spoil


def without(name: str) -> Make:
    return lambda folder: (good(folder) / name).unlink()


def remove(*names: str) -> Make:
    def edit(file: h5py.File) -> None:
        for name in names:
            del file[name]

    return data(edit)


SPACE = {"type": "Box", "dtype": "float32", "shape": [2], "low": [-1, -1], "high": [1, 1]}
DEEP = '{"type":"Tuple","subspaces":[' * 5000 + "]}" * 5000

CASES: tuple[Case, ...] = (
    case("good", "", good),
    case("empty-folder", "SOURCE_UNKNOWN", lambda folder: (folder / "m").mkdir()),
    case("metadata-empty", "MINARI_METADATA", metadata(b"")),
    case("metadata-list", "MINARI_METADATA", metadata(b"[]")),
    case("metadata-binary", "MINARI_METADATA", metadata(b"\xff\xfe\x00")),
    case("metadata-deep", "MINARI_METADATA", metadata(b"[" * 100_000)),
    case("metadata-format", "MINARI_METADATA", said(data_format="pickle")),
    case("metadata-totals", "MINARI_METADATA", said(total_steps="many")),
    case("metadata-huge-number", "MINARI_METADATA", metadata(b'{"total_steps": 1e999}')),
    case("space-unknown", "MINARI_METADATA", said(observation_space={"type": "Graph"})),
    case("space-not-object", "MINARI_METADATA", said(action_space="[1]")),
    case("space-deep", "MINARI_METADATA", said(action_space=DEEP)),
    case("space-no-shape", "MINARI_METADATA", said(action_space={"type": "Box"})),
    case("jpeg", "MINARI_JPEG", jpeg),
    case("steps-disagree", "MINARI_LAYOUT", said(total_steps=7)),
    case("episodes-disagree", "MINARI_LAYOUT", said(total_episodes=1)),
    case("data-missing", "FILE_MISSING", without("main_data.hdf5")),
    case("data-empty", "HDF5_UNREADABLE", lambda f: (good(f) / "main_data.hdf5").write_bytes(b"")),
    case("no-episodes", "MINARI_LAYOUT", remove("episode_0", "episode_1")),
    case("no-actions", "MINARI_LAYOUT", remove("episode_1/actions")),
    case("no-rewards", "MINARI_LAYOUT", remove("episode_0/rewards")),
    case("short-actions", "MINARI_LAYOUT", replaced("episode_0/actions", np.zeros((2, 2), "f4"))),
    case("short-states", "MINARI_LAYOUT", replaced("episode_0/observations", np.zeros((3, 2)))),
    case("wider-actions", "MINARI_LAYOUT", replaced("episode_1/actions", np.zeros((3, 5), "f4"))),
    case("string-rewards", "MINARI_LAYOUT", replaced("episode_0/rewards", ["a", "b", "c"])),
    case("nan-rewards", "NONFINITE", replaced("episode_0/rewards", np.full(3, np.nan)), says="rew"),
    case("compound", "MINARI_LAYOUT", replaced("episode_1/actions", np.zeros(3, [("a", "f4")]))),
    case("external-storage", "HDF5_EXTERNAL_STORAGE", data(external)),
    case("virtual", "HDF5_VIRTUAL", data(virtual)),
    case("shape-bomb", "HDF5_SHAPE", data(huge)),
    case(
        "link", "HDF5_LINK", data(lambda f: f.__setitem__("episode_2", h5py.SoftLink("/episode_0")))
    ),
    case(
        "same-episode-twice",
        "HDF5_LINK",
        data(lambda f: f.__setitem__("episode_2", f["episode_0"])),
    ),
    case(
        "scale-offset",
        "HDF5_FILTER",
        replaced("episode_0/actions", np.zeros((3, 2), "f4"), scaleoffset=2),
    ),
    case("arrow-empty", "MINARI_LAYOUT", arrow(b"")),
    case("arrow-garbage", "MINARI_LAYOUT", arrow(b"ARROW1\0\0" + b"\xff" * 500 + b"ARROW1")),
    case("parquet-empty", "MINARI_LAYOUT", parquet(b"")),
    case("parquet-garbage", "MINARI_LAYOUT", parquet(b"PAR1" + b"\xff" * 500 + b"PAR1")),
)
