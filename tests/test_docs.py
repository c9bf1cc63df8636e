"""Documents and docstrings: links lead somewhere, commands exist, recipes are valid, code runs."""

import ast
import doctest
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest
import typer

import gear_offline
from benchmarks.common import names as benchmark_names
from gear_offline.batches.sampling.registry import _STRATEGIES
from gear_offline.cli.main import app
from gear_offline.config.files import recipe_paths
from gear_offline.config.recipe import load_recipe
from gear_offline.data.convert.conversion import convert
from tests.support import ROOT, ArraySource, Patch, hopper_columns
from tests.training_support import FakePool

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
ROOMS = ("gear_offline", "models", "loaders", "kernels")
GENERATED = {"cli.md", "recipe.md", "python.md"}  # docs/hooks.py makes them

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def blocks(text: str, language: str) -> list[str]:
    """Return the fenced blocks of a language."""
    found = re.findall(r"^ *```(\w*)\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)
    return [body for name, body in found if name == language]


def prose(text: str) -> str:
    """Return a page without its fenced blocks."""
    return re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings."""
    titles = re.findall(r"^#{1,6} +(.+?) *#*$", prose(text), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", title.lower()) for title in titles]
    return {title.replace(" ", "-") for title in plain}


def broken_links(page: Path) -> Iterator[str]:
    """Yield the links of a page that lead nowhere."""
    text = re.sub(r"`[^`]+`", "", prose(page.read_text()))
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in link:
            continue
        name, _, anchor = unquote(link).partition("#")
        target = page.parent / name if name else page
        if target.name in GENERATED and target.parent.name == "reference":
            continue
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            yield link


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    assert list(broken_links(page)) == []


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    there = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert listed == there | {f"reference/{name}" for name in GENERATED}


def test_files_that_the_program_or_a_page_names_exist() -> None:
    rooms = [*ROOMS, "recipes", "benchmarks", "examples"]
    files = [file for room in rooms for file in (ROOT / room).rglob("*") if file.is_file()]
    code = [file for file in files if file.suffix in {".py", ".yaml", ".cu", ".cuh"}]
    texts = [file.read_text() for file in (*code, *PAGES)]
    named = {n for text in texts for n in re.findall(r"\b(?:docs|tests)/[\w/-]+\.\w+", text)}
    assert {name for name in named if not (ROOT / name).exists()} == set()


def commands(text: str) -> list[list[str]]:
    """Return the commands of a page's shell and console blocks, as lists of words."""
    lines = []
    for block in blocks(text, "sh"):
        lines += block.replace("\\\n", " ").splitlines()
    for block in blocks(text, "console"):
        shown = block.replace("\\\n", " ").splitlines()
        lines += [line[2:] for line in shown if line.startswith("$ ")]
    split = [shlex.split(line, comments=True) for line in lines]
    return [words for words in split if words]


def problem(words: list[str]) -> str | None:
    """Say what is wrong with a command of a page; None if it could be run."""
    while words and re.fullmatch(r"[A-Z_]+=\S+", words[0]):
        words = words[1:]
    if words[0] == "torchrun" and "gear_offline" in words:
        words = ["gear-offline", *words[words.index("gear_offline") + 1 :]]
    if words[0] == "make":
        targets = re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return next((f"make {word}" for word in words[1:] if word not in targets), None)
    if words[0] == "python" and words[1:3] == ["-m", "benchmarks"] and words[3:]:
        return None if words[3] in benchmark_names() else f"no benchmark {words[3]}"
    scripts = [word for word in words if word.endswith(".py")]
    if words[0] in ("python", "torchrun") and scripts:
        return None if (ROOT / scripts[0]).exists() else f"no {scripts[0]}"
    if words[0] != "gear-offline":
        return None
    command: Any = typer.main.get_command(app)
    path, words = [], words[1:]
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        path.append(words.pop(0))
        if path[-1] not in command.commands:
            return f"no command {' '.join(path)}"
        command = command.commands[path[-1]]
    try:
        if path:
            command.make_context(" ".join(path), list(words))
        if path and path[0] in ("train", "sweep", "strategies", "plan"):
            given = [word for word in words[1:] if re.match(r"(\w+\.[\w.]+|name|seed)=", word)]
            single = [re.sub(r"=([^\[{,]*),.*", r"=\1", word) for word in given]  # of a sweep
            single = [word for word in single if not word.startswith("data.tasks.")]
            load_recipe(words[0] if words[0] in recipe_paths() else "paper", single)
    except Exception as error:  # the parser's errors and ours alike
        return f"{' '.join(path)}: {getattr(error, 'message', error)}"
    return None


def test_batch_files_can_be_parsed() -> None:
    found = [block for page in PAGES for block in blocks(page.read_text(), "bash")]
    assert any("sbatch" in block.casefold() for block in found)
    for block in found:
        subprocess.run(["bash", "-n"], input=block, text=True, check=True)


@each_page
def test_commands_could_be_run(page: Path) -> None:
    found = {shlex.join(words): problem(words) for words in commands(page.read_text())}
    assert {command: what for command, what in found.items() if what} == {}


WRONG = """
gear-offline frobnicate
gear-offline train paper --steps 5
gear-offline train paper trian.steps=5
torchrun -m gear_offline train paper seed=x
make nothing
python -m benchmarks nothing
python examples/nothing.py
"""


@pytest.mark.parametrize("line", WRONG.split("\n")[1:-1])
def test_a_wrong_command_is_found(line: str) -> None:
    """In a page that is written, so that the tests above cannot go blind."""
    (words,) = commands(f"```sh\nX=1 {line} \\\n  # a comment\n```\n")
    assert problem(words)


def test_the_demo_is_commands_there_are(tmp_path: Path) -> None:
    line = ["make", "-n", "-f", str(ROOT / "Makefile"), "demo/seeds/sweep.md"]
    shown = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    lines = shown.replace("\\\n", " ").splitlines()
    ours = [["gear-offline", *shlex.split(line)[1:]] for line in lines if "/gear-offline " in line]
    names = [words[1] for words in ours]
    assert names == ["collect", "convert", "inspect", "sweep", "sweep"]
    assert [problem(words) for words in ours] == [None] * 5


@each_page
def test_recipes_are_valid(page: Path, tmp_path: Path) -> None:
    for number, block in enumerate(blocks(page.read_text(), "yaml")):
        file = tmp_path / f"block-{number}.yaml"
        file.write_text(block if "base:" in block else f"base: paper\n{block}")
        if not block.startswith("- "):
            load_recipe(file)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the data and the run that pages speak of, in small."""
    folder, lengths = tmp_path_factory.mktemp("docs"), [40, 60, 50, 150]
    steps, generator = sum(lengths), np.random.default_rng(0)
    frames = {
        "observations": generator.integers(0, 255, (steps, 84, 84), np.uint8),
        "actions": generator.integers(0, 6, steps),
        "rewards": generator.normal(size=steps).astype(np.float32),
    }
    hopper = ArraySource(hopper_columns(steps), lengths, environment_id="Hopper-v5")
    pendulum = ArraySource(hopper_columns(steps, state_dim=3, action_dim=1), lengths)
    pong = ArraySource(frames, lengths)
    sources = {"hopper-medium-v2": hopper, "pendulum": pendulum, "pong": pong}
    (folder / "data").mkdir()
    for name, source in sources.items():
        convert(source, folder / "data" / name, quiet=True)
    options: dict[str, object] = {"train.steps": 4, "train.device": "cpu", "evaluate.episodes": 0}
    options |= {"data.collect.policy": "random", "data.collect.quality": None}
    options |= {"data.collect.steps": 300, "data.path": str(folder / "data" / "of-the-run")}
    options["model.layers"] = 1
    gear_offline.train("cartpole", options, out=folder / "runs" / "cartpole-s0", quiet=True)
    return folder


WITH_PYTHON = [page for page in PAGES if blocks(page.read_text(), "python")]


@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_blocks_run(page: Path, workspace: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    here = shutil.copytree(workspace, tmp_path / "here", symlinks=True)
    if page.name != "convert.md":  # which makes it
        (here / "data" / "mine").symlink_to("hopper-medium-v2")
    monkeypatch.chdir(here)
    monkeypatch.setattr("gear_offline.runs.evaluations.WorkerPool", FakePool)
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    loader = gear_offline.GearLoader("data/hopper-medium-v2", batch_size=4, context_length=5)
    vars(module).update(
        batch=next(loader), observations=np.zeros((2, 4), np.float32), rewards=np.zeros(2)
    )
    try:
        for block in blocks(page.read_text(), "python"):
            exec(compile(block, str(page), "exec"), vars(module))
    finally:
        _STRATEGIES.pop("fading", None)  # a page registers it


FOLDERS = {"convert": "tiny", "train": "runs/tiny"}
FIRST = {'"tiny"': ["convert"], '"runs/tiny"': ["convert", "train"]}  # what examples begin from


def examples(name: str) -> list[doctest.DocTest]:
    """Return the examples of a public name and of its methods."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    thing = getattr(gear_offline, name)
    found = finder.find(thing, name, globs={"__name__": "__main__"})
    return [test for test in found if test.examples]


def run(test: doctest.DocTest) -> str:
    """Run examples; return what doctest says of those that fail."""
    failures: list[str] = []
    options = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL
    doctest.DocTestRunner(optionflags=options).run(test, out=failures.append)
    return "".join(failures)


WITH_EXAMPLES = [name for name in gear_offline.__all__ if name != "__version__" and examples(name)]
assert {"GearLoader", "convert", "open_dataset", "train", "load_policy"} <= set(WITH_EXAMPLES)


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_run(name: str, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    if name == "export_policy":  # a page of the docs makes its graph, and plays it
        made = SimpleNamespace(model_proto=pytest.importorskip("onnx").ModelProto())
        monkeypatch.setattr("torch.onnx.export", lambda *_, **__: made)
    for test in examples(name):
        used = [makers for text, makers in FIRST.items() if text in (test.docstring or "")]
        for maker in max(used, key=len, default=[]):
            if maker == name:
                break
            if not (tmp_path / FOLDERS[maker]).exists():
                assert run(examples(maker)[0]) == ""
        assert run(test) == ""


def codes_in_source() -> tuple[set[str], set[str]]:
    """Return what is the first argument of an error, and every text that could be a code."""
    raised, texts = set(), set()
    paths = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    for node in (node for path in paths for node in ast.walk(ast.parse(path.read_text()))):
        if isinstance(node, ast.Constant):
            texts.add(str(node.value))
        is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        call: Any = node if is_call else None
        if call and call.args and re.search("(Error|Interrupted)$", call.func.id):
            raised.add(str(getattr(call.args[0], "value", "")))
    return {code for code in raised if re.fullmatch(r"[A-Z_]+", code)}, texts


def test_the_page_has_the_codes_that_the_source_has() -> None:
    page = (ROOT / "docs" / "reference" / "errors.md").read_text()
    listed = set(re.findall(r"(?m)^\| `([A-Z_]+)` \|", page))
    raised, texts = codes_in_source()
    assert raised - listed == set(), "add their rows to docs/reference/errors.md"
    assert listed - texts == set(), "remove their rows from docs/reference/errors.md"
