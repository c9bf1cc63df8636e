"""The documents: links lead somewhere, the README's code runs, its commands exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from urllib.parse import unquote

import pytest

from gear_offline.cli import main
from gear_offline.convert import convert
from tests.support import ArraySource, hopper_columns

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    return [code for kind, code in BLOCK.findall(page.read_text()) if kind == language]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    targets = [t for t in LINK.findall(page.read_text()) if "://" not in t]
    missing = [t for t in targets if not (page.parent / unquote(t)).exists()]
    assert missing == []


def test_the_readmes_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    convert(ArraySource(hopper_columns(600), [300, 300]), Path("data/hopper-medium-v2"), quiet=True)
    (code,) = blocks(ROOT / "README.md", "python")
    names: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), names)
    batch = names["batch"]
    assert getattr(batch, "states").shape == (256, 20, 11)  # noqa: B009


def test_the_readmes_commands_exist(capsys: pytest.CaptureFixture[str]) -> None:
    lines = "\n".join(blocks(ROOT / "README.md", "sh")).splitlines()
    commands = [shlex.split(line, comments=True) for line in lines]
    ours = [words[1:] for words in commands if words[:1] == ["gear-offline"]]
    assert len(ours) >= 4
    for words in ours:
        name = words[:2] if words[0] == "recipes" else words[:1]
        assert main([*name, "--help"]) == 0
        help_text = capsys.readouterr().out
        assert all(word in help_text for word in words if word.startswith("--"))
