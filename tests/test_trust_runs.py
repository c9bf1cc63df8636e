"""Short runs of the programs behind docs/reliability.md; `make fuzz`, `make trust`: long ones."""

from __future__ import annotations

from typing import Any

import pytest

from tests.test_bad_input import run


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
    found: Any = run("kill_cycles", "--cycles", "3")
    assert found["checkpoints_written"] >= 3 and found["processes_killed"] >= 3
    left = ("processes_left", "objects_left", "descriptors_left")
    assert [found[key] for key in left] == [0, [], 0]


def test_the_cost_of_verification_can_be_measured() -> None:
    found: Any = run("verify_cost", "--steps", "20000", "--rounds", "2")
    assert found["bytes"] > 1_000_000 and found["scrub_gbps"] > 0
