"""The options of a loader, checked once; the ranks, the sampler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from pydantic import ValidationError

from gear_offline.config.problems import problem_text
from gear_offline.config.sections import LoaderSettings
from gear_offline.core.text import plain, say
from gear_offline.distributed.world import World, joined_world
from gear_offline.errors import InputError, UnavailableError
from gear_offline.sampling import Sampler, make_sampler, parse_strategy
from gear_offline.tables.joint import TableData
from gear_offline.tables.table import TableOptions


class LoaderOptions(LoaderSettings):
    """The options of `gear_offline.loaders.loader.GearLoader`: a recipe's section, and more."""

    extra_columns: Sequence[str]

    @cached_property
    def table(self) -> TableOptions:
        """The options of the table."""
        return TableOptions.of(vars(self))


def check_options(given: Mapping[str, Any], device: torch.device) -> LoaderOptions:
    """Return the options among a loader's arguments; refuse what no loader can do."""
    asked = {name: given[name] for name in LoaderOptions.model_fields}
    try:
        options = LoaderOptions(**plain(asked))
    except ValidationError as error:
        raise InputError("LOADER_OPTION", problem_text(error.errors()[0])) from error
    if options.engine == "on" and device.type != "cuda":
        raise no_engine(f"engine='on' needs a CUDA device, batches go to {device}")
    if options.placement == "disk" and options.engine == "on":
        raise bad_option("placement", "disk", "engine='auto' or 'off' with rows on disk")
    for name, value in (("placement", "disk"), ("sharding", "shard")):
        if options.goals is not None and getattr(options, name) == value:
            raise bad_option(name, value, f"{name}='auto' with goals, which may be any row")
    return options


def bad_option(name: str, value: object, allowed: str) -> InputError:
    """Return the error ``LOADER_OPTION`` for an option's value."""
    return InputError("LOADER_OPTION", f"{name}={value!r} is not usable", remedy=f"use {allowed}")


def no_engine(what: str) -> UnavailableError:
    """Return the error ``DEVICE`` where the GPU does not gather."""
    remedy = "use device='cuda' and engine='on', which says what is missing; or engine='auto'"
    return UnavailableError("DEVICE", what, remedy=remedy)


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
        what = f"strategy {name!r} was made for other episodes ({index.episodes} of {index.steps} "
        what += f"steps) than the dataset has ({episodes.episodes} of {episodes.steps})"
        remedy = f"make it of this dataset: make_sampler({name!r}, dataset, ...)"
        raise InputError("LOADER_OPTION", what, remedy=remedy)
    if selection.context_length not in (None, context_length):
        what = f"strategy {name!r} was made for windows of {selection.context_length} steps, "
        what += f"context_length={context_length} is not usable with it"
        remedy = f"make it with context_length={context_length}"
        raise InputError("LOADER_OPTION", what, remedy=remedy)
    return selection


def _named(selection: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the strategy and options of a text or of a recipe's section."""
    if isinstance(selection, str):
        return parse_strategy(selection)
    section = dict(selection)
    name, options = section.pop("strategy", None), section.pop("options", section)
    if not isinstance(name, str) or not isinstance(options, Mapping):
        raise bad_option("selection", selection, "{'strategy': NAME, OPTION: VALUE}")
    return name, dict(options)
