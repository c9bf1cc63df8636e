"""Tables of the terminal: nothing is cut, whatever the width."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from gear_offline.dataset.scores import reference_scores
from gear_offline.evaluation.results import EvaluationReport, TargetResult, TaskResult
from gear_offline.evaluation.split_table import SplitTable

WORDS = st.text("abcdefgh[]", min_size=1, max_size=9)
HEADINGS = st.lists(WORDS, min_size=1, max_size=3).map(" ".join)


def lines_of(table: SplitTable | EvaluationReport, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, record=True)
    if isinstance(table, EvaluationReport):
        table.print(console=console)
    else:
        console.print(table, highlight=False)
    return console.export_text().splitlines()


def evaluated(target: float, mean: float) -> TargetResult:
    return TargetResult(
        target=target,
        returns=np.linspace(mean - 1000, mean + 1000, 10),
        lengths=np.full(10, 1000),
        terminated=np.zeros(10, bool),
    )


@pytest.mark.parametrize(("width", "tables"), [(100, 1), (65, 1), (60, 2), (40, 2), (30, 4)])
def test_an_evaluation_is_readable_in_a_narrow_terminal(width: int, tables: int) -> None:
    task = TaskResult(
        name="",
        environment="Hopper-v5",
        targets=(evaluated(3600, 2250.2), evaluated(1800, 12500.3)),
        reference=reference_scores("hopper-medium-v2"),
        data_returns=None,
        seed=0,
        environments=4,
    )
    report = EvaluationReport(tasks=(task,), seconds=1.0, run="hopper_medium-s0", step=100_000)
    lines = lines_of(report, width)
    words = [word for line in lines for word in line.split()]
    assert max(map(len, lines)) <= width and "…" not in "".join(lines)
    for heading in ("achieved", "95", "interval", "std", "score", "length", "n", "100,000"):
        assert words.count(heading) == 1, heading
    assert words.count("return") == words.count("3,600") == words.count("1,800") == tables
    for cell in ("2,250.2", "12,500.3", f"{task.targets[0].std:.1f}", "10"):
        assert cell in words, cell
    (row,) = (line for line in lines if ".." in line and "3,600" in line)
    low, high = task.targets[0].ci95
    assert row.index("3,600") < row.index(f"{low:,.1f} .. {high:,.1f}")


@given(
    headings=st.lists(HEADINGS, min_size=2, max_size=7),
    rows=st.integers(0, 3),
    width=st.integers(30, 90),
    data=st.data(),
)
def test_every_word_is_whole_and_every_line_fits(
    headings: list[str], rows: int, width: int, data: st.DataObject
) -> None:
    columns = [
        (heading, data.draw(st.lists(WORDS, min_size=rows, max_size=rows))) for heading in headings
    ]
    lines = lines_of(SplitTable(columns=columns), width)
    assert max(map(len, lines)) <= width
    shown = [word for line in lines for word in line.split()]
    for heading, cells in columns[1:]:
        for word in (*heading.split(), *cells):
            assert word in shown


def test_many_columns_are_as_few_tables_as_hold_them() -> None:
    columns = [("name", ["row"]), *((f"c{k}", [f"{k:06d}"]) for k in range(9))]
    for width, tables in ((200, 1), (76, 1), (75, 2), (44, 2), (28, 3), (12, 9)):
        text = "\n".join(lines_of(SplitTable(columns=columns), width))
        assert text.count("row") == tables, width


def test_wide_names_of_rows_are_folded() -> None:
    table = SplitTable(columns=[("name", ["a" * 50]), ("value", ["12345"])], widest_label=20)
    lines = lines_of(table, 60)
    assert [line.count("a") for line in lines if "aa" in line] == [20, 20, 10]
    assert max(len(line) for line in lines_of(table, 16)) <= 16
