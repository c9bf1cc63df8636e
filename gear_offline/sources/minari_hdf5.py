"""Minari's HDF5 storage: one file, a group for each episode.

Shape legend: E episodes, T steps of one episode.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from gear_offline.core.text import count_text
from gear_offline.dataset.schema import ColumnSpec, is_column_name
from gear_offline.sources.hdf5 import read_rows
from gear_offline.sources.hdf5_guard import (
    LIBRARY_ERRORS,
    ColumnCheck,
    DatasetFacts,
    Limits,
    no_plugins,
    open_file,
    scan,
    unreadable,
)
from gear_offline.sources.minari import Leaf, jpeg_error, layout_error
from gear_offline.sources.minari_metadata import MAIN_FILE, MinariMetadata

LIMITS = Limits(objects=50_000_000)  # one group and about eight datasets for each episode
_EPISODE = re.compile(r"episode_(0|[1-9][0-9]{0,11})")
_INDEX = re.compile(r"_index_(0|[1-9][0-9]*)")
_ORDER = ("observations", "actions", "rewards", "next", "terminations", "truncations", "infos")
_FLAGS = ("rewards", "terminations", "truncations")


class Hdf5Storage:
    """Reads ``main_data.hdf5``; see `gear_offline.sources.minari.Storage`."""

    def __init__(self, metadata: MinariMetadata) -> None:
        self._metadata = metadata
        self._images = {
            "/".join((column, *leaf.keys))
            for column, leaves in metadata.spaces.items()
            for leaf in leaves
            if leaf.is_image
        }
        path: Path = metadata.data_path / MAIN_FILE
        self._path = path
        self.files: tuple[Path, ...] = (path,)
        self.left_out: dict[str, str] = {}
        self._file: h5py.File | None = open_file(path)
        self._open: OrderedDict[tuple[int, tuple[str, ...]], h5py.Dataset] = OrderedDict()
        try:
            self._survey(self._file)
        except BaseException:
            self.close()
            raise

    def _survey(self, file: h5py.File) -> None:
        """Guard the file, find T of each episode and the columns that all episodes share."""
        check = ColumnCheck(self._path, limits=LIMITS)
        lengths: dict[int, int] = {}
        columns: dict[tuple[str, ...], ColumnSpec] | None = None
        current: list[DatasetFacts] = []
        with no_plugins():
            for fact in scan(file, limits=LIMITS):
                if current and fact.name.split("/")[0] != current[0].name.split("/")[0]:
                    columns = self._add_episode(current, lengths, columns, check)
                    current = []
                current.append(fact)
        if current:
            columns = self._add_episode(current, lengths, columns, check)
        numbers = sorted(n for n, length in lengths.items() if length)
        self.warnings = check.warnings
        if len(numbers) < len(lengths):
            self.warnings.append(
                f"{count_text(len(lengths) - len(numbers), 'episode')} without steps left out"
            )
        self._numbers = numbers
        self.lengths = np.array([lengths[n] for n in numbers], dtype=np.int64)
        self.leaves = _leaves(columns or {})
        self.terminated = np.zeros(len(numbers), dtype=np.bool_)
        ends = Leaf(
            spec=ColumnSpec(name="terminations", dtype=np.dtype(np.bool_)), path=("terminations",)
        )
        for episode, length in enumerate(self.lengths.tolist()):
            last = self.read(ends, episode, length - 1, length)
            self.terminated[episode] = bool(last.any())

    def _add_episode(
        self,
        facts: list[DatasetFacts],
        lengths: dict[int, int],
        columns: dict[tuple[str, ...], ColumnSpec] | None,
        check: ColumnCheck,
    ) -> dict[tuple[str, ...], ColumnSpec] | None:
        """Check one episode's datasets and return the columns that all so far have."""
        top = facts[0].name.split("/")[0]
        match = _EPISODE.fullmatch(top)
        if not match or any("/" not in f.name for f in facts):
            self.left_out[top] = "not an episode"
            return columns
        tree = {tuple(f.name.split("/")[1:]): f for f in facts}
        for name in ("actions", "observations", *_FLAGS):
            if not any(path[0] == name for path in tree):
                raise layout_error(self._metadata, f"no {name}", where=top)
        steps = tree[("rewards",)].rows if ("rewards",) in tree else -1
        lengths[int(match.group(1))] = steps
        if not steps:
            return columns
        found: dict[tuple[str, ...], ColumnSpec] = {}
        for path, fact in tree.items():
            spec = self._column(path, fact, steps, required=path[0] != "infos")
            if spec is not None:
                check.add(fact)
                found[path] = spec
        if columns is None:
            return found
        for path in sorted({*columns} ^ {*found}):
            if path[0] != "infos":
                raise layout_error(self._metadata, f"{path} is not in every episode", where=top)
            self.left_out["/".join(path)] = "not in every episode, or not of every step"
            columns.pop(path, None)
        for path, spec in columns.items():
            if spec != found[path]:
                raise layout_error(
                    self._metadata,
                    f"{spec.name} is {found[path].dtype} {found[path].shape}, before it was "
                    f"{spec.dtype} {spec.shape}",
                    where=top,
                )
        return columns

    def _column(
        self, path: tuple[str, ...], fact: DatasetFacts, steps: int, *, required: bool
    ) -> ColumnSpec | None:
        """Return the column of a dataset; ``None`` for what cannot be one and need not be."""
        name = _column_name(path)
        wanted = {"observations": (steps + 1,), "infos": (steps, steps + 1)}.get(path[0], (steps,))
        if fact.dtype is None and name in self._images:
            raise jpeg_error(self._metadata, name)
        if fact.dtype is None and path[0] not in _FLAGS:
            self.left_out[name] = fact.type_name
            return None
        if fact.rows not in wanted and required:
            raise layout_error(
                self._metadata,
                f"{count_text(fact.rows, 'row')} for {count_text(steps, 'step')}",
                where=fact.name,
            )
        if fact.rows not in wanted:
            self.left_out[name] = f"{count_text(fact.rows, 'row')} for {count_text(steps, 'step')}"
            return None
        if not (required or is_column_name(name)):
            self.left_out[name] = "name is not a column name"
            return None
        if fact.dtype is None or not fact.shape:
            raise layout_error(self._metadata, f"{fact.type_name} is no number", where=fact.name)
        step_shape = fact.shape[1:]
        if path[0] in _FLAGS and step_shape == (1,):
            step_shape = ()
        return ColumnSpec(name=name, dtype=fact.dtype, shape=step_shape)

    def read(self, leaf: Leaf, episode: int, start: int, stop: int) -> npt.NDArray[Any]:
        """Return steps ``[start, stop)`` of an episode, (stop - start, *shape)."""
        dataset = self._dataset(episode, leaf.path)
        rows = read_rows(
            dataset,
            start + leaf.offset,
            stop + leaf.offset,
            dtype=dataset.dtype,
            path=self._path,
        )
        return rows.reshape(stop - start, *leaf.spec.shape)

    def _dataset(self, episode: int, path: tuple[str, ...]) -> h5py.Dataset:
        key = (episode, path)
        if key not in self._open:
            if self._file is None:
                raise ValueError(f"{self._path} is closed")
            try:
                name = "/".join((f"episode_{self._numbers[episode]}", *path))
                self._open[key] = self._file[name]
            except LIBRARY_ERRORS as error:
                raise unreadable(self._path, error) from error
            if len(self._open) > 16:
                self._open.popitem(last=False)
        return self._open[key]

    def close(self) -> None:
        """Close the file; reading afterwards raises ValueError."""
        self._open.clear()
        if self._file is not None:
            self._file.close()
            self._file = None


def _column_name(path: tuple[str, ...]) -> str:
    """``("actions", "_index_0")`` is the column ``actions/0``, as in Minari's arrow storage."""
    return "/".join(m.group(1) if (m := _INDEX.fullmatch(part)) else part for part in path)


def _leaves(columns: dict[tuple[str, ...], ColumnSpec]) -> list[Leaf]:
    """Return the columns in the order of the table, next_observations among them."""
    leaves = [Leaf(spec=spec, path=path) for path, spec in columns.items()]
    for path, spec in columns.items():
        if path[0] == "observations":
            name = "next_observations" + spec.name.removeprefix("observations")
            shifted = ColumnSpec(name=name, dtype=spec.dtype, shape=spec.shape)
            leaves.append(Leaf(spec=shifted, path=path, offset=1))

    def order(leaf: Leaf) -> tuple[int, list[tuple[int, int, str]]]:
        parts = leaf.spec.name.split("/")
        first = _ORDER.index("next") if leaf.offset else _ORDER.index(parts[0])
        return first, [(0, int(p), "") if p.isdecimal() else (1, 0, p) for p in parts[1:]]

    known = [leaf for leaf in leaves if leaf.offset or leaf.path[0] in _ORDER]
    return sorted(known, key=order)
