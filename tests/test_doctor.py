"""Doctor: what it says follows from what it found, and no probe can take it down."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gear_offline import doctor
from gear_offline.doctor import CORE_PACKAGES, OPTIONAL_PACKAGES, diagnose, print_diagnosis
from gear_offline.probes import PROBES, Probe, package_version, rdma_devices, run_probe

WORKS = Probe(works=True, reason="", found={})
FEATURES = ["cpu", "gpu", "memory", "rdma", "mujoco", "minari", "d4rl", "collect"]


def here(**found: Any) -> Probe:
    return Probe(works=True, reason="", found=found)


def broken(reason: str) -> Probe:
    return Probe(works=False, reason=reason, found={})


def diagnosis_with(
    monkeypatch: pytest.MonkeyPatch,
    probes: Mapping[str, Probe],
    *,
    installed: Mapping[str, str] | None = None,
    devices: tuple[dict[str, str], ...] = (),
) -> dict[str, Any]:
    """Diagnose a machine that answers as told; core packages are there unless `installed`."""
    answers = {"torch": here(threads=2, cuda_build=None, devices=[]), "mujoco": WORKS}
    answers["memory"] = here()
    answers |= dict(probes)
    present = dict.fromkeys((*CORE_PACKAGES, *answers), "1.0") if installed is None else installed
    monkeypatch.setattr(doctor, "probe", lambda name, *, seconds: answers[name])
    monkeypatch.setattr(doctor, "package_version", lambda name: present.get(name))
    monkeypatch.setattr(doctor, "rdma_devices", lambda: list(devices))
    return diagnose()


def feature(diagnosis: Mapping[str, Any], name: str) -> dict[str, Any]:
    return next(row for row in diagnosis["features"] if row["feature"] == name)


def test_this_machine() -> None:
    """The real thing: the core works where the tests run."""
    found = json.loads(json.dumps(diagnose(), allow_nan=False))
    assert found["healthy"] is True
    assert [row["feature"] for row in found["features"]] == FEATURES
    for row in found["features"]:
        assert set(row) == {"feature", "available", "path", "reason", "install"}
        assert row["path"] and row["reason"], "each says what will happen and why"
    names = [row["name"] for row in found["packages"]]
    assert names == [*CORE_PACKAGES, *OPTIONAL_PACKAGES]
    versions = {row["name"]: row["version"] for row in found["packages"]}
    assert versions["numpy"] == __import__("numpy").__version__
    assert found["python"]["version"] == ".".join(map(str, sys.version_info[:3]))
    assert found["cpu"]["usable"] >= 1
    assert found["memory_bytes"] > 1 << 28
    assert feature(found, "memory")["available"]
    assert feature(found, "mujoco")["available"] is (package_version("mujoco") is not None)


def test_printed_page_names_every_feature_and_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    found = diagnosis_with(monkeypatch, {"mujoco": broken("no simulator [here]")})
    page = io.StringIO()
    print_diagnosis(found, console=Console(file=page, width=100))
    for name in FEATURES:
        assert name in page.getvalue()
    assert "no simulator [here]" in page.getvalue(), "brackets are not taken for markup"
    assert "pip install 'gear-offline[mujoco]'" in page.getvalue()


def test_broken_core_is_unhealthy(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = diagnosis_with(monkeypatch, {"torch": broken("libtorch.so: cannot open")})
    assert bad["healthy"] is False
    assert "libtorch.so" in feature(bad, "cpu")["reason"]
    present = dict.fromkeys((set(CORE_PACKAGES) - {"h5py"}) | {"mujoco"}, "1.0")
    absent = diagnosis_with(monkeypatch, {}, installed=present)
    assert absent["healthy"] is False
    assert "h5py is not installed" in feature(absent, "cpu")["reason"]
    assert diagnosis_with(monkeypatch, {})["healthy"] is True


def test_gpu_path(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = {"name": "Made-up GPU", "memory_bytes": 1 << 30, "capability": "9.0"}
    torch = here(threads=8, cuda_build="13.0", devices=[gpu, gpu])
    both = feature(diagnosis_with(monkeypatch, {"torch": torch, "cupy": WORKS}), "gpu")
    assert both["available"] and "Made-up GPU" in both["path"] and both["install"] is None
    assert "2 CUDA devices" in both["reason"]
    only = feature(diagnosis_with(monkeypatch, {"torch": torch}), "gpu")
    assert only["available"] and "gear-offline[gpu]" in only["install"]
    blind = here(threads=8, cuda_build="13.0", devices=[])
    none = feature(diagnosis_with(monkeypatch, {"torch": blind}), "gpu")
    assert not none["available"] and "sees no device" in none["reason"]


@pytest.mark.parametrize(
    ("verbs", "state", "install"),
    [
        (WORKS, "ACTIVE", None),
        (broken("no libibverbs"), "ACTIVE", "apt install python3-pyverbs (Debian, Ubuntu)"),
        (WORKS, "DOWN", None),
    ],
)
def test_rdma_path(
    monkeypatch: pytest.MonkeyPatch, verbs: Probe, state: str, install: str | None
) -> None:
    device = {"name": "mlx5_0", "link_layer": "Ethernet", "state": state}
    found = feature(diagnosis_with(monkeypatch, {"pyverbs": verbs}, devices=(device,)), "rdma")
    assert found["available"] is (verbs.works and state == "ACTIVE")
    assert found["install"] == install
    assert "mlx5_0" in found["reason"]


def test_d4rl_files_need_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    without = feature(diagnosis_with(monkeypatch, {}), "d4rl")
    assert without["available"] and "our own reader" in without["path"]
    failing = feature(diagnosis_with(monkeypatch, {"d4rl": broken("missing MuJoCo")}), "d4rl")
    assert failing["available"] and "missing MuJoCo" in failing["reason"]


def test_probe_that_hangs_is_cut_off() -> None:
    found = run_probe("import time; time.sleep(60)", seconds=0.5)
    assert (found.works, found.reason) == (False, "no answer within 0.5 s")


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise RuntimeError('driver too old')", "RuntimeError: driver too old"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "ended by signal 11"),
        ("import sys; sys.exit(3)", "failed"),
        ("print('hello')", "answered nothing that can be read"),
        ("pass", "answered nothing that can be read"),
    ],
)
def test_probe_that_fails_says_why(code: str, reason: str) -> None:
    found = run_probe(code, seconds=60.0)
    assert (found.works, found.reason) == (False, reason)


def test_probe_reads_the_last_line() -> None:
    found = run_probe("print('a library greets'); print('{\"n\": 3}')", seconds=60.0)
    assert (found.works, found.found) == (True, {"n": 3})


def test_every_probe_is_python() -> None:
    for name, code in PROBES.items():
        compile(code, name, "exec")


def test_rdma_devices_as_the_kernel_shows_them(tmp_path: Path) -> None:
    for name, state in (("mlx5_1", "4: ACTIVE"), ("mlx5_0", "1: DOWN")):
        port = tmp_path / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "link_layer").write_text("InfiniBand\n")
    (tmp_path / "odd").mkdir()
    assert rdma_devices(tmp_path) == [
        {"name": "mlx5_0", "link_layer": "InfiniBand", "state": "DOWN"},
        {"name": "mlx5_1", "link_layer": "InfiniBand", "state": "ACTIVE"},
        {"name": "odd", "link_layer": "unknown", "state": "unknown"},
    ]
    assert rdma_devices(tmp_path / "absent") == []


def test_importing_doctor_loads_no_heavy_library() -> None:
    code = (
        "import sys, gear_offline.doctor; "
        "sys.exit(any(n in sys.modules for n in ('torch', 'cupy', 'mujoco', 'minari')))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    works, fails = (
        feature(diagnosis_with(monkeypatch, {"memory": answer}), "memory")
        for answer in (here(), broken("no memfd_create"))
    )
    assert works["available"] and not fails["available"]
    assert fails["reason"] == "no memfd_create"
