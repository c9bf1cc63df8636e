"""Minari datasets, read by the minari package.

An episode of T steps has T + 1 observations: ``observations`` are the first T of them and
``next_observations`` the last T.  Dict and Tuple spaces become columns named by their path, e.g.
``observations/achieved_goal`` or ``actions/0``.

Shape legend: N steps, E episodes, T steps of one episode.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from gear_offline.core.files import read_regular
from gear_offline.core.text import count_text
from gear_offline.core.types import Array
from gear_offline.errors import GearError, InputError
from gear_offline.sources.arrays import kinds_of_arrays
from gear_offline.sources.base import (
    InputFile,
    Kinds,
    Piece,
    Source,
    SourceInfo,
    common_columns,
    files_in,
    package_needed,
)
from gear_offline.sources.flat import SUFFIXES
from gear_offline.sources.hdf5 import Hdf5File

MAIN_FILE, METADATA_FILE = "main_data.hdf5", "metadata.json"
MAX_METADATA_BYTES = 64 << 20
LONG = ("observation_space", "action_space", "env_spec")  # of the metadata
KEPT_BYTES = 320 << 20  # of decoded episodes: those of a shard are not decoded for each column
COLUMNS = ("observations", "actions", "rewards", "next_observations", "terminations", "truncations")
REMEDY = "it is damaged or of another version of Minari: get it again, minari download ID"
DATASET_ID = re.compile(r"(?:[\w-]+/)*[\w-]+-v[0-9]+")
Episode = dict[str, Array]


def find_directory(dataset_id: str) -> Path:
    """Return the directory of a local Minari dataset."""
    if not DATASET_ID.fullmatch(dataset_id):
        what = f"{dataset_id!r} is not a Minari dataset id"
        raise InputError("SOURCE_READ", what, remedy="ids look like mujoco/hopper/medium-v0")
    root = os.environ.get("MINARI_DATASETS_PATH")
    base = Path(root) if root else Path.home() / ".minari" / "datasets"
    if not (base / dataset_id).is_dir():
        what = f"Minari dataset {dataset_id} is not on this machine"
        remedy = f"run: minari download {dataset_id} (or set MINARI_DATASETS_PATH)"
        raise InputError("SOURCE_READ", what, where=str(base), remedy=remedy)
    return base / dataset_id


def data_directory(path: Path) -> Path | None:
    """Return the data directory when `path` is a Minari dataset's directory, else ``None``."""
    for candidate in (path / "data", path):
        # A folder of HDF5 files may have a metadata.json of its own.
        if (candidate / MAIN_FILE).exists() or (
            (candidate / METADATA_FILE).exists() and not files_in(candidate, SUFFIXES)
        ):
            return candidate
    return None


def open_minari(path: Path, *, uri: str) -> Source:
    """Open a Minari dataset's directory, or the ``data`` in it; reads each episode once."""
    data = data_directory(path.absolute())
    assert data is not None, "the caller looked"
    metadata = _read_metadata(data)
    files, total = _data_files(data, metadata), int(metadata["total_episodes"])
    reader = _Reader(data)
    lengths, terminated, columns = reader.scan(total)
    steps = sum(lengths)
    if not steps or steps != int(metadata.get("total_steps", steps)):
        says = f"metadata.json says {metadata.get('total_steps')}"
        raise _damaged("SOURCE_LAYOUT", f"the data hold {count_text(steps, 'step')}, {says}", data)
    notes: list[str] = []
    if total > len(lengths):
        notes.append(f"{count_text(total - len(lengths), 'episode')} without steps left out")
    left_out = reader.left_out.items()
    notes += [f"{n} is left out: {why}" for n, why in left_out if not n.startswith("infos/")]
    if not uri.startswith("minari:") and metadata.get("dataset_id"):
        uri = f"minari:{metadata['dataset_id']}"
    return Source(
        [Piece(read=partial(reader.read, i), steps=length) for i, length in enumerate(lengths)],
        columns,
        lengths=lengths,
        terminated=terminated,
        info=SourceInfo(
            uri=uri,
            format="minari",
            rule="episodes",
            environment_id=_environment(metadata),
            files=files,
            attributes={
                "metadata": {k: metadata[k] for k in sorted(metadata) if k not in LONG},
                "left_out": reader.left_out,
                "unfinished_tail_steps": 0,
                "warnings": notes,
            },
        ),
    )


class _Reader:
    """Decodes episodes by the minari package, and keeps those that were decoded last."""

    def __init__(self, data: Path) -> None:
        self.left_out: dict[str, str] = {}  # what is stored and no column: why
        self._numbers: list[int] = []  # Minari's, of each episode that has steps
        self._data, self._storage = data, _open_storage(data)
        self._kept: dict[int, Episode] = {}
        self._kept_bytes = 0

    def scan(self, total: int) -> tuple[list[int], list[bool], Kinds]:
        """Decode all episodes; return lengths, how they ended, and the columns that all have."""
        lengths: list[int] = []
        terminated: list[bool] = []
        kinds: list[tuple[str, Kinds]] = []
        for number, episode in self._decode(range(total)):
            if not len(episode["rewards"]):
                continue
            self._keep(number, episode)
            self._numbers.append(number)
            lengths.append(len(episode["rewards"]))
            terminated.append(bool(episode["terminations"][-1].any()))
            kinds.append((f"episode {number}", kinds_of_arrays(episode)))
        if not kinds:
            return lengths, terminated, {}
        columns, left_out = common_columns(kinds, COLUMNS, where=self._data, remedy=REMEDY)
        self.left_out |= left_out
        return lengths, terminated, columns

    def read(self, index: int, column: str, start: int, stop: int) -> Array:
        """Return rows of an episode; with one that is not kept the next ones are decoded."""
        number = self._numbers[index]
        if number not in self._kept:
            self._kept, self._kept_bytes = {}, 0
            for other, episode in self._decode(self._numbers[index:]):
                self._keep(other, episode)
                if self._kept_bytes > KEPT_BYTES:
                    break
        return self._kept[number][column][start:stop]

    def _keep(self, number: int, episode: Episode) -> None:
        """Keep an episode as long as there is room; next observations take none."""
        if self._kept_bytes <= KEPT_BYTES:
            self._kept[number] = episode
            own = (rows for name, rows in episode.items() if not name.startswith("next_"))
            self._kept_bytes += sum(rows.nbytes for rows in own)

    def _decode(self, numbers: Sequence[int]) -> Iterator[tuple[int, Episode]]:
        """Yield episodes as columns."""
        # Of arrow files minari takes several only if all have the same infos.
        one_file = (self._data / MAIN_FILE).exists()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for run in [numbers] if one_file else [[number] for number in numbers]:
                    for number, raw in zip(run, self._storage.get_episodes(run), strict=True):
                        yield number, self._columns(raw, number)
        except (GearError, MemoryError):
            raise
        except Exception as error:  # what the package raises of damaged files is not told
            what = f"the minari package cannot read it: {type(error).__name__}: {error}"
            raise _damaged("SOURCE_READ", what, self._data) from error

    def _columns(self, raw: Mapping[str, Any], number: int) -> Episode:
        """Return the columns of an episode, (T, *shape) each, in the order of the table."""
        rewards = np.asarray(raw["rewards"])
        steps = len(rewards)
        observations = self._leaves("observations", raw["observations"])
        columns = {name: rows[:-1] for name, rows in observations.items()}
        columns |= self._leaves("actions", raw["actions"])
        columns["rewards"] = rewards
        columns |= {f"next_{name}": rows[1:] for name, rows in observations.items()}
        columns |= {flag: np.asarray(raw[flag]) for flag in ("terminations", "truncations")}
        for name, rows in self._leaves("infos", raw["infos"] or {}).items():
            if len(rows) in (steps, steps + 1):
                columns[name] = rows[:steps]
            else:
                has = count_text(len(rows), "row")
                self.left_out[name] = f"{has} for {count_text(steps, 'step')}"
        for name, rows in columns.items():
            if len(rows) != steps:
                what = f"{count_text(len(rows), 'row')} of {name} for {count_text(steps, 'step')}"
                raise _damaged("SOURCE_LAYOUT", what, self._data, number)
        return columns

    def _leaves(self, name: str, value: Any) -> Episode:
        """Return the arrays below `name`; what is no array of numbers is left out."""
        if isinstance(value, Mapping | tuple):
            parts = value.items() if isinstance(value, Mapping) else enumerate(value)
            leaves: Episode = {}
            for key, part in parts:
                leaves |= self._leaves(f"{name}/{str(key).replace('/', '_')}", part)
            return leaves
        rows = np.asarray(value)
        if rows.dtype.kind in "biufc" and rows.ndim:
            return {name: rows}
        self.left_out[name] = "text" if rows.dtype.kind in "SU" else f"no numbers ({rows.dtype})"
        return {}


def _open_storage(data: Path) -> Any:
    """Return minari's reader of a data directory."""
    with package_needed("Minari datasets are read by the minari package", "minari"):
        from minari.dataset.minari_storage import MinariStorage
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return MinariStorage.read(data)
    except Exception as error:
        what = f"not usable: {type(error).__name__}: {error}"
        raise _damaged("SOURCE_LAYOUT", what, data) from error


def _read_metadata(data: Path) -> dict[str, Any]:
    """Return what metadata.json says."""
    path = data / METADATA_FILE
    if not path.exists():
        what = "the dataset has no metadata.json, as those of Minari before 0.5"
        raise _damaged("SOURCE_READ", what, data)
    try:
        metadata = json.loads(read_regular(path, most=MAX_METADATA_BYTES))
        # Without spaces minari would make the environment, whose module a stranger may have named.
        if not isinstance(metadata, dict) or not all(
            isinstance(metadata.get(space), str) for space in ("observation_space", "action_space")
        ):
            raise ValueError("no metadata of Minari")
        int(metadata["total_episodes"]), int(metadata.get("total_steps", 0))
        return metadata
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        what = f"not usable: {type(error).__name__}: {error}"
        raise _damaged("SOURCE_READ", what, path) from error


def _data_files(data: Path, metadata: Mapping[str, Any]) -> tuple[InputFile, ...]:
    """Return the files to digest; only regular ones are accepted, and HDF5 is looked through."""
    if metadata.get("data_format", "hdf5") == "hdf5":
        with Hdf5File(data / MAIN_FILE) as file:
            file.check_all()
            return (file.file,)
    folders = [data / str(number) for number in range(int(metadata["total_episodes"]))]
    found = [InputFile.find(path) for folder in folders for path in sorted(folder.glob("*"))]
    return tuple(file for file in found if file.path.name != METADATA_FILE)


def _environment(metadata: Mapping[str, Any]) -> str | None:
    try:
        name = json.loads(metadata["env_spec"])["id"]
    except (KeyError, TypeError, ValueError):
        return None
    return name if isinstance(name, str) and name else None


def _damaged(code: str, what: str, path: Path, episode: int | None = None) -> InputError:
    where = str(path) if episode is None else f"{path}: episode {episode}"
    return InputError(code, what, where=where, remedy=REMEDY)
