"""Files of tensors, durable, with their digests."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import xxhash
from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError

from gear_offline.core.files import open_regular

if TYPE_CHECKING:
    from torch import Tensor


class FileFacts(BaseModel):
    """Size and digest of a file."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")
    bytes: Annotated[int, Field(ge=0)]
    xxh3_128: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: tuple[str, str] = ("format", "pt")
) -> FileFacts:
    """Write tensors of the CPU as a safetensors file, durable; return its size and digest.

    `metadata` is one pair, since the library writes several in any order.
    """
    import safetensors.torch  # loads torch, which who reads digests does not need

    try:
        safetensors.torch.save_file(dict(tensors), path, metadata=dict([metadata]))
    except SafetensorError as error:  # what the system said, as text: a full disk
        number = re.search(r"os error ([0-9]+)", str(error))
        code = int(number[1]) if number else 0
        raise OSError(code, os.strerror(code) if code else str(error), str(path)) from error
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
    return file_facts(path)


def file_facts(path: Path) -> FileFacts:
    """Return size and digest of a regular file."""
    with open(open_regular(path), "rb", buffering=0) as file:
        digest = hashlib.file_digest(file, xxhash.xxh3_128)
        return FileFacts(bytes=file.tell(), xxh3_128=digest.hexdigest())
