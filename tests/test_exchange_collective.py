"""What the collective transport alone has to do: ranks that stop or lag are named in time."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from gear_offline.distributed.exchange.collective import CollectiveExchange, _Step
from gear_offline.distributed.exchange.contract import Ledger
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


class Late:
    """What gloo gives for a collective that is done just after a slice of the wait has ended."""

    waits = 0

    def is_completed(self) -> bool:
        return self.waits > 0

    def wait(self, _: timedelta) -> None:
        self.waits += 1
        if self.waits == 1:
            raise RuntimeError("Operation timed out!")


def test_rows_that_come_as_a_slice_of_the_wait_ends_have_come() -> None:
    """It was an error of the step, and the end of the job: one wait of 50 ms in some dozens."""
    exchange: Any = object.__new__(CollectiveExchange)
    exchange._device, exchange._ledger = torch.device("cpu"), Ledger(1)
    exchange._mesh = SimpleNamespace(failure=lambda: None)
    step = _Step(reads=cast(Any, None), destination=cast(Any, None), work=Late())
    exchange._finish(0, step, timedelta(seconds=30))
    assert step.work.waits == 2 and exchange._ledger.error is None
