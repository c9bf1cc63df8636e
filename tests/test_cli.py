"""The command line: a frozen surface, one-line errors, exit codes, stdout for results only."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import typer

from gear_offline.cli import main as cli
from gear_offline.cli.values import parse_count, parse_list, parse_numbers, parse_shares, parse_size
from gear_offline.core.progress import Progress
from gear_offline.errors import InputError
from tests.hdf5_files import write
from tests.support import failing_code

# New knobs go into recipes; a change of this list is a change of the product's surface.
SURFACE = {
    "convert": "source out shard-size workers columns discrete rule environment reference "
    "allow-nonfinite overwrite quiet",
    "export": "dataset out columns overwrite quiet",
    "inspect": "dataset verify json quiet",
    "collect": "environment out policy quality mix steps exact environments action-noise seed "
    "train-steps gate save-policy overwrite json quiet",
    "recipes ls": "json",
    "recipes cp": "name target",
    "recipes validate": "recipe overrides",
    "train": "recipe overrides out resume quiet",
    "evaluate": "run targets episodes environment checkpoint seed device out json quiet",
    "sweep": "recipe overrides seeds out mode parallel json quiet",
    "strategies": "recipe overrides strategies train seeds threshold jobs out json quiet",
    "plan": "recipe overrides nodes gpus nic-gbps nics hardware host-memory disk-rate data columns "
    "episode-length json",
    "doctor": "json",
}


def surface() -> dict[str, str]:
    found = {}

    def walk(command: object, path: str) -> None:
        children = getattr(command, "commands", None)
        if children is not None:
            for name, child in children.items():
                walk(child, f"{path} {name}".strip())
            return
        words = []
        for parameter in getattr(command, "params", []):
            if parameter.param_type_name == "argument":
                words.append(parameter.name)
            elif "--help" not in parameter.opts:
                words.append(next(o for o in parameter.opts if o.startswith("--"))[2:])
        found[path] = " ".join(words)

    walk(typer.main.get_command(cli.app), "")
    return found


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gear_offline", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


def test_surface_is_frozen() -> None:
    assert surface() == SURFACE


@pytest.mark.parametrize("command", sorted(SURFACE))
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*command.split(), "--help"]) == 0
    shown = capsys.readouterr().out
    assert "Usage: gear-offline" in shown
    for word in SURFACE[command].split():
        assert word.lower() in shown.lower()


@pytest.mark.parametrize(
    "words",
    [["frobnicate"], ["convert"], ["convert", "a", "b", "--workers", "0"], ["train", "--nope"]],
)
def test_wrong_usage_is_one_line_and_exit_2(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err.startswith("error[USAGE]: ") and streams.err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "smoke", "--train.steps=5"], "; write train.steps=VALUE without dashes\n"),
        (["train", "smoke", "--steps", "5"], "; write train.steps=VALUE without dashes\n"),
        (["sweep", "smoke", "--batch-size=5"], "; write loader.batch_size=VALUE without dashes\n"),
        (["train", "smoke", "--stepz"], "; see gear-offline train --help\n"),
        (["inspect", "--steps"], "; see gear-offline inspect --help\n"),
        (["recipes", "show"], "command 'show'; see gear-offline recipes --help\n"),
        (["train", "--nope"], "; see gear-offline train --help\n"),
    ],
)
def test_wrong_usage_says_the_way_out(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    assert capsys.readouterr().err.endswith(said)


def test_the_overview_names_every_command_in_whole_words(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["--help"]) == 0
    _, _, listed = capsys.readouterr().out.partition("Commands:")
    assert "convert" in listed and "..." not in listed


@pytest.mark.parametrize("mark", ["metrics.jsonl", ".lock"])  # a kill or a copy leaves one
def test_a_run_that_is_named_is_resumed_where_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: str
) -> None:
    asked: list[Path | None] = []

    def train(recipe: object, *, out: Path | None, **_: object) -> Path:
        asked.append(out)
        return tmp_path

    monkeypatch.setattr("gear_offline.runs.trainer.train", train)
    run = tmp_path / "mine"
    run.mkdir()
    (run / "recipe.yaml").write_text("base: smoke\n")
    (run / mark).touch()
    for words in (
        [str(run), "--resume"],
        [str(run / "recipe.yaml"), "--resume"],
        [str(run)],
        ["smoke", "--resume"],
        [str(run), "--resume", "--out", "other"],
    ):
        assert cli.main(["train", *words]) == 0
    assert asked == [run, run, None, None, Path("other")]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["convert", "nothing.hdf5", "out"], "SOURCE_READ"),
        (["inspect", "nothing"], ""),
        (["train", "nothing"], "RECIPE"),
        (["evaluate", "nothing"], ""),
        (["recipes", "validate", "nothing"], "RECIPE"),
        (["recipes", "cp", "nothing"], "RECIPE"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    words: list[str],
    code: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(words) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err.startswith(f"error[{code}") and streams.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    found = run("inspect", str(tmp_path / "nothing"), "--debug")
    assert found.returncode == 2 and "Traceback" in found.stderr
    assert "Traceback" not in run("inspect", str(tmp_path / "nothing")).stderr


def test_unexpected_error_is_exit_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def explode(**_: object) -> None:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(cli, "app", explode)
    assert cli.main([]) == 1
    assert capsys.readouterr().err.startswith("error[INTERNAL]: RuntimeError: two lines")


def test_interrupt_is_exit_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "app", interrupt)
    assert cli.main([]) == 130
    assert capsys.readouterr().err.startswith("error[INTERRUPTED]")
    monkeypatch.setattr(cli, "app", lambda **_: 130)  # how typer reports Ctrl-C in a command
    assert cli.main([]) == 130
    assert capsys.readouterr().err.startswith("error[INTERRUPTED]")


@pytest.mark.parametrize("words", [[], ["recipes"]])
def test_without_a_command_the_help_is_shown(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    shown = capsys.readouterr().err
    assert "Commands" in shown and shown.count("\n") > 5 and "error[" not in shown


def test_version_and_doctor_through_the_installed_command() -> None:
    assert run("--version").stdout.startswith("gear-offline ")
    document = json.loads(run("doctor", "--json").stdout)
    assert isinstance(document, dict)


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [("1048576", 1 << 20), ("256MiB", 256 << 20), ("2GB", 2 * 10**9), ("0.5 GiB", 1 << 29)],
)
def test_sizes(text: str, bytes_: int) -> None:
    assert parse_size(text) == bytes_


@pytest.mark.parametrize("text", ["", "MiB", "-1", "0", "1XB", "1e400", "nan"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_size(text)
    assert caught.value.code == "SIZE"


@pytest.mark.parametrize("text", ["", ",", " , ,"])
def test_lists_that_name_nothing_are_refused(text: str) -> None:
    assert parse_list(None, "a,b") is None
    assert parse_numbers(None) is None
    assert parse_shares(None) is None
    assert failing_code(lambda: parse_list(text, "a,b")) == "USAGE"
    assert failing_code(lambda: parse_numbers(text)) == "USAGE"
    assert failing_code(lambda: parse_shares(text)) == "USAGE"


def test_lists() -> None:
    assert parse_list(" rewards, actions,", "a,b") == ["rewards", "actions"]
    assert parse_numbers("3600, -1.5") == [3600.0, -1.5]
    assert parse_shares("level:0.5=1, expert = 2") == {"level:0.5": 1.0, "expert": 2.0}
    for text in ("replay", "replay=much", "replay=1,replay=2"):
        assert failing_code(partial(parse_shares, text)) == "USAGE"


@pytest.mark.parametrize(
    ("text", "count"), [("100000", 10**5), ("1e5", 10**5), ("2.5E4", 25_000), ("1_000", 1000)]
)
def test_counts(text: str, count: int) -> None:
    assert parse_count(text, "--steps") == count


@pytest.mark.parametrize(
    "text", ["", "1.5", "1e-3", "0", "-3", "many", "nan", "inf", "1e30", "1e999999999", "9" * 5000]
)
def test_counts_that_are_none(text: str) -> None:
    assert failing_code(lambda: parse_count(text, "--steps")) == "USAGE"


@pytest.mark.parametrize("words", ["recipes ls", "recipes ls --json", "doctor", "--help"])
def test_a_full_standard_output_is_one_error(words: str) -> None:
    command = [sys.executable, "-m", "gear_offline", *words.split()]
    with open("/dev/full", "w") as full:
        found = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert found.returncode == 1
    assert found.stderr.startswith("error[OUTPUT_WRITE]: no space left: ")
    assert "standard output" in found.stderr and found.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (MemoryError(), "MEMORY"),
        (MemoryError("Unable to allocate 1 PiB"), "MEMORY"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "MEMORY"),
        (OSError(errno.ENOSPC, "No space left on device", "file"), "OUTPUT_WRITE"),
        (PermissionError(errno.EACCES, "Permission denied", "file"), "SYSTEM"),
    ],
)
def test_what_no_command_has_told_in_its_own_words(
    error: Exception,
    code: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def explode(**_: object) -> None:
        raise error

    monkeypatch.setattr(cli, "app", explode)
    assert cli.main([]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"error[{code}]: ") and said.count("\n") == 1


def test_names_in_files_of_strangers_do_not_steer_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "mine.hdf5", {"\x1b[31mobs": [1.0], "rewards": [1.0]})
    assert cli.main(["convert", str(file), str(tmp_path / "d")]) == 2
    assert "found: \\x1b[31mobs, rewards" in capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Progress("convert mine [best].hdf5", total=1):
        pass
    assert "convert mine [best].hdf5" in capsys.readouterr().err
