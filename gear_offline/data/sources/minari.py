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
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from gear_offline.core.text import count_text
from gear_offline.core.types import Array
from gear_offline.data.dataset.schema import is_storable
from gear_offline.data.sources.base import Piece, Source, SourceInfo, SourceRequest, read_scores
from gear_offline.data.sources.columns import Kinds, common_columns, row_kinds
from gear_offline.data.sources.hdf5 import SUFFIXES, Hdf5File
from gear_offline.data.sources.input_files import (
    InputFile,
    files_in,
    misfit,
    read_json,
)
from gear_offline.data.sources.parquet import ArrowFile, ParquetFile
from gear_offline.errors import InputError, package_needed, reading_errors

MAIN_FILE, METADATA_FILE = "main_data.hdf5", "metadata.json"
LONG = ("observation_space", "action_space", "env_spec", "eval_env_spec")  # of the metadata
MAX_EPISODE_BYTES = 2 << 30  # minari decodes an episode as a whole
KEPT_BYTES = 320 << 20  # of decoded episodes: those of a shard are not decoded for each column
COLUMNS = ("observations", "actions", "rewards", "next_observations", "terminations", "truncations")
REMEDY = "it is damaged or of another version of Minari: get it again, minari download ID"
DATASET_ID = re.compile(r"(?:[\w-]+/)*[\w-]+-v[0-9]+")
Episode = dict[str, Array]


def find_directory(dataset_id: str) -> Path:
    """Return the directory of a local Minari dataset."""
    if not DATASET_ID.fullmatch(dataset_id):
        problem = f"{dataset_id!r} is no id of Minari's, like mujoco/hopper/medium-v0"
        raise InputError("SOURCE_READ", problem, remedy="look at minari list remote")
    root = os.environ.get("MINARI_DATASETS_PATH")
    base = Path(root).expanduser() if root else Path.home() / ".minari" / "datasets"
    if not (base / dataset_id).is_dir():
        problem = f"Minari dataset {dataset_id} is not on this machine"
        remedy = f"run: minari download {dataset_id} (or set MINARI_DATASETS_PATH)"
        raise InputError("SOURCE_READ", problem, where=str(base), remedy=remedy)
    return base / dataset_id


def data_directory(path: Path) -> Path | None:
    """Return the data directory when `path` is a Minari dataset's directory, else ``None``."""
    for folder in (path / "data", path):
        # A folder of HDF5 files may have a metadata.json of its own.
        has_metadata = (folder / METADATA_FILE).exists()
        if (folder / MAIN_FILE).exists() or (has_metadata and not files_in(folder, SUFFIXES)):
            return folder
    return None


def open_minari(path: Path, request: SourceRequest) -> Source:
    """Open a Minari dataset's directory, or the ``data`` in it; reads each episode once."""
    data = data_directory(path.absolute())
    assert data is not None, "the caller looked"
    metadata = _read_metadata(data)
    files, total = _data_files(data, metadata), int(metadata["total_episodes"])
    reader = _Reader(data)
    for number, episode in reader.decode(range(total)):
        if steps := len(episode["rewards"]):
            reader.keep(number, episode)
            terminated = bool(episode["terminations"][-1].any())
            reader.episodes[number] = steps, terminated, row_kinds(episode)
    episodes = reader.episodes.items()
    steps, claimed = sum(facts[0] for _, facts in episodes), metadata.get("total_steps")
    if not steps or (claimed is not None and steps != int(claimed)):
        problem = f"the data hold {count_text(steps, 'step')}, metadata.json says {claimed}"
        raise misfit(problem, data, REMEDY)
    episode_kinds = [(f"episode {number}", kinds) for number, (_, _, kinds) in episodes]
    columns, differing = common_columns(episode_kinds, COLUMNS, where=data, remedy=REMEDY)
    empty = count_text(total - len(episodes), "episode")
    stored = {name: metadata[name] for name in sorted(metadata) if name not in LONG}
    facts: dict[str, Any] = {"metadata": stored, "left_out": reader.left_out | differing}
    notes = [f"{empty} without steps left out"] * (total > len(episodes))
    facts |= {"unfinished_tail_steps": 0, "warnings": notes}
    uri = request.uri
    if not uri.startswith("minari:") and metadata.get("dataset_id"):
        uri = f"minari:{metadata['dataset_id']}"
    return Source(
        [Piece(read=partial(reader.read, n), steps=steps) for n, (steps, *_) in episodes],
        columns,
        terminated=[terminated for _, (_, terminated, _) in episodes],
        info=SourceInfo(
            uri=uri,
            format="minari",
            rule="episodes",
            scores=read_scores(metadata, uri),
            files=files,
            attributes=facts,
            **_environment(metadata),
        ),
    )


class _Reader:
    """Decodes episodes by the minari package, and keeps those that were decoded last."""

    def __init__(self, data: Path) -> None:
        with package_needed("Minari datasets are read by the minari package", "minari"):
            from minari.dataset.minari_storage import MinariStorage
        with _reading(data):
            self._storage = MinariStorage.read(data)
            if not (data / MAIN_FILE).exists():  # minari's fails, or leaves out what is nested
                module: Any = sys.modules[type(self._storage).__module__]
                module._decode_info = _decode_infos
        self._data = data
        self.left_out: dict[str, str] = {}  # what is stored and no column: why
        # by Minari's number of each episode that has steps: T, how it ended, its columns
        self.episodes: dict[int, tuple[int, bool, Kinds]] = {}
        self._kept, self._kept_bytes = dict[int, Episode](), 0

    def read(self, number: int, column: str, start: int, stop: int) -> Array:
        """Return rows of an episode; with one that is not kept the next ones are decoded."""
        if number not in self._kept:
            self._kept, self._kept_bytes = {}, 0
            for next_number, episode in self.decode([n for n in self.episodes if n >= number]):
                self.keep(next_number, episode)
                if self._kept_bytes > KEPT_BYTES:
                    break
        return self._kept[number][column][start:stop]

    def keep(self, number: int, episode: Episode) -> None:
        """Keep an episode as long as there is room; next observations take none."""
        if self._kept_bytes <= KEPT_BYTES:
            self._kept[number] = episode
            sizes = (rows.nbytes for name, rows in episode.items() if not name.startswith("next_"))
            self._kept_bytes += sum(sizes)

    def decode(self, numbers: Sequence[int]) -> Iterator[tuple[int, Episode]]:
        """Yield episodes as columns."""
        # Of arrow files minari takes several only if all have the same infos.
        one_file = (self._data / MAIN_FILE).exists()
        with _reading(self._data):
            for run in [numbers] if one_file else [[number] for number in numbers]:
                for number, raw in zip(run, self._storage.get_episodes(run), strict=True):
                    yield number, self._columns(raw, number)

    def _columns(self, raw: Mapping[str, Any], number: int) -> Episode:
        """Return the columns of an episode, (T, *shape) each, in the order of the table."""
        rewards = np.asarray(raw["rewards"])
        steps = count_text(len(rewards), "step")
        observations = self._leaves("observations", raw["observations"])
        columns = {name: rows[:-1] for name, rows in observations.items()}
        columns |= self._leaves("actions", raw["actions"]) | {"rewards": rewards}
        columns |= {f"next_{name}": rows[1:] for name, rows in observations.items()}
        columns |= {flag: np.asarray(raw[flag]) for flag in ("terminations", "truncations")}
        for name, rows in columns.items():
            if len(rows) != len(rewards):
                problem = f"{count_text(len(rows), 'row')} of {name} for {steps}"
                raise misfit(problem, f"{self._data}: episode {number}", REMEDY)
        for name, rows in self._leaves("infos", raw["infos"] or {}).items():
            if len(rows) - len(rewards) in (0, 1):
                columns[name] = rows[: len(rewards)]
            else:
                self.left_out[name] = f"{count_text(len(rows), 'row')} for {steps}"
        return columns

    def _leaves(self, name: str, value: Any) -> Episode:
        """Return the arrays below `name`; what is no array of numbers is left out."""
        if isinstance(value, tuple):
            value = dict(enumerate(value))
        if isinstance(value, Mapping):
            leaves: Episode = {}
            for key, item in value.items():
                # No column has a backslash: the source gives it a name that is free, and says so.
                leaves |= self._leaves(f"{name}/{str(key).replace('/', chr(92))}", item)
            return leaves
        rows = np.asarray(value)
        if is_storable(rows.dtype) and rows.ndim:
            return {name: rows}
        self.left_out[name] = "text" if rows.dtype.kind in "SU" else f"no numbers ({rows.dtype})"
        return {}


def _decode_infos(values: Any) -> dict[str, Any]:
    """Return the infos of an arrow file; a shape is text, and in minari 0.5.1 a byte a number."""
    infos: dict[str, Any] = {}
    for number, field in enumerate(values.type):
        field_values = values.field(number)
        if hasattr(field_values, "field"):
            infos[field.name] = _decode_infos(field_values)
            continue
        rows = np.stack(field_values.to_numpy(zero_copy_only=False))
        if (stored := (field.metadata or {}).get(b"shape")) is not None:
            shape = [int(n) for n in stored.split(b",") if n.isdigit()]
            right = prod(shape) == prod(rows.shape[1:])
            rows = rows.reshape(len(rows), *(shape if right else stored))
        infos[field.name] = rows
    return infos


@contextmanager
def _reading(where: Path) -> Iterator[None]:
    """Turn damage into our errors, and show no warnings of the package."""
    with reading_errors("Minari", where), warnings.catch_warnings(action="ignore"):
        yield


def _read_metadata(data: Path) -> dict[str, Any]:
    path = data / METADATA_FILE
    if not path.exists():
        problem = "the dataset has no metadata.json, as those of Minari before 0.5"
        raise InputError("SOURCE_READ", problem, str(data), REMEDY)
    metadata = read_json(path)
    with reading_errors("metadata.json", path):
        # Without spaces minari would make the environment, whose module a stranger may have named.
        if not all(isinstance(metadata[f"{of}_space"], str) for of in ("observation", "action")):
            raise ValueError("no metadata of Minari")
        int(metadata["total_episodes"]), int(metadata.get("total_steps", 0))
    return metadata


def _data_files(data: Path, metadata: Mapping[str, Any]) -> tuple[InputFile, ...]:
    """Return the files to digest; only regular ones are accepted, and HDF5 is looked through."""
    data_format = metadata.get("data_format", "hdf5")
    if data_format == "hdf5":
        with Hdf5File(data / MAIN_FILE) as file:
            file.check_all()
            claimed = Counter[str]()
            for name, header in file.datasets.items():
                itemsize = header.dtype.itemsize if header.dtype else 0
                claimed[name.split("/")[0]] += prod(header.shape or (0,)) * itemsize
            _check_room(max(claimed.values(), default=0), data)
            return (file.file,)
    with package_needed("Minari's arrow files are read by pyarrow", "minari"):
        import pyarrow.dataset
    files: list[InputFile] = []
    for number in range(int(metadata["total_episodes"])):
        paths = [p for p in sorted((data / str(number)).glob("*")) if p.name != METADATA_FILE]
        opened = ArrowFile if data_format == "arrow" else ParquetFile  # they bound what is unpacked
        files += [opened(path).file for path in paths]
        with _reading(data / str(number)):
            rows = pyarrow.dataset.dataset([str(path) for path in paths], format=data_format)
            _check_room(rows.count_rows() * sum(_width(f.type) for f in rows.schema), data)
    return tuple(files)


def _width(dtype: Any) -> int:
    """Return the bytes of a row of an Arrow type, 0 of what has no fixed size."""
    fields = [_width(dtype.field(n).type) for n in range(dtype.num_fields)]
    with suppress(ValueError):
        return int(getattr(dtype, "list_size", 1)) * sum(fields) or -(-int(dtype.bit_width) // 8)
    return 0


def _check_room(size: int, where: Path) -> None:
    """Refuse an episode that would take all memory, before it is decoded."""
    if size > MAX_EPISODE_BYTES:
        problem, remedy = f"an episode of {size:,} bytes", f"at most {MAX_EPISODE_BYTES:,} are read"
        raise InputError("SOURCE_UNSAFE", problem, str(where), remedy)


def _environment(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return facts of the environment to evaluate in, if it is known; nothing of it is made."""
    for key in ("eval_env_spec", "env_spec"):
        with suppress(KeyError, TypeError, ValueError, AttributeError, RecursionError):
            spec = json.loads(metadata[key], parse_constant=str)
            options = {n: v for n, v in (spec.get("kwargs") or {}).items() if n != "render_mode"}
            more = {n: spec[n] for n in ("max_episode_steps", "additional_wrappers") if spec.get(n)}
            if isinstance(name := spec["id"], str) and name:
                return {"environment_id": name, "environment_options": options | more}
    return {}
