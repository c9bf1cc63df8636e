"""The rates of a machine, measured once, from which a plan is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gear_offline.config.strict_yaml import parse_yaml
from gear_offline.errors import InputError

__all__ = ["Hardware", "hardware_names", "load_hardware"]

HARDWARE = Path(__file__).resolve().parent / "hardware.yaml"

Rate = Annotated[float, Field(gt=0.0)]
Seconds = Annotated[float, Field(ge=0.0)]


class _Part(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )


class Gpu(_Part):
    """One GPU."""

    memory: Rate
    """Bytes that can be allocated."""
    matrix_rate: Rate
    """FLOP/s of bfloat16 matrix products as they occur in a training step."""
    matrix_rate_fp32: Rate
    """The same in float32."""
    convolution_rate: Rate
    """FLOP/s of encoding frames."""
    memory_rate: Rate
    """Bytes/s read and written within GPU memory."""
    kernel: Seconds
    """Least seconds of one kernel in a captured graph."""
    launch: Seconds
    """Seconds a kernel where the host launches one by one."""
    host_step: Seconds
    """Seconds of Python in such a step, beside the launches."""


class Reads(_Part):
    """Random reads from a tier by one GPU: the slower of two limits holds."""

    windows: Rate
    """Windows/s."""
    bytes: Rate
    """Bytes/s."""


class Gather(_Part):
    """Gathering batches."""

    hbm: Reads
    peer: Reads
    host: Reads
    launch: Seconds
    """Seconds of a small batch."""
    host_node: Rate
    """Bytes/s that all GPUs of a node get together from its host memory."""


class Transfer(_Part):
    """Between GPUs and nodes."""

    allreduce: Rate
    """Bus bandwidth within a node, bytes/s."""
    latency: Seconds
    """Of one collective."""
    nic_share: Annotated[float, Field(gt=0.0, le=1.0)]
    """Of a network card's rate that arrives."""


class Storage(_Part):
    """Where the data come from."""

    disk: Rate
    """Sequential reads of a node, bytes/s."""
    load: Rate
    """Shards verified and laid out in host memory, bytes/s of a node."""
    upload: Rate
    """Host memory to one GPU, bytes/s."""
    page_lock: Rate
    """Bytes/s of making host memory visible to GPUs."""
    host_memory: Rate
    """Bytes of a node."""


class Start(_Part):
    """Seconds until the first step, data apart."""

    process: Seconds
    compile: Seconds
    compile_deep: Seconds
    graph: Seconds
    group: Seconds


class Hardware(_Part):
    """A node's parts."""

    gpu: Gpu
    gather: Gather
    transfer: Transfer
    storage: Storage
    start: Start


def hardware_names() -> list[str]:
    """Return the machines that come with gear-offline."""
    return sorted(_read(HARDWARE))


def load_hardware(name_or_file: str) -> Hardware:
    """Return a machine by name, or the first one of a YAML file of the same form.

    Raises
    ------
    InputError
        ``PLAN_HARDWARE``
    """
    known = _read(HARDWARE)
    path = Path(name_or_file)
    if name_or_file in known:
        found, where = known[name_or_file], f"{HARDWARE.name}: {name_or_file}"
    elif path.is_file():
        found, where = next(iter(_read(path).values()), None), str(path)
    else:
        raise InputError(
            "PLAN_HARDWARE",
            f"no machine {name_or_file!r}",
            where="--hardware",
            remedy=f"use {', '.join(sorted(known))}, or a file like {HARDWARE}",
        )
    try:
        return Hardware.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        if first["type"] in ("model_type", "model_attributes_type", "dict_type"):
            problem = f"{place or 'the machine'} is not a section of `key: value` lines"
        else:
            problem = f"{place}: {first['msg'].lower()}"
        raise InputError(
            "PLAN_HARDWARE",
            problem,
            where=where,
            remedy=f"write it like {HARDWARE}",
        ) from None


def _read(path: Path) -> dict[str, object]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            "PLAN_HARDWARE", f"it cannot be read ({error})", where=str(path), remedy="give a file"
        ) from None
    try:
        found = parse_yaml(text, where=str(path))
    except InputError as error:
        raise InputError("PLAN_HARDWARE", str(error)) from None
    if not isinstance(found, dict):
        raise InputError(
            "PLAN_HARDWARE",
            "it names no machine",
            where=str(path),
            remedy=f"write it like {HARDWARE}",
        )
    return {str(name): value for name, value in found.items()}
