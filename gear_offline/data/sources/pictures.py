"""Frames of videos and image files, decoded by PyAV with their own type and numbers.

Shape legend: N frames, h x w pixels, C colours.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from gear_offline.core.types import Array, Float64Array
from gear_offline.data.sources.input_files import InputFile, misfit, reading_errors
from gear_offline.errors import InputError, package_needed

TOLERANCE = 1e-4  # seconds between a row and its frame, as LeRobot's decoder has it
MAX_PIXELS = 1 << 26
Size = tuple[int, ...] | None  # height and width
# formats of FFmpeg whose arrays are the numbers that they store
EXACT = ("gray", "rgb48", "gbrp", "rgba", "bgra")


def video_frames(file: InputFile, times: Float64Array, size: Size = None) -> Array:
    """Return the frames of a video that are nearest to `times` in seconds, (N, h, w, C).

    They are of one `size`, (h, w), if that is given.  One further away than `TOLERANCE` is refused
    (``SOURCE_LAYOUT``).
    """
    order = np.argsort(times, kind="stable")
    sorted_times = times[order]
    distances = np.full(sorted_times.size, np.inf)
    for start in (sorted_times[0], 0.0):  # a key frame before it, or else the beginning
        frames = list[Array]()
        with file.open() as raw, _open_frames(raw, file.path) as video:
            stream = video.streams.video[0]
            video.seek(int(start / stream.time_base), stream=stream)
            # each frame with the next one, behind which nothing is nearer to times before it
            for frame, after in pairwise(chain(video.decode(stream), [None])):
                middle = np.inf if after is None else (frame.time + after.time) / 2
                count = int(np.searchsorted(sorted_times, middle, side="right")) - len(frames)
                span = slice(len(frames), len(frames) + max(count, 0))
                distances[span] = np.abs(sorted_times[span] - frame.time)
                if count > 0:
                    frames += [pixels(frame, file.path, size)] * count
                    size = frames[0].shape[:2]
                if len(frames) == sorted_times.size:
                    break
        if distances.max() <= TOLERANCE:
            return np.stack(frames)[np.argsort(order, kind="stable")]
    at = int(np.argmax(distances))
    problem = f"no frame at {sorted_times[at]:.4f} s: the nearest is {distances[at]:.4f} s away"
    raise misfit(problem, file.path, "the video is another's, or cut short: get both again")


def image_pixels(content: bytes, path: Path, size: Size = None) -> Array:
    """Return the pixels of a PNG, JPEG, TIFF or other image, (h, w, C)."""
    with _open_frames(BytesIO(content), path) as image:
        return pixels(next(image.decode(video=0)), path, size)


def pixels(frame: Any, path: Path, size: Size = None) -> Array:
    """Return (h, w, C) of a decoded frame: uint8, or uint16 where it has more than 8 bits.

    Colours of 8 bits become RGB; what an array would hold in other numbers is refused, and a frame
    that is not of the `size` of those before.
    """
    if size and (frame.height, frame.width) != size:
        problem = f"a frame of {frame.width} x {frame.height} behind others"
        raise misfit(f"{problem} of {size[1]} x {size[0]}", path, "give all frames one size")
    pixel_format = frame.format
    alpha = any(component.is_alpha for component in pixel_format.components)
    eight = all(component.bits == 8 for component in pixel_format.components)
    if len(pixel_format.components) >= 3 and eight and not alpha and not pixel_format.has_palette:
        rows: Array = frame.to_ndarray(format="rgb24")
    elif pixel_format.name == "bgra":
        rows = frame.to_ndarray(format="rgba")
    elif pixel_format.name.startswith(EXACT) and pixel_format.name != "gbrap":
        rows = frame.to_ndarray()
    else:
        problem = f"pixels of {pixel_format.name} are not read, as their numbers would change"
        raise misfit(problem, path, "store grey of 8 or 16 bits, RGB or RGBA")
    return rows if rows.ndim == 3 else rows[..., None]


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
        yield opened
