"""Makers of HDF5 datasets that a reader of foreign files must refuse, with the expected code.

Each puts a hostile ``observations`` (or something else) into a good file of `STEPS` rows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
from h5py import h5d, h5p, h5s, h5t

from tests.hdf5_files import write

STEPS = 40


def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret.txt"
    path.write_bytes(b"TOPSECRET" * 1000)
    return path


def external_storage(file: h5py.File, tmp_path: Path) -> None:
    external = [(str(secret(tmp_path)), 0, STEPS * 44)]
    file.create_dataset("observations", (STEPS, 11), "f4", external=external)


def virtual(file: h5py.File, tmp_path: Path) -> None:
    other = write(tmp_path / "other.h5", {"x": np.zeros((STEPS, 11), "f4")})
    layout = h5py.VirtualLayout((STEPS, 11), "f4")
    layout[:] = h5py.VirtualSource(str(other), "x", (STEPS, 11))
    file.create_virtual_dataset("observations", layout)


def soft_link(file: h5py.File, tmp_path: Path) -> None:
    file["observations"] = h5py.SoftLink("/next_observations")


def external_link(file: h5py.File, tmp_path: Path) -> None:
    write(tmp_path / "other.h5", {"x": np.zeros((STEPS, 11), "f4")})
    file["observations"] = h5py.ExternalLink(str(tmp_path / "other.h5"), "x")


def link_in_metadata(file: h5py.File, tmp_path: Path) -> None:
    file["observations"] = np.zeros((STEPS, 11), "f4")
    file["metadata/x"] = h5py.ExternalLink(str(tmp_path / "other.h5"), "x")


def group_cycle(file: h5py.File, tmp_path: Path) -> None:
    file["observations"] = np.zeros((STEPS, 11), "f4")
    file["infos/again"] = file["infos"]


def plugin_filter(file: h5py.File, tmp_path: Path) -> None:
    plan = h5p.create(h5p.DATASET_CREATE)
    plan.set_chunk((STEPS, 11))
    plan.set_filter(32015, h5py.h5z.FLAG_OPTIONAL, ())
    h5d.create(file.id, b"observations", h5t.IEEE_F32LE, h5s.create_simple((STEPS, 11)), dcpl=plan)


def scale_offset(file: h5py.File, tmp_path: Path) -> None:
    file.create_dataset("observations", data=np.zeros((STEPS, 11), "f4"), scaleoffset=2)


def twice_gzip(file: h5py.File, tmp_path: Path) -> None:
    plan = h5p.create(h5p.DATASET_CREATE)
    plan.set_chunk((STEPS, 11))
    plan.set_deflate(9)
    plan.set_deflate(9)
    space = h5s.create_simple((STEPS, 11))
    made = h5d.create(file.id, b"observations", h5t.IEEE_F32LE, space, dcpl=plan)
    made.write(h5s.ALL, h5s.ALL, np.zeros((STEPS, 11), "f4"))


def shape_bomb(file: h5py.File, tmp_path: Path) -> None:
    file.create_dataset("observations", (1 << 50, 11), "f4", chunks=(1024, 11))


def contiguous_bomb(file: h5py.File, tmp_path: Path) -> None:
    file.create_dataset("observations", (1 << 50, 11), "f4")


def huge_chunks(file: h5py.File, tmp_path: Path) -> None:
    file.create_dataset(
        "observations", (STEPS, 11), "f4", chunks=(1 << 24, 11), maxshape=(None, 11)
    )


def no_width(file: h5py.File, tmp_path: Path) -> None:
    file.create_dataset("observations", (STEPS, 0), "f4")


def scalar(file: h5py.File, tmp_path: Path) -> None:
    file["observations"] = 1.0


def null_space(file: h5py.File, tmp_path: Path) -> None:
    file["observations"] = h5py.Empty("f4")


def strings(file: h5py.File, tmp_path: Path) -> None:
    file["observations"] = ["text"] * STEPS


def references(file: h5py.File, tmp_path: Path) -> None:
    file.create_dataset("observations", (STEPS,), h5py.ref_dtype)


def compound(file: h5py.File, tmp_path: Path) -> None:
    file["observations"] = np.zeros(STEPS, [("a", "f4"), ("b", "i4")])


def vlen(file: h5py.File, tmp_path: Path) -> None:
    file.create_dataset("observations", (STEPS,), h5py.vlen_dtype(np.float32))


def long_double(file: h5py.File, tmp_path: Path) -> None:
    file["observations"] = np.zeros((STEPS, 11), np.longdouble)


def short(file: h5py.File, tmp_path: Path) -> None:
    file["observations"] = np.zeros((STEPS - 1, 11), "f4")


def missing(file: h5py.File, tmp_path: Path) -> None:
    del file["actions"]


HOSTILE: list[tuple[Callable[[h5py.File, Path], None], str]] = [
    (external_storage, "HDF5_EXTERNAL_STORAGE"),
    (virtual, "HDF5_VIRTUAL"),
    (soft_link, "HDF5_LINK"),
    (external_link, "HDF5_LINK"),
    (link_in_metadata, "HDF5_LINK"),
    (group_cycle, "HDF5_LINK"),
    (plugin_filter, "HDF5_FILTER"),
    (scale_offset, "HDF5_FILTER"),
    (twice_gzip, "HDF5_FILTER"),
    (shape_bomb, "HDF5_LENGTHS"),
    (contiguous_bomb, "HDF5_LENGTHS"),
    (huge_chunks, "HDF5_SHAPE"),
    (no_width, "HDF5_SHAPE"),
    (scalar, "HDF5_LENGTHS"),
    (null_space, "HDF5_LENGTHS"),
    (strings, "HDF5_DTYPE"),
    (references, "HDF5_DTYPE"),
    (compound, "HDF5_DTYPE"),
    (vlen, "HDF5_DTYPE"),
    (long_double, "HDF5_DTYPE"),
    (short, "HDF5_LENGTHS"),
    (missing, "COLUMN_MISSING"),
]
