"""Batch: names, devices, copies, what the released model takes, and stacks of frames."""

import inspect
import pickle
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gear_offline.loaders.batch import Batch
from gear_offline.loaders.loader import GearLoader
from tests.image_support import image_columns
from tests.support import failing_code, hopper_columns, make_dataset


def make_batch() -> Batch:
    record = torch.arange(2 * 3 * 8, dtype=torch.float32).view(2, 3, 8)
    return Batch(
        states=record[..., :4].contiguous(),
        actions=record[..., 4:6].contiguous(),
        rewards=record[..., 6:7].contiguous(),
        returns_to_go=record[..., 7:].contiguous(),
        timesteps=torch.arange(6).view(2, 3),
        attention_mask=torch.ones(2, 3, dtype=torch.int64),
        segments=torch.tensor([[0, 1], [4, 0]]),
        padding="left",
        extras={"infos/x": torch.zeros(2, 3, 2, dtype=torch.float64)},
    )


def test_model_inputs_are_arguments_of_the_released_class() -> None:
    from transformers import DecisionTransformerModel

    inputs = make_batch().model_inputs()
    names = set(inspect.signature(DecisionTransformerModel.forward).parameters)
    assert set(inputs) <= names
    assert set(inputs) == {f.name for f in fields(Batch)} - {
        *("segments", "padding", "extras", "task_bounds")
    }


def test_to_moves_everything_and_copies_nothing_that_is_there() -> None:
    batch = make_batch()
    there = batch.to("cpu")
    assert all(tensor is batch[name] for name, tensor in {**there}.items())
    moved = batch.to("meta", non_blocking=True)
    assert {tensor.device.type for tensor in {**moved}.values()} == {"meta"}
    assert moved.padding == "left" and list(moved.extras) == ["infos/x"]
    assert moved.extras["infos/x"].dtype == torch.float64


@pytest.mark.parametrize("frames", [True, False])
def test_data_without_rewards(tmp_path: Path, frames: bool) -> None:
    """Batches have neither rewards nor returns-to-go; all else is as with rewards."""
    lengths = [12, 3, 30]
    columns = image_columns(45, (6, 5)) if frames else hopper_columns(45)
    options: dict[str, Any] = {"batch_size": 6, "context_length": 5, "device": "cpu"}
    whole = GearLoader(make_dataset(tmp_path / "all", lengths, columns=columns), **options)
    del columns["rewards"]
    dataset = make_dataset(tmp_path, lengths, columns=columns)
    assert np.isnan(dataset.returns).all() and dataset.manifest.returns.count == 0
    for placement in ("host", "disk"):
        loader = GearLoader(dataset, placement=placement, host_budget=1 << 22, **options)
        batch, other = next(loader), whole.batch_at(0)
        copies = (batch.to("cpu"), batch.part(slice(0, 6)), pickle.loads(pickle.dumps(batch)))
        for same in (batch, *copies):
            assert {*same.model_inputs()} == {"states", "actions", "timesteps", "attention_mask"}
            assert all(torch.equal(same[name], other[name]) for name in same.keys())  # noqa: SIM118
            assert not hasattr(same, "rewards") and "no rewards" not in repr(same)
        with pytest.raises(AttributeError, match="its dataset has no rewards"):
            batch.returns_to_go  # noqa: B018
        loader.close()
    assert (
        failing_code(lambda: GearLoader(dataset, selection="top_k:k=1", **options)) == "SELECTION"
    )


def test_the_loader_hands_out_stacks(tmp_path: Path) -> None:
    lengths = [12, 3, 30]
    columns = image_columns(45, (6, 5))
    dataset = make_dataset(tmp_path, lengths, columns=columns)
    options: dict[str, Any] = {"batch_size": 6, "context_length": 5, "device": "cpu"}
    loader = GearLoader(dataset, frame_stack=4, **options)
    plain = GearLoader(dataset, **options)
    batch, copy = next(loader), loader.batch_at(0).contiguous()
    assert batch.states.dtype == torch.uint8 and batch.states.shape == (6, 5, 4, 6, 5)
    assert torch.equal(batch.states[:, :, -1], next(plain).states)
    assert copy.states.is_contiguous() and torch.equal(copy.states, batch.states)
    for one, other in ((loader, plain), (plain, loader)):
        state = one.state_dict()
        assert failing_code(lambda to=other, s=state: to.load_state_dict(s)) == "LOADER_STATE"  # type: ignore[misc]
