"""Stacks of frames against a loop over single frames: from memory, from maps, in the loader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gear_offline.errors import InputError
from gear_offline.kernels.gather import CpuGather, Padding, Windows
from gear_offline.loaders.loader import GearLoader
from gear_offline.sampling import Segments, make_sampler
from gear_offline.tables.host_table import host_table
from gear_offline.tables.table import build_table
from tests.image_support import image_columns
from tests.segment_oracle import MemoryTable
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


def all_segments(lengths: list[int]) -> Segments:
    pairs = [(e, s) for e, length in enumerate(lengths) for s in range(length)]
    episodes, starts = np.array(pairs, dtype=np.int64).T
    return Segments(episodes=episodes.copy(), starts=starts.copy(), probability=np.ones(len(pairs)))


def check(windows: Windows, frames: Frames, lengths: list[int], stack: int) -> int:
    """Compare every real step's stack; return how many were compared."""
    states, count = windows.tensors()["states"].numpy(), 0
    offsets = np.concatenate([[0], np.cumsum(lengths)]).tolist()
    for window, (episode, _) in enumerate(windows.segments.tolist()):
        for place, real in enumerate(windows.attention_mask[window].tolist()):
            if real:
                step = int(windows.timesteps[window, place])
                expected = stack_of(frames, offsets[episode], step, stack)
                assert np.array_equal(states[window, place], expected)
                count += 1
    return count


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    span=st.integers(1, 11),
    stack=st.integers(2, 6),
    frame=st.sampled_from([(4, 4), (3, 5), (2, 3, 3)]),
    padding=st.sampled_from(["right", "left"]),
    pieces=st.integers(1, 3),
)
def test_every_stack_of_every_segment(
    lengths: list[int],
    span: int,
    stack: int,
    frame: tuple[int, ...],
    padding: Padding,
    pieces: int,
) -> None:
    columns = image_columns(sum(lengths), frame)
    options: dict[str, Any] = {}
    table = build_table(
        MemoryTable(columns, lengths, pieces=pieces),
        context_length=span,
        frame_stack=stack,
        **options,
    )
    segments = all_segments(lengths)
    windows = CpuGather(table, context_length=span, padding=padding).fill(segments)
    assert windows.tensors()["states"].shape[1:] == (span, stack, *frame)
    compared = check(windows, columns["observations"], lengths, stack)
    assert compared == int(windows.attention_mask.sum())
    states = next(b for b in windows.buffers if b.dtype == torch.uint8)
    assert states.shape[1] == span + stack - 1  # each frame once
    # The other fields are those of single frames, and so is the last frame of each real stack.
    single = build_table(MemoryTable(columns, lengths), context_length=span)
    plain = CpuGather(single, context_length=span, padding=padding).fill(segments)
    for name, values in plain.tensors().items():
        found = windows.tensors()[name]
        if name == "states":
            real = plain.attention_mask.bool()
            assert torch.equal(found[:, :, -1][real], values[real])
        else:
            assert torch.equal(found, values)


def test_nothing_of_a_neighbour_or_of_the_future() -> None:
    lengths, span, stack = [5, 2, 7], 4, 3
    columns = image_columns(14, (4, 4))
    for padding in ("right", "left"):
        for segment in range(14):
            chosen = all_segments(lengths)[segment : segment + 1]
            episode, start = int(chosen.episodes[0]), int(chosen.starts[0])
            first = sum(lengths[:episode])
            last = first + min(start + span, lengths[episode])
            spoiled = dict(columns, observations=np.zeros_like(columns["observations"]))
            keep = slice(first + max(start - stack + 1, 0), last)
            spoiled["observations"][keep] = columns["observations"][keep]
            one, other = (
                CpuGather(
                    build_table(MemoryTable(data, lengths), context_length=span, frame_stack=stack),
                    context_length=span,
                    padding=padding,
                ).fill(chosen)
                for data in (columns, spoiled)
            )
            assert torch.equal(one.tensors()["states"], other.tensors()["states"])


def test_stacks_are_views_and_blocks_of_steps_too() -> None:
    columns = image_columns(40, (4, 4))
    table = build_table(MemoryTable(columns, [40]), context_length=8, frame_stack=4)
    law = make_sampler("uniform_steps", table.episodes)
    windows = CpuGather(table, context_length=8).fill(law.sample(1, 0, 3, 5))
    states = windows.tensors()["states"]
    assert states.shape == (3, 5, 8, 4, 4, 4)
    assert states.data_ptr() == next(b for b in windows.buffers if b.dim() == 4
                                     and b.dtype == torch.uint8).data_ptr()  # fmt: skip
    moved = windows.to(torch.device("cpu")).tensors()["states"]
    assert torch.equal(moved, states)


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


def test_a_shared_table_has_the_rows_in_front() -> None:
    columns = image_columns(20, (4, 4))
    source = MemoryTable(columns, [15, 5])
    table, block = host_table(source, context_length=6, frame_stack=4)
    segments = all_segments([15, 5])
    expected = CpuGather(
        build_table(source, context_length=6, frame_stack=4), context_length=6
    ).fill(segments)
    found = CpuGather(table, context_length=6).fill(segments)
    for mine, theirs in zip(found.buffers, expected.buffers, strict=True):
        assert torch.equal(mine, theirs)
    del table, found
    block.close()


@pytest.mark.parametrize("stack", [0, 65, 2.0])
def test_stacks_that_are_refused(stack: Any, tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path, [4, 3], columns=image_columns(7, (4, 4)))
    with pytest.raises(InputError, match="frame_stack") as caught:
        GearLoader(dataset, batch_size=2, frame_stack=stack, device="cpu")
    assert caught.value.code == "LOADER_OPTION"


def test_vectors_are_not_stacked(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path, [4, 3])
    call = lambda: GearLoader(dataset, batch_size=2, frame_stack=4, device="cpu")  # noqa: E731
    assert failing_code(call) == "FRAME_STACK"
    table = build_table(dataset, context_length=3)
    with pytest.raises(InputError, match="from 1 to 3"):
        CpuGather(table, context_length=4)
