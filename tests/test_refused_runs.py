"""A run that is refused leaves nothing, and a run that is there is as it was."""

from pathlib import Path
from typing import Any

import pytest

import gear_offline as go
from gear_offline.runs.loop import train
from tests.support import failing_code, one_error, write_hdf5
from tests.training_support import tiny_recipe

pytestmark = pytest.mark.usefixtures("no_reports")

# found after the directory was made: with the data, with the model, and before the first step
REFUSED = [
    ("ENVIRONMENT", "evaluate.environment=CartPole-v1"),
    ("ENVIRONMENT", "evaluate.environment=NoSuch-v0"),
    ("MODEL", "model.max_timestep=4"),
    ("SELECTION", "selection.strategy=uniform_step"),
    ("DATASET_NOT_FOUND", "data.path=null"),
]


def content(folder: Path) -> dict[Path, tuple[int, bytes]]:
    """Return what is in a folder, and when it was last changed."""
    return {
        place: (place.lstat().st_mtime_ns, place.read_bytes() if place.is_file() else b"")
        for place in sorted(folder.rglob("*"))
    }


def refusal(data: Path, out: Path, *changes: str, resume: bool = False) -> str:
    recipe = tiny_recipe(data, *changes)
    return failing_code(lambda: train(recipe, out=out, resume=resume, quiet=True))


@pytest.mark.parametrize("resume", [False, True])
def test_a_new_run_that_is_refused_leaves_nothing(resume: bool, data: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    for code, change in REFUSED:
        for out in (tmp_path / "runs" / "a", tmp_path / "mine"):
            assert refusal(data, out, change, resume=resume) == code
            assert list(tmp_path.rglob("*")) == [tmp_path / "mine"], "what was there stays"


def test_a_run_that_is_there_is_left_as_it_was(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(tiny_recipe(data, "train.steps=5"), out=run, quiet=True)
    source = write_hdf5(tmp_path / "x.h5")
    other = {"data.path": str(tmp_path / "other"), "data.source": str(source)}
    with one_error("RUN_MISMATCH", "data.path was"):  # before anything is converted
        go.train(run, other, resume=True, quiet=True)
    assert not (tmp_path / "other").exists()
    for lock in ("kept", "lost"):  # as where only visible files were copied
        if lock == "lost":
            (run / ".lock").unlink()
        before = content(run)
        assert refusal(data, run) == "OUTPUT_EXISTS"
        for _, change in REFUSED:
            refusal(data, run, "train.steps=9", change, resume=True)
        assert refusal(data, run, "train.steps=4", resume=True) == "RUN_MISMATCH"
        assert refusal(data, run, "train.steps=9", "seed=7", resume=True) == "RUN_MISMATCH"
        assert content(run) == before


@pytest.mark.parametrize("name", ["metrics.jsonl", "evaluations.jsonl"])
def test_a_run_whose_records_are_damaged_is_left_as_it_was(
    name: str, data: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    train(tiny_recipe(data, "train.steps=5", "train.log_every=1"), out=run, quiet=True)
    lines = (run / name).read_bytes().splitlines(keepends=True)
    (run / name).write_bytes(b"damaged\n" + b"".join(lines))
    (run / "checkpoints" / ".partial-step-00000009").mkdir()  # a killed run left it
    longer = ("train.steps=9", "train.log_every=1", "train.keep_checkpoints=7")
    before = content(run)
    assert refusal(data, run, *longer, resume=True) == "RUN_DAMAGED"
    assert content(run) == before
    later = b'{"step": 99}\ndamaged\n'  # after the checkpoint: cut, and never read
    (run / name).write_bytes(b"".join(lines) + later)
    train(tiny_recipe(data, *longer), out=run, resume=True, quiet=True)
    assert b"damaged" not in (run / name).read_bytes()
    assert not (run / "checkpoints" / ".partial-step-00000009").exists()


def test_an_option_that_is_no_argument_is_told_with_the_way_to_give_it(tmp_path: Path) -> None:
    unknown: dict[str, Any] = {"steps": 5}
    with one_error("USAGE", r"'steps'; .* go\.train\('smoke', \{'train\.steps': \.\.\.\}\)"):
        go.train("smoke", out=tmp_path / "run", **unknown)
    with one_error("DATASET_NOT_FOUND"):
        go.train("paper", out=tmp_path / "run", quiet=True)
    assert not list(tmp_path.iterdir())
