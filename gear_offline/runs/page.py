"""HTML pages of reports: their Markdown with pictures and films inside, no scripts, no network."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from urllib.parse import unquote

from markdown_it import MarkdownIt
from markdown_it.token import Token
from markupsafe import escape

from gear_offline.core.files import write_file

KINDS = {".png": "image/png", ".gif": "image/gif", ".mp4": "video/mp4", ".webm": "video/webm"}
MOST_BYTES = 16 << 20  # of a file inside the page; the page only links a longer one
STYLE = Path(__file__).with_name("page.css")
HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
"""


def write_page(report: Path, text: str) -> None:
    """Write the text of a Markdown report, and its page beside it."""
    write_file(report, text.encode())
    write_file(report.with_suffix(".html"), make_page(text, report.parent).encode())


def make_page(text: str, folder: Path) -> str:
    """Return the page of a Markdown text whose pictures and films lie in `folder`.

    Code, such as a whole recipe, is folded away.  Links to reports lead to their pages.
    """
    reader = MarkdownIt("commonmark", {"html": False}).enable("table")
    rules: dict[str, Callable[[Sequence[Token], int], str]] = {
        "table_open": lambda *_: '<div class="scroll" tabindex="0"><table>\n',
        "table_close": lambda *_: "</table></div>\n",
        "fence": _fold_code,
        "image": partial(_show_picture, folder.resolve()),
        "link_open": partial(_link, folder.resolve()),
    }
    for name, rule in rules.items():
        reader.add_render_rule(name, lambda _, tokens, index, *__, rule=rule: rule(tokens, index))
    tokens = reader.parse(text)
    title = next((token.content for token in tokens if token.type == "inline"), "")
    body = reader.renderer.render(tokens, reader.options, {})
    head = f"{HEAD}<title>{escape(title)}</title>\n<style>\n{STYLE.read_text()}</style>\n</head>\n"
    return f"{head}<body>\n{body}</body>\n</html>\n"


def _fold_code(tokens: Sequence[Token], index: int) -> str:
    code = escape(tokens[index].content)
    return f"<details><summary>{escape(tokens[index].info)}</summary><pre>{code}</pre></details>\n"


def _show_picture(folder: Path, tokens: Sequence[Token], index: int) -> str:
    token = tokens[index]
    source = str(token.attrGet("src"))
    return f'<img src="{escape(_embed(folder, source) or source)}" alt="{escape(token.content)}">'


def _link(folder: Path, tokens: Sequence[Token], index: int) -> str:
    target = str(tokens[index].attrGet("href"))
    film = _embed(folder, target)
    if target.endswith("/report.md"):
        target = f"{target.removesuffix('.md')}.html"
    video = f'<video controls loop muted src="{escape(film)}"></video>\n' if film else ""
    return f'{video}<a href="{escape(target)}">'


def _embed(folder: Path, link: str) -> str:
    """Return a picture or film of the folder as a data URI; "" for whatever else."""
    path = (folder / unquote(link)).resolve()
    media_type = KINDS.get(path.suffix.lower())
    if media_type is None or not path.is_relative_to(folder) or not path.is_file():
        return ""
    if path.stat().st_size > MOST_BYTES:
        return ""
    return f"data:{media_type};base64,{b64encode(path.read_bytes()).decode()}"
