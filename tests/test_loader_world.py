"""Several processes find each other by themselves, and share each batch."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from gear_offline.distributed.world import World
from gear_offline.errors import InputError
from gear_offline.loaders.loader import GearLoader
from tests.ranks_support import launch
from tests.support import make_dataset

CHILD = """
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
    script.write_text(CHILD)
    done = launch(2, str(script), str(path), str(tmp_path))
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
    with pytest.raises(InputError, match="one of 2 processes") as caught:
        GearLoader(dataset, **options)
    assert caught.value.code == "LOADER_OPTION"
    for world in (None, World()):
        assert GearLoader(dataset, world=world, **options).rank_batch == 4
    with pytest.raises(InputError, match="world='all' is not usable"):
        GearLoader(dataset, world="all", **options)  # type: ignore[arg-type]
