"""Tensors spread over ranks, saved without collecting them, and read by any number of ranks.

A directory of

- ``shard-00000-of-00004.safetensors``: the pieces of one rank, under the names of their tensors;
- ``index.json``: shapes and types of the whole tensors, where in its tensor each piece belongs,
  sizes and xxh3-128 digests of the files above, and a digest of itself; written last, so a
  directory with an index is whole.

While it is written each rank leaves a ``.json`` beside its file when that is on the disk, or a
``.failed`` that says why it will not be; the first rank waits for them.

Nothing is pickled, as the metadata of ``torch.distributed.checkpoint`` and what its planners send
between ranks are.  Ranks need one file system and no messages, so a thread beside training can
write.  Reading copies from every piece what overlaps with what a rank holds.

Shape legend: d dimensions of a tensor.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor

from gear_offline.core.files import read_regular, sync_directory, write_file
from gear_offline.errors import GearError
from gear_offline.training.checkpoint_fields import damaged, seal
from gear_offline.training.shard_index import (
    FORMAT,
    FORMAT_VERSION,
    INDEX,
    TYPES,
    check_sizes,
    read_index,
    read_sealed,
    read_shard,
    shard_stem,
)
from gear_offline.training.tensor_file import DTYPES, write_tensors

WAIT_SECONDS = 600.0  # for the other ranks' files
POLL_SECONDS = 0.05


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


@dataclass(frozen=True, kw_only=True, eq=False)
class Shard:
    """What one rank adds to a checkpoint, and where.

    Attributes
    ----------
    place
        The directory in which all ranks write; it is made by the first that comes.
    pieces
        By the names of their tensors.
    rank, size
        This one, and how many there are.
    wait_seconds
        For the others' files.
    """

    place: Path
    pieces: Mapping[str, Piece]
    rank: int
    size: int
    wait_seconds: float = WAIT_SECONDS

    def replaced(self, tensors: Mapping[str, Tensor]) -> Shard:
        """Return the shard with other tensors of the same sizes, such as copies."""
        pieces = {name: replace(p, tensor=tensors[name]) for name, p in self.pieces.items()}
        return replace(self, pieces=pieces)

    def write(self) -> None:
        """Write this rank's part, or tell the others that it cannot be written; raises OSError."""
        try:
            self.place.mkdir(parents=True, exist_ok=True)
            write_shard(self.place, self.pieces, rank=self.rank, size=self.size)
        except OSError as error:
            why = error.strerror or str(error)
            tell_failure(self.place, why, rank=self.rank, size=self.size)
            raise

    def finish(self, is_over: Callable[[], bool]) -> dict[str, Any]:
        """Complete what all ranks write; the first one does this, see `finish_shards`."""
        return finish_shards(
            self.place, size=self.size, wait_seconds=self.wait_seconds, is_over=is_over
        )


def write_shard(folder: Path, pieces: Mapping[str, Piece], *, rank: int, size: int) -> None:
    """Write one rank's pieces into `folder`, a directory that is there.

    Raises
    ------
    OSError
        What the system said.
    """
    path = folder / f"{shard_stem(rank, size)}.safetensors"
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
    _tell(path.with_suffix(".json"), seal(document))


def tell_failure(folder: Path, why: str, *, rank: int, size: int) -> None:
    """Tell the rank that waits in `finish_shards` that this one gives up, as far as that works."""
    stem = shard_stem(rank, size)
    with suppress(OSError):  # first make room for the words, if the disk is full
        (folder / f"{stem}.safetensors").unlink(missing_ok=True)
    with suppress(OSError):
        _tell(folder / f"{stem}.failed", why.encode())


def _tell(path: Path, content: bytes) -> None:
    """Write a file that the waiting rank finds whole; it may take the folder away at once."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(content)
    os.replace(partial, path)


def finish_shards(
    folder: Path,
    *,
    size: int,
    wait_seconds: float = WAIT_SECONDS,
    is_over: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Write the index when the files of all `size` ranks are there; one rank calls this.

    Parameters
    ----------
    is_over
        Whether nothing more will come: then files that are not there are not waited for.

    Returns
    -------
    dict
        ``bytes`` and ``xxh3_128`` of the index, as a checkpoint lists its files.

    Raises
    ------
    GearError
        ``RANK_FAILED`` if a rank has told that it could not write, ``RANK_LOST`` if a file does
        not come in time.
    InputError
        ``CHECKPOINT_DAMAGED`` if files do not fit each other.
    """
    _await_ranks(folder, size, wait_seconds, is_over)
    files: dict[str, Any] = {}
    for rank in range(size):
        document = read_sealed(folder / f"{shard_stem(rank, size)}.json")
        files[document["file"]] = {key: document[key] for key in ("bytes", "xxh3_128", "pieces")}
    tensors: dict[str, Any] = {}
    for facts in files.values():
        for name, piece in facts["pieces"].items():
            whole = {"shape": piece.pop("shape"), "dtype": piece.pop("dtype")}
            if tensors.setdefault(name, whole) != whole:
                raise damaged(folder, f"two ranks disagree on {name}")
    content = {"format": FORMAT, "format_version": FORMAT_VERSION, "ranks": size}
    raw = seal({**content, "tensors": tensors, "files": files})
    write_file(folder / INDEX, raw)
    for rank in range(size):  # the index says it all
        (folder / f"{shard_stem(rank, size)}.json").unlink()
    sync_directory(folder)
    return {"bytes": len(raw), "xxh3_128": xxhash.xxh3_128_hexdigest(raw)}


def _await_ranks(folder: Path, size: int, wait_seconds: float, is_over: Callable[[], bool]) -> None:
    deadline = time.monotonic() + wait_seconds
    while True:
        over = is_over() or time.monotonic() > deadline
        # A network file system may keep what it once found missing; opening a folder asks anew.
        names = set(os.listdir(folder))
        for rank in range(size):
            name = f"{shard_stem(rank, size)}.failed"
            if name in names:
                why = read_regular(folder / name, most=10_000).decode(errors="replace")
                raise GearError(
                    "RANK_FAILED",
                    f"rank {rank} could not save its shard: {why}",
                    where=str(folder),
                    remedy="see its own message",
                )
        late = [rank for rank in range(size) if f"{shard_stem(rank, size)}.json" not in names]
        if not late:
            return
        if over:
            raise GearError(
                "RANK_LOST",
                f"rank {late[0]} has not written its shard in up to {wait_seconds:,.0f} s",
                where=str(folder / shard_stem(late[0], size)),
                remedy="all ranks must write to one file system; see that rank's messages",
            )
        time.sleep(POLL_SECONDS)


def load_shards(
    folder: Path, into: Mapping[str, Tensor], *, index: Mapping[str, Any] | None = None
) -> None:
    """Fill the tensors of `into`, or this rank's part of them, from the shards of any ranks.

    Every file that holds a part of them is read once and verified before it is used; a rank of as
    many as wrote reads its own file.

    Parameters
    ----------
    into
        Whole tensors or DTensors, of the shapes and types that were saved.
    index
        From `read_index`, if it was read before.

    Raises
    ------
    InputError
        ``CHECKPOINT_DAMAGED``: a file is missing or changed, or the tensors are other ones;
        ``CHECKPOINT_READ``.
    """
    load_pieces(folder, {name: held_piece(tensor) for name, tensor in into.items()}, index=index)


def whole_tensors(folder: Path, index: Mapping[str, Any], *, prefix: str = "") -> dict[str, Tensor]:
    """Return the tensors whose names begin with `prefix`, collected in host memory.

    Raises
    ------
    InputError
        As `load_shards`.
    """
    try:
        check_sizes(folder, index)
        found = {
            name: torch.empty(facts["shape"], dtype=TYPES[facts["dtype"]])
            for name, facts in index["tensors"].items()
            if name.startswith(prefix)
        }
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        if isinstance(error, GearError):
            raise
        raise damaged(folder, f"it lacks or misnames something ({error})") from error
    load_shards(folder, found, index=index)
    return found


def load_pieces(
    folder: Path, wanted: Mapping[str, Piece], *, index: Mapping[str, Any] | None = None
) -> None:
    """Fill the tensors of `wanted` in place; see `load_shards`."""
    index = read_index(folder) if index is None else index
    try:
        missing = {name: piece.tensor.numel() for name, piece in wanted.items()}
        for name, piece in wanted.items():
            _check_whole(folder, name, piece, index["tensors"])
            _check_disjoint(folder, name, piece, index["files"])
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
    shape, dtype = tuple(tensors[name]["shape"]), TYPES[tensors[name]["dtype"]]
    if shape != piece.shape or dtype != piece.tensor.dtype:
        what = f"{name} is {shape} {dtype}, not {piece.shape} {piece.tensor.dtype}"
        raise damaged(folder, what)


def _check_disjoint(folder: Path, name: str, wanted: Piece, files: Mapping[str, Any]) -> None:
    """Refuse pieces that overlap; then counting elements shows whether some are missing."""
    all_held = (facts["pieces"].get(name) for facts in files.values())
    held = [piece for piece in all_held if piece is not None and _overlap(wanted, piece)]
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
    raw = read_shard(folder, name, facts)
    try:
        tensors: dict[str, Tensor] = load_tensors(raw)
    except SafetensorError as error:
        raise damaged(folder, f"{name}: {error}") from error
    for held, piece in facts["pieces"].items():
        if tuple(tensors[held].shape) != tuple(piece["size"]):
            raise damaged(folder, f"{held} in {name} has another shape than the index says")
    return tensors
