"""Videos of evaluated episodes: the first of each asked return, as GIF or MP4.

An evaluation keeps the actions of these episodes.  Afterwards they are played again, from the same
seed, in an environment that draws; returns must be those that were counted.
"""

from __future__ import annotations

import io
import itertools
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gear_offline.artifacts.records import EvaluationReport, TargetResult, TaskResult
from gear_offline.config.recipe import Recipe
from gear_offline.core.files import check_new_file, write_file, writing
from gear_offline.core.progress import Progress
from gear_offline.core.text import told_apart
from gear_offline.errors import GearError, InputError, UnavailableError, package_needed
from gear_offline.evaluation.environments import (
    FRAME_SKIP,
    Environment,
    Options,
    is_atari,
    make_environment,
)
from gear_offline.evaluation.tasks import EvaluationTask, PlayOptions, choose_tasks

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = (".gif", ".mp4")
FRAMES_PER_SECOND = 30  # at most: MuJoCo's 125 steps a second are shown as 25 frames
GIF_WIDTH = 320  # pixels at most: GIF compresses little
CAPTION_HEIGHT = 24


def check_suffix(path: Path) -> None:
    """Refuse the name of a file that is no video (``USAGE``)."""
    if path.suffix.lower() not in SUFFIXES:
        problem = "a video is a .gif or .mp4 file"
        remedy = f"write it like {path.stem or 'video'}.gif"
        raise InputError("USAGE", problem, where=str(path), remedy=remedy)


def plan_tasks(recipe: Recipe, options: PlayOptions) -> list[EvaluationTask]:
    """Choose the tasks of a run to play; refuse to overwrite a video."""
    tasks = choose_tasks(recipe, options)
    if options.video is not None:
        check_files(options.video, tasks)
    return tasks


def check_files(path: Path, tasks: Sequence[EvaluationTask]) -> None:
    """Refuse the videos of tasks where one cannot be written."""
    for file in _paths(path, [task.name for task in tasks]):
        check_new_file(file)


def check_video(tasks: Sequence[EvaluationTask]) -> None:
    """Refuse early what could not be drawn; draws one frame of each environment."""
    with package_needed("a video", "video"):
        import imageio_ffmpeg  # noqa: F401
        import PIL  # noqa: F401
    if not os.environ.get("DISPLAY"):  # or pygame and MuJoCo look for one
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
        os.environ.setdefault("MUJOCO_GL", "egl")
    for task in tasks:
        name, options = task.environment, task.environment_options
        with make_environment(name, options) as plain:
            modes = plain.metadata.get("render_modes") or ()
        if "rgb_array" not in modes:
            problem = f"the environment cannot draw itself: its render modes are {modes}"
            remedy = "leave out --video, or give it the render mode rgb_array"
            raise InputError("ENVIRONMENT", problem, name, remedy)
        with _drawing(name, options) as environment:
            environment.reset(seed=0)
            _frame(environment)


def write_videos(path: Path, report: EvaluationReport, *, quiet: bool = True) -> tuple[Path, ...]:
    """Write the first episode of each asked return; of several tasks ``NAME-TASK.gif`` for each."""
    paths = _paths(path, list(report.named))
    for file, task in zip(paths, report.tasks, strict=True):
        with writing(file):
            content = _encode(task, file.suffix.lower(), quiet)
            check_new_file(file)
            write_file(file, content)
    return paths


def _paths(path: Path, tasks: Sequence[str]) -> tuple[Path, ...]:
    if len(tasks) <= 1:
        return (path,)
    return tuple(path.with_stem(f"{path.stem}-{task}") for task in tasks)


def _encode(result: TaskResult, suffix: str, quiet: bool) -> bytes:
    """Return the video of a task as the bytes of a file."""
    name = result.environment
    with _drawing(name, result.environment_options) as environment:
        rate = float(environment.metadata.get("render_fps") or FRAMES_PER_SECOND)
        if is_atari(name):
            rate /= FRAME_SKIP
        every = max(1, int(np.ceil(rate / FRAMES_PER_SECOND)))
        total = sum(target.lengths[0] // every + 1 for target in result.targets)

        def images() -> Iterator[Image]:
            for target in result.targets:
                for frame, text in _replay(environment, result, target, every):
                    image = _add_caption(frame, text)
                    if suffix == ".gif" and image.width > GIF_WIDTH:
                        height = round(image.height * GIF_WIDTH / image.width)
                        image = image.resize((GIF_WIDTH, height))
                    # even sizes, as H.264 wants
                    yield image.crop((0, 0, image.width // 2 * 2, image.height // 2 * 2))
                    progress.advance()

        with Progress(f"draw {name}", total=total, unit="frames", quiet=quiet) as progress:
            encode = _gif if suffix == ".gif" else _mp4
            return encode(images(), total, rate / every)


def _gif(images: Iterator[Image], total: int, rate: float) -> bytes:
    """Encode images as a GIF that is repeated; it counts time in hundredths of a second."""
    ends = [round(100 * number / rate) for number in range(total + 1)]
    durations = [10 * (end - begin) for begin, end in itertools.pairwise(ends)]
    file, first = io.BytesIO(), next(images)
    first.save(file, "GIF", save_all=True, append_images=images, duration=durations, loop=0)
    return file.getvalue()


def _mp4(images: Iterator[Image], total: int, rate: float) -> bytes:
    """Encode images as an MP4."""
    import imageio_ffmpeg

    with tempfile.TemporaryDirectory() as folder:
        path, first = Path(folder, "video.mp4"), next(images)
        writer = imageio_ffmpeg.write_frames(path, first.size, fps=rate, macro_block_size=2)
        writer.send(None)
        for image in itertools.chain([first], images):
            writer.send(image.tobytes())
        writer.close()
        return path.read_bytes()


def _replay(
    environment: Environment, task: TaskResult, target: TargetResult, every: int
) -> Iterator[tuple[npt.NDArray[np.uint8], str]]:
    """Play a target's first episode again; give a frame and its caption every `every` steps."""
    total, options = 0.0, {"task_id": int(target.target)} if task.goals else None
    (label,) = told_apart([target.target])
    environment.reset(seed=task.seed, options=options)
    for step in range(len(target.actions) + 1):
        if step % every == 0:
            text = f"asked {label}   achieved {total:,.1f}"
            if task.condition == "nothing":
                text = f"achieved {total:,.1f}"
            elif task.goals:
                text = f"task {label}   step {step:,}"
            yield _frame(environment), text
        if step < len(target.actions):
            _, reward, _, _, info = environment.step(target.actions[step])
            total = environment.goal_fact(info, "success") if task.goals else total + reward
    if total != target.returns[0]:
        problem = f"the same seed and actions gave {total:,.6g} and not {target.returns[0]:,.6g}"
        remedy = "an environment that does not repeat itself cannot be shown: seed its random "
        remedy += "numbers in reset"
        raise InputError("ENVIRONMENT", problem, task.environment, remedy)


def _add_caption(frame: npt.NDArray[np.uint8], text: str) -> Image:
    from PIL import Image, ImageDraw, ImageFont

    height, width = frame.shape[:2]
    image = Image.new("RGB", (width, height + CAPTION_HEIGHT))
    image.paste(Image.fromarray(frame), (0, CAPTION_HEIGHT))
    font = ImageFont.load_default(max(8, min(16, width // 14)))  # 28 letters half as wide
    ImageDraw.Draw(image).text((4, 2), text, font=font)
    return image


def _drawing(environment_id: str, options: Options) -> Environment:
    """Make an environment that draws itself into arrays."""
    environment = make_environment(environment_id, {**options, "render_mode": "rgb_array"})
    if renderer := getattr(environment.raw.unwrapped, "mujoco_renderer", None):
        import mujoco

        camera = mujoco.mj_name2id(renderer.model, mujoco.mjtObj.mjOBJ_CAMERA, "track")
        renderer.camera_id = max(camera, renderer.camera_id)  # Gymnasium 1.4 lets bodies walk off
    return environment


def _frame(environment: Environment) -> npt.NDArray[np.uint8]:
    """Render a frame of an environment, (h, w, 3)."""
    try:
        frame = np.asarray(environment.call("render"))
        if frame.ndim != 3 or frame.shape[2] != 3 or frame.dtype != np.uint8:
            raise environment.misfit("a picture", frame, "uint8 of shape (height, width, 3)")
        return frame
    except GearError as error:  # pygame, OpenGL and each simulator raise what they like
        problem = f"the environment does not draw itself: {error.problem}"
        remedy = "pip install 'gear-offline[video]' for CartPole and its like; MuJoCo needs EGL "
        remedy += "(apt-get install libegl1), or MUJOCO_GL=osmesa and libosmesa6"
        raise UnavailableError("ENVIRONMENT", problem, error.where, remedy) from error
