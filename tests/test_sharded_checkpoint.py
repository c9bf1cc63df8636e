"""Shards of several ranks: any other ranks read the same tensors, and damage is found."""

from __future__ import annotations

import json
import threading
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gear_offline.errors import GearError, InputError
from gear_offline.training.shard_index import INDEX, read_index
from gear_offline.training.sharded_checkpoint import (
    Piece,
    finish_shards,
    load_pieces,
    load_shards,
    tell_failure,
    whole_tensors,
    write_shard,
)
from tests.support import failing_code


def split(data: st.DataObject, length: int) -> list[tuple[int, int]]:
    """Cut a length into (first, last) parts."""
    cuts = sorted({0, length, *data.draw(st.lists(st.integers(0, length), max_size=3))})
    return list(pairwise(cuts))


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_pieces_make_up_any_part(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("pieces")
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple))
    whole = torch.arange(int(torch.tensor(shape).prod())).reshape(shape)
    boxes = list(product(*(split(data, length) for length in shape)))
    for rank, box in enumerate(boxes):
        offset = tuple(first for first, _ in box)
        part = whole[tuple(slice(first, last) for first, last in box)]
        piece = Piece(tensor=part, offset=offset, shape=shape)
        write_shard(folder, {"t": piece}, rank=rank, size=len(boxes))
    finish_shards(folder, size=len(boxes))
    region = [data.draw(st.sampled_from(split(data, length))) for length in shape]
    place = torch.full([last - first for first, last in region], -1)
    offset = tuple(first for first, _ in region)
    load_pieces(folder, {"t": Piece(tensor=place, offset=offset, shape=shape)})
    assert torch.equal(place, whole[tuple(slice(first, last) for first, last in region)])
    assert torch.equal(whole_tensors(folder, read_index(folder))["t"], whole)


def saved(folder: Path) -> Path:
    folder.mkdir()
    tensor = torch.arange(10.0)
    for rank in (0, 1):
        part = Piece(tensor=tensor[rank * 5 :][:5], offset=(rank * 5,), shape=(10,))
        write_shard(folder, {"t": part}, rank=rank, size=2)
    finish_shards(folder, size=2)
    return folder


def load(folder: Path, dtype: torch.dtype = torch.float32, **tensors: int) -> None:
    wanted = tensors or {"t": 10}
    load_shards(folder, {n: torch.zeros(size, dtype=dtype) for n, size in wanted.items()})


def test_every_flipped_bit_and_missing_file_is_found(tmp_path: Path) -> None:
    folder = saved(tmp_path / "s")
    load(folder)
    used = [INDEX, *(f"shard-0000{rank}-of-00002.safetensors" for rank in (0, 1))]
    for name in used:
        whole = (folder / name).read_bytes()
        for bit in range(0, 8 * len(whole), 5):
            changed = bytearray(whole)
            changed[bit // 8] ^= 1 << bit % 8
            (folder / name).write_bytes(changed)
            assert failing_code(lambda: load(folder)) == "CHECKPOINT_DAMAGED", (name, bit)
        for cut in (b"", whole[:-1], whole + b" "):
            (folder / name).write_bytes(cut)
            assert failing_code(lambda: load(folder)) == "CHECKPOINT_DAMAGED", name
        (folder / name).unlink()
        assert failing_code(lambda: load(folder)) == "CHECKPOINT_DAMAGED", name
        (folder / name).write_bytes(whole)
    load(folder)


def test_other_tensors_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "s")
    for wrong in (
        lambda: load(folder, t=9),
        lambda: load(folder, torch.float64, t=10),
        lambda: load(folder, t=10, other=3),
    ):
        assert failing_code(wrong) == "CHECKPOINT_DAMAGED"


def test_lies_with_a_digest_that_fits_are_refused(tmp_path: Path) -> None:
    from gear_offline.training.checkpoint_saving import seal

    folder = saved(tmp_path / "s")
    document = json.loads((folder / INDEX).read_text())
    document.pop("digest")
    first = next(iter(document["files"]))

    def lie(change: Any) -> None:
        changed = json.loads(json.dumps(document))
        change(changed)
        (folder / INDEX).write_bytes(seal(changed))
        assert failing_code(lambda: load(folder)) == "CHECKPOINT_DAMAGED"
        code = failing_code(lambda: whole_tensors(folder, read_index(folder)))
        assert code == "CHECKPOINT_DAMAGED"

    def huge(document: Any) -> None:
        """All sizes fit each other, and no file."""
        document["tensors"]["t"]["shape"] = [1 << 60]
        document["files"][first]["pieces"]["t"]["size"] = [(1 << 60) - 5]

    lie(lambda d: d["files"].update({"../x.safetensors": d["files"].pop(first)}))
    lie(lambda d: d["files"].pop(first))
    lie(lambda d: d["files"][first]["pieces"]["t"].update(offset=[3]))
    lie(lambda d: d["files"][first]["pieces"]["t"].update(offset=[0, 0]))
    lie(lambda d: d["files"][first]["pieces"]["t"].update(size=[4]))
    lie(lambda d: d["tensors"]["t"].update(dtype="F999"))
    lie(lambda d: d.pop("tensors"))
    lie(lambda d: d["tensors"]["t"].update(shape=[1 << 60]))
    lie(huge)
    (folder / INDEX).write_bytes(seal({**document, "format_version": 2}))
    assert failing_code(lambda: load(folder)) == "CHECKPOINT_VERSION"


def test_a_directory_without_all_shards_gets_no_index(tmp_path: Path) -> None:
    tensor = Piece(tensor=torch.zeros(3), offset=(0,), shape=(3,))
    write_shard(tmp_path, {"t": tensor}, rank=0, size=2)
    with pytest.raises(GearError) as caught:
        finish_shards(tmp_path, size=2, wait_seconds=0.1)
    assert caught.value.code == "RANK_LOST" and not (tmp_path / INDEX).exists()
    late = threading.Timer(0.1, lambda: write_shard(tmp_path, {}, rank=1, size=2))
    late.start()
    finish_shards(tmp_path, size=2, wait_seconds=30)
    late.join()
    assert (tmp_path / INDEX).exists()


def test_ranks_that_disagree_are_refused(tmp_path: Path) -> None:
    for rank, length in enumerate((3, 4)):
        piece = Piece(tensor=torch.zeros(length), offset=(0,), shape=(length,))
        write_shard(tmp_path, {"t": piece}, rank=rank, size=2)
    with pytest.raises(InputError, match="disagree on t"):
        finish_shards(tmp_path, size=2)


def test_a_rank_that_cannot_write_is_named_at_once(tmp_path: Path) -> None:
    tell_failure(tmp_path, "No space left on device", rank=1, size=2)
    with pytest.raises(GearError, match=r"rank 1 .*No space left") as caught:
        finish_shards(tmp_path, size=2, wait_seconds=600)
    assert caught.value.code == "RANK_FAILED" and not (tmp_path / INDEX).exists()


def test_ranks_that_are_gone_are_not_waited_for(tmp_path: Path) -> None:
    write_shard(tmp_path, {}, rank=0, size=2)
    code = failing_code(lambda: finish_shards(tmp_path, size=2, is_over=lambda: True))
    assert code == "RANK_LOST"
    write_shard(tmp_path, {}, rank=1, size=2)
    finish_shards(tmp_path, size=2, is_over=lambda: True)  # what is there is used all the same
    assert read_index(tmp_path)["ranks"] == 2
    assert not list(tmp_path.glob("shard-*.json")), "only what is verified stays"
