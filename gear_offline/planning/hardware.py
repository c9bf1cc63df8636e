"""The rates of a machine, measured once, from which a plan is computed: see hardware.yaml."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gear_offline.config.strict_yaml import parse_yaml
from gear_offline.errors import InputError

HARDWARE = Path(__file__).resolve().parent / "hardware.yaml"

Rate = Annotated[float, Field(gt=0.0)]
Seconds = Annotated[float, Field(ge=0.0)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Gpu(_Part):
    memory: Rate
    matrix_rate: Rate
    matrix_rate_fp32: Rate
    convolution_rate: Rate
    memory_rate: Rate
    kernel: Seconds
    launch: Seconds
    host_step: Seconds


class Reads(_Part):
    """Random reads from a tier by one GPU: the slower limit holds."""

    windows: Rate
    bytes: Rate


class Gather(_Part):
    hbm: Reads
    peer: Reads
    host: Reads
    launch: Seconds
    host_node: Rate  # of all GPUs of a node together


class Transfer(_Part):
    allreduce: Rate
    latency: Seconds
    nic_share: Annotated[float, Field(gt=0.0, le=1.0)]


class Storage(_Part):
    disk: Rate
    load: Rate
    upload: Rate
    page_lock: Rate
    host_memory: Rate


class Start(_Part):
    process: Seconds
    compile: Seconds
    compile_deep: Seconds
    graph: Seconds
    group: Seconds


class Hardware(_Part):
    """A node's parts, in bytes, seconds and their ratios; hardware.yaml says what each means."""

    gpu: Gpu
    gather: Gather
    transfer: Transfer
    storage: Storage
    start: Start


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """What the recipe would run on."""

    nodes: int
    gpus: int  # of a node
    hardware: Hardware  # of a node
    nic_bits: float = 400e9  # bits/s of one network card
    nics: int = 1  # network cards of a node
    host_memory: float | None = None  # bytes of a node, if not the hardware's
    disk_rate: float | None = None  # bytes/s of a node's storage, if not the hardware's

    @property
    def node_rate(self) -> float:
        """Bytes/s between a node and the others."""
        return self.nic_bits / 8 * self.nics * self.hardware.transfer.nic_share

    @property
    def memory(self) -> float:
        return self.host_memory or self.hardware.storage.host_memory

    @property
    def storage_rate(self) -> float:
        return self.disk_rate or self.hardware.storage.disk


def load_hardware(name_or_file: str) -> Hardware:
    """Return a machine by name, or the first one of a YAML file of the same form."""
    known, path = _read(HARDWARE), Path(name_or_file)
    if name_or_file not in known and not path.is_file():
        raise _unusable(f"no machine {name_or_file!r} (there are: {', '.join(known)})")
    try:
        machine = known.get(name_or_file) or next(iter(_read(path).values()), None)
        return Hardware.model_validate(machine)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the machine"
        raise _unusable(f"{name_or_file}: {place}: {first['msg'].lower()}") from None


def _read(path: Path) -> dict[str, object]:
    try:
        machines = parse_yaml(path.read_text(encoding="utf-8"), where=str(path))
    except (OSError, UnicodeDecodeError, InputError) as error:
        raise _unusable(f"{path} cannot be read ({error})") from None
    if not isinstance(machines, dict):
        raise _unusable(f"{path} names no machine")
    return machines


def _unusable(what: str) -> InputError:
    return InputError("USAGE", what, where="--hardware", remedy=f"give a file like {HARDWARE}")
