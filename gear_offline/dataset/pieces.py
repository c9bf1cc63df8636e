"""Pieces: what actors append to a dataset that grows, each a shard in a file of its own.

The file's name ends with a digest of its bytes.  docs/reference/format.md specifies both.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from gear_offline.core.files import new_part, writing
from gear_offline.core.types import Array
from gear_offline.dataset.dataset import Dataset, with_shards
from gear_offline.dataset.manifest import Endings, Manifest, ShardRecord
from gear_offline.dataset.schema import ColumnSpec, EpisodeIndex, fold_episodes
from gear_offline.dataset.shard import (
    DIGEST_CHARS,
    EPISODE_COLUMNS,
    BlockDigests,
    byte_view,
    damaged,
    digest,
    encode_header,
    open_member,
    plan_tensors,
)
from gear_offline.dataset.statistics import Moments
from gear_offline.errors import InputError

INCOMING = "incoming"
REWARDS, SUFFIX = "rewards", ".safetensors"

Episode = tuple[Mapping[str, Array], tuple[bool, bool]]  # columns; terminated, truncated


def write_piece(folder: Path, columns: tuple[ColumnSpec, ...], episodes: Sequence[Episode]) -> Path:
    """Write episodes, which have these columns, as a piece in `folder`; return its path."""
    content = _encode(columns, episodes)
    # Names in the order of time are admitted in that order.
    place = folder / f"{time.time_ns():020d}-{digest(content)}{SUFFIX}"
    with writing(place):
        folder.mkdir(exist_ok=True)
        # Durable before it has its name, so that a learner, which makes names durable, admits only
        # what a power cut leaves.  The name itself is not synced: that costs as much again, and
        # loses at most the pieces of the last seconds, whole, and none when the actor is killed.
        with new_part(place) as (part, handle):
            rest = memoryview(content)
            while rest:
                rest = rest[os.write(handle, rest) :]
            os.fsync(handle)
            part.rename(place)
    return place


def _encode(columns: tuple[ColumnSpec, ...], episodes: Sequence[Episode]) -> memoryview:
    """Return a shard's bytes."""
    index = EpisodeIndex(lengths=np.array([len(next(iter(e.values()))) for e, _ in episodes]))
    tensors = plan_tensors(columns, steps=index.steps, episodes=index.episodes)
    header = encode_header(tensors)
    content = bytearray(header).ljust(len(header) + tensors[-1].stop)
    values: dict[str, Array] = {}
    for tensor in tensors:
        place, count = len(header) + tensor.start, math.prod(tensor.shape)
        values[tensor.name] = np.frombuffer(content, tensor.dtype, count, place)
    for column in columns:
        rows = values[column.name].view(column.dtype).reshape(-1, *column.shape)
        np.concatenate([e[column.name] for e, _ in episodes], out=rows)
    returns = np.full(index.episodes, np.nan)
    if REWARDS in values:
        returns[:] = 0.0
        fold_episodes(np.add, returns, index.offsets, values[REWARDS].astype(np.float64), 0)
    terminated, truncated = zip(*(ends for _, ends in episodes), strict=True)
    own = (index.lengths, returns, terminated, truncated)
    for column, numbers in zip(EPISODE_COLUMNS, own, strict=True):
        values[column.name][:] = numbers
    return memoryview(content)


def read_piece(path: Path, manifest: Manifest) -> Dataset:
    """Return the piece at `path` of a dataset with this `manifest`, as a dataset of its own.

    Raises
    ------
    InputError
        ``DATASET_DAMAGED``; ``COLUMN`` if it is not laid out as the dataset.
    """
    with open(open_member(path), "rb") as file:
        content = file.read()
    if digest(content) != path.stem[-DIGEST_CHARS:]:
        raise damaged("data do not match their digest", path)
    header, rows = b"", dict[str, Array]()
    with suppress(SafetensorError, KeyError, TypeError, UnicodeDecodeError):
        rows = safetensors.numpy.load(content)
        steps, episodes = (
            len(rows[name]) for name in (manifest.columns[0].name, EPISODE_COLUMNS[0].name)
        )
        header = encode_header(plan_tensors(manifest.spec.columns, steps=steps, episodes=episodes))
    if not header or not content.startswith(header) or not steps or not episodes:
        columns, remedy = ", ".join(map(str, manifest.columns)), "append it with go.Appender"
        what = f"its columns are not those of the dataset: {columns}"
        raise InputError("COLUMN", what, str(path), remedy)
    digests, statistics = {}, {}
    for name, part in rows.items():
        blocks = BlockDigests(manifest.block_bytes)
        blocks.update(byte_view(part))
        digests[name] = blocks.finish()
    for column in manifest.columns:
        moments = Moments(rows[column.name].shape[1:])
        moments.update(rows[column.name])
        statistics[column.name] = moments.result()
    ends = Endings(**{key: int(rows[f"episode_{key}"].sum()) for key in Endings.model_fields})
    counts: dict[str, Any] = {"episodes": episodes, "steps": steps}
    record = ShardRecord.model_construct(  # under a name that is not yet a shard's
        **counts,
        name=path.name,
        bytes=len(content),
        header_bytes=len(header),
        header_digest=digest(header),
        digests=digests,
    )
    own = manifest.replaced(**counts, statistics=statistics, endings=ends, shards=[record])
    return with_shards(path.parent, own)
