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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gear_offline.core.text import count_text
from gear_offline.dataset.schema import BoolArray, ColumnSpec, EpisodeIndex, TableSpec
from gear_offline.dataset.scores import reference_scores
from gear_offline.errors import GearError, InputError, UnavailableError
from gear_offline.sources.base import (
    Source,
    SourceInfo,
    check_range,
    legal_names,
    open_file,
    renaming_warnings,
)
from gear_offline.sources.combine import hdf5_files
from gear_offline.sources.hdf5 import Hdf5File

MAIN_FILE, METADATA_FILE = "main_data.hdf5", "metadata.json"
MAX_METADATA_BYTES = 64 << 20
KEPT_BYTES = 320 << 20  # of decoded episodes: those of a shard are not decoded for each column
RUN_STEPS = 4096  # decoded in one go: opening the file once per episode would take longer
DATASET_ID = re.compile(r"(?:[\w-]+/)*[\w-]+-v[0-9]+")
RULE = "episodes"
Episode = dict[str, npt.NDArray[Any]]


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


def open_minari(path: Path, *, uri: str | None, rule: str | None) -> MinariSource:
    """Open a Minari dataset's directory, or the ``data`` directory in it.

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
    name = f"minari:{metadata['dataset_id']}" if metadata.get("dataset_id") else path.name
    return MinariSource(data, metadata, uri=uri or str(name))


class MinariSource(Source):
    """A `Source` over a Minari dataset; opening it reads every episode once."""

    def __init__(self, data: Path, metadata: Mapping[str, Any], *, uri: str) -> None:
        self._data = data
        files = _data_files(data, metadata)
        self._storage = _open_storage(data)
        self._recent: OrderedDict[int, Episode] = OrderedDict()  # decoded
        self._recent_bytes = 0
        self._left_out: dict[str, str] = {}
        total = int(metadata["total_episodes"])
        lengths: list[int] = []
        terminated: list[bool] = []
        numbers: list[int] = []
        columns: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {}
        for number, episode in self._decode(range(total)):
            steps = len(episode["rewards"])
            if not steps:
                continue
            found = {name: (rows.dtype, rows.shape[1:]) for name, rows in episode.items()}
            if not numbers:
                columns = found
            self._compare(columns, found, number)
            self._keep(number, episode)
            numbers.append(number)
            lengths.append(steps)
            terminated.append(bool(episode["terminations"][-1].any()))
        if not numbers or sum(lengths) != int(metadata.get("total_steps", sum(lengths))):
            what = f"the data hold {count_text(sum(lengths), 'step')}, the metadata say "
            raise _layout(data, what + str(metadata.get("total_steps")))
        self._numbers = numbers
        self._names = legal_names(columns)
        self._stored = {new: old for old, new in self._names.items()}
        self.episodes = EpisodeIndex(np.array(lengths, np.int64))
        self.terminated: BoolArray = np.array(terminated, np.bool_)
        self.truncated: BoolArray = ~self.terminated
        self.spec = TableSpec(
            columns=tuple(
                ColumnSpec(name=self._names[name], dtype=dtype, shape=shape)
                for name, (dtype, shape) in columns.items()
            ),
            steps=self.episodes.steps,
            episodes=self.episodes.episodes,
        )
        empty = total - len(numbers)
        said = [f"{count_text(empty, 'episode')} without steps left out"] if empty else []
        said += [
            f"{name} is left out: {why}"
            for name, why in self._left_out.items()
            if name.split("/")[0] in ("observations", "actions")
        ]
        environment = _environment(metadata)
        known = environment is not None and reference_scores(environment) is not None
        self.info = SourceInfo(
            uri=uri,
            format="minari",
            rule=RULE,
            environment_id=environment,
            reference_name=environment if known else None,
            files=files,
            attributes={
                "metadata": _facts(metadata),
                "left_out": self._left_out,
                "unfinished_tail_steps": 0,
                "warnings": renaming_warnings(self._names) + said,
            },
        )

    def _compare(
        self,
        columns: dict[str, tuple[np.dtype[Any], tuple[int, ...]]],
        found: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]],
        number: int,
    ) -> None:
        """Drop infos that an episode lacks; refuse an episode of other columns."""
        for name in [n for n in {**columns, **found} if columns.get(n) != found.get(n)]:
            if not name.startswith("infos/"):
                what = f"{name} is {found.get(name)}, before it was {columns.get(name)}"
                raise _layout(self._data, what, where=f"episode {number}")
            self._left_out[name] = "differs between episodes"
            columns.pop(name, None)

    def _decode(self, numbers: range | list[int]) -> Iterator[tuple[int, Episode]]:
        """Yield episodes as columns."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                # Of arrow files it takes several only if all have the same infos.
                one_file = (self._data / MAIN_FILE).exists()
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
        for flag in ("terminations", "truncations"):
            found[flag] = np.asarray(raw[flag])
        for name, rows in self._leaves("infos", raw["infos"] or {}).items():
            if len(rows) in (steps, steps + 1):
                found[name] = rows[:steps]
            else:
                self._left_out[name] = (
                    f"{count_text(len(rows), 'row')} for {count_text(steps, 'step')}"
                )
        for name, rows in found.items():
            if len(rows) != steps:
                what = f"{count_text(len(rows), 'row')} of {name} for {count_text(steps, 'step')}"
                raise _layout(self._data, what, where=f"episode {number}")
        return found

    def _leaves(self, name: str, value: Any) -> Episode:
        """Return the arrays below `name`; what is no array of numbers is left out."""
        found: Episode = {}
        if isinstance(value, Mapping | tuple):
            parts = value.items() if isinstance(value, Mapping) else enumerate(value)
            for key, part in parts:
                found |= self._leaves(f"{name}/{str(key).replace('/', '_')}", part)
            return found
        rows = np.asarray(value)
        if rows.dtype.kind in "biufc" and rows.ndim:
            return {name: rows}
        self._left_out[name] = "text" if rows.dtype.kind in "SU" else f"no numbers ({rows.dtype})"
        return {}

    def _keep(self, number: int, episode: Episode) -> None:
        self._recent[number] = episode
        self._recent_bytes += _bytes(episode)
        while self._recent_bytes > KEPT_BYTES and len(self._recent) > 1:
            self._recent_bytes -= _bytes(self._recent.popitem(last=False)[1])

    def read(self, column: str, start: int, stop: int) -> npt.NDArray[Any]:
        """Return rows ``[start, stop)`` of `column`, (stop - start, *shape), native dtype."""
        check_range(start, stop, self.spec.steps)
        spec, stored = self.spec[column], self._stored[column]
        rows = np.empty((stop - start, *spec.shape), spec.dtype)
        offsets, at = self.episodes.offsets, start
        while at < stop:
            index = int(self.episodes.episode_of(at))
            begin, end = int(offsets[index]), min(int(offsets[index + 1]), stop)
            found = self._episode(index).get(stored)
            if found is None or (found.dtype, found.shape[1:]) != (spec.dtype, spec.shape):
                raise _layout(self._data, f"{stored} is not what it was", where=f"step {at}")
            rows[at - start : end - start] = found[at - begin : end - begin]
            at = end
        return rows

    def _episode(self, index: int) -> Episode:
        """Return a decoded episode; with one that is not there the next ones are decoded."""
        number = self._numbers[index]
        if number in self._recent:
            return self._recent[number]
        limit = int(
            np.searchsorted(self.episodes.offsets, self.episodes.offsets[index] + RUN_STEPS)
        )
        run = list(self._decode_some(self._numbers[index : max(limit, index + 1)]))
        for found, episode in reversed(run):
            if found not in self._recent:
                self._keep(found, episode)
        return run[0][1]

    def _decode_some(self, numbers: list[int]) -> Iterator[tuple[int, Episode]]:
        """Yield episodes until they fill a half of what may be kept."""
        decoded = 0
        for number, episode in self._decode(numbers):
            yield number, episode
            decoded += _bytes(episode)
            if decoded > KEPT_BYTES // 2:
                return

    def close(self) -> None:
        """Drop the decoded episodes; no file is open."""
        self._recent.clear()
        self._recent_bytes = 0


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
