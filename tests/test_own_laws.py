"""Strategies of the user's own, where another process has to know them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from gear_offline.sampling import selection
from gear_offline.sampling.own import MAIN_ELSEWHERE, own_laws, register_own_laws

LAW = """
from gear_offline.sampling.selection import WeightedEpisodes, register

@register("mine")
class Mine(WeightedEpisodes):
    name = "mine"

    def __init__(self, index, *, power: float = 1.0):
        super().__init__(index, index.lengths**power)

if __name__ == "__main__":
    raise SystemExit("a worker must not start the program again")
"""


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, factory in list(selection._FACTORIES.items()):
        if not factory.__module__.startswith("gear_offline."):  # another test's
            monkeypatch.delitem(selection._FACTORIES, name)
    yield
    selection._FACTORIES.pop("mine", None)
    for name in ("law_of_mine", MAIN_ELSEWHERE):
        sys.modules.pop(name, None)


def test_those_of_the_package_are_known_everywhere() -> None:
    assert own_laws() == []


def test_a_module_is_imported_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "law_of_mine.py").write_text(LAW)
    monkeypatch.syspath_prepend(str(tmp_path))
    __import__("law_of_mine")
    assert own_laws() == ["law_of_mine"]
    selection._FACTORIES.pop("mine")
    sys.modules.pop("law_of_mine")
    register_own_laws(["law_of_mine"])
    assert "mine" in selection.selection_names()


@pytest.mark.parametrize("as_module", [False, True])
def test_the_main_file_is_run_under_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_module: bool
) -> None:
    file = tmp_path / "law_of_mine.py"
    file.write_text(LAW)
    main = ModuleType("__main__")
    main.__file__ = str(file)
    if as_module:  # python -m law_of_mine
        monkeypatch.syspath_prepend(str(tmp_path))
        main.__spec__ = __import__("importlib.util").util.find_spec("law_of_mine")
    monkeypatch.setitem(sys.modules, "__main__", main)
    exec(LAW.split("if __name__")[0], main.__dict__)
    found = own_laws()
    assert found == ["law_of_mine" if as_module else str(file)]
    selection._FACTORIES.pop("mine")
    register_own_laws(found)
    assert "mine" in selection.selection_names()


def test_what_has_no_file_cannot_be_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    exec(LAW.split("if __name__")[0], main.__dict__)
    assert own_laws() == []
