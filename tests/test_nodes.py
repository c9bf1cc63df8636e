"""Training on nodes that are network namespaces: killed ranks, other numbers of nodes, cut links.

Each node runs torchrun and holds its own shards; rows of the others come over gloo.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from gear_offline.config.recipe import load_recipe
from gear_offline.dataset.dataset import open_dataset
from gear_offline.loaders.loader import GearLoader
from gear_offline.runs.loop import train
from tests.network import Node, network
from tests.one_process import global_digest, row_digests
from tests.ranks_support import ranks_recipe
from tests.support import ROOT, make_dataset
from tests.training_support import measured

pytestmark = [pytest.mark.netns, pytest.mark.timeout(600)]
BATCH, STEPS = 12, 30
SECONDS = 240  # for a run of some seconds, on a machine that has other things to do
TIMEOUT = 4.0  # seconds, where a link is cut


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
            "RECORD": str(folder),
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

    def records(self) -> list[dict[str, Any]]:
        """Return what the ranks wrote down of their batches, in the order of time."""
        lines = [
            json.loads(line)
            for path in self.folder.glob("*.jsonl")
            for line in path.read_text().splitlines()
            if line.endswith("}")
        ]
        return sorted(lines, key=lambda line: line["time"])


def digests_of(records: list[dict[str, Any]]) -> dict[int, list[str]]:
    """Return the digests of every time that all ranks had a batch of a step."""
    found: dict[int, list[str]] = {}
    waiting: dict[int, dict[int, dict[str, Any]]] = {}
    for line in records:
        parts = waiting.setdefault(line["step"], {})
        parts[line["rank"]] = line
        if len(parts) == line["world"]:
            ranks = [parts[rank] for rank in sorted(parts)]
            digest = global_digest([r["slots"] for r in ranks], [r["rows"] for r in ranks])
            found.setdefault(line["step"], []).append(digest)
            del waiting[line["step"]]
    return found


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
    resolved = load_recipe(str(alone / "recipe.yaml"))
    loader = GearLoader(
        open_dataset(str(resolved.data.path)),
        **resolved.loader.model_dump(),
        seed=resolved.seed,
        device="cpu",
    )
    expected = [global_digest([range(BATCH)], [row_digests(next(loader))]) for _ in range(STEPS)]
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

    first, second = digests_of(pair.records()), digests_of(trio.records())
    assert sorted(first) == list(range(20)) and sorted(second) == list(range(20, 30))
    for step, found in (first | second).items():
        again = 10 <= step < 14 and step in first  # done after the last checkpoint, and lost
        assert found == [expected[step]] * (2 if again else 1), step
    for mine, theirs in zip(measured(run), measured(alone), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)
    assert pair.left() == trio.left() == []
    assert not any(node.processes() for node in nodes)


def test_a_cut_link_ends_the_run(nodes: list[Node], recipe: Path, tmp_path: Path) -> None:
    pair = Cluster(nodes[:2], tmp_path / "pair", elastic=False, ranks=(1, 1), PAUSE="0.02")
    arguments = (str(recipe), "--out", str(tmp_path / "run"))
    options = ("train.steps=100000", "train.checkpoint_every=50", f"train.timeout={TIMEOUT}")
    processes = pair.run(*arguments, *options)
    deadline = time.monotonic() + SECONDS
    while len(pair.records()) < 20:
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
