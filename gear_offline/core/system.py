"""The machine of this process: cores, memory, versions of packages."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any

import psutil

from gear_offline.core.text import say, size_text
from gear_offline.errors import GearError, InputError

RESERVE_BYTES = 256 << 20  # of the available memory, left to everything else
_TORCH = threading.RLock()
_CGROUPS, _OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def usable_cores() -> int:
    """Return the processor cores that this process may use; a cgroup's share is rounded up."""
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = [len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1]
    for group in _own_groups():
        with suppress(OSError, ValueError):  # the root has no such file, "max" is no limit
            share, period = map(int, (group / "cpu.max").read_text().split())
            cores.append(max(1, -(-share // period)))
    return min(cores)


def available_bytes() -> int:
    """Return the least of what the machine and the cgroups above this process leave."""
    limits = [int(psutil.virtual_memory().available)]
    for group in _own_groups():
        with suppress(OSError, ValueError):  # the root has no such files, "max" is no limit
            limit = int((group / "memory.max").read_text())
            lines = (group / "memory.stat").read_text().splitlines()
            stat = {name: int(value) for name, value in map(str.split, lines)}
            # Cached files count as used there, and are dropped when memory is asked for.
            caches = stat.get("inactive_file", 0) + stat.get("active_file", 0)
            used = int((group / "memory.current").read_text()) - caches
            limits.append(max(limit - used, 0))
    return min(limits)


def check_available(nbytes: int) -> None:
    """Refuse what would not fit: a machine that runs out of shared memory kills processes."""
    available = available_bytes()
    if nbytes + RESERVE_BYTES > available:
        problem = f"{size_text(nbytes)} of host memory needed, {size_text(available)} available"
        raise GearError(
            "MEMORY", problem, "", "free memory, use fewer columns, or keep data on disk"
        )


@contextmanager
def torch_alone(name: str, *, quiet: bool) -> Iterator[None]:
    """Let one thread of this process at a time train: another one waits, and says so.

    New weights and dropout on a CPU come from torch's one generator of the process, of which two
    trainings would each take a part.
    """
    if not _TORCH.acquire(blocking=False):
        line = f"{name}: waits for the training in another thread: torch has one source of random "
        say(f"{line}numbers a process; processes, or go.sweep, train side by side", quiet=quiet)
        _TORCH.acquire()
    try:
        yield
    finally:
        _TORCH.release()


def processor() -> str:
    """Return the model of the processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of those packages that are installed."""
    numbers = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            numbers[package] = _version(package)
    if "gear-offline" in numbers and (commit := _commit()):
        numbers["gear-offline"] += f"+{commit}"
    return numbers


def clean_commit() -> str:
    """Return the commit of this code; refuse code that no commit has."""
    commit = _commit()
    if not commit or commit.endswith("-dirty"):
        problem = "files here differ from their commit" if commit else "this code names no commit"
        remedy = "commit them; in a copy without .git set GEAR_OFFLINE_COMMIT"
        raise InputError("USAGE", f"{problem}, so nobody could measure it again", "", remedy)
    return commit


_version = cache(version)  # parsing a package's metadata takes milliseconds


@cache
def _commit() -> str:
    """Return the commit of this code: by GEAR_OFFLINE_COMMIT, its checkout, or pip's record."""
    if commit := os.environ.get("GEAR_OFFLINE_COMMIT"):  # of a copy without .git
        return commit
    root = Path(__file__).parents[2]
    if (root / ".git").exists():
        ask = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
        with suppress(OSError, subprocess.SubprocessError):  # without git, or another user's
            git = subprocess.run(ask, capture_output=True, check=True, text=True, timeout=5)
            return git.stdout.strip()
    with suppress(PackageNotFoundError):
        record = json.loads(distribution("gear-offline").read_text("direct_url.json") or "{}")
        return str(record.get("vcs_info", {}).get("commit_id", ""))
    return ""


def machine() -> dict[str, Any]:
    """Describe the machine behind a figure: processor, cores, memory, date, versions."""
    return {
        "cpu": processor(),
        "cores": usable_cores(),
        "memory_bytes": int(psutil.virtual_memory().total),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": versions(
            *("gear-offline", "numpy", "torch", "cupy-cuda13x", "h5py", "transformers"),
            *("gymnasium", "mujoco"),  # returns are of a simulator's version
        ),
        "date": datetime.now(UTC).date().isoformat(),
    }


def _own_groups() -> Iterator[Path]:
    """Yield each cgroup (version 2) above this process."""
    for line in _OWN_CGROUP.read_text().splitlines() if _OWN_CGROUP.exists() else ():
        _, controllers, name = line.split(":", 2)
        if not controllers:
            # In a container the name may be the host's, of which only the root is there.
            group = _CGROUPS / name.lstrip("/")
            while group.is_relative_to(_CGROUPS):
                yield group
                group = group.parent
