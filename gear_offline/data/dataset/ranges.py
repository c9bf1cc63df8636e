"""Shards of a server, read by ranges through a cache of a given size.

What is fetched is a block: the bytes of one digest of the manifest, or a shard's header.  It is
compared before any byte of it is used, whatever versions the server tells, and kept by its digest.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
import threading
import time
from bisect import bisect_right
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from gear_offline.core.address import hide_secrets, join_address
from gear_offline.core.files import NO_LOCKS, Closing, open_regular, read_at, write_all, writing
from gear_offline.core.remote import read_range
from gear_offline.core.text import size_text
from gear_offline.data.dataset.manifest import Manifest, ShardRecord
from gear_offline.data.dataset.shard import DIGEST_CHARS, damage_error, digest
from gear_offline.errors import InputError

PAGE_BYTES = 4096  # that a file takes of a disk, at least
LEFTOVER_SECONDS = 3600.0  # after which a hidden file is one that a killed process has left
_USED = ".used"  # bytes of all blocks, or more; locked while a block is added
_TURNS = list[threading.Lock]()  # of threads, so that no two fetch a block


def _make_turns() -> None:
    _TURNS[:] = [threading.Lock() for _ in range(256)]


_make_turns()
os.register_at_fork(after_in_child=_make_turns)  # threads that held one are not there


@dataclass(frozen=True)
class BlockCache:
    """Blocks, files by their digests in a folder of at most `size` bytes, which processes share.

    Those that were not used for longest make room.  What is damaged there is fetched again.
    """

    folder: Path
    size: int
    _compared: dict[str, tuple[int, ...]] = field(default_factory=dict, repr=False)

    def open(self, name: str, fetch: Callable[[], bytearray]) -> int:
        """Return a descriptor of the block with the digest `name`, fetched if it is not there."""
        with _TURNS[int(name[:2], 16)]:
            handle = self._find(name)
            return self._keep(name, fetch()) if handle is None else handle

    def _find(self, name: str) -> int | None:
        with suppress(OSError):
            handle = open_regular(self.folder / name, links=False)
            status = os.fstat(handle)
            identity = (status.st_ino, status.st_size, status.st_mtime_ns)
            if self._compared.get(name) != identity:
                if digest(os.pread(handle, status.st_size, 0)) != name:
                    os.close(handle)
                    return None
                self._compared[name] = identity
            with suppress(OSError):  # another user's
                os.utime(handle, ns=(time.time_ns(), status.st_mtime_ns))
            return handle
        return None

    def _keep(self, name: str, content: bytearray) -> int:
        """Write a block: under a hidden name first, and within the size."""
        partial = self.folder / f".{secrets.token_hex(6)}"
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(self.folder / _USED, "a+b", buffering=0) as used:
                try:
                    fcntl.flock(used, fcntl.LOCK_EX)
                except OSError as error:
                    if error.errno not in NO_LOCKS:
                        raise
                room, text = _disk_bytes(len(content)), os.pread(used.fileno(), 32, 0).strip()
                total = int(text) if text.isdigit() else self.size
                if total + room > self.size:
                    total = self._make_room(room)
                os.truncate(used.fileno(), 0)
                write_all(used.fileno(), b"%d" % (total + room))
                handle = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
                try:
                    write_all(handle, memoryview(content))
                    status = os.fstat(handle)
                    partial.rename(self.folder / name)
                except BaseException:
                    os.close(handle)
                    partial.unlink(missing_ok=True)
                    raise
        self._compared[name] = (status.st_ino, status.st_size, status.st_mtime_ns)
        return handle

    def _make_room(self, room: int) -> int:
        """Remove blocks until `room` is free, and some more; return the bytes that stay."""
        blocks, now = list[tuple[float, int, str]](), time.time()
        for entry in os.scandir(self.folder):
            with suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                is_old = now - status.st_mtime > LEFTOVER_SECONDS
                if stat.S_ISREG(status.st_mode) and entry.name != _USED:
                    used = 0.0 if entry.name[0] == "." and is_old else status.st_atime
                    blocks.append((used, _disk_bytes(status.st_size), entry.path))
        total = sum(nbytes for _, nbytes, _ in blocks)
        most = min(self.size - room, self.size - self.size // 8)
        for _, nbytes, path in sorted(blocks):
            if total <= most:
                break
            with suppress(FileNotFoundError):
                os.unlink(path)
            total -= nbytes
        return total


def _disk_bytes(nbytes: int) -> int:
    return nbytes + -nbytes % PAGE_BYTES


def largest_block(manifest: Manifest) -> int:
    """Return the bytes of the largest block, which a fetch has in memory."""
    tensors = (tensor for shard in manifest.shards for tensor in manifest.tensors(shard))
    return min(manifest.block_bytes, max((tensor.bytes for tensor in tensors), default=0))


@dataclass(frozen=True)
class Ranges:
    """Where a dataset's shards are read by ranges, and the cache."""

    address: str = field(repr=False)
    cache: BlockCache
    _plans: dict[str, tuple[list[int], list[str]]] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        return f"{hide_secrets(self.address)}, {size_text(self.cache.size)} of cache"

    def check_size(self, manifest: Manifest) -> None:
        """Refuse (``USAGE``) a cache that is smaller than a block."""
        largest = largest_block(manifest)
        if (least := _disk_bytes(largest)) > self.cache.size:
            problem = f"a cache of {self.cache.size} bytes is smaller than a block, "
            problem += f"{size_text(largest)}, which is fetched as a whole"
            remedy = f"give at least {least} bytes ({size_text(least)}), better a hundred times"
            raise InputError("USAGE", problem, hide_secrets(self.address), remedy)

    def open(self, manifest: Manifest, shard: ShardRecord) -> RangedFile:
        """Open a shard; nothing is read."""
        if shard.name not in self._plans:
            starts, digests = [0], [shard.header_digest]
            for tensor in manifest.tensors(shard):
                begin, end = (shard.header_bytes + byte for byte in (tensor.start, tensor.stop))
                starts += range(begin, end, manifest.block_bytes)
                joined, n = shard.digests[tensor.name], DIGEST_CHARS
                digests += [joined[at : at + n] for at in range(0, len(joined), n)]
            self._plans[shard.name] = [*starts, shard.bytes], digests
        address = join_address(self.address, shard.name)
        return RangedFile(address, self.cache, *self._plans[shard.name])


class RangedFile(Closing):
    """A shard of a server, of blocks that begin at `starts`, the last of which is the file's end.

    For one thread.
    """

    def __init__(
        self, address: str, cache: BlockCache, starts: list[int], digests: list[str]
    ) -> None:
        self._address, self._cache, self._starts, self._digests = address, cache, starts, digests
        self._block, self._handle = -1, -1

    def read_at(self, buffer: memoryview, offset: int) -> int:
        """Fill `buffer` from byte `offset`, as of a file of this machine.

        ``SOURCE_READ``; ``SOURCE_CHANGED`` where a block has another digest; ``OUTPUT_WRITE``.
        """
        done = 0
        while done < len(buffer):
            block = bisect_right(self._starts, offset + done) - 1
            if block == len(self._digests):
                break
            self._open(block)
            low, high = self._starts[block : block + 2]
            piece = buffer[done : done + high - offset - done]
            if read_at(self._handle, piece, offset + done - low) < len(piece):
                raise damage_error("a block of the cache was cut short", self._cache.folder)
            done += len(piece)
        return done

    def _open(self, block: int) -> None:
        if block == self._block:
            return
        self.close()
        self._handle = self._cache.open(self._digests[block], lambda: self._fetch(block))
        self._block = block

    def _fetch(self, block: int) -> bytearray:
        begin, end = self._starts[block : block + 2]
        content = read_range(self._address, begin, end, "SOURCE_READ")
        if digest(content) != self._digests[block]:
            problem = f"bytes {begin} to {end} do not match their digest: the file changed on the "
            problem += "server, or is damaged there"
            remedy = "start again, which reads the manifest anew; or put the dataset there again"
            raise InputError("SOURCE_CHANGED", problem, hide_secrets(self._address), remedy)
        return content

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
        self._block, self._handle = -1, -1
