"""Tensors spread over ranks, saved without collecting them, and read by any number of ranks.

A directory of

- ``shard-00000-of-00004.safetensors``: the pieces of one rank, under the names of their tensors;
- ``shard-00000-of-00004.json``: where in its tensor each piece belongs, size and xxh3-128 digest
  of that file;
- ``index.json``: shapes and types of the whole tensors, the digests of the files above and of
  itself; written last, so a directory with an index is whole.

Nothing is pickled, as the metadata of ``torch.distributed.checkpoint`` and what its planners send
between ranks are.  Ranks need one file system and no messages, so a thread beside training can
write.  Reading copies from every piece what overlaps with what a rank holds.

Shape legend: d dimensions of a tensor.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import xxhash
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor

from gear_offline.checkpoint_fields import damaged
from gear_offline.checkpoint_saving import seal
from gear_offline.errors import GearError, InputError
from gear_offline.run_directory import read_regular, sync_directory, write_whole
from gear_offline.tensor_file import DTYPES, write_tensors

FORMAT, FORMAT_VERSION = "gear-offline shards", 1
INDEX = "index.json"
MAX_INDEX_BYTES = 256 << 20
WAIT_SECONDS = 600.0  # for the other ranks' files
POLL_SECONDS = 0.05
_NAME = re.compile(r"shard-[0-9]{5}-of-[0-9]{5}\.safetensors")
_TYPES = {name: dtype for dtype, name in DTYPES.items()}


@dataclass(frozen=True, kw_only=True, eq=False)
class Piece:
    """A part of a tensor that one rank holds.

    Attributes
    ----------
    tensor
        The part, of d dimensions, on any device.
    offset
        (d,) first index of the part in the whole.
    shape
        (d,) of the whole.
    """

    tensor: Tensor
    offset: tuple[int, ...]
    shape: tuple[int, ...]


def held_piece(tensor: Tensor) -> Piece:
    """Return what this process holds of `tensor`: all of it, or its part of a DTensor."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Piece(tensor=tensor.detach(), offset=(0,) * len(shape), shape=shape)
    found = compute_local_shape_and_global_offset(shape, tensor.device_mesh, tensor.placements)
    distributed: Any = tensor.detach()
    return Piece(tensor=distributed.to_local(), offset=tuple(found[1]), shape=shape)


def pieces_to_save(tensors: Mapping[str, Tensor], *, rank: int) -> dict[str, Piece]:
    """Return the pieces that `rank` writes, such that all ranks together write each part once.

    Of tensors that every rank has whole the first rank writes all.
    """
    from torch.distributed.tensor import DTensor, Replicate

    found = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            place = tensor.device_mesh.get_coordinate()
            ways = zip(place or (), tensor.placements, strict=True)
            mine = all(at == 0 or not isinstance(way, Replicate) for at, way in ways)
        else:
            mine = rank == 0
        if mine and (piece := held_piece(tensor)).tensor.numel():
            found[name] = piece
    return found


def write_shard(folder: Path, pieces: Mapping[str, Piece], *, rank: int, size: int) -> None:
    """Write one rank's pieces into `folder`, a directory that is there.

    Raises
    ------
    OSError
        What the system said.
    """
    path = folder / f"shard-{rank:05d}-of-{size:05d}.safetensors"
    tensors = {name: piece.tensor for name, piece in pieces.items()}
    facts = write_tensors(path, tensors)
    where = {
        name: {
            "offset": list(piece.offset),
            "size": list(piece.tensor.shape),
            "shape": list(piece.shape),
            "dtype": DTYPES[piece.tensor.dtype],
        }
        for name, piece in pieces.items()
    }
    document = {"format": FORMAT, "file": path.name, **facts, "pieces": where}
    write_whole(path.with_suffix(".json"), seal(document))


def finish_shards(folder: Path, *, size: int, wait_seconds: float = WAIT_SECONDS) -> None:
    """Write the index when the files of all `size` ranks are there; one rank calls this.

    Raises
    ------
    GearError
        ``RANK_LOST`` if a file does not come in time.
    InputError
        ``CHECKPOINT_DAMAGED`` if files do not fit each other.
    """
    deadline = time.monotonic() + wait_seconds
    files: dict[str, Any] = {}
    for rank in range(size):
        path = folder / f"shard-{rank:05d}-of-{size:05d}.json"
        while not path.exists():
            if time.monotonic() > deadline:
                raise GearError(
                    "RANK_LOST",
                    f"rank {rank} has not written its shard after {wait_seconds:,.0f} s",
                    where=str(path),
                    remedy="all ranks must write to one file system; see that rank's messages",
                )
            time.sleep(POLL_SECONDS)
        document = _read_sealed(path)
        files[document["file"]] = {key: document[key] for key in ("bytes", "xxh3_128", "pieces")}
    tensors: dict[str, Any] = {}
    for facts in files.values():
        for name, piece in facts["pieces"].items():
            whole = {"shape": piece.pop("shape"), "dtype": piece.pop("dtype")}
            if tensors.setdefault(name, whole) != whole:
                raise damaged(folder, f"two ranks disagree on {name}")
    content = {"format": FORMAT, "format_version": FORMAT_VERSION, "ranks": size}
    write_whole(folder / INDEX, seal({**content, "tensors": tensors, "files": files}))
    sync_directory(folder)


def read_index(folder: Path) -> dict[str, Any]:
    """Return the verified index of `folder`.

    Raises
    ------
    InputError
        ``CHECKPOINT_DAMAGED``, ``CHECKPOINT_VERSION``.
    """
    document = _read_sealed(folder / INDEX)
    if document.get("format_version", 0) > FORMAT_VERSION:
        raise InputError(
            "CHECKPOINT_VERSION",
            f"the shards have format version {document['format_version']}, this gear-offline "
            f"reads up to {FORMAT_VERSION}",
            where=str(folder),
            remedy="use a newer gear-offline",
        )
    return document


def _read_sealed(path: Path) -> dict[str, Any]:
    try:
        raw = read_regular(path, most=MAX_INDEX_BYTES)
        document: dict[str, Any] = json.loads(raw)
        document.pop("digest")
        if document["format"] != FORMAT or seal(document) != raw:
            raise ValueError("its digest does not fit")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not readable, or changed"
        raise damaged(path.parent, f"{path.name}: {reason}") from error
    return document


def load_shards(folder: Path, into: Mapping[str, Tensor]) -> None:
    """Fill the tensors of `into`, or this rank's part of them, from the shards of any ranks.

    Every file that holds a part of them is read once and verified before it is used; a rank of as
    many as wrote reads its own file.

    Parameters
    ----------
    into
        Whole tensors or DTensors, of the shapes and types that were saved.

    Raises
    ------
    InputError
        ``CHECKPOINT_DAMAGED``: a file is missing or changed, or the tensors are other ones.
    """
    load_pieces(folder, {name: held_piece(tensor) for name, tensor in into.items()})


def load_pieces(folder: Path, wanted: Mapping[str, Piece]) -> None:
    """Fill the tensors of `wanted` in place; see `load_shards`."""
    index = read_index(folder)
    try:
        missing = {name: piece.tensor.numel() for name, piece in wanted.items()}
        for name, piece in wanted.items():
            _check_whole(folder, name, piece, index["tensors"])
            _check_disjoint(folder, name, index["files"])
        for file, facts in index["files"].items():
            touched = {
                name: overlap
                for name, held in facts["pieces"].items()
                if name in wanted and (overlap := _overlap(wanted[name], held)) is not None
            }
            if not touched:
                continue
            tensors = _read_file(folder, file, facts)
            for name, (here, there) in touched.items():
                part = tensors[name][there]
                wanted[name].tensor[here].copy_(part)
                missing[name] -= part.numel()
    except (KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
        if isinstance(error, GearError):
            raise
        raise damaged(folder, f"it lacks or misnames something ({error})") from error
    for name, count in missing.items():
        if count:
            raise damaged(folder, f"{count} elements of {name} are missing")


def _check_whole(folder: Path, name: str, piece: Piece, tensors: Mapping[str, Any]) -> None:
    if name not in tensors:
        if piece.tensor.numel() == 0 and 0 in piece.shape:
            return  # nothing of it was written
        raise damaged(folder, f"it has no tensor {name}")
    shape, dtype = tuple(tensors[name]["shape"]), _TYPES[tensors[name]["dtype"]]
    if shape != piece.shape or dtype != piece.tensor.dtype:
        what = f"{name} is {shape} {dtype}, not {piece.shape} {piece.tensor.dtype}"
        raise damaged(folder, what)


def _check_disjoint(folder: Path, name: str, files: Mapping[str, Any]) -> None:
    """Refuse pieces that overlap; then counting elements shows whether some are missing."""
    held = [facts["pieces"][name] for facts in files.values() if name in facts["pieces"]]
    for one, other in combinations(held, 2):
        spans = zip(one["offset"], one["size"], other["offset"], other["size"], strict=True)
        if all(max(a, b) < min(a + m, b + n) for a, m, b, n in spans):
            raise damaged(folder, f"two pieces of {name} overlap")


Slices = tuple[slice, ...]


def _overlap(wanted: Piece, held: Mapping[str, Any]) -> tuple[Slices, Slices] | None:
    """Return what a wanted and a held part have in common, as slices of each; None if nothing."""
    here, there = [], []
    sizes = zip(wanted.offset, wanted.tensor.shape, held["offset"], held["size"], strict=True)
    for mine, mine_size, theirs, theirs_size in sizes:
        first, last = max(mine, theirs), min(mine + mine_size, theirs + theirs_size)
        if first >= last:
            return None
        here.append(slice(first - mine, last - mine))
        there.append(slice(first - theirs, last - theirs))
    return tuple(here), tuple(there)


def _read_file(folder: Path, name: str, facts: Mapping[str, Any]) -> dict[str, Tensor]:
    """Read one rank's file and verify every byte of it."""
    if not _NAME.fullmatch(name):
        raise damaged(folder, f"{name[:60]!r} is no shard's name")
    try:
        raw = read_regular(folder / name, most=facts["bytes"])
    except OSError as error:
        raise damaged(folder, f"{name}: {error.strerror}") from error
    except ValueError as error:
        raise damaged(folder, f"{name} is {error}") from error
    if len(raw) != facts["bytes"] or xxhash.xxh3_128_hexdigest(raw) != facts["xxh3_128"]:
        raise damaged(folder, f"{name} does not match its digest")
    try:
        tensors: dict[str, Tensor] = load_tensors(raw)
    except SafetensorError as error:
        raise damaged(folder, f"{name}: {error}") from error
    for held, piece in facts["pieces"].items():
        if tuple(tensors[held].shape) != tuple(piece["size"]):
            raise damaged(folder, f"{held} in {name} has another shape than the index says")
    return tensors
