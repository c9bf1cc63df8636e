"""Tensors that are spread over ranks: saved without collecting them, read by any number of ranks.

The files are those of ``torch.distributed.checkpoint``'s ``HuggingFaceStorageWriter``, a
safetensors file of each rank's pieces whose header says where in its tensor each piece belongs,
and torch's own reader reads them.  They are written here because torch's writer sends pickled plans
between the ranks while training waits (0.42 s against 0.06 s at 87 million parameters, H200), and
tells no digests.  Reading through its planner needs no message at all.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from gear_offline.core.files import writing
from gear_offline.distributed.world import World, peers
from gear_offline.errors import InputError, together
from gear_offline.models.tensor_file import FileFacts, write_tensors


class ShardWriter:
    """Writes a rank's part of tensors, while each other rank writes its own.

    The ranks make it, and call `write`, together: in threads of theirs, which tell each other of
    files and failures over a group of their own.  `run` is the folder that all write into.
    """

    def __init__(self, world: World, run: Path) -> None:
        _check_all_see(world, run)
        with peers("connecting the ranks that save"):
            limit = timedelta(seconds=world.timeout)
            group = dist.new_group(backend="gloo", timeout=limit)
        self._world = replace(world, control=group)
        self._places: dict[str, dict[str, list[int]]] = {}  # stay as they are in a run

    def pieces(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's shards of `tensors`; the first rank's include what all have."""
        pieces: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            offsets, piece = [0] * tensor.ndim, tensor.detach()
            if isinstance(piece, DTensor):
                shape, mesh, ways = tuple(piece.shape), piece.device_mesh, piece.placements
                offsets = [*compute_local_shape_and_global_offset(shape, mesh, ways)[1]]
                piece = piece.to_local()
            elif not self._world.is_first:
                continue
            if piece.numel():
                pieces[name], self._places[name] = piece, {"saved_offsets": offsets}
        return pieces

    def write(self, folder: Path, pieces: Mapping[str, Tensor]) -> dict[str, FileFacts]:
        """Write this rank's pieces; return size and digest of the files of all ranks, by name."""
        name = f"shard-{self._world.rank + 1:05d}-model-00001-of-00001.safetensors"
        places = {key: self._places[key] for key in pieces}
        metadata = ("DCP_SHARDING_INFO", json.dumps(places, sort_keys=True))

        def write() -> tuple[str, dict[str, Any]]:
            with writing(folder):
                folder.mkdir(parents=True, exist_ok=True)
                return name, write_tensors(folder / name, pieces, metadata).model_dump()

        return {name: FileFacts(**facts) for name, facts in together(self._world.gather, write)}


def _check_all_see(world: World, folder: Path) -> None:
    """Refuse a folder that not all ranks can write into; it is made."""
    probe = folder / f".partial-{secrets.token_hex(8)}"
    world.lead(lambda: probe.mkdir(parents=True))
    probe = folder / world.gather(probe.name)[0]
    able = world.gather(os.access(probe, os.W_OK | os.X_OK))
    if world.is_first:
        probe.rmdir()
    if not all(able):
        problem = f"rank {able.index(False)} does not see it, and each rank saves its own shards"
        remedy = "put the run where every node sees it, or use train.parallel=ddp"
        raise InputError("OUTPUT_WRITE", problem, str(folder), remedy)


def read_into(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Fill tensors in place, or this rank's part of them, from the files of any number of ranks."""
    reader, planner = HuggingFaceStorageReader(str(folder)), DefaultLoadPlanner()
    metadata = reader.read_metadata()
    planner.set_up_planner(tensors, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plan = planner.finish_plan(planner.create_local_plan())
    reader.read_data(plan, planner).wait()


def read_whole(folder: Path, prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names begin with `prefix`, whole, on the CPU."""
    metadata: Any = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(facts.size, dtype=facts.properties.dtype)
        for name, facts in metadata.items()
        if name.startswith(prefix)
    }
    read_into(folder, tensors)
    return tensors
