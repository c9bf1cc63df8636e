"""Many runs as one: `run.sweep` trains the trials of a grid, on a CPU in worker processes, on a GPU
together; `trials` has the grid, `directory` the files, `table` the table over seeds.
"""

from typing import Any

__all__ = ["sweep"]


def __getattr__(name: str) -> Any:
    if name == "sweep":  # loads torch, which the grid is made without
        from gear_offline.sweep.run import sweep

        return sweep
    raise AttributeError(f"module 'gear_offline.sweep' has no attribute {name!r}")
