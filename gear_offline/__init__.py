"""gear_offline: offline-RL dataset engine with a Decision Transformer trainer.

The public names are those that ``__init__.pyi`` imports, which type checkers read too.  They load
on first use; importing this package loads neither torch nor cupy.
"""

from __future__ import annotations

# A function has the name of its package.  Python binds a package here when it is first
# imported and never again, so that afterwards `__getattr__` gives the function.
from gear_offline import sweep

del sweep

with open(f"{__file__}i", encoding="utf-8") as _stub:  # from MODULE import NAME as NAME
    _HOMES = {line.split()[-1]: line.split()[1] for line in _stub if line.startswith("from ")}

__all__ = [*sorted(_HOMES), "__version__"]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        from importlib import import_module  # slow to load

        value = getattr(import_module(_HOMES[name]), name)
    elif name == "__version__":
        value = _version()
    else:
        raise AttributeError(f"module 'gear_offline' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("gear-offline")
    except PackageNotFoundError:  # a checkout that was never installed
        return "0.0.0+checkout"
