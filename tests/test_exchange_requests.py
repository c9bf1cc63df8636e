"""Work requests as arrays say what the reads say; found by following their pointers, as C does."""

from __future__ import annotations

import ctypes
import shutil
import struct
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gear_offline.bench.exchange import chain_call, step_call
from gear_offline.bench.null_provider import NullProvider
from gear_offline.distributed.exchange.contract import Destination, Piece, Reads, Shelf
from gear_offline.distributed.exchange.directory import Directory, Notice, own_notice
from gear_offline.distributed.exchange.endpoint import RETRIES, Region, retry_exponent
from gear_offline.distributed.exchange.step_requests import fill_requests
from gear_offline.distributed.exchange.work_requests import (
    RDMA_READ,
    ROW_BYTES,
    SIGNALED,
    Chain,
    find_marker,
)
from gear_offline.errors import GearError

Request = tuple[int, int, int, int, int, int, int, int]


def follow(first: int) -> list[Request]:
    """Walk a chain by its ``next`` pointers.

    Returns wr_id, opcode, flags, remote address, rkey, local address, length, lkey of each.
    """
    found: list[Request] = []
    while first:
        raw = ctypes.string_at(first, ROW_BYTES)
        number, first, elements = struct.unpack_from("<QQQ", raw)
        count, opcode, flags, _, remote, rkey = struct.unpack_from("<iIIIQI", raw, 24)
        assert count == 1
        local, length, lkey = struct.unpack("<QII", ctypes.string_at(elements, 16))
        found.append((number, opcode, flags, remote, rkey, local, length, lkey))
    return found


@given(
    st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=4),
    st.integers(0, 5),
)
def test_chains_hold_their_reads_and_can_be_used_again(batches: Any, spare: int) -> None:
    """Each batch is cut into chains of drawn sizes; the arrays are the same for all batches."""
    generator = np.random.default_rng(0)
    chain = Chain(max(sum(sizes) for sizes in batches) + spare)
    for sizes in batches:
        count = sum(sizes)
        remote, local = generator.integers(1, 1 << 47, (2, count), dtype=np.int64)
        length, rkey = generator.integers(1, 1 << 31, (2, count), dtype=np.int64)
        chain.fill(remote, rkey, local, length, 5)
        ends = np.cumsum(sizes).tolist()
        parts = list(zip([0, *ends[:-1]], ends, strict=True))
        half = len(parts) // 2  # cut in two goes, as when a window is full
        firsts = chain.cut(parts[:half], range(half))
        firsts += chain.cut(parts[half:], range(half, len(parts)))
        for number, ((begin, end), first) in enumerate(zip(parts, firsts, strict=True)):
            assert follow(first) == [
                (number if i == end - 1 else 0, RDMA_READ, SIGNALED if i == end - 1 else 0,
                 int(remote[i]), int(rkey[i]), int(local[i]), int(length[i]), 5)
                for i in range(begin, end)
            ]  # fmt: skip
        chain.join()


@pytest.mark.parametrize("stores", [1, 2, 3])
def test_a_steps_requests_are_what_its_reads_say(stores: int) -> None:
    lengths, row_bytes = (5, 3, 8), (16, 3, 40)[:stores]
    bases = {1: [1_000_000 * (s + 1) for s in range(stores)], 2: [77 * (s + 1) for s in range(3)]}
    shelf = Shelf(lengths=lengths, row_bytes=row_bytes)
    one = np.array([0, 2])
    notices = [
        Notice(pieces=()),
        Notice(pieces=(one,), regions=(tuple((b, 10 + s) for s, b in enumerate(bases[1])),)),
        Notice(
            pieces=(np.array([1]),),
            regions=(tuple((b, 20 + s) for s, b in enumerate(bases[2][:stores])),),
        ),
    ]
    directory = Directory(shelf, notices)
    buffers = [np.zeros((20, n), np.uint8) for n in row_bytes]
    memory = Destination.of(buffers, row_bytes).memory
    keys = tuple(
        Region(base=m.address, local_key=30 + s, remote_key=0, _mr=None, _memory=None)
        for s, m in enumerate(memory)
    )
    target = Destination(memory=memory, keys=keys)
    rows = [(2, 1, 1, 2, 4), (1, 2, 3, 5, 9), (1, 0, 4, 1, 0)]  # owner, episode, start, steps, row
    columns = np.array(rows).T
    reads = Reads.of(
        readers=np.zeros(3), owners=columns[0], episodes=columns[1], starts=columns[2],
        steps=columns[3], rows=columns[4],
    )  # fmt: skip
    chain = Chain(3 * stores)
    parts = fill_requests(chain, reads, directory.find(reads, 20), directory, target)
    assert [part.rank for part in parts] == [1, 2]
    first_row = {(1, 0): 0, (1, 2): 5, (2, 1): 0}
    for part in parts:
        found = follow(chain.cut([(part.begin, part.end)], [6])[0])
        wanted = [
            (
                bases[owner][s] + (first_row[owner, episode] + start) * row_bytes[s],
                10 * owner + s,
                memory[s].address + row * row_bytes[s],
                steps * row_bytes[s],
                30 + s,
            )
            for owner, episode, start, steps, row in rows
            if owner == part.rank
            for s in range(stores)
        ]
        assert [request[3:] for request in found] == wanted


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_the_benchmark_posts_every_request() -> None:
    provider = NullProvider(None)
    for call in (chain_call(provider, None, 300), step_call(provider, None, 300)):
        for _ in range(2):
            provider.reset()
            call()
            found = provider.entries()
            assert len(found) == 300
            assert (found["opcode"] == RDMA_READ).all()
            assert set(found["rkey"]) == {7} and set(found["lkey"]) == {9}
            assert len(set(found["remote_addr"])) > 200 and len(set(found["addr"])) == 300


def test_a_marker_is_found_only_where_it_is_certain() -> None:
    marker = (0xA5C3_1E7B_9D24_F061).to_bytes(8, "little")
    assert find_marker(bytes(40) + marker + bytes(200)) == 40
    for data in (bytes(300), marker + bytes(20), marker + bytes(200) + marker + bytes(200)):
        with pytest.raises(LookupError):
            find_marker(data)


@pytest.mark.parametrize("seconds", [1, 10, 60, 600])
def test_retries_end_within_the_timeout(seconds: int) -> None:
    exponent = retry_exponent(timedelta(seconds=seconds))
    assert 1 <= exponent <= 20
    assert (RETRIES + 1) * 4.096e-6 * 2**exponent <= seconds / 2


def piece(*episodes: int) -> npt.NDArray[np.int64]:
    return np.array(episodes, np.int64)


@given(st.lists(st.sets(st.integers(0, 30)), max_size=4))
def test_notices_survive_the_wire(pieces: list[set[int]]) -> None:
    own = Notice(pieces=tuple(piece(*sorted(p)) for p in pieces),
                 regions=tuple(((n, 2 * n),) for n in range(len(pieces))))  # fmt: skip
    back = Notice.from_bytes(own.to_bytes(), stores=1, episodes=31)
    assert [p.tolist() for p in back.pieces] == [sorted(p) for p in pieces]
    assert back.regions == own.regions


def odd(runs: str, regions: str) -> str:
    return f'{{"pieces": [[{runs}]], "regions": {regions}}}'


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", odd("[0, 0]", "[]"), odd("[-1, 2]", "[]"), odd("[0, 9]", "[]"),
     odd("[0, 1]", "[[[1, 2], [3, 4]]]"), odd("[0, 1]", "[[[-1, 2]]]"), odd("[0, 1]", "[[], []]")],
)  # fmt: skip
def test_odd_notices_are_refused(text: str) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        Notice.from_bytes(text.encode(), stores=1, episodes=8)


@pytest.mark.parametrize(
    ("pieces", "rows", "says"),
    [([piece(0, 0)], 4, "ascending"), ([piece(3)], 2, "outside"), ([piece(1)], 3, "3 rows"),
     ([piece(1), piece(1)], 2, "two pieces")],
)  # fmt: skip
def test_shelves_that_contradict_themselves_are_refused(
    pieces: list[Any], rows: int, says: str
) -> None:
    given_ = [Piece(episodes=p, rows=(np.zeros((rows, 4), np.uint8),)) for p in pieces]
    with pytest.raises(GearError, match=says) as caught:
        Shelf(lengths=(4, 2), row_bytes=(4,), pieces=given_)
    assert caught.value.code == "EXCHANGE_SHELF"


def test_own_notice_tells_the_pieces() -> None:
    rows = (np.zeros((6, 4), np.uint8),)
    shelf = Shelf(lengths=(4, 2), row_bytes=(4,), pieces=[Piece(episodes=piece(0, 1), rows=rows)])
    assert own_notice(shelf).pieces[0].tolist() == [0, 1]
