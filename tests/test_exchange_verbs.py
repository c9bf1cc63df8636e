"""What the verbs transport alone has to do; runs in the virtual machine of `make test-rdma`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

from gear_offline.distributed.exchange import Shelf, open_exchange
from tests import exchange_plays as plays
from tests.exchange_team import INTERFACE_VARIABLE, Failure, ReadRow, Team
from tests.test_exchange import EVERYONE, ROWS, SMALL, TWO, right

RANKS = 3

pytestmark = [
    pytest.mark.rdma,
    pytest.mark.skipif(INTERFACE_VARIABLE not in os.environ, reason="needs RDMA: make test-rdma"),
]


@pytest.fixture(scope="module")
def team() -> Iterator[Team]:
    with Team(RANKS, "verbs") as team:
        yield team


def test_more_reads_than_the_window_holds(team: Team) -> None:
    options = {"window": 2}
    found = team.run(plays.run_steps, SMALL, [EVERYONE] * 3, ROWS, 3, False, options)
    right(team, found, SMALL, [EVERYONE] * 3)


def test_requests_posted_as_objects_of_pyverbs(team: Team) -> None:
    right(team, team.run(plays.posted_by_objects, SMALL, TWO, ROWS), SMALL, TWO)


@pytest.mark.parametrize("how", ["write", "out of range", "stale key"])
def test_what_the_device_refuses(team: Team, how: str) -> None:
    read: ReadRow = (0, 1, 2, 5 if how == "out of range" else 0, 5, 0)
    if how == "out of range":
        read = (0, 1, 5, 1, 40, 0)
    found = team.run(plays.attack, SMALL, [[read]], ROWS, how)
    assert not any(isinstance(answer, Failure) for answer in found), found
    assert found[0][0] == "EXCHANGE_REFUSED", found
    assert [same for _, same in found] == [True] * RANKS


def test_who_has_another_secret_gets_no_key(team: Team) -> None:
    found = team.run(plays.wrong_secret, SMALL, 1)
    codes = [answer[0] for answer in found]
    assert codes[:2] == ["EXCHANGE_SECRET", "EXCHANGE_SECRET"]
    assert codes[2] in ("EXCHANGE_SECRET", "EXCHANGE_PEER")


@pytest.mark.parametrize(("role", "seconds"), [("stopped", 6.0), ("late", 4.0)])
def test_an_owner_that_stalls_holds_nobody_up(role: str, seconds: float) -> None:
    """Reads are one-sided: the owner's device answers, whatever its process does."""
    reads = [[r for r in EVERYONE if r[0] != 1]] * 2
    with Team(RANKS, "verbs") as team:
        for rank in range(RANKS):
            team.start(plays.faulty, SMALL, reads, ROWS, seconds, role, 1, rank=rank)
        for error, elapsed in team.answers([0, 2]):
            assert error is None, error
            assert elapsed < seconds


def test_the_transport_needs_no_torch() -> None:
    assert Shelf is not None and open_exchange is not None
    assert "torch" not in sys.modules
