"""What the machine gives this process: cores, memory, open files."""

from __future__ import annotations

import os
import platform
import resource
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from gear_offline.core.text import size_text
from gear_offline.errors import GearError

RESERVE_BYTES = 256 << 20  # of the available memory, left to everything else
_CGROUPS, _OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def usable_cores() -> int:
    """Return the processor cores that this process may use; where nobody tells, all there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def available_bytes() -> int:
    """Return the least of what the machine and the cgroups above this process leave."""
    left = [int(psutil.virtual_memory().available)]
    for group, limit, used, caches in _memory_groups():
        try:
            most = (group / limit).read_text().strip()
            if most == "max":
                continue
            lines = (group / "memory.stat").read_text().splitlines()
            stat = {name: int(value) for name, value in map(str.split, lines)}
            # Cached files count as used there, and are dropped when memory is asked for.
            now = int((group / used).read_text()) - sum(stat.get(name, 0) for name in caches)
            left.append(max(int(most) - now, 0))
        except (OSError, ValueError):
            continue
    return min(left)


def check_available(nbytes: int) -> None:
    """Refuse what would not fit: a machine that runs out of shared memory kills processes."""
    available = available_bytes()
    if nbytes + RESERVE_BYTES > available:
        raise GearError(
            "MEMORY",
            f"{size_text(nbytes)} of host memory are needed, {size_text(available)} are available",
            remedy="free memory, use fewer columns, or keep the data on disk",
        )


def _memory_groups() -> Iterator[tuple[Path, str, str, tuple[str, ...]]]:
    """Yield each cgroup above this process that may limit memory, with the names of its files."""
    try:
        lines = _OWN_CGROUP.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if not controllers:  # version 2
            root, files = _CGROUPS, ("memory.max", "memory.current")
            caches: tuple[str, ...] = ("inactive_file", "active_file")
        elif "memory" in controllers.split(","):
            root, files = _CGROUPS / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
            caches = ("total_inactive_file", "total_active_file")
        else:
            continue
        # In a container the name may be the host's, of which only the root is there.
        group = root / name.lstrip("/")
        for place in (group, *group.parents):
            yield place, *files, caches
            if place == root:
                break


def most_open(most: int) -> int:
    """Return how many files to keep open: `most`, or a quarter of what the process may have."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if limit < 0 else max(1, min(most, limit // 4))


def machine() -> dict[str, Any]:
    """Return what a figure depends on: processor, cores, memory, date, versions."""
    cpu, info = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].split(":", 1)[1].strip() if names else cpu
    versions: dict[str, str | None] = {}
    for package in ("gear-offline", "numpy", "torch", "cupy-cuda13x", "h5py", "transformers"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return {
        "cpu": cpu,
        "cores": usable_cores(),
        "memory_bytes": int(psutil.virtual_memory().total),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": versions,
        "date": datetime.now(UTC).date().isoformat(),
    }
