"""What a recipe needs on a cluster, and how fast it would be there.

Predictions are sums of the rates in hardware.yaml; docs/planning.md compares them with what
was measured.

Shape legend: D nodes, G GPUs a node, S shards, n segments of a global batch, b a GPU.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

import numpy as np
import numpy.typing as npt

from gear_offline.config.recipe import Recipe
from gear_offline.distributed.sharding import share_shards
from gear_offline.errors import InputError
from gear_offline.planning.compute import StepCost, step_cost
from gear_offline.planning.hardware import Hardware, Reads
from gear_offline.planning.network import allreduce_seconds, crossing_share
from gear_offline.planning.workload import Workload
from gear_offline.tables.peer_placement import PEER, plan_node
from gear_offline.tables.placement import HBM
from gear_offline.tables.placement_plan import HBM_SHARE
from gear_offline.training.data_parallel import check_parts
from gear_offline.training.training_memory import CONTEXT_BYTES

__all__ = ["Cluster", "plan"]

Int64Array = npt.NDArray[np.int64]
HOST_RESERVE = 0.9  # of a node's memory that rows may take
AHEAD_BYTES = 8 << 20  # batches of so many bytes are fetched a step ahead
TIERS = ("hbm", "peer", "host", "disk")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """What the recipe would run on.

    Attributes
    ----------
    nodes, gpus
        D, and G of a node.
    hardware
        Of a node.
    nic_bits
        Bits/s of one network card.
    nics
        Cards of a node.
    host_memory, disk_rate
        Bytes of a node and bytes/s of its storage, if they differ from the hardware's.
    """

    nodes: int
    gpus: int
    hardware: Hardware
    nic_bits: float = 400e9
    nics: int = 1
    host_memory: float | None = None
    disk_rate: float | None = None

    @property
    def ranks(self) -> int:
        """GPUs of all nodes."""
        return self.nodes * self.gpus

    @property
    def node_rate(self) -> float:
        """Bytes/s between a node and the others."""
        return self.nic_bits / 8 * self.nics * self.hardware.transfer.nic_share

    @property
    def host_bytes(self) -> float:
        """Bytes of a node's memory that rows may take."""
        memory = self.host_memory or self.hardware.storage.host_memory
        return memory * HOST_RESERVE

    @property
    def storage_rate(self) -> float:
        """Bytes/s of a node's storage."""
        return self.disk_rate or self.hardware.storage.disk


@dataclass(frozen=True, kw_only=True, eq=False)
class NodeLayout:
    """Where the rows of the fullest node lie.

    Attributes
    ----------
    owners
        (S,) int64: the node of each shard; zeros where every node has all.
    spread
        Whether nodes hold a part each.
    tiers
        Of the shards of the node with the most bytes, by name: how many and bytes.
    reads
        Share of a GPU's reads from each tier.
    node_shares
        (D,) how often each node's shards are drawn from.
    """

    owners: Int64Array
    spread: bool
    tiers: dict[str, dict[str, float]]
    reads: dict[str, float]
    node_shares: list[float]


def plan(recipe: Recipe, workload: Workload, cluster: Cluster) -> dict[str, Any]:
    """Return the prediction as one JSON-able document.

    Parameters
    ----------
    recipe
        What is trained; its batch is that of the whole cluster.
    workload
        Its data, from `gear_offline.planning.workload.make_workload`.
    cluster
        What it would run on.

    Raises
    ------
    InputError
        ``BATCH_SHARE``, ``SHARDS_FEW``, ``PLAN_MEMORY`` if the model does not fit a GPU.
    """
    share = _share(recipe, cluster)
    if recipe.model.max_timestep is None:  # as training takes it from the data
        longest = max(workload.longest, recipe.loader.context_length)
        recipe = recipe.replace(model__max_timestep=longest)
    cost = step_cost(
        recipe,
        workload.sizes,
        cluster.hardware,
        segments=share,
        ranks=cluster.ranks,
        nodes=cluster.nodes,
        learns=workload.learns,
    )
    needed = _needed_bytes(recipe, cluster, cost, share)
    layout = lay_out(recipe, workload, cluster, cluster.hardware.gpu.memory - needed)
    step = _step(recipe, workload, cluster, layout, cost, share)
    start = _start(workload, cluster, layout, cost)
    steps, batch = recipe.train.steps, recipe.loader.batch_size
    return {
        "recipe": recipe.name,
        **_given(workload, cluster),
        "batch": {"global": batch, "of_a_gpu": share},
        "model": asdict(cost) | {"tflops_per_second": cost.flops / step["seconds"] / 1e12},
        "placement": {
            "sharding": "shard" if layout.spread else "replicate",
            "tiers_of_a_node": layout.tiers,
            "read_shares": layout.reads,
            "host_bytes_of_a_node": layout.tiers["host"]["bytes"],
            "gpu_bytes": _gpu_bytes(layout, cluster) + needed,
        },
        "step": step,
        "start": start,
        "run": {
            "steps": steps,
            "seconds": start["seconds"] + steps * step["seconds"],
            "passes": steps * batch * recipe.loader.context_length / max(workload.steps, 1.0),
        },
    }


def _share(recipe: Recipe, cluster: Cluster) -> int:
    """Return the segments of a GPU's batch."""
    batch = recipe.loader.batch_size
    if batch % cluster.ranks:
        raise InputError(
            "BATCH_SHARE",
            f"a batch of {batch} segments cannot be shared equally by {cluster.ranks} GPUs",
            where="loader.batch_size",
            remedy=f"try loader.batch_size={ceil(batch / cluster.ranks) * cluster.ranks}; it is "
            "the size of the global batch",
        )
    share = batch // cluster.ranks
    check_parts(share, recipe.train.accumulate, whose="a GPU's")
    return share


def _needed_bytes(recipe: Recipe, cluster: Cluster, cost: StepCost, share: int) -> float:
    """Return what a GPU's memory holds beside rows, which must fit it."""
    memory = cluster.hardware.gpu.memory
    needed = cost.memory_bytes + CONTEXT_BYTES
    if needed > memory:
        raise InputError(
            "PLAN_MEMORY",
            f"the model and {share} segments take {needed / 1e9:.0f} GB of a GPU's "
            f"{memory / 1e9:.0f} GB",
            where=recipe.name,
            remedy="plan with more GPUs, a smaller loader.batch_size or a smaller model",
        )
    return needed


def _given(workload: Workload, cluster: Cluster) -> dict[str, Any]:
    """Return what a plan is made for."""
    return {
        "cluster": {
            "nodes": cluster.nodes,
            "gpus_per_node": cluster.gpus,
            "network_gigabits_per_node": cluster.nic_bits * cluster.nics / 1e9,
            "host_memory_bytes": cluster.host_memory or cluster.hardware.storage.host_memory,
            "disk_bytes_per_second": cluster.storage_rate,
        },
        "data": {
            "source": workload.source,
            "steps": workload.steps,
            "episodes": workload.episodes,
            "memory_bytes": workload.table_bytes,
            "row_bytes": workload.row_bytes,
            "window_bytes": workload.window_bytes,
            "shards": len(workload.weights),
        },
    }


def lay_out(recipe: Recipe, workload: Workload, cluster: Cluster, free_bytes: float) -> NodeLayout:
    """Choose nodes and tiers as training does, shard by shard.

    Parameters
    ----------
    free_bytes
        Of a GPU, beside the model.
    """
    loader, sizes = recipe.loader, workload.shard_bytes
    total = workload.table_bytes
    spread = cluster.nodes > 1 and (
        loader.sharding == "shard" or (loader.sharding == "auto" and total > cluster.host_bytes)
    )
    owners = np.zeros(len(sizes), np.int64)
    shares = [1.0 / cluster.nodes] * cluster.nodes
    if spread:
        owners = share_shards(workload.weights, cluster.nodes)
        shares = np.bincount(owners, workload.weights, cluster.nodes).tolist()
    fullest = int(np.argmax(np.bincount(owners, sizes, cluster.nodes))) if spread else 0
    mine = np.flatnonzero(owners == fullest)
    budget = loader.hbm_budget or int(free_bytes * HBM_SHARE)
    if loader.placement in ("host", "disk"):
        budget = 0
    elif loader.placement == "hbm":
        budget = int(free_bytes)
    whole = np.maximum(sizes[mine].astype(np.int64), 1)
    found = plan_node(whole, workload.weights[mine], budget, cluster.gpus)
    names = np.where(found.tiers == HBM, 0, np.where(found.tiers == PEER, 1, 2))
    if not loader.placement.startswith(("hbm", "peer")):
        names = _to_disk(names, whole, loader.placement == "disk", cluster.host_bytes)
    weight = workload.weights[mine] / workload.weights[mine].sum()
    reads = dict(zip(TIERS, np.bincount(names, weight, 4).tolist(), strict=True))
    own = reads["peer"] / cluster.gpus
    reads["hbm"], reads["peer"] = reads["hbm"] + own, reads["peer"] - own
    counts, held = np.bincount(names, minlength=4), np.bincount(names, whole, 4)
    tiers = {
        name: {"shards": int(counts[i]), "bytes": float(held[i])} for i, name in enumerate(TIERS)
    }
    return NodeLayout(owners=owners, spread=spread, tiers=tiers, reads=reads, node_shares=shares)


def _to_disk(names: Int64Array, sizes: Int64Array, all_of_it: bool, memory: float) -> Int64Array:
    """Return tiers with all on disk if the rows do not fit host memory: it is all or nothing."""
    if all_of_it or float(sizes.sum()) > memory:
        return np.full(len(names), TIERS.index("disk"), np.int64)
    return names


def _gpu_bytes(layout: NodeLayout, cluster: Cluster) -> float:
    return layout.tiers["hbm"]["bytes"] + layout.tiers["peer"]["bytes"] / cluster.gpus


def _step(
    recipe: Recipe,
    workload: Workload,
    cluster: Cluster,
    layout: NodeLayout,
    cost: StepCost,
    share: int,
) -> dict[str, float]:
    """Return where the seconds of a step go."""
    batch, hardware = recipe.loader.batch_size, cluster.hardware
    crossing = crossing_share(layout.node_shares, batch) if layout.spread else 0.0
    network = crossing * batch * workload.window_bytes
    exchange = network / cluster.nodes / cluster.node_rate if network else 0.0
    gather = hardware.gather.launch + sum(
        _reading(reads, share * layout.reads[name], workload)
        for name, reads in (
            ("hbm", hardware.gather.hbm),
            ("peer", hardware.gather.peer),
            ("host", _host_reads(cluster)),
        )
    )
    disk = share * cluster.gpus * workload.window_bytes * layout.reads["disk"]
    disk_seconds = disk / cluster.storage_rate
    window = share * workload.window_bytes
    ahead = layout.reads["host"] > 0 and window >= AHEAD_BYTES and cost.captured
    inline = 0.0 if ahead else gather
    behind = max(gather if ahead else 0.0, exchange, disk_seconds)
    averaging = 0.0
    if cluster.ranks > 1:
        averaging = allreduce_seconds(
            cost.travelling_bytes,
            nodes=cluster.nodes,
            gpus=cluster.gpus,
            bus_rate=hardware.transfer.allreduce,
            node_rate=cluster.node_rate,
            latency=hardware.transfer.latency,
        )
    exposed = exposed_seconds(averaging, cost)
    busy = cost.compute_seconds + exposed
    stall = inline + max(0.0, behind - busy)
    seconds = busy + stall
    return {
        "seconds": seconds,
        "compute_seconds": cost.compute_seconds,
        "averaging_seconds": averaging,
        "averaging_exposed_seconds": exposed,
        "gather_seconds": gather,
        "disk_seconds": disk_seconds,
        "exchange_seconds": exchange,
        "stall_seconds": stall,
        "stall_share": stall / seconds,
        "segments_per_second": batch / seconds,
        "crossing_share": crossing,
        "network_bytes": network,
        "network_bytes_of_a_node": network / cluster.nodes,
        "gradient_bytes_of_a_node": 2 * (cluster.nodes - 1) / cluster.nodes * 4.0 * cost.parameters,
        "fixed_slots_network_bytes": (
            (1 - 1 / cluster.nodes) * batch * workload.window_bytes if layout.spread else 0.0
        ),
    }


# Seconds that a step grows by for each second of an all-reduce beside it: its kernels take
# multiprocessors and memory bandwidth from the backward pass, and the last ones come after it.
SLOWED = 1.8
HIDDEN_SHARE = 0.6  # of a step, the backward pass: what is longer than that is waited for


def exposed_seconds(averaging: float, cost: StepCost) -> float:
    """Return how much longer a step takes because gradients, or shards of weights, travel."""
    return max(averaging * SLOWED, averaging - cost.compute_seconds * HIDDEN_SHARE)


def _host_reads(cluster: Cluster) -> Reads:
    """Return the rates of one GPU when all of the node read its host memory at once."""
    gather = cluster.hardware.gather
    part = min(1.0, gather.host_node / cluster.gpus / gather.host.bytes)
    return Reads(windows=gather.host.windows * part, bytes=gather.host.bytes * part)


def _reading(reads: Reads, windows: float, workload: Workload) -> float:
    pieces, nbytes = windows * workload.reads, windows * workload.window_bytes
    return max(pieces / reads.windows, nbytes / reads.bytes)


def _start(
    workload: Workload, cluster: Cluster, layout: NodeLayout, cost: StepCost
) -> dict[str, float]:
    """Return where the seconds before the second step go."""
    start, storage = cluster.hardware.start, cluster.hardware.storage
    held = sum(tier["bytes"] for name, tier in layout.tiers.items() if name != "disk")
    rate = min(storage.load, cluster.storage_rate)
    parts = {
        "process_seconds": start.process,
        "group_seconds": start.group if cluster.ranks > 1 else 0.0,
        "load_seconds": held / rate,
        "page_lock_seconds": layout.tiers["host"]["bytes"] / storage.page_lock,
        "upload_seconds": _gpu_bytes(layout, cluster) / storage.upload,
        "begin_seconds": cost.begin_seconds,
    }
    return {"seconds": sum(parts.values()), **parts}
