"""What a loader is asked for: options, checked once; the ranks, the sampler."""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Real
from typing import Any, Literal, get_args

import numpy as np
import torch

from gear_offline.distributed.world import World, joined_world
from gear_offline.errors import InputError, UnavailableError
from gear_offline.kernels.gather import Padding
from gear_offline.progress import say
from gear_offline.sampling import Sampler, make_sampler, parse_strategy
from gear_offline.tables.joint import TableData

Mode = Literal["auto", "on", "off"]
Placement = Literal["auto", "hbm", "peer", "host", "disk"]
Sharding = Literal["auto", "replicate", "shard"]

CHOICES = {
    "padding": Padding,
    "engine": Mode,
    "exchange": Mode,
    "sharding": Sharding,
    "placement": Placement,
}
MAX_FRAME_STACK = 64
ELSEWHERE = {  # arguments of other libraries' loaders
    "shuffle": "batches are random already; selection='shuffled_epochs' takes each start once",
    "sampler": "it is called selection: a strategy's name, or what make_sampler(...) returns",
    "strategy": "it is called selection",
    "num_workers": "none are needed: several batches are made in one pass",
    "drop_last": "batches have no end; each has batch_size segments",
    "collate_fn": "a batch is tensors already; extra_columns=[...] names further columns",
    **dict.fromkeys(("seq_len", "sequence_length", "K"), "it is called context_length"),
    **dict.fromkeys(("discount", "discount_factor"), "it is called gamma"),
    **dict.fromkeys(("scale", "rtg_scale"), "it is called returns_scale"),
}


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """The options of `gear_offline.loaders.loader.GearLoader` that say how batches are made."""

    batch_size: int
    context_length: int
    padding: Padding
    gamma: float
    returns_scale: float
    normalize_states: bool
    extra_columns: Sequence[str]
    frame_stack: int
    engine: Mode
    placement: Placement
    hbm_budget: int | None
    host_budget: int | None
    sharding: Sharding
    exchange: Mode

    def checked(self, device: torch.device) -> LoaderOptions:
        """Return plain values; raises ``LOADER_OPTION`` for what no loader can do."""
        for name, choices in CHOICES.items():
            if getattr(self, name) not in get_args(choices):
                allowed = ", ".join(get_args(choices))
                raise bad_option(name, getattr(self, name), f"one of {allowed}")
        if not (isinstance(self.gamma, Real) and 0 <= self.gamma <= 1):
            raise bad_option("gamma", self.gamma, "a number from 0 to 1")
        scale = self.returns_scale
        if not (isinstance(scale, Real) and math.isfinite(scale) and scale > 0):
            raise bad_option("returns_scale", scale, "a positive number")
        columns = self.extra_columns
        if isinstance(columns, str) or not isinstance(columns, Sequence):
            raise bad_option("extra_columns", columns, "a list of columns, or [] for none")
        if self.engine == "on" and device.type != "cuda":
            raise no_engine(f"engine='on' needs a CUDA device, batches go to {device}")
        if self.placement == "disk" and self.engine == "on":
            raise bad_option("placement", "disk", "engine='auto' or 'off' with rows on disk")
        return replace(
            self,
            batch_size=_whole("batch_size", self.batch_size),
            context_length=_whole("context_length", self.context_length),
            frame_stack=_whole("frame_stack", self.frame_stack, MAX_FRAME_STACK),
            host_budget=_bytes("host_budget", self.host_budget, 1),
            hbm_budget=_bytes("hbm_budget", self.hbm_budget, 0),
            gamma=float(self.gamma),
            returns_scale=float(scale),
            normalize_states=bool(self.normalize_states),
            extra_columns=tuple(columns),
        )

    @property
    def window_rows(self) -> int:
        """Rows that a window takes, with its history; so many are a table's margin."""
        return self.context_length + self.frame_stack - 1

    @property
    def sizes(self) -> dict[str, Any]:
        """What the size of a table depends on."""
        names = ("context_length", "normalize_states", "extra_columns", "frame_stack")
        return {name: getattr(self, name) for name in names}

    @property
    def values(self) -> dict[str, Any]:
        """What the content of a table depends on."""
        return self.sizes | {"gamma": self.gamma, "returns_scale": self.returns_scale}


KEYWORDS = (
    *(field.name for field in fields(LoaderOptions)),
    *("selection", "seed", "device", "start_step", "world", "table"),
)


def bad_option(name: str, value: object, allowed: str) -> InputError:
    """Return the error ``LOADER_OPTION`` for an option's value."""
    return InputError("LOADER_OPTION", f"{name}={value!r} is not usable", remedy=f"use {allowed}")


def no_engine(what: str) -> UnavailableError:
    """Return the error ``DEVICE`` where the GPU does not gather."""
    return UnavailableError(
        "DEVICE",
        what,
        remedy="use device='cuda' and engine='on', which says what is missing; or engine='auto'",
    )


def _whole(name: str, value: object, most: int | None = None) -> int:
    """Return a whole number from 1 to `most`, of Python or NumPy."""
    try:
        number = 0 if isinstance(value, bool | np.bool_) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = 0
    if number < 1 or (most is not None and number > most):
        allowed = "of at least 1" if most is None else f"from 1 to {most}"
        raise bad_option(name, value, f"an integer {allowed}")
    return number


def _bytes(name: str, value: object, least: int) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise bad_option(name, value, f"bytes from {least}, such as 4 << 30, or None")
    return int(value)


def find_world(world: World | Literal["auto"] | None, global_batch: int) -> World:
    """Return the ranks that share batches; with ``"auto"`` say on the first one who they are."""
    if isinstance(world, World):
        return world
    if world is None:
        return World()
    if world != "auto":
        raise bad_option("world", world, "'auto', None, or what open_world() gives")
    joined = joined_world()
    if joined.size > 1:
        say(
            f"world auto: {joined.size} ranks share each batch of {global_batch} segments, "
            f"{joined.rank_batch(global_batch)} each; world=None would read the same batches in "
            "each",
            quiet=not joined.is_first,
        )
    return joined


def choose_sampler(
    selection: str | Mapping[str, Any] | Sampler,
    dataset: TableData,
    context_length: int,
    padding: str,
) -> Sampler:
    """Return the sampler of a loader, made if it is named, else checked to fit it."""
    if isinstance(selection, str | Mapping):
        name, options = _named(selection)
        selection = make_sampler(name, dataset, context_length=context_length, **options)
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


def _named(selection: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the strategy and options of a text or of a recipe's section."""
    if isinstance(selection, str):
        return parse_strategy(selection)
    given = dict(selection)
    name, options = given.pop("strategy", None), given.pop("options", given)
    if not isinstance(name, str) or not isinstance(options, Mapping):
        raise bad_option("selection", selection, "{'strategy': NAME, OPTION: VALUE}")
    return name, dict(options)


def check_keywords(positional: Sequence[Any], unknown: Mapping[str, Any]) -> None:
    """Refuse arguments that the loader does not have, with a hint to its own."""
    if positional:
        raise InputError(
            "LOADER_OPTION",
            "all arguments but the dataset and batch_size are given by name",
            remedy=f"GearLoader(dataset, batch_size=64, context_length={positional[0]!r})",
        )
    for name in unknown:
        near = difflib.get_close_matches(name, KEYWORDS, n=1)
        hint = ELSEWHERE.get(name) or (
            f"did you mean {near[0]}?" if near else "see help(GearLoader)"
        )
        raise InputError("LOADER_OPTION", f"a GearLoader has no argument {name!r}", remedy=hint)
