"""The command line: a frozen surface, one-line errors, exit codes, stdout for results only."""

import ast
import errno
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import typer

import gear_offline.__main__ as command
from gear_offline.artifacts.checkpoint import seal
from gear_offline.cli import main as cli
from gear_offline.cli.values import parse_options
from gear_offline.config.files import recipe_paths
from gear_offline.config.problems import dotted_fields
from gear_offline.config.recipe import Recipe
from gear_offline.errors import GearError
from gear_offline.runs.loop import train_run
from gear_offline.sweep.results import steps_done
from tests.hdf5_files import write
from tests.support import ROOT, Captured, Patch, run_python
from tests.training_support import tiny_recipe

# New knobs go into recipes; a change of this list is a change of the product's surface.
SURFACE = {
    "convert": "source out shard-size workers ray columns discrete rename reader map where "
    "histories video resize rule ends shift environment environment-options reference "
    "allow-nonfinite overwrite quiet",
    "export": "dataset out columns overwrite quiet",
    "value": "data out with checkpoint device overwrite quiet",
    "push": "what name task private model",
    "inspect": "dataset verify full json quiet",
    "audit": "dataset against full json quiet",
    "collect": "environment out environment-options policy quality steps exact action-noise seed "
    "train-steps gate histories overwrite json quiet",
    "recipes ls": "json",
    "recipes show": "recipe",
    "recipes cp": "recipe target",
    "recipes validate": "recipe key=value",
    "train": "recipe key=value out resume checkpoint quiet",
    "sync": "run tracker project",
    "export-policy": "run out task overwrite model",
    "evaluate": "run targets episodes episodes-of-memory sample context-length "
    "environment environment-options checkpoint seed device out video model json quiet",
    "sweep": "recipe key=value seeds out parallel ray json quiet",
    "choose": "run... data targets checkpoint gamma critics steps seed device out overwrite model "
    "json quiet",
    "blame": "run first..last device model json quiet",
    "strategies": "recipe key=value strategies train seeds parallel ray out json quiet",
    "plan": "recipe key=value nodes gpus nic-gbps hardware host-memory disk-rate data columns json",
    "doctor": "json",
    "act": "run environment environment-options actors episodes target action-noise seed model "
    "json quiet",
    "runs ls": "folder json",
    "runs show": "run json",
    "runs compare": "run run... out overwrite json",
}


PROGRAM = [sys.executable, "-m", "gear_offline"]
PIPES: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}


def commands(node: Any = None, path: str = "") -> dict[str, Any]:
    """Return every command by its words."""
    node = node or typer.main.get_command(cli.app)
    if not hasattr(node, "commands"):
        return {path: node}
    inner = [commands(child, f"{path} {name}".strip()) for name, child in node.commands.items()]
    return {name: child for group in inner for name, child in group.items()}


def words_of(parameters: Any) -> str:
    words = []
    for parameter in parameters:
        if parameter.param_type_name == "argument":
            words.append((parameter.metavar or parameter.name).lower())
        elif "--help" not in parameter.opts:
            words.append(next(o for o in parameter.opts if o.startswith("--"))[2:])
    return " ".join(words)


def said(capsys: Captured, *words: str, code: int = 2) -> str:
    """Return the one line that a command ends with."""
    assert cli.main([*words]) == code
    streams = capsys.readouterr()
    assert streams.out == "" and streams.err.count("\n") == 1
    return streams.err


def test_surface_is_frozen() -> None:
    assert {name: words_of(node.params) for name, node in commands().items()} == SURFACE


@pytest.mark.parametrize("name", sorted(SURFACE))
def test_every_command_has_help_and_examples_that_parse(name: str, capsys: Captured) -> None:
    assert cli.main(["help", *name.split()]) == 0
    shown = capsys.readouterr().out
    assert all(word in shown.lower() for word in SURFACE[name].split())
    assert max(map(len, shown.splitlines())) <= 80
    _, title, rest = shown.partition("Examples")
    lines = [line.strip() for line in rest.splitlines() if line.strip()]
    assert title and lines and min(lines, key=len) == lines[0], "the plainest comes first"
    for line in lines:
        tool, *words = shlex.split(line)
        assert tool == "gear-offline" and " ".join(words).startswith(name)
        words = words[len(name.split()) :]
        commands()[name].make_context(name, words, resilient_parsing=False).close()


def test_the_overview_has_groups_and_the_version(capsys: Captured) -> None:
    for words, code in (["--help"], 0), ([], 2), (["recipes"], 2):
        assert cli.main(words) == code
        streams = capsys.readouterr()
        shown = streams.out + streams.err
        groups = ("Usage",) if words == ["recipes"] else ("─ Data ─", "─ Train ─", "─ Machines ─")
        assert all(group in shown for group in groups) and "error[" not in shown
    for option in ("--version", "-V"):
        assert cli.main([option]) == 0
        assert capsys.readouterr().out.startswith("gear-offline ")


@pytest.mark.parametrize(
    ("words", "end"),
    [
        ("frobnicate", "; see gear-offline --help\n"),
        ("convert", "; see gear-offline convert --help\n"),
        ("convert a b --workers 0", "; see gear-offline convert --help\n"),
        ("train smoke --train.steps=5", "; write train.steps=VALUE without dashes\n"),
        ("train smoke --steps 5", "; write train.steps=VALUE without dashes\n"),
        ("sweep smoke --batch-size=5", "; write loader.batch_size=VALUE without dashes\n"),
        ("train smoke --gpu", "; write train.device=cuda without dashes\n"),
        ("train smoke --zzz", "; see gear-offline train --help\n"),
        ("inspect --steps", "; see gear-offline inspect --help\n"),
        ("recipes list", "; see gear-offline recipes --help\n"),
        ("evaluate run --targets 3600 1800", "as one word: --targets 3600,1800\n"),
        ("plan smoke --data lots", "; see gear-offline plan --help\n"),
        ("plan smoke --nodes two", "; see gear-offline plan --help\n"),
        ("strategies smoke --seeds 5", "; add --train\n"),
        (
            "convert a b --rename a=b --quiet --rename=c=d",
            "given twice; join its parts by commas\n",
        ),
        ("evaluate run --env A-v0 --environment B-v0", "given twice; keep one of them\n"),
        ("runs compare a b --out x.svg --out y.svg", "given twice; keep one of them\n"),
        *(
            (
                f"{command} smoke train.steps=5 seed=1 train.steps=6",
                "given twice; keep one of them\n",
            )
            for command in ("train", "plan", "strategies", "recipes validate")
        ),
    ],
)
def test_wrong_usage_is_one_line_that_says_the_way_out(
    words: str, end: str, capsys: Captured
) -> None:
    line = said(capsys, *words.split())
    assert line.startswith("error[USAGE]: ") and line.endswith(end)


def test_a_name_of_something_else_is_said(
    tmp_path: Path, monkeypatch: Patch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    line = said(capsys, "evaluate", "smoke")
    assert "the name of a recipe, not a run" in line and "`gear-offline train smoke` makes" in line
    assert "there is no file nosuch.yaml" in said(capsys, "train", "nosuch.yaml")


def test_bad_input_is_one_line_and_exit_2(
    tmp_path: Path, monkeypatch: Patch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    for words, code in {
        "convert nothing.hdf5 out": "SOURCE_READ",
        "inspect nothing": "DATASET_NOT_FOUND",
        "train nothing": "RECIPE",
        "evaluate nothing": "",
        "recipes validate nothing": "RECIPE",
        "recipes show nothing": "RECIPE",
        "recipes cp nothing": "RECIPE",
    }.items():
        assert said(capsys, *words.split()).startswith(f"error[{code}")
        assert list(tmp_path.iterdir()) == []


TYPO = "trian.steps=5"


MISTAKES = """
USAGE: evaluate run --video film.avi
USAGE: evaluate run --targets nan
USAGE: evaluate run --seed -1
USAGE: evaluate run --episodes 0
USAGE: evaluate run --device tpu
ENVIRONMENT: evaluate run --environment unknown
OUTPUT_EXISTS: evaluate run --environment Pendulum-v1 --video there.gif
USAGE: plan smoke --hardware nonsense
DATASET_NOT_FOUND: plan paper data.path=note.txt
DATASET_NOT_FOUND: sweep smoke data.path=note.txt
SELECTION: sweep smoke selection.strategy=unifrm
DATASET_NOT_FOUND: strategies paper data.path=note.txt
RUN_NOT_FOUND: push nothing hub:me/mine
OUTPUT_WRITE: push run mine
RUN_NOT_FOUND: blame nothing 2..3
USAGE: blame run 3..2
USAGE: blame run 20..30
OUTPUT_EXISTS: evaluate run --out note.txt
OUTPUT_WRITE: evaluate run --out nowhere/result.json
RUN_NOT_FOUND: evaluate run --checkpoint 17
RUN_NOT_FOUND: evaluate data
MODEL: evaluate run --model nowhere.py:Mine
MODEL: evaluate foreign
OUTPUT_WRITE: export-policy run policy.pt
OUTPUT_EXISTS: export-policy run data
OUTPUT_EXISTS: export-policy run note.onnx
MODEL: export-policy foreign policy
DATASET_NOT_FOUND: train smoke data.path=note.txt
DATASET_NOT_FOUND: train paper data.path=run
OUTPUT_EXISTS: train smoke --out data
OUTPUT_EXISTS: train paper data.path=data --out run
RUN_MISMATCH: train run --resume model.hidden_size=64
RUN_MISMATCH: train run --resume train.steps=1
RUN_NOT_FOUND: train run --checkpoint 17
MODEL: train smoke model.kind=nowhere.py:Mine
RECIPE: train smoke train.callbacks=nowhere.py:Mine
RECIPE: train smoke train.steps=0
RECIPE: train smoke model.heads=3
RECIPE: train smokey
SELECTION: train smoke selection.strategy=unifrm
ENVIRONMENT: train smoke evaluate.environment=Nothing-v0
RECIPE: sweep smoke train.steps=0,1
USAGE: sweep smoke --seeds 0
OUTPUT_EXISTS: sweep smoke --out data
SELECTION: strategies smoke --strategies unifrm
RUN_NOT_FOUND: act nothing
MODEL: value data out --with run
SOURCE_READ: convert note.txt out
COLUMN: convert mine.hdf5 out --columns nothing
COLUMN: convert mine.hdf5 out --rename nothing=rewards
"""


def test_what_text_tells_is_told_before_torch_is_loaded(tmp_path: Path, data: Path) -> None:
    shutil.copytree(data, tmp_path / "data")
    run = train_run(
        tiny_recipe(data, "train.steps=2", "evaluate.episodes=0"), out=tmp_path / "run", quiet=True
    )
    shutil.copytree(run, tmp_path / "foreign")
    state = tmp_path / "foreign" / "checkpoints" / "step-00000002" / "state.json"
    document = json.loads(state.read_bytes())
    document["recipe"]["model"]["kind"] = "theirs.py:Model"
    document.pop("digest")
    state.write_bytes(seal(document))
    for name in ("note.txt", "note.onnx", "there.gif"):
        (tmp_path / name).write_text("a note")
    zeros = {"observations": [[0.0]] * 3, "actions": [[0.0]] * 3, "rewards": [0.0] * 3}
    write(tmp_path / "mine.hdf5", zeros | {"terminals": [False, False, True]})
    commands = ("train", "plan", "sweep", "recipes validate", "strategies")
    lines = [f"RECIPE: {words} paper {TYPO}" for words in commands] + MISTAKES.split("\n")[1:-1]
    script = "import sys; from gear_offline.cli.main import main\n"
    for number, line in enumerate(lines):
        heavy = {"torch"} if number >= len(commands) else {"torch", "gymnasium", "h5py", "numpy"}
        script += f"print({line!r}, main({line.split()[1:]}), sorted({heavy} & set(sys.modules)))\n"
    done = run_python("-c", script, check=True, cwd=tmp_path)
    assert done.stdout.splitlines() == [f"{line} 2 []" for line in lines], done.stderr
    told = [line for line in done.stderr.splitlines() if line.startswith("error[")]
    assert [text.partition("]")[0][6:] for text in told] == [
        line.partition(":")[0] for line in lines
    ]
    assert all("did you mean 'train.steps'" in text for text in told[: len(commands)])


def test_training_says_what_it_will_do_before_torch_is_loaded(tmp_path: Path) -> None:
    line = [*PROGRAM, "train", "smoke", "train.steps=500"]
    with subprocess.Popen(line, **PIPES, cwd=tmp_path) as process:
        assert process.stderr is not None
        first = process.stderr.readline()
        assert first == "smoke: 500 steps, the first 5 of them warm-up; seed 0\n"
        loaded = Path(f"/proc/{process.pid}/maps").read_text()
        assert "libtorch" not in loaded
        process.kill()


def test_debug_shows_the_traceback(tmp_path: Path, capsys: Captured) -> None:
    for words, shown in (([], False), (["--debug"], True)):
        assert cli.main(["inspect", str(tmp_path / "nothing"), *words]) == 2
        assert ("Traceback" in capsys.readouterr().err) is shown


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (MemoryError(), "error[MEMORY]: out of memory: Python has no more; "),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: x"), "error[MEMORY]: "),
        (OSError(errno.ENOSPC, "No space left on device", "f"), "error[OUTPUT_WRITE]: no space"),
        (PermissionError(errno.EACCES, "Permission denied", "file"), "error[SYSTEM]: "),
        (RuntimeError("two\nlines"), "error[INTERNAL]: RuntimeError: two lines; run again"),
        (GearError("INTERRUPTED", "stopped", remedy="do x"), "stopped; do x\n"),
    ],
)
def test_any_error_is_one_line(
    error: Exception, line: str, monkeypatch: Patch, capsys: Captured
) -> None:
    monkeypatch.setattr(cli, "app", Mock(side_effect=error))
    assert said(capsys, code=1).startswith(line)


LOUD = """
import atexit, ctypes, os
from tests.evaluation_support import Given, gymnasium
print("imported")
atexit.register(print, "at the end")
class Loud(Given):
    def reset(self, **options):
        os.write(1, b"a C library")
        ctypes.CDLL(None).puts(b"with a buffer")
        print("a print")
        return super().reset(**options)
gymnasium.register("Loud-v0", "loud:Loud", max_episode_steps=5)
"""


def test_stdout_is_one_document_whatever_an_environment_prints(tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text(LOUD)
    words = ["collect", "loud:Loud-v0", "x.hdf5", "--steps=5", "--json", "-q"]
    variables = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    done = run_python("-m", "gear_offline", *words, cwd=tmp_path, variables=variables)
    assert json.loads(done.stdout)["environment_id"] == "loud:Loud-v0", done.stderr
    for words_of in ("imported", "a C library", "with a buffer", "a print", "at the end"):
        assert words_of in done.stderr


def test_ctrl_c_is_exit_130_and_no_error(monkeypatch: Patch, capsys: Captured) -> None:
    for mock in (Mock(return_value=130), Mock(side_effect=KeyboardInterrupt)):  # typer's, Python's
        monkeypatch.setattr(cli, "app", mock)
        assert command.main() == 130
        assert capsys.readouterr().err == "interrupted\n"


def test_ctrl_c_while_modules_load_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("import time\nprint('loading', flush=True)\ntime.sleep(60)")
    process = subprocess.Popen(
        [*PROGRAM, "recipes", "ls"],
        **PIPES,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
    )
    assert process.stdout is not None and process.stdout.readline() == "loading\n"
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (130, "interrupted\n")


@pytest.mark.parametrize("file", ["metrics.jsonl", ".lock"])  # a kill or a copy leaves one
def test_a_run_that_is_named_is_resumed_where_it_lies(
    tmp_path: Path, monkeypatch: Patch, file: str
) -> None:
    trained = Mock(return_value=tmp_path)
    monkeypatch.setattr("gear_offline.runs.loop.train_run", lambda recipe, out, **_: trained(out))
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "recipe.yaml").write_text("base: smoke\n")
    (folder / file).touch()
    for words, out in (
        ([str(folder), "--resume"], folder),
        ([str(folder / "recipe.yaml"), "--resume"], folder),
        ([str(folder)], Path("runs/recipe-s0")),
        (["smoke", "--resume"], Path("runs/smoke-s0")),
        ([str(folder), "--resume", "--out", "other"], Path("other")),
    ):
        assert cli.main(["train", *words]) == 0
        trained.assert_called_with(out)


def test_recipes_are_listed_and_shown(monkeypatch: Patch, capsys: Captured) -> None:
    names = set(recipe_paths())
    assert cli.main(["recipes", "ls", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["name"] for row in rows} == names and len(rows) == len(names)
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["recipes", "ls"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert names <= {line.split()[0] for line in lines} and lines[1].startswith("smoke")
    assert cli.main(["recipes", "show", "smoke"]) == 0
    assert capsys.readouterr().out == (ROOT / "recipes" / "smoke.yaml").read_text()


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ("convert a b --shard-size 1048576", "shard_bytes", 1 << 20),
        ("convert a b --shard-size 256MiB", "shard_bytes", 256 << 20),
        ("convert a b --shard-size 2GB", "shard_bytes", 2 * 10**9),
        ("convert a b --shard-size '0.5 GiB'", "shard_bytes", 1 << 29),
        ("convert a b --columns ' rewards, actions,'", "columns", ["rewards", "actions"]),
        ("collect a b --steps 2.5E4", "steps", 25_000),
        ("collect a b --steps 1_000", "steps", 1000),
        ("evaluate a --targets '3600, -1.5'", "targets", [3600.0, -1.5]),
    ],
)
def test_values_of_options(words: str, name: str, value: Any) -> None:
    command, *rest = shlex.split(words)
    with commands()[command].make_context(command, rest) as context:
        assert context.params[name] == value


WRONG = {
    "convert a b --shard-size": ("MiB", "-1", "0", "1XB", "1e400", "nan"),
    "convert a b --columns": ("", " , ,"),
    "collect a b --steps": ("1.5", "1e-3", "0", "many", "nan", "inf", "1e30", "9" * 5000),
    "evaluate a --targets": (",", "3600,many"),
}


def test_values_that_are_none(capsys: Captured) -> None:
    for words, texts in WRONG.items():
        for text in texts:
            assert said(capsys, *words.split(), text).startswith("error[USAGE]: ")


def test_a_full_standard_output_is_one_error_and_a_reader_that_goes_is_none() -> None:
    for words in ("recipes ls --json", "--help"):
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                [*PROGRAM, *words.split()], **PIPES | {"stdout": full}, timeout=120
            )
        assert done.returncode == 1
        assert done.stderr.startswith("error[OUTPUT_WRITE]: no space left: ")
        assert "standard output" in done.stderr and done.stderr.count("\n") == 1
    line = f"{shlex.join(PROGRAM)} recipes ls --json | head -c 10"
    done = subprocess.run(["bash", "-c", line], **PIPES, timeout=120)
    assert done.stderr == "" and len(done.stdout) == 10


@pytest.mark.parametrize("stderr", ["2>/dev/full", "2>&-"])
def test_messages_that_nobody_can_read_end_no_work(tmp_path: Path, stderr: str) -> None:
    words = "collect Pendulum-v1 x.hdf5 --steps 5"
    line, variables = f"{shlex.join(PROGRAM)} {words} {stderr}", {"PYTHONPATH": str(ROOT)}
    how: Any = {**PIPES, "cwd": tmp_path, "env": {**os.environ, **variables}, "timeout": 120}
    done = subprocess.run(["bash", "-c", line], **how)
    assert (done.returncode, done.stdout, done.stderr) == (0, "x.hdf5\n", "")


def test_what_the_encoding_lacks_does_not_end_a_command(monkeypatch: Patch) -> None:
    """A bar of a histogram, and a byte of a file's name that is no text."""
    for encoding, printed in (("utf-8", b"\xe2\x96\x88 ?\n"), ("latin-1", b"? ?\n")):
        written = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
        monkeypatch.setattr(cli, "app", lambda **_: print("\u2588 \udcff"))
        assert command.main() == 0 and written.getvalue() == printed


def test_names_in_files_of_strangers_do_not_steer_the_terminal(
    tmp_path: Path, capsys: Captured
) -> None:
    file = write(tmp_path / "mine.hdf5", {"\x1b[31mobs": [1.0], "rewards": [1.0]})
    assert cli.main(["convert", str(file), str(tmp_path / "d"), "-q"]) == 2
    assert "found: \\x1b[31mobs, rewards" in capsys.readouterr().err


COMPLETE = """
import os, sys
from gear_offline.__main__ import main
for words in sys.argv[1:]:
    os.environ.update(COMP_WORDS=words, COMP_CWORD=str(words.count(" ")))
    try:
        main()
    except SystemExit:
        assert "torch" not in sys.modules
    print(end="\\0")
"""


COMPLETED = {
    "sw": "sweep",
    "recipes va": "validate",
    "train smo": "smoke smokeless.yaml",
    "train runs/": "runs/hopper-s0 runs/hopper-s1",
    "train smoke train.st": "train.steps=",
    "sweep smoke seed=1 optimizer.learning_rate": "optimizer.learning_rate=",
    "evaluate ru": "runs/hopper-s0 runs/hopper-s1",
    "evaluate runs/hopper-s0 --vi": "--video",
    "evaluate nothing[": "",
}


def test_what_errors_and_help_name_exists() -> None:
    """Options and commands in the texts of the sources, and options of recipes."""
    parameters = [one for node in commands().values() for one in node.params]
    known = {option for one in parameters for option in (*one.opts, *one.secondary_opts)}
    known |= {"--help", "--version", "--debug", "--install-completion"}
    fields = set(dotted_fields(Recipe))
    fields |= {field.rpartition(".")[0] for field in fields}
    sections = "|".join({field.partition(".")[0] for field in fields if "." in field})
    foreign = re.compile(
        r"--always|--dirty|exclude|pip |torchrun|docker|ray start|--fmad|--std|nproc"
    )
    rooms = ("gear_offline", "loaders", "models", "kernels")
    for path in (file for room in rooms for file in sorted((ROOT / room).rglob("*.py"))):
        for text in texts_of(path):
            place = f"{path}: {text}"
            options = re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)
            assert foreign.search(text) or set(options) <= known, place
            for first, second in re.findall(r"`gear-offline ([a-z-]+)(?: ([a-z]+))?", text):
                assert {first, f"{first} {second}"} & {*commands(), "recipes", "runs"}, place
            for field in re.findall(rf"\b((?:{sections})\.[a-z_.]+)=", text):
                assert field in fields or field.startswith(("selection.", "data.tasks.")), place


def texts_of(path: Path) -> Iterator[str]:
    """Yield the texts of a module; what an f-string fills in is a blank."""
    for node in ast.walk(ast.parse(path.read_text())):
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        known = [part.value if isinstance(part, ast.Constant) else " " for part in parts]
        text = "".join(map(str, known)).strip() if known != [" "] else ""
        yield text.partition(">>> ")[0]  # examples show mistakes too


def test_words_are_completed(tmp_path: Path) -> None:
    """In bash with the script that it is given, and without torch."""
    for name in ("runs/hopper-s0", "runs/hopper-s1", "runs/other", "mine"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("runs/hopper-s0/recipe.yaml", "runs/hopper-s1/recipe.yaml", "smokeless.yaml"):
        (tmp_path / name).touch()

    def run(how: str, *lines: str) -> list[str]:
        variables = {"_GEAR_OFFLINE_COMPLETE": how}
        done = run_python("-c", COMPLETE, *lines, variables=variables, cwd=tmp_path, check=True)
        assert done.stderr == ""
        return done.stdout.split("\0")[:-1]

    shown = run("complete_bash", *(f"gear-offline {line}" for line in COMPLETED))
    assert [text.split() for text in shown] == [found.split() for found in COMPLETED.values()]
    if shutil.which("bash") is None:
        pytest.skip("no bash")
    (script,) = run("source_bash", "")
    tool = tmp_path / "gear-offline"
    tool.write_text(f"#!/bin/sh\nexec {shlex.join(PROGRAM)}\n")
    tool.chmod(0o755)
    press = (
        "\nCOMP_WORDS=(gear-offline train hopper-medium-r); COMP_CWORD=2"
        "\n_gear_offline_completion gear-offline\necho ${COMPREPLY[@]}"
    )
    places = {"PYTHONPATH": str(ROOT), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    bash = ["bash", "-c", script + press]
    done = subprocess.run(bash, **PIPES, env=os.environ | places, cwd=tmp_path, check=True)
    assert done.stdout.split() == ["hopper-medium-replay"], done.stderr


LONG = ("train.steps=1000000", "evaluate.episodes=0", "train.checkpoint_every=1000000")


def interrupted(words: list[str], number: int, runs: list[Path]) -> int:
    """Return how a command ends that gets a signal when each of `runs` has written its metrics."""
    over = threading.Event()

    def interrupt() -> None:
        end = time.monotonic() + 120
        while not all(steps_done(run) for run in runs) and time.monotonic() < end:
            if over.wait(0.02):
                return
        os.kill(os.getpid(), number)

    hangup = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        return cli.main(words)
    finally:
        over.set()
        thread.join()
        signal.signal(signal.SIGHUP, hangup)


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize(
    ("command", "number", "runs", "said"),
    [
        ("train", signal.SIGINT, [""], "a checkpoint is saved"),
        ("train", signal.SIGTERM, [""], "a checkpoint is saved"),
        ("train", signal.SIGHUP, [""], "a checkpoint is saved"),
        ("sweep --seeds 2 --parallel 1", signal.SIGTERM, ["runs/s0"], "same command goes on"),
        ("sweep --seeds 2 --parallel 2", signal.SIGINT, ["runs/s0", "runs/s1"], "same command"),
    ],
)
def test_what_trains_and_is_stopped_ends_with_130(
    command: str, number: int, runs: list[str], said: str, data: Path, tmp_path: Path,
    capsys: Captured,
) -> None:  # fmt: skip
    recipe, out = tmp_path / "long.yaml", tmp_path / "out"
    recipe.write_text(tiny_recipe(data, *LONG).to_yaml())
    begun = [out / name for name in runs]
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    name, *options = command.split()
    words = [name, str(recipe), "--out", str(out), "--quiet", *options]
    assert interrupted(words, number, begun) == 130
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before
    assert all(list((run / "checkpoints").glob("step-*")) for run in begun)
    error = capsys.readouterr().err
    assert said in error and "error" not in error


@pytest.mark.parametrize("text", ["g=1.0,size=[3, 4]", "{g: 1.0, size: [3, 4]}"])
def test_options_of_an_environment_are_read_as_a_recipe_has_them(text: str) -> None:
    assert parse_options(text) == {"g": 1.0, "size": [3, 4]}
    assert parse_options("{}") == parse_options("") == {}
