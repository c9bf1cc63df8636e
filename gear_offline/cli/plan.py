"""`gear-offline plan`: what a recipe would need on a cluster, and how fast it would be."""

from __future__ import annotations

from typer import Option

from gear_offline.cli.values import Json, Overrides, RecipeName, parse_count, parse_size, print_json
from gear_offline.errors import InputError


def plan(
    recipe: RecipeName,
    overrides: Overrides = None,
    nodes: int = Option(1, min=1, max=65_536, help="Nodes."),
    gpus: int = Option(1, min=1, max=64, help="GPUs per node."),
    nic_gbps: float = Option(400.0, min=0.001, help="Gigabits/s of one network card."),
    nics: int | None = Option(None, min=1, help="Network cards per node; default one per GPU."),
    hardware: str = Option("h200", help="Measured machine, or a YAML file of the same form."),
    host_memory: str | None = Option(None, help="Memory of a node, e.g. 2TB; default as measured."),
    disk_rate: str | None = Option(None, help="Bytes/s of a node's storage, e.g. 20GB."),
    data: str | None = Option(None, help="Assume a dataset of this size in memory, e.g. 100TB."),
    columns: str | None = Option(
        None, help="Data that do not exist yet: observations=uint8[84,84],actions=int64,..."
    ),
    episode_length: str | None = Option(
        None, metavar="COUNT", help="With --columns: steps of an episode."
    ),
    as_json: Json = False,
) -> None:
    """Predict memory, tiers, traffic and times of a recipe on a cluster."""
    from gear_offline.config.recipe import load_recipe

    whole = load_recipe(recipe, overrides or ())
    length = parse_count(episode_length, "--episode-length")
    if length is not None and columns is None:
        what = "--episode-length is for --columns; a dataset has its own episodes"
        raise InputError("USAGE", what, remedy="add --columns, or leave it out")
    from gear_offline.planning.hardware import Cluster, load_hardware
    from gear_offline.planning.plan import plan as run
    from gear_offline.planning.text import print_plan
    from gear_offline.planning.workload import make_workload

    cluster = Cluster(
        nodes=nodes,
        gpus=gpus,
        hardware=load_hardware(hardware),
        nic_bits=nic_gbps * 1e9,
        nics=gpus if nics is None else nics,
        host_memory=None if host_memory is None else parse_size(host_memory),
        disk_rate=None if disk_rate is None else parse_size(disk_rate),
    )
    size = None if data is None else parse_size(data)
    workload = make_workload(whole, data_bytes=size, columns=columns, episode_length=length)
    document = run(whole, workload, cluster)
    if as_json:
        print_json(document)
    else:
        print_plan(document)
