"""LeRobot's datasets, versions 2 and 3: parquet with a row a step, frames in it or in videos.

Episodes are runs of one ``episode_index``.  ``action`` becomes ``actions``, ``next.reward``
``rewards``, and the float vectors of ``observation.`` side by side ``observations``.  Frames are
decoded only where a column is named.

Shape legend: N steps, E episodes.
"""

from __future__ import annotations

import glob
import math
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from gear_offline.core.text import count_text
from gear_offline.core.types import Array
from gear_offline.data.dataset.pictures import Size, decode_frames, find_frames, image_pixels
from gear_offline.data.sources.base import (
    READ_BYTES,
    KeptVideo,
    Piece,
    Source,
    SourceInfo,
    SourceRequest,
)
from gear_offline.data.sources.columns import row_kinds, split_names
from gear_offline.data.sources.combine import CODES, observation_vectors
from gear_offline.data.sources.input_files import (
    InputFile,
    by_number,
    misfit,
    read_json,
    read_json_lines,
)
from gear_offline.data.sources.parquet import Column, ParquetFile, Shards, is_numeric, step_rows
from gear_offline.data.sources.row_marks import runs
from gear_offline.errors import InputError, reading_errors

INFO = Path("meta", "info.json")
# where data and videos lie unless info.json says otherwise, by version
PATHS = {
    2: (
        "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
    ),
    3: (
        "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
    ),
}
FIELD = re.compile(r"\{(\w+)(?::0?([0-9]{1,2})d?)?\}")
NAMES = {"actions": "action", "rewards": "next.reward"}


Place = tuple[int, float]  # number of a video, and where in it an episode begins, in seconds
Read = Callable[[int, int], Array]  # of steps


def is_lerobot(path: Path) -> bool:
    """Tell the folder of a dataset."""
    return (path / INFO).is_file()


def open_lerobot(path: Path, request: SourceRequest) -> Source:
    """Open a dataset's folder; reads the episode numbers."""
    path, names = path.absolute(), request.names
    reader = _Folder(path, keeps_videos=request.keeps_videos, resize=request.resize)
    origins = {name for text in names.values() for name in split_names(text)}
    columns, left_out = reader.columns(origins)

    def read(name: str, start: int, stop: int) -> Array:
        return columns[name](start, stop)

    kinds: dict[str, Any] = dict(row_kinds({name: read(name, 0, 1) for name in columns}))
    rewards = names.get("rewards", NAMES["rewards"])
    if rewards in kinds and kinds[rewards][0].kind == "b":
        kinds[rewards] = np.dtype(np.float32), ()
    usual = {alias: origin for alias, origin in NAMES.items() if origin in kinds}
    frames = {name: math.prod(shape) for name, (_, shape) in kinds.items() if len(shape) == 3}
    facts = {key: reader.info.get(key) for key in ("codebase_version", "robot_type", "fps")}
    facts |= {CODES: codes} if (codes := reader.codes(columns)) else {}
    facts |= {"left_out": left_out, "warnings": reader.notes}
    info = SourceInfo(uri=path.name, format="lerobot", rule="episode_index", attributes=facts)
    files = *reader.files, *dict.fromkeys(chain(*reader.videos.values()))
    return Source(
        [Piece(read=read, steps=reader.table.rows)],
        kinds,
        lengths=np.diff(reader.bounds),
        # a read of frames looks for a key frame
        preferred={name: max(1, 4 * READ_BYTES // size) for name, size in frames.items()},
        usual=usual | observation_vectors(kinds, "observation.", path, names),
        info=replace(info, files=files, videos=reader.kept),
    )


class _Folder:
    """Reads rows of columns, of each column one file at a time."""

    def __init__(self, path: Path, *, keeps_videos: bool, resize: Size) -> None:
        self.path, self._keeps_videos, self._resize = path, keeps_videos, resize
        self.videos: dict[str, list[InputFile]] = {}  # of each camera
        self.kept: dict[str, KeptVideo] = {}
        self.notes: list[str] = []
        self._columns: dict[str, Column] = {}
        self._sizes: dict[str, tuple[int, ...]] = {}  # of the first frame of a column
        self.info = read_json(path / INFO)
        with reading_errors("info.json", path / INFO):
            self.version = int(self.info["codebase_version"].removeprefix("v").split(".")[0])
            self.chunk = int(self.info.get("chunks_size", 1000))
            self.features = dict[str, Mapping[str, Any]](self.info["features"])
            self.dtypes = {n: str(feature["dtype"]) for n, feature in self.features.items()}
            counts = int(self.info["total_frames"]), int(self.info["total_episodes"])
        if self.version not in PATHS:
            problem = f"a dataset of LeRobot's format {self.info['codebase_version']}"
            raise misfit(problem, path, "v2 and v3 are read: convert it with LeRobot")
        pattern = self._place("data_path", None)
        paths = sorted(path.glob(pattern), key=lambda file: by_number(file.relative_to(path)))
        files = [file for file in map(ParquetFile, paths) if file.rows]
        if not files:
            raise misfit(f"no steps are here, info.json says {counts[0]:,}", path)
        self.files, self.table = [file.file for file in files], Shards(files)
        steps = self.table.rows
        firsts, numbers = runs(self._blocks("episode_index"))
        self.episodes: list[int] = numbers.tolist()
        self.bounds: list[int] = [*firsts.tolist(), steps]
        episodes = len(set(self.episodes))
        if counts != (steps, episodes):
            extent = f"{count_text(steps, 'step')} of {count_text(episodes, 'episode')}"
            extent += f" are here, info.json says {counts[0]:,} of {counts[1]:,}"
            listed, lengths = self._listed_lengths(), np.diff(self.bounds).tolist()
            is_listed = (sum(listed.values()), len(listed)) == counts
            if not is_listed or [listed.get(n) for n in self.episodes] != lengths:
                raise misfit(extent, path)
            self.notes.append(f"{extent}: a part, whose episodes are whole")
        column_names = self.table.schema.names
        rows, frames = runs(self._blocks("frame_index") if "frame_index" in column_names else ())
        falls = np.setdiff1d(rows[1:][frames[1:] < frames[:-1]], firsts)  # inside episodes
        if episodes < len(self.episodes) or falls.size:
            raise misfit("the steps of an episode do not follow each other", path)

    def _listed_lengths(self) -> dict[int, int]:
        """Return the steps of each episode that the folder's own list has."""
        plain, names = self.path / "meta" / "episodes.jsonl", ("episode_index", "length")
        rows = read_json_lines(plain, names) if plain.is_file() else []
        return dict(chain(rows, self._listed(*names)))

    def _listed(self, *names: str) -> Iterator[tuple[Any, ...]]:
        """Yield columns of the list of episodes of version 3, row by row."""
        for file in (self.path / "meta" / "episodes").glob("*/*.parquet"):
            yield from _rows(ParquetFile(file), names)

    def _blocks(self, name: str) -> Iterator[tuple[int, Array]]:
        """Yield a column of one number a step in blocks, with their first steps of all."""
        for row, values in self.table.batches(name):
            yield row, step_rows(values, name, self.path)

    def _place(self, of: str, values: Mapping[str, int | str] | None) -> str:
        """Return a path below the dataset by a template of info.json; a pattern without values."""
        template = self.info.get(of) or PATHS[self.version][of == "video_path"]

        def fill_field(field: re.Match[str]) -> str:
            return "*" if values is None else str(values[field[1]]).zfill(int(field[2] or 0))

        with reading_errors("info.json", self.path / INFO):
            text = FIELD.sub(fill_field, glob.escape(template) if values is None else template)
        if Path(text).is_absolute() or ".." in Path(text).parts or "{" in text:
            problem, remedy = f"{of} of {text[:200]!r} is not accepted", "name files of the dataset"
            raise InputError("SOURCE_UNSAFE", problem, str(self.path / INFO), remedy)
        return text

    def codes(self, columns: Iterable[str]) -> dict[str, dict[str, str]]:
        """Return the names of the numbers of ``task_index``, and of columns like it."""
        codes = dict[str, dict[str, str]]()
        for column in (name for name in columns if name.endswith("task_index")):
            text = column.removesuffix("_index")
            plain, pairs = self.path / "meta" / f"{text}s.jsonl", list[tuple[Any, ...]]()
            if (table := plain.with_suffix(".parquet")).is_file():
                file = ParquetFile(table)
                name = next(n for n in (*file.schema.names, "") if n != column)
                pairs += _rows(file, (column, name))
            elif plain.is_file():
                pairs += read_json_lines(plain, (column, text))
            codes |= {column: {str(number): str(text) for number, text in pairs}} if pairs else {}
        return codes

    def columns(self, origins: set[str]) -> tuple[dict[str, Read], dict[str, str]]:
        """Return a function for each column; leave out frames that nobody asked for."""
        reads, left_out = dict[str, Read](), dict[str, str]()
        types = {field.name: field.type for field in self.table.schema}
        cameras = [n for n, dtype in self.dtypes.items() if dtype in ("image", "video")]
        states = [n for n in types if n.startswith("observation.") and n not in cameras]
        together = ",".join([*cameras, *states, "actions"])
        for name in [*types, *(n for n, dtype in self.dtypes.items() if dtype == "video")]:
            dtype = self.dtypes.get(name)
            is_kept = self._keeps_videos and dtype == "video"
            if dtype in ("image", "video") and name not in origins and not is_kept:
                where = ", --video keep leaves them in the videos" * (dtype == "video")
                left_out[name] = f"frames: --columns {together} decodes them{where}"
            elif dtype == "video" and "timestamp" not in types:
                raise misfit(f"no timestamp, which tells the frames of {name}", self.path)
            elif dtype == "video":
                places = self._find_videos(name)
                reads[name] = partial(self._video, name, places)
                if self._keeps_videos:
                    first = reads[name](0, 1)
                    files = tuple(self.videos[name])
                    resized = self._resize is not None
                    self.kept[name] = KeptVideo(first.dtype, first.shape[1:], files, resized)
                    reads[name] = partial(self._references, places, name)
            elif dtype == "image":
                reads[name] = partial(self._images, name)
            elif is_numeric(types[name]):
                reads[name] = self._column(name).rows
            else:
                left_out[name] = f"no numbers ({types[name]})"
        return reads, left_out

    def _column(self, name: str) -> Column:
        return self._columns.setdefault(name, Column(self.table, name))

    def _images(self, name: str, start: int, stop: int) -> Array:
        frames = list[Array]()
        for image in self._column(name).read(start, stop):
            stored = image.as_py() or {}
            if not stored.get("bytes"):
                problem = "an image is missing, or a file of its own"
                raise misfit(problem, f"{self.path}: {name}", "embed images in the parquet files")
            size = self._sizes.get(name)
            frames.append(image_pixels(stored["bytes"], self.path, size, self._resize))
            self._sizes.setdefault(name, frames[0].shape[:2])
        return self._frames(name, np.stack(frames))

    def _references(self, places: list[Place], name: str, start: int, stop: int) -> Array:
        """Return (n, 3) references of steps' frames."""
        times = self._column("timestamp").rows(start, stop).reshape(-1).astype(np.float64)
        number = bisect_right(self.bounds, start) - 1
        references = np.empty((stop - start, 3), np.int64)
        while self.bounds[number] < stop:
            file, begin = places[number]
            steps = slice(max(self.bounds[number] - start, 0), self.bounds[number + 1] - start)
            references[steps, 0] = file
            references[steps, 1:] = find_frames(self.videos[name][file], begin + times[steps])
            number += 1
        return references

    def _video(self, name: str, places: list[Place], start: int, stop: int) -> Array:
        references = self._references(places, name, start, stop)
        decoded = decode_frames(self.videos[name], references, self._sizes.get(name), self._resize)
        frames = [frame for _, frame in sorted(decoded, key=itemgetter(0))]
        self._sizes.setdefault(name, frames[0].shape[:2])
        return self._frames(name, np.stack(frames))

    def _frames(self, name: str, frames: Array) -> Array:
        """Return frames; refuse colours where info.json says that they are depths."""
        facts = self.features[name]
        facts = {**facts, **(facts.get("info") or {}), **(facts.get("video_info") or {})}
        is_depth = facts.get("is_depth_map") or facts.get("video.is_depth_map")
        if is_depth and frames.shape[-1] != 1:
            problem, remedy = "depths that are stored as colours", "store them as grey of 16 bits"
            raise misfit(problem, f"{self.path}: {name}", remedy)
        return frames

    def _find_videos(self, name: str) -> list[Place]:
        """Find the video of each episode, and where in it the episode begins."""
        places: dict[int, tuple[str, float]] = {}
        fields: dict[str, Any] = {"video_key": name}
        if self.version == 2:
            for number in self.episodes:
                fields |= {"episode_index": number, "episode_chunk": number // self.chunk}
                places[number] = self._place("video_path", fields), 0.0
        else:
            keys = ("chunk_index", "file_index", "from_timestamp")
            names = ("episode_index", *(f"videos/{name}/{key}" for key in keys))
            for number, chunk, file, begin in self._listed(*names):
                fields |= {"chunk_index": chunk, "file_index": file}
                places[number] = self._place("video_path", fields), float(begin)
        if missing := set(self.episodes) - set(places):
            raise misfit(f"no video {name} of episode {min(missing)}", self.path / "meta")
        paths = [*dict.fromkeys(places[number][0] for number in self.episodes)]
        self.videos[name] = [InputFile.find(self.path / path) for path in paths]
        numbers = {path: number for number, path in enumerate(paths)}
        return [(numbers[path], begin) for path, begin in map(places.__getitem__, self.episodes)]


def _rows(file: ParquetFile, names: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    """Yield the values of columns of a file, row by row."""
    for batches in zip(*map(file.batches, names), strict=True):
        yield from zip(*(values.to_pylist() for _, values in batches), strict=True)
