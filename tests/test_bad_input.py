"""Bad input by name: one line with code, place and remedy, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.trust.corpus import CASES
from tests.trust.fuzz_hdf5 import FINDS

ROOT = Path(__file__).parents[1]


def run(module: str, *arguments: str) -> dict[str, object]:
    """Run a program of tests/trust, which forks and so needs a process without threads."""
    found = subprocess.run(
        [sys.executable, "-m", f"tests.trust.{module}", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.stdout, found.stderr
    document: dict[str, object] = json.loads(found.stdout)
    return document


def test_there_are_many_cases_of_every_kind() -> None:
    assert len(CASES) >= 400
    assert len({case.name for case in CASES}) == len(CASES)
    groups = Counter(case.name.partition("/")[0] for case in CASES)
    assert groups.keys() == {
        *("hdf5", "minari", "manifest", "shard", "recipe", "command", "checkpoint"),
        *("folder", "source"),
    }
    assert min(groups.values()) >= 30


@pytest.mark.parametrize("groups", ["hdf5/ minari/", "manifest/ shard/ recipe/ command/"])
def test_each_case_is_one_line_and_leaves_nothing(groups: str) -> None:
    found = run("run_corpus", *groups.split(), "--torch", "without")
    assert found["broken"] == {}
    assert found["cases"] == sum(
        case.name.startswith(tuple(groups.split())) for case in CASES if not case.needs_torch
    )


def test_a_sample_of_folders_and_shards_as_sources() -> None:
    """Most are cases of a file or of a dataset, which all run above."""
    found = run("run_corpus", "folder/", "source/", "--every", "5")
    assert found["broken"] == {}
    there = [case for case in CASES if case.name.startswith(("folder/", "source/"))]
    assert found["cases"] == len(there[::5])


def test_each_bad_checkpoint_is_one_line_and_leaves_nothing() -> None:
    assert run("run_corpus", "--torch", "with")["broken"] == {}


def test_a_sample_through_the_installed_interpreter() -> None:
    assert run("run_corpus", "--exec", "--every", "97", "--torch", "without")["broken"] == {}


def test_what_fuzzing_found_stays_found() -> None:
    assert list(FINDS.glob("*.bin"))
    assert run("fuzz_hdf5", "--runs", "11", "--seed", "9")["broken"] == []
