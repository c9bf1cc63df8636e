"""What the kernels are told of a law: `Rule` of ``cuda/rule.cuh`` as a NumPy row.

Shape legend: E episodes, N steps, P parts of a mixture.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from gear_offline.dataset.schema import EpisodeIndex
from gear_offline.errors import UnavailableError
from gear_offline.kernels.arrays import DeviceArrays
from gear_offline.kernels.tree_job import TREE
from gear_offline.sampling.implementations import D3rlpy, MinDecisionTransformer
from gear_offline.sampling.mixture import Mixture
from gear_offline.sampling.ordered import FirstInFirstOut, LastInFirstOut, ShuffledEpochs
from gear_offline.sampling.prioritized import Prioritized
from gear_offline.sampling.selection import Selection
from gear_offline.sampling.uniform import UniformEpisodes, UniformSteps
from gear_offline.sampling.weighted import StratifiedReturn, WeightedEpisodes

MakeTree = Callable[[Prioritized], Any]  # returns a `TREE` row of the law's masses

RULE = np.dtype(
    [
        *((name, np.int64) for name in ("law", "size", "bits")),
        ("value", np.float64),
        *((name, np.uint64) for name in ("lengths", "offsets", "guide", "shift", "thresholds")),
        *((name, np.uint64) for name in ("members", "chances", "groups", "begins", "counts")),
        ("tree", TREE),
        *((name, np.uint64) for name in ("parts", "part_count", "points", "point_count", "sums")),
    ]
)
UNIFORM_STEPS, UNIFORM_EPISODES, CHOSEN, WEIGHTED_EPISODES, STRATIFIED = range(5)
FIFO, LIFO, SHUFFLED, MIN_DT, D3RLPY, PRIORITIZED, MIXTURE = range(5, 12)
PLAIN: Final = (UNIFORM_STEPS, UNIFORM_EPISODES, WEIGHTED_EPISODES)  # fill.cu has these
# Laws whose subclasses draw alike unless they say how.
_FAMILIES: Final[tuple[tuple[type[Any], int], ...]] = (
    (UniformSteps, UNIFORM_STEPS),
    (UniformEpisodes, UNIFORM_EPISODES),
    (WeightedEpisodes, WEIGHTED_EPISODES),
    (StratifiedReturn, STRATIFIED),
)
_EXACTLY: Final[dict[type[Any], int]] = {
    FirstInFirstOut: FIFO,
    LastInFirstOut: LIFO,
    ShuffledEpochs: SHUFFLED,
    MinDecisionTransformer: MIN_DT,
    D3rlpy: D3RLPY,
    Prioritized: PRIORITIZED,
    Mixture: MIXTURE,
}


def law_number(selection: Selection) -> int:
    """Return the kernels' number of a law.

    Raises
    ------
    UnavailableError
        ``ENGINE_SELECTION`` for a law, or a part of a mixture, that they do not have.
    """
    kind = type(selection)
    for family, number in _FAMILIES:
        if isinstance(selection, family) and kind.select_many is family.select_many:
            return number
    mixed = isinstance(selection, Mixture) and kind.select_many is Mixture.select_many
    if kind not in _EXACTLY and not mixed:
        raise UnavailableError(
            "ENGINE_SELECTION",
            f"the GPU engine has no kernel for selection {selection.name!r}",
            remedy="use one of the package's laws, a law of weighted episodes, or engine='off'",
        )
    if isinstance(selection, Mixture):
        for part in selection.parts:
            law_number(part)
        return MIXTURE
    return _EXACTLY[kind]


def describe_rule(
    selection: Any, *, arrays: DeviceArrays, make_tree: MakeTree, context_length: int
) -> Any:
    """Return the `RULE` row of a law.

    Parameters
    ----------
    selection
        A law of which `law_number` has the number.
    arrays
        Takes the law's arrays to where the kernel runs.
    make_tree
        Returns the tree of a prioritised law.
    context_length
        K.

    Raises
    ------
    UnavailableError
        ``ENGINE_SELECTION``, also for a law that was made for another K.
    """
    number, index = law_number(selection), index_of(selection)
    rule = np.zeros((), RULE)
    rule["law"] = number
    rule["lengths"] = rule["offsets"] = arrays.keep(index.offsets)
    if number == MIXTURE:
        _describe_mixture(rule, selection, arrays, make_tree, context_length)
        return rule
    rule["size"] = index.steps
    if number in (UNIFORM_EPISODES, MIN_DT):
        rule["size"] = index.episodes
    elif number == WEIGHTED_EPISODES:
        rule["thresholds"] = arrays.keep(selection.thresholds.table)
        rule["size"] = selection.thresholds.last + 1  # those behind it are never drawn
    elif number == STRATIFIED:
        _describe_strata(rule, selection, arrays)
    elif number == D3RLPY:
        rule["members"], rule["size"] = arrays.keep(selection.members), selection.ends.steps
        rule["offsets"] = arrays.keep(selection.ends.offsets)
    elif number == PRIORITIZED:
        rule["tree"] = make_tree(selection)
    rule["bits"] = max((int(rule["size"]) - 1).bit_length(), 2)
    rule["value"] = 1.0 if number in (FIFO, LIFO) else 1.0 / int(rule["size"])
    if number not in (UNIFORM_EPISODES, WEIGHTED_EPISODES, STRATIFIED, MIN_DT):
        located = selection.ends.offsets if number == D3RLPY else index.offsets
        rule["guide"], rule["shift"] = arrays.guide(located)
    if getattr(selection, "context_length", context_length) != context_length:
        raise UnavailableError(
            "ENGINE_SELECTION",
            f"strategy {selection.name!r} was made for windows of {selection.context_length} steps",
            remedy=f"make it with context_length={context_length}",
        )
    return rule


def index_of(selection: Any) -> EpisodeIndex:
    """Return the episodes that a law draws from."""
    if isinstance(selection, Mixture):
        return index_of(selection.parts[0])
    index: EpisodeIndex = selection.index
    return index


def _describe_strata(rule: Any, law: StratifiedReturn, arrays: DeviceArrays) -> None:
    sizes = np.array([members.size for members in law.members], dtype=np.int64)
    rule["members"] = arrays.keep(np.concatenate(law.members).astype(np.int64))
    rule["thresholds"] = arrays.keep(np.concatenate([stratum.table for stratum in law.thresholds]))
    rule["counts"] = arrays.keep(np.array([t.last + 1 for t in law.thresholds], dtype=np.int64))
    rule["begins"] = arrays.keep(np.cumsum(sizes) - sizes)
    rule["groups"] = len(law.members)
    rule["chances"] = arrays.keep(law.chances)


def _describe_mixture(
    rule: Any, law: Mixture, arrays: DeviceArrays, make_tree: MakeTree, context_length: int
) -> None:
    parts = [
        describe_rule(part, arrays=arrays, make_tree=make_tree, context_length=context_length)
        for part in law.parts
    ]
    steps, sums = law.points
    words = [[[total & 0xFFFFFFFFFFFFFFFF, total >> 64] for total in row] for row in sums]
    rule["parts"] = arrays.keep(np.stack(parts).view(np.int64))
    rule["part_count"] = len(parts)
    rule["points"] = arrays.keep(np.array(steps, dtype=np.int64))
    rule["point_count"] = len(steps)
    rule["sums"] = arrays.keep(np.array(words, dtype=np.uint64))
