"""Videos of evaluated episodes: which are shown, and what is refused before anything is played."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from gear_offline.artifacts.records import EvaluationReport
from gear_offline.errors import GearError
from gear_offline.evaluation import video
from gear_offline.evaluation.play import evaluate_tasks
from gear_offline.evaluation.tasks import EvaluationTask
from gear_offline.runs.evaluate import evaluate
from tests.checkpoint_support import write_run
from tests.evaluation_support import Constant, Counted
from tests.support import failing_code, one_error

imageio_ffmpeg = pytest.importorskip("imageio_ffmpeg")
Image, ImageSequence = pytest.importorskip("PIL.Image"), pytest.importorskip("PIL.ImageSequence")
pytest.importorskip("mujoco")  # without it gymnasium's module raises an error of its own
HopperEnv: Any = pytest.importorskip("gymnasium.envs.mujoco.hopper_v5").HopperEnv


class Drawn(Counted):
    """Shows its step as brightness, at 60 steps a second."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 60}  # noqa: RUF012
    resets = 0

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def render(self) -> Any:
        return np.full((40, 401, 3), 10 * self.at, np.uint8)


class Forgetful(Drawn):
    """Pays something else each time."""

    def step(self, action: Any) -> Any:
        Forgetful.resets += 1
        seen, _, ended, cut, facts = super().step(action)
        return seen, float(Forgetful.resets), ended, cut, facts


class FarHopper(HopperEnv):  # type: ignore[misc]
    """Begins where a camera that stays does not look."""

    def reset_model(self) -> Any:
        super().reset_model()
        self.set_state(self.data.qpos + np.eye(6)[0] * 9, self.data.qvel)
        return self._get_obs()


for made in (Drawn, Forgetful, FarHopper):
    entry: Any = made
    gymnasium.register(id=f"GearTest/{made.__name__}-v0", entry_point=entry)


def played(environment: str, **options: Any) -> EvaluationReport:
    task = EvaluationTask(environment=environment, **({"targets": (9.0, 8.0)} | options))
    policy = Constant(np.zeros(3))
    return evaluate_tasks(lambda _: policy, [task])


def frames_of(path: Path) -> Any:
    """Return the frames of a GIF."""
    with Image.open(path) as file:
        return np.stack([np.asarray(one.convert("RGB")) for one in ImageSequence.Iterator(file)])


def decoded(path: Path) -> Any:
    """Return the frames of an MP4 of 64 x 400."""
    tool = imageio_ffmpeg.get_ffmpeg_exe()
    command = [tool, "-v", "error", "-i", path, "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    content = subprocess.run(command, check=True, capture_output=True).stdout
    return np.frombuffer(content, np.uint8).reshape(-1, 64, 400, 3)


def duration(path: Path) -> float:
    """Return the seconds that a video lasts, as its reader says."""
    if path.suffix == ".gif":
        with Image.open(path) as file:
            lengths = [float(image.info["duration"]) for image in ImageSequence.Iterator(file)]
            return sum(lengths) / 1000
    frames, seconds = imageio_ffmpeg.count_frames_and_secs(path)
    assert frames == 8
    return float(seconds)


@pytest.mark.parametrize("name", ["a.gif", "a.MP4"])
def test_the_first_episode_of_each_target_is_shown(tmp_path: Path, name: str) -> None:
    report = played("GearTest/Drawn-v0", seed=5, episodes=3)  # of 6 steps first
    assert report.tasks[0].targets[0].lengths == (6, 7, 1)
    [path] = video.write_videos(tmp_path / name, report)
    frames = frames_of(path) if name == "a.gif" else decoded(path)
    seconds = duration(path)
    assert seconds == pytest.approx(8 / 30, abs=0.011), "a GIF counts hundredths of a second"
    shown = [int(frame[-5, 200].mean()) for frame in frames]
    # every second step, and anew for the second target
    np.testing.assert_allclose(shown, [0, 20, 40, 60] * 2, atol=3)
    assert frames.shape[2] in (320, 400), "a GIF is small, MP4 has even sizes"
    assert frames[0][:24].max() > 150, "the caption"
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_an_episode_that_does_not_repeat_is_not_shown(tmp_path: Path) -> None:
    report = played("GearTest/Forgetful-v0", episodes=1)
    assert failing_code(lambda: video.write_videos(tmp_path / "a.gif", report)) == "ENVIRONMENT"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("environment", ["Pendulum-v1", "GearTest/FarHopper-v0", "ALE/Pong-v5"])
def test_simulators_are_drawn_as_they_were_played(tmp_path: Path, environment: str) -> None:
    needs, action = {
        "Pendulum-v1": ("pygame", np.zeros(1)),
        "ALE/Pong-v5": ("ale_py", np.array(2)),
        "GearTest/FarHopper-v0": ("mujoco", np.zeros(3)),
    }[environment]
    pytest.importorskip(needs)
    policy: Any = Constant(action)
    options: dict[str, Any] = {"environment_options": {"max_episode_steps": 12}, "seed": 3}
    tasks = [EvaluationTask(environment=environment, targets=(1.0,), episodes=1, **options)]
    path = tmp_path / "a.gif"
    video.check_video(tasks)
    report = evaluate_tasks(lambda _: policy, tasks)
    video.write_videos(path, report)
    frames = frames_of(path)
    assert len(frames) > 2 and frames.std() > 5
    if "Hopper" in environment:  # its brown is in the picture: the camera follows
        reds, blues = frames[..., 0].astype(int), frames[..., 2].astype(int)
        assert (reds - blues > 40).sum(axis=(1, 2)).min() > 300


def test_a_run_is_shown_and_its_report_links_it(tmp_path: Path) -> None:
    pytest.importorskip("pygame")
    run = write_run(tmp_path / "run")
    options: dict[str, Any] = {"episodes": 1, "targets": -200.0, "device": "cpu", "quiet": True}
    without = evaluate(run, **options).to_json()
    assert "(<" not in (run / "report.md").read_text()
    report = evaluate(run, video=tmp_path / "a.mp4", **options).to_json()
    assert report.pop("videos") == ["../a.mp4"]
    assert report | {"seconds": 0} == without | {"seconds": 0}, "the episodes are the same"
    assert json.loads((run / "evaluation.json").read_text())["videos"] == ["../a.mp4"]
    assert "(<../a.mp4>)" in (run / "report.md").read_text()


def test_what_cannot_be_shown_is_refused_before_anything_is_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "run")
    (tmp_path / "there.gif").touch()
    monkeypatch.setattr("gear_offline.evaluation.play.evaluate_tasks", None)
    names = {"a.avi": "USAGE", "a": "USAGE", "no/a.gif": "OUTPUT_WRITE"}
    for name, code in (names | {"there.gif": "OUTPUT_EXISTS"}).items():
        with one_error(code):
            evaluate(run, environment="Pendulum-v1", video=tmp_path / name)
    with one_error("ENVIRONMENT"):
        evaluate(run, environment="GearTest/Counted-v0", video=tmp_path / "a.gif")


def test_what_is_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = [EvaluationTask(environment="Pendulum-v1", targets=(1.0,))]
    for module in ("pygame", "imageio_ffmpeg"):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(GearError, match=r"gear-offline\[video\]"):
            video.check_video(tasks)
