"""What the collective transport alone has to do: ranks that stop or lag are named in time."""

from __future__ import annotations

import pytest

from tests import exchange_plays as plays
from tests.exchange_team import Team
from tests.test_exchange import EVERYONE, RANKS, ROWS, SMALL, TWO

SECONDS = 3.0


@pytest.mark.parametrize(
    ("role", "says"), [("stopped", "does not answer"), ("late", "has not posted it")]
)
def test_a_rank_that_stalls_is_named_within_the_timeout(role: str, says: str) -> None:
    with Team(RANKS, "collective") as team:
        for rank in range(RANKS):
            team.start(plays.faulty, SMALL, TWO, ROWS, SECONDS, role, 1, rank=rank)
        for error, elapsed in team.answers([0, 2]):
            assert error.code in ("EXCHANGE_TIMEOUT", "EXCHANGE_PEER"), error
            assert "rank 1" in error.text and says in error.text
            assert elapsed < SECONDS + 10


def test_a_wait_has_a_timeout_of_its_own() -> None:
    with Team(RANKS, "collective") as team:
        found = team.run(plays.timeout_of_wait, SMALL, [EVERYONE], ROWS)
    for code, text, elapsed in (found[0], found[2]):
        assert code == "EXCHANGE_TIMEOUT" and "rank 1" in text
        assert elapsed < 10.0  # the exchange's own is 20
