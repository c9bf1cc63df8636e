"""Metrics: whole lines after a kill, no step twice after a resume, strict JSON."""

import errno
import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gear_offline.artifacts.json_lines import AppendedFile, read_records, truncate_records
from gear_offline.artifacts.records import EvaluationReport
from gear_offline.runs.run import best_of
from tests.support import failing_code, one_error


def test_records_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with AppendedFile(path) as lines:
        lines.append({"step": 1, "loss": 0.1 + 0.2})
        lines.append({"step": 2, "loss": math.nan, "parts": [1.0, math.inf, {"x": -math.inf}]})
    lines.close()  # again: nothing
    assert read_records(path) == [
        {"step": 1, "loss": 0.1 + 0.2},
        {"step": 2, "loss": None, "parts": [1.0, None, {"x": None}]},
    ]
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


@settings(max_examples=60)
@given(
    steps=st.lists(st.integers(1, 20), unique=True).map(sorted),
    last=st.integers(0, 21),
    torn=st.integers(0, 30),
)
def test_a_kill_at_any_byte_leaves_a_file_that_goes_on(
    tmp_path: Path, steps: list[int], last: int, torn: int
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.unlink(missing_ok=True)
    with AppendedFile(path) as lines:
        for step in steps:
            lines.append({"step": step, "loss": step / 7})
    whole = path.read_bytes()
    cut = max(0, len(whole) - torn)
    path.write_bytes(whole[:cut])
    survivors = whole[:cut].count(b"\n")
    assert [r["step"] for r in read_records(path)] == steps[:survivors]

    expected = [step for step in steps[:survivors] if step <= last]
    truncate_records(tmp_path, last_step=last)
    assert [r["step"] for r in read_records(path)] == expected
    with AppendedFile(path) as lines:
        lines.append({"step": last + 1, "loss": 0.5})
    assert [r["step"] for r in read_records(path)] == [*expected, last + 1]


def test_a_line_that_is_no_record_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for line in "not json", "[1]", '{"loss": 1}', '{"step": "x"}', "null", '{"step": Infinity}':
        path.write_text('{"step": 1}\n' + line + '\n{"step": 2}\n')
        with one_error("RUN_DAMAGED", r"metrics.jsonl line 2"):
            read_records(path)


def test_only_files_of_the_run_are_read_and_written(tmp_path: Path) -> None:
    """A resumed run must not cut a file that somebody linked as its metrics, nor wait at a pipe."""
    path, other, missing = (tmp_path / name for name in ("metrics.jsonl", "other", "missing"))
    other.write_text("mine")
    makers: list[Callable[[], object]] = [
        *(lambda: path.symlink_to(other), lambda: path.symlink_to(missing)),
        *(lambda: os.mkfifo(path), path.mkdir),
    ]
    for make in makers:
        make()
        for call in (lambda: read_records(path), lambda: truncate_records(tmp_path, last_step=3)):
            assert failing_code(call) == "RUN_DAMAGED"
        path.rmdir() if path.is_dir() else path.unlink()
    assert other.read_text() == "mine" and not missing.exists()


def test_best_is_the_highest_return_and_the_latest_of_equals() -> None:
    """Nothing is larger than NaN, and the best checkpoint is the one that stays."""
    values = (math.nan, 3.0, 3.0, math.inf, 2.0, None)
    reports = [
        EvaluationReport(step=step).model_copy(update={"mean_return": value})
        for step, value in enumerate(values)
    ]
    best = best_of(reports)
    assert best is not None and best.step == 2
    assert best_of(reports[-1:]) is None


def test_lines_that_the_disk_takes_later_or_in_part_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics, write, room = AppendedFile(tmp_path / "metrics.jsonl"), os.write, 9

    def nearly_full(file: int, content: bytes) -> int:
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = write(file, content[:room])
        room -= done
        return done

    monkeypatch.setattr(os, "write", nearly_full)
    metrics.append({"step": 5, "loss": 0.5})
    metrics.append({"step": 6, "loss": 0.25})
    with pytest.raises(OSError, match="No space left"):
        metrics.sync()
    assert read_records(tmp_path / "metrics.jsonl") == []
    room = 1000
    metrics.append({"step": 7, "loss": 0.125})
    metrics.close()
    lines = read_records(tmp_path / "metrics.jsonl")
    assert lines == [{"step": step, "loss": 2.0 ** (4 - step)} for step in (5, 6, 7)]
