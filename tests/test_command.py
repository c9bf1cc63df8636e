"""Ctrl-C from the first moment of a command: one line, exit code 130, no traceback."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from gear_offline.demo import main as demo

# An import hook raises the signal while `typer` is looked for, which the command line needs first.
WHILE_LOADING = """
import os, runpy, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
sys.argv = ["gear-offline", "--version"]
"""
# Python notes an interrupt that ends `exec`, and then ends by the signal whatever `sys.exit` says.
WHILE_COMPILING = """
import sys
from types import ModuleType
from gear_offline.command import main
def run():
    try:
        exec("raise KeyboardInterrupt")
    except KeyboardInterrupt:
        print("told", file=sys.stderr)
        return 130
sys.modules["gear_offline.cli"] = ModuleType("gear_offline.cli")
sys.modules["gear_offline.cli"].main = run
"""


def ended(script: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == ""
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "start",
    [
        "runpy.run_module('gear_offline', run_name='__main__')",
        "from gear_offline.command import main; sys.exit(main())",
    ],
)
def test_while_modules_load(start: str) -> None:
    assert ended(WHILE_LOADING + start) == (130, "error[INTERRUPTED]: stopped by the user\n")


def test_an_ignored_interrupt_stays_ignored() -> None:
    ignored = "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    script = WHILE_LOADING + ignored + "from gear_offline.command import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("gear-offline ")


def test_the_exit_code_is_130_where_python_would_end_by_the_signal() -> None:
    assert ended(WHILE_COMPILING + "sys.exit(main())") == (130, "told\n")


def test_the_installed_command_begins_there() -> None:
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    scripts = tomllib.loads(text)["project"]["scripts"]
    assert scripts == {"gear-offline": "gear_offline.command:main"}


def test_the_demo_ends_with_the_same_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(self: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gear_offline.demo.Demo.complete", interrupt)
    assert demo(["--out", str(tmp_path / "demo")]) == 130
    assert capsys.readouterr().err.startswith("error[INTERRUPTED]: stopped; run it again")
