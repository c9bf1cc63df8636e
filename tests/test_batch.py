"""Batch: names, devices, copies, and what the released model takes."""

from __future__ import annotations

import inspect
from dataclasses import FrozenInstanceError, fields

import pytest
import torch
from torch import Tensor

from gear_offline.loaders.batch import Batch


def make_batch(*, strided: bool = False) -> Batch:
    record = torch.arange(2 * 3 * 8, dtype=torch.float32).view(2, 3, 8)
    states, actions = record[..., :4], record[..., 4:6]
    return Batch(
        states=states if strided else states.contiguous(),
        actions=actions if strided else actions.contiguous(),
        rewards=record[..., 6:7].contiguous(),
        returns_to_go=record[..., 7:].contiguous(),
        timesteps=torch.arange(6).view(2, 3),
        attention_mask=torch.ones(2, 3, dtype=torch.int64),
        segments=torch.tensor([[0, 1], [4, 0]]),
        padding="left",
        extras={"infos/x": torch.zeros(2, 3, 2, dtype=torch.float64)},
    )


def tensors(batch: Batch) -> dict[str, Tensor]:
    return {**batch.model_inputs(), "segments": batch.segments, **batch.extras}


def test_model_inputs_are_arguments_of_the_released_class() -> None:
    from transformers import DecisionTransformerModel

    inputs = make_batch().model_inputs()
    names = set(inspect.signature(DecisionTransformerModel.forward).parameters)
    assert set(inputs) <= names
    assert set(inputs) == {f.name for f in fields(Batch)} - {
        *("segments", "padding", "extras", "task_bounds")
    }


def test_length_device_and_immutability() -> None:
    batch = make_batch()
    assert len(batch) == 2
    assert batch.device == torch.device("cpu")
    with pytest.raises(FrozenInstanceError):
        batch.states = batch.rewards  # type: ignore[misc]


def test_to_moves_everything_and_copies_nothing_that_is_there() -> None:
    batch = make_batch()
    there = batch.to("cpu")
    for name, tensor in tensors(there).items():
        assert tensor is tensors(batch)[name]
    moved = batch.to("meta", non_blocking=True)
    assert {tensor.device.type for tensor in tensors(moved).values()} == {"meta"}
    assert moved.padding == "left" and list(moved.extras) == ["infos/x"]
    assert moved.extras["infos/x"].dtype == torch.float64


def test_contiguous_copies_only_strided_tensors() -> None:
    batch = make_batch(strided=True)
    packed = batch.contiguous()
    assert not batch.states.is_contiguous() and packed.states.is_contiguous()
    assert torch.equal(batch.states, packed.states)
    assert packed.timesteps is batch.timesteps


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="run on a machine with a CUDA device")
def test_pin_memory_keeps_the_values() -> None:
    batch = make_batch()
    pinned = batch.pin_memory()
    for name, tensor in tensors(pinned).items():
        assert tensor.is_pinned() and torch.equal(tensor, tensors(batch)[name])
