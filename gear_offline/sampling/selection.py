"""Which segments make up a batch: laws that are pure functions of (seed, step).

A selection has no hidden state.  ``select(seed=s, step=t, count=B)`` names the B segments of step
``t`` whoever asks, whenever, in whatever order, on any device; resuming is setting the step
number.  The random numbers come from the counter-based generator of
`gear_offline.kernels.philox`: slot ``b`` of step ``t`` uses its own block, so batches of different
size agree on their common slots (but for laws without replacement, which count slots).

This module is the public way in; the laws are in `gear_offline.sampling`, described in
docs/strategies.md.
"""

from __future__ import annotations

import numpy as np

import gear_offline.sampling.implementations as _implementations
import gear_offline.sampling.mixture as _mixture
import gear_offline.sampling.ordered as _ordered
import gear_offline.sampling.prioritized as _prioritized
import gear_offline.sampling.weighted as _weighted
from gear_offline.dataset.schema import EpisodeIndex
from gear_offline.errors import InputError
from gear_offline.sampling.base import _FACTORIES as _FACTORIES
from gear_offline.sampling.base import SELECTION_STREAM as SELECTION_STREAM
from gear_offline.sampling.base import (
    Factory,
    Facts,
    HasDensity,
    HasEpisodes,
    Segments,
    Selection,
    SlotLaw,
    check_range,
    make_selection,
    misfit,
    option_names,
    register,
    selection_names,
)
from gear_offline.sampling.base import StepLocator as StepLocator
from gear_offline.sampling.prioritized import LearnsFromLosses, importance_weights, learner_of
from gear_offline.sampling.uniform import UniformEpisodes, UniformSteps
from gear_offline.sampling.weighted import WeightedEpisodes

__all__ = [
    "Factory",
    "Facts",
    "HasDensity",
    "HasEpisodes",
    "LearnsFromLosses",
    "Segments",
    "Selection",
    "SlotLaw",
    "UniformEpisodes",
    "UniformSteps",
    "WeightedEpisodes",
    "check_range",
    "importance_weights",
    "learner_of",
    "make_selection",
    "misfit",
    "option_names",
    "padding_of",
    "register",
    "selection_names",
]


def padding_of(name: str) -> str | None:
    """Return the side on which the strategy `name` pads; None where any will do."""
    found = getattr(_FACTORIES.get(name), "padding", None)
    return found if isinstance(found, str) else None


def selection_for(
    selection: str | Selection, data: HasEpisodes, context_length: int, padding: str
) -> Selection:
    """Return the selection of a loader, made by name without options if it is a name.

    Raises
    ------
    InputError
        ``LOADER_OPTION`` if the law belongs to the other padding, to other episodes or to windows
        of another length, or is none; those of `make_selection`.
    """
    if isinstance(selection, str):
        selection = make_selection(selection, data, context_length=context_length)
    if not all(hasattr(selection, name) for name in ("name", "options", "select_many")):
        raise InputError(
            "LOADER_OPTION",
            f"selection={selection!r} is not usable",
            remedy="give the name of a strategy, or what make_selection(...) returns",
        )
    wanted = getattr(selection, "padding", padding)
    if wanted != padding:
        raise InputError(
            "LOADER_OPTION",
            f"padding={padding!r} is not usable with strategy {selection.name!r}",
            remedy=f"use padding={wanted!r}, as {selection.name!r} pads",
        )
    for law in (selection, *getattr(selection, "parts", ())):
        _check_made_for(law, data.episodes, context_length)
    return selection


def _check_made_for(law: Selection, episodes: EpisodeIndex, context_length: int) -> None:
    """Refuse a law over other episodes than the first ones here, or of other windows."""
    index, span = getattr(law, "index", None), getattr(law, "context_length", context_length)
    if isinstance(index, EpisodeIndex) and not np.array_equal(
        index.lengths, episodes.lengths[: index.episodes]
    ):
        raise InputError(
            "LOADER_OPTION",
            f"strategy {law.name!r} was made for other episodes ({index.episodes} of "
            f"{index.steps} steps) than the dataset has ({episodes.episodes} of {episodes.steps})",
            remedy=f"make it of this dataset: make_selection({law.name!r}, dataset, ...)",
        )
    if span != context_length:
        raise InputError(
            "LOADER_OPTION",
            f"strategy {law.name!r} was made for windows of {span} steps, "
            f"context_length={context_length} is not usable with it",
            remedy=f"make it with context_length={context_length}",
        )


# Importing a module of laws registers them.
_LAWS = (_implementations, _mixture, _ordered, _prioritized, _weighted)
