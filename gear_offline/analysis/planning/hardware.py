"""The rates of a machine, measured once, from which a plan is computed: see hardware.yaml."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat

from gear_offline.config.strict_yaml import parse_yaml, read_yaml
from gear_offline.core.text import first_line
from gear_offline.errors import InputError, in_home

HARDWARE = Path(__file__).resolve().parent / "hardware.yaml"


class _Rates(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Gpu(_Rates):
    memory: PositiveFloat
    matrix_rate: PositiveFloat
    matrix_rate_fp32: PositiveFloat
    matrix_rate_fp8: PositiveFloat | None = None  # None: it has no such products
    convolution_rate: PositiveFloat
    memory_rate: PositiveFloat
    kernel: NonNegativeFloat
    launch: NonNegativeFloat
    host_step: NonNegativeFloat


class ReadRates(_Rates):
    """Random reads from a tier by one GPU: the slower limit holds."""

    windows: PositiveFloat
    bytes: PositiveFloat


class Gather(_Rates):
    hbm: ReadRates
    peer: ReadRates
    host: ReadRates
    launch: NonNegativeFloat
    host_node: PositiveFloat  # of all GPUs of a node together


class Transfer(_Rates):
    allreduce: PositiveFloat
    gloo: PositiveFloat
    latency: NonNegativeFloat
    nic_share: Annotated[float, Field(gt=0.0, le=1.0)]


class Storage(_Rates):
    disk: PositiveFloat
    load: PositiveFloat
    upload: PositiveFloat
    page_lock: PositiveFloat
    host_memory: PositiveFloat


class Start(_Rates):
    process: NonNegativeFloat
    compile: NonNegativeFloat
    compile_deep: NonNegativeFloat
    graph: NonNegativeFloat
    group: NonNegativeFloat


class Hardware(_Rates):
    """A node's parts, in bytes, seconds and their ratios; hardware.yaml explains each."""

    gpu: Gpu
    gather: Gather
    transfer: Transfer
    storage: Storage
    start: Start


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The cluster that the recipe would run on."""

    nodes: int
    gpus: int  # of a node
    hardware: Hardware  # of a node
    nic_bits: float = 400e9  # bits/s of one network card, of which there is one for each GPU
    host_memory: float | None = None  # bytes of a node, if not the hardware's
    disk_rate: float | None = None  # bytes/s of a node's storage, if not the hardware's

    @property
    def node_rate(self) -> float:
        """Bytes/s between a node and the others."""
        return self.nic_bits / 8 * self.gpus * self.hardware.transfer.nic_share

    @property
    def memory(self) -> float:
        return self.host_memory or self.hardware.storage.host_memory

    @property
    def storage_rate(self) -> float:
        return self.disk_rate or self.hardware.storage.disk


def load_hardware(name_or_file: str) -> Hardware:
    """Return a machine by name, or the first one of a YAML file of the same form."""
    machines: Any = read_yaml(HARDWARE)
    try:
        machine = machines.get(name_or_file)
        if machine is None:
            text = Path(in_home(name_or_file)).read_text(encoding="utf-8")
            machine = next(iter(dict(parse_yaml(text, where=name_or_file)).values()), None)
        return Hardware.model_validate(machine)
    except (OSError, TypeError, ValueError) as error:
        problem = f"{name_or_file} is neither a known machine ({', '.join(machines)}) nor a YAML "
        problem += f"file of one: {first_line(error)}"
        raise InputError("USAGE", problem, "--hardware", f"give a file like {HARDWARE}") from error
