"""Who is there: ranks answer a roll call, and meet where the dead have left nothing."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed
from hypothesis import given, settings
from hypothesis import strategies as st

from gear_offline.distributed import joining
from gear_offline.distributed.joining import private_store
from gear_offline.distributed.roll_call import RollCall, missing_ranks
from gear_offline.errors import GearError

dist: Any = torch.distributed
SECONDS = 0.3


@pytest.fixture
def calls() -> Iterator[list[RollCall]]:
    found = [RollCall("127.0.0.1", ranks=4) for _ in range(4)]
    yield found
    for call in found:
        call.close()
    assert not any(t.name == "gear-roll-call" for t in threading.enumerate())


def test_those_that_are_there_are_not_named(calls: list[RollCall]) -> None:
    cards = [call.card for call in calls]
    began = time.monotonic()
    with ThreadPoolExecutor(4) as pool:  # all ask at once
        found = list(pool.map(lambda rank: missing_ranks(cards, but=rank, seconds=30), range(4)))
    assert found == [[]] * 4
    assert time.monotonic() - began < 20, "nobody waits for the time to be up"


def test_the_dead_and_the_silent_are_named(calls: list[RollCall]) -> None:
    cards = [call.card for call in calls]
    calls[1].close()
    with socket.create_server(("127.0.0.1", 0)) as stopped:  # the kernel takes calls for it
        cards[2] = f"127.0.0.1:{stopped.getsockname()[1]}:{'00' * 16}"
        found = missing_ranks(cards, but=0, seconds=SECONDS)
    assert found == [
        "rank 1 (127.0.0.1) is gone",
        "rank 2 (127.0.0.1) does not answer: stopped, or the link to it is cut",
    ]


def test_another_process_at_the_port_is_no_rank(calls: list[RollCall]) -> None:
    address, port, _ = calls[3].card.split(":")
    cards = [calls[0].card, f"{address}:{port}:{'11' * 16}"]
    assert missing_ranks(cards, but=0, seconds=SECONDS) == ["rank 1 (127.0.0.1) is gone"]
    assert missing_ranks(cards[:1], but=0) == []


def meet(store: Any, size: int) -> list[str]:
    """Let all ranks join at once; return what each reads of a word that rank 0 writes."""

    def join(rank: int) -> str:
        mine = private_store(store, rank=rank, size=size, timeout=20)
        if rank == 0:
            assert not mine.check(["word"]), "a corner that nobody has written to"
            mine.set("word", str(id(mine)))
        mine.wait(["word"])
        return str(mine.get("word").decode())

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(join, range(size)))


@settings(max_examples=8, deadline=None)
@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_starts_with_one_store_do_not_meet(sizes: list[int]) -> None:
    store = dist.HashStore()
    words = [meet(store, size) for size in sizes]
    assert all(len(set(found)) == 1 for found in words)


def test_numbers_of_the_dead_are_answered_and_forgotten() -> None:
    store = dist.HashStore()
    store.set("gear-offline/here/1", "dead")  # killed before it heard the answer
    store.set("gear-offline/here/2", "dead too")
    assert len(set(meet(store, 3))) == 1


@pytest.mark.parametrize(("rank", "named"), [(0, "rank 1, 2"), (1, "rank 0")])
def test_who_does_not_come_is_named(rank: int, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "POLL_SECONDS", 0.01)
    with pytest.raises(GearError) as caught:
        private_store(dist.HashStore(), rank=rank, size=3, timeout=SECONDS)
    assert caught.value.code == "RANK_LOST" and f"{named} did not join" in str(caught.value)
