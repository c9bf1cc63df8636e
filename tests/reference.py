"""The reference of public names that `make api` writes: its modules and what their pages show."""

from __future__ import annotations

import re
from importlib import import_module

from tests.docs_support import ROOT


def reference() -> list[str]:
    """Return the modules of which `make api` writes pages."""
    text = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    found = re.search(r"^API = gear_offline \$\(addprefix gear_offline\.,(.*)\)$", text, re.M)
    assert found, "the Makefile's API list reads otherwise"
    return ["gear_offline", *(f"gear_offline.{name}" for name in found[1].split())]


def names_of(module: str) -> dict[str, object]:
    """Return what the page of a module shows: name to object."""
    home = import_module(module)
    own = [n for n, v in vars(home).items() if getattr(v, "__module__", "") == module]
    names = getattr(home, "__all__", [n for n in own if not n.startswith("_")])
    return {name: getattr(home, name) for name in names}
