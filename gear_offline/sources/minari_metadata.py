"""What a Minari dataset's directory and metadata.json say; no data is read here."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gear_offline.errors import InputError
from gear_offline.sources.folder import hdf5_files
from gear_offline.sources.hdf5_guard import source_read_error

MAIN_FILE = "main_data.hdf5"
METADATA_FILE = "metadata.json"
MAX_METADATA_BYTES = 64 << 20
DATASET_ID = re.compile(r"(?:[\w-]+/)*[\w-]+-v[0-9]+")
MAX_ATTRIBUTE_BYTES = 1 << 20
_OLD_ATTRIBUTES = ("env_spec", "dataset_id", "algorithm_name", "author", "minari_version")
_LEAVES = ("Box", "Discrete", "MultiDiscrete", "MultiBinary", "Text")


@dataclass(frozen=True, kw_only=True)
class SpaceLeaf:
    """A leaf of an observation or action space.

    Attributes
    ----------
    keys
        Path of Dict keys and Tuple indices to the leaf, outermost first.
    kind
        Gymnasium's class name, e.g. ``"Box"``.
    shape
        Shape of one value; ``()`` for Discrete, ``None`` where it has none.
    is_image
        Minari may store such values as JPEG files; of which it did, the stored type tells.
    """

    keys: tuple[str, ...]
    kind: str
    shape: tuple[int, ...] | None
    is_image: bool


@dataclass(frozen=True, kw_only=True)
class MinariMetadata:
    """The parts of metadata.json that reading needs.

    Attributes
    ----------
    data_path
        Directory that holds the data.
    data_format
        ``"hdf5"``, ``"arrow"`` or ``"parquet"``.
    spaces
        Leaves of ``observations`` and ``actions``; a name is absent when the file does not say.
    environment_id
        Gymnasium id, ``None`` when the file does not say.
    dataset_id
        Minari's id, ``None`` when the file does not say.
    episodes, steps
        Totals, ``None`` when the file does not say.
    attributes
        Small facts for the provenance.
    """

    data_path: Path
    data_format: str
    spaces: dict[str, tuple[SpaceLeaf, ...]]
    environment_id: str | None
    dataset_id: str | None
    episodes: int | None
    steps: int | None
    attributes: dict[str, Any]


def find_directory(dataset_id: str) -> Path:
    """Return the directory of a local Minari dataset.

    Raises
    ------
    InputError
        ``MINARI_ID`` for a malformed id, ``MINARI_MISSING`` when it is not on this machine.
    """
    if not DATASET_ID.fullmatch(dataset_id):
        raise InputError(
            "MINARI_ID",
            f"{dataset_id!r} is not a Minari dataset id",
            remedy="ids look like mujoco/hopper/medium-v0",
        )
    root = os.environ.get("MINARI_DATASETS_PATH")
    base = Path(root) if root else Path.home() / ".minari" / "datasets"
    if not (base / dataset_id).is_dir():
        raise InputError(
            "MINARI_MISSING",
            f"Minari dataset {dataset_id} is not on this machine",
            where=str(base),
            remedy=f"run: minari download {dataset_id} (or set MINARI_DATASETS_PATH)",
        )
    return base / dataset_id


def data_directory(path: Path) -> Path | None:
    """Return the data directory when `path` is a Minari dataset's directory, else ``None``."""
    for candidate in (path / "data", path):
        if (candidate / MAIN_FILE).is_file():
            return candidate
        # A folder of HDF5 files may have a metadata.json of its own.
        if (candidate / METADATA_FILE).is_file() and not hdf5_files(candidate):
            return candidate
    return None


def read_metadata(data_path: Path) -> MinariMetadata:
    """Read metadata.json.

    Raises
    ------
    InputError
        ``MINARI_METADATA`` for a file that is not what Minari writes; ``SOURCE_READ``.
    """
    file = data_path / METADATA_FILE
    raw: dict[str, Any] = {}
    try:
        if file.exists():
            if file.stat().st_size > MAX_METADATA_BYTES:
                raise ValueError("larger than 64 MiB")
            raw = json.loads(file.read_text(encoding="utf-8"))
        else:
            raw = _attributes(data_path / MAIN_FILE)
        if not isinstance(raw, dict):
            raise TypeError("not a JSON object")
        spaces = {
            column: tuple(_leaves(_object(raw[key]), ()))
            for column, key in (("observations", "observation_space"), ("actions", "action_space"))
            if raw.get(key)
        }
        specification = _object(raw["env_spec"]) if raw.get("env_spec") else {}
        found = MinariMetadata(
            data_path=data_path,
            data_format=str(raw.get("data_format", "hdf5")),
            spaces=spaces,
            environment_id=_string(specification.get("id")),
            dataset_id=_string(raw.get("dataset_id")),
            episodes=int(raw["total_episodes"]) if "total_episodes" in raw else None,
            steps=int(raw["total_steps"]) if "total_steps" in raw else None,
            attributes={
                key: value
                for key, value in sorted(raw.items())
                if isinstance(value, str | int | float | bool)
                and len(str(value)) <= 500
                and value == value
                and key not in ("observation_space", "action_space", "env_spec")
            },
        )
    except InputError:  # of the file of data
        raise
    except OSError as error:
        raise source_read_error(file, error) from error
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise InputError(
            "MINARI_METADATA",
            f"not usable: {type(error).__name__}: {error}",
            where=str(file),
            remedy="the dataset is damaged: download it again",
        ) from error
    if found.data_format not in ("hdf5", "arrow", "parquet"):
        raise InputError(
            "MINARI_METADATA",
            f"data format {found.data_format!r} is not known",
            where=str(file),
            remedy="known are hdf5, arrow and parquet",
        )
    return found


def _attributes(file: Path) -> dict[str, Any]:
    """Return what versions of Minari before metadata.json wrote as attributes of its file."""
    from gear_offline.sources.hdf5_guard import LIBRARY_ERRORS, no_plugins, open_file

    found: dict[str, Any] = {}
    with open_file(file) as opened, no_plugins():
        for name in _OLD_ATTRIBUTES:
            with suppress(*LIBRARY_ERRORS):  # one that is missing or odd is no reason to refuse
                if opened.attrs.get_id(name).get_storage_size() <= MAX_ATTRIBUTE_BYTES:
                    value = opened.attrs[name]
                    found[name] = value.decode() if isinstance(value, bytes) else value
    return {name: value for name, value in found.items() if isinstance(value, str)}


def _object(value: Any) -> dict[str, Any]:
    """Return a JSON object that may be stored as a string."""
    found = json.loads(value) if isinstance(value, str) else value
    if not isinstance(found, dict):
        raise TypeError("a space or env_spec is not a JSON object")
    return found


def _string(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _leaves(space: dict[str, Any], keys: tuple[str, ...]) -> Iterator[SpaceLeaf]:
    kind = space["type"]
    if kind in ("Dict", "Tuple"):
        below = space["subspaces"]
        named = below.items() if kind == "Dict" else enumerate(below)
        for key, subspace in named:
            yield from _leaves(_object(subspace), (*keys, str(key)))
        return
    if kind not in _LEAVES:
        raise ValueError(f"space {kind!r} is not known")
    shape: tuple[int, ...] | None = None
    if kind == "Discrete":
        shape = ()
    elif kind == "Box":
        shape = tuple(int(n) for n in space["shape"])
    elif kind == "MultiDiscrete":
        shape = np.shape(space["nvec"])
    elif kind == "MultiBinary":
        shape = tuple(np.atleast_1d(space["n"]).astype(int).tolist())
    image = kind == "Box" and space.get("dtype") == "uint8" and _is_image(shape or (), space)
    yield SpaceLeaf(keys=keys, kind=kind, shape=shape, is_image=image)


def _is_image(shape: tuple[int, ...], space: dict[str, Any]) -> bool:
    """Minari's own criterion: 2-D or 3-D, at least 32 x 32, all values of uint8 allowed."""
    if len(shape) not in (2, 3) or shape[0] < 32 or shape[1] < 32:
        return False
    return bool(np.all(np.asarray(space["low"]) == 0) and np.all(np.asarray(space["high"]) == 255))
