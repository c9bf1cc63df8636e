"""Work requests of a whole step as NumPy arrays, posted in one call.

A `SendWR` object of pyverbs costs microseconds.  Here the C structures themselves (`ibv_send_wr`
and `ibv_sge`, 64-bit Linux, unchanged since verbs 1.1) are rows of two arrays, whose constant parts
and links are written once.  A batch fills in addresses, lengths and keys, column by column.  Rows
are half a structure apart: the rest of it is for other operations and other queue pairs.

The chain is posted through pyverbs' own ``QP.post_send``: a `SendWR` embeds its structure, and the
first row of the chain is copied over it for the time of the call; its ``next`` leads to the others.
Where in the object the structure lies is found by a marker, once; where it is not found exactly
once, `ObjectPoster` posts a linked list of pyverbs' objects instead.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

REQUEST_BYTES = 128  # of an `ibv_send_wr`
ROW_BYTES = 64  # of it are read for an RDMA read of a connected queue pair: rows lie closer
RDMA_READ, SIGNALED = 4, 2  # IBV_WR_RDMA_READ, IBV_SEND_SIGNALED
REQUEST = np.dtype(
    {
        "names": [
            "wr_id", "next", "sg_list", "num_sge", "opcode", "send_flags", "imm", "remote_addr",
            "rkey",
        ],
        "formats": ["u8", "u8", "u8", "i4", "u4", "u4", "u4", "i8", "u4"],
        "offsets": [0, 8, 16, 24, 28, 32, 36, 40, 48],
        "itemsize": ROW_BYTES,
    }
)  # fmt: skip
ELEMENT = np.dtype([("addr", "i8"), ("length", "u4"), ("lkey", "u4")])
PAIR = np.dtype(np.complex128)  # two numbers of 64 bits that NumPy moves at once, and only moves
_MARKER = 0xA5C3_1E7B_9D24_F061
_IDS, _FLAGS = struct.Struct("<QQ"), struct.Struct("<I")  # wr_id and next; send_flags

Column = npt.NDArray[Any]


class Chain:
    """Room for `capacity` RDMA reads.

    Parameters
    ----------
    capacity
        Most reads of one `fill`.

    Attributes
    ----------
    requests, elements
        (capacity,) of `REQUEST` and `ELEMENT`.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        room = np.zeros(capacity * ROW_BYTES + ROW_BYTES, np.uint8)
        shift = -int(room.ctypes.data) % ROW_BYTES  # a row is one line of the cache
        whole = room[shift : shift + capacity * ROW_BYTES].reshape(capacity, ROW_BYTES)
        self.requests = whole.reshape(-1).view(REQUEST)
        self.elements = np.zeros(capacity, ELEMENT)
        self._base = int(self.requests.ctypes.data)
        numbers = np.arange(capacity, dtype=np.uint64)
        self.requests["next"] = np.uint64(self._base) + (numbers + 1) * np.uint64(ROW_BYTES)
        self.requests["next"][-1:] = 0
        self.requests["sg_list"] = np.uint64(self.elements.ctypes.data) + numbers * np.uint64(16)
        self.requests["num_sge"] = 1
        self.requests["opcode"] = RDMA_READ
        # Views of columns, made once: a look-up by name costs as much as tens of reads.  A key and
        # the four bytes beside it are one number, so that a column is written in one go.
        pairs = whole[:, 40:56]
        self._remote, self._rkey = (pairs[:, at : at + 8].view(np.int64)[:, 0] for at in (0, 8))
        self._sources = pairs.view(PAIR)[:, 0]
        spots = self.elements.view(np.int64).reshape(capacity, 2)  # address, length and key
        self._local, self._size = spots[:, 0], spots[:, 1]
        self._length, self._lkey = self.elements["length"], self.elements["lkey"]
        self._memory: Any = memoryview(whole.reshape(-1))  # type: ignore[arg-type]
        # For each store, the keys that so many of its rows have alike.
        self._same: dict[int, tuple[tuple[int, int], int]] = {}
        self._stores = 1
        self._ends: list[int] = []

    def fill(
        self, remote: Column, rkey: Column | int, local: Column, length: Column, lkey: Column | int
    ) -> None:
        """Write m reads into the first m rows; arrays of m, or one key for all."""
        self.fill_store(0, 1, remote, rkey, local, length, lkey)

    def fill_store(
        self,
        store: int,
        stores: int,
        remote: Column,
        rkey: Column | int,
        local: Column,
        length: Column,
        lkey: Column | int,
    ) -> None:
        """Write the m reads of one store into rows ``store, store + stores, ...``."""
        rows = slice(store, stores * len(remote), stores)
        if type(rkey) is not int or type(lkey) is not int:
            self._same.clear()
            self._rkey[rows], self._lkey[rows] = rkey, lkey
        elif not self._has(store, stores, (rkey, lkey), len(remote)):
            self._rkey[rows], self._lkey[rows] = rkey, lkey
        self._remote[rows] = remote
        self._local[rows] = local
        self._length[rows] = length

    def fill_reads(
        self,
        store: int,
        stores: int,
        sources: Column,
        starts: Column,
        rows: Column,
        steps: Column,
        *,
        row_bytes: int,
        base: int,
        lkey: int,
    ) -> None:
        """As `fill_store`, from m reads of whole rows.

        Parameters
        ----------
        sources
            (m,) of `PAIR`: remote address of an episode's first row, and key.
        starts, rows, steps
            (m,) int64: first row of the episode that is read, where it lands, and how many.
        row_bytes, base, lkey
            Of the store and of the region where rows land.
        """
        places = slice(store, stores * len(sources), stores)
        self._same.clear()
        self._sources[places] = sources
        self._remote[places] += starts * row_bytes
        local, size = self._local[places], self._size[places]
        np.multiply(rows, row_bytes, out=local)
        local += base
        np.multiply(steps, row_bytes, out=size)
        size += _high(lkey)

    def _has(self, store: int, stores: int, keys: tuple[int, int], count: int) -> bool:
        """Whether the rows of a store hold these keys already; afterwards they must."""
        if stores != self._stores:
            self._same.clear()
            self._stores = stores
        before, rows = self._same.get(store, (None, 0))
        if before == keys and rows >= count:
            return True
        self._same[store] = (keys, count)
        return False

    def cut(self, parts: Sequence[tuple[int, int]], numbers: Sequence[int]) -> list[int]:
        """Make rows [begin, end) chains of their own; return the address of each one's first row.

        Only the last request of a chain asks for a completion, and bears the chain's number.
        """
        firsts = []
        for (begin, end), number in zip(parts, numbers, strict=True):  # as many as peers
            place = (end - 1) * ROW_BYTES
            _IDS.pack_into(self._memory, place, number, 0)
            _FLAGS.pack_into(self._memory, place + 32, SIGNALED)
            self._ends.append(end)
            firsts.append(self._base + begin * ROW_BYTES)
        return firsts

    def join(self) -> None:
        """Undo `cut`, for the next batch; a provider has copied what was posted."""
        for end in self._ends:
            place = (end - 1) * ROW_BYTES
            following = self._base + end * ROW_BYTES if end < self.capacity else 0
            _IDS.pack_into(self._memory, place, 0, following)
            _FLAGS.pack_into(self._memory, place + 32, 0)
        self._ends.clear()


class Poster(Protocol):
    """Hands rows of a chain to a queue pair."""

    def post(self, qp: Any, first: int, count: int) -> None:
        """Post the `count` requests from address `first` on."""
        ...


class ChainPoster:
    """Through ``QP.post_send``, with the chain's first row in place of a `SendWR`'s own.

    Parameters
    ----------
    verbs
        From `gear_offline.distributed.exchange.verbs_library.load_verbs`.

    Raises
    ------
    LookupError
        If the structure cannot be found inside a `SendWR`.
    """

    def __init__(self, verbs: Any) -> None:
        self._head = _send_wr(verbs, _MARKER)
        offset = find_marker(_object_bytes(self._head))
        self._address = id(self._head) + offset  # CPython: the address of the object
        head: Any = (ctypes.c_char * ROW_BYTES).from_address(self._address)
        self._view = memoryview(head).cast("B")
        self._saved = bytes(self._view)

    def post(self, qp: Any, first: int, count: int) -> None:
        ctypes.memmove(self._address, first, ROW_BYTES)
        try:
            qp.post_send(self._head)
        finally:  # it would free a list of elements that is not its own
            self._view[:] = self._saved


class ObjectPoster:
    """Through objects of pyverbs alone: about a microsecond a read more."""

    def __init__(self, verbs: Any) -> None:
        self._verbs = verbs

    def post(self, qp: Any, first: int, count: int) -> None:
        requests = np.frombuffer(ctypes.string_at(first, count * ROW_BYTES), dtype=REQUEST)
        data = ctypes.string_at(int(requests["sg_list"][0]), count * ELEMENT.itemsize)
        elements = np.frombuffer(data, dtype=ELEMENT)  # those of a chain lie side by side
        columns = [requests[name].tolist() for name in ("wr_id", "send_flags", "rkey")]
        columns += [elements[name].tolist() for name in ("addr", "length", "lkey")]
        made: list[Any] = []
        previous = None
        for remote, number, flags, rkey, local, length, lkey in zip(
            requests["remote_addr"].tolist(), *columns, strict=True
        ):
            sge = self._verbs.SGE(local, length, lkey)
            request = self._verbs.SendWR(
                wr_id=number, num_sge=1, sg=[sge], opcode=RDMA_READ, send_flags=flags
            )
            request.set_wr_rdma(rkey, remote)
            if previous is not None:
                previous.next_wr = request
            previous = request
            made += [sge, request]
        qp.post_send(made[1])
        for thing in made:  # they free nothing by themselves
            thing.close()


def _high(lkey: int) -> int:
    """Return the key in the upper half of a signed number whose lower half is a length."""
    return (lkey << 32) - ((lkey >> 31) << 64)


def make_poster(verbs: Any) -> Poster:
    """Return a `ChainPoster`, or an `ObjectPoster` with a pyverbs that is built differently."""
    try:
        return ChainPoster(verbs)
    except LookupError:
        return ObjectPoster(verbs)


def find_marker(data: bytes) -> int:
    """Return where the structure begins whose first field is the marker.

    Raises
    ------
    LookupError
        If the marker is not there exactly once, with a whole structure behind it.
    """
    marker = _MARKER.to_bytes(8, "little")
    offset = data.find(marker)
    if offset < 0 or data.find(marker, offset + 1) >= 0 or offset + REQUEST_BYTES > len(data):
        raise LookupError("the work request inside a SendWR is not found")
    return offset


def _send_wr(verbs: Any, number: int) -> Any:
    return verbs.SendWR(
        wr_id=number, num_sge=1, sg=[verbs.SGE(0, 0, 0)], opcode=verbs.IBV_WR_RDMA_READ
    )


def _object_bytes(found: Any) -> bytes:
    return ctypes.string_at(id(found), type(found).__basicsize__)
