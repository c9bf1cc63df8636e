"""Shards of a server, read by ranges through a cache of a given size.

What is fetched is a block: the bytes of one digest of the manifest, or a shard's header.  It is
compared before any byte of it is used, whatever versions the server tells, and kept by its digest.
"""

from __future__ import annotations

import os
import stat
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from gear_offline.core.address import hide_secrets, join_address
from gear_offline.core.files import (
    Closing,
    new_hidden_file,
    open_regular,
    read_at,
    remove_leftovers,
    turn_of,
    write_all,
    writing,
)
from gear_offline.core.remote import read_range
from gear_offline.core.text import size_text
from gear_offline.data.dataset.manifest import Manifest, ShardRecord
from gear_offline.data.dataset.shard import DIGEST_CHARS, damage_error, digest
from gear_offline.errors import InputError

PAGE_BYTES = 4096  # that a file takes of a disk, at least
TURN_SECONDS = 0.005  # between two looks for a block that somebody else fetches or adds
_USED = "used"  # a file with the bytes of all blocks, or more


@dataclass(frozen=True)
class BlockCache:
    """Blocks, files by their digests in a folder of at most `size` bytes, which processes share.

    Those that were not used for longest make room.  What is damaged there is fetched again.
    """

    folder: Path
    size: int
    _compared: dict[str, tuple[int, ...]] = field(default_factory=dict, repr=False)

    @property
    def used(self) -> int:
        """Bytes of all blocks, or more; `size` if nobody knows."""
        with suppress(OSError, ValueError):
            return int((self.folder / _USED).read_bytes())
        return self.size

    def open(self, name: str, fetch: Callable[[], bytearray]) -> int:
        """Return a descriptor of the block with the digest `name`, fetched if it is not there."""
        if (handle := self._find(name)) is not None:
            return handle
        with turn_of(self.folder / name, quiet=True, seconds=TURN_SECONDS):
            handle = self._find(name)  # somebody else may have fetched it
            return self._add(name, fetch()) if handle is None else handle

    def _find(self, name: str) -> int | None:
        try:
            handle = open_regular(self.folder / name, links=False)
        except OSError:
            return None
        status = os.fstat(handle)
        identity = (status.st_ino, status.st_size, status.st_mtime_ns)
        content = b""
        if self._compared.get(name) != identity:
            with suppress(OSError):  # the cache's disk fails: fetched anew
                content = os.pread(handle, status.st_size, 0)
            if digest(content) != name:
                os.close(handle)
                return None
            self._compared[name] = identity
        with suppress(OSError):  # another user's
            os.utime(handle, ns=(time.time_ns(), status.st_mtime_ns))
        return handle

    def _add(self, name: str, content: bytearray) -> int:
        room, used, path = _disk_bytes(len(content)), self.folder / _USED, self.folder / name
        with turn_of(used, quiet=True, seconds=TURN_SECONDS), writing(self.folder):
            if (total := self.used) + room > self.size:
                total = self._make_room(room)
            used.write_bytes(b"%d" % (total + room))  # first: a kill may make it too large
            with new_hidden_file(path) as (hidden, file):
                write_all(file.fileno(), memoryview(content))
                hidden.rename(path)
                return os.dup(file.fileno())

    def shrink(self) -> None:
        """Remove what is too much, and what killed processes left."""
        used = self.folder / _USED
        with turn_of(used, quiet=True, seconds=TURN_SECONDS), writing(self.folder):
            used.write_bytes(b"%d" % self._make_room(0))

    def _make_room(self, room: int) -> int:
        """Remove blocks if `room` is not free, then some more; return the bytes that stay."""
        remove_leftovers(self.folder)
        blocks = list[tuple[float, int, str]]()
        for entry in os.scandir(self.folder):
            with suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode) and len(entry.name) == DIGEST_CHARS:
                    blocks.append((status.st_atime, _disk_bytes(status.st_size), entry.path))
        total = sum(nbytes for _, nbytes, _ in blocks)
        most = self.size - room
        most = most if total <= most else min(most, self.size - self.size // 8)
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
    """The address of a dataset's shards that are read by ranges, and the cache."""

    address: str = field(repr=False)
    cache: BlockCache

    def __str__(self) -> str:
        return f"{hide_secrets(self.address)}, {size_text(self.cache.size)} of cache"

    def check_size(self, manifest: Manifest) -> None:
        """Refuse (``USAGE``) a cache that is smaller than a block."""
        least = _disk_bytes(largest_block(manifest))
        if least > self.cache.size:
            problem = f"a cache of {self.cache.size} bytes holds no block, which has up to {least}"
            remedy = f"give at least {least} bytes ({size_text(least)}), better a hundred times"
            raise InputError("USAGE", problem, self.address, remedy)

    def open(self, manifest: Manifest, shard: ShardRecord) -> RangedFile:
        """Open a shard; nothing is read."""
        starts, digests, n = [0], [shard.header_digest], DIGEST_CHARS
        for tensor in manifest.tensors(shard):
            begin, end = (shard.header_bytes + byte for byte in (tensor.start, tensor.stop))
            starts += range(begin, end, manifest.block_bytes)
            joined = shard.digests[tensor.name]
            digests += [joined[at : at + n] for at in range(0, len(joined), n)]
        address = join_address(self.address, shard.name)
        return RangedFile(address, self.cache, [*starts, shard.bytes], digests)


class RangedFile(Closing):
    """A shard of a server, of blocks that begin at `starts`, the last of which is the file's end.

    For one thread.
    """

    def __init__(
        self, address: str, cache: BlockCache, starts: list[int], digests: list[str]
    ) -> None:
        self._address, self._cache, self._starts, self._digests = address, cache, starts, digests
        self._block = self._handle = -1

    def read_at(self, buffer: memoryview, offset: int) -> int:
        """Fill `buffer` from byte `offset`, as of a file of this machine.

        ``SOURCE_READ``; ``SOURCE_CHANGED`` where a block has another digest; ``OUTPUT_WRITE``.
        """
        end = min(offset + len(buffer), self._starts[-1])
        first = bisect_right(self._starts, offset) - 1
        for block in range(first, bisect_left(self._starts, end)):
            if block != self._block:
                self.close()
                self._handle = self._cache.open(self._digests[block], partial(self._fetch, block))
                self._block = block
            low, high = self._starts[block : block + 2]
            begin = max(low, offset)
            piece = buffer[begin - offset : min(high, end) - offset]
            if read_at(self._handle, piece, begin - low) < len(piece):
                raise damage_error("a block of the cache was cut short", self._cache.folder)
        return end - offset

    def _fetch(self, block: int) -> bytearray:
        begin, end = self._starts[block : block + 2]
        content = read_range(self._address, begin, end, "SOURCE_READ")
        if digest(content) != self._digests[block]:
            problem = f"bytes {begin} to {end} do not match their digest: the file changed on the "
            problem += "server, or is damaged there"
            remedy = "start again, which reads the manifest anew; or put the dataset there again"
            raise InputError("SOURCE_CHANGED", problem, self._address, remedy)
        return content

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
        self._block = self._handle = -1
