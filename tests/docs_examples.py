"""Write the Python blocks of each page as a module, for the type checker (make types)."""

import sys
from pathlib import Path

from tests.support import ROOT
from tests.test_docs import WITH_PYTHON, blocks

FREE = "# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False\n"  # as users write
GIVEN = """
import numpy as np
import gear_offline
batch: gear_offline.Batch = next(gear_offline.GearLoader("d", batch_size=4, context_length=5))
observations, rewards = np.zeros((2, 4), np.float32), np.zeros(2)
"""


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("example_*.py"):  # of pages that are gone
        old.unlink()
    for page in WITH_PYTHON:
        parts = page.relative_to(ROOT).with_suffix("").parts
        name = "_".join(["example", *parts]).replace("-", "_")
        examples = "\n".join(blocks(page.read_text(), "python"))
        given = GIVEN if page.name == "model.md" else ""  # of test_python_blocks_run
        (folder / f"{name}.py").write_text(FREE + given + examples)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
