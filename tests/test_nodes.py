"""Training on nodes that are network namespaces: killed ranks, other numbers of nodes, cut links.

Each node holds its own shards; rows of the others come over gloo.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gear_offline.config.recipe import load_recipe
from gear_offline.runs.loop import train_run
from tests.forks import ForkedNode
from tests.ranks_support import environment, ranks_recipe, torchrun
from tests.support import ROOT, make_dataset
from tests.training_support import measured

pytestmark = [pytest.mark.netns, pytest.mark.timeout(600)]
SECONDS = 240  # for a run of some seconds, on a machine that has other things to do
TIMEOUT = 2.5  # seconds, where a link is cut


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[Node]]:
    with network(3) as found:
        yield found


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nodes")
    data = make_dataset(folder, [9, 30, 4, 17, 25, 8, 12, 21], shard_bytes=2000).path
    options = ["loader.sharding=shard", "loader.returns_scale=1.0", "train.steps=30"]
    return ranks_recipe(
        folder / "nodes.yaml", data, *options, "train.trackers=[]", "train.timeout=90"
    )


class Cluster:
    """A rank a node, or one torchrun with as many as `ranks` says; what they say goes to files."""

    def __init__(
        self, nodes: list[Node], folder: Path, *words: str, ranks: tuple[int, ...] = (),
        kill: str = "",
    ) -> None:  # fmt: skip
        self.nodes, self.folder, self.processes = nodes, folder, list[Any]()
        folder.mkdir(parents=True)
        first = nodes[0].address
        for number, node in enumerate(nodes):
            command = ["-m", "tests.test_parallel_training", "train", *words]
            variables = {"GEAR_OFFLINE_INTERFACE": node.interface, "FOLDER": str(folder)}
            if ranks:
                options = ["--local-addr", node.address, "--nnodes", str(len(nodes))]
                options += ["--max-restarts", "1", "--rdzv-backend", "c10d", "--rdzv-id", "nodes"]
                options += ["--rdzv-endpoint", f"{first}:29400"]
                options += ["--rdzv-conf", f"is_host={int(number == 0)},join_timeout=60"]
                command = torchrun(ranks[number], *options, *command)
            else:
                variables |= {"MASTER_ADDR": first, "MASTER_PORT": "29401"}
                variables |= {"RANK": str(number), "WORLD_SIZE": str(len(nodes))}
                variables["GROUP_RANK"] = str(number)
            variables |= {"LEFT": f"{folder}/node{number}.shm"} | ({"KILL": kill} if kill else {})
            said = folder / f"node{number}.txt"
            said.touch()
            begin = node.start if ranks else partial(ForkedNode, node.namespace)
            self.processes.append(begin(command, environment() | variables, said))

    def finish(self, seconds: float = SECONDS) -> list[int]:
        """Return the exit codes; nothing is left of the processes nor of their shared memory."""
        deadline = time.monotonic() + seconds
        try:
            codes = [p.wait(max(deadline - time.monotonic(), 0.1)) for p in self.processes]
        except subprocess.TimeoutExpired:
            pytest.fail("a node hangs:\n" + "\n".join(self.said()))
        assert not any(file.read_text() for file in self.folder.glob("node*.shm"))
        assert not any(node.processes() for node in self.nodes)
        return codes

    def said(self) -> list[str]:
        """Return what every node said so far."""
        return [(self.folder / f"node{n}.txt").read_text() for n in range(len(self.nodes))]


@pytest.mark.long
def test_killed_ranks_and_other_numbers_of_nodes(
    nodes: list[Node], recipe: Path, tmp_path: Path
) -> None:
    """A node of two ranks that share a table and one of one, which is killed after step 14.

    Then three nodes of one rank each go on from step 20.
    """
    alone = train_run(load_recipe(str(recipe)), out=tmp_path / "alone", quiet=True)
    run = tmp_path / "run"
    words = (str(recipe), "--out", str(run), "--resume")

    fewer = (*words, "train.steps=20")
    pair = Cluster(nodes[:2], tmp_path / "2", *fewer, ranks=(2, 1), kill="2 14")
    assert pair.finish() == [0, 0], pair.said()
    for words_said in ("of 2 nodes", "exchange: collectives", "after step 10", "error[RANK_LOST]"):
        assert words_said in pair.said()[0]
    trio = Cluster(nodes, tmp_path / "3", *words)
    assert trio.finish() == [0, 0, 0], trio.said()

    for mine, theirs in zip(measured(run), measured(alone), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)


def test_a_cut_link_ends_the_run(nodes: list[Node], recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = (str(recipe), "--out", str(run), "train.steps=100000", "train.checkpoint_every=50")
    pair = Cluster(nodes[:2], tmp_path / "pair", *words, f"train.timeout={TIMEOUT}")
    deadline = time.monotonic() + SECONDS
    while not (run / "metrics.jsonl").is_file():
        assert time.monotonic() < deadline, pair.said()
        assert not any(process.poll() for process in pair.processes), pair.said()
        time.sleep(0.1)
    nodes[1].cut()
    with ExitStack() as stack:
        for process in pair.processes:
            stack.callback(process.kill)
        assert pair.finish(TIMEOUT + 60) == [1, 1], pair.said()
    for said in pair.said():
        lines = [line for line in said.splitlines() if line.startswith("error[")]
        assert len(lines) == 1 and lines[0].startswith("error[RANK_LOST]"), said


@dataclass(frozen=True, kw_only=True)
class Node:
    """A namespace, its end of the one cable to the switch, and the IPv4 address there."""

    namespace: str
    interface: str
    address: str

    def start(
        self, command: Sequence[str], variables: dict[str, str], said: Path
    ) -> subprocess.Popen[str]:
        """Start a process on the node, with shared memory of its own as a node has.

        The names of what it leaves there are written to the file that the variable LEFT names.
        """
        script = 'mount -t tmpfs shm /dev/shm; "$@"; code=$?; ls -A /dev/shm >"$LEFT"; exit $code'
        command = ["ip", "netns", "exec", self.namespace, "sh", "-c", script, "sh", *command]
        with said.open("w") as text:
            return subprocess.Popen(
                command, env=variables, cwd=ROOT, stdout=text, stderr=text, text=True
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
