"""The tensors of a shard that hold one value an episode: read, and checked against each other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gear_offline.dataset.manifest import MANIFEST_NAME, Manifest, ShardRecord
from gear_offline.dataset.shards import EPISODE_COLUMNS, REMEDY_DAMAGED, byte_view
from gear_offline.dataset.verification import check_header, read_checked, shard_file
from gear_offline.errors import InputError


def read_episodes(
    directory: int, manifest: Manifest, shard: ShardRecord, path: Path
) -> dict[str, npt.NDArray[Any]]:
    """Read a shard's per-episode tensors, always compared with their digests.

    Raises
    ------
    InputError
        ``DATASET_CONTENT``, ``SHARD_DIGEST``, ``SHARD_HEADER``; what reading raises.
    """
    found: dict[str, npt.NDArray[Any]] = {}
    tensors = {t.name: t for t in manifest.tensors(shard)}
    with shard_file(directory, shard, path) as handle:
        check_header(handle, manifest, shard, path)
        for column in EPISODE_COLUMNS:
            tensor = tensors[column.name]
            raw = np.empty(tensor.bytes, np.uint8)
            data = byte_view(raw)
            read_checked(handle, shard, tensor, manifest.block_bytes, path, tensor.start, data)
            if tensor.dtype == np.bool_ and raw.max(initial=0) > 1:
                raise _contradiction(path / shard.name, f"{column.name} is not 0 or 1 everywhere")
            found[column.name] = raw.view(tensor.dtype)
    if (found["episode_terminated"] & found["episode_truncated"]).any():
        raise _contradiction(path / shard.name, "an episode is both terminated and truncated")
    lengths = found["episode_lengths"]
    if (lengths < 1).any() or (lengths > shard.steps).any() or lengths.sum() != shard.steps:
        raise _contradiction(path / shard.name, f"lengths do not add up to {shard.steps} steps")
    return found


def check_episodes(manifest: Manifest, values: Mapping[str, npt.NDArray[Any]], path: Path) -> None:
    """Compare the tensors of all shards with the counts of the manifest (``DATASET_CONTENT``)."""
    for key in ("terminated", "truncated"):
        if int(values[f"episode_{key}"].sum()) != getattr(manifest, key):
            raise _contradiction(path / MANIFEST_NAME, f"{key} episodes are counted otherwise")


def _contradiction(where: Path, what: str) -> InputError:
    return InputError("DATASET_CONTENT", what, where=str(where), remedy=REMEDY_DAMAGED)
