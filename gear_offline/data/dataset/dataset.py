"""Open a dataset of GEAR shards, verify it, know its episodes, read rows across shards.

Shape legend: N steps, E episodes, T steps of an episode.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never, SupportsIndex, overload

import numpy as np
import numpy.typing as npt

from gear_offline.config.arguments import check_arguments
from gear_offline.config.strict_yaml import byte_count
from gear_offline.core.address import hide_secrets, is_remote, parse_address
from gear_offline.core.files import FileIdentity, file_identity
from gear_offline.core.hub import card, put
from gear_offline.core.remote import NoRangesError, map_in_threads
from gear_offline.core.system import usable_cores
from gear_offline.core.text import say
from gear_offline.core.types import Array, BoolArray, Float64Array, Int64Array
from gear_offline.data.dataset.fetch import fetch_dataset, open_ranges
from gear_offline.data.dataset.manifest import (
    MANIFEST_NAME,
    Admission,
    Manifest,
    ShardRecord,
    read_admissions,
)
from gear_offline.data.dataset.ranges import RangedFile, Ranges
from gear_offline.data.dataset.schema import EpisodeIndex, TableSpec, parse_episodes
from gear_offline.data.dataset.scores import ReferenceScores, RewardEdit
from gear_offline.data.dataset.shard import (
    LocalFile,
    Readable,
    TensorLayout,
    byte_view,
    damage_error,
    open_member,
    read_exactly,
    stored_form,
)
from gear_offline.data.dataset.shard_file import OnProgress, ShardFile
from gear_offline.data.dataset.statistics import ColumnStatistics, Moments, distribution
from gear_offline.data.dataset.videos import KeptFrames, open_videos, video_files
from gear_offline.errors import InputError, given_path

HISTORIES = "histories"  # attribute of the source: the column that numbers them
REFERENCE_BYTES = 24  # of a frame that stays in a video
RUN_BYTES = 16 << 20  # episodes that follow each other are read together up to this
MAX_THREADS = 8  # that verify shards
REQUESTS = 16  # to a server at a time

Columns = dict[str, Array]
Member = Callable[["Dataset", int], BoolArray]


@dataclass(frozen=True, eq=False, kw_only=True)
class View:
    """The choice of episodes of a dataset that has not all, as its own properties describe it."""

    whole: Dataset
    numbers: Int64Array
    depth: int = 1
    member: Member | None = None


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Dataset:
    """A dataset on disk.  Holds no open file: it can be sent to other processes.

    ``dataset[3]`` is an episode, column name to (T, *shape); ``len(dataset)`` counts episodes, and
    a loop goes over them.

    Attributes
    ----------
    path
        Dataset directory, absolute: another working directory changes nothing.
    name
        Address, or path, that a user knows it by.
    manifest
        What it says about itself.
    episodes
        Episode index over all steps.
    terminated, truncated
        (E,) bool, how each episode ended.
    returns
        (E,) float64, undiscounted sum of `rewards` of each episode; NaN where the data have none.
    verified_shards
        Number of shards, from the first one on, whose blocks were all compared with their digests.
    identities
        Identity of each shard's file, from before anything of it was read.
    admissions
        How many pieces were admitted to it since it was converted.
    frozen
        Whether its statistics stay those of the shards before the first admission.
    view
        Which of the episodes these are, if there are others (`view_episodes`).
    ranges
        Where the shards are, if they are read by ranges; `path` then has the manifest alone.
    address
        Where a server has it, without secrets; "" of a dataset of this machine.
    videos
        By column the frames that stay in videos: they are decoded whenever they are read.
    """

    path: Path
    name: str
    manifest: Manifest
    episodes: EpisodeIndex
    terminated: BoolArray
    truncated: BoolArray
    returns: Float64Array
    verified_shards: int
    identities: list[FileIdentity] = field(repr=False)
    admissions: int = 0
    frozen: bool = False
    view: View | None = field(default=None, repr=False)
    ranges: Ranges | None = field(default=None, repr=False)
    address: str = field(default="", repr=False)
    videos: Mapping[str, KeptFrames] = field(default_factory=dict, repr=False)

    def __repr__(self) -> str:
        return f"Dataset({self.name!r}: {self.spec})"

    @cached_property
    def spec(self) -> TableSpec:
        """Columns, steps and episodes."""
        stored, steps, episodes = self.manifest.spec, self.episodes.steps, len(self)
        return replace(stored, steps=steps, episodes=episodes) if self.view else stored

    @cached_property
    def statistics(self) -> Mapping[str, ColumnStatistics]:
        """Per column: count, mean, std, min and max over all steps; measured where it has grown."""
        if self.frozen or not (self.admissions or self.view):
            return self.manifest.statistics
        return _MeasuredStatistics(self)

    @property
    def environment_id(self) -> str | None:
        """Gymnasium id of the environment, ``None`` when unknown."""
        return self.manifest.environment.id

    @property
    def environment_options(self) -> dict[str, Any]:
        """Keyword arguments of the environment, as `gymnasium.make` takes them."""
        return self.manifest.environment.options

    @property
    def reference_scores(self) -> ReferenceScores | None:
        """Scores of a random and an expert policy, ``None`` when unknown."""
        return self.manifest.environment.reference_scores

    @property
    def reward_edits(self) -> tuple[RewardEdit, ...] | None:
        """Edits of the environment's rewards; None: no step tells them."""
        edits = self.manifest.source.attributes.get("reward_edits", ())
        try:
            return tuple(map(RewardEdit.model_validate, edits))
        except (TypeError, ValueError):
            return None

    @property
    def history_column(self) -> str | None:
        """Column that numbers the histories which episodes are of, ``None`` without any."""
        name = self.manifest.source.attributes.get(HISTORIES)
        return name if isinstance(name, str) and name in self.spec else None

    @cached_property
    def histories(self) -> Int64Array | None:
        """(E,) int64: number of each episode's history, ``None`` where each is of its own.

        Reads their column (``COLUMN`` if it changes in an episode).
        """
        if (name := self.history_column) is None:
            return None
        offsets, values, last = self.episodes.offsets, np.empty(len(self), np.int64), 0
        for shard in range(len(self.manifest.shards)):
            for step, rows in self.stream(shard, name):
                low, high = offsets.searchsorted([step, step + len(rows)])
                numbers, firsts = rows.reshape(-1).astype(np.int64), offsets[low:high] - step
                changes, values[low:high] = np.diff(numbers, prepend=last), numbers[firsts]
                if (inside := np.setdiff1d(np.flatnonzero(changes), firsts)).size:
                    episode = int(offsets.searchsorted(step + inside[0], side="right")) - 1
                    problem = f"it changes in episode {episode}"
                    remedy = "give an episode one number"
                    raise InputError("COLUMN", problem, f"column {name}", remedy)
                last = int(numbers[-1])
        return values

    @property
    def verified(self) -> bool:
        """True once every block of every shard has been compared with its digest."""
        return self.verified_shards == len(self.manifest.shards)

    @property
    def whole(self) -> Dataset | None:
        """Dataset of all episodes, ``None`` if it is this one."""
        return self.view.whole if self.view else None

    @property
    def numbers(self) -> Int64Array | None:
        """(E,) int64: numbers of a view's episodes in `whole`, rising; ``None`` of all."""
        return self.view.numbers if self.view else None

    @property
    def depth(self) -> int:
        """1 of a view, of a view of a view 2, and so on; 0 of all episodes."""
        return self.view.depth if self.view else 0

    @property
    def member(self) -> Member | None:
        """Choose the episodes, from a number on, that a view gets as it grows; None: none."""
        return self.view.member if self.view else None

    @cached_property
    def first_steps(self) -> Int64Array:
        """(shards + 1,) int64: first step of each shard in the dataset, and N at the end."""
        firsts = np.cumsum([0, *(s.steps for s in self.manifest.shards)], dtype=np.int64)
        firsts = self.episodes.offsets[self.file_steps.searchsorted(firsts)]
        firsts.setflags(write=False)
        return firsts

    @cached_property
    def file_steps(self) -> Int64Array:
        """(E,) int64: first step of each episode in the shards."""
        view = self.view
        return view.whole.episodes.offsets[view.numbers] if view else self.episodes.offsets[:-1]

    if not TYPE_CHECKING:  # which finds such names itself

        def __getattr__(self, name: str) -> Never:
            problem = f"{type(self).__name__!r} object has no attribute {name!r}"
            manifest = vars(self).get("manifest")  # a copy is made without it
            if manifest is not None and name in (column.name for column in manifest.spec):
                problem += f": the column is column({name!r}), of an episode dataset[0][{name!r}]"
            raise AttributeError(problem)

    def read(self, column: str, start: int, stop: int) -> Array:
        """Return rows ``[start, stop)`` of `column` in memory of their own, digests unread.

        Parameters
        ----------
        column
            A column of the source.
        start, stop
            Steps of the whole dataset, ``0 <= start <= stop <= N``.

        Returns
        -------
        ndarray
            (stop - start, *shape), the column's dtype.

        Raises
        ------
        InputError
            ``COLUMN``; ``SELECTION`` for other steps; ``DATASET_DAMAGED``.
        """
        self.spec[column]  # refuses another one
        if not 0 <= start <= stop <= self.spec.steps:
            problem = f"steps [{start}, {stop}) are not in [0, {self.spec.steps})"
            raise InputError("SELECTION", problem, where=f"column {column}")
        rows = self._read(column, start, stop)
        return self.videos[column].read(rows) if column in self.videos else rows

    def _read(self, column: str, start: int, stop: int) -> Array:
        """Return rows of a column as the shards have it."""
        spec = self.manifest.stored[column]
        if self.view:
            pieces = self._file_pieces(start, stop)
            return np.concatenate([self.view.whole._read(column, *piece) for piece in pieces])
        dtype, shape = stored_form(spec)
        rows = np.empty((stop - start, *shape), dtype)
        begin = int(np.searchsorted(self.first_steps, start, side="right")) - 1
        for shard in range(begin, int(np.searchsorted(self.first_steps, stop))):
            first, end = self.first_steps[shard : shard + 2].tolist()
            low, high = max(start, first), min(stop, end)
            tensor, record = self._tensor(shard, column), self.manifest.shards[shard]
            data = byte_view(rows[low - start : high - start])
            offset = record.header_bytes + tensor.start + (low - first) * spec.step_bytes
            with self.open_shard(shard) as file:
                read_exactly(file, data, offset, where=self.path / record.name)
        return rows.view(spec.dtype).reshape(stop - start, *spec.shape)

    def _file_pieces(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the runs of steps in the shards that steps ``[start, stop)`` of a view are."""
        if start == stop:
            return [(0, 0)]
        offsets = self.episodes.offsets
        at = slice(offsets.searchsorted(start, "right") - 1, offsets.searchsorted(stop))
        moved = self.file_steps[at] - offsets[:-1][at]
        lows = moved + np.maximum(offsets[:-1][at], start)
        highs = moved + np.minimum(offsets[1:][at], stop)
        cuts = np.flatnonzero(lows[1:] != highs[:-1])
        lows, highs = lows[np.append(0, cuts + 1)], highs[np.append(cuts, len(highs) - 1)]
        return list(zip(lows.tolist(), highs.tolist(), strict=True))

    def stream(
        self, shard: int, column: str, *, chunk_bytes: int = 8 << 20
    ) -> Iterator[tuple[int, Array]]:
        """Iterate over the rows of one column in one shard, in order, and compare its digests.

        Yields
        ------
        step, rows
            First step of the chunk in the whole dataset, and (n, *shape) of the column's dtype, at
            most `chunk_bytes` or one row.  The memory of `rows` is used again for the next chunk.
            What was made of them counts only once the iteration has ended without an error
            (``DATASET_DAMAGED`` once a block does not match its digest).
        """
        if (kept := self.videos.get(column)) is None:
            yield from self._stream(shard, column, chunk_bytes)
            return
        rows = max(1, chunk_bytes // kept.spec.step_bytes)
        for step, references in self._stream(shard, column, rows * REFERENCE_BYTES):
            yield step, kept.read(references)

    def references(self, column: str) -> Int64Array:
        """Return (N, 3) references of a column's frames to its videos."""
        shards = range(len(self.manifest.shards))
        pieces = (rows.copy() for shard in shards for _, rows in self._stream(shard, column))
        return np.concatenate([*pieces])

    def _stream(
        self, shard: int, column: str, chunk_bytes: int = 8 << 20
    ) -> Iterator[tuple[int, Array]]:
        """Iterate over the rows of a column as the shards have it."""
        spec, tensor = self.manifest.stored[column], self._tensor(shard, column)
        step = int(self.first_steps[shard])
        rows = min(max(1, chunk_bytes // spec.step_bytes), tensor.shape[0])
        buffer = np.empty((rows, *tensor.shape[1:]), tensor.dtype)
        in_chunk: slice | BoolArray = slice(None)
        with self.open_shard(shard) as file:
            record, at = self.manifest.shards[shard], 0
            if self.view:
                first = int(self.view.whole.first_steps[shard])
                in_view = np.zeros(record.steps, np.bool_)
                for begin, end in self._file_pieces(*self.first_steps[shard : shard + 2].tolist()):
                    in_view[begin - first : end - first] = True
            for count in self._shard_file(shard, file).stream(tensor, buffer):
                if self.view:
                    in_chunk, at = in_view[at : at + count], at + count
                values = buffer[:count].view(spec.dtype).reshape(count, *spec.shape)[in_chunk]
                if len(values):
                    yield step, values
                step += len(values)

    def column(self, name: str) -> Array:
        """Return a whole column, (N, *shape), in memory of its own; its digests are compared."""
        spec = self.spec[name]
        values = np.empty((self.spec.steps, *spec.shape), spec.dtype)
        for shard in range(len(self.manifest.shards)):
            for step, rows in self.stream(shard, name):
                values[step : step + len(rows)] = rows
        return values

    def __len__(self) -> int:
        """Return E, the number of episodes."""
        return self.episodes.episodes

    @overload
    def __getitem__(self, number: SupportsIndex) -> Columns: ...

    @overload
    def __getitem__(self, number: slice) -> list[Columns]: ...

    def __getitem__(self, number: SupportsIndex | slice) -> Columns | list[Columns]:
        """Return an episode as `episode` does, or a list of them; -1 is the last one."""
        try:
            which = range(len(self))[number]
        except IndexError:
            raise IndexError(f"episode {number} of {len(self)}") from None
        except TypeError as error:
            problem = f"episodes have numbers, not {number!r}; whole columns: column(name)"
            raise TypeError(problem) from error
        if isinstance(which, int):
            return self.episode(which)
        return list(self.iter_episodes(which)) if which else []

    def __iter__(self) -> Iterator[Columns]:
        """Iterate over all episodes as `iter_episodes` does."""
        return self.iter_episodes()

    def episode(self, number: int, *, columns: Sequence[str] | None = None) -> Columns:
        """Return one episode, ``0 <= number < E``, as `iter_episodes` does."""
        return next(self.iter_episodes([number], columns=columns))

    def iter_episodes(
        self, which: npt.ArrayLike | None = None, *, columns: Sequence[str] | None = None
    ) -> Iterator[Columns]:
        """Iterate over episodes, each in memory of its own: column name to (T, *shape).

        Parameters
        ----------
        which
            Numbers of episodes, each at most once, or (E,) bool; default all.
        columns
            Columns to read, default all.

        Raises
        ------
        InputError
            ``SELECTION`` if there is no such episode, and those of `read`.
        """
        for run, rows in self.iter_runs(which, columns=columns):
            bounds = self.episodes.offsets[run[0] : run[-1] + 2] - self.episodes.offsets[run[0]]
            for begin, end in pairwise(bounds.tolist()):
                # Copies: holding one episode must not hold all that were read with it.
                yield {name: together[begin:end].copy() for name, together in rows.items()}

    def iter_runs(
        self, which: npt.ArrayLike | None = None, *, columns: Sequence[str] | None = None
    ) -> Iterator[tuple[Int64Array, Columns]]:
        """Iterate over runs of episodes that follow each other: their numbers, and all their rows.

        A run's widest column takes `RUN_BYTES`, or one episode; parameters and errors are those of
        `iter_episodes`.
        """
        numbers = np.arange(len(self)) if which is None else parse_episodes(which, len(self))
        names = [c.name for c in self.spec] if columns is None else list(columns)
        most = max(1, RUN_BYTES // max((self.spec[n].step_bytes for n in names), default=1))
        offsets = self.episodes.offsets
        groups = offsets[numbers] // most
        cuts = np.flatnonzero((np.diff(numbers) != 1) | (np.diff(groups) != 0)) + 1
        for run in np.split(numbers, cuts):
            begin, end = int(offsets[run[0]]), int(offsets[run[-1] + 1])
            yield run, {name: self.read(name, begin, end) for name in names}

    def verify(self, *, on_progress: OnProgress = lambda n: None) -> Dataset:
        """Return the dataset with every block of every shard compared with its digest, once.

        What is read by ranges is compared whenever it is fetched: nothing is read here.

        Parameters
        ----------
        on_progress
            Called with the number of bytes checked, from several threads.

        Raises
        ------
        InputError
            ``DATASET_DAMAGED`` at the first damage: names file, tensor and block.
        """
        if self.verified or self.ranges:
            return self

        def check(shard: int) -> None:
            with self.open_shard(shard) as file:
                self._shard_file(shard, file).compare(on_progress)

        unread = range(self.verified_shards, len(self.manifest.shards))
        with ThreadPoolExecutor(min(MAX_THREADS, usable_cores())) as pool:
            list(pool.map(check, unread))  # an error cancels
            list(pool.map(lambda file: file.compare(on_progress), video_files(self.videos)))
        return self.as_verified()

    def as_verified(self) -> Dataset:
        """Return the dataset as one that another process of this node has verified."""
        return replace(self, verified_shards=len(self.manifest.shards))

    def push_to_hub(self, name: str, *, private: bool = False) -> str:
        """Put the dataset on the Hugging Face Hub, every block compared first; return its address.

        `name` is ``USER/NAME``, made (`private`: for you alone) if it is not there, or
        ``USER/NAME@BRANCH``; ``OUTPUT_WRITE`` without a token that may write, or a network.
        """
        if self.view or self.ranges or self.videos:
            problem = "a view, frames in videos, or what is read by ranges has no files of its own"
            remedy = "push the whole dataset; frames in videos after another convert, of itself"
            raise InputError("USAGE", problem, str(self.path), remedy)
        names = [MANIFEST_NAME, *(shard.name for shard in self.verify().manifest.shards)]
        address, source = name.removeprefix("hub:"), self.manifest.source.uri
        facts = {"content": self.spec, "environment": self.environment_id, "source": source}
        metadata = {
            "task_categories": ["reinforcement-learning"],
            "tags": ["offline-reinforcement-learning", "gear-offline"],
            "viewer": False,  # which reads no shards
        }
        code = f'```python\nimport gear_offline as go\n\ngo.open_dataset("hub:{address}")\n```'
        files: dict[str, Path | bytes] = {file: self.path / file for file in names}
        files["README.md"] = card(metadata, address, facts, code)
        return put(files, name, "dataset", private=private)

    def open_shard(self, shard: int) -> LocalFile | RangedFile:
        """Return a shard's open file, with the content that it had at first.

        A chmod, touch, backup by links or equal copy makes no other content.
        """
        record = self.manifest.shards[shard]
        if self.ranges is not None:
            return self.ranges.open(self.manifest, record)
        with open_member(self.path / record.name, size=record.bytes) as file:
            identity = file_identity(file.fileno())
            if identity != self.identities[shard]:
                self._shard_file(shard, file).compare()
                self.identities[shard] = identity
            return LocalFile(os.dup(file.fileno()))

    def _shard_file(self, shard: int, file: Readable) -> ShardFile:
        return ShardFile(file, self.path, self.manifest, self.manifest.shards[shard])

    def _tensor(self, shard: int, name: str) -> TensorLayout:
        self.spec[name]  # refuses another column
        return self.manifest.layouts(self.manifest.shards[shard])[name]


class _MeasuredStatistics(Mapping[str, ColumnStatistics]):
    """Statistics of a view, or of a grown dataset: each column's, measured when asked for."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset, self._known = dataset, dict[str, ColumnStatistics]()

    def __getitem__(self, name: str) -> ColumnStatistics:
        if name in self._dataset.videos:  # unknown, as they were
            return self._dataset.manifest.statistics[name]
        if name not in self._known:
            data, first = self._dataset, self._dataset.manifest.statistics[name]
            dtype, shape = stored_form(data.spec[name])
            is_new = first.nonfinite or data.view
            moments = Moments(shape) if is_new else Moments.of(first)
            measured = int(np.searchsorted(data.first_steps, moments.rows))
            for shard in range(measured, len(data.manifest.shards)):
                for _, rows in data.stream(shard, name):
                    moments.update(rows.view(dtype).reshape(len(rows), *shape))
            self._known[name] = moments.result()
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._dataset.manifest.statistics)

    def __len__(self) -> int:
        return len(self._dataset.manifest.statistics)


@check_arguments()
def open_dataset(
    path: str | os.PathLike[str],
    *,
    verify: bool = True,
    admissions: int | None = None,
    cache: int | str | None = None,
) -> Dataset:
    """Open the dataset directory at `path`.

    Parameters
    ----------
    path
        Directory that `gear_offline.convert` made, ``hub:USER/NAME`` of the Hugging Face Hub, or
        an address of such a directory, e.g. ``s3://bucket/data``.
    verify
        Compare every block of every shard with its digest now.  Otherwise the manifest, the sizes
        and headers of the shards and the per-episode tensors are checked; what is loaded whole
        (`Dataset.stream`, `Dataset.column`, a table) is compared in any case.
    admissions
        Open a growing dataset as it was after so many admissions; default all.
    cache
        Bytes, or ``"20GB"``, of this disk for a dataset at an address.  Rows are then fetched as
        they are read, by blocks, each compared with its digest; default: all, once.

    Raises
    ------
    InputError
        ``DATASET_NOT_FOUND``; ``DATASET_DAMAGED`` at the first damage, with file, tensor and
        block, or for a newer version of the format; ``SOURCE_CHANGED`` on its server; ``USAGE``
        for a `cache` that is none, or smaller than a block.
    UnavailableError
        ``DATASET_NOT_FOUND`` of a server that fails, ``PACKAGE_MISSING``.

    Examples
    --------
    `tiny` is what the example of `gear_offline.convert` makes.

    >>> import gear_offline as go
    >>> dataset = go.open_dataset("tiny")
    >>> len(dataset), dataset.episodes.lengths.tolist(), dataset.returns.tolist()
    (2, [7, 5], [7.0, 5.0])
    >>> dataset[1]["observations"].shape
    (5, 3)
    >>> dataset.column("rewards").dtype, dataset.statistics["observations"].mean.tolist()
    (dtype('float32'), [6.5, -4.5, 1.0])
    """
    address, ranges = _shown_address(path), None
    if cache is not None:
        path, ranges = open_ranges(path, _cache_size(cache))
    elif address:
        path = fetch_dataset(path)
    dataset = _open(path, ranges, address, admissions)
    return dataset.verify() if verify else dataset


def open_to_read(
    path: str | os.PathLike[str], code: str = "DATASET_NOT_FOUND", admissions: int | None = None
) -> Dataset:
    """Open a dataset whose rows are read in order: at an address by ranges, if its server can.

    `code` is that of errors of a server.
    """
    if parse_address(path) is None:
        return open_dataset(path, verify=False, admissions=admissions)
    address = _shown_address(path)
    try:
        return _open(*open_ranges(path, None, code), address, admissions)
    except NoRangesError as error:
        say(f"{error.where}: {error.problem}: it is fetched whole")
        return _open(fetch_dataset(path, code), None, address, admissions)


def _shown_address(path: str | os.PathLike[str]) -> str:
    return hide_secrets(parse_address(path) or str(path)) if is_remote(path) else ""


def _open(
    path: str | os.PathLike[str], ranges: Ranges | None, address: str, admissions: int | None = None
) -> Dataset:
    manifest, path = Manifest.read(path), given_path(path, "DATASET_NOT_FOUND", where="path")
    if address and manifest.videos:
        problem = f"frames of {', '.join(manifest.videos)} stay in videos of another machine"
        remedy = "convert the dataset there without --video keep, or fetch it with its videos"
        raise InputError("DATASET_NOT_FOUND", problem, address, remedy)
    dataset = with_shards(path, manifest, ranges=ranges)
    dataset = replace(dataset, address=address, name=address or dataset.name)
    if admissions != 0:
        dataset = grow_dataset(dataset, read_admissions(path)[0][:admissions])
    return dataset


def _cache_size(cache: int | str) -> int:
    with suppress(ValueError):
        if type(size := byte_count(cache)) is int and 0 < size < 1 << 62:
            return size
    raise InputError("USAGE", f"cache={cache!r} is no size", remedy="write it like '20GB'")


def grow_dataset(dataset: Dataset, admissions: Sequence[Admission]) -> Dataset:
    """Return the dataset with further admissions, whose shards lie in its directory."""
    if not admissions:
        return dataset
    view, manifest = dataset.view, dataset.manifest.grown(admissions)
    before = view.whole if view else dataset
    before = replace(before, verified_shards=dataset.verified_shards, frozen=dataset.frozen)
    larger = with_shards(dataset.path, manifest, before)
    larger = _summed_up(replace(larger, admissions=dataset.admissions + len(admissions)))
    if view is None:
        return larger
    mask = np.zeros(0, bool) if view.member is None else view.member(larger, len(before))
    added = np.flatnonzero(mask) + len(before)
    return view_episodes(larger, np.append(view.numbers, added), view.member)


def view_episodes(
    dataset: Dataset,
    numbers: Int64Array,
    member: Member | None = None,
) -> Dataset:
    """Return a view of a dataset as if it had no other episodes than `numbers`, which rise.

    Nothing is copied; `member` is the view's.
    """
    if view := dataset.view:
        view = replace(view, numbers=view.numbers[numbers], depth=view.depth + 1, member=member)
    rows = {n: getattr(dataset, n)[numbers] for n in ("terminated", "truncated", "returns")}
    episodes = EpisodeIndex(dataset.episodes.lengths[numbers])
    view = view or View(whole=dataset, numbers=numbers, member=member)
    return _summed_up(replace(dataset, episodes=episodes, view=view, **rows))


def _summed_up(dataset: Dataset) -> Dataset:
    """Return the dataset with distributions of the returns and lengths that it has."""
    lengths = distribution(dataset.episodes.lengths, integers=True)
    facts = {"returns": distribution(dataset.returns), "lengths": lengths}
    return replace(dataset, manifest=dataset.manifest.replace_fields(**facts))


def with_shards(
    path: Path, manifest: Manifest, before: Dataset | None = None, ranges: Ranges | None = None
) -> Dataset:
    """Return the dataset at `path`, or of `ranges`; `before` it has the first shards alone."""
    pieces, identities = list[tuple[Array, ...]](), list[FileIdentity]()
    if before is not None:
        first_piece = (before.episodes.lengths, before.returns, before.terminated, before.truncated)
        pieces, identities = [first_piece], [*before.identities]
        ranges = before.ranges

    shards = manifest.shards[len(identities) :]

    def fetch(shard: ShardRecord) -> tuple[Array, ...]:
        assert ranges is not None
        with ranges.open(manifest, shard) as file:
            return ShardFile(file, path, manifest, shard).read_episodes()

    if ranges is not None:
        pieces += map_in_threads(fetch, shards, REQUESTS)
        identities += [()] * len(shards)
    for shard in [] if ranges else shards:
        with open_member(path / shard.name, size=shard.bytes) as file:
            identities.append(file_identity(file.fileno()))
            pieces.append(ShardFile(file, path, manifest, shard).read_episodes())
    lengths, returns, *ends = (np.concatenate(arrays) for arrays in zip(*pieces, strict=True))
    for array in (returns, *ends):
        array.setflags(write=False)
    if [int(flags.sum()) for flags in ends] != [count for _, count in manifest.endings]:
        raise damage_error("ends of episodes are counted otherwise", path / MANIFEST_NAME)
    return Dataset(
        path=path.absolute(),
        name=str(path) if before is None else before.name,
        manifest=manifest,
        episodes=EpisodeIndex(lengths=lengths),
        terminated=ends[0],
        truncated=ends[1],
        returns=returns,
        verified_shards=0 if before is None else before.verified_shards,
        identities=identities,
        videos=open_videos(path, manifest) if before is None else before.videos,
        frozen=before is not None and before.frozen,
        ranges=ranges,
        address="" if before is None else before.address,
    )
