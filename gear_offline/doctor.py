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
    "numpy", "torch", "transformers", "accelerate", "safetensors", "h5py", "gymnasium", "pydantic",
    "PyYAML", "typer", "rich", "xxhash", "matplotlib", "tensorboard",
)  # fmt: skip
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


@dataclass(frozen=True)
class Feature:
    """What will happen when a feature is used here."""

    feature: str
    available: bool
    path: str  # what will run when it is asked for
    reason: str  # why that path and no other
    install: str | None = None  # how to get it, None when nothing is missing


def diagnose(*, seconds: float = PROBE_SECONDS) -> dict[str, Any]:
    """Return what this machine has (docs/evaluation.md has the keys); `seconds` a probe at most."""
    always = ("torch", "mujoco", "memory")
    wanted = [name for name in PROBES if package_version(name) or name in always]
    with ThreadPoolExecutor(max_workers=4) as pool:
        answers = pool.map(lambda name: probe(name, seconds=seconds), wanted)
        tried = dict(zip(wanted, answers, strict=True))
    for name in PROBES:
        tried.setdefault(name, Probe(works=False, reason=f"{name} is not installed", found={}))
    cpu, devices = cpu_facts(), rdma_devices()
    features = [
        _cpu_feature(cpu, tried["torch"]),
        _gpu_feature(tried["torch"], tried["cupy"]),
        _memory_feature(tried["memory"]),
        _rdma_feature(tried["pyverbs"], devices),
        _simulator_feature("mujoco", tried, "collect and evaluate MuJoCo tasks with Gymnasium"),
        _simulator_feature("minari", tried, "read minari:ID and Minari directories"),
        _d4rl_feature(tried["d4rl"]),
        _collect_feature(),
    ]
    packages = [_package(name, "", f"pip install {name}", core=True) for name in CORE_PACKAGES]
    packages += [_package(name, *known, core=False) for name, known in OPTIONAL_PACKAGES.items()]
    return {
        "gear_offline": gear_offline.__version__,
        "healthy": features[0].available,
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "platform": platform.platform(),
        "cpu": cpu,
        "memory_bytes": memory_bytes(),
        "packages": packages,
        "torch": dict(tried["torch"].found),
        "rdma_devices": devices,
        "features": [asdict(feature) for feature in features],
    }


def _package(name: str, purpose: str, install: str, *, core: bool) -> dict[str, Any]:
    version = package_version(name)
    row: dict[str, Any] = {"name": name, "version": version, "core": core, "for": purpose}
    return row | {"install": None if version else install}


def _cpu_feature(cpu: Mapping[str, Any], torch: Probe) -> Feature:
    problems = [f"{n} is not installed" for n in CORE_PACKAGES if package_version(n) is None]
    if not torch.works:
        problems.append(f"importing torch and transformers: {torch.reason}")
    if problems:
        install = "install gear_offline again in a fresh virtual environment"
        return Feature("cpu", False, "none: the core is broken", "; ".join(problems), install)
    path = f"{count_text(torch.found['threads'], 'thread')}, float32"
    extensions = ", ".join(cpu["extensions"]) or "no known vector extension"
    reason = f"{count_text(cpu['usable'], 'usable core')} with {extensions}"
    if {"avx512_bf16", "amx_bf16", "bf16"} & set(cpu["extensions"]):
        path += " or bfloat16"
    else:
        reason += "; no bfloat16 arithmetic, which would be slower than float32"
    return Feature("cpu", True, path, reason)


def _gpu_feature(torch: Probe, cupy: Probe) -> Feature:
    if devices := torch.found.get("devices", []):
        model = f"model on cuda:0 ({devices[0]['name']}), "
        count = f"{count_text(len(devices), 'CUDA device')}; CuPy "
        if cupy.works:
            path = model + "batches selected and gathered by it, one CUDA graph a training step"
            return Feature("gpu", True, path, count + "works")
        path = model + "batches gathered on the CPU and copied, steps launched one by one"
        reason = f"{count}is not usable: {cupy.reason}"
        return Feature("gpu", True, path, reason, OPTIONAL_PACKAGES["cupy"][1])
    build, install = torch.found.get("cuda_build"), None
    if build is not None:
        reason = f"torch is built for CUDA {build}, but sees no device"
    elif Path("/proc/driver/nvidia/version").exists():
        reason = "an NVIDIA driver, but a torch without CUDA"
        install = "pip install --force-reinstall torch"
    else:
        reason = "no NVIDIA driver on this machine"
    return Feature("gpu", False, "device=auto uses the CPU", reason, install)


def _memory_feature(memory: Probe) -> Feature:
    """Whether tables get into memory that processes of a node share."""
    if not memory.works:
        return Feature("memory", False, "no table that several processes share", memory.reason)
    path = "one table for all processes of a node"
    return Feature("memory", True, path, "tried: processes share memory")


def _rdma_feature(verbs: Probe, devices: list[dict[str, str]]) -> Feature:
    active = [device["name"] for device in devices if device["state"] == "ACTIVE"]
    if verbs.works and active:
        reason = f"pyverbs works; active devices: {', '.join(active)}"
        return Feature("rdma", True, "exchange between nodes by one-sided RDMA reads", reason)
    shown = ", ".join(f"{device['name']} ({device['state']})" for device in devices) or "none"
    reason = f"RDMA devices: {shown}; {'pyverbs works' if verbs.works else verbs.reason}"
    install = None if verbs.works or not devices else OPTIONAL_PACKAGES["pyverbs"][1]
    return Feature("rdma", False, "exchange between nodes by torch.distributed", reason, install)


def _simulator_feature(name: str, tried: Mapping[str, Probe], path: str) -> Feature:
    if tried[name].works:
        return Feature(name, True, path, "tried: works")
    install = OPTIONAL_PACKAGES[name][1]
    return Feature(name, False, "refused with an error", tried[name].reason, install)


def _d4rl_feature(d4rl: Probe) -> Feature:
    if d4rl.works:
        path = "d4rl:NAME through D4RL's package; files in D4RL's layout by our own reader"
        return Feature("d4rl", True, path, "tried: works")
    path = "files in D4RL's layout by our own reader; D4RL's package is not used"
    return Feature("d4rl", True, path, f"the package is not needed to read files; {d4rl.reason}")


def _collect_feature() -> Feature:
    libraries = [name for name in ("stable-baselines3", "sbx-rl") if package_version(name)]
    path, reason = "random, policy file, ARS", "ARS needs NumPy alone"
    if libraries:
        return Feature("collect", True, f"{path}, {', '.join(libraries)}", reason)
    reason += "; stronger policies need an RL library, which is not installed"
    return Feature("collect", True, path, reason, OPTIONAL_PACKAGES["stable-baselines3"][1])


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
    features = _table("Features", "feature", "here", "path it will take, and why")
    for row in diagnosis["features"]:
        here = Text("yes", "green") if row["available"] else Text("no", "yellow")
        lines = Text(row["path"]).append(f"\n{row['reason']}", "dim")
        if row["install"]:
            lines.append(f"\n{row['install']}", "cyan")
        features.add_row(row["feature"], here, lines)
    console.print(features)
    packages = _table("Packages", "package", "version", "for")
    for row in diagnosis["packages"]:
        absent = Text("missing", "red") if row["core"] else Text("not installed", "dim")
        purpose = Text("core" if row["core"] else row["for"])
        if row["install"]:
            purpose.append(f": {row['install']}", "cyan")
        packages.add_row(row["name"], row["version"] or absent, purpose)
    console.print(packages)
    if not diagnosis["healthy"]:
        console.print("[red]The core is broken: see the line `cpu` above.[/]")


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table
