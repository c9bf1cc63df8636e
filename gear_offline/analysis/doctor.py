"""Find the packages that are installed or missing, and the path each feature will take.

Packages are looked up without importing them.  CUDA, the simulator and RDMA libraries are tried,
each in a process of its own with a time limit.  A driver that hangs or a library that crashes
costs a line of the table and nothing else.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
from rich import box
from rich.table import Table
from rich.text import Text

import gear_offline
from gear_offline.core.progress import Terminal
from gear_offline.core.system import processor, usable_cores, versions
from gear_offline.core.text import count_text

SECONDS = 90.0  # that an attempt may take
CORE_PACKAGES = (
    "numpy", "torch", "transformers", "safetensors", "h5py", "gymnasium", "pydantic",
    "PyYAML", "typer", "rich", "xxhash", "matplotlib", "tensorboard", "psutil",
)  # fmt: skip
# package -> (what it is for, how to get it)
OPTIONAL_PACKAGES = {
    "mujoco": ("simulator of the locomotion tasks", "pip install 'gear-offline[mujoco]'"),
    "minari": ("Minari datasets", "pip install 'gear-offline[minari]'"),
    "d4rl": ("D4RL's own names and servers", "pip install d4rl"),
    "pyarrow": ("parquet and LeRobot", "pip install 'gear-offline[parquet]'"),
    "zarr": ("zarr stores", "pip install 'gear-offline[zarr]'"),
    "av": ("videos of LeRobot", "pip install 'gear-offline[lerobot]'"),
    "accelerate": ("Hugging Face's Trainer", "pip install 'gear-offline[trainer]'"),
    "trackio": ("train.trackers=trackio", "pip install 'gear-offline[trackers]'"),
    "mlflow": ("train.trackers=mlflow", "pip install 'gear-offline[trackers]'"),
    "wandb": ("train.trackers=wandb", "pip install 'gear-offline[trackers]'"),
    "ray": ("--ray: several machines", "pip install 'gear-offline[ray]'"),
    "imageio-ffmpeg": ("evaluate --video", "pip install 'gear-offline[video]'"),
    "onnx": ("export-policy NAME.onnx", "pip install 'gear-offline[onnx]'"),
    "cupy": ("GPU kernels (CUDA 12: [gpu-cuda12])", "pip install 'gear-offline[gpu]'"),
    "pyverbs": ("RDMA between nodes (Debian, Ubuntu)", "apt install python3-pyverbs"),
    "stable-baselines3": ("collect --policy sb3:PPO", "pip install 'gear-offline[rl]'"),
    "sbx-rl": ("collect --policy sbx:PPO, faster", "pip install 'gear-offline[rl]'"),
}
WHEELS = {"cupy": ("cupy-cuda13x", "cupy-cuda12x", "cupy")}  # one import, several distributions
# Each sets `facts`; it may fail in any way it likes.
PROBES = {
    "torch": """
import torch
facts = {"cuda_build": torch.version.cuda, "threads": torch.get_num_threads(), "devices": []}
for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
    gpu = torch.cuda.get_device_properties(index)
    facts["devices"].append({"name": gpu.name, "memory_bytes": gpu.total_memory,
                             "capability": f"{gpu.major}.{gpu.minor}"})
""",
    "mujoco": """
import warnings, gymnasium
warnings.simplefilter("ignore")
environment = gymnasium.make("Hopper-v5")
environment.reset(seed=0)
environment.step(environment.action_space.sample())
""",
    "cupy": "import cupy\nfacts = {'devices': cupy.cuda.runtime.getDeviceCount()}",
    "pyverbs": "from pyverbs.device import get_device_list\nget_device_list()",
}


@dataclass(frozen=True)
class Probe:
    """Result of one attempt: `facts` when it worked, otherwise the reason."""

    works: bool
    reason: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Feature:
    """A feature, and the path it will take here."""

    feature: str
    available: bool
    path: str  # what will run when it is asked for
    reason: str  # why that path and no other
    install: str | None = None  # how to get it, None when nothing is missing


def diagnose() -> dict[str, Any]:
    """Describe this machine, JSON-able; each attempt takes `SECONDS` at most."""
    missing = {n: Probe(False, f"{n} is not installed") for n in PROBES if not package_version(n)}
    with ThreadPoolExecutor(max_workers=4) as pool:
        answers = pool.map(lambda n: missing.get(n) or probe(PROBES[n], seconds=SECONDS), PROBES)
        tried = dict(zip(PROBES, answers, strict=True))
    cpu = {"model": processor(), "cores": os.cpu_count() or 1, "usable": usable_cores()}
    devices = rdma_devices()
    mujoco, tasks = tried["mujoco"], "collect and evaluate MuJoCo tasks with Gymnasium"
    install = None if mujoco.works else OPTIONAL_PACKAGES["mujoco"][1]
    features = [
        _cpu(cpu, tried["torch"]),
        _gpu(tried["torch"], tried["cupy"]),
        _rdma(tried["pyverbs"], devices),
        Feature("mujoco", mujoco.works, tasks, mujoco.reason or "tried: works", install),
    ]
    purposes = {name: ("core", f"pip install {name}") for name in CORE_PACKAGES} | OPTIONAL_PACKAGES
    packages = [
        {"name": name, "version": (version := package_version(name)), "core": name in CORE_PACKAGES}
        | {"for": purpose, "install": None if version else install}
        for name, (purpose, install) in purposes.items()
    ]
    return {
        "gear_offline": gear_offline.__version__,
        "healthy": features[0].available,
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "platform": platform.platform(),
        "cpu": cpu,
        "memory_bytes": psutil.virtual_memory().total,
        "packages": packages,
        "torch": dict(tried["torch"].facts),
        "rdma_devices": devices,
        "features": [asdict(feature) for feature in features],
    }


def print_diagnosis(diagnosis: Mapping[str, Any]) -> None:
    """Print what `diagnose` returned as tables."""
    console, cpu = Terminal(), diagnosis["cpu"]
    console.print(
        f"gear_offline {diagnosis['gear_offline']}, Python {diagnosis['python']['version']}, "
        f"{cpu['model']}: {cpu['usable']} of {count_text(cpu['cores'], 'core')}, "
        f"{diagnosis['memory_bytes'] / 2**30:.1f} GiB"
    )
    features = Table("feature", "here", "what will run, and why", box=box.SIMPLE_HEAD)
    for row in diagnosis["features"]:
        mark = Text("yes", "green") if row["available"] else Text("no", "red")
        remedy = f"\n{row['install']}" if row["install"] else ""
        lines = Text(row["path"]).append(f"\n{row['reason']}", "dim").append(remedy, "cyan")
        features.add_row(row["feature"], mark, lines)
    console.print(features)
    packages = Table("package", "version", "for", box=box.SIMPLE_HEAD)
    for row in diagnosis["packages"]:
        if row["version"] and not row["core"]:  # the line `cpu` says that those are all there
            packages.add_row(row["name"], row["version"], row["for"])
    console.print(packages)
    missing = [row for row in diagnosis["packages"] if not row["version"]]
    console.print("missing, and how to get it:" if missing else "nothing is missing")
    for row in missing:  # a line of its own, to be copied
        remark = Text(f"  # {row['name']}: {row['for']}", "dim")
        console.print(Text(row["install"], "cyan").append(remark), soft_wrap=True)


def probe(code: str, *, seconds: float = SECONDS) -> Probe:
    """Run `code` in a process of its own for at most `seconds`."""
    script = f"import json\nfacts = {{}}\n{code}\nprint(json.dumps(facts))"
    try:
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONSAFEPATH": "1"},  # nothing of the folder we stand in
            capture_output=True,
            text=True,
            timeout=seconds,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return Probe(False, f"no answer within {seconds:g} s")
    if done.returncode != 0:
        died = f"ended by signal {-done.returncode}" if done.returncode < 0 else "failed"
        return Probe(False, done.stderr.strip().rpartition("\n")[2].strip() or died)
    return Probe(True, facts=json.loads(done.stdout.splitlines()[-1]))


def package_version(name: str) -> str | None:
    """Return the installed version of `name`, ``None`` when it is not installed."""
    for version in versions(*WHEELS.get(name, (name,))).values():
        return version
    # distributions of Linux install pyverbs without Python's metadata
    return "of the system" if name == "pyverbs" and find_spec(name) else None


def rdma_devices(root: Path = Path("/sys/class/infiniband")) -> list[dict[str, str]]:
    """Return the RDMA devices that the kernel shows: name and state of port 1."""
    devices = []
    for device in sorted(root.iterdir()) if root.is_dir() else ():
        try:
            state = (device / "ports" / "1" / "state").read_text().strip().split(": ")[-1]
        except OSError:
            state = "unknown"
        devices.append({"name": device.name, "state": state})
    return devices


def _cpu(cpu: Mapping[str, Any], torch: Probe) -> Feature:
    problems = [f"{n} is not installed" for n in CORE_PACKAGES if package_version(n) is None]
    if not torch.works:
        problems.append(f"importing torch: {torch.reason}")
    if problems:
        install = "install gear-offline again in a fresh virtual environment"
        return Feature("cpu", False, "none: the core is broken", "; ".join(problems), install)
    path = f"{count_text(torch.facts['threads'], 'thread')}, float32"
    return Feature("cpu", True, path, f"{count_text(cpu['usable'], 'usable core')}")


def _gpu(torch: Probe, cupy: Probe) -> Feature:
    if devices := torch.facts.get("devices"):
        model = f"model on cuda:0 ({devices[0]['name']}), "
        count = f"{count_text(len(devices), 'CUDA device')}; CuPy "
        if cupy.works:
            path = model + "batches selected and gathered by it, one CUDA graph a training step"
            return Feature("gpu", True, path, count + "works")
        path = model + "batches gathered on the CPU and copied, steps launched one by one"
        reason = f"{count}is not usable: {cupy.reason}"
        return Feature("gpu", True, path, reason, OPTIONAL_PACKAGES["cupy"][1])
    install = None
    reason = "no NVIDIA driver on this machine"
    if build := torch.facts.get("cuda_build"):
        reason = f"torch is built for CUDA {build}, but sees no device"
    elif Path("/proc/driver/nvidia/version").exists():
        reason = "an NVIDIA driver, but a torch without CUDA"
        install = "pip install --force-reinstall torch"
    return Feature("gpu", False, "device=auto uses the CPU", reason, install)


def _rdma(verbs: Probe, devices: list[dict[str, str]]) -> Feature:
    active = [device["name"] for device in devices if device["state"] == "ACTIVE"]
    if verbs.works and active:
        reason = f"pyverbs works; active devices: {', '.join(active)}"
        return Feature("rdma", True, "exchange between nodes by one-sided RDMA reads", reason)
    text = ", ".join(f"{device['name']} ({device['state']})" for device in devices) or "none"
    reason = f"RDMA devices: {text}; {'pyverbs works' if verbs.works else verbs.reason}"
    install = None if verbs.works or not devices else OPTIONAL_PACKAGES["pyverbs"][1]
    return Feature("rdma", False, "exchange between nodes by NCCL or gloo", reason, install)
