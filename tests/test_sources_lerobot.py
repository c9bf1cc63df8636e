"""LeRobot's datasets, written by LeRobot itself (tests/fixtures/make_lerobot.py), step by step."""

import json
import sys
import zipfile
from fractions import Fraction
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gear_offline.data.convert.conversion import convert
from gear_offline.data.dataset.dataset import open_dataset
from gear_offline.data.sources import open_source
from tests.fixtures.make_lerobot import recorded
from tests.support import refused

av = pytest.importorskip("av", reason="needs pip install 'gear-offline[lerobot]'")
pa = pytest.importorskip("pyarrow", reason="needs pip install 'gear-offline[lerobot]'")
import PIL.Image  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402

FRONT, VIDEO = "observation.images.front", "observation.images.video"


@pytest.fixture(params=["v2.1", "v3.0"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    fixture = Path(__file__).parent / "fixtures" / "lerobot.zip"
    with zipfile.ZipFile(fixture) as archive:
        archive.extractall(tmp_path)
    return tmp_path / str(request.param)


def test_facts_of_the_dataset(folder: Path) -> None:
    with open_source(folder) as source:
        facts = source.info.attributes
        assert facts["codebase_version"] == folder.name
        assert ["a time limit cannot be told" in text for text in facts["warnings"]] == [True]
        assert sorted(facts["left_out"]) == [FRONT, VIDEO]
        together = f"--columns {FRONT},{VIDEO},observation.state,observation.velocity,actions"
        assert together in facts["left_out"][FRONT]
        named = (FRONT, VIDEO, "observation.state", "observation.velocity")
        with open_source(folder, names={name: name for name in named}) as both:
            assert {*named, "actions"} <= {column.name for column in both.spec}


def test_frames_that_are_asked_for(folder: Path, tmp_path: Path) -> None:
    chosen = [f"observations={FRONT}", f"video={VIDEO}", "actions"]
    convert(folder, tmp_path / "shards", columns=chosen, shard_bytes=1 << 18, quiet=True)
    dataset = open_dataset(tmp_path / "shards")
    assert [c.name for c in dataset.spec] == ["observations", "video", "actions", "rewards"]
    wanted = [recorded(number) for number in range(3)]
    images = np.concatenate([episode[FRONT] for episode in wanted])
    np.testing.assert_array_equal(dataset.read("observations", 0, 23), images)
    video = np.concatenate([episode[VIDEO] for episode in wanted]).astype(int)
    near = np.abs(dataset.read("video", 0, 23) - video)  # frames differ by 20 and more
    assert near.max() <= 4
    names = {"observations": "observation.state + observation.velocity", "video": VIDEO}
    with open_source(folder, names=names) as source:
        assert source.spec["observations"].shape == (5,)
    with open_source(folder, names={"observations": VIDEO}) as source:
        for start, stop in ((22, 23), (5, 20), (0, 1), (18, 19)):  # in any order
            assert np.abs(source.read("observations", start, stop) - video[start:stop]).max() <= 4


PATHS = {
    "data_path": "rows/task-{episode_chunk:04d}/episode_{episode_index:08d}.parquet",
    "video_path": "films/task-{episode_chunk:04d}/{video_key}-{episode_index:08d}.mkv",
}


def small(
    root: Path, rows: dict[str, Any], feature: dict[str, Any], frames: Any = None, **video: Any
) -> Path:
    """Write one episode, number 10010, under paths of its own; `frames` by their time stamps."""
    names = {"episode_chunk": 1, "episode_index": 10010, "video_key": VIDEO}
    data, film = (root / PATHS[of].format(**names) for of in PATHS)
    steps = len(next(iter(rows.values())))
    for folder in (root / "meta", data.parent, film.parent):
        folder.mkdir(parents=True, exist_ok=True)
    column = pa.array(np.zeros((steps, 1)).tolist())
    numbers = {"observation.state": column, "action": column, "episode_index": [10010] * steps}
    pq.write_table(pa.table(rows | numbers), data)
    features = {VIDEO: feature, "action": {"dtype": "float64", "shape": [1]}}
    info = {"codebase_version": "v2.1", "fps": 10, "chunks_size": 10_000, "total_frames": steps}
    (root / "meta" / "info.json").write_text(
        json.dumps({**info, "total_episodes": 1, "features": features, **PATHS})
    )
    if frames is not None:
        codec, kind = video.pop("codec", "libx264"), video.pop("kind", "yuv444p")
        with av.open(film, "w") as out:
            stream = out.add_stream(codec, rate=30, options=video.pop("options", {"crf": "1"}))
            stream.height, stream.width = next(iter(frames.values())).shape[:2]
            stream.pix_fmt = kind
            stream.codec_context.time_base = Fraction(1, 1000)
            for time, frame in frames.items():
                coloured = "rgb24" if frame.ndim == 3 else kind
                picture = av.VideoFrame.from_ndarray(frame, format=coloured)
                picture.pts, picture.time_base = round(time * 1000), Fraction(1, 1000)
                out.mux(stream.encode(picture))
            out.mux(stream.encode())
    return root


B_FRAMES = {"crf": "1", "g": "7", "bf": "3"}
REGULAR = [number * 0.05 for number in range(40)]


@pytest.mark.parametrize(
    ("stamps", "times", "options"),
    [
        (np.arange(10) * 0.2, REGULAR, {"crf": "1"}),  # a faster video
        (0.5 + np.arange(15) * 0.1, REGULAR, B_FRAMES),  # the first rows are gone
        (np.arange(9)[::-1] * 0.2, REGULAR, B_FRAMES),
        ([0.0, 0.2, 0.9, 1.1], [0.0, 0.033, 0.2, 0.25, 0.9, 1.0, 1.1, 3.0], B_FRAMES),
        ([0.7, 0.9], [0.5, 0.7, 0.9], {"crf": "1"}),  # it does not begin at 0
    ],
)
def test_frames_are_those_of_the_rows_times(
    tmp_path: Path, stamps: Any, times: list[float], options: dict[str, str]
) -> None:
    frames = {t: np.full((32, 48, 3), n * 6, np.uint8) for n, t in enumerate(times)}
    rows, feature = {"timestamp": np.float32(stamps)}, {"dtype": "video"}
    folder = small(tmp_path, rows, feature, frames, options=options)
    with open_source(folder, names={"observations": VIDEO}) as source:
        shown = source.read("observations", 0, len(stamps))[:, 9, 9, 0] / 6
    nearest = [np.abs(np.array(times) - stamp).argmin() for stamp in stamps]
    assert np.round(shown).astype(int).tolist() == nearest
    for wrong in (np.float32(stamps) + 0.02, np.float32(stamps) + 60):
        small(tmp_path, {"timestamp": wrong}, feature)
        refused(folder, "SOURCE_LAYOUT", "no frame at", names={"observations": VIDEO})
    small(tmp_path, {"time": rows["timestamp"]}, feature)
    refused(folder, "SOURCE_LAYOUT", "no timestamp", names={"observations": VIDEO})
    for depth in ({"info": {"video.is_depth_map": True}}, {"video_info": {"is_depth_map": True}}):
        small(tmp_path, rows, {**feature, **depth})
        refused(folder, "SOURCE_LAYOUT", "as colours", names={"observations": VIDEO})


PICTURES = np.random.default_rng(0).integers(0, 4096, (4, 18, 32)).astype(np.uint16)


def as_file(pixels: Any, kind: str, mode: str | None = None) -> dict[str, Any]:
    buffer, image = BytesIO(), PIL.Image.fromarray(pixels)
    (image.convert(mode) if mode else image).save(buffer, kind)
    return {"bytes": buffer.getvalue(), "path": None}


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
@pytest.mark.parametrize("colours", [0, 1, 3, 4])
def test_images_keep_their_type_and_numbers(tmp_path: Path, kind: str, colours: int) -> None:
    pixels: Any = PICTURES * 16 if not colours else PICTURES.astype(np.uint8)
    if colours > 1:
        pixels = np.stack([pixels] * (colours - 1) + [pixels[::-1]], axis=3)
    rows = {VIDEO: [as_file(one, kind) for one in pixels]}
    folder = small(tmp_path, rows, {"dtype": "image", "info": {"is_depth_map": colours < 2}})
    with open_source(folder, names={"observations": VIDEO}) as source:
        found = source.read("observations", 0, 4)
    assert found.dtype == pixels.dtype and found.shape == (4, 18, 32, max(colours, 1))
    np.testing.assert_array_equal(found, pixels.reshape(found.shape))


@pytest.mark.parametrize(
    ("kind", "mode"), [("PNG", "P"), ("PNG", "LA"), ("PNG", "1"), ("TIFF", "I")]
)
def test_images_that_no_array_holds_are_refused(tmp_path: Path, kind: str, mode: str) -> None:
    rows = {VIDEO: [as_file(PICTURES[0].astype(np.uint8), kind, mode)]}
    folder = small(tmp_path, rows, {"dtype": "image"})
    refused(folder, "SOURCE_", names={"observations": VIDEO})


@pytest.mark.parametrize("kind", ["gray12le", "gray16le", "gray"])
def test_depth_in_a_video(tmp_path: Path, kind: str) -> None:
    pixels: Any = PICTURES.astype(np.uint8 if kind == "gray" else np.uint16)
    rows, feature = {"timestamp": [0.0, 0.1, 0.2]}, {"dtype": "video", "is_depth_map": True}
    film = {"codec": "ffv1", "kind": kind, "options": {}}
    frames = {n * 0.1: frame for n, frame in enumerate(pixels)}
    try:
        folder = small(tmp_path, rows, feature, frames, **film)
    except ValueError as error:  # an old PyAV
        pytest.skip(str(error))
    with open_source(folder, names={"observations": VIDEO}) as source:
        assert source.spec["observations"].dtype == pixels.dtype
        np.testing.assert_array_equal(source.read("observations", 0, 3)[..., 0], pixels[:3])


def rewrite(path: Path, change: Any) -> None:
    """Write the parquet files of data again, `change` applied, in groups of 5 rows."""
    for file in path.glob("data/*/*.parquet"):
        pq.write_table(change(pq.read_table(file)), file, row_group_size=5)


def test_rewards_and_endings_that_are_not_recorded(folder: Path) -> None:
    rewrite(folder, lambda table: table.drop_columns(["next.reward", "next.done"]))
    with open_source(folder) as source:
        assert "rewards" not in source.spec and source.truncated.all()
        texts = " ".join(convert(source, folder.parent / "bare", quiet=True).source.warnings)
        assert "no rewards" in texts and "next.success=rewards" in texts and "no flag" in texts
    with open_source(folder, names={"rewards": "next.success"}) as source:
        assert source.spec["rewards"].dtype == np.float32
        assert source.read("rewards", 0, 23).tolist() == [0.0] * 22 + [1.0]


def test_truncated_episodes(folder: Path) -> None:
    def cut(table: Any) -> Any:
        return table.append_column("next.truncated", pa.array([True] * len(table)))

    rewrite(folder, cut)
    with open_source(folder) as source:
        assert source.truncated.all()


def test_damaged_and_foreign_folders_are_refused_in_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"observations": VIDEO, "front": FRONT}
    for path in sorted(folder.rglob("*.*")):
        if path.suffix != ".mp4" and path.parent.parent.name != "episodes":
            continue  # tests/test_sources_conformance.py damages all others
        whole = path.read_bytes()
        for cut in (0, 4, len(whole) // 3, len(whole) // 2):
            path.write_bytes(whole[:cut])
            refused(folder, "SOURCE_", names=names)
        path.unlink()
        refused(folder, "SOURCE_", names=names)
        path.write_bytes(whole)
    text = (folder / "meta" / "info.json").read_text()
    info = json.loads(text)
    for change, words in (
        ({"codebase_version": "v1.6"}, "v1.6"),
        ({"total_frames": 24}, "24 of 3"),
        ({"features": 5}, "not a readable info.json"),
        ({"video_path": "../{video_key}.mp4"}, "not accepted"),
        ({"data_path": "/data/*.parquet"}, "not accepted"),
        ({"video_path": "{video_key.__class__}"}, "not accepted"),
        ({"video_path": "{video_key:>999999999}"}, "not accepted"),
    ):
        (folder / "meta" / "info.json").write_text(json.dumps({**info, **change}))
        refused(folder, "SOURCE_", words, names=names)
    (folder / "meta" / "info.json").write_text(text)
    rewrite(folder, lambda table: table.take(np.arange(table.num_rows)[::-1]))  # time backwards
    refused(folder, "SOURCE_LAYOUT", "do not follow each other")
    rewrite(folder, lambda table: table.take(np.arange(table.num_rows)[::-1]))
    monkeypatch.setitem(sys.modules, "av", None)
    refused(folder, "PACKAGE_MISSING", "gear-offline[lerobot]", names={"observations": FRONT})
    if folder.name == "v3.0":
        numbers = np.random.default_rng(0).permutation(23)
        rewrite(folder, lambda table: table.take(numbers))
        refused(folder, "SOURCE_LAYOUT", "do not follow each other")


def test_a_frame_of_another_size_is_refused(folder: Path) -> None:
    path = sorted(folder.glob("data/**/*.parquet"))[0]
    table = pq.read_table(path)
    large = BytesIO()
    PIL.Image.fromarray(np.zeros((900, 900, 3), np.uint8)).save(large, "PNG")
    images = table[FRONT].to_pylist()
    images[1] = {**images[1], "bytes": large.getvalue()}
    changed = pa.array(images, table.schema.field(FRONT).type)
    pq.write_table(table.set_column(table.schema.get_field_index(FRONT), FRONT, changed), path)
    refused(folder, "SOURCE_LAYOUT", "a frame of 900 x 900 behind", names={"observations": FRONT})


def test_a_part_of_the_episodes_is_read_where_they_are_whole(folder: Path) -> None:
    with open_source(folder) as source:
        whole = source.read("actions", 0, source.spec.steps)
    files = sorted(folder.glob("data/**/*.parquet"))
    table = pa.concat_tables(map(pq.read_table, files))  # of 7, 12 and 4 steps
    for file in files[1:]:
        file.unlink()
    pq.write_table(table.slice(7, 16), files[0])
    with open_source(folder, names={"observations": VIDEO}) as source:
        assert source.episodes.lengths.tolist() == [12, 4]
        np.testing.assert_array_equal(source.read("actions", 0, 16), whole[7:])
        told = "16 steps of 2 episodes are here, info.json says 23 of 3: a part"
        assert any(told in text for text in source.info.attributes["warnings"])
        assert len(source.read("observations", 0, 16)) == 16
    pq.write_table(table.slice(8, 15), files[0])
    refused(folder, "SOURCE_LAYOUT", "15 steps of 2 episodes are here, info.json says 23 of 3")
