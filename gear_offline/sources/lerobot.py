"""LeRobot's datasets, versions 2 and 3: parquet with a row a step, frames in it or in videos.

Episodes are runs of one ``episode_index``.  ``action`` becomes ``actions``, ``next.reward``
``rewards``, and the float vectors of ``observation.`` side by side ``observations``.  Frames are
decoded only where a column is named.

Shape legend: N steps, E episodes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gear_offline.core.files import read_regular
from gear_offline.core.text import count_text
from gear_offline.core.types import Array
from gear_offline.errors import package_needed
from gear_offline.sources.base import (
    READ_BYTES,
    Asked,
    InputFile,
    Piece,
    Source,
    SourceInfo,
    by_number,
    damage_told,
    files_in,
    kinds_of_rows,
    misfit,
    split_names,
)
from gear_offline.sources.combine import observation_vectors
from gear_offline.sources.flat import NO_REWARDS
from gear_offline.sources.parquet import ParquetFile, is_numeric, step_rows

INFO = Path("meta", "info.json")
MAX_INFO_BYTES = 64 << 20
WRONG = (OSError, ValueError, TypeError, AttributeError, LookupError, RecursionError)
NAMES = {"actions": "action", "rewards": "next.reward"}


class Group(NamedTuple):
    """A group of rows of a parquet file."""

    file: ParquetFile
    number: int
    first: int  # of all steps
    steps: int


Place = tuple[InputFile, float]  # a video, and where in it an episode begins, in seconds
Read = Callable[[Group, int, int], Array]  # steps of a group


def is_lerobot(path: Path) -> bool:
    """Whether a folder is a dataset of LeRobot's."""
    return (path / INFO).is_file() and (path / "data").is_dir()


def open_lerobot(path: Path, asked: Asked) -> Source:
    """Open a dataset's folder; reads the episode numbers."""
    path, names = path.absolute(), asked.names
    reader = _Reader(path)
    info, groups, notes = reader.info, reader.groups, list[str]()
    columns, left_out = reader.columns({p for old in names.values() for p in split_names(old)})

    def read(group: Group, name: str, start: int, stop: int) -> Array:
        with damage_told("LeRobot", group.file.file.path, WRONG):
            return columns[name](group, start, stop)

    first = {name: read(groups[0], name, 0, 1) for name in columns}
    kinds: dict[str, Any] = dict(kinds_of_rows(first))
    rewards = names.get("rewards", NAMES["rewards"])
    if rewards not in kinds:
        success = "next.success" in kinds
        notes.append(NO_REWARDS.replace("NAME", "next.success") if success else NO_REWARDS)
    elif kinds[rewards][0].kind == "b":
        kinds[rewards] = np.dtype(np.float32), ()
    usual = {new: old for new, old in NAMES.items() if old in kinds}
    return Source(
        [Piece(read=partial(read, g), first=g.first, steps=g.steps) for g in groups],
        kinds,
        lengths=np.diff(reader.bounds),
        preferred={  # a read of frames looks for a key frame
            name: max(1, 4 * READ_BYTES // math.prod(shape))
            for name, (_, shape) in kinds.items()
            if len(shape) == 3
        },
        usual=usual | observation_vectors(kinds, "observation.", path, names),
        info=SourceInfo(
            uri=path.name,
            format="lerobot",
            rule="episode_index",
            files=tuple(dict.fromkeys([*(group.file.file for group in groups), *reader.videos])),
            attributes={
                **{key: info.get(key) for key in ("codebase_version", "robot_type", "fps")},
                "left_out": left_out,
                "warnings": notes,
            },
        ),
    )


class _Reader:
    """Reads rows of columns; of each column the group of rows that was read last is kept."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.videos: list[InputFile] = []
        self._recent: dict[str, tuple[int, Any]] = {}
        with damage_told("info.json", path / INFO, WRONG):
            self.info: dict[str, Any] = json.loads(read_regular(path / INFO, most=MAX_INFO_BYTES))
            self.version = int(self.info["codebase_version"].removeprefix("v").split(".")[0])
            self.fps, self.chunk = float(self.info["fps"]), int(self.info.get("chunks_size", 1000))
            self.dtypes = {n: str(kind["dtype"]) for n, kind in self.info["features"].items()}
            counts = int(self.info["total_frames"]), int(self.info["total_episodes"])
        if self.version not in (2, 3):
            what = f"a dataset of LeRobot's format {self.info['codebase_version']}"
            raise misfit(what, path, "v2 and v3 are read: convert it with LeRobot")
        self.groups: list[Group] = []
        self.steps = 0
        chunks = sorted((p for p in (path / "data").glob("*") if p.is_dir()), key=by_number)
        for file in (ParquetFile(f) for chunk in chunks for f in files_in(chunk, (".parquet",))):
            for number, rows in enumerate(file.rows):
                self.groups += [Group(file, number, self.steps, rows)] if rows else []
                self.steps += rows
        numbers = self._whole("episode_index") if self.groups else np.zeros(0, np.int64)
        self.firsts = np.flatnonzero(np.diff(numbers, prepend=-1))
        self.bounds: list[int] = [*self.firsts.tolist(), self.steps]
        self.episodes: list[int] = numbers[self.firsts].tolist()
        episodes = len(set(self.episodes))
        if not self.steps or counts != (self.steps, episodes):
            found = f"{count_text(self.steps, 'step')} of {count_text(episodes, 'episode')}"
            raise misfit(f"{found} are here, info.json says {counts[0]:,} of {counts[1]:,}", path)
        if episodes < len(self.episodes):
            raise misfit("the steps of an episode do not follow each other", path)

    def columns(self, asked: set[str]) -> tuple[dict[str, Read], dict[str, str]]:
        """Return what reads each column, and what is left out: frames that nobody asked for."""
        reads: dict[str, Read] = {}
        left_out: dict[str, str] = {}
        types = {field.name: field.type for field in self.groups[0].file.schema}
        for name in [*types, *(n for n, dtype in self.dtypes.items() if dtype == "video")]:
            dtype = self.dtypes.get(name)
            if dtype in ("image", "video") and name not in asked:
                left_out[name] = f"frames: --columns observations={name},actions decodes them"
            elif dtype == "video":
                reads[name] = partial(self._video, self._places(name))
            elif dtype == "image":
                reads[name] = partial(self._images, name)
            elif is_numeric(types[name]):
                reads[name] = partial(self._numbers, name)
            else:
                left_out[name] = f"no numbers ({types[name]})"
        return reads, left_out

    def _whole(self, name: str) -> Array:
        parts = [self._numbers(name, group, group.first, self.steps) for group in self.groups]
        return np.concatenate([part.reshape(-1) for part in parts])

    def _numbers(self, name: str, group: Group, start: int, stop: int) -> Array:
        made = partial(step_rows, name=name, path=group.file.file.path)
        rows: Array = self._kept(name, group, made)[start - group.first : stop - group.first]
        return rows

    def _images(self, name: str, group: Group, start: int, stop: int) -> Array:
        stored = self._kept(name, group, list)[start - group.first : stop - group.first]
        return np.stack([_image(image.as_py(), group.file.file.path) for image in stored])

    def _kept(self, name: str, group: Group, make: Callable[[Any], Any]) -> Any:
        """Return what is made of a group's column; of each column the last one is kept."""
        if self._recent.get(name, (-1,))[0] != group.first:
            self._recent[name] = group.first, make(group.file.column(group.number, name))
        return self._recent[name][1]

    def _video(self, places: dict[int, Place], group: Group, start: int, stop: int) -> Array:
        number = int(np.searchsorted(self.firsts, start, side="right")) - 1
        parts: list[Array] = []
        while start < stop:
            file, begin = places[self.episodes[number]]
            first, end = self.bounds[number], min(stop, self.bounds[number + 1])
            parts.append(_frames(file, begin, self.fps, start - first, end - first))
            start, number = end, number + 1
        return np.concatenate(parts)

    def _places(self, name: str) -> dict[int, Place]:
        folder, found = self.path / "videos", dict[int, tuple[Path, float]]()
        if self.version == 2:
            for number in self.episodes:
                chunk = folder / f"chunk-{number // self.chunk:03d}"
                found[number] = chunk / name / f"episode_{number:06d}.mp4", 0.0
        else:
            keys = [f"videos/{name}/{k}" for k in ("chunk_index", "file_index", "from_timestamp")]
            for meta in map(ParquetFile, (self.path / "meta" / "episodes").glob("*/*.parquet")):
                for group in range(len(meta.rows)):
                    rows = (meta.column(group, c).to_pylist() for c in ("episode_index", *keys))
                    for number, chunk, file, begin in zip(*rows, strict=True):
                        video = f"chunk-{chunk:03d}/file-{file:03d}.mp4"
                        found[number] = folder / name / video, begin
        if missing := set(self.episodes) - set(found):
            raise misfit(f"no video {name} of episode {min(missing)}", self.path / "meta")
        paths = dict.fromkeys(found[n][0] for n in self.episodes)
        files = {path: InputFile.find(path) for path in paths}
        self.videos += files.values()
        return {n: (files[found[n][0]], found[n][1]) for n in self.episodes}


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
    raise misfit(what, file.path)


def _image(stored: Mapping[str, Any] | None, path: Path) -> Array:
    """Return a frame that parquet holds as a file of PNG or JPEG."""
    if not stored or not stored.get("bytes"):
        raise misfit("an image is missing", path)
    with _opened(BytesIO(stored["bytes"]), path) as image:
        frame: Array = next(image.decode(video=0)).to_ndarray(format="rgb24")
        return frame


@contextmanager
def _opened(file: Any, path: Path) -> Iterator[Any]:
    with package_needed("frames are decoded by PyAV", "lerobot"):
        import av
    errors = (av.FFmpegError, OSError, ValueError, TypeError, LookupError, StopIteration)
    with damage_told("video or image", path, errors), av.open(file) as opened:
        yield opened
