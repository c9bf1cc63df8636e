"""Frames of videos and image files, decoded by PyAV with their own type and numbers.

Shape legend: N frames, h x w pixels, C colours.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from gear_offline.core.types import Array, Float64Array
from gear_offline.errors import InputError, package_needed
from gear_offline.sources.base import InputFile, damage_told, misfit

TOLERANCE = 1e-4  # seconds between a row and its frame, as LeRobot's decoder has it
MAX_PIXELS = 1 << 26
# formats of FFmpeg whose arrays are the numbers that they store
EXACT = ("gray", "rgb48", "gbrp", "rgba", "bgra")


def video_frames(file: InputFile, times: Float64Array) -> Array:
    """Return the frames of a video that are nearest to `times` in seconds, (N, h, w, C).

    Raises
    ------
    InputError
        ``SOURCE_LAYOUT`` where the nearest is further away than `TOLERANCE`.
    """
    order = np.argsort(times, kind="stable")
    wanted = times[order].tolist()
    for place in (wanted[0], 0.0):  # a key frame before it, or else the beginning
        found: list[tuple[float, Any]] = []  # distance and frame, in the order of time
        before: Any = None
        with file.open() as raw, _opened(raw, file.path) as video:
            stream = video.streams.video[0]
            video.seek(int(place / stream.time_base), stream=stream)
            for frame in video.decode(stream):
                while len(found) < len(wanted) and wanted[len(found)] <= frame.time:
                    time = wanted[len(found)]
                    near = (
                        frame if before is None or 2 * time > before.time + frame.time else before
                    )
                    found.append((abs(near.time - time), pixels(near, file.path)))
                if len(found) == len(wanted):
                    break
                before = frame
            if before is not None:
                last = [(time - before.time) for time in wanted[len(found) :]]
                found += [(distance, pixels(before, file.path)) for distance in last]
        if found and max(distance for distance, _ in found) <= TOLERANCE:
            frames = np.stack([frame for _, frame in found])
            return frames[np.argsort(order, kind="stable")]
    distances = [distance for distance, _ in found] or [np.inf]
    at = int(np.argmax(distances))
    what = f"no frame at {wanted[at]:.4f} s: the nearest is {distances[at]:.4f} s away"
    raise misfit(what, file.path, "the video is another's, or cut short: get both again")


def image_pixels(content: bytes, path: Path) -> Array:
    """Return the pixels of a PNG, JPEG, TIFF or other image, (h, w, C)."""
    with _opened(BytesIO(content), path) as image:
        return pixels(next(image.decode(video=0)), path)


def pixels(frame: Any, path: Path) -> Array:
    """Return (h, w, C) of a decoded frame: uint8, or uint16 where it has more than 8 bits.

    Colours of 8 bits become RGB; what an array would hold in other numbers is refused.
    """
    kind = frame.format
    alpha = any(part.is_alpha for part in kind.components)
    eight = all(part.bits == 8 for part in kind.components)
    if len(kind.components) >= 3 and eight and not alpha and not kind.has_palette:
        rows: Array = frame.to_ndarray(format="rgb24")
    elif kind.name == "bgra":
        rows = frame.to_ndarray(format="rgba")
    elif kind.name.startswith(EXACT) and kind.name != "gbrap":
        rows = frame.to_ndarray()
    else:
        what = f"pixels of the format {kind.name} are not read, as their numbers would change"
        remedy = "store grey of 8 or 16 bits, RGB or RGBA"
        raise InputError("SOURCE_LAYOUT", what, str(path), remedy)
    return rows if rows.ndim == 3 else rows[..., None]


@contextmanager
def _opened(file: Any, path: Path) -> Iterator[Any]:
    with package_needed("frames are decoded by PyAV", "lerobot"):
        import av
    with damage_told("video or image", path), av.open(file) as opened:
        stream = opened.streams.video[0]
        if stream.width * stream.height > MAX_PIXELS:
            what = f"a picture of {stream.width} x {stream.height} pixels"
            raise InputError("SOURCE_UNSAFE", what, str(path), f"at most {MAX_PIXELS:,} are read")
        yield opened
