"""The exchange's contract: the same tests for every transport.

`collective` runs over gloo in local processes; `verbs` needs an RDMA device and runs in the
virtual machine that `make test-rdma` starts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import exchange_plays as plays
from tests.exchange_team import INTERFACE_VARIABLE, Failure, ReadRow, Team, World

EXAMPLES = 8 if INTERFACE_VARIABLE in os.environ else 25  # an emulated processor is slow
RANKS = 3
ROWS = 48
SMALL = World(
    lengths=(5, 1, 9, 4, 7, 3, 8),
    row_bytes=(16, 3),
    holdings=(((0, 1),), ((2, 3), (5,)), ((4, 6),)),
)
# reader, owner, episode, start, steps, row
EVERYONE: list[ReadRow] = [
    (0, 1, 2, 3, 6, 0), (0, 2, 6, 0, 8, 10), (0, 1, 5, 1, 2, 20), (1, 0, 0, 4, 1, 3),
    (1, 2, 4, 2, 5, 9), (2, 0, 1, 0, 1, 47), (2, 1, 3, 0, 4, 0), (2, 2, 6, 1, 3, 8),
]  # fmt: skip

TRANSPORTS = [
    "collective",
    pytest.param(
        "verbs",
        marks=[
            pytest.mark.rdma,
            pytest.mark.skipif(
                INTERFACE_VARIABLE not in os.environ, reason="needs RDMA: make test-rdma"
            ),
        ],
    ),
]


@pytest.fixture(scope="module", params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def team(transport: str) -> Iterator[Team]:
    with Team(RANKS, transport) as team:
        yield team


def right(team: Team, found: list[Any], world: World, steps: Any, rows: int = ROWS) -> None:
    for rank, result in enumerate(found):
        assert not isinstance(result, Failure), result.trace
        assert len(result) == len(steps)
        for number, step in enumerate(steps):
            assert result[number] == world.expected(rank, rows, step), (rank, number)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=8))
    holdings: list[list[list[int]]] = [[[]] for _ in range(RANKS)]
    for episode in range(len(lengths)):
        ranks = draw(st.sets(st.integers(0, RANKS - 1), min_size=1, max_size=RANKS))
        for rank in ranks:
            if draw(st.booleans()):
                holdings[rank].append([])
            holdings[rank][-1].append(episode)
    return World(
        lengths=tuple(lengths),
        row_bytes=tuple(draw(st.lists(st.integers(1, 70), min_size=1, max_size=3))),
        holdings=tuple(tuple(tuple(piece) for piece in pieces) for pieces in holdings),
    )


@st.composite
def step_of(draw: st.DrawFn, world: World) -> list[ReadRow]:
    """Reads into rows that do not overlap; any rank from any holder, itself included."""
    held = [
        (rank, episode)
        for rank, pieces in enumerate(world.holdings)
        for piece in pieces
        for episode in piece
    ]
    free = [0] * RANKS
    reads: list[ReadRow] = []
    for _ in range(draw(st.integers(0, 12))):
        owner, episode = draw(st.sampled_from(held))
        reader = draw(st.integers(0, RANKS - 1))
        start = draw(st.integers(0, world.lengths[episode] - 1))
        steps = draw(st.integers(1, world.lengths[episode] - start))
        row = free[reader] + draw(st.integers(0, 2))
        if row + steps <= ROWS:
            free[reader] = row + steps
            reads.append((reader, owner, episode, start, steps, row))
    return reads


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_rows_are_the_owners_bit_for_bit(team: Team, data: st.DataObject) -> None:
    world = data.draw(worlds())
    steps = data.draw(st.lists(step_of(world), min_size=1, max_size=4))
    ahead, backwards = data.draw(st.integers(1, 3)), data.draw(st.booleans())
    right(team, team.run(plays.run_steps, world, steps, ROWS, ahead, backwards), world, steps)


@pytest.mark.parametrize(
    "steps",
    [[[]], [[r for r in EVERYONE if r[0] != r[1]]], [[r for r in EVERYONE if r[0] == r[1]]],
     [[r for r in EVERYONE if r[0] == 0]], [[], EVERYONE, [], EVERYONE[::-1]]],
    ids=["nothing", "all remote", "all local", "one reader", "mixed"],
)  # fmt: skip
def test_kinds_of_steps(team: Team, steps: list[list[ReadRow]]) -> None:
    right(team, team.run(plays.run_steps, SMALL, steps, ROWS), SMALL, steps)


def test_steps_overlap_in_reused_buffers(team: Team) -> None:
    steps = [[r for r in EVERYONE if (r[2] + step) % 3] for step in range(20)]
    right(team, team.run(plays.overlapped, SMALL, steps, ROWS, 3), SMALL, steps)


def test_large_rows_and_many_reads(team: Team) -> None:
    world = World(lengths=(400, 300, 500), row_bytes=(1024,), holdings=(((0,),), ((1,),), ((2,),)))
    rows = 6000
    step = [
        (reader, owner, owner, (7 * n + reader) % 200, 1 + n % 90, 100 * n)
        for reader in range(RANKS)
        for n in range(60)
        for owner in [(reader + 1 + n % 2) % RANKS]
    ]
    right(team, team.run(plays.run_steps, world, [step, step[::2]], rows, 2), world,
          [step, step[::2]], rows)  # fmt: skip


def test_what_the_contract_forbids_is_refused(team: Team) -> None:
    step, buffer, closed = "EXCHANGE_STEP", "EXCHANGE_BUFFER", "EXCHANGE_CLOSED"
    wanted = [step, step, step, step, step, buffer, closed, closed, closed]
    assert team.run(plays.misuse, SMALL, ROWS) == [wanted] * RANKS


@pytest.mark.parametrize(
    "read",
    [(0, 1, 2, 4, 6, 0), (0, 1, 0, 0, 1, 0), (0, 2, 2, 0, 1, 0), (0, 1, 7, 0, 1, 0),
     (0, 1, -1, 0, 1, 0), (0, 1, 2, -1, 2, 0), (0, 1, 2, 0, 0, 0), (0, 5, 2, 0, 1, 0)],
    ids=["past the end", "not its episode", "another's episode", "no such episode",
         "negative episode", "negative start", "no steps", "no such rank"],
)  # fmt: skip
def test_reads_of_what_nobody_holds_are_refused(team: Team, transport: str, read: ReadRow) -> None:
    """As if the step had not been posted: the next one is whole, on every rank."""
    found = team.run(plays.wrong_read, SMALL, [EVERYONE], ROWS, read)
    refused = ["EXCHANGE_RANGE"] * RANKS
    codes = [code for code, _, _ in found]
    assert codes == (refused if transport == "collective" else [refused[0], "nothing", "nothing"])
    for rank, (_, rows, text) in enumerate(found):
        assert rows == SMALL.expected(rank, ROWS, EVERYONE), text


@pytest.mark.parametrize("reader", [-1, RANKS])
def test_readers_that_do_not_exist_are_refused_by_all(team: Team, reader: int) -> None:
    found = team.run(plays.wrong_read, SMALL, [EVERYONE], ROWS, (reader, 1, 2, 0, 1, 0))
    for rank, (code, rows, text) in enumerate(found):
        assert code == "EXCHANGE_RANGE"
        assert rows == SMALL.expected(rank, ROWS, EVERYONE), text


@pytest.mark.parametrize("row", [-1, ROWS - 8], ids=["before", "past"])
def test_reads_outside_the_destination_are_refused(team: Team, transport: str, row: int) -> None:
    found = team.run(plays.wrong_read, SMALL, [EVERYONE], ROWS, (0, 1, 2, 0, 9, row))
    assert found[0][0] == "EXCHANGE_RANGE", found
    for rank, (code, rows, text) in enumerate(found):
        if transport == "verbs":  # nobody else takes part
            assert rows == SMALL.expected(rank, ROWS, EVERYONE), text
        elif rank:  # who waits learns who is to blame
            assert "EXCHANGE_PEER" in (code, rows) and "rank 0" in text


def test_nothing_is_left_behind(team: Team) -> None:
    for before, after in team.run(plays.resources_after, SMALL, [EVERYONE], ROWS, 3):
        for kind, count in after.items():  # connections of earlier exchanges may still go
            assert count <= before[kind], (kind, before, after)


def test_closing_waits_for_the_peers(team: Team) -> None:
    times = team.run(plays.close_early, SMALL, 20.0)
    assert 0.2 < times[0] < 10 and max(times[1:]) < 10


SECONDS = 10.0
TWO = [EVERYONE, EVERYONE]


@pytest.mark.parametrize("role", ["killed", "left"])
def test_a_rank_that_is_gone_is_named_at_once(transport: str, role: str) -> None:
    with Team(RANKS, transport) as team:
        for rank in range(RANKS):
            team.start(plays.faulty, SMALL, TWO, ROWS, SECONDS, role, 1, rank=rank)
        for error, elapsed in team.answers([0, 2]):
            assert error.code == "EXCHANGE_PEER", error
            assert "rank 1" in error.text
            assert error.trace == "EXCHANGE_PEER"  # again at the next call
            assert elapsed < SECONDS
            assert role == "killed" or "the trainer failed" in error.text
