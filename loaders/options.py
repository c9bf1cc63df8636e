"""What the options of a loader may be."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, Literal

import numpy as np
import torch

from gear_offline.distributed.world import World
from gear_offline.errors import InputError, UnavailableError
from gear_offline.sampling import Sampler, make_sampler
from gear_offline.sampling.base import plain
from gear_offline.tables.joint import Source
from gear_offline.tables.table import Table

MAX_FRAME_STACK = 64


def resolve_device(device: str | torch.device) -> torch.device:
    """Return the torch device; ``"auto"`` is CUDA where there is one.

    Raises
    ------
    UnavailableError
        ``DEVICE``
    InputError
        ``LOADER_OPTION`` if torch does not know the name.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise bad_option("device", device, "'auto', 'cpu', 'cuda' or 'cuda:0'") from error
    if found.type not in ("cpu", "cuda"):
        try:
            torch.zeros(1, device=found).cpu()
        except (RuntimeError, AssertionError, ImportError, AttributeError) as error:
            known = "one that torch has here, such as 'auto', 'cpu' or 'cuda'"
            raise bad_option("device", device, known) from error
    if found.type == "cuda" and not torch.cuda.is_available():
        raise UnavailableError(
            "DEVICE",
            f"device {str(device)!r} was asked for and no CUDA device is available",
            remedy="use device='auto' or 'cpu', or run gear-offline doctor",
        )
    return found


def check_options(
    *,
    batch_size: int,
    context_length: int,
    frame_stack: int,
    padding: Literal["right", "left"],
    gamma: float,
    returns_scale: float,
    engine: str,
    exchange: str = "auto",
    world: object = None,
    extra_columns: Sequence[str] = (),
) -> tuple[int, int, int]:
    """Refuse what no loader can do; return the three whole numbers as plain ones.

    Raises
    ------
    InputError
        ``LOADER_OPTION``
    """
    batch = _whole("batch_size", batch_size, None)
    context = _whole("context_length", context_length, None)
    stack = _whole("frame_stack", frame_stack, MAX_FRAME_STACK)
    if padding not in ("right", "left"):
        raise bad_option("padding", padding, "'right' or 'left'")
    if not (isinstance(gamma, Real) and 0.0 <= gamma <= 1.0):
        raise bad_option("gamma", gamma, "a number from 0 to 1")
    if not (isinstance(returns_scale, Real) and math.isfinite(returns_scale) and returns_scale > 0):
        raise bad_option("returns_scale", returns_scale, "a positive number")
    for name, chosen in (("engine", engine), ("exchange", exchange)):
        if chosen not in ("auto", "on", "off"):
            raise bad_option(name, chosen, "'auto', 'on' or 'off'")
    if world is not None and not isinstance(world, World):
        raise bad_option(
            "world", world, "a gear_offline.distributed.world.World, or None for one process"
        )
    if isinstance(extra_columns, str):
        raise bad_option("extra_columns", extra_columns, f"a list: [{extra_columns!r}]")
    if not isinstance(extra_columns, Iterable):
        raise bad_option("extra_columns", extra_columns, "a list of columns, or [] for none")
    return batch, context, stack


def choose_sampler(
    selection: str | Sampler, dataset: Source, context_length: int, padding: str
) -> Sampler:
    """Return the sampler of a loader, made without options if it is given by name.

    Raises
    ------
    InputError
        ``LOADER_OPTION`` if the sampler belongs to the other padding, to other episodes or to
        windows of another length, or is none; those of `make_sampler`.
    """
    if isinstance(selection, str):
        selection = make_sampler(selection, dataset, context_length=context_length)
    if not isinstance(selection, Sampler):
        known = "the name of a strategy, or what make_sampler(...) returns"
        raise bad_option("selection", selection, known)
    name, index, episodes = selection.name, selection.index, dataset.episodes
    if selection.padding not in (None, padding):
        what = f"padding={padding!r} is not usable with strategy {name!r}"
        raise InputError("LOADER_OPTION", what, remedy=f"use padding={selection.padding!r}")
    if not np.array_equal(index.lengths, episodes.lengths[: index.episodes]):
        raise InputError(
            "LOADER_OPTION",
            f"strategy {name!r} was made for other episodes ({index.episodes} of {index.steps} "
            f"steps) than the dataset has ({episodes.episodes} of {episodes.steps})",
            remedy=f"make it of this dataset: make_sampler({name!r}, dataset, ...)",
        )
    if selection.context_length not in (None, context_length):
        raise InputError(
            "LOADER_OPTION",
            f"strategy {name!r} was made for windows of {selection.context_length} steps, "
            f"context_length={context_length} is not usable with it",
            remedy=f"make it with context_length={context_length}",
        )
    return selection


def _whole(name: str, value: object, most: int | None) -> int:
    """Return a whole number from 1 to `most`, of Python or NumPy."""
    try:
        found = 0 if isinstance(value, bool | np.bool_) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        found = 0
    if found < 1 or (most is not None and found > most):
        allowed = "of at least 1" if most is None else f"from 1 to {most}"
        raise bad_option(name, value, f"an integer {allowed}")
    return found


def bad_option(name: str, value: object, allowed: str) -> InputError:
    """Return the error ``LOADER_OPTION`` for an option's value."""
    return InputError("LOADER_OPTION", f"{name}={value!r} is not usable", remedy=f"use {allowed}")


def check_state(state: Mapping[str, Any], identity: Mapping[str, Any], state_format: int) -> int:
    """Return the step of a loader's saved state.

    Raises
    ------
    InputError
        ``LOADER_STATE`` if it is damaged or belongs to another stream of batches than `identity`.
    """
    if not isinstance(state, Mapping):
        state = {}
    step = state.get("step")
    if state.get("format") != state_format or type(step) is not int or not 0 <= step < 1 << 63:
        raise InputError(
            "LOADER_STATE",
            f"not a loader state of format {state_format}",
            remedy="pass what GearLoader.state_dict() returned",
        )
    saved = {"frame_stack": 1, **state}  # states of 0.1 do not say it
    differ = [
        f"{key} is {mine!r} here and {saved.get(key)!r} in the state"
        for key, mine in identity.items()
        if plain(saved.get(key)) != mine
    ]
    if differ:
        raise InputError(
            "LOADER_STATE",
            f"the state belongs to another stream of batches: {'; '.join(differ)}",
            remedy="build the loader with the saved options, or start without the state",
        )
    return step


def no_engine(what: str) -> UnavailableError:
    """Return the error ``ENGINE_OFF``."""
    return UnavailableError(
        "ENGINE_OFF",
        what,
        remedy="use device='cuda' and engine='on', which says what is missing; or engine='auto'",
    )


def check_table(table: Table, source: Source, context_length: int, frame_stack: int) -> None:
    """Refuse a table of other episodes, or for other windows (``LOADER_OPTION``)."""
    same = np.array_equal(table.episodes.lengths, source.episodes.lengths)
    if not same or table.margin != context_length + frame_stack - 1:
        raise InputError(
            "LOADER_OPTION",
            "the table is not one of this dataset for these windows",
            remedy="give build_table the same dataset, context_length and frame_stack",
        )


def need_rows(table: Table) -> None:
    """Refuse a table whose rows are in a GPU's memory alone (``LOADER_OPTION``)."""
    if not table.owned_bytes:
        raise InputError(
            "LOADER_OPTION",
            "the rows of the table are in a GPU's memory alone",
            remedy="build one with build_table and give it to all loaders",
        )


def window_bytes(table: Table, context_length: int) -> int:
    """Return the bytes that a window of `context_length` steps takes while it is gathered."""
    rows = sum(
        (context_length + group.history)
        * group.width
        * max(group.dtype.itemsize, max(field.dtype.itemsize for field in group.fields))
        for group in table.groups
    )
    return rows + 16 * context_length  # timesteps and mask
