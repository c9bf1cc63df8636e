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
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from gear_offline.core.text import count_text
from gear_offline.core.types import Array
from gear_offline.dataset.schema import ColumnSpec
from gear_offline.dataset.scores import reference_scores
from gear_offline.errors import GearError, InputError, UnavailableError
from gear_offline.sources.base import (
    Piece,
    PieceSource,
    SourceInfo,
    legal_names,
    open_file,
    warnings_about,
)
from gear_offline.sources.hdf5 import Hdf5File
from gear_offline.sources.hdf5_table import hdf5_files

MAIN_FILE, METADATA_FILE = "main_data.hdf5", "metadata.json"
MAX_METADATA_BYTES = 64 << 20
KEPT_BYTES = 320 << 20  # of decoded episodes: those of a shard are not decoded for each column
RUN_EPISODES = 64  # decoded in one go: opening the file for each would take longer
DATASET_ID = re.compile(r"(?:[\w-]+/)*[\w-]+-v[0-9]+")
RULE = "episodes"
Episode = dict[str, Array]
Columns = dict[str, tuple[np.dtype[Any], tuple[int, ...]]]


def find_directory(dataset_id: str) -> Path:
    """Return the directory of a local Minari dataset."""
    if not DATASET_ID.fullmatch(dataset_id):
        raise InputError(
            "SOURCE_READ",
            f"{dataset_id!r} is not a Minari dataset id",
            remedy="ids look like mujoco/hopper/medium-v0",
        )
    root = os.environ.get("MINARI_DATASETS_PATH")
    base = Path(root) if root else Path.home() / ".minari" / "datasets"
    if not (base / dataset_id).is_dir():
        raise InputError(
            "SOURCE_READ",
            f"Minari dataset {dataset_id} is not on this machine",
            where=str(base),
            remedy=f"run: minari download {dataset_id} (or set MINARI_DATASETS_PATH)",
        )
    return base / dataset_id


def data_directory(path: Path) -> Path | None:
    """Return the data directory when `path` is a Minari dataset's directory, else ``None``."""
    for candidate in (path / "data", path):
        # A folder of HDF5 files may have a metadata.json of its own.
        if (candidate / MAIN_FILE).exists() or (
            (candidate / METADATA_FILE).exists() and not hdf5_files(candidate)
        ):
            return candidate
    return None


def open_minari(path: Path, *, uri: str | None, rule: str | None) -> PieceSource:
    """Open a Minari dataset's directory, or the ``data`` directory in it; reads each episode once.

    Without `uri` the dataset's own id is given as what the user asked for.
    """
    if rule not in (None, RULE):
        raise InputError(
            "SOURCE_LAYOUT",
            f"boundary rule {rule!r} does not apply to Minari, which stores episodes apart",
            where=str(path),
            remedy="leave the rule out",
        )
    data = data_directory(path.absolute())
    assert data is not None, "the caller looked"
    metadata = _read_metadata(data)
    files = _data_files(data, metadata)
    total = int(metadata["total_episodes"])
    reader = _Reader(data)
    lengths: list[int] = []
    terminated: list[bool] = []
    columns: Columns = {}
    for number, episode in reader.decode(range(total)):
        steps = len(episode["rewards"])
        if steps:
            found = {name: (rows.dtype, rows.shape[1:]) for name, rows in episode.items()}
            columns = reader.common_columns(columns, found, number) if lengths else found
            reader.keep(number, episode)
            reader.numbers.append(number)
            lengths.append(steps)
            terminated.append(bool(episode["terminations"][-1].any()))
    steps = sum(lengths)
    if not steps or steps != int(metadata.get("total_steps", steps)):
        what = f"the data hold {count_text(steps, 'step')}, metadata.json says "
        raise _layout(data, what + str(metadata.get("total_steps")))
    names = legal_names(columns)
    reader.stored = {new: old for old, new in names.items()}
    notes = warnings_about(names)
    if total > len(lengths):
        notes.append(f"{count_text(total - len(lengths), 'episode')} without steps left out")
    for name, why in reader.left_out.items():
        if not name.startswith("infos/"):
            notes.append(f"{name} is left out: {why}")
    environment = _environment(metadata)
    own = f"minari:{metadata['dataset_id']}" if metadata.get("dataset_id") else path.name
    return PieceSource(
        [
            Piece(read=partial(reader.read, index), steps=length)
            for index, length in enumerate(lengths)
        ],
        [
            ColumnSpec(name=names[name], dtype=dtype, shape=shape)
            for name, (dtype, shape) in columns.items()
        ],
        lengths=lengths,
        terminated=terminated,
        truncated=~np.array(terminated, np.bool_),
        info=SourceInfo(
            uri=uri or own,
            format="minari",
            rule=RULE,
            environment_id=environment,
            reference_name=environment if environment and reference_scores(environment) else None,
            files=files,
            attributes={
                "metadata": _facts(metadata),
                "left_out": reader.left_out,
                "unfinished_tail_steps": 0,
                "warnings": notes,
            },
        ),
    )


class _Reader:
    """Decodes episodes by the minari package, and keeps those that were decoded last.

    Attributes
    ----------
    numbers
        Minari's number of each episode that has steps.
    stored
        The name in an episode of each column.
    left_out
        What is stored and no column, and why.
    """

    def __init__(self, data: Path) -> None:
        self.numbers: list[int] = []
        self.stored: dict[str, str] = {}
        self.left_out: dict[str, str] = {}
        self._data, self._storage = data, _open_storage(data)
        self._recent: OrderedDict[int, Episode] = OrderedDict()
        self._recent_bytes = 0

    def read(self, index: int, column: str, start: int, stop: int) -> Array:
        """Return rows of an episode; with one that is not kept the next ones are decoded."""
        number, name = self.numbers[index], self.stored[column]
        if number not in self._recent:
            run: list[tuple[int, Episode]] = []
            decoded = 0
            for found in self.decode(self.numbers[index : index + RUN_EPISODES]):
                run.append(found)
                decoded += _bytes(found[1])
                if decoded > KEPT_BYTES // 2:
                    break
            for other, episode in reversed(run):  # the one that is asked for is kept in any case
                self.keep(other, episode)
        rows = self._recent[number].get(name)
        if rows is None or len(rows) < stop:
            raise _layout(self._data, f"{name} is not what it was", where=f"episode {number}")
        return rows[start:stop]

    def keep(self, number: int, episode: Episode) -> None:
        """Keep a decoded episode, and no more of those before than have room."""
        if number in self._recent:
            return
        self._recent[number] = episode
        self._recent_bytes += _bytes(episode)
        while self._recent_bytes > KEPT_BYTES and len(self._recent) > 1:
            self._recent_bytes -= _bytes(self._recent.popitem(last=False)[1])

    def common_columns(self, columns: Columns, found: Columns, number: int) -> Columns:
        """Return the columns that all episodes have; only infos may differ."""
        differ = {name for name in {**columns, **found} if columns.get(name) != found.get(name)}
        for name in differ - set(self.left_out):
            if not name.startswith("infos/"):
                what = f"{name} is {found.get(name)}, before it was {columns.get(name)}"
                raise _layout(self._data, what, where=f"episode {number}")
            self.left_out[name] = "differs between episodes"
        return {name: kind for name, kind in columns.items() if name not in differ}

    def decode(self, numbers: Sequence[int]) -> Iterator[tuple[int, Episode]]:
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
            raise InputError(
                "SOURCE_READ",
                f"the minari package cannot read it: {type(error).__name__}: {error}",
                where=str(self._data),
                remedy="the dataset is damaged, or of another version of Minari: download it again",
            ) from error

    def _columns(self, raw: Mapping[str, Any], number: int) -> Episode:
        """Return the columns of an episode, (T, *shape) each, in the order of the table."""
        rewards = np.asarray(raw["rewards"])
        steps = len(rewards)
        observations = self._leaves("observations", raw["observations"])
        found = {name: rows[:-1] for name, rows in observations.items()}
        found |= self._leaves("actions", raw["actions"])
        found["rewards"] = rewards
        found |= {f"next_{name}": rows[1:] for name, rows in observations.items()}
        found |= {flag: np.asarray(raw[flag]) for flag in ("terminations", "truncations")}
        for name, rows in self._leaves("infos", raw["infos"] or {}).items():
            if len(rows) in (steps, steps + 1):
                found[name] = rows[:steps]
            else:
                has = count_text(len(rows), "row")
                self.left_out[name] = f"{has} for {count_text(steps, 'step')}"
        for name, rows in found.items():
            if len(rows) != steps:
                what = f"{count_text(len(rows), 'row')} of {name} for {count_text(steps, 'step')}"
                raise _layout(self._data, what, where=f"episode {number}")
        return found

    def _leaves(self, name: str, value: Any) -> Episode:
        """Return the arrays below `name`; what is no array of numbers is left out."""
        if isinstance(value, Mapping | tuple):
            parts = value.items() if isinstance(value, Mapping) else enumerate(value)
            found: Episode = {}
            for key, part in parts:
                found |= self._leaves(f"{name}/{str(key).replace('/', '_')}", part)
            return found
        rows = np.asarray(value)
        if rows.dtype.kind in "biufc" and rows.ndim:
            return {name: rows}
        self.left_out[name] = "text" if rows.dtype.kind in "SU" else f"no numbers ({rows.dtype})"
        return {}


def _bytes(episode: Episode) -> int:
    return sum(rows.nbytes for name, rows in episode.items() if not name.startswith("next_"))


def _open_storage(data: Path) -> Any:
    """Return minari's reader of a data directory."""
    try:
        from minari.dataset.minari_storage import MinariStorage

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return MinariStorage.read(data)
    except ImportError as error:
        raise UnavailableError(
            "PACKAGE_MISSING",
            f"Minari datasets are read by the minari package: {error}",
            remedy="pip install 'gear-offline[minari]'",
        ) from error
    except Exception as error:
        raise _layout(data, f"not usable: {type(error).__name__}: {error}") from error


def _read_metadata(data: Path) -> dict[str, Any]:
    """Return what metadata.json says."""
    path = data / METADATA_FILE
    if not path.exists():
        raise InputError(
            "SOURCE_READ",
            "the dataset has no metadata.json, as those of Minari before 0.5",
            where=str(data),
            remedy="download its present version: minari download ID",
        )
    with open(open_file(path), "rb") as file:
        text = file.read(MAX_METADATA_BYTES + 1)
    try:
        found = json.loads(text) if len(text) <= MAX_METADATA_BYTES else None
        # Without spaces minari would make the environment, whose module a stranger may have named.
        if not isinstance(found, dict) or not all(
            isinstance(found.get(space), str) for space in ("observation_space", "action_space")
        ):
            raise ValueError("no metadata of Minari")
        int(found["total_episodes"]), int(found.get("total_steps", 0))
        return found
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise InputError(
            "SOURCE_READ",
            f"not usable: {type(error).__name__}: {error}",
            where=str(path),
            remedy="the dataset is damaged: download it again",
        ) from error


def _data_files(data: Path, metadata: Mapping[str, Any]) -> tuple[Path, ...]:
    """Return the files to digest; only regular ones are accepted, and HDF5 is looked through."""
    if metadata.get("data_format", "hdf5") == "hdf5":
        with Hdf5File(data / MAIN_FILE) as file:
            file.check_all()
        return (data / MAIN_FILE,)
    found = [
        path
        for number in range(int(metadata["total_episodes"]))
        for path in sorted((data / str(number)).glob("*"))
    ]
    for path in found:
        os.close(open_file(path))
    return tuple(path for path in found if path.name != METADATA_FILE)


def _environment(metadata: Mapping[str, Any]) -> str | None:
    try:
        found = json.loads(metadata["env_spec"])["id"]
    except (KeyError, TypeError, ValueError):
        return None
    return found if isinstance(found, str) and found else None


def _facts(metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value
        for key, value in sorted(metadata.items())
        if isinstance(value, str | int | float | bool)
        and len(str(value)) <= 500
        and value == value
        and key not in ("observation_space", "action_space", "env_spec")
    }


def _layout(data: Path, what: str, *, where: str = "") -> InputError:
    return InputError(
        "SOURCE_LAYOUT",
        what,
        where=": ".join(part for part in (str(data), where) if part),
        remedy="the dataset is damaged or was written by something else: download it again",
    )
