"""Text: counts with their noun, bytes with a unit, lines of errors, JSON."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gear_offline.errors import for_caller, without_secrets

MOST_CHARACTERS = 900  # of the line of an error
LEAST = 5  # seeds or episodes of which an interval is shown: of fewer it says nothing
LONGEST_NUMBER = 14  # characters; a longer one was computed, not typed
_MARKUP = re.compile(r"[\\`*\[\]<>&|$~#]|(?<![^\W_])_|_(?![^\W_])")  # a_b is no markup


def say(message: str, *, quiet: bool = False) -> None:
    """Print one line of information to stderr unless `quiet`.

    Callers pass `quiet` for progress and for what the result repeats.  They leave it out for
    warnings that change what the result means and that no result keeps.
    """
    if not quiet and sys.stderr is not None:  # None: of a daemon, for which print takes stdout
        lines = map(printable, for_caller(message).split("\n"))  # names of files are others' text
        print("\n".join(lines), file=sys.stderr, flush=True)


def count_text(count: int, noun: str, plural: str | None = None) -> str:
    """Return a count and its noun, e.g. ``"1 episode"`` or ``"2,000 episodes"``."""
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


def texts(value: object) -> list[str]:
    """Return a stranger's text, list of texts or whatever it is as a list of texts."""
    if value is None:
        return []
    return list(map(str, value)) if isinstance(value, (list, tuple)) else [str(value)]


def size_text(count: int) -> str:
    """Return a byte count with a binary unit, e.g. ``"1.5 MiB"``."""
    from pydantic import ByteSize  # slow to load

    return ByteSize(count).human_readable(separator=" ")


def short(value: float) -> str:
    """Return `value` with separators, and decimals only where it is small: ``1.69``, ``32,450``."""
    return f"{value:,.0f}" if value == 0 or abs(value) >= 100 else f"{value:,.3g}"


def number_text(value: float | None) -> str:
    """Return a number in about four digits; ``-`` for none."""
    return "-" if value is None else f"{value:,.4g}"


def interval_text(
    ends: tuple[float | None, float | None], text: Callable[[float], str] = short
) -> str:
    """Return ``"1.69 to 2.5"``; ``-`` for an interval without ends."""
    low, high = ends
    return "-" if low is None or high is None else f"{text(low)} to {text(high)}"


def told_apart(values: Sequence[float]) -> list[str]:
    """Return numbers for a table: exact, but long ones `short` if all stay different."""
    exact = [f"{float(value) + 0.0:,}".removesuffix(".0") for value in values]
    pairs = zip(exact, values, strict=True)
    brief = [text if len(text) <= LONGEST_NUMBER else short(value) for text, value in pairs]
    return brief if len(set(brief)) == len(set(exact)) else exact


def printable(text: str) -> str:
    """Return `text` without secrets, and with escapes for what steers a terminal or ends a line."""
    return "".join(c if c.isprintable() else escape(c) for c in without_secrets(text))


def escape(character: str) -> str:
    """Return a character as Python writes it: ``\\n``, ``\\x1b``, ``\\u202e``."""
    return character.encode("unicode_escape").decode("ascii")


def markdown(text: str) -> str:
    """Return `text` for Markdown, its tables too: what would be markup becomes an entity."""
    return _MARKUP.sub(lambda match: f"&#{ord(match[0])};", printable(text))


def quote(path: str | os.PathLike[str]) -> str:
    """Return a path as one types it in a shell, for a command that a remedy names."""
    return shlex.quote(os.fspath(path))


def first_line(error: Any) -> str:
    """Return the first line of an error's text, or its type where it has none.

    A pydantic error gives its first finding, with its place.
    """
    if type(error).__name__ == "ValidationError":
        first = error.errors()[0]
        return ": ".join(filter(None, [".".join(map(str, first["loc"])), first["msg"]]))
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def show_error(code: str, message: str) -> None:
    """Print the line of an error."""
    line = printable(" ".join(message.split()))  # names come from files of strangers
    if len(line) > MOST_CHARACTERS:  # an argument may be long; place and remedy stand at the end
        line = f"{line[: MOST_CHARACTERS // 2]} ... {line[-MOST_CHARACTERS // 2 :]}"
    print(f"error[{code}]: {line}", file=sys.stderr)


def to_plain(value: Any) -> Any:
    """Return a value as YAML or JSON gives it back: of NumPy's arrays, tuples, paths too."""
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value.tolist() if hasattr(value, "tolist") else value


def finite(value: Any) -> Any:
    """Return `value` for strict JSON: NaN and infinities are None, paths are text."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    value = to_plain(value)
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and value - value != 0.0 else value


@dataclass(frozen=True)
class Document:
    """A document that a command prints as JSON."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name, JSON-able."""
        document: dict[str, Any] = finite(asdict(self))
        return document
