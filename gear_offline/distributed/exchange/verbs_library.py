"""pyverbs, versions 44 to 59, behind one namespace.

Versions differ in where their constants live, and importing pyverbs configures the root logger of
the program.  Both are put right here and nowhere else.
"""

from __future__ import annotations

import enum
import logging
from functools import cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from gear_offline.errors import UnavailableError

_CLASSES = {
    "device": ("Context",),
    "pd": ("PD",),
    "mr": ("MR", "DmaBufMR"),
    "cq": ("CQ",),
    "qp": ("QP", "QPInitAttr", "QPCap", "QPAttr"),
    "wr": ("SGE", "SendWR"),
    "addr": ("AHAttr", "GlobalRoute", "GID"),
    "pyverbs_error": ("PyverbsError", "PyverbsRDMAError"),
}


@cache
def load_verbs() -> Any:
    """Return a namespace with pyverbs' classes and, as integers, its ``IBV_*`` constants.

    Raises
    ------
    UnavailableError
        ``VERBS_MISSING`` if pyverbs is not installed, or cannot be loaded.
    """
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        found = SimpleNamespace(**_constants())
        for module, names in _CLASSES.items():
            loaded = import_module(f"pyverbs.{module}")
            for name in names:
                setattr(found, name, getattr(loaded, name))
    except (ImportError, AttributeError) as error:
        raise UnavailableError(
            "VERBS_MISSING",
            f"pyverbs cannot be loaded: {error}",
            remedy="install the package of your distribution (Debian, Ubuntu: apt install "
            "python3-pyverbs; versions 44 to 59), or use mode='off'",
        ) from error
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    return found


def _constants() -> dict[str, int]:
    """Return the ``IBV_*`` constants: flat in older versions, members of classes in newer ones."""
    try:
        old = import_module("pyverbs.enums")
    except ModuleNotFoundError as error:
        if error.name != "pyverbs.enums":
            raise
        new = import_module("pyverbs.libibverbs_enums")
        classes = [c for c in vars(new).values() if isinstance(c, type)]
        return {
            name: int(member.value)
            for found in classes
            if issubclass(found, enum.Enum)
            for name, member in found.__members__.items()
        }
    return {
        name: int(value)
        for name, value in vars(old).items()
        if name.startswith("IBV_") and isinstance(value, int)
    }
