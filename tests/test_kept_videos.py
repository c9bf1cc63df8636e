"""Frames that stay in videos (`convert --video keep`), against PyAV and the decoded conversion."""

import os
import resource
import shutil
import signal
import threading
import zipfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest

import gear_offline as go
from benchmarks.video import FPS, moving_frames, write_lerobot, write_video
from gear_offline.analysis.planning.workload import make_workload
from gear_offline.batches.tables.joint import Part, join_datasets
from gear_offline.config.recipe import load_recipe
from gear_offline.core.system import usable_cores
from gear_offline.core.workers import Worker
from gear_offline.data.dataset.inspect import print_inspection
from gear_offline.errors import GearError
from tests.forks import run_forked
from tests.support import one_error

av = pytest.importorskip("av", reason="needs pip install 'gear-offline[lerobot]'")

TOP, LEFT = "observation.images.top", "observation.images.left"
LENGTHS = (9, 30, 1, 14)
COLUMNS = [TOP, LEFT, "observation.state", "actions"]


def refusal(call: Callable[[], object]) -> GearError:
    """Return the error that a call raises, which has a remedy."""
    with pytest.raises(GearError) as caught:
        call()
    assert caught.value.remedy and "\n" not in str(caught.value)
    return caught.value


def sequential(folder: Path, camera: str) -> Any:
    """Decode a camera's file from its beginning; return the frame of each step."""
    shown = dict[float, Any]()
    with av.open(folder / f"videos/{camera}/chunk-000/file-000.mp4") as video:
        for frame in video.decode(video=0):
            shown[frame.time] = frame.to_ndarray(format="rgb24")
    times = np.array([*shown])
    rows = pq.read_table(folder / "data/chunk-000/file-000.parquet").to_pydict()
    begins = np.cumsum([0, *LENGTHS])[:-1] / FPS
    wanted = begins[rows["episode_index"]] + np.array(rows["timestamp"])
    return np.stack([shown[times[np.abs(times - time).argmin()]] for time in wanted])


def make(folder: Path, codec: str, group: int) -> Path:
    """Make a folder with a LeRobot dataset `set`, `kept` and `decoded`."""
    write_lerobot(
        folder / "set", np.array(LENGTHS), cameras=(TOP, LEFT), side=64, codec=codec, group=group
    )
    go.convert(folder / "set", folder / "kept", columns=COLUMNS, video="keep", quiet=True)
    go.convert(folder / "set", folder / "decoded", columns=COLUMNS, quiet=True)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("videos"), "libx264", 12)


@pytest.fixture
def copies(folders: Path, tmp_path: Path) -> Path:
    """Return copies that a test may damage, beside each other as they were."""
    return Path(shutil.copytree(folders, tmp_path / "moved"))


@pytest.mark.parametrize(("codec", "group"), [("libx264", 12), ("libx264", 2), ("libsvtav1", 2)])
def test_frames_are_those_of_the_files(tmp_path: Path, codec: str, group: int) -> None:
    folders = make(tmp_path, codec, group)
    kept, decoded = go.open_dataset(folders / "kept"), go.open_dataset(folders / "decoded")
    assert {str(column) for column in kept.spec} == {str(column) for column in decoded.spec}
    for camera in (TOP, LEFT):
        frames = sequential(folders / "set", camera)
        for dataset in (kept, decoded):
            np.testing.assert_array_equal(dataset.column(camera), frames)
            np.testing.assert_array_equal(dataset.read(camera, 20, 41), frames[20:41])
        np.testing.assert_array_equal(kept[1][camera], frames[9:39])
    for name in ("observation.state", "actions"):
        np.testing.assert_array_equal(kept.column(name), decoded.column(name))
    shards = sum(shard.bytes for shard in kept.manifest.shards)
    assert shards < 0.01 * decoded.manifest.total_bytes


@pytest.mark.parametrize(
    "options",
    [{}, {"frame_stack": 3}, {"padding": "left"}, {"selection": "uniform_episodes"}, {"chunk": 4}],
    ids=str,
)
def test_batches_are_those_of_decoded_shards(folders: Path, options: dict[str, Any]) -> None:
    columns = [TOP, "observation.state"]
    more: Any = {"observations": columns, "extra_columns": [LEFT], "device": "cpu", **options}
    with (
        go.GearLoader(folders / "kept", 6, context_length=5, seed=3, **more) as kept,
        go.GearLoader(folders / "decoded", 6, context_length=5, seed=3, **more) as decoded,
    ):
        for _ in range(25):
            ours, theirs = next(kept), next(decoded)
            again = kept.batch_at(kept.step - 1)
            for name in columns:
                assert (ours.states[name] == theirs.states[name]).all()
                assert (again.states[name] == theirs.states[name]).all()
            assert ours.extras.keys() == theirs.extras.keys()
            assert all((ours.extras[name] == theirs.extras[name]).all() for name in ours.extras)
            assert (ours.actions == theirs.actions).all()


def test_threads_decode_where_no_memory_is_shared(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    monkeypatch.setattr(Worker, "start", refuse)
    test_batches_are_those_of_decoded_shards(folders, {"frame_stack": 3})


def means(frames: Any, size: tuple[int, int]) -> Any:
    """Return frames of another size: the mean of the pixels whose middles lie under a new one."""
    weights = []
    for new, old in zip(size, frames.shape[1:3], strict=True):
        middles, edges = np.arange(old) + 0.5, np.arange(new + 1) * old / new
        under = (middles > edges[:-1, None]) & (middles <= edges[1:, None])
        weights.append(under / under.sum(1, keepdims=True))
    return np.einsum("yh,nhwc,xw->nyxc", weights[0], frames.astype(float), weights[1])


@pytest.mark.parametrize("size", [(32, 32), (24, 40), (16, 64)])
def test_frames_are_resized_as_they_are_decoded(
    folders: Path, tmp_path: Path, size: tuple[int, int]
) -> None:
    """Decoded, kept, and kept frames that are decoded later: each pixel is a mean."""
    options: Any = {"columns": COLUMNS, "resize": size, "quiet": True}
    go.convert(folders / "set", tmp_path / "decoded", **options)
    go.convert(folders / "set", tmp_path / "kept", video="keep", **options)
    go.convert(tmp_path / "kept", tmp_path / "again", quiet=True)
    for camera in (TOP, LEFT):
        wanted = means(sequential(folders / "set", camera), size)
        for name in ("decoded", "kept", "again"):
            frames = go.open_dataset(tmp_path / name).column(camera)
            assert frames.dtype == np.uint8 and frames.shape == wanted.shape
            assert np.abs(frames - wanted).max() <= 1  # rounded once each way


def test_a_size_that_no_frame_gets_is_refused(folders: Path, tmp_path: Path) -> None:
    convert = partial(go.convert, out=tmp_path / "new", quiet=True)
    for source, size in ((folders / "set", "32x32"), (folders / "decoded", (32, 32))):
        assert "none is resized" in str(refusal(lambda: convert(source, resize=size)))  # noqa: B023
    for size in ("32", "0x32", "32x", "32x32x3", (1 << 20, 1 << 20)):
        assert "is no size" in str(refusal(lambda: convert(folders / "set", resize=size)))  # noqa: B023
    opened = partial(go.open_source, folders / "decoded", resize=(32, 32))
    assert "none is resized" in str(refusal(opened))
    assert not (tmp_path / "new").exists()


def test_videos_that_are_open_are_compared_again(copies: Path) -> None:
    """A touch changes nothing; other bytes are refused, although the file was open before."""
    options: Any = {"observations": [TOP], "device": "cpu", "context_length": 1}
    [video] = (copies / "set").glob(f"videos/{TOP}/*/*.mp4")
    with go.GearLoader(copies / "kept", 4, **options) as loader:
        before = loader.batch_at(0).states
        os.utime(video)
        assert (loader.batch_at(0).states == before).all()
        content = bytearray(video.read_bytes())
        content[len(content) // 2] ^= 1
        video.write_bytes(content)
        with one_error("DATASET_DAMAGED", "does not match its digest"):
            loader.batch_at(1)


def test_a_view_has_its_own_frames(folders: Path) -> None:
    options: Any = {"observations": [TOP, LEFT], "device": "cpu", "context_length": 3}
    views = [go.split(folders / name, 0.5)[0] for name in ("kept", "decoded")]
    with go.GearLoader(views[0], 4, **options) as kept, go.GearLoader(views[1], 4, **options) as no:
        for _ in range(10):
            ours, theirs = next(kept), next(no)
            assert all((ours.states[n] == theirs.states[n]).all() for n in (TOP, LEFT))


def test_several_tasks(folders: Path, tmp_path: Path) -> None:
    def joined(*video: str) -> Any:
        tasks = []
        for camera, how in zip((TOP, LEFT), video, strict=True):
            path, columns = tmp_path / f"{camera}-{how}", [f"observations={camera}", "actions"]
            columns.append("rewards=timestamp")
            if not path.exists():
                go.convert(folders / "set", path, columns=columns, video=how, quiet=True)  # type: ignore[arg-type]
            tasks.append(Part(name=camera, dataset=go.open_dataset(path)))
        return join_datasets(tasks)

    options: Any = {"device": "cpu", "context_length": 3}
    with (
        go.GearLoader(joined("keep", "keep"), 8, **options) as kept,
        go.GearLoader(joined("decode", "decode"), 8, **options) as decoded,
    ):
        for _ in range(5):
            assert (next(kept).states == next(decoded).states).all()
    files = go.open_dataset(tmp_path / f"{TOP}-keep").manifest.source.files
    assert len(files) == 2  # the rows, and the one camera that is kept
    error = refusal(lambda: go.GearLoader(joined("keep", "decode"), 8, **options))
    assert "in some of the datasets" in str(error)


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_folders_that_lerobot_wrote(tmp_path: Path, version: str) -> None:
    with zipfile.ZipFile(Path(__file__).parent / "fixtures" / "lerobot.zip") as archive:
        archive.extractall(tmp_path)
    camera, columns = "observation.images.video", ["actions", "observation.images.video"]
    for name in ("keep", "decode"):
        go.convert(tmp_path / version, tmp_path / name, columns=columns, video=name, quiet=True)
    kept, decoded = (go.open_dataset(tmp_path / name) for name in ("keep", "decode"))
    assert [*kept.videos] == [camera]
    np.testing.assert_array_equal(kept.column(camera), decoded.column(camera))


def test_workers_write_the_same_bytes(folders: Path, tmp_path: Path) -> None:
    options: Any = {"columns": COLUMNS, "video": "keep", "quiet": True, "shard_bytes": 1000}
    for name, workers in (("one", 1), ("two", 2)):
        go.convert(folders / "set", folders / name, workers=workers, **options)
    for file in sorted((folders / "one").iterdir()):
        assert file.read_bytes() == (folders / "two" / file.name).read_bytes()


def test_what_reads_columns_gets_frames(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    frames = sequential(folders / "set", TOP)
    path = go.export_hdf5(folders / "kept", tmp_path / "kept.hdf5", quiet=True)
    with h5py.File(path) as file:
        np.testing.assert_array_equal(file[TOP][:], frames)
    again = go.convert(folders / "kept", tmp_path / "again", quiet=True)
    assert not again.videos
    np.testing.assert_array_equal(go.open_dataset(tmp_path / "again").column(TOP), frames)
    go.audit(folders / "kept")
    document = go.inspect(folders / "kept")
    assert document["videos"][TOP]["shape"] == [64, 64, 3] and document["verified"]
    print_inspection(document)
    shown = " ".join(capsys.readouterr().out.split())
    assert f"{TOP}, {LEFT}: 2 files below ../set/videos" in shown and "decoded" in shown


def test_the_end_of_a_conversion_tells_what_is_saved(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    go.convert(folders / "set", tmp_path / "kept", video="keep")
    told = capsys.readouterr().err
    assert f"frames stay in videos: {TOP}, {LEFT}: 2 files below" in told
    assert "decoded 1.3 MiB" in told


def test_videos_that_are_not_as_they_were_are_refused_by_name(copies: Path) -> None:
    go.open_dataset(copies / "kept")  # moved with its videos
    file = copies / f"set/videos/{LEFT}/chunk-000/file-000.mp4"
    whole, elsewhere = file.read_bytes(), copies / "elsewhere.mp4"
    changed = bytearray(whole)
    changed[len(whole) // 2] ^= 255
    for content, words, verify in (
        (whole[:-1], "bytes, it had", False),
        (bytes(changed), "does not match its digest", True),
        (None, "cannot be read", False),
    ):
        file.unlink(missing_ok=True)
        if content is not None:
            file.write_bytes(content)
        error = refusal(partial(go.open_dataset, copies / "kept", verify=verify))
        assert error.code == "DATASET_DAMAGED" and words in str(error) and file.name in str(error)
        assert "a link to it" in str(error)
    elsewhere.write_bytes(whole)
    file.symlink_to(elsewhere)
    dataset = go.open_dataset(copies / "kept")
    np.testing.assert_array_equal(dataset.column(LEFT), sequential(copies / "set", LEFT))
    # changed while it is open: compared again, by whoever reads next
    elsewhere.write_bytes(bytes(changed))
    error = refusal(lambda: dataset.column(LEFT))
    assert error.code == "DATASET_DAMAGED" and file.name in str(error)


def test_damage_is_found_when_frames_are_decoded(copies: Path) -> None:
    file = copies / f"set/videos/{TOP}/chunk-000/file-000.mp4"
    whole = bytearray(file.read_bytes())
    begin = whole.index(b"mdat") + 8
    whole[begin : begin + 4000] = bytes(len(whole[begin : begin + 4000]))
    file.write_bytes(whole)
    dataset = go.open_dataset(copies / "kept", verify=False)
    error = refusal(lambda: dataset.read(TOP, 0, 9))
    assert file.name in str(error)
    options: Any = {"observations": [TOP], "device": "cpu", "context_length": 2}
    error = refusal(lambda: go.GearLoader(copies / "kept", 4, **options))
    assert error.code == "DATASET_DAMAGED" and file.name in str(error)


def test_a_decoder_that_is_killed_ends_the_loader(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, start = list[Worker](), Worker.start

    def note(worker: Worker, *job: Any) -> None:
        started.append(worker)
        start(worker, *job)

    monkeypatch.setattr(Worker, "start", note)
    options: Any = {"observations": [TOP], "device": "cpu", "context_length": 2}
    with go.GearLoader(folders / "kept", 4, host_budget=4 << 20, **options) as loader:
        next(loader)
        for worker in started:
            os.kill(worker.pid, signal.SIGKILL)
        error = refusal(lambda: [next(loader) for _ in range(1000)])
        assert error.code == "WORKER_LOST" and "SIGKILL" in str(error) and started
    assert not any(psutil.pid_exists(worker.pid) for worker in started)


FORKED = """
import os, sys
import gear_offline as go
from gear_offline.errors import GearError
options = dict(observations=[sys.argv[2]], device='cpu', context_length=2, host_budget=4 << 20)
kept, decoded = (f'{sys.argv[1]}/{name}' for name in ('kept', 'decoded'))
loader, decoded = (go.GearLoader(path, 4, **options) for path in (kept, decoded))
if child := os.fork():
    print(all((next(loader).states == next(decoded).states).all() for _ in range(50)))
    os.waitpid(child, 0)
else:
    try:
        [next(loader) for _ in range(50)]
    except GearError as error:
        print(error.code, bool((loader.batch_at(1).states == decoded.batch_at(1).states).all()))
"""


def test_a_fork_takes_no_memory_that_its_parent_decodes_into(folders: Path, tmp_path: Path) -> None:
    (script := tmp_path / "forked.py").write_text(FORKED)
    done = run_forked(script, folders, TOP)
    assert (done.returncode, sorted(done.stdout.split("\n"))) == (
        0,
        ["", "LOADER_STATE True", "True"],
    )


def test_shared_memory_that_the_system_refuses_is_told(folders: Path) -> None:
    options: Any = {"observations": [TOP], "device": "cpu", "context_length": 2}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        error = refusal(lambda: go.GearLoader(folders / "kept", 4, host_budget=8 << 20, **options))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert error.code == "MEMORY" and "ulimit -f" in str(error)


def test_short_videos_are_refused_when_they_are_converted(copies: Path) -> None:
    file = copies / f"set/videos/{TOP}/chunk-000/file-000.mp4"
    write_video(file, moving_frames(sum(LENGTHS) - 1, 64, 0), "libx264", 12)
    error = refusal(lambda: go.convert(copies / "set", copies / "x", video="keep", quiet=True))
    assert error.code == "SOURCE_LAYOUT" and "no frame at" in str(error) and TOP in str(error)
    assert not (copies / "x").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"placement": "host"}, "placement='host' is not usable since frames of"),
        ({"sharding": "shard"}, "sharding='shard'"),
        ({"goals": {"future": 1.0}, "observations": [TOP]}, "goals"),
        ({"selection": "prioritized"}, "stay in videos, do not serve"),
        ({"normalize_states": True, "observations": [TOP]}, "images are not normalised"),
    ],
    ids=str,
)
def test_options_that_do_not_go_with_kept_frames(
    folders: Path, options: dict[str, Any], words: str
) -> None:
    more: Any = {"observations": [TOP, LEFT], "device": "cpu", **options}
    error = refusal(lambda: go.GearLoader(folders / "kept", 4, context_length=2, **more))
    assert error.code in ("LOADER_OPTION", "SELECTION") and words in str(error)


def test_no_plan_counts_frames_that_are_decoded(folders: Path) -> None:
    recipe = {"data.path": str(folders / "kept"), "loader.observations": [TOP]}
    planned = partial(make_workload, load_recipe("smoke", recipe))
    assert f"frames of {TOP} stay in videos" in str(refusal(planned))
    make_workload(load_recipe("smoke", recipe | {"loader.observations": ["observation.state"]}))


def test_vectors_of_kept_data_are_used_as_always(folders: Path) -> None:
    options: Any = {"observations": ["observation.state"], "device": "cpu", "placement": "host"}
    with go.GearLoader(folders / "kept", 4, context_length=2, **options) as loader:
        assert next(loader).states.shape == (4, 2, 6)


def test_conversions_that_are_refused(folders: Path, tmp_path: Path) -> None:
    def error(source: Any = folders / "set", **options: Any) -> GearError:
        return refusal(
            lambda: go.convert(source, tmp_path / "x", video="keep", quiet=True, **options)
        )

    with go.open_source(folders / "set") as opened:
        assert "too late" in str(error(opened))
        assert "--video keep" in opened.info.attributes["left_out"][TOP]
    with pytest.raises(GearError, match="neither"):
        go.convert(folders / "set", tmp_path / "x", video="both")  # type: ignore[arg-type]
    assert "no column has frames" in str(error(folders / "decoded"))
    assert "no column has frames" in str(error(columns=["observation.state", "actions"]))
    assert "map function" in str(error(map=lambda episode: episode))
    assert "stand alone" in str(error(columns=[f"both={TOP}+{LEFT}", "actions"]))
    assert not (tmp_path / "x").exists()
    with pytest.raises(GearError, match="stay in videos"):
        go.Appender(folders / "kept")
    with pytest.raises(GearError, match="push the whole dataset"):
        go.open_dataset(folders / "kept").push_to_hub("a/b")


def test_cameras_under_other_names(folders: Path, tmp_path: Path) -> None:
    chosen = [f"observations={TOP}", "actions", "rewards=timestamp"]
    go.convert(folders / "set", tmp_path / "x", columns=chosen, video="keep", quiet=True)
    dataset = go.open_dataset(tmp_path / "x")
    assert [*dataset.videos] == ["observations"]
    np.testing.assert_array_equal(dataset.column("observations"), sequential(folders / "set", TOP))
    recipe = {"data.path": str(tmp_path / "x"), "train.steps": 2, "train.device": "cpu"}
    go.train("smoke", recipe | {"loader.normalize_states": False}, out=tmp_path / "run")
    assert (tmp_path / "run" / "metrics.jsonl").is_file()


def test_jobs_of_a_sweep_share_the_cores(folders: Path, tmp_path: Path) -> None:
    columns = [f"observations={TOP}", "actions", "rewards=timestamp"]
    go.convert(folders / "set", tmp_path / "x", columns=columns, video="keep", quiet=True)
    recipe: dict[str, Any] = {"data.path": str(tmp_path / "x"), "loader.normalize_states": False}
    recipe |= {"train.steps": 2, "train.device": "cpu", "evaluate.episodes": 0}
    decoders, done = set[int](), threading.Event()

    def look() -> None:
        while not done.wait(0.01):
            for job in psutil.Process().children():
                with suppress(psutil.Error):
                    found = [
                        p for p in job.children() if "gear_offline.core.workers" in p.cmdline()
                    ]
                    decoders.update(process.pid for process in found)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        go.sweep("smoke", recipe, seeds=2, parallel=2, out=tmp_path / "sweep", quiet=True)
    finally:
        done.set()
        watcher.join()
    assert 0 < len(decoders) <= max(usable_cores(), 2)
