"""Frames that stay in videos: the files, compared with their digests, and their frames.

Shape legend: N frames.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import numpy as np
import xxhash

from gear_offline.core.files import file_identity, open_regular
from gear_offline.core.types import Array, Int64Array
from gear_offline.data.dataset.manifest import Manifest, VideoRecord
from gear_offline.data.dataset.pictures import OpenVideos, decode_frames
from gear_offline.data.dataset.schema import ColumnSpec
from gear_offline.errors import InputError

PIECE_BYTES = 1 << 20  # digested at a time


class KeptFile:
    """A video, opened only with the content that it had when it was converted."""

    def __init__(self, folder: Path, record: VideoRecord) -> None:
        self.path, self._record = Path(os.path.normpath(folder / record.path)), record
        with self._open() as file:
            self._identity = file_identity(file.fileno())
            if self._identity[2] != record.bytes:
                problem = f"the video has {self._identity[2]:,} bytes, it had {record.bytes:,}"
                raise self._error(problem)

    def open(self) -> FileIO:
        """Open it; refuse another content (``DATASET_DAMAGED``)."""
        file = self._open()
        if file_identity(file.fileno()) != self._identity:
            file.close()
            self.compare()
        else:
            return file
        return self.open()

    def _open(self) -> FileIO:
        try:
            return FileIO(open_regular(self.path))
        except OSError as error:
            raise self._error(f"the video cannot be read: {error.strerror}") from error

    def compare(self, on_progress: Callable[[int], None] = lambda n: None) -> None:
        """Compare its content with its digest."""
        xxh3, buffer = xxhash.xxh3_128(), memoryview(bytearray(PIECE_BYTES))
        with self._open() as file:
            identity = file_identity(file.fileno())
            try:
                while count := file.readinto(buffer):
                    xxh3.update(buffer[:count])
                    on_progress(count)
            except OSError as error:
                raise self._error(f"the video cannot be read: {error.strerror}") from error
        if xxh3.hexdigest() != self._record.digest:
            raise self._error("the video does not match its digest")
        self._identity = identity

    def _error(self, problem: str) -> InputError:
        remedy = "its frames stay there: put it back as it was, or a link to it; else convert again"
        return InputError("DATASET_DAMAGED", problem, str(self.path), remedy)


@dataclass(frozen=True, eq=False)
class KeptFrames:
    """A column of frames that stay in videos."""

    spec: ColumnSpec
    files: tuple[KeptFile, ...]
    resized: bool  # to the shape, whatever the videos have

    def read(self, references: Int64Array) -> Array:
        """Return the frames of (N, 3) references, (N, *shape)."""
        frames = np.empty((len(references), *self.spec.shape), self.spec.dtype)
        self.decode(references, frames, np.arange(len(references)))
        return frames

    def decode(
        self,
        references: Int64Array,
        frames: Array,
        rows: Int64Array,
        videos: OpenVideos | None = None,
    ) -> None:
        """Decode the frames of (N, 3) references into `rows`, (N,), of `frames`, (any, *shape)."""
        shape, dtype, numbers = self.spec.shape, self.spec.dtype, references[:, 0]
        if numbers.size and not 0 <= numbers.min() <= numbers.max() < len(self.files):
            problem, remedy = "a step refers to no video", "compare the digests, convert again"
            raise InputError("DATASET_DAMAGED", problem, f"column {self.spec.name}", remedy)
        resize = shape[:2] if self.resized else None
        pictures = decode_frames(self.files, references, resize=resize, videos=videos)
        for place, picture in pictures:
            if (picture.shape, picture.dtype) != (shape, dtype):
                problem = f"a frame is {picture.dtype} {picture.shape}, others {dtype} {shape}"
                path = str(self.files[numbers[place]].path)
                raise InputError("DATASET_DAMAGED", problem, path, "convert again")
            frames[rows[place]] = picture


def open_videos(folder: Path, manifest: Manifest) -> dict[str, KeptFrames]:
    """Find the videos of a dataset; refuse one that is missing or has another size."""
    base, files = Path(os.path.realpath(folder)), dict[str, KeptFile]()
    columns = dict[str, KeptFrames]()
    for name, kept in manifest.videos.items():
        for record in kept.files:
            if record.path not in files:
                files[record.path] = KeptFile(base, record)
        own = tuple(files[record.path] for record in kept.files)
        columns[name] = KeptFrames(manifest.spec[name], own, kept.resized)
    return columns


def video_files(columns: Mapping[str, KeptFrames]) -> Iterable[KeptFile]:
    """Return the files of columns, each once."""
    return dict.fromkeys(file for column in columns.values() for file in column.files)


def video_path(path: Path, folder: Path) -> str:
    """Return a video's path from a dataset's folder; absolute where they share only the root."""
    video, base = (Path(os.path.realpath(p.parent), p.name) for p in (path, folder))
    is_near = os.path.commonpath([video, base]) != os.sep
    return os.path.relpath(video, base) if is_near else str(video)
