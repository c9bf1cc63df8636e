"""What version 1 wrote stays readable: dataset (test_dataset.py), checkpoint, recipe."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from gear_offline.config.recipe import load_recipe
from gear_offline.runs.trainer import train
from gear_offline.training.checkpoint import load_policy_parts, read_checkpoint
from gear_offline.training.checkpoint_folder import list_checkpoints
from tests.support import failing_code
from tests.training_support import register_environment

# What the fixture held on the day it was made.
TOTAL = 33.02865979851757
MEAN = [-0.01686912029981613, 0.0772892069561701, 0.24418676487709345]
ACTION = [0.04977758228778839, 0.043678246438503265]
RUN = Path(__file__).parent / "fixtures" / "run_v1"


def test_the_version_1_checkpoint_keeps_its_numbers() -> None:
    found = read_checkpoint(RUN / "checkpoints" / "step-00000003")
    assert found.state.step == 3 and found.state.loader["format"] == 1
    assert len(found.model) == 31
    total = sum(float(w.double().sum()) for w in found.model.values())
    assert total == pytest.approx(TOTAL, abs=1e-9)
    assert found.state.state_mean is not None and found.state.state_std is not None
    np.testing.assert_allclose(found.state.state_mean, MEAN, rtol=1e-12)


def test_the_version_2_checkpoint_in_shards_says_the_same() -> None:
    """It was made of the version-1 checkpoint."""
    name = "step-00000003"
    found = read_checkpoint(RUN.with_name("sharded_v2") / name)
    expected = read_checkpoint(RUN / "checkpoints" / name)
    assert found.state.recipe == expected.state.recipe
    assert found.state.loader == expected.state.loader
    pairs = (found.model, expected.model), (found.state.tensors, expected.state.tensors)
    for mine, theirs in pairs:
        assert mine.keys() == theirs.keys() and len(mine) > 30
        assert all(torch.equal(mine[key], tensor) for key, tensor in theirs.items())


def test_the_version_1_policy_still_acts_the_same() -> None:
    parts = load_policy_parts(RUN)
    assert (parts.context_length, parts.returns_scale) == (3, 10.0)
    states = torch.arange(9, dtype=torch.float32).reshape(1, 3, 3) / 9
    with torch.no_grad():
        found = parts.model(
            states=states,
            actions=torch.zeros(1, 3, 2),
            rewards=torch.zeros(1, 3, 1),
            returns_to_go=torch.ones(1, 3, 1),
            timesteps=torch.arange(3)[None],
            attention_mask=torch.ones(1, 3, dtype=torch.long),
        )
    np.testing.assert_allclose(found.action_preds[0, -1].numpy(), ACTION, atol=1e-5)


def test_the_version_1_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gear_offline.runs.report.write_report", lambda run: run)
    monkeypatch.chdir(tmp_path)
    register_environment()
    shutil.copytree(RUN, "run")
    shutil.copytree(RUN.with_name("run_v1_dataset"), "dataset")
    run = train(load_recipe("run", ["train.steps=6"]), out=Path("run"), resume=True, quiet=True)
    assert [step for step, _ in list_checkpoints(run / "checkpoints")] == [3, 6]


def test_the_version_1_recipe_keeps_its_meaning() -> None:
    recipe = load_recipe(RUN)
    assert (recipe.train.steps, recipe.loader.batch_size, recipe.model.layers) == (3, 4, 1)
    assert recipe.optimizer.learning_rate == 1e-2
    assert recipe.selection.strategy == "uniform_steps"


def test_what_a_newer_program_wrote_is_refused_in_one_line(tmp_path: Path) -> None:
    """Datasets: FORMAT_VERSION, checkpoints: CHECKPOINT_VERSION (corpus); recipes name the key."""
    path = tmp_path / "new.yaml"
    path.write_text("base: paper\ntrain:\n  warp: 9\n")
    assert failing_code(lambda: load_recipe(path)) == "RECIPE"
