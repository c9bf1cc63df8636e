"""LeRobot's datasets, versions 2 and 3: parquet with a row a step, frames in it or in videos.

Episodes are runs of one ``episode_index``.  ``action`` becomes ``actions``, ``next.reward``
``rewards``, and the float vectors of ``observation.`` side by side ``observations``.  Frames are
decoded only where a column is named.

Shape legend: N steps, E episodes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gear_offline.core.files import read_regular
from gear_offline.core.text import count_text
from gear_offline.core.types import Array, BoolArray
from gear_offline.errors import InputError, UnavailableError
from gear_offline.sources.base import (
    READ_BYTES,
    InputFile,
    Piece,
    Source,
    SourceInfo,
    by_number,
    damage_told,
    files_in,
    renamed,
    some_names,
)
from gear_offline.sources.combine import observation_vectors, with_columns
from gear_offline.sources.parquet import ParquetFile, is_numeric, step_rows

INFO = Path("meta", "info.json")
MAX_INFO_BYTES = 64 << 20
NAMES = {"actions": "action", "rewards": "next.reward"}
NUMBERS, IMAGES, VIDEO = "numbers", "images", "video"  # kinds of columns
DEPTH = "depth maps"  # packed in ways of their own
NO_REWARDS = "no next.reward in the data: there are no rewards and returns"
SUCCESS = ", --columns rewards=next.success,... takes success"
WRONG = (ValueError, TypeError, AttributeError, LookupError, RecursionError)  # in JSON
NO_DONE = "no next.done in the data: every episode counts as truncated"


class Group(NamedTuple):
    """A group of rows of a parquet file."""

    file: ParquetFile
    number: int
    first: int  # of all steps
    steps: int


def is_lerobot(path: Path) -> bool:
    """Whether a folder is a dataset of LeRobot's."""
    return (path / INFO).is_file()


def open_lerobot(path: Path, *, names: Mapping[str, str]) -> Source:
    """Open a dataset's folder; reads episode numbers and flags."""
    path = path.absolute()
    reader = _Reader(path)
    info, groups, notes = reader.info, reader.groups, list[str]()
    asked = {part.strip() for old in names.values() for part in old.split("+")}
    left_out, frames = reader.find_columns(asked)
    if frames:
        example = f"--columns observations={frames[0]},actions"
        notes.append(f"frames of {some_names(frames)} are left out: {example} decodes them")
    free = (item for item in NAMES.items() if item[0] not in names and item[1] in reader.stored)
    usual = {new: old for new, old in free if old not in asked}
    stored = {name: name for name in reader.stored}
    reader.columns = renamed(stored, {**names, **usual}, path)
    for name in reader.columns:
        rows = reader.read(groups[0], name, 0, 1)
        reader.kinds[name] = rows.dtype, rows.shape[1:]
    kinds = dict(reader.kinds)
    if "rewards" not in kinds:
        notes.append(NO_REWARDS + (SUCCESS if "next.success" in kinds else ""))
    elif kinds["rewards"][0].kind == "b":
        kinds["rewards"] = np.dtype(np.float32), ()
    terminated, cut = reader.flags("next.done"), reader.flags("next.truncated")
    if terminated is None:
        notes.append(NO_DONE)
        terminated = np.zeros(reader.firsts.size, np.bool_)
    source = Source(
        [Piece(read=partial(reader.read, g), first=g.first, steps=g.steps) for g in groups],
        kinds,
        lengths=np.diff(reader.firsts, append=reader.steps),
        terminated=terminated if cut is None else terminated & ~cut,
        info=SourceInfo(
            uri=path.name,
            format="lerobot",
            rule="episode_index",
            files=tuple(dict.fromkeys([*(g.file.file for g in groups), *reader.video_files()])),
            attributes={
                **{key: info[key] for key in ("codebase_version", "robot_type", "fps")},
                "tasks": reader.tasks(),
                "left_out": left_out,
                "warnings": notes,
            },
        ),
        preferred={
            name: max(1, 4 * READ_BYTES // math.prod(kinds[name][1]))
            for name, old in reader.columns.items()
            if reader.stored[old] != NUMBERS
        },
    )
    return with_columns(source, observation_vectors(kinds, "observation.", path))


class _Reader:
    """Reads rows of columns; of each column the group of rows that was read last is kept.

    `stored` has the kind of each column by LeRobot's name, `columns` these names by ours.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stored: dict[str, str] = {}
        self.columns: dict[str, str] = {}
        self.kinds: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {}
        self._recent: dict[str, tuple[int, Any]] = {}
        self._videos: dict[str, dict[int, tuple[InputFile, float]]] = {}  # by column and episode
        with damage_told("info.json", path / INFO, (OSError, *WRONG)):
            info = json.loads(read_regular(path / INFO, most=MAX_INFO_BYTES))
            self.info: dict[str, Any] = {"robot_type": None, "chunks_size": 1000} | info
            self.version = int(info["codebase_version"].removeprefix("v").split(".")[0])
            self.fps = float(info["fps"])
            self.dtypes = {name: _dtype(feature) for name, feature in info["features"].items()}
            said = int(info["total_frames"]), int(info["total_episodes"])
        if self.version not in (2, 3):
            what = f"a dataset of LeRobot's format {info['codebase_version']}"
            remedy = "formats v2 and v3 are read: convert it with LeRobot"
            raise InputError("SOURCE_LAYOUT", what, where=str(path), remedy=remedy)
        self.groups: list[Group] = []
        self.steps = 0
        chunks = sorted((p for p in (path / "data").glob("*") if p.is_dir()), key=by_number)
        for file in (ParquetFile(f) for chunk in chunks for f in files_in(chunk, (".parquet",))):
            for number, rows in enumerate(file.rows):
                self.groups += [Group(file, number, self.steps, rows)] if rows else []
                self.steps += rows
        numbers = self._whole("episode_index") if self.groups else np.zeros(0, np.int64)
        self.firsts = np.flatnonzero(np.diff(numbers, prepend=-1))
        self.episodes: list[int] = numbers[self.firsts].tolist()
        if not self.steps or said != (self.steps, len(set(self.episodes))):
            found = f"{count_text(self.steps, 'step')} of {len(set(self.episodes)):,} episodes"
            raise _misfit(f"{found} are here, info.json says {said[0]:,} of {said[1]:,}", path)
        if len(set(self.episodes)) < len(self.episodes):
            raise _misfit("the steps of an episode do not follow each other", path)

    def _whole(self, name: str) -> Array:
        """Return a column of one number a step, (N,)."""
        read = (
            step_rows(g.file.column(g.number, name), name, g.file.file.path) for g in self.groups
        )
        return np.concatenate([rows.reshape(-1) for rows in read])

    def flags(self, name: str) -> BoolArray | None:
        """Return a flag at the last step of each episode, (E,), ``None`` if there is none."""
        if any(name not in group.file.schema.names for group in self.groups):
            return None
        flags: BoolArray = self._whole(name)[np.append(self.firsts[1:], self.steps) - 1] != 0
        return flags

    def find_columns(self, asked: set[str]) -> tuple[dict[str, str], list[str]]:
        """Return what is left out and why, and which frames of it could be `asked` for."""
        left_out: dict[str, str] = {}
        for field in self.groups[0].file.schema:
            if is_numeric(field.type):
                self.stored[field.name] = NUMBERS
            elif self.dtypes.get(field.name) == "image":
                self.stored[field.name] = IMAGES
            else:
                left_out[field.name] = f"no numbers ({field.type})"
        self.stored |= {name: VIDEO for name, dtype in self.dtypes.items() if dtype == "video"}
        frames = [n for n, kind in self.stored.items() if kind != NUMBERS and n not in asked]
        for name in frames:
            del self.stored[name]
        for name in (name for name, kind in self.stored.items() if kind == VIDEO):
            self._videos[name] = self._find_videos(name)
        left_out |= {name: dtype for name, dtype in self.dtypes.items() if dtype == DEPTH}
        return left_out | dict.fromkeys(frames, "frames that no column names"), frames

    def read(self, group: Group, name: str, start: int, stop: int) -> Array:
        """Return rows ``[start, stop)`` of all steps, which lie in one group."""
        old = self.columns[name]
        path, kind, wanted = group.file.file.path, self.stored[old], self.kinds.get(name)
        if kind == VIDEO:
            rows = np.concatenate(list(self._video(old, start, stop)))
        else:
            if self._recent.get(name, (-1,))[0] != group.first:
                values = group.file.column(group.number, old)
                if kind == NUMBERS:
                    values = step_rows(values, name, path, wanted)
                self._recent[name] = group.first, values
            rows = self._recent[name][1][start - group.first : stop - group.first]
            if kind == IMAGES:
                rows = np.stack([_image(stored.as_py(), path) for stored in rows])
        if wanted and rows.shape[1:] != wanted[1]:
            raise _misfit(f"{name} has shape {rows.shape[1:]}, before it was {wanted[1]}", path)
        return rows

    def _video(self, name: str, start: int, stop: int) -> Iterator[Array]:
        """Yield the frames of steps ``[start, stop)`` by episode."""
        number = int(np.searchsorted(self.firsts, start, side="right")) - 1
        bounds = [*self.firsts.tolist(), self.steps]
        while start < stop:
            file, begin = self._videos[name][self.episodes[number]]
            first, end = bounds[number], min(stop, bounds[number + 1])
            yield _frames(file, begin, self.fps, start - first, end - first)
            start, number = end, number + 1

    def _find_videos(self, name: str) -> dict[int, tuple[InputFile, float]]:
        """Return where the frames of each episode lie: a file, and seconds in it."""
        folder = self.path / "videos"
        if self.version == 2:
            chunk = {n: f"chunk-{n // int(self.info['chunks_size']):03d}" for n in self.episodes}
            places = {
                n: (folder / chunk[n] / name / f"episode_{n:06d}.mp4", 0.0) for n in self.episodes
            }
        else:
            keys = (
                f"videos/{name}/{key}" for key in ("chunk_index", "file_index", "from_timestamp")
            )
            places = {
                n: (folder / name / f"chunk-{chunk:03d}" / f"file-{file:03d}.mp4", begin)
                for n, chunk, file, begin in self._meta("episodes/*/*", "episode_index", *keys)
            }
        if missing := set(self.episodes) - set(places):
            raise _misfit(f"no video {name} of episode {min(missing)}", self.path / "meta")
        files = {path: InputFile.find(path) for path in {places[n][0] for n in self.episodes}}
        return {n: (files[places[n][0]], places[n][1]) for n in self.episodes}

    def video_files(self) -> list[InputFile]:
        """Return the videos of which columns are made."""
        return [file for places in self._videos.values() for file, _ in places.values()]

    def tasks(self) -> dict[str, str]:
        """Return the text of each task by its ``task_index``."""
        path = self.path / "meta" / "tasks.jsonl"
        if self.version == 2:
            with damage_told("tasks.jsonl", path, (OSError, *WRONG)):
                lines = map(json.loads, read_regular(path, most=MAX_INFO_BYTES).splitlines())
                return {str(line["task_index"]): str(line["task"]) for line in lines}
        file = ParquetFile(path.with_suffix(".parquet"))
        text = next((name for name in file.schema.names if name != "task_index"), "task")
        rows = self._meta("tasks", "task_index", text)
        return {str(number): str(words) for number, words in rows}

    def _meta(self, pattern: str, *columns: str) -> Iterator[tuple[Any, ...]]:
        """Yield rows of the parquet files of ``meta``."""
        for path in sorted((self.path / "meta").glob(f"{pattern}.parquet")):
            file = ParquetFile(path)
            for group in range(len(file.rows)):
                yield from zip(*(file.column(group, c).to_pylist() for c in columns), strict=True)


def _dtype(feature: Mapping[str, Any]) -> str:
    facts = {**(feature.get("info") or {}), **(feature.get("video_info") or {})}
    depth = facts.get("is_depth_map") or facts.get("video.is_depth_map")
    return DEPTH if depth else str(feature["dtype"])


def _frames(file: InputFile, begin: float, fps: float, first: int, stop: int) -> Array:
    """Return frames ``[first, stop)`` of an episode that begins at `begin` seconds of a video."""
    frames: dict[int, Array] = {}
    for place in (begin + first / fps, 0.0):  # a key frame before it, or else the beginning
        with file.open() as raw, _opened(raw, file.path) as video:
            stream = video.streams.video[0]
            video.seek(int(place / stream.time_base), stream=stream)
            for frame in video.decode(stream):
                number = round((frame.time - begin) * fps)
                if first <= number < stop:
                    frames[number] = frame.to_ndarray(format="rgb24")
                if number >= stop - 1:
                    break
        if len(frames) == stop - first:
            return np.stack([frames[number] for number in range(first, stop)])
    what = f"the video has {len(frames)} of the frames {first} to {stop - 1} of an episode"
    raise _misfit(what, file.path)


def _image(stored: Mapping[str, Any] | None, path: Path) -> Array:
    """Return a frame that parquet holds as a file of PNG or JPEG."""
    if not stored or not stored.get("bytes"):
        raise _misfit("an image is missing", path)
    with _opened(BytesIO(stored["bytes"]), path) as image:
        frame: Array = next(image.decode(video=0)).to_ndarray(format="rgb24")
        return frame


@contextmanager
def _opened(file: Any, path: Path) -> Iterator[Any]:
    try:
        import av
    except ImportError as error:
        what, remedy = f"frames are decoded by PyAV: {error}", "pip install 'gear-offline[lerobot]'"
        raise UnavailableError("PACKAGE_MISSING", what, remedy=remedy) from error
    errors = (av.FFmpegError, OSError, ValueError, TypeError, LookupError, StopIteration)
    with damage_told("video or image", path, errors), av.open(file) as opened:
        yield opened


def _misfit(what: str, path: Path) -> InputError:
    remedy = "files are missing, damaged or out of order: get the dataset again"
    return InputError("SOURCE_LAYOUT", what, where=str(path), remedy=remedy)
