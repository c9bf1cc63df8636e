"""The quickstart: a script, and a notebook of the same cells, which run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def cells_of_script() -> list[tuple[str, str]]:
    """Return kind and text of each cell of the script."""
    parts = re.split(r"^# %%(.*)\n", (EXAMPLES / "quickstart.py").read_text(), flags=re.M)[1:]
    cells = []
    for kind, text in zip(parts[::2], parts[1::2], strict=True):
        if kind == " [markdown]":
            cells.append(("markdown", re.sub(r"^# ?", "", text.strip(), flags=re.M)))
        else:
            cells.append(("code", text.strip()))
    return cells


@pytest.mark.slow
def test_the_notebook_runs_and_is_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = json.loads((EXAMPLES / "quickstart.ipynb").read_text())["cells"]
    notebook = [(cell["cell_type"], "".join(cell["source"])) for cell in cells]
    assert notebook == cells_of_script()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    names: dict[str, Any] = {}
    for kind, text in notebook:
        if kind == "code":
            exec(compile(text, "quickstart", "exec"), names)
    assert names["achieved"] > 0 and len(names["report"].tasks[0].targets) == 1
    assert "asked return" in capsys.readouterr().out
