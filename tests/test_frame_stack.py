"""Stacks of frames against a loop over single frames: from memory, from maps, in the loader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from gear_offline.errors import InputError
from gear_offline.loaders.loader import GearLoader
from tests.image_support import image_columns
from tests.support import failing_code, make_dataset

Frames = npt.NDArray[np.uint8]


def stack_of(frames: Frames, first: int, step: int, stack: int) -> Frames:
    """Return the stack of one step of the episode that begins at row `first`, frame by frame."""
    found = np.zeros((stack, *frames.shape[1:]), np.uint8)
    for place in range(stack):
        earlier = step - (stack - 1) + place
        if earlier >= 0:
            found[place] = frames[first + earlier]
    return found


def test_the_loader_hands_out_stacks(tmp_path: Path) -> None:
    lengths = [12, 3, 30]
    columns = image_columns(45, (6, 5))
    dataset = make_dataset(tmp_path, lengths, columns=columns)
    options: dict[str, Any] = {"batch_size": 6, "context_length": 5, "device": "cpu"}
    loader = GearLoader(dataset, frame_stack=4, **options)
    plain = GearLoader(dataset, **options)
    offsets = [0, 12, 15]
    for step in range(20):
        batch, single = next(loader), next(plain)
        assert batch.states.dtype == torch.uint8 and batch.states.shape == (6, 5, 4, 6, 5)
        assert torch.equal(batch.segments, single.segments)
        for i, (episode, start) in enumerate(batch.segments.tolist()):
            for k in range(int(batch.attention_mask[i].sum())):
                expected = stack_of(columns["observations"], offsets[episode], start + k, 4)
                assert np.array_equal(batch.states[i, k].numpy(), expected), step
        copy = batch.contiguous()
        assert copy.states.is_contiguous() and torch.equal(copy.states, batch.states)
        assert torch.equal(batch.to("cpu").states, batch.states)
    state = loader.state_dict()
    assert failing_code(lambda: plain.load_state_dict(state)) == "LOADER_STATE"
    old = {key: value for key, value in plain.state_dict().items() if key != "frame_stack"}
    plain.load_state_dict(old)
    assert failing_code(lambda: loader.load_state_dict(old)) == "LOADER_STATE"


@pytest.mark.parametrize("stack", [0, 65, 2.0])
def test_stacks_that_are_refused(stack: Any, tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path, [4, 3], columns=image_columns(7, (4, 4)))
    with pytest.raises(InputError, match="frame_stack") as caught:
        GearLoader(dataset, batch_size=2, frame_stack=stack, device="cpu")
    assert caught.value.code == "LOADER_OPTION"


def test_vectors_are_not_stacked(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path, [4, 3])
    call = lambda: GearLoader(dataset, batch_size=2, frame_stack=4, device="cpu")  # noqa: E731
    assert failing_code(call) == "LOADER_OPTION"
