"""The memory and speed of a recipe on a cluster: docs/how-to/clusters.md.

Shape legend: D nodes, G GPUs a node, S shards, n segments of a global batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.table import Table
from scipy.special import bdtrc

from gear_offline.analysis.planning.compute import StepCost, step_cost
from gear_offline.analysis.planning.hardware import Cluster, ReadRates
from gear_offline.analysis.planning.workload import Workload
from gear_offline.batches.tables.placement import HBM_SHARE, HOST, deal_out
from gear_offline.config.recipe import Recipe
from gear_offline.core.progress import Terminal
from gear_offline.core.text import count_text, size_text
from gear_offline.distributed.sharding import share_shards
from gear_offline.distributed.world import World
from gear_offline.errors import InputError
from gear_offline.loaders.static_batch import AHEAD_BYTES
from gear_offline.training.cost import CONTEXT_BYTES
from gear_offline.training.gradients import check_micro_batches

HOST_SHARE = 0.9  # of a node's memory that rows may take
TIERS = ("hbm", "peer", "host", "disk")
# Seconds that a step grows by for each second of an all-reduce beside it: its kernels take
# multiprocessors and memory bandwidth from the backward pass, and the last ones come after it.
SLOWED = 1.8
HIDDEN_SHARE = 0.6  # of a step, the backward pass: what is longer than that is waited for


@dataclass(frozen=True, kw_only=True, eq=False)
class NodeLayout:
    """The placement of the fullest node's rows."""

    spread: bool  # nodes hold a part each
    road: str  # of rows between them
    node_shares: list[float]  # (D,) how often each node's shards are drawn from
    shards: dict[str, int]  # by tier
    bytes: dict[str, float]  # by tier
    reads: dict[str, float]  # share of a GPU's reads by tier
    gpu_bytes: float  # rows in one GPU


def plan(recipe: Recipe, workload: Workload, cluster: Cluster) -> dict[str, Any]:
    """Return the prediction as one JSON-able document; the batch is that of the whole cluster."""
    batch, gpu, ranks = recipe.loader.batch_size, cluster.hardware.gpu, cluster.nodes * cluster.gpus
    share = World(nodes=(0,) * ranks).rank_batch(batch)
    check_micro_batches(share, recipe.train.accumulate, whose="a GPU's")
    if recipe.model.max_timestep is None:  # as training takes it from the data
        longest = max(workload.longest, recipe.loader.context_length)
        recipe = recipe.settle({"model.max_timestep": longest})
    cost = step_cost(recipe, workload.sizes, cluster, segments=share, learns=workload.learns)
    model_bytes = cost.memory_bytes + CONTEXT_BYTES
    if model_bytes > gpu.memory:
        problem = f"the model and {share} segments take {model_bytes / 1e9:.0f} GB of a GPU's "
        problem += f"{gpu.memory / 1e9:.0f} GB"
        remedy = "plan with more GPUs, a smaller loader.batch_size or a smaller model"
        raise InputError("USAGE", problem, recipe.name, remedy)
    layout = lay_out(recipe, workload, cluster, gpu.memory - model_bytes)
    step, start = _step(workload, cluster, layout, cost, batch), _start(cluster, layout, cost)
    steps = recipe.train.steps
    return {
        "recipe": recipe.name,
        "cluster": {
            "nodes": cluster.nodes,
            "gpus_per_node": cluster.gpus,
            "network_gigabits_per_node": cluster.nic_bits * cluster.gpus / 1e9,
            "host_memory_bytes": cluster.memory,
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
        "batch": {"global": batch, "of_a_gpu": share},
        "model": asdict(cost) | {"tflops_per_second": cost.flops / step["seconds"] / 1e12},
        "placement": {
            "sharding": "shard" if layout.spread else "replicate",
            "exchange": layout.road if layout.spread else None,
            "shards_of_a_node": layout.shards,
            "bytes_of_a_node": layout.bytes,
            "read_shares": layout.reads,
            "gpu_bytes": layout.gpu_bytes + model_bytes,
        },
        "step": step,
        "start": start,
        "run": {
            "steps": steps,
            "seconds": start["seconds"] + steps * step["seconds"],
            "passes": steps * batch * recipe.loader.context_length / max(workload.steps, 1.0),
        },
    }


def lay_out(recipe: Recipe, workload: Workload, cluster: Cluster, free_bytes: float) -> NodeLayout:
    """Choose nodes and tiers as training does; `free_bytes` of a GPU are left beside the model."""
    loader, sizes, weights = recipe.loader, workload.shard_bytes, workload.weights
    memory, nodes = cluster.memory * HOST_SHARE, cluster.nodes
    parted = loader.sharding == "shard" or (loader.sharding == "auto" and sizes.sum() > memory)
    spread, node_shares = bool(nodes > 1 and parted), [1.0 / nodes] * nodes
    if spread:
        owners = share_shards(weights, nodes)
        node_shares = np.bincount(owners, weights, nodes).tolist()
        fullest = owners == np.argmax(np.bincount(owners, sizes, nodes))
        sizes, weights = sizes[fullest], weights[fullest] / weights[fullest].sum()
    budgets = {"host": 0, "disk": 0, "hbm": int(free_bytes)}
    budget = budgets.get(loader.placement, loader.hbm_budget or int(free_bytes * HBM_SHARE))
    shard_bytes = np.maximum(sizes.astype(np.int64), 1)
    gpus = 1 if shard_bytes.sum() <= budget else cluster.gpus  # that share one table
    tiers = np.where(deal_out(shard_bytes, weights, budget, gpus) == HOST, 2, min(gpus - 1, 1))
    too_large = loader.placement in ("auto", "host") and shard_bytes.sum() > memory
    if loader.placement == "disk" or too_large:
        tiers[:] = TIERS.index("disk")  # all of it
    reads, nbytes = np.bincount(tiers, weights, 4), np.bincount(tiers, shard_bytes, 4)
    # of what is spread over a node's GPUs, a GPU holds a part itself
    local_reads = reads[1] / cluster.gpus
    reads[:2] += local_reads, -local_reads
    return NodeLayout(
        spread=spread,
        road="nccl" if loader.exchange == "auto" else loader.exchange,
        node_shares=node_shares,
        shards=dict(zip(TIERS, np.bincount(tiers, minlength=4).tolist(), strict=True)),
        bytes=dict(zip(TIERS, nbytes.tolist(), strict=True)),
        reads=dict(zip(TIERS, reads.tolist(), strict=True)),
        gpu_bytes=float(nbytes[0] + nbytes[1] / cluster.gpus),
    )


def _step(
    workload: Workload, cluster: Cluster, layout: NodeLayout, cost: StepCost, batch: int
) -> dict[str, float]:
    """Return the seconds of each part of a step."""
    gather, nodes, gpus = cluster.hardware.gather, cluster.nodes, cluster.gpus
    share, window = batch // (nodes * gpus), workload.window_bytes
    crossing = crossing_share(layout.node_shares, batch) if layout.spread else 0.0
    network = crossing * batch * window
    is_gloo, gloo = layout.road == "gloo", cluster.hardware.transfer.gloo * gpus
    exchange = network / nodes / min(gloo if is_gloo else math.inf, cluster.node_rate)
    host_share = min(1.0, gather.host_node / gpus / gather.host.bytes)  # all GPUs read at once
    host = ReadRates(windows=gather.host.windows * host_share, bytes=gather.host.bytes * host_share)
    gathering = gather.launch
    for tier, rates in (("hbm", gather.hbm), ("peer", gather.peer), ("host", host)):
        windows = share * layout.reads[tier]
        gathering += max(windows * workload.reads / rates.windows, windows * window / rates.bytes)
    disk = share * gpus * window * layout.reads["disk"] / cluster.storage_rate
    ahead = layout.reads["host"] > 0 and share * window >= AHEAD_BYTES and cost.captured
    averaging = _averaging_seconds(cluster, cost.travelling_bytes)
    exposed = max(averaging * SLOWED, averaging - cost.compute_seconds * HIDDEN_SHARE)
    busy = cost.compute_seconds + exposed
    # NCCL exchanges between steps; other roads, the disk and gathers ahead run beside the step.
    between_steps = exchange if layout.road == "nccl" else 0.0
    meanwhile = max(gathering if ahead else 0.0, exchange - between_steps, disk)
    stall = (0.0 if ahead else gathering) + between_steps + max(0.0, meanwhile - busy)
    seconds = busy + stall
    return {
        "seconds": seconds,
        "compute_seconds": cost.compute_seconds,
        "averaging_seconds": averaging,
        "averaging_exposed_seconds": exposed,
        "gather_seconds": gathering,
        "disk_seconds": disk,
        "exchange_seconds": exchange,
        "stall_seconds": stall,
        "stall_share": stall / seconds,
        "segments_per_second": batch / seconds,
        "crossing_share": crossing,
        "network_bytes": network,
        "gradient_bytes_of_a_node": 2 * (nodes - 1) / nodes * 4.0 * cost.parameters,
        "fixed_slots_network_bytes": (1 - 1 / nodes) * batch * window * layout.spread,
    }


def _averaging_seconds(cluster: Cluster, nbytes: float) -> float:
    """Return the seconds of averaging `nbytes` of gradients: rings in nodes, then between them."""
    nodes, gpus, rates = cluster.nodes, cluster.gpus, cluster.hardware.transfer
    inside = 2 * (gpus - 1) / gpus * nbytes / rates.allreduce
    between = 2 * (nodes - 1) / nodes * nbytes / cluster.node_rate
    hops = (gpus > 1) + math.ceil(math.log2(nodes))
    return inside + between + hops * rates.latency


def _start(cluster: Cluster, layout: NodeLayout, cost: StepCost) -> dict[str, float]:
    """Return the seconds of each part of a run before its second step."""
    start, storage = cluster.hardware.start, cluster.hardware.storage
    loaded = sum(layout.bytes.values()) - layout.bytes["disk"]
    phases = {
        "process_seconds": start.process,
        "group_seconds": start.group if cluster.nodes * cluster.gpus > 1 else 0.0,
        "load_seconds": loaded / min(storage.load, cluster.storage_rate),
        "page_lock_seconds": layout.bytes["host"] / storage.page_lock,
        "upload_seconds": layout.gpu_bytes / storage.upload,
        "begin_seconds": cost.begin_seconds,
    }
    return {"seconds": sum(phases.values()), **phases}


def crossing_share(shares: Sequence[float], batch: int) -> float:
    """Return the expected share of a global batch that moves between nodes.

    A node works on ``batch / D`` segments, and what is drawn beyond that from its shards moves.
    `shares`, (D,), sum 1: how often each node's shards are drawn from.
    """
    # the mean of what is drawn beyond c: of binomial X, E[X; X > c] is n s P(X' >= c), X' of n - 1
    capacity = batch // len(shares)
    totals = (batch * s * bdtrc(capacity - 1, batch - 1, s) for s in shares)
    beyond = (capacity * bdtrc(capacity, batch, s) for s in shares)
    return float(sum(totals) - sum(beyond)) / batch


def print_plan(document: Mapping[str, Any]) -> None:
    """Print the prediction of `plan`, a line a part, without zeros."""
    cluster, data, model = document["cluster"], document["data"], document["model"]
    batch, placement, step = document["batch"], document["placement"], document["step"]
    run, flops = document["run"], model["flops"] + model["encoder_flops"]
    tiers = [
        f"{count_text(count, 'shard')} ({size_text(int(placement['bytes_of_a_node'][tier]))}, "
        f"{placement['read_shares'][tier]:.2%} of the reads) in {tier}"
        for tier, count in placement["shards_of_a_node"].items()
        if count
    ]
    sent = {"between nodes": "network_bytes", "of a node's gradients": "gradient_bytes_of_a_node"}
    rows = {
        "cluster": f"{count_text(cluster['nodes'], 'node')} of "
        f"{count_text(cluster['gpus_per_node'], 'GPU')} and "
        f"{size_text(int(cluster['host_memory_bytes']))}; a node's network "
        f"{cluster['network_gigabits_per_node']:,.0f} Gbit/s, its storage "
        f"{size_text(int(cluster['disk_bytes_per_second']))}/s",
        "data": f"{data['source']}: {data['episodes']:,.0f} episodes, {data['steps']:,.0f} steps, "
        f"{size_text(int(data['memory_bytes']))} in memory; a step {size_text(data['row_bytes'])}, "
        f"a window {size_text(data['window_bytes'])}",
        "batch": f"{batch['global']:,} windows, {batch['of_a_gpu']:,} of a GPU",
        "model": f"{model['parameters']:,} parameters, {flops:,.3g} "
        f"operations a step ({model['tflops_per_second']:.3g} TFLOP/s)"
        + ", guessed: one use of each weight a step of a window" * model["flops_guessed"]
        + "".join(f", {w}" for w in ("compiled", "captured", "sharded") if model[w])
        + ", in 8 bits" * model["eight_bits"],
        "data on a node": f"{placement['sharding']}: {', '.join(tiers)}",
        "memory of a GPU": size_text(int(placement["gpu_bytes"])),
        "a step": f"{_time(step['seconds'])}, {step['segments_per_second']:,.0f} windows/s",
        "in it": _times(step),
        "sent in a step": ", ".join(
            f"{size_text(int(step[key]))} {text}" for text, key in sent.items() if step[key]
        ),
        "start": f"{_time(document['start']['seconds'])}: {_times(document['start'])}",
        "run": f"{run['steps']:,} steps in {_time(run['seconds'])}, {run['passes']:,.3g} passes",
    }
    table = Table("what", "predicted", title=document["recipe"], box=None, pad_edge=False)
    for name, text in rows.items():
        if text:
            table.add_row(name, text)
    console = Terminal()
    console.print(table)
    console.print(
        "Assumed: all nodes alike, the network's full rate between any two of them, shards on "
        "each node's own storage; no evaluations, no checkpoints."
    )


def _times(times: Mapping[str, float]) -> str:
    """Return the parts of a time, those that are not zero."""
    pairs = ((name.removesuffix("_seconds"), value) for name, value in times.items())
    texts = [f"{n.replace('_', ' ')} {_time(v)}" for n, v in pairs if f"{n}_seconds" in times and v]
    return ", ".join(texts)


def _time(seconds: float) -> str:
    if seconds > 600:
        return f"{seconds / 3600:,.3g} h"
    return f"{seconds:.3g} s" if seconds > 1 else f"{seconds * 1e3:.3g} ms"
