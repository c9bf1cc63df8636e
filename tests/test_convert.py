"""Conversion: the same bytes each time, and one clear error for what cannot be converted."""

import os
import pickle
import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import pytest
import scipy.io

from gear_offline.cli.main import main
from gear_offline.data.convert.conversion import convert
from gear_offline.data.dataset.dataset import open_dataset
from gear_offline.data.dataset.manifest import Manifest
from gear_offline.data.sources import open_source
from gear_offline.data.sources.input_files import InputFile
from tests.support import (
    ArraySource,
    contents,
    failing_code,
    hopper_columns,
    one_error,
    run_python,
    write_hdf5,
)

LENGTHS = [4, 3, 5, 1, 7]
STEPS = sum(LENGTHS)


def source(*, seed: int = 0, **options: Any) -> ArraySource:
    return ArraySource(hopper_columns(STEPS, seed=seed), LENGTHS, **options)


def test_bytes_do_not_depend_on_piece_sizes(tmp_path: Path) -> None:
    for rows in (1, 3, 1000):
        convert(source(rows_per_read=rows), tmp_path / str(rows), quiet=True)
    assert contents(tmp_path / "1") == contents(tmp_path / "3") == contents(tmp_path / "1000")


def test_a_manifest_names_the_file_and_not_its_place(tmp_path: Path) -> None:
    path = write_hdf5(tmp_path / "x.hdf5")
    record = convert(path, tmp_path / "d", quiet=True).source
    assert record.uri == "x.hdf5" and record.files[0].bytes == path.stat().st_size
    assert str(tmp_path) not in (tmp_path / "d" / "manifest.json").read_text()


def test_an_error_in_a_worker_arrives_whole(tmp_path: Path) -> None:
    path = write_hdf5(tmp_path / "x.hdf5")
    with h5py.File(path, "r+") as file:
        file["actions"][617, 1] = np.nan
    with one_error("COLUMN", "column actions, step 617: step 17 of episode 24"):
        convert(path, tmp_path / "d", shard_bytes=9_000, workers=2, quiet=True)
    assert sorted(os.listdir(tmp_path)) == ["x.hdf5"]


def test_an_environment_that_is_not_registered_is_a_warning(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = str(write_hdf5(tmp_path / "x.hdf5"))
    for name, warned in (("my/Own-v0", True), ("Pendulum-v1", False)):
        main(["convert", path, str(tmp_path / name), "--environment", name])
        assert ("warning: Gymnasium: " in capfd.readouterr().err) is warned
        assert Manifest.read(tmp_path / name).environment.id == name


def test_environment_and_reference(tmp_path: Path) -> None:
    def found(name: str, told: dict[str, Any], **options: Any) -> tuple[str | None, float | None]:
        record = convert(source(**told), tmp_path / name, quiet=True, **options).environment
        scores = record.reference_scores
        return record.id, None if scores is None else scores.maximum

    gym, d4rl = {"environment_id": "Hopper-v5"}, {"reference_name": "hopper-medium-v2"}
    assert found("a", {}) == (None, None)
    assert found("b", gym) == ("Hopper-v5", 3234.3)
    assert found("c", gym, environment="Walker2d-v5") == ("Walker2d-v5", 4592.3)
    assert found("d", d4rl, reference="ant-medium-v2") == (None, 3879.7)


def test_nonfinite_values_are_refused_with_column_and_step(tmp_path: Path) -> None:
    columns = hopper_columns(STEPS)
    columns["rewards"][9] = -np.inf
    with one_error("COLUMN", "column rewards, step 9: step 2 of episode 2"):
        convert(ArraySource(columns, LENGTHS), tmp_path / "d", quiet=True)
    given = ArraySource(columns, LENGTHS)
    manifest = convert(given, tmp_path / "d", allow_nonfinite=True, quiet=True)
    assert manifest.statistics["rewards"].nonfinite == 1
    assert manifest.returns.count == len(LENGTHS) - 1
    found = open_dataset(tmp_path / "d").column("rewards")
    assert found.tobytes() == columns["rewards"].tobytes()


def column(name: str, *shape: int, dtype: str = "f4", value: int = 0) -> dict[str, Any]:
    return hopper_columns(STEPS) | {name: np.full((STEPS, *shape), value, "u1").astype(dtype)}


BOOL_BYTES = hopper_columns(STEPS) | {"f": np.full(STEPS, 2, "u1").view(bool)}


@pytest.mark.parametrize(
    ("given", "options", "code"),
    [
        (ArraySource(column("rewards", 2), LENGTHS), {}, "COLUMN"),
        (ArraySource(column("rewards", dtype="c8"), LENGTHS), {}, "COLUMN"),
        (ArraySource(column("Episode_Returns"), LENGTHS), {}, "COLUMN"),
        (ArraySource(BOOL_BYTES, LENGTHS), {}, "COLUMN"),
        (ArraySource(hopper_columns(0), [], terminated=[]), {}, "SOURCE_LAYOUT"),
        *((given, {}, "SOURCE_READ") for given in (5, [{"rewards": [1.0]}])),
        (source(), {"shard_bytes": 0}, "USAGE"),
        (source(), {"block_bytes": 0}, "USAGE"),
        (source(), {"block_bytes": 100}, "USAGE"),
        (source(), {"workers": 0}, "USAGE"),
        (source(), {"workers": 2}, "USAGE"),  # a source in memory: no other process can open it
        (source(), {"columns": []}, "USAGE"),
        (source(), {"columns": ["acts"]}, "COLUMN"),
        (source(), {"discrete": ["observations"]}, "COLUMN"),
        (source(), {"discrete": ["nothing"]}, "COLUMN"),
        (source(), {"discrete": "actions"}, "COLUMN"),
        (source(), {"reference": "hoper"}, "USAGE"),
        *((source(), {"environment": text}, "ENVIRONMENT") for text in ("", "a b", "a/b/c", "x\n")),
    ],
)
def test_what_cannot_be_converted_is_one_error(
    tmp_path: Path, given: Any, options: dict[str, Any], code: str
) -> None:
    call = lambda: convert(given, tmp_path / "d", quiet=True, **options)  # noqa: E731
    assert failing_code(call) == code
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("time_set_back", [False, True])
def test_a_source_that_changes_meanwhile_is_refused(tmp_path: Path, time_set_back: bool) -> None:
    path = write_hdf5(tmp_path / "x.hdf5")

    class Changing(ArraySource):
        def read(self, column: str, start: int, stop: int) -> npt.NDArray[Any]:
            before = os.stat(path)
            time.sleep(0.02)  # the clock of file times ticks every 4 ms or so
            with open(path, "r+b") as file:
                file.write(file.read(1))
            if time_set_back:
                os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
            return super().read(column, start, stop)

    changing = Changing(hopper_columns(STEPS), LENGTHS)
    object.__setattr__(changing.info, "files", (InputFile.find(path),))
    assert failing_code(lambda: convert(changing, tmp_path / "d", quiet=True)) == "SOURCE_CHANGED"
    assert sorted(os.listdir(tmp_path)) == ["x.hdf5"]


DIES = """
import os, signal, sys, threading, time
import psutil
from pathlib import Path
from gear_offline.data.convert.conversion import convert
from gear_offline.errors import GearError
def kill():
    while not list(Path(sys.argv[2]).parent.rglob("shard-*")):  # a worker is at work
        time.sleep(0.01)
    os.kill(psutil.Process().children()[0].pid, signal.SIGKILL)
threading.Thread(target=kill, daemon=True).start()
try:
    convert(sys.argv[1], sys.argv[2], shard_bytes=9_000, workers=2, quiet=True)
except GearError as error:
    print(error.code)
"""


def test_a_worker_that_dies_is_one_error(tmp_path: Path) -> None:
    path = write_hdf5(tmp_path / "x.hdf5", episodes=2_000)
    found = run_python("-c", DIES, path, tmp_path / "d", check=True)
    assert found.stdout.split() == ["WORKER_LOST"], found.stderr
    assert sorted(os.listdir(tmp_path)) == ["x.hdf5"]


def test_discrete_actions_are_stored_as_integers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    columns = hopper_columns(STEPS, action_dim=1)
    columns["actions"] = (np.arange(STEPS) % 7).astype(np.float32)
    convert(ArraySource(columns, LENGTHS), tmp_path / "a")
    assert "whole numbers from 0 to 6; if they" in capsys.readouterr().err
    manifest = convert(ArraySource(columns, LENGTHS), tmp_path / "b", discrete="actions")
    assert "whole numbers" not in capsys.readouterr().err
    assert manifest.spec["actions"].dtype == np.int32
    stored = open_dataset(tmp_path / "b").column("actions")
    assert stored.tolist() == columns["actions"].tolist()
    convert(source(), tmp_path / "c")
    assert "whole numbers" not in capsys.readouterr().err


def test_statistics_too_large_for_a_manifest_are_refused_before_writing(tmp_path: Path) -> None:
    columns = hopper_columns(STEPS) | {"frames": np.zeros((STEPS, 6_000_000), np.uint8)}
    wide = ArraySource(columns, LENGTHS)
    wide.read = lambda *values: pytest.fail("read")  # type: ignore[method-assign]
    with one_error("COLUMN", "column frames"):
        convert(wide, tmp_path / "d", quiet=True)
    assert os.listdir(tmp_path) == []


def test_ctrl_c_while_a_compressed_file_is_read_stops(tmp_path: Path) -> None:
    """The exception of Ctrl-C may be lost inside h5py; the conversion must stop all the same."""
    source = write_hdf5(tmp_path / "a.hdf5", episodes=400, length=500)
    script = (
        "import os, signal, sys, threading\n"
        "from gear_offline.__main__ import main\n"
        "from gear_offline.data.convert import shards as job\n"
        "before, calls = job._read_rows, []\n"
        "def slow(*a):\n"
        "    calls.append(1)\n"
        "    if len(calls) == 2: os.kill(os.getpid(), signal.SIGINT)\n"
        "    return before(*a)\n"
        "job._read_rows = slow\n"
        "sys.argv[1:1] = ['convert', '--shard-size', '100KB']\nsys.exit(main())\n"
    )
    done = run_python("-c", script, source, tmp_path / "out")
    assert done.returncode == 130 and "interrupted" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("suffix", [".csv", ".json", ".mat", ".pkl"])
def test_how_a_file_of_another_kind_comes_in_is_shown_and_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    pandas = pytest.importorskip("pandas")
    monkeypatch.chdir(tmp_path)
    columns = {name: np.arange(6.0) for name in ("observations", "actions", "rewards")}
    columns["timeouts"] = np.arange(6) % 3 == 2
    path = tmp_path / f"x{suffix}"
    if suffix == ".mat":
        scipy.io.savemat(path, columns)
    elif suffix == ".pkl":
        path.write_bytes(pickle.dumps(columns))
    else:
        frame = pandas.DataFrame(columns)
        frame.to_csv(path, index=False) if suffix == ".csv" else frame.to_json(path)
    with one_error("SOURCE_READ", f"{suffix} files are not read") as caught:
        open_source(path)
    shown = caught.value.remedy.split("in Python: ")[1]
    shown = (
        shown.removeprefix("if you trust it, ")
        .partition("; docs/")[0]
        .partition("; of a")[0]
        .partition("; a reader")[0]
    )
    modules = "import pickle, pandas, scipy.io, gear_offline as go"
    run_python("-c", f"{modules}; {shown}").check_returncode()
    with open_source("mine.parquet" if Path("mine.parquet").is_file() else "OUT") as source:
        assert source.episodes.lengths.tolist() == [3, 3]
        assert source.read("rewards", 0, 6).tolist() == columns["rewards"].tolist()
