"""The index of tensors that are spread over files, and the names of those files.

`gear_offline.training.sharded_checkpoint` says what stands in it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from gear_offline.core.files import read_regular
from gear_offline.errors import InputError
from gear_offline.training.checkpoint_fields import damaged, not_readable, seal
from gear_offline.training.tensor_file import DTYPES

FORMAT, FORMAT_VERSION = "gear-offline shards", 1
INDEX = "index.json"
MAX_INDEX_BYTES = 256 << 20
_NAME = re.compile(r"shard-[0-9]{5}-of-[0-9]{5}\.safetensors")
TYPES = {name: dtype for dtype, name in DTYPES.items()}


def shard_stem(rank: int, size: int) -> str:
    """Return the name of the files of `rank` of `size`, without what comes after the dot."""
    return f"shard-{rank:05d}-of-{size:05d}"


def read_index(folder: Path, expected: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the verified index of `folder`.

    Parameters
    ----------
    expected
        ``bytes`` and ``xxh3_128`` from `finish_shards`, if the caller keeps them.

    Raises
    ------
    InputError
        ``CHECKPOINT_DAMAGED``, ``CHECKPOINT_READ``, ``CHECKPOINT_VERSION``.
    """
    document = read_sealed(folder / INDEX, expected)
    if document.get("format_version", 0) > FORMAT_VERSION:
        raise InputError(
            "CHECKPOINT_VERSION",
            f"the shards have format version {document['format_version']}, this gear-offline "
            f"reads up to {FORMAT_VERSION}",
            where=str(folder),
            remedy="use a newer gear-offline",
        )
    return document


def read_sealed(path: Path, expected: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return a document that bears its own digest; raises as `read_index`."""
    raw = read_bytes(path, most=MAX_INDEX_BYTES if expected is None else expected["bytes"])
    if expected is not None and xxhash.xxh3_128_hexdigest(raw) != expected["xxh3_128"]:
        raise damaged(path.parent, f"{path.name} does not match its digest")
    try:
        document: dict[str, Any] = json.loads(raw)
        document.pop("digest")
        if document["format"] != FORMAT or seal(document) != raw:
            raise ValueError("its digest does not fit")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(path.parent, f"{path.name}: not readable, or changed") from error
    return document


def read_bytes(path: Path, *, most: int) -> bytes:
    """Return a file of at most `most` bytes; raises as `read_index`."""
    try:
        return read_regular(path, most=most)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise damaged(path.parent, f"{path.name}: {error.strerror}") from error
    except OSError as error:
        raise not_readable(path, error) from error
    except ValueError as error:
        raise damaged(path.parent, f"{path.name} is {error}") from error


def read_shard(folder: Path, name: str, facts: Mapping[str, Any]) -> bytes:
    """Return one rank's file, every byte of it verified; raises as `read_index`."""
    check_name(folder, name)
    raw = read_bytes(folder / name, most=facts["bytes"])
    if len(raw) != facts["bytes"] or xxhash.xxh3_128_hexdigest(raw) != facts["xxh3_128"]:
        raise damaged(folder, f"{name} does not match its digest")
    return raw


def verify_shards(folder: Path, expected: Mapping[str, Any]) -> None:
    """Compare the index and all files of `folder` with their digests, one file at a time.

    Parameters
    ----------
    expected
        As for `read_index`, whose errors this raises.
    """
    index = read_index(folder, expected)
    try:
        for name, facts in index["files"].items():
            read_shard(folder, name, facts)
    except (KeyError, TypeError, AttributeError) as error:
        raise damaged(folder, f"it lacks or misnames something ({error})") from error


def check_sizes(folder: Path, index: Mapping[str, Any]) -> None:
    """Refuse tensors larger than the files that hold them: no memory is taken for lies.

    Raises
    ------
    InputError
        ``CHECKPOINT_DAMAGED``, ``CHECKPOINT_READ``.
    ValueError, KeyError, TypeError
        Sizes that do not fit each other, or no sizes at all.
    """
    held: dict[str, int] = {}
    for file, facts in index["files"].items():
        check_name(folder, file)
        size = 0
        for name, piece in facts["pieces"].items():
            count = math.prod(piece["size"])
            held[name] = held.get(name, 0) + count
            size += count * TYPES[index["tensors"][name]["dtype"]].itemsize
        try:
            there = (folder / file).stat().st_size
        except FileNotFoundError as error:
            raise damaged(folder, f"{file}: {error.strerror}") from error
        except OSError as error:
            raise not_readable(folder / file, error) from error
        if size > there:
            raise ValueError(f"pieces of {size} bytes in {file}")
    for name, facts in index["tensors"].items():
        if math.prod(facts["shape"]) != held[name]:
            raise ValueError(f"{held[name]} elements of {name}")


def check_name(folder: Path, name: str) -> None:
    """Refuse what is no shard's name (``CHECKPOINT_DAMAGED``)."""
    if not _NAME.fullmatch(name):
        raise damaged(folder, f"{name[:60]!r} is no shard's name")
