"""Completion of the command line, by the script that a shell is given."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(code: str, folder: Path, **variables: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    command = [sys.executable, "-c", code]
    result = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, check=True
    )
    assert result.stderr == ""
    return result.stdout


COMPLETE = """
import sys
from gear_offline.__main__ import main
try:
    main()
finally:
    assert "torch" not in sys.modules
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("runs/hopper-s0", "runs/hopper-s1", "runs/other", "mine"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("runs/hopper-s0/recipe.yaml", "runs/hopper-s1/recipe.yaml", "smokeless.yaml"):
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("sw", "sweep"),
        ("recipes va", "validate"),
        ("train smo", "smoke smokeless.yaml"),
        ("train runs/", "runs/hopper-s0 runs/hopper-s1"),
        ("train smoke train.st", "train.steps="),
        ("sweep smoke seed=1 optimizer.learning_rate", "optimizer.learning_rate="),
        ("evaluate ru", "runs/hopper-s0 runs/hopper-s1"),
        ("evaluate runs/hopper-s0 --vi", "--video"),
        ("evaluate nothing[", ""),
    ],
)
def test_words_are_completed(folder: Path, line: str, found: str) -> None:
    words = f"gear-offline {line}"
    shell = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    shown = run(COMPLETE, folder, _GEAR_OFFLINE_COMPLETE="complete_bash", **shell)
    assert shown.split() == found.split()


def test_bash_completes_with_the_script_it_is_given(folder: Path) -> None:
    if shutil.which("bash") is None:
        pytest.skip("no bash")
    script = run(COMPLETE, folder, _GEAR_OFFLINE_COMPLETE="source_bash")
    tool = folder / "gear-offline"
    tool.write_text(f"#!/bin/sh\nexec {sys.executable} -m gear_offline\n")
    tool.chmod(0o755)
    press = (
        "\nCOMP_WORDS=(gear-offline train hopper-medium-r); COMP_CWORD=2"
        "\n_gear_offline_completion gear-offline\necho ${COMPREPLY[@]}"
    )
    variables = {"PYTHONPATH": str(ROOT), "PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", script + press],
        env=os.environ | variables,
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["hopper-medium-replay"], done.stderr
