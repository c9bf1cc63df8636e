"""Tables that several loaders hold together: the same bits, read once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gear_offline.dataset.dataset import Dataset, open_dataset
from gear_offline.loaders.loader import GearLoader
from gear_offline.sweep.points import name_points
from gear_offline.sweep.processes import build_tables
from gear_offline.tables.shared_tables import SharedTables, current_tables
from gear_offline.tables.table import build_table
from tests.support import make_dataset
from tests.training_support import tiny_data, tiny_recipe


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    return open_dataset(make_dataset(tmp_path, [9, 4, 7]).path)


def loader(dataset: Dataset, **options: Any) -> GearLoader:
    settings: dict[str, Any] = {"batch_size": 5, "context_length": 3, "device": "cpu", **options}
    return GearLoader(dataset, **settings)


def test_equal_options_share_a_table_and_others_do_not(dataset: Dataset) -> None:
    tables = SharedTables()
    with tables.used():
        assert current_tables() is tables
        one, other = loader(dataset, seed=1), loader(dataset, seed=2, batch_size=9)
        scaled = loader(dataset, returns_scale=3.0)
    assert current_tables() is None
    assert one.table is other.table
    assert len({id(x.table) for x in (one, scaled)}) == 2
    for shared, options in (
        (other, {"seed": 2, "batch_size": 9}),
        (scaled, {"returns_scale": 3.0}),
    ):
        alone = loader(dataset, **options)
        theirs = next(alone).model_inputs()
        for name, tensor in next(shared).model_inputs().items():
            assert torch.equal(tensor, theirs[name])


def test_a_published_table_is_attached_by_another_process(tmp_path: Path) -> None:
    data = tiny_data(tmp_path)
    recipe = tiny_recipe(data)
    points = name_points([recipe, recipe.replace(seed=1)])
    tables = build_tables(points, lambda point: open_dataset(point.recipe.data.path or ""))
    handles = tables.handles()
    assert len(handles) == 1, "one table for both"
    script = """
import json, sys
from gear_offline.tables import host_table
from gear_offline.tables import shared_tables
from gear_offline.tables import table
from gear_offline.dataset.dataset import open_dataset
from gear_offline.training.learner import Learner
from gear_offline.loaders.loader import GearLoader
from gear_offline.config.recipe import Recipe
from gear_offline.tables.shared_tables import SharedTables
def refuse(*_, **__):
    raise SystemExit("it reads the table again")
shared_tables.build_table = refuse
recipe = Recipe.parse(json.loads(sys.argv[1]))
with SharedTables(json.loads(sys.argv[2])).used():
    loader = GearLoader(
        open_dataset(recipe.data.path), **recipe.loader.model_dump(), device="cpu", seed=4
    )
print([float(value.double().sum()) for value in next(loader).model_inputs().values()])
"""
    found = subprocess.run(
        [sys.executable, "-c", script, json.dumps(recipe.to_dict()), json.dumps(handles)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
        check=False,
    )
    assert found.returncode == 0, found.stderr
    alone = GearLoader(open_dataset(data), **recipe.loader.model_dump(), device="cpu", seed=4)
    expected = [float(value.double().sum()) for value in next(alone).model_inputs().values()]
    assert json.loads(found.stdout) == pytest.approx(expected)


def test_a_placed_table_is_made_once_unless_weights_matter(dataset: Dataset) -> None:
    tables = SharedTables()
    made: list[Any] = []
    options: dict[str, Any] = {"context_length": 3, "gamma": 1.0}
    table = tables.table(dataset, **options)
    assert tables.table(dataset, **options) is table

    def make(host_bytes: int) -> Any:
        made.append(SimpleNamespace(hbm_bytes=8, host_bytes=host_bytes, peer_bytes=0))
        return made[-1]

    def placed(host_bytes: int, device: str, weights: list[float] | None) -> Any:
        return tables.placed(
            table, {"device": torch.device(device)}, lambda: make(host_bytes), weights=weights
        )

    # all of it in GPU memory: weights change nothing
    first = placed(0, "cuda:0", [1.0, 2.0, 3.0])
    assert placed(0, "cuda:0", [3.0, 2.0, 1.0]) is first and placed(0, "cuda:0", None) is first
    # a part in host memory: the hottest episodes depend on them
    split = placed(4, "cuda:1", [1.0, 2.0, 3.0])
    assert split is not first
    assert placed(4, "cuda:1", [1.0, 2.0, 3.0]) is split
    assert placed(4, "cuda:1", [3.0, 2.0, 1.0]) is not split
    plain = placed(4, "cuda:1", None)
    assert plain is made[-1] and plain is not split and len(made) == 4
    stranger = build_table(dataset, context_length=3)
    options = {"device": torch.device("cuda:0")}
    assert tables.placed(stranger, options, lambda: make(0)) is not first
    assert np.array_equal(stranger.episodes.lengths, table.episodes.lengths)
