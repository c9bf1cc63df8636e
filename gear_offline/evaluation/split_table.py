"""A table for the terminal that stays readable in a narrow one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions
from rich.table import Table
from rich.text import Text

BETWEEN = 2  # characters between two columns: padding and the box


@dataclass(frozen=True, kw_only=True)
class SplitTable:
    """Columns beside each other; what has no room goes below, with the first column again.

    Headings are broken between words where that saves a table, never within one; lines of cells are
    never broken, but those of the first column if it takes more than half of the width or
    `widest_label`.

    Attributes
    ----------
    columns
        (heading, one cell a row) of each column; the first names the rows.
    title, caption
        Lines above and below, over the whole width.
    numbers
        The first column is one of numbers too.
    widest_label
        Characters of the first column, at most.
    """

    columns: Sequence[tuple[str, Sequence[str]]]
    title: str | None = None
    caption: str | None = None
    numbers: bool = False
    widest_label: int | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text | Table]:
        if self.title is not None:
            yield Text(self.title, style="table.title")
        for place, group in enumerate(self._groups(options.max_width)):
            if place:
                yield Text()
            yield self._table(group, options.max_width)
        if self.caption is not None:
            yield Text(self.caption, style="table.caption")

    def _groups(self, room: int) -> list[list[int]]:
        """Return the columns of each table: as few tables as hold them."""
        groups: list[list[int]] = []
        left = 0
        for index in range(1, len(self.columns)):
            need = self._least(index) + BETWEEN
            if not groups or left < need:
                groups.append([])
                left = room - self._label_width(room)
            left -= need
            groups[-1].append(index)
        return groups or [[]]

    def _least(self, index: int) -> int:
        heading, cells = self.columns[index]
        lines = (line for cell in cells for line in cell.split("\n"))
        return max(len(text) for text in (*heading.split(), *lines, ""))

    def _label_width(self, room: int) -> int:
        widest = room // 2 if self.widest_label is None else min(self.widest_label, room // 2)
        return min(self._least(0), max(1, widest))

    def _table(self, group: Sequence[int], room: int) -> Table:
        least = {0: self._label_width(room), **{index: self._least(index) for index in group}}
        whole = {index: max(width, len(self.columns[index][0])) for index, width in least.items()}
        fits = sum(whole.values()) + BETWEEN * len(group) <= room
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        for index, width in (whole if fits else least).items():
            right = self.numbers or index > 0
            table.add_column(
                Text(self.columns[index][0]),
                justify="right" if right else "left",
                width=width,
                overflow="fold",
            )
        for cells in zip(*(self.columns[index][1] for index in least), strict=True):
            table.add_row(*(Text(cell) for cell in cells))
        return table
