"""Training on nodes that are network namespaces: killed ranks, other numbers of nodes, cut links.

Each node runs torchrun and holds its own shards; rows of the others come over gloo.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gear_offline.config.recipe import load_recipe
from gear_offline.runs.loop import train
from tests.ranks_support import ranks_recipe
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
    """One torchrun a node, which starts as many ranks as `ranks` says of it."""

    def __init__(
        self,
        nodes: list[Node],
        folder: Path,
        *,
        elastic: bool,
        ranks: tuple[int, ...],
        **extra: str,
    ) -> None:
        self.nodes, self.folder, self.elastic, self.ranks = nodes, folder, elastic, ranks
        folder.mkdir(parents=True)
        self.environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "FOLDER": str(folder),
            **extra,
        }

    def run(self, *arguments: str) -> list[subprocess.Popen[str]]:
        """Start the training command on every node; what it says goes to files."""
        return [self._start(number, arguments) for number in range(len(self.nodes))]

    def _start(self, number: int, arguments: tuple[str, ...]) -> subprocess.Popen[str]:
        node, first = self.nodes[number], self.nodes[0]
        command = [sys.executable, "-m", "torch.distributed.run", "--local-addr", node.address]
        command += ["--nnodes", str(len(self.nodes)), "--nproc-per-node", str(self.ranks[number])]
        if self.elastic:
            command += ["--max-restarts", "1", "--rdzv-backend", "c10d", "--rdzv-id", "nodes"]
            command += ["--rdzv-endpoint", f"{first.address}:29400"]
            command += ["--rdzv-conf", f"is_host={int(number == 0)},join_timeout=60"]
        else:
            command += ["--master-addr", first.address, "--master-port", "29401"]
            command += ["--node-rank", str(number)]
        with (self.folder / f"node{number}.txt").open("w") as said:
            return node.start(
                [*command, "-m", "tests.nodes_child", "train", *arguments],
                left=self.folder / f"node{number}.shm",
                env=self.environment | {"GEAR_OFFLINE_INTERFACE": node.interface},
                cwd=ROOT,
                stdout=said,
                stderr=said,
            )

    def said(self) -> list[str]:
        """Return what every node said so far."""
        return [(self.folder / f"node{n}.txt").read_text() for n in range(len(self.nodes))]

    def left(self) -> list[str]:
        """Return what lies in the nodes' shared memory after they have ended."""
        files = [self.folder / f"node{number}.shm" for number in range(len(self.nodes))]
        return [name for file in files for name in file.read_text().split()]


def finish(processes: list[subprocess.Popen[str]], cluster: Cluster, seconds: float) -> list[int]:
    """Return the exit codes."""
    deadline = time.monotonic() + seconds
    try:
        return [p.wait(max(deadline - time.monotonic(), 0.1)) for p in processes]
    except subprocess.TimeoutExpired:
        pytest.fail("a node hangs:\n" + "\n".join(cluster.said()))


@pytest.mark.long
def test_killed_ranks_and_other_numbers_of_nodes(
    nodes: list[Node], recipe: Path, tmp_path: Path
) -> None:
    """A node of two ranks that share a table and one of one, which is killed after step 14.

    Then three nodes of one rank each go on from step 20.
    """
    alone = train(load_recipe(str(recipe)), out=tmp_path / "alone", quiet=True)
    run = tmp_path / "run"
    arguments = (str(recipe), "--out", str(run), "--resume")

    pair = Cluster(nodes[:2], tmp_path / "pair", elastic=True, ranks=(2, 1), KILL="2 14")
    codes = finish(pair.run(*arguments, "train.steps=20"), pair, SECONDS)
    assert codes == [0, 0], pair.said()
    assert "of 2 nodes" in pair.said()[0] and "exchange: collectives" in pair.said()[0]
    assert "resuming after step 10" in pair.said()[0]
    assert "error[RANK_LOST]" in pair.said()[0]
    trio = Cluster(nodes, tmp_path / "trio", elastic=False, ranks=(1, 1, 1))
    codes = finish(trio.run(*arguments), trio, SECONDS)
    assert codes == [0, 0, 0], trio.said()

    for mine, theirs in zip(measured(run), measured(alone), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)
    assert pair.left() == trio.left() == []
    assert not any(node.processes() for node in nodes)


def test_a_cut_link_ends_the_run(nodes: list[Node], recipe: Path, tmp_path: Path) -> None:
    pair = Cluster(nodes[:2], tmp_path / "pair", elastic=False, ranks=(1, 1))
    run = tmp_path / "run"
    arguments = (str(recipe), "--out", str(run))
    options = ("train.steps=100000", "train.checkpoint_every=50", f"train.timeout={TIMEOUT}")
    processes = pair.run(*arguments, *options)
    deadline = time.monotonic() + SECONDS
    while not (run / "metrics.jsonl").is_file():
        assert time.monotonic() < deadline and not any(p.poll() for p in processes), pair.said()
        time.sleep(0.1)
    nodes[1].cut()
    with ExitStack() as stack:
        for process in processes:
            stack.callback(process.kill)
        codes = finish(processes, pair, TIMEOUT + 60)
    assert codes == [1, 1], pair.said()
    for said in pair.said():
        lines = [line for line in said.splitlines() if line.startswith("error[")]
        assert len(lines) == 1 and lines[0].startswith("error[RANK_LOST]"), said
    assert pair.left() == []
    assert not any(node.processes() for node in nodes[:2])


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
