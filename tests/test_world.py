"""Ranks: how a loader finds them; those that do not feed a model's input read nothing."""

import gc
import hashlib
import json
import os
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

import gear_offline as go
from examples.model_parallel import read_bytes
from gear_offline.data.dataset.dataset import Dataset
from gear_offline.distributed import is_first_process, read_rank_and_size
from gear_offline.distributed.world import World, data_world, joined_world, open_world
from gear_offline.errors import InputError
from gear_offline.loaders.loader import GearLoader
from tests.ranks_support import fork_ranks
from tests.support import make_dataset, one_error

dist: Any = torch.distributed
BATCH, CONTEXT, STEPS = 12, 6, 3
IDLE = World(rank=1, nodes=(0, 1, 2), feeds=False)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_dataset(tmp_path_factory.mktemp("ranks"), [500] * 40)


def test_a_world_is_found_once_for_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of other backends than gloo get one of gloo beside them; later calls cost nothing."""
    made: list[timedelta] = []

    def new_group(*, backend: str, timeout: timedelta) -> str:
        assert backend == "gloo"
        made.append(timeout)
        return f"group {len(made)}"

    monkeypatch.delenv("GROUP_RANK", raising=False)
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(World, "gather", lambda self, value: ["one", "one", "other"])
    assert joined_world().size == 1
    for number in (1, 2):
        dist.init_process_group("fake", rank=1, world_size=3, store=FakeStore())
        try:
            world = joined_world(timeout=7)
            assert joined_world() is world and world.timeout == 7
            assert (world.rank, world.nodes, world.control) == (1, (0, 0, 1), f"group {number}")
        finally:
            dist.destroy_process_group()
    assert made == [timedelta(seconds=7)] * 2


@pytest.mark.parametrize(
    ("variables", "what"),
    [
        ({}, (0, 1)),
        ({"WORLD_SIZE": "", "RANK": " "}, (0, 1)),
        ({"WORLD_SIZE": "1"}, (0, 1)),
        ({"RANK": "0", "LOCAL_RANK": "x"}, (0, 1)),
        ({"WORLD_SIZE": "4", "RANK": "3"}, (3, 4)),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE is '4', and RANK is not set"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'"),
        ({"WORLD_SIZE": "0", "RANK": "0"}, "WORLD_SIZE is '0'"),
        ({"WORLD_SIZE": "2", "RANK": "-1"}, "RANK is '-1'"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK is '2', and WORLD_SIZE is 2"),
        ({"RANK": "3"}, "RANK is '3', and WORLD_SIZE is not set"),
    ],
)
def test_variables_of_a_launcher_are_read_in_one_way(
    variables: dict[str, str], what: tuple[int, int] | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if not isinstance(what, str):
        assert read_rank_and_size() == what and is_first_process() == (what[0] == 0)
        return
    for call in (lambda: go.train("smoke"), lambda: go.sweep("smoke", {"seed": [1]})):
        with one_error("USAGE", what):
            call()


@pytest.mark.parametrize(
    ("variables", "what"),
    [
        ({"MASTER_PORT": "1"}, "MASTER_ADDR is not set"),
        ({"MASTER_ADDR": "h"}, "MASTER_PORT is not set"),
        ({"MASTER_ADDR": "h", "MASTER_PORT": "x"}, "MASTER_PORT is 'x'"),
        ({"MASTER_ADDR": "h", "MASTER_PORT": "65536"}, "MASTER_PORT is '65536'"),
    ],
)
def test_where_ranks_meet_is_checked(
    variables: dict[str, str], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"WORLD_SIZE": "2", "RANK": "0"} | variables).items():
        monkeypatch.setenv(name, value)
    with one_error("USAGE", what), open_world(torch.device("cpu")):
        pass


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"padding": "left", "extra_columns": ("terminals",)},
        {"placement": "disk"},
        {"sharding": "shard", "exchange": "rdma"},
        {"selection": "prioritized"},
    ],
)
def test_an_idle_rank_reads_nothing(dataset: Dataset, options: dict[str, Any]) -> None:
    settings = {"batch_size": BATCH, "context_length": CONTEXT, "device": "cpu", **options}
    names = ("placement", "sharding", "exchange")
    plain = {name: value for name, value in settings.items() if name not in names}
    gc.collect()  # no table of another test is left to be shared
    before = read_bytes()
    whole = GearLoader(dataset.path, **plain)
    batches = [next(whole) for _ in range(STEPS)]
    all_bytes = dataset.manifest.total_bytes
    # All but the columns that no batch has.
    assert read_bytes() - before > 0.9 * all_bytes, "the count sees what a loader reads"
    before = read_bytes()
    idle = GearLoader(dataset.path, world=IDLE, **settings)
    found = [next(idle) for _ in range(STEPS)]
    assert read_bytes() - before < 0.05 * all_bytes, "the manifest alone"
    assert sum(group.rows.nbytes for group in idle.rows.memory.groups) < 0.05 * all_bytes
    for mine, theirs in zip(found, batches, strict=True):
        assert len(mine.segments) == 0
        for name, tensor in theirs.model_inputs().items():
            other = mine.model_inputs()[name]
            assert (other.shape[0], other.shape[1:]) == (0, tensor.shape[1:]), name
            assert other.dtype == tensor.dtype
        assert mine.extras.keys() == theirs.extras.keys()
    assert idle.state_dict() == whole.state_dict(), "any rank's state resumes any other"
    idle.load_state_dict({**whole.state_dict(), "step": 40})
    assert idle.step == 40 and len(idle.slots_at(40)) == 0
    idle.close()
    with one_error("LOADER_OPTION"):  # as on the ranks that read
        GearLoader(dataset, world=IDLE, **settings | {"batch_size": 13})


@pytest.mark.parametrize(
    ("names", "shape", "dims", "expected"),
    [  # (rank in the world, whether it feeds), by global rank
        (("dp", "tp"), (2, 2), "dp", [(0, 1), (0, 0), (1, 1), (1, 0)]),
        (("tp", "dp"), (2, 2), "dp", [(0, 1), (1, 1), (0, 0), (1, 0)]),
        (("dp",), (3,), "dp", [(0, 1), (1, 1), (2, 1)]),
        (("pp", "dp", "tp"), (2, 2, 2), "dp",
         [(0, 1), (0, 0), (1, 1), (1, 0), (0, 0), (0, 0), (1, 0), (1, 0)]),
        (("r", "s", "tp"), (2, 2, 2), ("r", "s"),
         [(0, 1), (0, 0), (1, 1), (1, 0), (2, 1), (2, 0), (3, 1), (3, 0)]),
    ],
)  # fmt: skip
def test_the_first_rank_of_each_group_feeds(
    names: tuple[str, ...], shape: tuple[int, ...], dims: Any, expected: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from torch.distributed.device_mesh import DeviceMesh

    asked: list[list[int]] = []

    def new_group(ranks: list[int], *, timeout: timedelta, **_: Any) -> None:
        assert timeout == timedelta(seconds=7), "the caller's, not torch's 30 minutes"
        asked.append(ranks)

    grid = torch.arange(len(expected)).reshape(shape)
    monkeypatch.setattr(World, "gather", lambda self, value: list(range(self.size)))
    for rank, (place, feeds) in enumerate(expected):
        dist.init_process_group("fake", rank=rank, world_size=len(expected), store=FakeStore())
        try:
            mesh = DeviceMesh("cpu", grid, mesh_dim_names=names)
            with monkeypatch.context() as patch:
                patch.setattr(dist, "new_group", new_group)
                world = data_world(mesh, dims, timeout=7)
                with one_error("LOADER_OPTION"):
                    data_world(mesh, "data")
        finally:
            dist.destroy_process_group()
        assert (world.rank, world.feeds) == (place, bool(feeds)), rank
        assert world.size == sum(feed for _, feed in expected)
        if feeds:
            assert asked[-1][place] == rank and world.node_count == world.size
    assert all(ranks == asked[0] for ranks in asked), "the same group on every rank"


def test_the_example_trains_groups_on_one_batch_each(dataset: Dataset) -> None:
    """Four ranks in pairs: each pair works on its half of the global batches."""
    words = ("--steps", str(STEPS), "--batch-size", str(BATCH))
    done = fork_ranks(4, "examples/model_parallel.py", dataset.path, *words)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    ranks = sorted(lines, key=lambda line: int(line["rank"]))
    assert [line["feeds"] for line in ranks] == [True, False, True, False]
    assert [line["segments_read"] for line in ranks] == [BATCH // 2, 0, BATCH // 2, 0]
    all_bytes = dataset.manifest.total_bytes
    # The first rank of the node reads and verifies the table that the ranks which feed share.
    shares = [int(line["bytes_read"]) / all_bytes for line in ranks]
    assert shares[0] > 0.9 and max(shares[1:]) < 0.1  # modules are loaded meanwhile
    loader = GearLoader(dataset, batch_size=BATCH, device="cpu")
    batches = [next(loader).model_inputs() for _ in range(STEPS)]
    for half in range(2):
        digest = hashlib.sha256()
        for batch in batches:
            for name in sorted(batch):
                rows = batch[name][half * BATCH // 2 : (half + 1) * BATCH // 2]
                digest.update(rows.numpy().tobytes())
        found = {line["digest"] for line in ranks[2 * half : 2 * half + 2]}
        assert found == {digest.hexdigest()}


def test_the_page_of_two_hosts_tells_of_right_batches() -> None:
    done = fork_ranks(2, "examples/two_hosts.py", "--roads", "gloo,nccl")
    assert done.returncode == 0, done.stderr
    for window in "1 KiB", "64 KiB":
        assert re.search(f"\n{window}, gloo: (rank 0 )?right, ", done.stdout)
        assert f"\n{window}, nccl: EXCHANGE: " in done.stdout
    assert "WRONG" not in done.stdout


SHARING = """
import json, sys
import torch.distributed as dist
import gear_offline as go

dist.init_process_group("gloo")
options = dict(batch_size=12, context_length=4, device="cpu", seed=3)
loader = go.GearLoader(sys.argv[1], **options)
alone = go.GearLoader(sys.argv[1], world=None, **options)
steps = [next(loader).segments.tolist() for _ in range(3)]
whole = [next(alone).segments.tolist() for _ in range(3)]
shard = go.GearLoader(sys.argv[1], sharding="replicate", placement="host", **options)
assert [next(shard).segments.tolist() for _ in range(3)] == steps
with open(f"{sys.argv[2]}/{dist.get_rank()}.json", "w") as file:
    json.dump([steps, whole], file)
dist.destroy_process_group()
"""


def test_processes_of_a_group_share_each_batch(tmp_path: Path) -> None:
    """They trained on identical batches, and nothing said so."""
    path = make_dataset(tmp_path, [9, 14, 30, 4, 21]).path
    script = tmp_path / "child.py"
    script.write_text(SHARING)
    done = fork_ranks(2, script, path, tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first[1] == second[1], "world=None: each alone"
    for mine, others, whole in zip(first[0], second[0], first[1], strict=True):
        assert len(mine) == len(others) == 6 and mine + others == whole
    said = [line for line in done.stderr.splitlines() if "world auto" in line]
    assert said and all("2 ranks share each batch of 12 segments, 6 each" in line for line in said)
    assert len(said) == 2, "the first rank, once a loader"


def test_processes_without_a_group_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = make_dataset(tmp_path, [9, 14])
    options: dict[str, Any] = {"batch_size": 4, "device": "cpu"}
    assert GearLoader(dataset, **options).world.size == 1 and not capsys.readouterr().err
    monkeypatch.setitem(os.environ, "WORLD_SIZE", "2")
    with one_error("LOADER_OPTION", "one of 2 processes"):
        GearLoader(dataset, **options)
    for world in (None, World()):
        assert GearLoader(dataset, world=world, **options).rank_batch == 4
    with pytest.raises(InputError, match="world='all' is not usable"):
        GearLoader(dataset, world="all", **options)  # type: ignore[arg-type]
