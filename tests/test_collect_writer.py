"""The file appears whole or not at all, and leftovers of killed runs are removed."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gear_offline.export as writer_module
from gear_offline.collect.rollout import Episode
from gear_offline.collect.writer import D4rlWriter
from gear_offline.errors import InputError
from tests.support import failing_code


def make_episode(steps: int, *, maker: int = 0, seed: int = 0) -> Episode:
    rng = np.random.default_rng(seed)
    last = np.arange(steps) == steps - 1
    return Episode(
        columns={
            "observations": rng.normal(size=(steps, 3)).astype(np.float32),
            "actions": rng.normal(size=(steps, 2)).astype(np.float32),
            "rewards": rng.normal(size=steps).astype(np.float32),
            "terminals": last & bool(seed % 2),
            "timeouts": last & (not seed % 2),
        },
        maker=maker,
        reset_seed=seed,
        simulated_return=0.0,
    )


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 50))
def test_rows_are_those_of_the_episodes(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], chunk: int
) -> None:
    out = tmp_path_factory.mktemp("rows") / "a.hdf5"
    episodes = [make_episode(n, maker=i % 3, seed=i) for i, n in enumerate(lengths)]
    with pytest.MonkeyPatch.context() as patch, D4rlWriter(out) as writer:
        patch.setattr(writer_module, "CHUNK_ROWS", chunk)
        for episode in episodes[:-1]:
            writer.append(episode)
        writer.append(episodes[-1], rows=1)
        assert writer.steps == sum(lengths[:-1]) + 1
        writer.finish({"env_id": "x", "makers": [{"a": 1}]}, {"algorithm": "y"})
    with h5py.File(out) as file:
        for name in episodes[0].columns:
            expected = np.concatenate(
                [e.columns[name] for e in episodes[:-1]] + [episodes[-1].columns[name][:1]]
            )
            assert file[name].dtype == expected.dtype
            assert file[name].compression == "gzip"
            np.testing.assert_array_equal(file[name][:], expected)
        assert file["metadata/episode_maker"][:].tolist() == [e.maker for e in episodes]
        assert file["metadata/episode_reset_seed"][:].tolist() == list(range(len(episodes)))
        assert file["metadata/algorithm"][()] == b"y"
        assert json.loads(file.attrs["makers"]) == [{"a": 1}]


def test_equal_episodes_give_equal_bytes(tmp_path: Path) -> None:
    contents = []
    for name in ("a.hdf5", "b.hdf5"):
        with D4rlWriter(tmp_path / name) as writer:
            writer.append(make_episode(50))
            writer.finish({"env_id": "x"}, {"weights": np.ones(3)})
        contents.append((tmp_path / name).read_bytes())
    assert contents[0] == contents[1]


def test_nothing_is_left_without_finish(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), D4rlWriter(tmp_path / "a.hdf5") as writer:
        writer.append(make_episode(9_000))
        assert len(names(tmp_path)) == 1
        raise ZeroDivisionError
    assert names(tmp_path) == []


def test_an_existing_file_is_kept_unless_asked(tmp_path: Path) -> None:
    out = tmp_path / "a.hdf5"
    out.write_bytes(b"mine")
    with pytest.raises(InputError) as caught:
        D4rlWriter(out)
    assert caught.value.code == "OUTPUT_EXISTS"
    with D4rlWriter(out, overwrite=True) as writer:
        writer.append(make_episode(3))
        assert out.read_bytes() == b"mine"
        writer.finish({}, {})
    assert h5py.is_hdf5(out)
    assert names(tmp_path) == ["a.hdf5"]


def test_a_file_that_appeared_meanwhile_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "a.hdf5"
    with pytest.raises(InputError) as caught, D4rlWriter(out) as writer:
        writer.append(make_episode(3))
        out.write_bytes(b"mine")
        writer.finish({}, {})
    assert caught.value.code == "OUTPUT_EXISTS"
    assert out.read_bytes() == b"mine"
    assert names(tmp_path) == ["a.hdf5"]


def test_a_link_is_not_written_through(tmp_path: Path) -> None:
    other, out = tmp_path / "other", tmp_path / "a.hdf5"
    out.symlink_to(other)
    with pytest.raises(InputError):
        D4rlWriter(out)
    with D4rlWriter(out, overwrite=True) as writer:
        writer.append(make_episode(3))
        writer.finish({}, {})
    assert not other.exists() and not out.is_symlink()


def test_missing_folders_and_folders_as_targets_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        D4rlWriter(tmp_path / "none" / "a.hdf5")
    assert caught.value.code == "OUTPUT_WRITE"
    with pytest.raises(InputError) as caught:
        D4rlWriter(tmp_path, overwrite=True)
    assert caught.value.code == "OUTPUT_EXISTS"


def test_leftovers_of_a_killed_writer_are_swept_and_those_of_a_living_one_kept(
    tmp_path: Path,
) -> None:
    code = (
        "import sys, time; from pathlib import Path\n"
        "from gear_offline.collect.writer import D4rlWriter\n"
        "writer = D4rlWriter(Path(sys.argv[1])); print('ready', flush=True); time.sleep(60)"
    )
    out = tmp_path / "a.hdf5"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(out)], stdout=subprocess.PIPE, cwd=os.getcwd()
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        (leftover,) = names(tmp_path)
        with D4rlWriter(out) as living:
            assert leftover in names(tmp_path), "its writer lives"
            process.send_signal(signal.SIGKILL)
            process.wait()
            with D4rlWriter(out) as second:
                kept = names(tmp_path)
                assert leftover not in kept and len(kept) == 2
                second.append(make_episode(3))
                second.finish({}, {})
            assert living.steps == 0
    assert names(tmp_path) == ["a.hdf5"]


def test_other_hidden_files_are_not_swept(tmp_path: Path) -> None:
    mine = [".a.hdf5.notes.partial", ".b.hdf5.01234567.partial", ".a.hdf5.01234567"]
    for name in mine:
        (tmp_path / name).touch()
    with D4rlWriter(tmp_path / "a.hdf5") as writer:
        writer.append(make_episode(3))
        writer.finish({}, {})
    assert names(tmp_path) == sorted([*mine, "a.hdf5"])


@pytest.mark.parametrize("call", ["fcntl.flock", "os.open", "os.fsync"])
def test_what_the_system_refuses_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    def write() -> None:
        with D4rlWriter(tmp_path / "a.hdf5") as writer:
            writer.append(make_episode(3))
            writer.finish({}, {})

    with monkeypatch.context() as patched:
        patched.setattr(call, refuse)
        assert failing_code(write) == "OUTPUT_WRITE"
    assert names(tmp_path) == []


WRITES_TOO_MUCH = """
import resource, sys
from pathlib import Path
from gear_offline.collect.writer import D4rlWriter
from gear_offline.errors import GearError
from tests.test_collect_writer import make_episode
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
try:
    with D4rlWriter(Path(sys.argv[1])) as writer:
        for seed in range(40):
            writer.append(make_episode(1000, seed=seed))
        writer.finish({}, {})
except GearError as error:
    print(error.code, error)
"""


def test_a_full_disk_is_one_error_and_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITES_TOO_MUCH, str(tmp_path / "a.hdf5")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert found.stdout.startswith("OUTPUT_WRITE "), found.stderr
    assert len(found.stdout) < 300 and found.stdout.count("\n") == 1
    assert found.stderr == "" and names(tmp_path) == []


def test_closing_twice_is_fine(tmp_path: Path) -> None:
    writer = D4rlWriter(tmp_path / "a.hdf5")
    assert len(list(tmp_path.iterdir())) == 1
    for _ in range(2):
        writer.close()
        assert list(tmp_path.iterdir()) == []
