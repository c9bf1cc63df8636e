"""What a law is, the registry of laws, and the facts of the data that a law may ask for.

Shape legend: E episodes, N steps, T steps of one episode, B slots of a batch.
"""

from __future__ import annotations

import difflib
import inspect
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from gear_offline.dataset.schema import BoolArray, EpisodeIndex, Int64Array
from gear_offline.errors import InputError
from gear_offline.kernels.philox import UInt64Array, draws
from gear_offline.sampling.options import plain

SELECTION_STREAM = 0  # the generator's stream for drawing segments
PART_STREAM = 1  # which part of a mixture a slot takes
ROTATION_STREAM = 2  # which stratum a step begins with
EPOCH_STREAM = 3  # keys of an epoch's order

Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Segments:
    """Windows of episodes, named by episode and start.

    Attributes
    ----------
    episodes
        int64, any shape ``S``: episode of each segment.
    starts
        int64, ``S``: first step of the segment within its episode, ``0 <= start < T``.
    probability
        float64, ``S``: the probability with which the law draws that segment in one slot.
        May be a read-only broadcast.
    lengths
        int64, ``S``: steps of the window at most, at least 1, for laws that cut windows before
        K steps and the episode's end do; None for all others.
    """

    episodes: Int64Array
    starts: Int64Array
    probability: Float64Array
    lengths: Int64Array | None = field(default=None)

    def __post_init__(self) -> None:
        shapes = {self.episodes.shape, self.starts.shape, self.probability.shape}
        if self.lengths is not None:
            shapes.add(self.lengths.shape)
        if len(shapes) > 1:
            raise InputError("SEGMENTS_SHAPE", "episodes, starts and probability differ in shape")

    @property
    def shape(self) -> tuple[int, ...]:
        """`S`, the shape of the arrays."""
        return self.episodes.shape

    def __getitem__(self, item: int | slice | tuple[slice, ...]) -> Segments:
        """Return the part that `item` names."""
        return Segments(
            episodes=self.episodes[item],
            starts=self.starts[item],
            probability=self.probability[item],
            lengths=None if self.lengths is None else self.lengths[item],
        )


@runtime_checkable
class Selection(Protocol):
    """A law that turns (seed, step) into segments.

    To add one, write a class with these members and `register` a function that builds it from an
    `EpisodeIndex` and keyword options; `SlotLaw` writes `select` for you.  What it must keep:

    - ``select(seed, step, count)`` is a pure function and equals row 0 of
      ``select_many(seed, step, 1, count)``; row ``i`` of ``select_many(seed, first_step, ...)``
      equals ``select(seed, first_step + i, count)`` bit for bit;
    - every start lies inside its episode;
    - `probability` is the exact law, so that importance weights can be computed from it.

    Attributes
    ----------
    name
        Registered name.
    options
        JSON-able keyword arguments that, with the name and the data, build the same law again.
        They are saved in a loader's state and compared when it is loaded.
    """

    @property
    def name(self) -> str:
        """Registered name."""
        ...

    @property
    def options(self) -> Mapping[str, Any]:
        """What builds the same law again, JSON-able."""
        ...

    def select(self, *, seed: int, step: int, count: int) -> Segments:
        """Return the segments of one `step` under `seed`, arrays of shape (count,)."""
        ...

    def select_many(self, *, seed: int, first_step: int, steps: int, count: int) -> Segments:
        """Return those of `steps` steps from `first_step` on under `seed`, (steps, count)."""
        ...


@runtime_checkable
class HasDensity(Protocol):
    """A law whose slots are alike and that knows the probability of any segment."""

    def density(self, segments: Segments) -> Float64Array:
        """Return float64, the segments' shape: the probability of each in one slot."""
        ...


class SlotLaw:
    """Writes `select` in terms of `select_many`, which a subclass has."""

    def __repr__(self) -> str:
        options = getattr(self, "options", {})
        inside = ", ".join(f"{key}={value!r}" for key, value in options.items())
        return f"{type(self).__name__}({inside})"

    def select(self, *, seed: int, step: int, count: int) -> Segments:
        """Return the segments of one `step` under `seed`, arrays of shape (count,)."""
        return self.select_many(seed=seed, first_step=step, steps=1, count=count)[0]

    def select_many(self, *, seed: int, first_step: int, steps: int, count: int) -> Segments:
        """Return those of `steps` steps from `first_step` on under `seed`, (steps, count)."""
        raise NotImplementedError


class HasEpisodes(Protocol):
    """Anything with an episode index, such as a dataset."""

    @property
    def episodes(self) -> EpisodeIndex:
        """Episode index."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Facts:
    """What laws may know of the data, beside its lengths.

    A law asks by naming a keyword argument ``returns``, ``terminated`` or ``context_length``;
    such arguments are not options.

    Attributes
    ----------
    episodes
        Episode index.
    returns
        (E,) float64, undiscounted sum of rewards of each episode.
    terminated
        (E,) bool, whether the environment ended the episode.
    """

    episodes: EpisodeIndex
    returns: Float64Array | None = None
    terminated: BoolArray | None = None


FACTS = ("returns", "terminated", "context_length")
Factory = Callable[..., Selection]
Check = Callable[..., None]
_FACTORIES: dict[str, Factory] = {}
_CHECKS: dict[str, Check] = {}


def register(name: str, *, check: Check | None = None) -> Callable[[Factory], Factory]:
    """Register a function or class ``(index, **options) -> Selection`` under `name`.

    Parameters
    ----------
    check
        Called with the options before the data are known; raises `InputError`
        (``SELECTION_OPTIONS``) on a value that cannot be used.  See `sampling.options`.

    Raises
    ------
    ValueError
        The name is taken.
    """

    def add(factory: Factory) -> Factory:
        if name in _FACTORIES:
            raise ValueError(f"selection {name!r} is already registered")
        _FACTORIES[name] = factory
        if check is not None:
            _CHECKS[name] = check
        return factory

    return add


def selection_names() -> tuple[str, ...]:
    """Return the registered names, sorted."""
    return tuple(sorted(_FACTORIES))


def option_names(name: str) -> list[str]:
    """Return the options that the registered strategy `name` takes."""
    parameters = list(inspect.signature(_FACTORIES[name]).parameters)[1:]  # the first is the index
    return [p for p in parameters if p not in FACTS]


def misfit(name: str, options: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Return why `options` do not fit the registered strategy `name`, and the options it takes.

    The reason is empty when they fit.  Needs no data.
    """
    signature = inspect.signature(_FACTORIES[name])
    taken = option_names(name)
    unknown = [key for key in options if key not in taken]
    try:
        asked = {key: None for key in FACTS if key in signature.parameters}
        signature.bind(None, **{**asked, **options})
        if unknown:
            raise TypeError(f"got an unexpected keyword argument {unknown[0]!r}")
    except TypeError as error:
        return str(error), taken
    check = _CHECKS.get(name)
    try:
        if check is not None:
            check(**options)
    except InputError as error:
        return str(error), taken
    return "", taken


def make_selection(
    name: str,
    data: HasEpisodes | Facts | EpisodeIndex,
    *,
    context_length: int | None = None,
    **options: Any,
) -> Selection:
    """Build a selection by name.

    Parameters
    ----------
    name
        One of `gear_offline.sampling.selection.selection_names`.
    data
        A dataset, or `sampling.selection.Facts`, or an episode index for laws that need
        nothing else.
    context_length
        K of the loader, for the laws that depend on it.
    options
        What the law takes: see docs/strategies.md.

    Raises
    ------
    InputError
        ``SELECTION_UNKNOWN``, ``SELECTION_OPTIONS`` (also a TypeError or ValueError that a law
        raises while it is made with options), ``SELECTION_EMPTY`` (nothing to draw from),
        ``SELECTION_DATA`` (the data lack what the law asks for), ``DATASET_KIND`` (`data` is none
        of these).

    Examples
    --------
    `tiny` is what the example of `gear_offline.convert.convert` makes.

    >>> import gear_offline as go
    >>> law = go.make_selection("top_k", go.open_dataset("tiny"), k=1)
    >>> segments = law.select(seed=0, step=0, count=3)
    >>> segments.episodes.tolist(), segments.probability.round(3).tolist()
    ([0, 0, 0], [0.143, 0.143, 0.143])
    """
    factory = _FACTORIES.get(name) if isinstance(name, str) else None
    if factory is None:
        near = difflib.get_close_matches(str(name), _FACTORIES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise InputError(
            "SELECTION_UNKNOWN",
            f"no selection strategy {name!r}",
            remedy=f"{hint}strategies: {', '.join(selection_names())}",
        )
    index = data if isinstance(data, EpisodeIndex) else getattr(data, "episodes", None)
    if not isinstance(index, EpisodeIndex):
        raise InputError(
            "DATASET_KIND",
            f"a {type(data).__name__} is not a dataset",
            remedy="give what gear_offline.open_dataset(PATH) returns",
        )
    if index.episodes == 0:
        raise InputError("SELECTION_EMPTY", "the table has no episodes to select from")
    options = {k: plain(v) if isinstance(v, np.generic) else v for k, v in options.items()}
    problem, taken = misfit(name, options)
    if problem:
        raise InputError(
            "SELECTION_OPTIONS",
            f"options {sorted(options)} do not fit strategy {name!r}: {problem}",
            remedy=f"it takes {', '.join(taken) or 'none'}; see docs/strategies.md",
        )
    asked = _facts(name, factory, data, context_length)
    try:
        return factory(index, **asked, **options)
    except InputError:
        raise
    except (TypeError, ValueError) as error:
        if not options:
            raise
        given = ", ".join(f"{key}={value!r}" for key, value in options.items())
        raise InputError(
            "SELECTION_OPTIONS",
            f"strategy {name!r} cannot be made with {given}: {error}",
            remedy="change them; in Python the error's cause has the place",
        ) from error


def _facts(name: str, factory: Factory, data: object, context_length: int | None) -> dict[str, Any]:
    """Return the facts that `factory` asks for; those with a default may be missing."""
    found: dict[str, Any] = {}
    for key, parameter in inspect.signature(factory).parameters.items():
        if key not in FACTS:
            continue
        value = context_length if key == "context_length" else getattr(data, key, None)
        if value is not None:
            found[key] = value
        elif parameter.default is inspect.Parameter.empty:
            raise InputError(
                "SELECTION_DATA",
                f"strategy {name!r} needs {key.replace('_', ' ')}",
                remedy="pass a dataset, and context_length=K where the law depends on it",
            )
    return found


def check_range(*, seed: int, first_step: int, steps: int, count: int) -> None:
    """Raise `InputError` (``SELECTION_RANGE``) unless the arguments fit the generator's counter.

    `seed` below 2**64, `first_step` and what follows from `steps` below 2**63, `count` segments.
    """
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
            raise InputError(
                "SELECTION_RANGE",
                f"{what} {value} is out of range",
                remedy=f"use an integer in [{low}, {high})",
            )


def options_of(law: object, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the attributes `names` of a law as its JSON-able options."""
    return {name: getattr(law, name) for name in names}


def slot_draws(
    *, seed: int, first_step: int, steps: int, count: int
) -> tuple[UInt64Array, UInt64Array]:
    """Return the two numbers of each slot, both (steps, count) uint64, of the selection's stream.

    Raises
    ------
    InputError
        ``SELECTION_RANGE``
    """
    check_range(seed=seed, first_step=first_step, steps=steps, count=count)
    return draws(
        seed=seed, stream=SELECTION_STREAM, first_step=first_step, steps=steps, count=count
    )


class StepLocator:
    """Finds the episode of a step faster than a binary search over all episodes.

    A guide names, for each of about 16 equal ranges of steps per episode, the episode of the
    range's first step.  Most ranges hold no episode boundary; only steps beyond one are searched.
    Costs 128 to 256 bytes an episode.
    """

    def __init__(self, index: EpisodeIndex) -> None:
        self._offsets = index.offsets
        ranges = min(16 * index.episodes, index.steps)
        self._shift = max((index.steps // ranges).bit_length() - 1, 0)
        firsts = np.arange(((index.steps - 1) >> self._shift) + 1, dtype=np.int64) << self._shift
        self._guide = index.episode_of(firsts)

    def __call__(self, steps: Int64Array) -> Int64Array:
        """Return the episode of each global step, same shape, int64."""
        episodes: Int64Array = self._guide[steps >> self._shift]
        beyond = steps >= self._offsets[episodes + 1]
        found = np.searchsorted(self._offsets, steps[beyond], side="right")
        episodes[beyond] = found - 1
        return episodes
