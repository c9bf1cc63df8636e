"""A table over the memories of all GPUs of a node, read by each of them in place.

The hottest episodes may be in every GPU, the next lie in one GPU each and are read by the others
over NVLink, and what does not fit is read from pinned host memory; one launch reads all three,
since a gather needs addresses only.  Spreading tables over linked GPUs by how often rows are read
is the idea of Quiver (Tan et al. 2023, arXiv:2305.10863); here the probabilities are those of the
selection law, known exactly.

Shape legend: E episodes, G GPUs of the node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from gear_offline.tables.device_memory import Memory, too_large
from gear_offline.tables.pinning import format_bytes
from gear_offline.tables.placement import (
    ALIGNMENT_BYTES,
    HBM,
    HOST,
    PlacedGroup,
    PlacedTable,
    begins_of,
    bytes_of_row,
    check_placement,
    place_in,
    upload,
)
from gear_offline.tables.placement_plan import HBM_SHARE, Placement, episode_weights
from gear_offline.tables.table import Table

if TYPE_CHECKING:
    import torch

    from gear_offline.distributed.world import World

PEER = 2  # value of `PlacedGroup.tiers`: in another GPU of the node
# Nanoseconds a kilobyte, from GPU memory, over NVLink and from host memory that all GPUs of a
# node read at once: 1,900, 360 and 37 GB/s on four H200 (docs/benchmarks/gather.json, peers.json).
HBM_COST, PEER_COST, HOST_COST = 0.53, 2.8, 27.0

Int64Array = npt.NDArray[np.int64]


class SharedMemory(Memory, Protocol):
    """Memory of one GPU that other processes of the node can map."""

    def allocate_shared(self, nbytes: int) -> tuple[int, Any, Any]:
        """Return the address, what keeps the memory alive, and a JSON-able handle."""
        ...

    def open_shared(self, handle: Any) -> tuple[int, Any]:
        """Return where another GPU's memory is mapped, and what keeps the mapping."""
        ...


class Peers(Protocol):
    """The GPUs of the node, one a process."""

    @property
    def index(self) -> int:
        """This one, from 0."""
        ...

    @property
    def count(self) -> int:
        """G."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """Return every GPU's JSON-able value, in their order."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class NodePlan:
    """Where each episode lies.

    Attributes
    ----------
    tiers
        (E,) uint8: `HBM` (in every GPU), `PEER` (in one of them) or `HOST`.
    owners
        (E,) int64: the GPU of an episode that lies in one; 0 elsewhere.
    shares
        Of reads, by weight, from a GPU's own memory (mean over GPUs), from peers, from the host.
    """

    tiers: npt.NDArray[np.uint8]
    owners: Int64Array
    shares: tuple[float, float, float]

    def held_by(self, gpu: int) -> npt.NDArray[np.bool_]:
        """Return (E,) whether a GPU holds an episode itself."""
        own = (self.tiers == PEER) & (self.owners == gpu)
        return np.asarray(own | (self.tiers == HBM), dtype=np.bool_)


def plan_node(
    sizes: Int64Array,
    weights: npt.NDArray[np.float64],
    budget_bytes: int,
    gpus: int,
    *,
    copy: bool = True,
) -> NodePlan:
    """Choose by time saved per byte of GPU memory, over two kinds of choices.

    An episode that comes from the host into one GPU costs its bytes once and saves the host's
    slow reads; one that is then copied to all costs G - 1 times its bytes and saves reads over
    NVLink.  Episodes that lie in one GPU are dealt out forth and back in the order of weight per
    byte, so that GPUs hold like shares of bytes and of probability.

    Parameters
    ----------
    sizes, weights
        As `gear_offline.tables.placement.plan_episodes`.
    budget_bytes
        Of each GPU.
    gpus
        G.
    copy
        Whether an episode may be in every GPU.
    """
    density = weights / sizes
    order = np.argsort(-density, kind="stable")
    spread_cost = ((gpus - 1) * PEER_COST + HBM_COST) / gpus
    copies = max(gpus - 1, 1)
    gains = np.concatenate(
        [
            (HOST_COST - spread_cost) * density[order],
            (spread_cost - HBM_COST) / copies * density[order],
        ]
    )
    costs = np.concatenate([sizes[order], copies * sizes[order] * copy])
    ranked = np.argsort(-gains, kind="stable")
    taken = int(np.searchsorted(np.cumsum(costs[ranked]), budget_bytes * gpus, side="right"))
    chosen = ranked[:taken]
    everywhere = int((chosen >= len(order)).sum()) if copy and gpus > 1 else 0
    spread = int((chosen < len(order)).sum())
    while True:
        tiers, owners = _deal(
            order[:everywhere], order[everywhere:spread], sizes, budget_bytes, gpus
        )
        # Equal shares are not exactly equal: then fewer copies rather than rows in the host.
        if spread < len(order) or not everywhere or not (tiers == HOST).any():
            break
        everywhere -= 1 + everywhere // 50
    tiers[tiers == PEER] = PEER if gpus > 1 else HBM
    total = float(weights.sum()) or 1.0
    copied, parted, rest = (float(weights[tiers == t].sum()) / total for t in (HBM, PEER, HOST))
    return NodePlan(
        tiers=tiers,
        owners=owners,
        shares=(copied + parted / gpus, parted * (gpus - 1) / gpus, rest),
    )


def _deal(
    copied: Int64Array, dealt: Int64Array, sizes: Int64Array, budget_bytes: int, gpus: int
) -> tuple[npt.NDArray[np.uint8], Int64Array]:
    """Return tiers and owners: some episodes in every GPU, others dealt out as far as they fit."""
    tiers, owners = np.full(len(sizes), HOST, np.uint8), np.zeros(len(sizes), np.int64)
    tiers[copied] = HBM
    turn = np.arange(len(dealt)) % (2 * gpus)
    owners[dealt] = np.where(turn < gpus, turn, 2 * gpus - 1 - turn)
    left = budget_bytes - int(sizes[copied].sum())
    for gpu in range(gpus):
        mine = dealt[owners[dealt] == gpu]
        tiers[mine[np.cumsum(sizes[mine]) <= left]] = PEER
    owners[tiers != PEER] = 0
    return tiers, owners


class NodePeers:
    """The ranks of this rank's node."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._ranks = [r for r, node in enumerate(world.nodes) if node == world.nodes[world.rank]]

    @property
    def index(self) -> int:
        return self._ranks.index(self._world.rank)

    @property
    def count(self) -> int:
        return len(self._ranks)

    def gather(self, value: Any) -> list[Any]:
        """Exchange with all ranks, so that nodes need no groups of their own."""
        found = self._world.gather(value)
        return [found[rank] for rank in self._ranks]


def place_with(
    memory: SharedMemory,
    peers: Peers,
    table: Table,
    *,
    device: torch.device,
    placement: Placement,
    hbm_budget: int | None,
    episode_weight: npt.ArrayLike | None,
) -> PlacedTable:
    """As `place_in`; over peers if that is asked for, or if ``"auto"`` does not fit each GPU."""
    parting = placement == "peer"
    if placement == "auto":
        check_placement(table, placement, hbm_budget)
        need = sum(bytes_of_row(group) for group in table.groups) * table.episodes.steps
        budget = int(memory.free_bytes() * HBM_SHARE) if hbm_budget is None else hbm_budget
        fits = need + ALIGNMENT_BYTES * len(table.groups) <= budget
        parting = not all(peers.gather(fits)) and peers.count > 1
    options: dict[str, Any] = {
        "device": device,
        "hbm_budget": hbm_budget,
        "episode_weight": episode_weight,
    }
    if parting and peers.count > 1:
        chosen: Literal["auto", "peer"] = "peer" if placement == "peer" else "auto"
        return place_over_peers(memory, peers, table, placement=chosen, **options)
    return place_in(memory, table, placement=placement, **options)


def place_over_peers(
    memory: SharedMemory,
    peers: Peers,
    table: Table,
    *,
    device: torch.device,
    placement: Literal["auto", "peer"],
    hbm_budget: int | None,
    episode_weight: npt.ArrayLike | None,
) -> PlacedTable:
    """As `gear_offline.tables.placement.place_in`, called together by the GPUs of a node.

    What other GPUs have mapped stays in this one's memory until the process ends.

    Raises
    ------
    GearError
        ``HBM_SHORT`` if ``"peer"`` does not fit; and what `place_in` raises.
    """
    check_placement(table, placement, hbm_budget)
    row_bytes = sum(bytes_of_row(group) for group in table.groups)
    lengths = table.episodes.lengths
    sizes = lengths * row_bytes
    budget = int(memory.free_bytes() * HBM_SHARE) if hbm_budget is None else hbm_budget
    budget = min(peers.gather(budget)) - ALIGNMENT_BYTES * len(table.groups)
    plan = plan_node(
        sizes,
        episode_weights(episode_weight, lengths),
        budget,
        peers.count,
        copy=placement == "auto",
    )
    if placement == "peer" and (plan.tiers == HOST).any():
        raise too_large(int(sizes.sum()), budget * peers.count, f"free on {peers.count} GPUs")
    held: list[Any] = []
    begins = begins_of(table, plan.held_by(peers.index))
    address, buffer, handle = memory.allocate_shared(max(begins[-1], ALIGNMENT_BYTES))
    for group, begin in zip(table.groups, begins, strict=False):
        upload(memory, buffer, begin, table, group.rows, plan.held_by(peers.index))
    bases = []
    for gpu, found in enumerate(peers.gather(handle)):  # everybody has uploaded by then
        base, keeper = (address, buffer) if gpu == peers.index else memory.open_shared(found)
        bases.append(base)
        held.append(keeper)
    groups = _groups(memory, peers.index, table, plan, bases, held)
    mine = int(sizes[plan.held_by(peers.index)].sum())
    host = int(sizes[plan.tiers == HOST].sum())
    return PlacedTable(
        episodes=table.episodes,
        groups=groups,
        device=device,
        hbm_bytes=mine,
        peer_bytes=int(sizes.sum()) - mine - host,
        host_bytes=host,
        reason=_reason(placement, sizes, plan, peers.count, budget),
        _held=held,
    )


def _groups(
    memory: SharedMemory,
    index: int,
    table: Table,
    plan: NodePlan,
    bases: Sequence[int],
    held: list[Any],
) -> tuple[PlacedGroup, ...]:
    lengths = table.episodes.lengths
    groups = []
    for number, group in enumerate(table.groups):
        size = bytes_of_row(group)
        addresses = np.zeros(len(lengths), np.int64)
        if (plan.tiers == HOST).any():
            pinned = memory.pin(group.rows)
            held.append(pinned)
            addresses[:] = pinned.address + (table.margin + table.episodes.offsets[:-1]) * size
        # Own memory last, so that episodes that are everywhere are read there.
        for gpu in [*(g for g in range(len(bases)) if g != index), index]:
            there = plan.held_by(gpu)
            packed = np.cumsum(lengths * there) - lengths * there
            begin = begins_of(table, there)[number]
            addresses = np.where(there, bases[gpu] + begin + packed * size, addresses)
        tiers = np.where(plan.held_by(index), HBM, plan.tiers).astype(np.uint8)
        rows = group.rows if (plan.tiers == HOST).any() else np.empty((0, group.width), group.dtype)
        groups.append(
            PlacedGroup(
                group=replace(group, rows=rows), addresses=addresses, row_bytes=size, tiers=tiers
            )
        )
    return tuple(groups)


def _reason(placement: str, sizes: Int64Array, plan: NodePlan, gpus: int, budget: int) -> str:
    parts = [int(sizes[plan.tiers == tier].sum()) for tier in (HBM, PEER, HOST)]
    own, peer, host = (f"{share:.1%}" for share in plan.shares)
    places = ("in every GPU", f"over {gpus} GPUs", "in pinned host memory")
    where = [f"{format_bytes(n)} {place}" for n, place in zip(parts, places, strict=True) if n]
    return (
        f"placement {placement}: {', '.join(where)} (budget {format_bytes(budget)} a GPU); "
        f"expected reads: {own} from own memory, {peer} from peers, {host} from the host"
    )
