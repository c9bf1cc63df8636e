"""Ctrl-C from the first moment of a command: one line, exit code 130, no traceback."""

from __future__ import annotations

import io
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from gear_offline.cli import command
from gear_offline.demo import main as demo

ROOT = Path(__file__).parents[1]
# An import hook raises the signal while a module is looked for: `typer`, which the command line
# needs first, or what a command loads.  As libraries do, it makes another error of an exception.
WHILE_LOADING = """
import os, runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background ignore it
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "{module}":
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                raise ImportError("an extension failed") from None
sys.meta_path.insert(0, Finder())
sys.argv = ["gear-offline", "recipes", "ls"]
"""
# Afterwards a command is interrupted as Python's programs are, to put away what it holds.
WHILE_WORKING = """
import os, signal, sys
from gear_offline.cli import main as cli
from gear_offline.cli.command import main
class Given:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
def run():
    try:
        {work}
    except KeyboardInterrupt:
        print("put away", file=sys.stderr)
        return 130
cli.main = run
sys.exit(main())
"""
# Python notes an interrupt that ends `exec`, and then ends by the signal whatever `sys.exit` says.
WHILE_COMPILING = """
import sys
from types import ModuleType
from gear_offline.cli.command import main
def run():
    try:
        exec("raise KeyboardInterrupt")
    except KeyboardInterrupt:
        print("told", file=sys.stderr)
        return 130
sys.modules["gear_offline.cli.main"] = ModuleType("gear_offline.cli.main")
sys.modules["gear_offline.cli.main"].main = run
"""


def ended(script: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == ""
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("start", "module"),
    [
        ("runpy.run_module('gear_offline', run_name='__main__')", "typer"),
        (
            "from gear_offline.cli.command import main; sys.exit(main())",
            "gear_offline.config.recipe",
        ),
    ],
)
def test_while_modules_load(start: str, module: str) -> None:
    script = WHILE_LOADING.format(module=module) + start
    assert ended(script) == (130, "error[INTERRUPTED]: stopped by the user\n")


@pytest.mark.parametrize(
    "work",
    [
        "os.kill(os.getpid(), signal.SIGINT)",
        "Given(); time.sleep(60)",  # Python passes over what `__del__` raises
        "sys.meta_path.insert(0, Finder()); import colorsys; time.sleep(60)",
    ],
)
def test_while_a_command_works(work: str) -> None:
    finder = WHILE_LOADING.partition("sys.meta_path")[0].format(module="colorsys")
    script = finder + "import time\n" + WHILE_WORKING.format(work=work)
    assert ended(script) == (130, "put away\n")


def test_an_ignored_interrupt_stays_ignored() -> None:
    ignored = "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    script = WHILE_LOADING.format(module="typer") + ignored
    script += "from gear_offline.cli.command import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "smoke" in done.stdout


def test_little_is_loaded_before_interrupts_are_handled() -> None:
    """As in an environment whose start-up loads nothing: each module is time for a traceback."""
    script = f"import os, sys; sys.path.insert(0, {str(ROOT)!r}); before = set(sys.modules)\n"
    script += "import gear_offline.cli.command\nprint(*sorted(set(sys.modules) - before))"
    words = [sys.executable, "-S", "-c", script]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) <= {
        *("gear_offline", "gear_offline.cli", "gear_offline.cli.command"),
        *("__future__", "_signal", "atexit"),
    }


def test_the_exit_code_is_130_where_python_would_end_by_the_signal() -> None:
    assert ended(WHILE_COMPILING + "sys.exit(main())") == (130, "told\n")


def test_the_installed_command_begins_there() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    scripts = tomllib.loads(text)["project"]["scripts"]
    assert scripts == {"gear-offline": "gear_offline.cli.command:main"}


def test_the_demo_ends_with_the_same_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gear_offline.cli.main.app", interrupted)
    assert demo(["--out", str(tmp_path / "demo")]) == 130
    first, second = capsys.readouterr().err.splitlines()
    assert first == "error[INTERRUPTED]: stopped by the user"
    assert second == "run the demo again to go on from here"


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_no_error(closed: str, tmp_path: Path) -> None:
    # what is opened next would get the stream's number, and what is printed to it
    script = "from gear_offline.cli.command import main; import sys; code = main()\n"
    script += f"open({str(tmp_path / 'code')!r}, 'w').write(str(code)); sys.exit(code)"
    words = [sys.executable, "-c", script, "recipes", "ls"]
    shell = ["sh", "-c", f'"$@" {closed}', "sh", *words]
    done = subprocess.run(shell, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert ("smoke" in done.stdout) == (">&-" not in closed.split())
    assert (tmp_path / "code").read_text() == "0"


@pytest.mark.parametrize(
    ("encoding", "printed"), [("utf-8", b"\xe2\x96\x88 \xff\n"), ("latin-1", b"? ?\n")]
)
def test_what_the_encoding_lacks_does_not_end_a_command(
    monkeypatch: pytest.MonkeyPatch, encoding: str, printed: bytes
) -> None:
    """A bar of a histogram, and a byte of a file's name that is no text."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    command._print_any_letter()
    print("\u2588 \udcff", flush=True)
    assert written.getvalue() == printed
