"""The documents: links lead somewhere, commands and names exist, recipes are valid, code runs."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest

from gear_offline.analysis.candidates import parse_candidates
from gear_offline.cli.main import main
from gear_offline.config.recipe import RecipeEntry, list_recipes, load_recipe
from gear_offline.convert import convert
from tests.docs_checks import (
    OTHERS,
    PythonBlock,
    command_findings,
    file_findings,
    name_findings,
    option_findings,
    tracked,
)
from tests.docs_support import (
    PAGES,
    ROOT,
    blocks,
    broken_links,
    broken_tables,
    commands,
    inline,
    prose,
)
from tests.support import ArraySource, hopper_columns

TOOLS = {"gear-offline", "make", "python", "torchrun"}
SHELL = {"sh", "bash", "console"}
STARTS = re.compile(rf"(for |[A-Z]+=\S+$|({'|'.join(TOOLS | OTHERS)}) )")

pages = pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))


def shell_commands(text: str) -> list[list[str]]:
    """Return the commands of a page's blocks; of blocks without a language those we know."""
    found = []
    for block in blocks(text):
        if block.language in SHELL:
            found += commands(block.text)
        elif not block.language:
            lines = block.text.replace("\\\n", " ").splitlines()
            ours = [line for line in lines if STARTS.match(line)]
            found += [c for c in commands("\n".join(ours)) if c[0] in TOOLS | OTHERS]
    return found


def mentions(text: str) -> list[list[str]]:
    """Return the commands that a page's sentences mention."""
    found = []
    for code in inline(text):
        if code.split()[0] in {*TOOLS, "pytest", "pip"} and " " in code:
            found.append(shlex.split(code))
    return found


@pages
def test_links_and_anchors_lead_somewhere(page: Path) -> None:
    assert broken_links(page.read_text(), page) == []


@pages
def test_tables_have_the_columns_of_their_headers(page: Path) -> None:
    assert broken_tables(page.read_text()) == []


@pages
def test_commands_and_their_options_exist(page: Path) -> None:
    text = page.read_text()
    findings = [f for words in shell_commands(text) for f in command_findings(words)]
    findings += [f for words in mentions(text) for f in command_findings(words, whole=False)]
    assert findings == []


@pytest.mark.parametrize("recipe", list_recipes(), ids=lambda entry: entry.name)
def test_commands_in_the_comments_of_recipes_exist(recipe: RecipeEntry) -> None:
    comments = re.findall(r"^# ?(.*)$", recipe.path.read_text(), re.MULTILINE)
    lines = [re.sub(r" +\(.*\)$", "", line.strip()) for line in comments]
    found = commands("\n".join(line for line in lines if STARTS.match(line)))
    assert [f for words in found for f in command_findings(words)] == []


def test_commands_in_the_heads_of_programs_exist() -> None:
    found = []
    for file in sorted(name for name in tracked() if name.endswith(".py")):
        head = ast.get_docstring(ast.parse((ROOT / file).read_text())) or ""
        codes = re.findall(r"^    (\S.*)$", head.replace("\\\n", " "), re.MULTILINE)
        codes += [" ".join(code.split()) for code in re.findall(r"``([^`]+)``", head)]
        found += [c for code in codes if STARTS.match(code) for c in commands(code)]
    assert len(found) > 15
    assert [f for words in found for f in command_findings(words, whole=False)] == []


@pages
def test_files_names_and_options_that_sentences_name_exist(page: Path) -> None:
    codes = inline(page.read_text())
    assert file_findings(codes) == []
    assert name_findings(codes) == []
    assert option_findings(codes) == []


@pages
def test_python_blocks_use_names_that_exist(page: Path) -> None:
    codes = [block.text for block in blocks(page.read_text()) if block.language == "python"]
    assert [PythonBlock(code).findings for code in codes if PythonBlock(code).findings] == []


@pages
def test_recipes_in_pages_are_valid(page: Path, tmp_path: Path) -> None:
    base = "paper"
    for number, block in enumerate(b for b in blocks(page.read_text()) if b.language == "yaml"):
        file = tmp_path / f"block-{number}.yaml"
        file.write_text(block.text)
        if block.text.startswith("- "):
            assert len(parse_candidates(str(file), load_recipe("paper"))) > 1
            continue
        if not re.search(r"^base:", block.text, re.MULTILINE):
            file.write_text(f"base: {base}\n{block.text}")
        if load_recipe(file).data.tasks:
            base = file.name  # a schedule further down is of these tasks


def test_pages_that_the_program_names_exist() -> None:
    named = {
        name
        for path in (ROOT / file for file in tracked())
        if path.suffix in {".py", ".yaml", ".cu", ".cuh", ".c", ".cpp"} or path.name == "Makefile"
        for name in re.findall(r"\bdocs/[\w/-]+\.\w+", path.read_text())
    }
    assert len(named) > 10
    assert {name for name in named if not (ROOT / name).exists()} == {"docs/none.md"}  # here


def test_pages_are_reachable_from_the_readme() -> None:
    seen: set[Path] = set()
    waiting = [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in seen:
            continue
        seen.add(page)
        for link in re.findall(r"\]\(([^)#\s]+\.md)(?:#[^)]*)?\)", prose(page.read_text())):
            if "://" not in link:
                waiting.append((page.parent / link).resolve())
    assert set(PAGES) - seen == set()


def test_the_readmes_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    convert(ArraySource(hopper_columns(600), [300, 300]), Path("data/hopper-medium-v2"), quiet=True)
    text = (ROOT / "README.md").read_text()
    (code,) = (block.text for block in blocks(text) if block.language == "python")
    names: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), names)
    batch = names["batch"]
    assert getattr(batch, "states").shape == (256, 20, 11)  # noqa: B009


def test_the_plan_in_the_pages_is_what_plan_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / "docs" / "planning.md").read_text()
    shown = next(block.text for block in blocks(text) if "(predicted)" in block.text)
    (command,) = (words for words in shell_commands(text) if "model.hidden_size=2048" in words)
    monkeypatch.setenv("COLUMNS", "110")
    assert main(command[1:]) == 0
    printed = capsys.readouterr().out
    assert [line.strip() for line in printed.splitlines()] == [
        line.strip() for line in shown.splitlines()
    ]


def test_the_errors_in_the_pages_are_what_the_command_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    texts = [b.text.strip() for page in PAGES for b in blocks(page.read_text())]
    shown = [text for text in texts if text.startswith("error[RECIPE]")]
    assert len(shown) >= 2
    for text in shown:
        option, file = re.findall(r"'train\.(\w+)', .*\(([\w.]+)\)", text)[0]
        Path(file).write_text(f"base: paper\ntrain: {{{option}: 5}}\n")
        assert main(["recipes", "validate", file]) == 2
        assert capsys.readouterr().err.strip() == text


def test_every_recipe_is_listed() -> None:
    named = set(inline((ROOT / "docs" / "recipes.md").read_text()))
    robots = ("hopper-", "halfcheetah-", "walker2d-")  # told of together
    others = {r.name for r in list_recipes() if not r.name.startswith(robots)}
    assert len(others) > 8 and others - named == set()


# What each check must find: a document that is right but for one thing.


@pytest.mark.parametrize(
    "link", ["docs/none.md", "docs/loader.md#none", "#none", "README.md#more-"]
)
def test_a_broken_link_is_found(link: str) -> None:
    text = f"# Here\n\nsee [this]({link}) and [that](docs/loader.md#a-batch), [here](#here)\n"
    assert broken_links(text, ROOT / "README.md") == [link]


@pytest.mark.parametrize("rule", ["|---|---|", "|---|", ""])
def test_a_broken_table_is_found(rule: str) -> None:
    lines = [line for line in ("| a | b |", rule, "| 1 | 2 |") if line]
    assert (broken_tables("\n".join(lines)) == []) == (rule == "|---|---|")


@pytest.mark.parametrize(
    "command",
    [
        "gear-offline trian hopper-medium",
        "gear-offline train hopper-medum",
        "gear-offline train hopper-medium train.step=5",
        "gear-offline train hopper-medium train.steps=soon",
        "gear-offline train hopper-medium --resum",
        "gear-offline train",
        "python -m benchmarks loaders",
        "python -m benchmarks select --quickly",
        "gear-offline collect Hopper-v5 x.hdf5 --policy random --quality mixed",
        "gear-offline convert a b --shard-size much",
        "gear-offline sweep hopper-medium --seeds none",
        "gear-offline strategies paper --strategies uniform",
        "gear-offline plan dt_1b --data much",
        "gear-offline plan dt_1b --data 1TB --columns observations=float33",
        "gear-offline recipes cp hopper",
        "make tset",
        "python -m tests.trust.kill_trains",
        "python -m tests.trust.kill_train --besides",
        "python examples/trainer.py",
        "torchrun --nproc-per-node 4 -m gear_offline train dt_2b",
        "for seed in 0 1; do gear-offline train paper sed=$seed; done",
        "pip install 'gear-offline[ataris]'",
        "gear-ofline doctor",
    ],
)
def test_a_wrong_command_is_found(command: str) -> None:
    assert [
        f for words in shell_commands(f"```sh\n{command}\n```\n") for f in command_findings(words)
    ]


@pytest.mark.parametrize("code", ["gear-offline tran", "gear-offline collect --polcy", "make tets"])
def test_a_wrong_mention_is_found(code: str) -> None:
    assert [f for w in mentions(f"say `{code}` here") for f in command_findings(w, whole=False)]


def test_wrong_names_of_files_options_and_modules_are_found() -> None:
    assert file_findings(["tests/test_none.py", "nowhere.py", "docs/none.md", "kernels/none/"])
    assert file_findings(["mine.yaml", "report.md", "gear_offline/cli/main.py"]) == []
    assert name_findings(
        ["gear_offline.none", "gear_offline.tables.table.bild", "gear_offline.Batch.x"]
    )
    assert (
        name_findings(["gear_offline.tables.table.build_table", "gear_offline.Batch.states"]) == []
    )
    assert option_findings(["train.step", "loader.non", "train.graph=perhaps"])
    assert option_findings(["train.steps=5000", "loader.engine", "model.loss", "x.y"]) == []


@pytest.mark.parametrize(
    "code",
    [
        "from gear_offline.tables.table import bild_table",
        "import gear_offline as go\ngo.open_datasets('x')",
        "import gear_offline as go\ngo.GearLoader('x', batch_sise=3)",
        "import gear_offline as go\nl = go.GearLoader('x', batch_size=3)\nl.device_bathces()",
        "import gear_offline as go\nd = go.open_dataset('x')\nd.epsiode",
        "b = next(loader)\nb.state",
        "batch.segment",
    ],
)
def test_wrong_python_is_found(code: str) -> None:
    assert PythonBlock(code).findings
