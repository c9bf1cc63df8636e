"""The exchange between nodes whose link is cut; nodes are network namespaces of this machine."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest

from tests import exchange_plays as plays
from tests.exchange_team import Failure, Node, ReadRow, Team, World

SECONDS = 3.0
ROWS = 16
SMALL = World(lengths=(5, 9), row_bytes=(16,), holdings=(((0,),), ((1,),)))
READS: list[ReadRow] = [(0, 1, 1, 2, 6, 0), (1, 0, 0, 0, 5, 3)]


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    """Two namespaces with a virtual cable between them."""
    names = [f"gear{os.getpid()}n{number}" for number in range(2)]
    cables = [f"g{os.getpid() % 100_000}c{number}" for number in range(2)]
    made = []
    try:
        try:
            for name in names:
                ip("netns", "add", name)
                made.append(name)
            ip("link", "add", cables[0], "netns", names[0], "type", "veth",
               "peer", "name", cables[1], "netns", names[1])  # fmt: skip
            for number, (name, cable) in enumerate(zip(names, cables, strict=True)):
                ip("-n", name, "addr", "add", f"10.77.0.{number + 1}/24", "dev", cable)
                ip("-n", name, "link", "set", cable, "up")
                ip("-n", name, "link", "set", "lo", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"needs root and `ip netns`: {error}")
        yield [Node(name, cable) for name, cable in zip(names, cables, strict=True)]
    finally:
        for name in made:
            ip("netns", "del", name)


def test_a_cut_link_is_an_error_that_names_the_other_side(nodes: list[Node]) -> None:
    with Team(2, "collective", nodes) as team:
        interfaces = [node.interface for node in nodes]
        rows = team.run(plays.before_the_cut, SMALL, [READS], ROWS, interfaces)
        for rank, found in enumerate(rows):
            assert not isinstance(found, Failure), found.trace
            assert found == SMALL.expected(rank, ROWS, READS)
        ip("-n", nodes[0].namespace, "link", "set", nodes[0].interface, "down")
        answers = team.run(plays.after_the_cut, [READS], SECONDS)
    for rank, answer in enumerate(answers):
        assert not isinstance(answer, Failure), answer.trace
        code, text, elapsed, closing = answer
        assert code in ("EXCHANGE_PEER", "EXCHANGE_TIMEOUT"), text
        assert f"rank {1 - rank}" in text
        assert elapsed < SECONDS + 10 and closing < SECONDS + 10  # the exchange's own is 30
