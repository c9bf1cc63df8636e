"""Short runs of the programs of `make trust`."""

import json
from typing import Any

import pytest

from tests.forks import run_forked
from tests.support import run_python


def run(program: str, *arguments: str, begin: Any = run_forked) -> Any:
    """Return what a program of `tests.trust` prints, which must find nothing broken.

    Those that begin in a process of their own need no torch, or must not have its address space.
    """
    done = begin("-m", f"tests.trust.{program}", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_every_class_of_byte_is_covered_by_a_digest() -> None:
    found = run("flip_bits", "--flips", "150", "--checkpoint-flips", "90")
    for part, (flips, classes) in {"dataset": (120, 15), "checkpoint": (80, 6)}.items():
        assert found[part]["flips"] >= flips and len(found[part]["classes"]) >= classes


def test_damaged_hdf5_is_refused_or_converted_and_never_crashes() -> None:
    found = run("fuzz_hdf5", "--runs", "40", begin=run_python)
    assert {"converted", "SOURCE_READ"} <= set(found["outcomes"])


def test_killed_conversions_leave_the_old_state_or_the_new() -> None:
    found = run("kill_convert", "--workers", "1", "4", "--kills", "1", begin=run_python)
    assert found["points"] > 60 and set(found["seen_after"]) == {"absent", "old", "new"}


def test_killed_actors_and_learners_of_growing_data_lose_nothing() -> None:
    assert run("kill_grow", "--kills", "6")["admissions"] > 3


@pytest.mark.parametrize("options", [("--kills", "4"), ("--kills", "3", "--background")])
def test_a_run_survives_sigkill_at_any_instant(options: tuple[str, ...]) -> None:
    """Also inside the thread that writes checkpoints, and with evaluations under way."""
    assert run("kill_train", "--seed", "7", *options)["runs"]
