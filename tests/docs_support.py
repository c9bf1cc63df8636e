"""Reading Markdown pages: blocks of code, code in sentences, links, anchors, tables, commands."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

_BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)
_RULE = re.compile(r":?-+:?")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, empty if none is given, and its text."""

    language: str
    text: str


def blocks(text: str) -> list[Block]:
    """Return the fenced blocks of a page."""
    return [Block(language, body) for language, body in _BLOCK.findall(text)]


def prose(text: str) -> str:
    """Return a page without its fenced blocks."""
    return _BLOCK.sub("", text)


def inline(text: str) -> list[str]:
    """Return the code in a page's sentences, each with single blanks."""
    return [" ".join(code.split()) for code in _INLINE.findall(prose(text))]


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    found: dict[str, int] = {}
    names = set()
    for title in _HEADING.findall(prose(text)):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        count = found.get(slug, 0)
        found[slug] = count + 1
        names.add(f"{slug}-{count}" if count else slug)
    return names


def broken_links(text: str, page: Path) -> list[str]:
    """Return the links of a page, to files beside it or headings, that lead nowhere."""
    broken = []
    for link in _LINK.findall(_INLINE.sub("", prose(text))):
        if "://" in link or link.startswith("mailto:"):
            continue
        name, _, anchor = unquote(link).partition("#")
        target = page.parent / name if name else page
        if not target.exists():
            broken.append(link)
        elif anchor:
            known = anchors(text if target == page else target.read_text())
            broken += [link] if anchor not in known else []
    return broken


def cells(line: str) -> list[str]:
    """Return the cells of a table's line; a bar in code counts too, as on GitHub."""
    inner = line.strip().removeprefix("|").removesuffix("|")
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", inner)]


def tables(text: str) -> list[list[list[str]]]:
    """Return the tables of a page: header, rule, rows, each a list of cells."""
    found: list[list[list[str]]] = []
    before = ""
    for line in prose(text).splitlines():
        if not line.startswith("|"):
            before = line
            continue
        if not before.startswith("|"):
            found.append([])
        found[-1].append(cells(line))
        before = line
    return found


def broken_tables(text: str) -> list[str]:
    """Return the tables of a page that GitHub would not show, or show with other columns."""
    broken = []
    for header, *rest in tables(text):
        ruled = bool(rest) and all(_RULE.fullmatch(cell) for cell in rest[0])
        if not ruled or any(len(row) != len(header) for row in rest):
            broken.append(" | ".join(header))
    return broken


def commands(text: str) -> list[list[str]]:
    """Return the commands of a block of shell lines, variables of the block filled in.

    Continued lines are joined, comments and prompts dropped, and loops taken apart; a variable
    that the block does not set, such as a loop's, is taken for 1.
    """
    variables: dict[str, str] = {}
    found: list[list[str]] = []
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line.strip().removeprefix("$ "), posix=True, punctuation_chars=";")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if word != ";":
                words.append(re.sub(r"\$(\w+)", lambda m: variables.get(m[1], "1"), word))
                continue
            words = words[1:] if words[:1] == ["do"] else words
            while words and re.fullmatch(r"[A-Z]\w*=.*", words[0]):
                name, _, value = words.pop(0).partition("=")
                variables[name] = value
            found += [words] if words and words[0] not in ("for", "done") else []
            words = []
    return found
