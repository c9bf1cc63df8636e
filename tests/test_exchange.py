"""Rows of other nodes: the same tests for all roads.

`gloo` runs in local processes, and so does `packed`, the code of `nccl` without a GPU; `nccl` needs
four GPUs; `rdma` an RDMA device: it runs in the virtual machine that `make test-rdma` starts.
"""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from ipaddress import IPv6Address
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gear_offline.distributed.rdma import Endpoint, find_port
from gear_offline.errors import GearError, UnavailableError
from tests.exchange_team import Failure, Player, ReadRow, Table, Team, reads_of

HAS_RDMA = "GEAR_OFFLINE_RDMA_INTERFACE" in os.environ
EXAMPLES = 8 if HAS_RDMA else 25  # an emulated processor is slow
NODES = (0, 1, 1, 2)
ROWS = 48
SECONDS = 4.0
SMALL = Table(lengths=(5, 1, 9, 4, 7, 3, 8), nodes=(0, 0, 1, 1, 2, 1, 2), row_bytes=(16, 3))
# reader, owner, episode, start, steps, row
EVERYONE: list[ReadRow] = [
    (0, 1, 2, 3, 6, 0), (0, 3, 6, 0, 8, 10), (2, 0, 0, 4, 1, 0), (0, 2, 5, 1, 2, 20),
    (1, 0, 0, 4, 1, 3), (1, 3, 4, 2, 5, 9), (3, 0, 1, 0, 1, 47), (3, 1, 3, 0, 4, 0),
]  # fmt: skip

rdma = [pytest.mark.rdma, pytest.mark.skipif(not HAS_RDMA, reason="needs RDMA: make test-rdma")]


GPU_COUNT = len(list(Path("/dev").glob("nvidia[0-9]*")))  # without torch: it is slow to load
nccl = [
    *(pytest.mark.gpu, pytest.mark.multi_gpu),
    pytest.mark.skipif(len(NODES) > GPU_COUNT, reason="needs four GPUs"),
]
HOSTS: list[Any] = ["gloo", pytest.param("rdma", marks=rdma)]
GPUS: list[Any] = ["packed", pytest.param("nccl", marks=nccl)]


@pytest.fixture(scope="module", params=HOSTS)
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=HOSTS + GPUS)
def team(request: pytest.FixtureRequest) -> Iterator[Team]:
    kernels = ""
    if request.param == "packed":
        kernels = request.getfixturevalue("kernels").library._name
    with Team(NODES, request.param, kernels) as team:
        yield team


def read(
    player: Player, table: Table, steps: Sequence[Sequence[ReadRow]], ahead: int = 1,
    backwards: bool = False, late: float = 0.0, room: int | None = None,
) -> list[bytes]:  # fmt: skip
    """Post and wait for steps, `ahead` of them at a time; return what has landed."""
    player.open(table, ROWS)
    if room is not None and player.transport == "rdma":
        player.exchange._endpoint.room = room
    if player.rank == 1:
        time.sleep(late)
    for first in range(0, len(steps), ahead):
        numbers = range(first, min(first + ahead, len(steps)))
        for number in numbers:
            player.exchange.post(number, reads_of(steps[number]))
        for number in reversed(numbers) if backwards else numbers:
            player.exchange.wait(number)
    player.exchange.close()
    player.exchange.close()  # again, and nothing happens
    return [landing.tobytes() for landing in player.landing]


def right(answers: list[Any], table: Table, steps: Sequence[Sequence[ReadRow]]) -> None:
    for rank, answer in enumerate(answers):
        assert not isinstance(answer, Failure), answer.trace
        assert answer == table.expected(rank, ROWS, steps), rank


@st.composite
def tables(draw: st.DrawFn) -> Table:
    lengths = draw(st.lists(st.integers(1, 9), min_size=3, max_size=9))
    nodes = [0, 1, 2, *(draw(st.integers(0, 2)) for _ in lengths[3:])]
    row_bytes = draw(st.lists(st.integers(1, 70), min_size=1, max_size=3))
    return Table(lengths=tuple(lengths), nodes=tuple(nodes), row_bytes=tuple(row_bytes))


@st.composite
def reads(draw: st.DrawFn, table: Table, free: list[int]) -> list[ReadRow]:
    """Reads into rows that do not overlap, by any rank from any rank of another node."""
    made: list[ReadRow] = []
    for _ in range(draw(st.integers(0, 8))):
        reader = draw(st.integers(0, len(NODES) - 1))
        others = [e for e, node in enumerate(table.nodes) if node != NODES[reader]]
        episode = draw(st.sampled_from(others))
        owner = draw(
            st.sampled_from([r for r, node in enumerate(NODES) if node == table.nodes[episode]])
        )
        start = draw(st.integers(0, table.lengths[episode] - 1))
        steps = draw(st.integers(1, table.lengths[episode] - start))
        row = free[reader] + draw(st.integers(0, 2))
        if row + steps <= ROWS:
            free[reader] = row + steps
            made.append((reader, owner, episode, start, steps, row))
    return made


@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_rows_are_the_owners_bit_for_bit(team: Team, data: st.DataObject) -> None:
    table, free = data.draw(tables()), [0] * len(NODES)
    steps = [data.draw(reads(table, free)) for _ in range(data.draw(st.integers(1, 4)))]
    ahead, backwards = data.draw(st.integers(1, 4)), data.draw(st.booleans())
    right(team.run(read, table, steps, ahead, backwards), table, steps)


@pytest.mark.parametrize(("steps", "late", "room"), [(1, 1.0, None), (30, 0.0, 3)])
def test_late_ranks_and_many_steps(team: Team, steps: int, late: float, room: int | None) -> None:
    """Also more reads into the same rows than the device has room for at once."""
    asked = [EVERYONE] * steps
    right(team.run(read, SMALL, asked, 1, False, late, room), SMALL, asked)


def leave_open(player: Player, step: int) -> None:
    player.open(SMALL, ROWS, seconds=SECONDS)
    player.exchange.post(step, reads_of(EVERYONE))
    player.exchange.wait(step)


def read_on(player: Player, first: int, count: int) -> str:
    for number in range(first, first + count):
        player.exchange.post(number, reads_of(EVERYONE))
        player.exchange.wait(number)
        time.sleep(0.1)
    return "done"


def close(player: Player) -> float:
    begin = time.monotonic()
    player.exchange.close()
    return time.monotonic() - begin


def test_a_killed_rank_is_lost(transport: str) -> None:
    """Every rank that reads from it says so, in time, and can close."""
    with Team(NODES, transport) as team:
        assert team.run(leave_open, 0) == [None] * len(NODES)
        team.kill(1)
        for rank in (0, 3):
            team.start(read_on, 1, 3, rank=rank)
        for answer in team.answers([0, 3]):
            assert isinstance(answer, Failure) and answer.code == "RANK_LOST", answer
            assert "rank" in answer.text and answer.seconds < 4 * SECONDS, answer.text
        for rank in (0, 2, 3):
            team.start(close, rank=rank)
        assert max(team.answers([0, 2, 3])) < SECONDS, "who is gone is not waited for"


def test_a_stopped_rank(transport: str) -> None:
    """RDMA reads are one-sided: the device answers; a collective ends at the timeout."""
    with Team(NODES, transport) as team:
        assert team.run(leave_open, 0) == [None] * len(NODES)
        team.kill(1, signal.SIGSTOP)
        team.start(read_on, 1, 2, rank=0)
        if transport == "gloo":
            team.start(read_on, 1, 2, rank=2)
            team.start(read_on, 1, 2, rank=3)
        (answer,) = team.answers([0])
        if transport == "rdma":
            assert answer == "done"
        else:
            assert answer.code == "RANK_LOST" and "from ranks 1, 2, 3" in answer.text, answer
            assert SECONDS - 1 < answer.seconds < SECONDS + 5


def test_who_closes_waits_for_reads_of_others(transport: str) -> None:
    with Team(NODES, transport) as team:
        assert team.run(leave_open, 0) == [None] * len(NODES)
        if transport == "rdma":
            for rank in (1, 2, 3):
                team.start(close, rank=rank)
            team.start(read_on, 1, 5, rank=0)
            assert team.answers([0]) == ["done"], "memory of the others is still there"
            team.start(close, rank=0)
            assert max(team.answers()) < SECONDS
        else:
            assert max(team.run(close)) < SECONDS


def fail_to_register(player: Player) -> str:
    if player.rank == 1:
        Endpoint.register = out_of_memory  # type: ignore[method-assign]
    player.open(SMALL, ROWS, seconds=SECONDS)
    return "open"


def out_of_memory(*_: Any, **__: Any) -> Any:
    raise GearError("MEMORY", "locked memory is short")


@pytest.mark.rdma
@pytest.mark.skipif(not HAS_RDMA, reason="needs RDMA: make test-rdma")
def test_a_rank_that_cannot_register_memory_is_an_error_of_all() -> None:
    with Team(NODES, "rdma") as team:
        answers = team.run(fail_to_register)
    assert [answer.code for answer in answers] == ["RANK_FAILED", "MEMORY", *["RANK_FAILED"] * 2]
    assert "rank 1" in answers[0].text and "locked memory is short" in answers[0].text


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("transport", [pytest.param("nccl", marks=nccl)])
def test_a_rank_whose_gpu_is_gone_is_lost(transport: str, number: signal.Signals) -> None:
    """The others' GPUs wait without end: their processes say so and end."""
    with Team(NODES, transport) as team:
        assert team.run(leave_open, 0) == [None] * len(NODES)
        team.kill(1, number)
        for rank in (0, 2, 3):
            team.start(read_on, 1, 3, rank=rank)
        for rank in (0, 2, 3):
            code, said = team.ended(rank, SECONDS + 10)
            assert code == 1 and "error[RANK_LOST]" in said, said


def open_as(player: Player, road: str) -> str:
    player.open(SMALL, ROWS, road=road)
    name = type(player.exchange).__name__
    player.exchange.close()
    return name


@pytest.mark.skipif(HAS_RDMA, reason="it is there")
def test_roads_that_are_missing() -> None:
    with Team(NODES, "gloo") as team:
        assert team.run(open_as, "auto") == ["CollectiveExchange"] * len(NODES)
        for road in ("rdma", "nccl"):
            for answer in team.run(open_as, road):
                assert answer.code in ("PACKAGE_MISSING", "EXCHANGE"), answer.trace


def test_ports_as_the_kernel_shows_them(tmp_path: Path) -> None:
    gid, other = "0000:0000:0000:0000:0000:ffff:0a09:0001", "fe80::1"
    for device, state in (("mlx5_0", "1: DOWN"), ("mlx5_1", "4: ACTIVE")):
        folder = tmp_path / device / "ports/1"
        files = {"link_layer": "Ethernet", "state": state, "gids/0": other, "gids/1": gid}
        files |= {"gids/3": gid, "gid_attrs/types/1": "IB/RoCE v1", "gid_attrs/types/3": "RoCE v2"}
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text + "\n")
    port = find_port({IPv6Address("::ffff:10.9.0.1")}, tmp_path)
    assert (port.device, port.number, port.gid_index, port.gid) == ("mlx5_1", 1, 3, gid)
    with pytest.raises(UnavailableError, match="mlx5_0, mlx5_1"):
        find_port({IPv6Address("::ffff:10.9.0.2")}, tmp_path)
    with pytest.raises(UnavailableError, match="no RDMA device"):
        find_port(set(), tmp_path / "absent")
