"""How the command line lists names with what they mean."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from textwrap import wrap

LEAST_BESIDE = 24  # columns of a text beside its name; with fewer it stands below


def print_names(rows: Sequence[tuple[str, str]], *, width: int) -> None:
    """Print names and their texts.

    A line each, except on a terminal where one does not fit: there texts are wrapped, beside their
    names or below them.

    Parameters
    ----------
    rows
        Name and text of each.
    width
        Columns of the names where lines are whole.
    """
    lines = [f"{name:{width}} {text}" for name, text in rows]
    if sys.stdout.isatty():
        columns = shutil.get_terminal_size().columns
        if max(map(len, lines)) > columns:
            lines = list(_wrapped(rows, columns))
    print("\n".join(lines))


def _wrapped(rows: Sequence[tuple[str, str]], columns: int) -> Iterator[str]:
    """Give the lines for a terminal of `columns`."""
    at = max(len(name) for name, _ in rows) + 2
    beside = columns - at >= LEAST_BESIDE
    at = at if beside else 4
    for name, text in rows:
        # a name of a dataset or a file is not broken
        pieces = wrap(text, max(columns - at, 1), break_long_words=False, break_on_hyphens=False)
        if not beside:
            yield name
        for i, piece in enumerate(pieces or [""]):
            yield f"{name if beside and i == 0 else '':{at}}{piece}"
