"""Frames of videos and image files, decoded by PyAV with their own type and numbers.

A frame of a video has a reference: the number of its file in a list, the stamp from which its group
of pictures is decoded, and its own stamp, in units of the file's clock.  With that it is found
again without a search.

Shape legend: N frames, h x w pixels, C colours.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from io import BytesIO, FileIO
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from gear_offline.core.files import FileIdentity, file_identity
from gear_offline.core.types import Array, Float64Array, Int64Array
from gear_offline.errors import InputError, package_needed, reading_errors

TOLERANCE = 1e-4  # seconds between a row and its frame, as LeRobot's decoder has it
MAX_PIXELS = 1 << 26
MOST_OPEN = 4  # videos of a thread; each has the memory of a decoder
Size = tuple[int, ...] | None  # height and width
# formats of FFmpeg whose arrays are the numbers that they store
EXACT = ("gray", "rgb48", "gbrp", "rgba", "bgra")
GET_AGAIN = "the video is another's, or cut short: get it and its rows again"


class VideoFile(Protocol):
    """A file that is opened only as it was first."""

    @property
    def path(self) -> Path: ...

    def open(self) -> FileIO:
        """Open it for reading; refuse another one."""

    def __hash__(self) -> int: ...


@lru_cache(maxsize=256)
def _read_stamps(file: VideoFile) -> tuple[Int64Array, Int64Array, Float64Array]:
    """Return rising stamps of a video's frames, of their groups, and times in s; decode nothing."""
    with file.open() as raw, _open_frames(f"/dev/fd/{raw.fileno()}", file.path) as video:
        stream = video.streams.video[0]
        packets = [packet for packet in video.demux(stream) if packet.size]
        base = stream.time_base
    stamps = [packet.pts for packet in packets if not packet.is_discard]
    keys = sorted(
        (packet.pts, packet.pts if packet.dts is None else min(packet.dts, packet.pts))
        for packet in packets
        if packet.is_keyframe and packet.pts is not None
    )
    if None in stamps or not keys:
        raise _misfit("frames without times, or none", file.path)
    rising: Int64Array = np.unique(np.array(stamps, np.int64))
    firsts, starts = np.array(keys, np.int64).T
    groups = starts[np.maximum(firsts.searchsorted(rising, side="right") - 1, 0)]
    return rising, groups, rising * base.numerator / base.denominator


def find_frames(file: VideoFile, times: Float64Array) -> Int64Array:
    """Return (N, 2) group and stamp of the frames of a video that are nearest to times in seconds.

    One further away than `TOLERANCE` is refused (``SOURCE_LAYOUT``).
    """
    stamps, groups, seconds = _read_stamps(file)
    nearest = ((seconds[1:] + seconds[:-1]) / 2).searchsorted(times)
    distances = np.abs(seconds[nearest] - times)
    if distances.max() > TOLERANCE:
        at = int(np.argmax(distances))
        problem = f"no frame at {times[at]:.4f} s: the nearest is {distances[at]:.4f} s away"
        raise _misfit(problem, file.path)
    return np.stack([groups[nearest], stamps[nearest]], axis=1)


class _Opened(NamedTuple):
    """An open video."""

    stack: ExitStack  # closes it
    raw: FileIO
    identity: FileIdentity
    video: Any
    rgb: Callable[[Any], Array]


def _open_video(file: VideoFile) -> _Opened:
    with ExitStack() as stack:
        raw = stack.enter_context(file.open())
        video = stack.enter_context(_open_frames(f"/dev/fd/{raw.fileno()}", file.path))
        identity = file_identity(raw.fileno())
        return _Opened(stack.pop_all(), raw, identity, video, _rgb_converter())


class OpenVideos:
    """Videos that one thread reads, the last few of which stay open with their decoders.

    To open a video and to make its decoder costs more than a frame.
    """

    def __init__(self) -> None:
        self._open = OrderedDict[VideoFile, _Opened]()

    @contextmanager
    def use(self, file: VideoFile) -> Iterator[tuple[Any, Callable[[Any], Array]]]:
        """Give an open video, and what makes its frames RGB; open it anew if the file changed."""
        opened = self._open.pop(file, None)
        if opened is not None and file_identity(opened.raw.fileno()) != opened.identity:
            opened.stack.close()
            opened = None
        opened = opened or _open_video(file)
        try:
            with reading_errors("video or image", file.path):
                yield opened.video, opened.rgb
        except BaseException:
            opened.stack.close()
            raise
        self._open[file] = opened
        while len(self._open) > MOST_OPEN:
            self._open.popitem(last=False)[1].stack.close()

    def close(self) -> None:
        """Close them; others can be opened."""
        while self._open:
            self._open.popitem()[1].stack.close()

    def __del__(self) -> None:
        self.close()


def decode_frames(
    files: Sequence[VideoFile],
    references: Int64Array,
    size: Size = None,
    resize: Size = None,
    videos: OpenVideos | None = None,
) -> Iterator[tuple[int, Array]]:
    """Yield the place of each of (N, 3) references, and its pixels (h, w, C), in any order.

    Each file is opened once, each group of pictures decoded once, a frame converted once.  All
    are of the `size`, or made so large as `resize` says.  The `videos` that are open stay so.
    """
    videos = OpenVideos() if videos is None else videos
    order = np.lexsort(references.T[::-1])
    cuts = np.flatnonzero(np.diff(references[order, 0])) + 1
    for places in np.split(order, cuts) if len(order) else ():
        file, wanted = files[references[places[0], 0]], references[places, 1:]
        with videos.use(file) as (video, rgb):
            pictures = _decode(video, wanted.tolist(), file.path)
            picture, last = np.empty(0), None
            for place, frame in zip(places.tolist(), pictures, strict=True):
                if frame is not last:
                    picture, last = pixels(frame, file.path, size, resize, rgb), frame
                    size = picture.shape[:2]
                yield place, picture


def _decode(video: Any, wanted: Sequence[Sequence[int]], path: Path) -> Iterator[Any]:
    """Yield the frame of each group and stamp, which rise, of an open video."""
    stream = video.streams.video[0]
    for group, pairs in groupby(wanted, itemgetter(0)):
        stamps = [stamp for _, stamp in pairs][::-1]
        for start in (group, 0):  # from its key frame, or else from the beginning
            for frame in _decode_until(video, stream, start, {*stamps}):
                while stamps and frame.pts == stamps[-1]:
                    yield frame
                    stamps.pop()
            if not stamps:
                break
        else:
            time = float(stamps[-1] * stream.time_base)
            raise _misfit(f"the frame at {time:.4f} s is damaged or missing", path)


def _decode_until(video: Any, stream: Any, start: int, stamps: set[int]) -> Iterator[Any]:
    """Decode from a stamp on, until the packets of all `stamps` are decoded."""
    video.seek(start, stream=stream)
    last, keys = max(stamps), 0
    for packet in video.demux(stream):
        yield from packet.decode()
        stamps.discard(packet.pts)
        # pictures before a key frame may be stored behind it, but not behind the next one
        keys += packet.is_keyframe and packet.pts is not None and packet.pts > last
        if packet.size and (not stamps or keys > 1):
            yield from stream.codec_context.decode(None)  # those that it holds back
            return


def image_pixels(content: bytes, path: Path, size: Size = None, resize: Size = None) -> Array:
    """Return the pixels of a PNG, JPEG, TIFF or other image, (h, w, C)."""
    with _open_frames(BytesIO(content), path) as image:
        return pixels(next(image.decode(video=0)), path, size, resize)


def _rgb_converter() -> Callable[[Any], Array]:
    """Return a function of frames that prepares FFmpeg's conversion to RGB once for all."""
    from av.video.reformatter import VideoReformatter

    reformatter = VideoReformatter()
    return lambda frame: reformatter.reformat(frame, format="rgb24").to_ndarray()


def pixels(
    frame: Any,
    path: Path,
    size: Size = None,
    resize: Size = None,
    rgb: Callable[[Any], Array] | None = None,
) -> Array:
    """Return (h, w, C) of a decoded frame: uint8, or uint16 where it has more than 8 bits.

    Colours of 8 bits become RGB; what an array would hold in other numbers is refused, and a frame
    that is not of the `size` of those before.  To `resize` are colours and grey of 8 bits.
    """
    if size and not resize and (frame.height, frame.width) != size:
        problem = f"a frame of {frame.width} x {frame.height} behind others"
        raise _misfit(f"{problem} of {size[1]} x {size[0]}", path, "give all frames one size")
    pixel_format = frame.format
    alpha = any(component.is_alpha for component in pixel_format.components)
    eight = all(component.bits == 8 for component in pixel_format.components)
    if len(pixel_format.components) >= 3 and eight and not alpha and not pixel_format.has_palette:
        rows: Array = rgb(frame) if rgb else frame.to_ndarray(format="rgb24")
        rows = _resized(rows, resize) if resize else rows
    elif pixel_format.name == "gray" and resize:
        rows = _resized(frame.to_ndarray(), resize)
    elif resize:
        problem = f"pixels of {pixel_format.name} are not resized"
        raise _misfit(problem, path, "convert them as they are")
    elif pixel_format.name == "bgra":
        rows = frame.to_ndarray(format="rgba")
    elif pixel_format.name.startswith(EXACT) and pixel_format.name != "gbrap":
        rows = frame.to_ndarray()
    else:
        problem = f"pixels of {pixel_format.name} are not read, as their numbers would change"
        raise _misfit(problem, path, "store grey of 8 or 16 bits, RGB or RGBA")
    return rows if rows.ndim == 3 else rows[..., None]


def _resized(rows: Array, size: tuple[int, ...]) -> Array:
    """Return an image of another size, of which each pixel is the mean of those under it."""
    from PIL import Image

    height, width = size
    return np.array(Image.fromarray(rows).resize((width, height), Image.Resampling.BOX))


@contextmanager
def _open_frames(file: Any, path: Path) -> Iterator[Any]:
    with package_needed("frames are decoded by PyAV", "lerobot"):
        import av
    with reading_errors("video or image", path), av.open(file) as opened:
        stream = opened.streams.video[0]
        if stream.width * stream.height > MAX_PIXELS:
            problem = f"a picture of {stream.width} x {stream.height} pixels"
            remedy = f"at most {MAX_PIXELS:,} are read"
            raise InputError("SOURCE_UNSAFE", problem, str(path), remedy)
        stream.codec_context.thread_count = 1  # others decode other files
        yield opened


def _misfit(problem: str, path: Path, remedy: str = GET_AGAIN) -> InputError:
    return InputError("SOURCE_LAYOUT", problem, str(path), remedy)
