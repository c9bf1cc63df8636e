"""Attempts and facts about this machine that `doctor` reports.

What has to be tried (CUDA, the simulator, RDMA libraries) is tried in a process of its own with
a time limit, so that a driver that hangs or a library that crashes costs a line in the table and
nothing else.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gear_offline.core.system import usable_cores

PROBE_SECONDS = 90.0
CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16")

DISTRIBUTIONS = {"cupy": ("cupy-cuda13x", "cupy-cuda12x", "cupy")}  # one import, several wheels

SYSTEM_MODULES = ("pyverbs",)  # distributions install it without Python's metadata

# Each prints one JSON document; it may fail in any way it likes.
PROBES = {
    # with transformers, which imports torch anyway: one process fewer
    "torch": """
import torch
from transformers import DecisionTransformerModel
found = {"cuda_build": torch.version.cuda, "threads": torch.get_num_threads(), "devices": []}
if torch.cuda.is_available():
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        found["devices"].append({
            "name": facts.name, "memory_bytes": facts.total_memory,
            "capability": f"{facts.major}.{facts.minor}"})
print(json.dumps(found))
""",
    "mujoco": """
import warnings
import gymnasium
warnings.simplefilter("ignore")
environment = gymnasium.make("Hopper-v5")
environment.reset(seed=0)
environment.step(environment.action_space.sample())
print(json.dumps({}))
""",
    "cupy": """
import cupy
print(json.dumps({"devices": cupy.cuda.runtime.getDeviceCount(),
                  "runtime": cupy.cuda.runtime.runtimeGetVersion()}))
""",
    "pyverbs": """
from pyverbs.device import get_device_list
print(json.dumps({"devices": [device.name.decode() for device in get_device_list()]}))
""",
    "minari": """
import minari
import h5py, PIL
print(json.dumps({}))
""",
    "d4rl": """
import d4rl
print(json.dumps({}))
""",
    "memory": f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from gear_offline.tables.shared import SharedMemory
memory = SharedMemory.create(1)
SharedMemory.attach(memory.handle())
print(json.dumps({{}}))
""",
}


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Result of one attempt: `found` when it worked, otherwise the reason."""

    works: bool
    reason: str
    found: Mapping[str, Any]


def probe(name: str, *, seconds: float = PROBE_SECONDS) -> Probe:
    """Try `PROBES[name]` in a process of its own for at most `seconds`."""
    return run_probe("import json\n" + PROBES[name], seconds=seconds)


def run_probe(code: str, *, seconds: float) -> Probe:
    """Run `code`, which prints one JSON document last, in a process with a time limit."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=seconds,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
        )
    except subprocess.TimeoutExpired:
        return Probe(works=False, reason=f"no answer within {seconds:g} s", found={})
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        died = f"ended by signal {-done.returncode}" if done.returncode < 0 else "failed"
        return Probe(works=False, reason=lines[-1].strip() if lines else died, found={})
    try:
        return Probe(works=True, reason="", found=json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, ValueError):
        return Probe(works=False, reason="answered nothing that can be read", found={})


def package_version(name: str) -> str | None:
    """Return the installed version of `name`, ``None`` when it is not installed."""
    for distribution in DISTRIBUTIONS.get(name, (name,)):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    if name in SYSTEM_MODULES and find_spec(name):
        return "of the system"
    return None


def cpu_facts() -> dict[str, Any]:
    """Return model, cores that this process may use, and the vector extensions that matter."""
    model, flags = platform.processor() or platform.machine(), set[str]()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                model = value.strip()
            elif key.strip() in ("flags", "Features"):
                flags.update(value.split())
    except OSError:
        pass  # not Linux, or no /proc: the plain names have to do
    usable = usable_cores()
    extensions = [flag for flag in CPU_FLAGS if flag in flags]
    return {"model": model, "cores": os.cpu_count(), "usable": usable, "extensions": extensions}


def memory_bytes() -> int | None:
    """Return the physical memory, ``None`` where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def rdma_devices(root: Path = Path("/sys/class/infiniband")) -> list[dict[str, str]]:
    """Return the RDMA devices that the kernel shows: name, link layer and state of port 1."""
    if not root.is_dir():
        return []
    devices = []
    for device in sorted(root.iterdir()):
        port = device / "ports" / "1"
        facts = {"name": device.name}
        for key, name in (("link_layer", "link_layer"), ("state", "state")):
            try:
                facts[key] = (port / name).read_text().strip().split(": ")[-1]
            except OSError:
                facts[key] = "unknown"
        devices.append(facts)
    return devices
