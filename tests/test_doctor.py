"""Doctor: what it says follows from what it found, and no attempt can take it down."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gear_offline.analysis import doctor
from gear_offline.analysis.doctor import (
    CORE_PACKAGES,
    OPTIONAL_PACKAGES,
    PROBES,
    Probe,
    diagnose,
    package_version,
    print_diagnosis,
    probe,
    rdma_devices,
)
from tests.support import Captured, Patch

FEATURES = ["cpu", "gpu", "rdma", "mujoco"]
GPU = {"name": "NVIDIA H200", "memory_bytes": 1, "capability": "9.0"}


def here(**found: Any) -> Probe:
    return Probe(True, facts=found)


def diagnosis_with(
    monkeypatch: Patch,
    probes: Mapping[str, Probe] | None = None,
    *,
    missing: tuple[str, ...] = (),
    devices: tuple[dict[str, str], ...] = (),
) -> dict[str, Any]:
    """Diagnose a machine that answers as told, in which all is installed but what is `missing`."""
    answers = {code: here() for code in PROBES.values()}
    answers[PROBES["torch"]] = here(threads=2, cuda_build=None, devices=[])
    answers |= {PROBES[name]: answer for name, answer in (probes or {}).items()}
    monkeypatch.setattr(doctor, "probe", lambda code, *, seconds: answers[code])
    monkeypatch.setattr(doctor, "package_version", lambda n: None if n in missing else "1.0")
    monkeypatch.setattr(doctor, "rdma_devices", lambda: list(devices))
    return diagnose()


def feature(diagnosis: Mapping[str, Any], name: str) -> dict[str, Any]:
    return next(row for row in diagnosis["features"] if row["feature"] == name)


def test_this_machine(capsys: Captured, monkeypatch: Patch) -> None:
    """The real thing: the core works where the tests run."""
    found = json.loads(json.dumps(diagnose(), allow_nan=False))
    assert found["healthy"] is True
    assert [row["feature"] for row in found["features"]] == FEATURES
    for row in found["features"]:
        assert row["path"] and row["reason"], "each says what will happen and why"
    names = [row["name"] for row in found["packages"]]
    assert names == [*CORE_PACKAGES, *OPTIONAL_PACKAGES]
    versions = {row["name"]: row["version"] for row in found["packages"]}
    assert versions["numpy"] == __import__("numpy").__version__
    assert found["python"]["version"] == ".".join(map(str, sys.version_info[:3]))
    assert found["cpu"]["usable"] >= 1 and found["memory_bytes"] > 1 << 28
    assert feature(found, "mujoco")["available"] is (package_version("mujoco") is not None)
    monkeypatch.setenv("COLUMNS", "80")
    print_diagnosis(found)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) < 40


def test_what_is_missing_is_printed_with_its_remedy(monkeypatch: Patch, capsys: Captured) -> None:
    broken = Probe(False, "no simulator [here]")
    print_diagnosis(diagnosis_with(monkeypatch, {"mujoco": broken}, missing=("numpy",)))
    page = capsys.readouterr().out
    assert "no simulator [here]" in page, "brackets are not taken for markup"
    assert "pip install 'gear-offline[mujoco]'" in page
    assert "pip install numpy  # numpy: core" in page.splitlines(), "a line to be copied"


def test_the_path_of_a_gpu(monkeypatch: Patch) -> None:
    cards, none = here(threads=2, devices=[GPU]), here(threads=2, cuda_build="13", devices=[])
    for torch, cupy, available, path, install in (
        (cards, here(), True, "one CUDA graph a training step", None),
        (cards, Probe(False, "x"), True, "gathered on the CPU", "cupy"),
        (none, here(), False, "uses the CPU", None),
    ):
        row = feature(diagnosis_with(monkeypatch, {"torch": torch, "cupy": cupy}), "gpu")
        assert row["available"] is available and path in row["path"]
        assert row["install"] == (install and OPTIONAL_PACKAGES[install][1])


def test_a_broken_core_is_not_healthy(monkeypatch: Patch) -> None:
    for diagnosis in (
        diagnosis_with(monkeypatch, missing=("h5py",)),
        diagnosis_with(monkeypatch, {"torch": Probe(False)}),
    ):
        assert diagnosis["healthy"] is False
        assert "install" in feature(diagnosis, "cpu")["install"]


def test_rdma_needs_an_active_device_and_pyverbs(tmp_path: Path, monkeypatch: Patch) -> None:
    port = tmp_path / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (tmp_path / "odd").mkdir()
    devices = rdma_devices(tmp_path)
    assert devices == [{"name": "mlx5_0", "state": "ACTIVE"}, {"name": "odd", "state": "unknown"}]
    assert rdma_devices(tmp_path / "nothing") == []
    for given, pyverbs, available in (
        (devices, here(), True),
        (devices[1:], here(), False),
        (devices, Probe(False, "no"), False),
    ):
        found = diagnosis_with(monkeypatch, {"pyverbs": pyverbs}, devices=tuple(given))
        assert feature(found, "rdma")["available"] is available


def test_an_attempt_that_fails_is_a_reason() -> None:
    for code, reason in {
        "import time; time.sleep(60)": "no answer within 1 s",
        "import os; os.abort()": "ended by signal 6",
        "import nothing_like_this": "ModuleNotFoundError: No module named 'nothing_like_this'",
        "raise SystemExit(3)": "failed",
    }.items():
        found = probe(code, seconds=1 if "sleep" in code else 60)
        assert not found.works and found.reason == reason
    assert probe("print('noise'); facts = {'a': 1}").facts == {"a": 1}
