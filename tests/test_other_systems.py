"""Systems that lack what only Linux has, macOS for one: the same bits, by other calls."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gear_offline.core import system_calls
from gear_offline.dataset.dataset import open_dataset
from gear_offline.distributed.world import World
from gear_offline.export import export_hdf5
from gear_offline.runs.trainer import train
from gear_offline.tables.node_table import shared_table
from gear_offline.training.checkpoint_folder import find_checkpoint
from tests.ranks_support import ROOT, environment
from tests.support import make_dataset
from tests.training_support import tiny_recipe

pytestmark = pytest.mark.usefixtures("no_reports")

# As a user types them, in one process; sweeps and conversions start others.
COMMANDS = """
import os, sys
from gear_offline.cli.main import main
assert not hasattr(os, "memfd_create") and not os.path.exists("/proc/self")
for line in sys.argv[1:]:
    code = main(line.split())
    if code:
        sys.exit(f"{line}: {code}")
"""


def test_it_works_without_linux(data: Path, tmp_path: Path) -> None:
    """Converting, training from memory and disk, and a sweep in processes."""
    options = ("evaluate.episodes=0", "train.steps=8")
    recipe = tiny_recipe(data, *options)
    expected = train(recipe, out=tmp_path / "expected", quiet=True)
    export_hdf5(open_dataset(data), tmp_path / "source.hdf5")
    (tmp_path / "tiny.yaml").write_text((expected / "recipe.yaml").read_text())
    commands = (
        "convert source.hdf5 again",
        "train tiny.yaml data.path=again --out memory",
        "train tiny.yaml data.path=again --out disk loader.placement=disk",
        "sweep tiny.yaml data.path=again --seeds 2 --mode processes --out both",
    )
    environ = environment()
    path = os.pathsep.join((str(ROOT / "tests" / "without_linux"), environ["PYTHONPATH"]))
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, *commands],
        env=environ | {"PYTHONPATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    again, before = open_dataset(tmp_path / "again"), open_dataset(data)
    for name in ("observations", "actions", "rewards"):
        np.testing.assert_array_equal(again.column(name), before.column(name))
    weights = (find_checkpoint(expected) / "model.safetensors").read_bytes()
    for run in ("memory", "disk", "both/runs/s0"):
        place = find_checkpoint(tmp_path / run) / "model.safetensors"
        assert place.read_bytes() == weights, run


def test_ranks_of_a_node_have_tables_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = make_dataset(tmp_path, [9, 4, 7])
    monkeypatch.delattr(os, "memfd_create")
    for rank in range(2):
        world = World(rank=rank, nodes=(0, 0))
        table = shared_table(world, dataset, mode="read", layout="auto", context_length=3)
        assert table.episodes.steps == 20


def test_calls_that_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "file"
    place.write_bytes(b"abc")
    for there in (True, False):
        with place.open("rb+") as file:
            system_calls.drop_pages(file.fileno())
            system_calls.expect_random_reads(file.fileno())
            system_calls.sync_data(file.fileno())
        assert 1 <= system_calls.usable_cores() <= (os.cpu_count() or 1)
        if there:
            for name in ("posix_fadvise", "fdatasync", "sched_getaffinity"):
                monkeypatch.delattr(os, name)
