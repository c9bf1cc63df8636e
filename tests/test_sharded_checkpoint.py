"""Shards of several ranks: any other ranks read the same tensors, and damage is found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from gear_offline.errors import GearError, InputError
from gear_offline.sharded_checkpoint import (
    INDEX,
    Piece,
    finish_shards,
    load_pieces,
    load_shards,
    pieces_to_save,
    read_index,
    write_shard,
)
from tests.support import failing_code

ROOT = Path(__file__).resolve().parents[1]


def whole_tensors() -> dict[str, torch.Tensor]:
    """Of odd sizes, so that shares are unequal and some ranks have nothing."""
    generator = torch.Generator().manual_seed(5)
    return {
        "rows": torch.randn(7, 5, generator=generator),
        "columns": torch.randn(3, 8, generator=generator).to(torch.bfloat16),
        "short": torch.arange(2),
        "whole": torch.randn(4, generator=generator),
        "plain": torch.tensor(3.5),
    }


def sharded_training() -> dict[str, Any]:
    """Do a step of a model that FSDP2 has sharded; return its weights and moments."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3))
    for part in (model[0], model[2], model):
        fully_shard(part)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(4, 5)).square().sum().backward()
    optimizer.step()
    found: dict[str, Any] = {f"model/{name}": p for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        found[f"optimizer/exp_avg/{name}"] = optimizer.state[parameter]["exp_avg"]
    return found


def child(mode: str, folder: str) -> None:
    """One rank: spread the tensors, then save them, or load them and compare."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    ways: dict[str, Any] = {
        "rows": Shard(0),
        "columns": Shard(1),
        "short": Shard(0),
        "whole": Replicate(),
    }
    expected = whole_tensors()
    trained = sharded_training()
    tensors = {
        name: distribute_tensor(tensor.clone(), mesh, [ways[name]]) if name in ways else tensor
        for name, tensor in expected.items()
    }
    tensors |= trained
    if mode == "load":
        expected |= load_file(Path(folder) / "whole.safetensors")
        empty = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        load_shards(Path(folder) / "2", empty)
        for name, tensor in empty.items():
            full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            assert torch.equal(full, expected[name]), name
        tensors = empty
    else:
        whole = {name: tensor.full_tensor() for name, tensor in trained.items()}
        if rank == 0:
            save_file(whole, Path(folder) / "whole.safetensors")
    place = Path(folder) / str(size)
    if rank == 0:
        place.mkdir()
    dist.barrier()
    write_shard(place, pieces_to_save(tensors, rank=rank), rank=rank, size=size)
    if rank == 0:
        finish_shards(place, size=size, wait_seconds=60)
    dist.barrier()
    dist.destroy_process_group()


def launch(ranks: int, mode: str, folder: Path) -> None:
    program = f"from tests.test_sharded_checkpoint import child; child('{mode}', r'{folder}')"
    (folder / "program.py").write_text(program)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node", str(ranks), str(folder / "program.py")],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_two_ranks_save_three_read_and_save_and_one_reads(tmp_path: Path) -> None:
    launch(2, "save", tmp_path)
    launch(3, "load", tmp_path)
    for ranks in (2, 3):
        found = {name: torch.zeros_like(tensor) for name, tensor in whole_tensors().items()}
        load_shards(tmp_path / str(ranks), found)
        for name, tensor in whole_tensors().items():
            assert torch.equal(found[name], tensor), (ranks, name)
        trained = load_file(tmp_path / "whole.safetensors")
        found = {name: torch.zeros_like(tensor) for name, tensor in trained.items()}
        load_shards(tmp_path / str(ranks), found)
        assert len(found) == 8 and any(tensor.any() for tensor in found.values())
        assert all(torch.equal(found[name], tensor) for name, tensor in trained.items())
        assert read_index(tmp_path / str(ranks))["ranks"] == ranks


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
    from gear_offline.checkpoint_saving import seal

    folder = saved(tmp_path / "s")
    document = json.loads((folder / INDEX).read_text())
    document.pop("digest")
    first = next(iter(document["files"]))

    def lie(change: Any) -> None:
        changed = json.loads(json.dumps(document))
        change(changed)
        (folder / INDEX).write_bytes(seal(changed))
        assert failing_code(lambda: load(folder)) == "CHECKPOINT_DAMAGED"

    lie(lambda d: d["files"].update({"../x.safetensors": d["files"].pop(first)}))
    lie(lambda d: d["files"].pop(first))
    lie(lambda d: d["files"][first]["pieces"]["t"].update(offset=[3]))
    lie(lambda d: d["files"][first]["pieces"]["t"].update(offset=[0, 0]))
    lie(lambda d: d["files"][first]["pieces"]["t"].update(size=[4]))
    lie(lambda d: d["tensors"]["t"].update(dtype="F999"))
    lie(lambda d: d.pop("tensors"))
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
