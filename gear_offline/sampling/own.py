"""Strategies of the user's own in other processes: where they are registered, and doing so again.

A process that is started anew knows the strategies of the package alone.  As `multiprocessing` does
where it spawns, the program's main file is run there under another name, so that what stands
behind ``if __name__ == "__main__"`` is not.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from gear_offline.sampling.base import _FACTORIES

PACKAGE = "gear_offline."
MAIN_ELSEWHERE = "__mp_main__"  # the name that multiprocessing gives it


def own_laws() -> list[str]:
    """Return modules, or absolute paths of main files, in which strategies were registered.

    Those of the package are not among them, nor what was registered without a file.
    """
    found = []
    for module in sorted({str(factory.__module__) for factory in _FACTORIES.values()}):
        if module.startswith(PACKAGE):
            continue
        origin: str | None = module
        if module == "__main__":
            main = sys.modules["__main__"]
            spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
            by_file = None if file is None else str(Path(file).resolve())
            origin = by_file if spec is None else spec.name
        if origin is not None:
            found.append(origin)
    return found


def register_own_laws(origins: Sequence[str]) -> None:
    """Import what `own_laws` has returned in another process."""
    for origin in origins:
        if not Path(origin).is_absolute():
            importlib.import_module(origin)
            continue
        spec = spec_from_file_location(MAIN_ELSEWHERE, origin)
        assert spec is not None and spec.loader is not None, "a file that Python ran"
        module = module_from_spec(spec)
        sys.modules[MAIN_ELSEWHERE] = module  # dataclasses look there for their module
        spec.loader.exec_module(module)
