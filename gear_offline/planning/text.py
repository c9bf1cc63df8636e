"""A plan as tables for the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from gear_offline.core.text import size_text
from gear_offline.training.throughput import speed_text

ASSUMED = (
    "every node has the same parts, and the network has its full rate between any two nodes",
    "the shards are read from each node's own storage at the given rate",
    "evaluations and checkpoints are left out",
)


def print_plan(document: dict[str, Any]) -> None:
    """Print what a plan predicts."""
    console = Console()
    cluster = document["cluster"]
    title = (
        f"{document['recipe']} on {cluster['nodes']:,} x {cluster['gpus_per_node']} GPUs "
        f"(predicted)"
    )
    table = Table(title=title, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in (*_size_rows(document), *_time_rows(document)):
        table.add_row(name, value)
    console.print(table)
    console.print("Assumed: " + "; ".join(ASSUMED) + ".")


def _size_rows(document: dict[str, Any]) -> list[tuple[str, str]]:
    data, placement, model = document["data"], document["placement"], document["model"]
    shares, found = placement["read_shares"], placement["tiers_of_a_node"]
    own = "" if found["hbm"]["shards"] else f" and {shares['hbm']:.1%} from a GPU's own part"
    tiers = ", ".join(
        f"{name} {_bytes(tier['bytes'])} in {tier['shards']:,} "
        f"shard{'s' if tier['shards'] != 1 else ''}, {shares[name]:.1%} of reads"
        f"{own if name == 'peer' else ''}"
        for name, tier in found.items()
        if tier["shards"]
    )
    sharded = placement["sharding"] == "shard"
    return [
        ("data", f"{_bytes(data['memory_bytes'])}, {data['steps']:,.0f} steps; {data['source']}"),
        ("nodes hold", "a part of the shards each" if sharded else "all of the data each"),
        ("tiers of a node", tiers),
        ("host memory of a node", f"{_bytes(placement['host_bytes_of_a_node'])} of rows"),
        (
            "memory of a GPU",
            f"{_bytes(placement['gpu_bytes'])}, "
            f"of it {_bytes(model['memory_bytes'])} for the model",
        ),
        ("model", f"{model['parameters']:,} parameters, {model['flops'] / 1e12:,.3g} TFLOP a step"),
        (
            "batch",
            f"{document['batch']['global']:,} segments of {_bytes(data['window_bytes'])}, "
            f"{document['batch']['of_a_gpu']:,} a GPU",
        ),
    ]


def _time_rows(document: dict[str, Any]) -> list[tuple[str, str]]:
    step, start, run = document["step"], document["start"], document["run"]
    rows = [
        (
            "network",
            f"{_bytes(step['network_bytes'])} of segments a step cross nodes, "
            f"{step['crossing_share']:.2%} of the batch "
            f"(fixed slots: {_bytes(step['fixed_slots_network_bytes'])}); "
            f"{_bytes(step['gradient_bytes_of_a_node'])} of gradients a node",
        ),
        (
            "step",
            f"{_time(step['seconds'])}: model {_time(step['compute_seconds'])}, slowed by "
            f"{_time(step['averaging_exposed_seconds'])} while gradients travel "
            f"({_time(step['averaging_seconds'])}), "
            f"data {_time(step['stall_seconds'])} ({step['stall_share']:.1%} stall)",
        ),
        (
            "data of a step",
            f"gather {_time(step['gather_seconds'])}, disk {_time(step['disk_seconds'])}, "
            f"exchange {_time(step['exchange_seconds'])}",
        ),
        (
            "rate",
            f"{step['segments_per_second']:,.0f} segments/s, "
            f"{speed_text(document['model']['tflops_per_second'], None)} a GPU",
        ),
        (
            "start",
            f"{_time(start['seconds'])}: process {_time(start['process_seconds'])}, "
            f"loading {_time(start['load_seconds'])}, locking pages "
            f"{_time(start['page_lock_seconds'])}, upload {_time(start['upload_seconds'])}, "
            f"joining {_time(start['group_seconds'])}, making and "
            f"compiling the model {_time(start['begin_seconds'])}",
        ),
        (
            "run",
            f"{_time(run['seconds'])} for {run['steps']:,} steps, "
            f"{run['passes']:,.{0 if run['passes'] >= 100 else 2}f} times the data",
        ),
    ]
    return rows


def _bytes(count: float) -> str:
    return size_text(int(count))


def _time(seconds: float) -> str:
    for limit, unit, factor in ((1e-3, "us", 1e6), (1.0, "ms", 1e3), (600.0, "s", 1.0)):
        if seconds < limit:
            return f"{seconds * factor:,.3g} {unit}"
    if seconds < 7200:
        return f"{seconds / 60:,.0f} min"
    return f"{seconds / 3600:,.1f} h"
