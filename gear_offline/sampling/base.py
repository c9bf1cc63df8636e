"""The interface of samplers, the registry of strategies, and `make_sampler`.

Without hidden state whoever asks, whenever and on whatever device, gets the same segments, and
resuming is setting the step number.

Shape legend: E episodes, N steps, B slots of a batch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar

import numpy as np
from pydantic import ConfigDict, ValidationError

from gear_offline.config.problems import problem_text
from gear_offline.config.strict_yaml import parse_yaml
from gear_offline.core.parts import Kind, admit, find_part, is_part, part_name
from gear_offline.core.text import plain
from gear_offline.core.types import Array, BoolArray, Float64Array, Int64Array, UInt64Array
from gear_offline.dataset.schema import EpisodeIndex
from gear_offline.errors import InputError
from gear_offline.kernels.draws import CumulativeWeights, Draw, GuidedSearch, Segments, draws

if TYPE_CHECKING:
    from gear_offline.sampling.prioritized import Prioritized


# Streams of random numbers of one seed.
SELECTION_STREAM = 0  # the segment of a slot
PART_STREAM = 1  # which part of a mixture a slot takes
ROTATION_STREAM = 2  # which stratum a step begins with
EPOCH_STREAM = 3  # keys of an epoch's order
GOAL_STREAM = 4  # of goals by hindsight
REMOVER_STREAM = 5  # when an episode's turn comes to be removed


class EpisodeData(Protocol):
    """A dataset, several for one table, or `Facts`."""

    @property
    def episodes(self) -> EpisodeIndex: ...
    @property
    def returns(self) -> Float64Array | None: ...
    @property
    def terminated(self) -> BoolArray | None: ...
    @property
    def column(self) -> Callable[[str], Array] | None: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Facts:
    """The facts of data and windows that a sampler may use; None: not known."""

    episodes: EpisodeIndex
    returns: Float64Array | None = None  # (E,) undiscounted sum of rewards of each episode
    terminated: BoolArray | None = None  # (E,) True if the environment ended the episode
    column: Callable[[str], Array] | None = None  # reads a column by its name, (N, *shape)
    context_length: int | None = None  # K of the loader
    kept: BoolArray | None = None  # (E,) what a table of limited size has; None: everything

    def need(self, name: Literal["returns", "terminated", "column", "context_length"]) -> Any:
        """Return a fact that the strategy needs."""
        value = getattr(self, name)
        if value is None:
            what = f"the strategy needs {name.replace('_', ' ')}"
            remedy = "pass a dataset, and context_length=K where the strategy depends on it"
            raise InputError("SELECTION", what, remedy=remedy)
        return value

    def of_kept(self) -> Facts:
        """Return the facts of the kept episodes alone."""
        kept, column = self.kept, self.column
        assert kept is not None, "the table has everything"
        rows = np.repeat(kept, self.episodes.lengths)
        return Facts(
            episodes=EpisodeIndex(self.episodes.lengths[kept]),
            returns=None if self.returns is None else self.returns[kept],
            terminated=None if self.terminated is None else self.terminated[kept],
            column=None if column is None else lambda name: column(name)[rows],
            context_length=self.context_length,
        )


# Of options that pydantic checks.
STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True)
class NoOptions:
    """A strategy without options."""


class Sampler:
    """A function from (seed, step) to segments.

    To add one, write a subclass with `sample`, or of `WeightedEpisodes` with `weights`, and
    `register` it.  `sample` must be a pure function whose row ``i`` is that of ``sample(seed,
    first_step + i, 1, count)``.  Every start lies inside its episode.  `probability` is exact, so
    that importance weights can be computed from it.

    Attributes
    ----------
    name
        Of the strategy, as registered.
    Options
        Frozen dataclass of the strategy's options, which checks them when it is made.
    padding
        The side on which windows are padded where that is a part of the strategy, else None.
    cuts_windows
        True if segments have `lengths`.
    index
        The table's episodes, which the numbers in segments refer to.
    options
        They build the same sampler again, with the name and the data; JSON-able by `asdict`.
    context_length
        K, of samplers that depend on it.
    episode_order
        (E,) the order in which episodes are drawn that are removed once they were; None: by chance.
    """

    name: str = ""
    Options: ClassVar[Callable[..., Any]] = NoOptions
    padding: Literal["left", "right"] | None = None
    cuts_windows: bool = False
    context_length: int | None = None
    episode_order: Int64Array | None = None
    knows_kept: ClassVar[bool] = False  # it leaves out what is not in `Facts.kept` itself

    def __init__(self, facts: Facts, options: Any = None) -> None:
        self.index = facts.episodes
        self.options = self.Options() if options is None else options

    def __init_subclass__(cls) -> None:
        """Drop the parent class's facts about its draws if this class draws in its own way."""
        if "sample" in vars(cls):
            for name in ("density", "episode_weight", "gpu"):
                if name not in vars(cls):
                    setattr(cls, name, getattr(Sampler, name))

    def __repr__(self) -> str:
        inside = ", ".join(f"{key}={value!r}" for key, value in asdict(self.options).items())
        return f"{type(self).__name__}({inside})"

    def sample(self, seed: int, first_step: int, steps: int, count: int) -> Segments:
        """Return the segments of consecutive steps, below ``2**63``: arrays (steps, count).

        `seed` is in ``[0, 2**64)``, `count` is B.
        """
        raise NotImplementedError

    def density(self, segments: Segments) -> Float64Array | None:
        """Return the probability of each segment in one slot; None if slots are not alike."""
        return None

    @property
    def episode_weight(self) -> Float64Array | None:
        """(E,) the probability of each episode, where known: likely ones go into GPU memory."""
        return None

    @cached_property
    def locate(self) -> StepLocator:
        """Finds the episode and the start of steps of the table."""
        return StepLocator(self.index)

    @property
    def loss_sampler(self) -> Prioritized | None:
        """The sampler that learns from losses, this one or a part of it."""
        return None

    @property
    def ahead(self) -> bool:
        """True if steps may be drawn before they come."""
        return self.loss_sampler is None

    @property
    def gpu(self) -> Draw | None:
        """The GPU's way to draw the same segments; None: the host draws ahead of use."""
        return None


class Members(Sampler):
    """A sampler over some episodes of a table, named by their numbers in the table."""

    def __init__(self, sampler: Sampler, members: Int64Array, index: EpisodeIndex) -> None:
        super().__init__(Facts(episodes=index), sampler.options)
        self._own, self._members = sampler, members
        self.name, self.padding = sampler.name, sampler.padding
        self.cuts_windows, self.context_length = sampler.cuts_windows, sampler.context_length
        if sampler.episode_order is not None:
            self.episode_order = members[sampler.episode_order]

    def sample(self, seed: int, first_step: int, steps: int, count: int) -> Segments:
        drawn = self._own.sample(seed, first_step, steps, count)
        return replace(drawn, episodes=self._members[drawn.episodes])

    def density(self, segments: Segments) -> Float64Array | None:
        number = np.full(self.index.episodes, -1)
        number[self._members] = np.arange(self._members.size)
        inside = number[segments.episodes] >= 0
        named = replace(
            segments,
            episodes=np.where(inside, number[segments.episodes], 0),
            starts=np.where(inside, segments.starts, 0),
        )
        density = self._own.density(named)
        return None if density is None else np.where(inside, density, 0.0)

    @property
    def episode_weight(self) -> Float64Array | None:
        own = self._own.episode_weight
        if own is None:
            return None
        weights = np.zeros(self.index.episodes)
        weights[self._members] = own
        return weights

    @property
    def gpu(self) -> Draw | None:
        """The same search where weights decide: other episodes have no mass between theirs."""
        own = self._own.gpu
        if not isinstance(own, CumulativeWeights):
            return None
        before = np.searchsorted(self._members, np.arange(self.index.episodes), side="right")
        table = np.append(np.uint64(0), own.search.table)[before]
        return CumulativeWeights(GuidedSearch(table, last=int(self._members[own.search.last])))


def has_density(kind: type[Sampler]) -> bool:
    """Return true if samplers of a class know densities, so that a mixture can hold them."""
    return kind.density is not Sampler.density


_SAMPLERS: dict[str, type[Sampler]] = {}
STRATEGIES = Kind(noun="strategy", option="selection.strategy", code="SELECTION", own=_SAMPLERS)
_Kind = TypeVar("_Kind", bound=type[Sampler])


def register(name: str) -> Callable[[_Kind], _Kind]:
    """Register a subclass of `Sampler` as the strategy `name`, which no other one may have."""

    def add(kind: _Kind) -> _Kind:
        if name in _SAMPLERS:
            raise ValueError(f"strategy {name!r} is already registered")
        kind.name = name
        _SAMPLERS[name] = kind
        return kind

    return add


def strategy_names() -> tuple[str, ...]:
    """Return the registered names, sorted."""
    return tuple(sorted(_SAMPLERS))


def sampler_class(name: object) -> type[Sampler]:
    """Return the class of a strategy."""
    found = find_part(STRATEGIES, part_name(name))
    if not (isinstance(found, type) and issubclass(found, Sampler)):
        what, remedy = f"{name} is no sampler", "derive it from gear_offline.WeightedEpisodes"
        raise InputError("SELECTION", what, "selection.strategy", remedy)
    if is_part(part_name(name)):
        found.name = str(part_name(name))
    return found


def parse_options(name: object, options: Mapping[str, Any]) -> Any:
    """Return the checked options of a strategy; needs no data."""
    takes: Any = sampler_class(name).Options
    try:
        return takes(**{key: plain(value) for key, value in options.items()})
    except (TypeError, ValueError) as error:
        what = error.what if isinstance(error, InputError) else str(error).split("() ")[-1]
        if isinstance(error, ValidationError):
            what = "; ".join(problem_text(problem) for problem in error.errors())
        names = [
            option.name + " (required)" * (option.default is option.default_factory is MISSING)
            for option in fields(takes)
        ]
        what = f"options {sorted(options)} do not fit strategy {name!r}: {what}"
        remedy = f"it takes {', '.join(names) or 'no options'}; see docs/reference/strategies.md"
        raise InputError("SELECTION", what, remedy=remedy) from error


def parse_strategy(text: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the options of ``"return_weighted:rule=rank:temperature=2"``."""
    name, *options = text.strip().split(":")
    if options and "=" not in options[0]:  # FILE.py:Name, package.module:Name
        name, options = f"{name}:{options[0]}", options[1:]
    pairs = [option.split("=", 1) for option in options if "=" in option]
    values = {key.strip(): value for key, value in pairs}
    if not name or len(values) < len(options):
        what = f"{text.strip()!r} is not a strategy with options"
        raise InputError("SELECTION", what, remedy="write it like top_k:k=50:unit=steps")
    return name, {k: parse_yaml(v, where=f"option {k}") for k, v in values.items()}


def make_sampler(
    name: str,
    data: EpisodeData | EpisodeIndex,
    *,
    context_length: int | None = None,
    kept: BoolArray | None = None,
    **options: Any,
) -> Sampler:
    """Build a sampler by the name of its strategy.

    Parameters
    ----------
    name
        One of `strategy_names`.
    data
        A dataset, or `Facts`, or an episode index for strategies that need nothing else.
    context_length
        K of the loader, for the strategies that depend on it.
    kept
        (E,) the episodes to draw from, as if there were no others; default all.
    options
        Options of the strategy: see docs/reference/strategies.md.

    Raises
    ------
    InputError
        ``SELECTION``: the strategy is unknown, the options are not its own, there is nothing to
        draw from, or the data lack what it needs.

    Examples
    --------
    `tiny` is what the example of `gear_offline.convert` makes.

    >>> import gear_offline as go
    >>> sampler = go.make_sampler("top_k", go.open_dataset("tiny"), k=1)
    >>> segments = sampler.sample(seed=0, first_step=0, steps=1, count=3)
    >>> segments.episodes.tolist(), segments.probability.round(3).tolist()
    ([[0, 0, 0]], [[0.143, 0.143, 0.143]])
    """
    admit([name := part_name(name)])
    return sampler_for(name, data, options, context_length=context_length, kept=kept)


def sampler_for(
    name: object,
    data: EpisodeData | EpisodeIndex,
    options: Mapping[str, Any],
    *,
    context_length: int | None = None,
    kept: BoolArray | None = None,
) -> Sampler:
    """Build a sampler as `make_sampler` does, of a name that a recipe or its run says."""
    if isinstance(data, EpisodeIndex):
        data = Facts(episodes=data)
    facts = Facts(
        episodes=data.episodes,
        returns=data.returns,
        terminated=data.terminated,
        column=data.column,
        context_length=context_length,
        kept=None if kept is None or kept.all() else kept,
    )
    if facts.episodes.episodes == 0 or not (kept is None or kept.any()):
        raise InputError("SELECTION", "the table has no episodes to select from")
    return build_sampler(name, facts, options)


def build_sampler(name: object, facts: Facts, options: Mapping[str, Any]) -> Sampler:
    """Return a sampler of the episodes that are kept."""
    kind, chosen = sampler_class(name), parse_options(name, options)
    if facts.kept is None or kind.knows_kept:
        return kind(facts, chosen)
    members = np.flatnonzero(facts.kept)
    return Members(kind(facts.of_kept(), chosen), members, facts.episodes)


def check_range(seed: int, first_step: int, steps: int, count: int) -> None:
    """Refuse a seed, steps or slots that are out of range."""
    numbers = all(hasattr(value, "__index__") for value in (first_step, steps))
    last = operator.index(first_step) + operator.index(steps) if numbers else 0
    for what, value, low, high in (
        ("seed", seed, 0, 1 << 64),
        ("step", first_step, 0, 1 << 63),
        ("last step", last, 0, 1 << 63),
        ("steps", steps, 0, 1 << 32),
        ("batch size", count, 1, (1 << 32) + 1),
    ):
        if not (hasattr(value, "__index__") and low <= operator.index(value) < high):
            remedy = f"use an integer in [{low}, {high})"
            raise InputError("SELECTION", f"{what} {value} is out of range", remedy=remedy)


def slot_draws(
    seed: int, first_step: int, steps: int, count: int, *, stream: int = SELECTION_STREAM
) -> tuple[UInt64Array, UInt64Array]:
    """Return the two numbers of each slot, both (steps, count) uint64."""
    check_range(seed, first_step, steps, count)
    return draws(seed=seed, stream=stream, first_step=first_step, steps=steps, count=count)


class StepLocator:
    """Finds the episode and the start of steps of the table."""

    def __init__(self, index: EpisodeIndex) -> None:
        self._offsets = index.offsets
        self.search = GuidedSearch(
            index.offsets[1:].view(np.uint64),
            last=index.episodes - 1,
            bits=index.steps.bit_length(),
        )

    def __call__(self, rows: Int64Array) -> tuple[Int64Array, Int64Array]:
        episodes = self.search.find(rows.view(np.uint64))
        return episodes, rows - self._offsets[episodes]


@dataclass(frozen=True, kw_only=True)
class SegmentStream:
    """The segments of every step of a loader, or of one rank's part of it."""

    selection: Sampler
    seed: int
    global_batch: int  # segments that are drawn in each step
    first_slot: int  # of them, this rank's
    rank_batch: int

    def draw(self, first_step: int, steps: int) -> Segments:
        """Return the segments of consecutive steps, of all ranks, (steps, global_batch)."""
        return self.selection.sample(self.seed, first_step, steps, self.global_batch)

    def segments(self, first_step: int, steps: int) -> Segments:
        """Return the segments of consecutive steps, (steps, rank_batch)."""
        if not self.rank_batch:  # of a rank that does not feed a model's input
            none = np.zeros((steps, 0), np.int64)
            return Segments(episodes=none, starts=none, probability=none.astype(np.float64))
        return self.draw(first_step, steps)[:, self.first_slot : self.first_slot + self.rank_batch]
