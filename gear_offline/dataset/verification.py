"""Compare shards with the digests of their manifest: headers, tensors, whole datasets."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from gear_offline.core.system import usable_cores
from gear_offline.dataset.manifest import Manifest, ShardRecord
from gear_offline.dataset.shards import (
    REMEDY_DAMAGED,
    TensorLayout,
    digest,
    open_directory,
    open_member,
    parse_header,
    read_into,
)
from gear_offline.errors import InputError, given_path

MAX_THREADS = 8
PIECE_BYTES = 1 << 20  # read and digested while it is in the cache

OnProgress = Callable[[int], None]


@dataclass(frozen=True, kw_only=True)
class VerificationReport:
    """What was checked without finding damage.

    Attributes
    ----------
    shards, blocks, bytes
        Files, digest blocks, and bytes of the shard files.
    """

    shards: int
    blocks: int
    bytes: int


def thread_count(threads: int | None) -> int:
    """Return `threads`, or one per core that this process may use, up to `MAX_THREADS`."""
    return max(1, threads or min(MAX_THREADS, usable_cores()))


@contextmanager
def shard_file(directory: int, shard: ShardRecord, path: Path) -> Iterator[int]:
    """Open a shard of the size that the manifest says."""
    handle = open_member(directory, shard.name, where=str(path / shard.name), size=shard.bytes)
    try:
        yield handle
    finally:
        os.close(handle)


def damaged(path: Path, shard: ShardRecord, what: str) -> InputError:
    return InputError(
        "SHARD_DIGEST",
        "data do not match their digest",
        where=f"{path / shard.name}, {what}",
        remedy=REMEDY_DAMAGED,
    )


def read_header(handle: int, shard: ShardRecord, path: Path) -> bytes:
    """Return a shard's header, which has the digest that the manifest says.

    Raises
    ------
    InputError
        ``SHARD_DIGEST``.
    """
    raw = bytearray(shard.header_bytes)
    read_into(handle, memoryview(raw), 0, where=str(path / shard.name))
    if digest(raw) != shard.header_digest:
        raise damaged(path, shard, "header")
    return bytes(raw)


def check_header(handle: int, manifest: Manifest, shard: ShardRecord, path: Path) -> None:
    """Compare a shard's header with its digest and with what the manifest promises.

    Raises
    ------
    InputError
        ``SHARD_DIGEST``, ``SHARD_HEADER``.
    """
    raw, where = read_header(handle, shard, path), str(path / shard.name)
    if parse_header(raw, file_bytes=shard.bytes, where=where) != manifest.tensors(shard):
        raise InputError(
            "SHARD_HEADER",
            "the shard's tensors are not those of the manifest",
            where=where,
            remedy=REMEDY_DAMAGED,
        )


def read_checked(
    handle: int,
    shard: ShardRecord,
    tensor: TensorLayout,
    block_bytes: int,
    path: Path,
    start: int,
    target: memoryview,
) -> None:
    """Fill `target` with bytes of a tensor, comparing the digest of every block it touches.

    Parameters
    ----------
    start
        Where `target` begins, counted from the end of the header.

    Raises
    ------
    InputError
        ``SHARD_DIGEST`` naming file, tensor and block; `target` is then not to be used.
    """
    stop, scratch = start + len(target), memoryview(b"")
    for index, (low, high) in enumerate(tensor.blocks(block_bytes)):
        if high <= start or low >= stop:
            continue
        found = xxhash.xxh3_128()
        for begin in range(low, high, PIECE_BYTES):
            end = min(begin + PIECE_BYTES, high)
            inside = start <= begin and end <= stop
            if not inside and not len(scratch):
                scratch = np.empty(PIECE_BYTES, np.uint8).data
            piece = target[begin - start : end - start] if inside else scratch[: end - begin]
            read_into(handle, piece, shard.header_bytes + begin, where=str(path / shard.name))
            found.update(piece)
            if not inside:
                first, last = max(begin, start), min(end, stop)
                if first < last:
                    target[first - start : last - start] = piece[first - begin : last - begin]
        if found.hexdigest() != shard.digests[tensor.name][index]:
            raise damaged(path, shard, f"tensor {tensor.name}, block {index}")


class _Checker:
    """Checks whole shards, one buffer per thread; stops early once `cancelled`."""

    def __init__(
        self, directory: int, manifest: Manifest, path: Path, on_progress: OnProgress
    ) -> None:
        self._directory = directory
        self._manifest = manifest
        self._path = path
        self._on_progress = on_progress
        self._local = threading.local()
        self.cancelled = False

    def check(self, shard: ShardRecord) -> int:
        """Return the number of blocks of `shard`, all of which match."""
        blocks = 0
        with shard_file(self._directory, shard, self._path) as handle:
            check_header(handle, self._manifest, shard, self._path)
            self._on_progress(shard.header_bytes)
            for tensor in self._manifest.tensors(shard):
                spans = tensor.blocks(self._manifest.block_bytes)
                for index, (start, stop) in enumerate(spans):
                    if self.cancelled:
                        return blocks
                    found = self._digest(handle, shard, start, stop)
                    if found != shard.digests[tensor.name][index]:
                        raise damaged(self._path, shard, f"tensor {tensor.name}, block {index}")
                    blocks += 1
                    self._on_progress(stop - start)
        return blocks

    def _digest(self, handle: int, shard: ShardRecord, start: int, stop: int) -> str:
        if not hasattr(self._local, "buffer"):
            self._local.buffer = memoryview(bytearray(PIECE_BYTES))
        found = xxhash.xxh3_128()
        for begin in range(start, stop, PIECE_BYTES):
            piece = self._local.buffer[: min(PIECE_BYTES, stop - begin)]
            offset = shard.header_bytes + begin
            read_into(handle, piece, offset, where=str(self._path / shard.name))
            found.update(piece)
        return str(found.hexdigest())


def verify_shards(
    directory: int,
    manifest: Manifest,
    path: Path,
    *,
    threads: int | None = None,
    on_progress: OnProgress = lambda n: None,
) -> VerificationReport:
    """Check every byte of all shards in an open directory; as `verify_dataset` otherwise."""
    checker = _Checker(directory, manifest, path, on_progress)
    workers = min(thread_count(threads), len(manifest.shards))
    if workers == 1:
        blocks = sum(map(checker.check, manifest.shards))
    else:
        with ThreadPoolExecutor(max_workers=workers) as pool:
            try:
                blocks = sum(pool.map(checker.check, manifest.shards))
            except BaseException:
                checker.cancelled = True
                raise
    return VerificationReport(
        shards=len(manifest.shards), blocks=blocks, bytes=manifest.total_bytes
    )


def verify_dataset(
    path: str | Path, *, threads: int | None = None, on_progress: OnProgress = lambda n: None
) -> VerificationReport:
    """Check every byte of a dataset against its digests.

    Parameters
    ----------
    path
        Dataset directory.
    threads
        Shards checked at once, default one per core up to 8.
    on_progress
        Called with the number of bytes checked, from several threads.

    Raises
    ------
    InputError
        At the first damage: ``MANIFEST_DIGEST``, ``MANIFEST_FORMAT``, ``FORMAT_VERSION``,
        ``FILE_MISSING``, ``FILE_KIND``, ``FILE_SIZE``, ``SHARD_HEADER``, ``SHARD_DIGEST`` (names
        file, tensor and block), ``DATASET_MISSING``, ``DATASET_KIND``, ``DATASET_READ``.
    """
    path = given_path(path, "DATASET_KIND", where="path")
    directory = open_directory(path)
    try:
        manifest = Manifest.read_from(directory, path)
        return verify_shards(directory, manifest, path, threads=threads, on_progress=on_progress)
    finally:
        os.close(directory)
