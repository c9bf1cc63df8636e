"""The four top-level folders install inside gear_offline, and shadow nothing."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("models", "loaders", "kernels", "recipes")
SHIPPED = {".py", ".c", ".cu", ".cuh", ".yaml", ".csv", ".typed"}


def shipped_files(folder: str) -> list[Path]:
    links = {f"gear_offline/{name}" for name in FOLDERS}
    return [
        path.relative_to(ROOT)
        for path in (ROOT / folder).rglob("*")
        if path.suffix in SHIPPED
        and "/".join(path.relative_to(ROOT).parts[:2]) not in links
        and "__pycache__" not in path.parts
    ]


def installed_name(path: Path) -> str:
    return path.as_posix() if path.parts[0] == "gear_offline" else f"gear_offline/{path}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_link_points_at_top_level_folder(folder: str) -> None:
    assert (ROOT / "gear_offline" / folder).readlink() == Path("..", folder)


@pytest.mark.parametrize("folder", FOLDERS)
def test_folder_cannot_shadow_an_installed_package(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists()


def test_pyproject_lists_every_package() -> None:
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    files = [p for f in (*FOLDERS, "gear_offline") for p in shipped_files(f)]
    parents = {Path(installed_name(p)).parent for p in files if p.suffix in {".py", ".yaml"}}
    want = {".".join(p.parts) for p in parents}
    assert set(table["packages"]) == want
    assert set(table["package-dir"]) == want


@pytest.mark.slow
def test_wheel_holds_every_file_and_nothing_else(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path)]
    made = subprocess.run([*build, str(ROOT)], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr[-2000:]
    (wheel,) = tmp_path.glob("*.whl")
    names = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    wanted = {installed_name(p) for f in (*FOLDERS, "gear_offline") for p in shipped_files(f)}
    assert wanted - names == set()
    assert {n.split("/")[0] for n in names} == {"gear_offline"}


def test_import_loads_neither_torch_nor_cupy() -> None:
    code = (
        "import sys, gear_offline, gear_offline.cli.main;"
        "print(sorted({'torch', 'cupy', 'transformers', 'h5py'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_every_public_name_resolves_and_is_no_module() -> None:
    import gear_offline

    for name in gear_offline.__all__:
        value = getattr(gear_offline, name)
        assert type(value).__name__ != "module", name
        assert not (ROOT / "gear_offline" / f"{name}.py").exists(), f"{name} would hide a module"
    with pytest.raises(AttributeError, match="no attribute 'nothing_like_this'"):
        _ = gear_offline.nothing_like_this
