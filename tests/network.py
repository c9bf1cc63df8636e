"""Nodes of a cluster as network namespaces of this machine, with cables that can be cut."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True, kw_only=True)
class Node:
    """A namespace, its end of the one cable to the switch, and the IPv4 address there."""

    namespace: str
    interface: str
    address: str

    def start(self, command: Sequence[str], *, left: Path, **options: Any) -> subprocess.Popen[str]:
        """Start a process on the node, with shared memory of its own as a node has.

        The names of what it leaves there are written to the file `left`.
        """
        script = 'mount -t tmpfs shm /dev/shm; "$@"; code=$?; ls -A /dev/shm >"$LEFT"; exit $code'
        return subprocess.Popen(
            ["ip", "netns", "exec", self.namespace, "sh", "-c", script, "sh", *command],
            text=True,
            env=options.pop("env") | {"LEFT": str(left)},
            **options,
        )

    def cut(self) -> None:
        """Take the cable out."""
        ip("-n", self.namespace, "link", "set", self.interface, "down")

    def processes(self) -> list[int]:
        """Return the ids of the processes on the node."""
        done = ip("netns", "pids", self.namespace)
        return [int(word) for word in done.stdout.split()]


def ip(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def permitted() -> bool:
    """Return whether this process may make namespaces."""
    name = f"gear{os.getpid() % 100_000}try"
    try:
        ip("netns", "add", name)
        ip("netns", "del", name)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


@contextmanager
def network(count: int) -> Iterator[list[Node]]:
    """Make `count` nodes on one switch; skips the test where that is not allowed."""
    if shutil.which("ip") is None:
        pytest.skip("needs `ip` (apt install iproute2)")
    stem = f"gear{os.getpid() % 100_000}"  # names of interfaces have at most 15 characters
    switch, made = f"{stem}s", []
    nodes = [
        Node(namespace=f"{stem}n{n}", interface=f"{stem}c{n}", address=f"10.78.0.{n + 1}")
        for n in range(count)
    ]
    try:
        try:
            for name in (switch, *(node.namespace for node in nodes)):
                ip("netns", "add", name)
                made.append(name)
                ip("-n", name, "link", "set", "lo", "up")
            ip("-n", switch, "link", "add", "bridge", "type", "bridge")
            ip("-n", switch, "link", "set", "bridge", "up")
            for number, node in enumerate(nodes):
                _plug_in(node, switch, f"port{number}")
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", "") or ""
            pytest.skip(f"needs root and `ip netns`: {error} {said.strip()}")
        yield nodes
    finally:
        for node in nodes:
            if node.namespace in made:
                for process in node.processes():
                    os.kill(process, 9)
        for name in made:
            ip("netns", "del", name)


def _plug_in(node: Node, switch: str, port: str) -> None:
    ip("link", "add", node.interface, "netns", node.namespace, "type", "veth",
       "peer", "name", port, "netns", switch)  # fmt: skip
    ip("-n", switch, "link", "set", port, "master", "bridge")
    ip("-n", switch, "link", "set", port, "up")
    ip("-n", node.namespace, "addr", "add", f"{node.address}/24", "dev", node.interface)
    ip("-n", node.namespace, "link", "set", node.interface, "up")
