"""Frames of three cameras drawn from LeRobot's videos: our shards, `--video keep`, LeRobot itself.

All read the steps of one recorded list: those that our loader draws, 64 a batch.  LeRobotDataset is
read by torch's DataLoader with as many workers as there are cores, and in the process itself.  Each
of its figures is of its own backend (torchcodec, or PyAV where that is missing).
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from benchmarks.common import timed
from gear_offline.core.system import usable_cores
from gear_offline.core.text import say
from gear_offline.data.convert.conversion import convert
from gear_offline.data.dataset.dataset import open_dataset
from gear_offline.errors import package_needed
from gear_offline.loaders.loader import GearLoader

CAMERAS = [f"observation.images.{name}" for name in ("top", "left", "right")]
SIDE, FPS, BATCH = 224, 30, 64
# as LeRobot writes them; and with long groups of pictures, as cameras and editors do
CODECS = {"av1, groups of 2": ("libsvtav1", 2), "h264, groups of 250": ("libx264", 250)}
INSTALL = "pip install --no-deps lerobot==0.4.4 'torchcodec>=0.11' datasets; then what it asks for"


def run(*, quick: bool = False) -> dict[str, Any]:
    """Measure; about ten minutes, 6 GB of disk."""
    lengths, rows = np.full(4 if quick else 60, 40 if quick else 100), []
    batches = 8 if quick else 100
    for name, (codec, group) in CODECS.items():
        with tempfile.TemporaryDirectory(prefix="gear-benchmark-") as text:
            folder = Path(text)
            write_lerobot(folder / "set", lengths, codec=codec, group=group)
            for row in measure(folder, int(lengths.sum()), batches):
                rows.append({"videos": name, **row})
    return {"steps": int(lengths.sum()), "batch": BATCH, "cores": usable_cores(), "results": rows}


def measure(folder: Path, steps: int, batches: int) -> Iterable[dict[str, Any]]:
    """Yield the rows of one dataset."""
    options: Any = {"context_length": 1, "device": "cpu", "observations": CAMERAS}
    columns = [*CAMERAS, "observation.state", "actions"]
    for video in ("decode", "keep"):
        path = folder / video
        made: Any = {"columns": columns, "video": video, "quiet": True}
        convert_seconds = timed(partial(convert, folder / "set", path, **made))
        dataset = open_dataset(path)
        quarter = steps * len(CAMERAS) * SIDE * SIDE * 3 // 4  # of the frames
        kept: Any = {"host_budget": max(quarter, 512 << 20)} if dataset.videos else {}
        with GearLoader(dataset, BATCH, **options, **kept) as loader:
            segments = [loader.segments_at(step) for step in range(batches)]
            seconds = _seconds(iter(loader), batches)
        name = {"decode": "shards, decoded when converted", "keep": "shards, --video keep"}[video]
        nbytes = dataset.manifest.total_bytes + dataset.manifest.video_bytes
        yield _row(name, seconds, batches) | {"convert_s": convert_seconds, "bytes": nbytes}
    firsts = dataset.episodes.offsets
    recorded = [(firsts[each.episodes] + each.starts).tolist() for each in segments]
    try:
        with package_needed(f"LeRobot is not beside us: {INSTALL}", "lerobot"):
            from lerobot.datasets.lerobot_dataset import LeRobotDataset
    except RuntimeError as error:
        say(str(error))
        return
    peer = LeRobotDataset("none/made", root=folder / "set")
    for workers in (usable_cores(), 0):
        loaded = DataLoader(peer, batch_sampler=recorded, num_workers=workers)
        seconds = _seconds(iter(loaded), batches)
        name = f"LeRobotDataset, {peer.video_backend}, {workers} workers"
        yield _row(name, seconds, batches)


def _seconds(batches: Any, count: int) -> float:
    """Return the seconds of `count` batches, the making of workers and memory left out."""
    next(batches)
    began = time.perf_counter()
    for _ in range(count - 1):
        next(batches)
    return time.perf_counter() - began


def _row(name: str, seconds: float, batches: int) -> dict[str, Any]:
    return {"reader": name, "frames/s": (batches - 1) * BATCH * len(CAMERAS) / seconds}


def write_lerobot(
    root: Path,
    lengths: Any,
    *,
    cameras: Iterable[str] = tuple(CAMERAS),
    side: int = SIDE,
    codec: str = "libsvtav1",
    group: int = 2,
) -> None:
    """Write a dataset of LeRobot's format 3: (E,) lengths, a video of all episodes a camera."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    steps, episodes, rng = int(np.sum(lengths)), len(lengths), np.random.default_rng(0)
    firsts, numbers = np.cumsum([0, *lengths]), np.repeat(np.arange(episodes), lengths)
    within = np.arange(steps) - firsts[numbers]

    def write(place: str, columns: dict[str, Any]) -> None:
        (root / place).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(columns), root / place)

    def vectors(width: int) -> Any:
        values = pa.array(rng.random(steps * width, np.float32))
        return pa.FixedSizeListArray.from_arrays(values, width)

    rows = {"observation.state": vectors(6), "action": vectors(6)}
    rows |= {"timestamp": (within / FPS).astype(np.float32), "frame_index": within}
    rows |= {"episode_index": numbers, "index": np.arange(steps), "task_index": 0 * within}
    write("data/chunk-000/file-000.parquet", rows)
    write("meta/tasks.parquet", {"task_index": [0], "__index_level_0__": ["move"]})
    zeros = np.zeros(episodes, np.int64)
    listed = {"episode_index": zeros.cumsum() + np.arange(episodes), "tasks": [["move"]] * episodes}
    listed |= {"length": np.asarray(lengths), "dataset_from_index": firsts[:-1]}
    listed |= {"dataset_to_index": firsts[1:]}
    places = ["data", "meta/episodes", *(f"videos/{camera}" for camera in cameras)]
    listed |= {f"{place}/{n}_index": zeros for place in places for n in ("chunk", "file")}
    for camera in cameras:
        listed[f"videos/{camera}/from_timestamp"] = firsts[:-1] / FPS
        listed[f"videos/{camera}/to_timestamp"] = firsts[1:] / FPS
    write("meta/episodes/chunk-000/file-000.parquet", listed)
    kinds = {"observation.state": ("float32", 6), "action": ("float32", 6)}
    kinds |= {"timestamp": ("float32", 1)} | dict.fromkeys([*rows][3:], ("int64", 1))
    features: Any = {n: {"dtype": d, "shape": [w], "names": None} for n, (d, w) in kinds.items()}
    frame = {"dtype": "video", "shape": [side, side, 3], "names": ["height", "width", "channels"]}
    features |= dict.fromkeys(cameras, frame)
    info = {"codebase_version": "v3.0", "robot_type": "made", "fps": FPS, "chunks_size": 1000}
    info |= {"total_episodes": episodes, "total_frames": steps, "total_tasks": 1}
    info |= {"data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"}
    info |= {"video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"}
    info |= {"splits": {"train": f"0:{episodes}"}, "features": features}
    (root / "meta" / "info.json").write_text(json.dumps(info))
    (root / "meta" / "stats.json").write_text("{}")
    for number, camera in enumerate(cameras):
        path = root / f"videos/{camera}/chunk-000/file-000.mp4"
        path.parent.mkdir(parents=True)
        write_video(path, moving_frames(steps, side, number), codec, group)


def moving_frames(steps: int, side: int, seed: int) -> Iterator[Any]:
    """Yield frames of a textured picture that moves."""
    rng = np.random.default_rng(seed)
    picture = rng.integers(0, 255, (side // 8, side // 8, 3), np.uint8).repeat(8, 0).repeat(8, 1)
    for step in range(steps):
        yield np.roll(picture, (3 * step, 2 * step), (0, 1))


def write_video(path: Path, frames: Iterable[Any], codec: str, group: int) -> None:
    """Write frames with a key frame at least every `group`, as LeRobot does."""
    import av

    options = {"g": str(group), "crf": "30", "preset": "12" if codec == "libsvtav1" else "fast"}
    with av.open(path, "w") as out:
        stream: Any = out.add_stream(codec, rate=FPS, options=options)
        stream.pix_fmt = "yuv420p"
        for number, pixels in enumerate(frames):
            if not number:
                stream.height, stream.width = pixels.shape[:2]
            out.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        out.mux(stream.encode())
