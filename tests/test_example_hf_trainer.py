"""The example with the Hugging Face Trainer: resuming is bit-exact, the files are complete."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from examples.hf_trainer import (
    POSITION,
    GearTrainer,
    last_checkpoint,
    load_policy,
    make_model,
    training_arguments,
)
from gear_offline.dataset.dataset import Dataset, open_dataset
from gear_offline.distributed.world import joined_world
from gear_offline.loaders.loader import GearLoader
from tests.ranks_support import launch
from tests.support import hopper_columns, make_dataset

BATCH, STEPS, SAVED = 4, 6, 3


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_dataset(tmp_path_factory.mktemp("data"), [4, 3, 8, 2])


def make_trainer(
    dataset: Dataset, out: Path, *, padding: str = "right", **sizes: Any
) -> GearTrainer:
    arguments = training_arguments(
        out,
        steps=STEPS,
        batch_size=BATCH,
        save_steps=SAVED,
        use_cpu=True,
        disable_tqdm=True,
        warmup_steps=2,
        learning_rate=1e-2,
        logging_steps=1,
    )
    loader = GearLoader(
        dataset,
        batch_size=BATCH,
        context_length=5,
        normalize_states=True,
        returns_scale=10.0,
        padding="right" if padding == "right" else "left",
        device="cpu",
        seed=5,
        world=joined_world(),
    )
    torch.manual_seed(0)
    model = make_model(loader, returns_scale=10.0, hidden_size=16, layers=1, heads=1, **sizes)
    return GearTrainer(model, loader, arguments)


def weights(trainer: GearTrainer) -> dict[str, Tensor]:
    assert trainer.model is not None
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def test_resumed_run_equals_the_uninterrupted_one(dataset: Dataset, tmp_path: Path) -> None:
    whole = make_trainer(dataset, tmp_path / "run")
    start = weights(whole)
    whole.train()
    expected = weights(whole)
    checkpoint = tmp_path / "run" / f"checkpoint-{SAVED}"
    assert json.loads((checkpoint / POSITION).read_text())["step"] == SAVED

    resumed = make_trainer(dataset, tmp_path / "again")
    resumed.resume(checkpoint)
    found = weights(resumed)
    assert resumed.loader.step == whole.loader.step == STEPS
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert any(not torch.equal(start[name], value) for name, value in expected.items())


@pytest.mark.long
@pytest.mark.timeout(200)
def test_two_ranks_learn_what_one_learns(dataset: Dataset, tmp_path: Path) -> None:
    """They share each batch, and padding weighs as it would alone; then one resumes alone."""
    make_trainer(dataset, tmp_path / "alone", dropout=0.0).train()
    words = (str(dataset.path), str(tmp_path / "ranks"))
    launch(2, "-m", "tests.test_example_hf_trainer", *words)
    last = f"checkpoint-{STEPS}"
    alone, ranks = (
        load_file(tmp_path / name / last / "model.safetensors") for name in ("alone", "ranks")
    )
    for name, tensor in alone.items():
        torch.testing.assert_close(ranks[name], tensor, rtol=1e-4, atol=1e-5)
    resumed = make_trainer(dataset, tmp_path / "again", dropout=0.0)
    resumed.resume(tmp_path / "ranks" / f"checkpoint-{SAVED}")
    assert resumed.loader.step == STEPS
    for name, tensor in weights(resumed).items():
        torch.testing.assert_close(alone[name], tensor, rtol=1e-4, atol=1e-5)


def test_padding_side_does_not_change_the_loss(dataset: Dataset, tmp_path: Path) -> None:
    losses = []
    for padding in ("right", "left"):
        trainer = make_trainer(dataset, tmp_path / padding, padding=padding)
        assert trainer.model is not None
        trainer.model.eval()
        inputs = next(iter(trainer.get_train_dataloader()))
        assert int(inputs["attention_mask"].sum()) < inputs["attention_mask"].numel()
        loss, output = trainer.compute_loss(trainer.model, inputs, return_outputs=True)
        assert output.action_preds.shape == (BATCH, 5, 3)
        losses.append(loss.detach())
    assert torch.allclose(losses[0], losses[1], rtol=0, atol=1e-5)


def test_a_checkpoint_that_a_kill_left_half_written_is_passed_over(tmp_path: Path) -> None:
    assert last_checkpoint(tmp_path) is None
    for step in (500, 1000):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / POSITION).write_text("{}")
    (tmp_path / "checkpoint-1500").mkdir()
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-1000"


def test_actions_beyond_the_reach_of_a_tanh_are_learnt_without_one(tmp_path: Path) -> None:
    columns = hopper_columns(12)
    within = make_dataset(tmp_path / "within", [5, 7], columns=columns)
    beyond = columns | {"actions": 3 * np.sign(columns["actions"])}
    wider = make_dataset(tmp_path / "beyond", [5, 7], columns=beyond)
    for data, tanh in ((within, True), (wider, False)):
        model: Any = make_trainer(data, tmp_path / "run").model
        assert model.config.action_tanh is tanh


def test_checkpoint_is_enough_to_act(dataset: Dataset, tmp_path: Path) -> None:
    trainer = make_trainer(dataset, tmp_path)
    trainer.train()
    policy = load_policy(tmp_path / f"checkpoint-{STEPS}")
    policy.reset([0, 1], [20.0, 10.0])
    assert policy.context_length == 5 and policy.returns_scale == 10.0
    raw = dataset.read("observations", 0, 2)
    actions = policy.act(raw)
    assert actions.shape == (2, 3) and np.isfinite(actions).all()
    statistics = dataset.statistics["observations"]
    expected = (raw - statistics.mean) / (statistics.std + 1e-6)
    np.testing.assert_allclose(policy._windows[0][:, 0].numpy(), expected, rtol=1e-6, atol=1e-7)


def test_discrete_actions_train_too(tmp_path: Path) -> None:
    columns = hopper_columns(12) | {"actions": np.arange(12) % 3}
    discrete = make_dataset(tmp_path, [5, 7], columns=columns)
    trainer = make_trainer(discrete, tmp_path / "run")
    assert trainer.loader.batch_at(0).actions.dtype == torch.int64
    assert float(trainer.train().training_loss) > 0
    logits = load_policy(tmp_path / "run" / f"checkpoint-{STEPS}").model.config.act_dim
    assert logits == 3


if __name__ == "__main__":  # a rank of two
    make_trainer(open_dataset(sys.argv[1]), Path(sys.argv[2]), dropout=0.0).train()
