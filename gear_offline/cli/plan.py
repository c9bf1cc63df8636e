"""`gear-offline plan`: what a recipe would need on a cluster, and how fast it would be."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from gear_offline.cli.values import parse_count, parse_size


def plan(
    recipe: Annotated[str, typer.Argument(help="Recipe name or file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value changes, e.g. loader.batch_size=256.")
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, max=65_536, help="Nodes.")] = 1,
    gpus: Annotated[int, typer.Option(min=1, max=64, help="GPUs of a node.")] = 1,
    nic_gbps: Annotated[
        float, typer.Option(min=0.001, help="Gigabits/s of one network card.")
    ] = 400.0,
    nics: Annotated[
        int | None, typer.Option(min=1, help="Network cards of a node; default one a GPU.")
    ] = None,
    hardware: Annotated[
        str, typer.Option(help="Measured machine, or a YAML file of the same form.")
    ] = "h200",
    host_memory: Annotated[
        str | None, typer.Option(help="Memory of a node, e.g. 2TB; default the machine's.")
    ] = None,
    disk_rate: Annotated[
        str | None, typer.Option(help="Bytes a second of a node's storage, e.g. 20GB.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Take the data for so many bytes in memory, e.g. 100TB.")
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(
            help="Data that do not exist yet: observations=uint8[84,84],actions=int64,..."
        ),
    ] = None,
    episode_length: Annotated[
        str | None, typer.Option(metavar="<int>", help="With --columns: steps of an episode.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document on stdout.")
    ] = False,
) -> None:
    """Predict memory, tiers, traffic and times of a recipe on a cluster."""
    from gear_offline.config.recipe import load_recipe
    from gear_offline.errors import InputError
    from gear_offline.planning.hardware import Cluster, load_hardware
    from gear_offline.planning.plan import plan as run
    from gear_offline.planning.text import print_plan
    from gear_offline.planning.workload import make_workload

    if episode_length is not None and columns is None:
        raise InputError(
            "USAGE",
            "--episode-length is for --columns; a dataset has its own episodes",
            remedy="add --columns, or leave it out",
        )
    found = load_recipe(recipe, overrides or ())
    cluster = Cluster(
        nodes=nodes,
        gpus=gpus,
        hardware=load_hardware(hardware),
        nic_bits=nic_gbps * 1e9,
        nics=gpus if nics is None else nics,
        host_memory=None if host_memory is None else parse_size(host_memory),
        disk_rate=None if disk_rate is None else parse_size(disk_rate),
    )
    workload = make_workload(
        found,
        data_bytes=None if data is None else parse_size(data),
        columns=columns,
        episode_length=parse_count(episode_length, "--episode-length"),
    )
    document = run(found, workload, cluster)
    if as_json:
        print(json.dumps(document, indent=2, allow_nan=False))
    else:
        print_plan(document)
