"""Short runs of the programs behind docs/reliability.md; `make fuzz`, `make trust`: long ones."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.test_bad_input import ROOT, run


def test_manifest_header_and_recipe_survive_fuzzing() -> None:
    found: Any = run("fuzz_text", "--inputs", "600", "--seed", "3")
    assert [document["target"] for document in found] == ["manifest", "header", "recipe"]
    for document in found:
        assert document["broken"] == []
        assert document["inputs"] == 600
        assert len(document["outcomes"]) >= 2, "some are refused, some accepted"


def test_every_class_of_byte_is_covered_by_a_digest() -> None:
    found: Any = run("flip_bits", "--flips", "800", "--checkpoint-flips", "600")
    assert found["dataset"]["flips"] >= 600 and len(found["dataset"]["classes"]) >= 15
    assert found["checkpoint"]["flips"] >= 500 and len(found["checkpoint"]["classes"]) == 6
    for part in ("dataset", "checkpoint"):
        assert (found[part]["silent"], found[part]["unnamed"]) == ([], [])


@pytest.mark.parametrize(("workers", "kills"), [(1, 10), (4, 3)])
def test_killed_conversions_leave_the_old_state_or_the_new(workers: int, kills: int) -> None:
    found: Any = run("kill_convert", "--workers", str(workers), "--kills", str(kills))
    assert found[0]["kills"] == kills and found[0]["broken"] == []


def test_killed_processes_leave_no_memory() -> None:
    found: Any = run("kill_tables", "--cycles", "8")
    left = ("processes_left", "objects_left", "descriptors_left", "memory_left")
    assert {key: found[key] for key in left} == {
        "processes_left": 0,
        "objects_left": [],
        "descriptors_left": 0,
        "memory_left": False,
    }


def test_killed_trainings_leave_nothing() -> None:
    found: Any = run("kill_cycles", "--cycles", "3", "--parallel", "2")
    assert found["cycles"] == 3 and not found["stopped"]
    assert found["checkpoints_written"] >= 3 and found["processes_killed"] >= 3
    broken = ("ended_by_themselves", "without_checkpoint", "processes_left", "descriptors_left")
    assert [found[key] for key in broken] == [0] * 4 and found["objects_left"] == []


def live_processes() -> dict[int, int]:
    """Return the parents of all live processes; zombies wait for whoever adopted them."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rsplit(")", 1)[1].split()[:2]
        except OSError:
            continue
        if state != "Z":
            found[int(path.parent.name)] = int(parent)
    return found


def descendants(process: int) -> set[int]:
    """Return the live processes that `process` has begun, and those that these have begun."""
    parents, found, new = live_processes(), set[int](), {process}
    while new:
        new = {child for child, parent in parents.items() if parent in new}
        found |= new
    return found


@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_trainings_end_with_the_program_that_kills_them(
    how: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # what is killed with SIGKILL leaves its folder
    command = [sys.executable, "-m", "tests.trust.kill_cycles", "--cycles", "500"]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [*command, "--parallel", "2"], cwd=ROOT, stdout=pipe, stderr=pipe, text=True
    ) as driver:
        assert driver.stderr is not None and "kills: 1 cycle" in driver.stderr.readline()
        deadline = time.monotonic() + 60
        while len(begun := descendants(driver.pid)) < 5:  # 2 workers, 2 trainers, who evaluates
            assert time.monotonic() < deadline
            time.sleep(0.01)
        driver.send_signal(how)
        said = driver.communicate(timeout=60)[0]
    deadline = time.monotonic() + 10
    while begun & live_processes().keys():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    if how == signal.SIGTERM:
        found = json.loads(said)
        assert found["stopped"] and found["cycles"] < 500 and driver.returncode == 1
        assert found["processes_left"] == 0 and found["objects_left"] == []


def test_the_cost_of_verification_can_be_measured() -> None:
    found: Any = run("verify_cost", "--steps", "20000", "--rounds", "2")
    assert found["bytes"] > 1_000_000 and found["scrub_gbps"] > 0
