"""What is installed, what is missing, and which path each feature will take.

Packages are looked up without importing them; what has to be tried is tried by
`gear_offline.probes` in processes of its own.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

import gear_offline
from gear_offline.core.text import count_text
from gear_offline.probes import (
    PROBE_SECONDS,
    PROBES,
    Probe,
    cpu_facts,
    memory_bytes,
    package_version,
    probe,
    rdma_devices,
)

CORE_PACKAGES = (
    "numpy",
    "torch",
    "transformers",
    "accelerate",
    "safetensors",
    "h5py",
    "gymnasium",
    "pydantic",
    "PyYAML",
    "typer",
    "rich",
    "xxhash",
    "matplotlib",
    "tensorboard",
)
# package -> (what it is for, how to get it)
OPTIONAL_PACKAGES = {
    "mujoco": ("simulator of the locomotion tasks", "pip install 'gear-offline[mujoco]'"),
    "minari": ("Minari datasets", "pip install 'gear-offline[minari]'"),
    "pyarrow": ("Minari datasets in arrow format", "pip install 'gear-offline[minari]'"),
    "d4rl": ("d4rl:NAME through D4RL's own package", "pip install 'gear-offline[d4rl]'"),
    "cupy": ("GPU kernels", "pip install 'gear-offline[gpu]' (CUDA 12: [gpu-cuda12])"),
    "pyverbs": ("RDMA between nodes", "apt install python3-pyverbs (Debian, Ubuntu)"),
    "stable-baselines3": ("collecting with stronger policies", "pip install 'gear-offline[rl]'"),
    "sbx-rl": ("collecting with stronger policies, faster", "pip install 'gear-offline[rl]'"),
    "d3rlpy": ("peer in benchmarks", "pip install 'gear-offline[bench]'"),
    "torchrl": ("peer in benchmarks", "pip install 'gear-offline[bench]'"),
}


@dataclass(frozen=True, kw_only=True)
class Feature:
    """What will happen when a feature is used here.

    Attributes
    ----------
    feature
        Short name.
    available
        Whether it can be used on this machine now.
    path
        What will run when it is asked for.
    reason
        Why that path and no other.
    install
        What to do to get it, ``None`` when nothing is missing.
    """

    feature: str
    available: bool
    path: str
    reason: str
    install: str | None = None


def diagnose(*, seconds: float = PROBE_SECONDS) -> dict[str, Any]:
    """Look at this machine and return a JSON-able document; see docs/evaluation.md for its keys.

    Parameters
    ----------
    seconds
        Time limit of each probe.
    """
    always = ("torch", "mujoco", "memory")
    wanted = [name for name in PROBES if package_version(name) or name in always]
    with ThreadPoolExecutor(max_workers=4) as pool:
        tried = dict(
            zip(wanted, pool.map(lambda n: probe(n, seconds=seconds), wanted), strict=True)
        )
    missing = {
        name: Probe(works=False, reason=f"{name} is not installed", found={})
        for name in PROBES
        if name not in tried
    }
    tried |= missing
    cpu, devices = cpu_facts(), rdma_devices()
    features = [
        _cpu_feature(cpu, tried),
        _gpu_feature(tried),
        _memory_feature(tried["memory"]),
        _rdma_feature(tried["pyverbs"], devices),
        _simple("mujoco", tried["mujoco"], "collect and evaluate MuJoCo tasks with Gymnasium"),
        _simple("minari", tried["minari"], "read minari:ID and Minari directories"),
        _d4rl_feature(tried["d4rl"]),
        _collect_feature(),
    ]
    return {
        "gear_offline": gear_offline.__version__,
        "healthy": features[0].available,
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "platform": platform.platform(),
        "cpu": cpu,
        "memory_bytes": memory_bytes(),
        "packages": _packages(),
        "torch": dict(tried["torch"].found),
        "rdma_devices": devices,
        "features": [asdict(feature) for feature in features],
    }


def _packages() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [
        {"name": name, "version": package_version(name), "core": True, "for": "", "install": None}
        for name in CORE_PACKAGES
    ]
    for row in rows:
        row["install"] = None if row["version"] else f"pip install {row['name']}"
    for name, (purpose, install) in OPTIONAL_PACKAGES.items():
        found = package_version(name)
        rows.append(
            {
                "name": name,
                "version": found,
                "core": False,
                "for": purpose,
                "install": None if found else install,
            }
        )
    return rows


def _simple(name: str, probe: Probe, path: str) -> Feature:
    if probe.works:
        return Feature(feature=name, available=True, path=path, reason="tried: works")
    return Feature(
        feature=name,
        available=False,
        path="refused with an error",
        reason=probe.reason,
        install=OPTIONAL_PACKAGES[name][1],
    )


def _cpu_feature(cpu: Mapping[str, Any], tried: Mapping[str, Probe]) -> Feature:
    absent = [name for name in CORE_PACKAGES if package_version(name) is None]
    torch = tried["torch"]
    if absent or not torch.works:
        broken = [] if torch.works else [f"importing torch and transformers: {torch.reason}"]
        reason = "; ".join([*(f"{name} is not installed" for name in absent), *broken])
        return Feature(
            feature="cpu",
            available=False,
            path="none: the core is broken",
            reason=reason,
            install="install gear_offline again in a fresh virtual environment",
        )
    half = {"avx512_bf16", "amx_bf16", "bf16"} & set(cpu["extensions"])
    found = ", ".join(cpu["extensions"]) or "no known vector extension"
    return Feature(
        feature="cpu",
        available=True,
        path=f"{count_text(torch.found['threads'], 'thread')}, float32"
        + (" or bfloat16" if half else ""),
        reason=f"{count_text(cpu['usable'], 'usable core')} with {found}"
        + ("" if half else "; no bfloat16 arithmetic, which would be slower than float32"),
    )


def _gpu_feature(tried: Mapping[str, Probe]) -> Feature:
    torch, cupy = tried["torch"], tried["cupy"]
    devices = torch.found.get("devices", [])
    if devices:
        return Feature(
            feature="gpu",
            available=True,
            path=f"model on cuda:0 ({devices[0]['name']}), "
            + (
                "batches selected and gathered by it, one CUDA graph a training step"
                if cupy.works
                else "batches gathered on the CPU and copied, steps launched one by one"
            ),
            reason=f"{count_text(len(devices), 'CUDA device')}; CuPy "
            + ("works" if cupy.works else f"is not usable: {cupy.reason}"),
            install=None if cupy.works else OPTIONAL_PACKAGES["cupy"][1],
        )
    build, install = torch.found.get("cuda_build"), None
    if Path("/proc/driver/nvidia/version").exists() and build is None:
        reason = "an NVIDIA driver, but a torch without CUDA"
        install = "pip install --force-reinstall torch"
    elif build is not None:
        reason = f"torch is built for CUDA {build}, but sees no device"
    else:
        reason = "no NVIDIA driver on this machine"
    return Feature(
        feature="gpu", available=False, path="device=auto uses the CPU", reason=reason,
        install=install,
    )  # fmt: skip


def _memory_feature(probe: Probe) -> Feature:
    """How tables get into memory that processes of a node share."""
    if not probe.works:
        return Feature(
            feature="memory",
            available=False,
            path="no table that several processes share",
            reason=probe.reason,
        )
    return Feature(
        feature="memory",
        available=True,
        path="one table for all processes of a node",
        reason="tried: processes share memory",
    )


def _rdma_feature(verbs: Probe, devices: list[dict[str, str]]) -> Feature:
    active = [d["name"] for d in devices if d["state"] == "ACTIVE"]
    if verbs.works and active:
        return Feature(
            feature="rdma",
            available=True,
            path="exchange between nodes by one-sided RDMA reads",
            reason=f"pyverbs works; active devices: {', '.join(active)}",
        )
    shown = ", ".join(f"{d['name']} ({d['state']})" for d in devices) or "none"
    return Feature(
        feature="rdma",
        available=False,
        path="exchange between nodes by torch.distributed",
        reason=f"RDMA devices: {shown}; " + ("pyverbs works" if verbs.works else verbs.reason),
        install=None if verbs.works or not devices else OPTIONAL_PACKAGES["pyverbs"][1],
    )


def _d4rl_feature(probe: Probe) -> Feature:
    if probe.works:
        return Feature(
            feature="d4rl",
            available=True,
            path="d4rl:NAME through D4RL's package; files in D4RL's layout by our own reader",
            reason="tried: works",
        )
    return Feature(
        feature="d4rl",
        available=True,
        path="files in D4RL's layout by our own reader; D4RL's package is not used",
        reason=f"the package is not needed to read files; {probe.reason}",
    )


def _collect_feature() -> Feature:
    found = [n for n in ("stable-baselines3", "sbx-rl") if package_version(n)]
    return Feature(
        feature="collect",
        available=True,
        path="random, policy file, ARS" + (f", {', '.join(found)}" if found else ""),
        reason="ARS needs NumPy alone"
        + ("" if found else "; stronger policies need an RL library, which is not installed"),
        install=None if found else OPTIONAL_PACKAGES["stable-baselines3"][1],
    )


def print_diagnosis(diagnosis: Mapping[str, Any], *, console: Console | None = None) -> None:
    """Print what `diagnose` returned as tables."""
    console = console or Console()
    cpu, memory = diagnosis["cpu"], diagnosis["memory_bytes"]
    console.print(
        f"gear_offline {diagnosis['gear_offline']} on Python {diagnosis['python']['version']}, "
        f"{diagnosis['platform']}\n{cpu['model']}, "
        f"{cpu['usable']} of {count_text(cpu['cores'], 'core')} usable, "
        + (f"{memory / 2**30:.1f} GiB of memory" if memory else "memory unknown"),
        highlight=False,
    )
    features = Table(title="Features", title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("feature", "here", "path it will take, and why"):
        features.add_column(heading, overflow="fold")
    for row in diagnosis["features"]:
        here = Text("yes", "green") if row["available"] else Text("no", "yellow")
        lines = Text(row["path"]).append(f"\n{row['reason']}", "dim")
        if row["install"]:
            lines.append(f"\n{row['install']}", "cyan")
        features.add_row(row["feature"], here, lines)
    console.print(features)
    packages = Table(title="Packages", title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("package", "version", "for"):
        packages.add_column(heading, overflow="fold")
    for row in diagnosis["packages"]:
        absent = Text("missing", "red") if row["core"] else Text("not installed", "dim")
        purpose = Text("core" if row["core"] else row["for"])
        if row["install"]:
            purpose.append(f": {row['install']}", "cyan")
        packages.add_row(row["name"], row["version"] or absent, purpose)
    console.print(packages)
    if not diagnosis["healthy"]:
        console.print("[red]The core is broken: see the line `cpu` above.[/]")
