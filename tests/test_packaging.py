"""The four top-level folders install inside gear_offline, and shadow nothing."""

import tomllib
import zipfile
from importlib import import_module
from pathlib import Path

import pytest

from tests.support import ROOT, run_python

FOLDERS = ("models", "loaders", "kernels", "recipes")
SHIPPED = {".py", ".c", ".cu", ".cuh", ".yaml", ".csv", ".typed", ".pyi"}


def shipped_files(folder: str) -> list[Path]:
    paths = [path.relative_to(ROOT) for path in (ROOT / folder).rglob("*")]
    links = [Path("gear_offline", name) for name in FOLDERS]
    shipped = [path for path in paths if path.suffix in SHIPPED and "__pycache__" not in path.parts]
    return [path for path in shipped if not any(path.is_relative_to(link) for link in links)]


def installed_name(path: Path) -> str:
    return path.as_posix() if path.parts[0] == "gear_offline" else f"gear_offline/{path}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_link_points_at_top_level_folder(folder: str) -> None:
    assert (ROOT / "gear_offline" / folder).readlink() == Path("..", folder)


def test_transformers_is_whole_where_our_folders_are_on_the_path() -> None:
    """It imports Hugging Face's `kernels` where that is installed; ours is found in its place."""
    assert Path(str(import_module("kernels").__file__)).is_relative_to(ROOT)
    assert import_module("transformers.integrations.hub_kernels")
    assert import_module("transformers").DecisionTransformerModel


def test_pyproject_lists_every_package() -> None:
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    files = [p for f in (*FOLDERS, "gear_offline") for p in shipped_files(f)]
    parents = {Path(installed_name(p)).parent for p in files if p.suffix in {".py", ".yaml"}}
    want = {".".join(p.parts) for p in parents}
    assert set(table["packages"]) == want
    assert set(table["package-dir"]) == want


@pytest.mark.slow
def test_wheel_holds_every_file_and_nothing_else(tmp_path: Path) -> None:
    made = run_python("-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, ROOT)
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
    found = run_python("-c", code, check=True)
    assert found.stdout.strip() == "[]"


def test_training_and_playing_import_no_more_than_they_use(tmp_path: Path) -> None:
    code = """
import sys
import numpy as np
import gear_offline as go
heavy = {"transformers", "torch._dynamo", "sympy", "scipy", "tensorboard", "pandas", "matplotlib"}
class Look(go.Callback):
    def on_evaluation(self, *event):
        print(sorted(heavy & set(sys.modules)))
options = {"train.steps": 2, "train.device": "cpu", "evaluate.episodes": 1, "train.trackers": []}
run = go.train("smoke", options, out="run", callbacks=[Look()], quiet=True)
heavy.remove("matplotlib")  # which draws the report
go.train("run", {"train.steps": 3}, resume=True, callbacks=[Look()], quiet=True)
go.evaluate(run, episodes=1, out="again.json", quiet=True)
policy = go.load_policy(run, device="cpu")
policy.reset(-100.0)
policy.act(np.zeros((1, 3), np.float32))
policy.save("policy")
print(sorted(heavy & set(sys.modules)))
"""
    found = run_python("-c", code, cwd=tmp_path, check=True)
    assert found.stdout.splitlines() == ["[]"] * 3


def test_every_public_name_resolves_and_dir_lists_no_other() -> None:
    import gear_offline

    assert dir(gear_offline) == sorted(gear_offline.__all__)
    for name in gear_offline.__all__:
        assert name == "__version__" or callable(getattr(gear_offline, name)), name
    with pytest.raises(AttributeError, match="no attribute 'nothing_like_this'"):
        _ = gear_offline.nothing_like_this  # type: ignore[attr-defined]


@pytest.mark.parametrize("before", ["", "import gear_offline.data.convert.shards", "go.convert"])
def test_a_function_may_have_the_name_of_its_package(before: str) -> None:
    code = f"import gear_offline as go, pickle\n{before}\n"
    code += "from gear_offline.data.convert import shards\nfrom gear_offline import convert\n"
    code += "assert pickle.loads(pickle.dumps(go.convert)) is convert is go.convert\n"
    code += "try: convert('nothing.hdf5', 'out')\n"
    code += "except go.InputError as error: print(error.code, shards.__name__)"
    done = run_python("-c", code)
    assert done.stdout == "SOURCE_READ gear_offline.data.convert.shards\n", done.stderr


@pytest.mark.slow
def test_an_editable_install_is_seen_by_type_checkers(tmp_path: Path) -> None:
    """As `.ci/setup` installs it: a path that tools follow, not an import hook they cannot."""
    assert "-C editable_mode=compat" in (ROOT / ".ci" / "setup").read_text()
    venv = tmp_path / "venv"
    run_python("-m", "venv", "--without-pip", venv, check=True)
    (packages,) = venv.glob("lib/python*/site-packages")
    (packages / "gear_offline.pth").write_text(f"{ROOT}\n")  # what that mode writes
    user = tmp_path / "user.py"
    user.write_text(
        "import gear_offline as go\n"
        "reveal_type(go.convert('a.hdf5', 'b'))\n"
        "go.GearLoader('data', batch_size='64')\n"
    )
    options = f"--follow-imports=silent --ignore-missing-imports --cache-dir {tmp_path} "
    options += f"--python-executable {venv}/bin/python {user}"
    done = run_python("-m", "mypy", *options.split(), cwd=tmp_path, variables={"PYTHONPATH": ""})
    assert 'Revealed type is "gear_offline.data.dataset.manifest.Manifest"' in done.stdout
    assert 'Argument "batch_size" to "GearLoader" has incompatible type "str"' in done.stdout
