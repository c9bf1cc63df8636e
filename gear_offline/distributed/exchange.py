"""Rows that other nodes hold, brought into landing memory of this rank ahead of their use."""

from __future__ import annotations

from typing import Any, Protocol

import numpy.typing as npt

from gear_offline.config.sections import Mode
from gear_offline.distributed.collective import CollectiveExchange
from gear_offline.distributed.rdma import Endpoint, RdmaExchange
from gear_offline.distributed.reads import NodeRows, Reads
from gear_offline.distributed.world import World
from gear_offline.errors import GearError, UnavailableError
from gear_offline.progress import say

__all__ = ["Exchange", "NodeRows", "Reads", "open_exchange"]


class Exchange(Protocol):
    """Moves rows between nodes.

    All ranks open, post the same steps with the same reads in the same order, and close.  Posted
    steps run in the background.  After an error the exchange can only be closed.
    """

    name: str  # "collective" or "rdma"

    def post(self, step: int, reads: Reads) -> None:
        """Begin the reads of a step; its landing rows must not be touched until `wait` returns."""
        ...

    def wait(self, step: int) -> None:
        """Return when all rows of a posted step have landed; once a step, in any order.

        ``RANK_LOST`` at the latest after the world's timeout.
        """
        ...

    def close(self) -> None:
        """Give memory and connections back; no step that was posted may be waited for any more."""
        ...


def open_exchange(
    node_rows: NodeRows,
    landing: tuple[npt.NDArray[Any], ...],
    world: World,
    *,
    mode: Mode = "auto",
    quiet: bool = False,
) -> Exchange:
    """Open an exchange; all ranks of `world` call it together, with the same mode.

    Rows of other nodes go to `landing`: one C-contiguous, writable (L, W) array for each column
    group.  RDMA between the nodes is ``"on"``, or an error that says what is missing and where;
    ``"off"``, collectives of torch; or ``"auto"``, RDMA if every rank can.
    """
    widths = [
        [rows.shape[1] * rows.itemsize for rows in groups] for groups in (landing, node_rows.rows)
    ]
    assert widths[0] == widths[1], "rows of one shape"
    assert len({len(rows) for rows in landing}) == 1, "as many landing rows in every column group"
    endpoint, why = (None, "exchange='off'") if mode == "off" else _agree(world, mode)
    kind = "RDMA reads" if endpoint else "collectives"
    say(f"exchange: {kind} ({why})", quiet=quiet or not world.is_first)
    if endpoint is None:
        return CollectiveExchange(node_rows, landing, world)
    return RdmaExchange(node_rows, landing, world, endpoint)


def _agree(world: World, mode: Mode) -> tuple[Endpoint | None, str]:
    """Return this rank's endpoint if all ranks can use RDMA, and why (not)."""
    endpoint: Endpoint | None = None
    problem: GearError | None = None
    try:
        endpoint = Endpoint.open(timeout=world.timeout)
    except UnavailableError as error:
        problem = error
    problems = world.gather(None if problem is None else problem.what)
    missing = [(rank, what) for rank, what in enumerate(problems) if what is not None]
    if endpoint is not None and not missing:
        return endpoint, f"every rank can; here {endpoint.describe()}"
    if endpoint is not None:
        endpoint.close()
    rank, why = missing[0]
    if mode == "auto":
        return None, f"no RDMA at rank {rank}: {why}"
    what, remedy = f"rank {rank} cannot use RDMA: {why}", "use loader.exchange=auto or off"
    raise problem or UnavailableError("EXCHANGE", what, remedy=f"{remedy}, or mend that node")
