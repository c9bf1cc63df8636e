"""Strategies by name, their options, and `make_sampler`.

A strategy is a function of `Facts` and of its options.  It returns (E,) weights of the episodes, or
a sampler.  Its options are its further parameters, which pydantic checks against their types.

Shape legend: E episodes, N steps.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from gear_offline.batches.sampling.draws import (
    STRATEGIES,
    CumulativeWeights,
    EpisodeData,
    Facts,
    Sampler,
    widen_sampler,
)
from gear_offline.config.problems import problem_text
from gear_offline.config.recipe import strategies_in
from gear_offline.config.strict_yaml import parse_yaml
from gear_offline.core.parts import admit, calling_part, find_part, part_name
from gear_offline.core.text import to_plain
from gear_offline.core.types import BoolArray
from gear_offline.data.dataset.schema import EpisodeIndex
from gear_offline.errors import InputError

Drawn = npt.ArrayLike | Sampler  # (E,) weights of the episodes, or any sampler
Selection = str | Callable[..., Any] | Mapping[str, Any]
Function = TypeVar("Function", bound=Callable[..., Drawn])


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """A registered strategy."""

    name: str
    draw: Callable[..., Drawn]
    options: type[BaseModel]  # checks them
    check: Callable[[dict[str, Any]], None] = lambda options: None  # of the options together
    padding: Literal["left", "right"] | None = None  # the side of windows that is a part of it
    mixable: bool = True  # slots and steps are alike, so that a mixture can hold it
    handles_subset: bool = False  # it leaves out itself what is not in `Facts.kept`


_STRATEGIES: dict[str, Strategy] = STRATEGIES.own


def strategy(
    name: str,
    *,
    padding: Literal["left", "right"] | None = None,
    check: Callable[[dict[str, Any]], None] = lambda options: None,
    mixable: bool = True,
    handles_subset: bool = False,
) -> Callable[[Function], Function]:
    """Register a function of `Facts` and options as the strategy `name`, which no other may have.

    `check` raises `ValueError` if checked options do not fit each other; it may fill in defaults.
    """

    def add(draw: Function) -> Function:
        before = _STRATEGIES.get(name)
        if before is not None and _place(before.draw) != _place(draw):
            raise ValueError(f"strategy {name!r} is already registered")
        _STRATEGIES[name] = Strategy(
            name=name,
            draw=draw,
            options=_options(name, draw),
            check=check,
            padding=padding,
            mixable=mixable,
            handles_subset=handles_subset,
        )
        return draw

    return add


def _place(draw: Callable[..., Drawn]) -> tuple[Any, str]:
    """Return the file of a function, which may be read again, and its name there."""
    return getattr(getattr(draw, "__code__", None), "co_filename", draw), draw.__qualname__


def _options(name: str, draw: Callable[..., Drawn]) -> type[BaseModel]:
    """Return the pydantic model of the further parameters of a strategy."""
    _, *parameters = signature(draw, eval_str=True).parameters.values()
    fields: dict[str, Any] = {
        each.name: (
            Any if each.annotation is each.empty else each.annotation,
            ... if each.default is each.empty else each.default,
        )
        for each in parameters
    }
    config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())
    with warnings.catch_warnings():  # of options that are called as methods of pydantic: copy, json
        warnings.simplefilter("ignore", UserWarning)
        return create_model(name, __config__=config, **fields)


def strategy_names() -> tuple[str, ...]:
    """Return the registered names, sorted."""
    return tuple(sorted(_STRATEGIES))


def find_strategy(name: object) -> Strategy:
    function, full_name = find_part(STRATEGIES, part_name(name)), str(part_name(name))
    if isinstance(function, Strategy):
        return function
    if not callable(function):
        remedy = "write a function of facts and options: docs/reference/strategies.md"
        raise InputError("SELECTION", f"{name} is no function", "selection.strategy", remedy)
    for registered in _STRATEGIES.values():  # it may be registered, with facts of its own
        if registered.draw is function:
            return replace(registered, name=full_name)
    with calling_part(STRATEGIES, "its signature", full_name):
        options = _options(function.__name__, function)
        return Strategy(name=full_name, draw=function, options=options)


def resolve_options(name: object, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options of a strategy, checked; needs no data."""
    spec = find_strategy(name)
    try:
        checked = spec.options.model_validate(to_plain(dict(options))).model_dump()
        spec.check(checked)
        return checked
    except ValueError as error:
        what = error.problem if isinstance(error, InputError) else str(error)
        if isinstance(error, ValidationError):
            what = "; ".join(problem_text(problem) for problem in error.errors())
        names = [
            option + " (required)" * field.is_required()
            for option, field in spec.options.model_fields.items()
        ]
        what = f"options {sorted(options)} do not fit strategy {name!r}: {what}"
        remedy = f"it takes {', '.join(names) or 'no options'}; see docs/reference/strategies.md"
        raise InputError("SELECTION", what, remedy=remedy) from error


def parse_strategy(selection: Selection) -> tuple[str, dict[str, Any]]:
    """Return the name and the options of a strategy that a user names, which is then admitted.

    ``"return_weighted:rule=rank"``, a function, or ``{"strategy": either, "rule": "rank"}``.
    """
    options: dict[str, Any] = {}
    if isinstance(selection, Mapping):
        options = dict(selection)
        selection, options = options.pop("strategy", None), options.pop("options", options)
    elif isinstance(selection, str):
        selection, options = _parse_text(selection)
    name = part_name(selection)
    if not isinstance(name, str) or not isinstance(options, Mapping):
        problem = f"{selection!r:.60} names no strategy"
        remedy = "give a name, a function, or {'strategy': either, OPTION: VALUE}"
        raise InputError("SELECTION", problem, "selection", remedy)
    admit(strategies_in({"strategy": name, **options}))
    return name, dict(options)


def _parse_text(text: str) -> tuple[str, dict[str, Any]]:
    name, *options = text.strip().split(":")
    if options and "=" not in options[0]:  # FILE.py:Name, package.module:Name
        name, options = f"{name}:{options[0]}", options[1:]
    pairs = [option.split("=", 1) for option in options if "=" in option]
    values = {key.strip(): value for key, value in pairs}
    if not name or len(values) < len(options):
        problem = f"{text.strip()!r} is not a strategy with options"
        raise InputError("SELECTION", problem, remedy="write it like top_k:k=50:unit=steps")
    return name, {k: parse_yaml(v, where=f"option {k}") for k, v in values.items()}


def make_sampler(
    name: str | Callable[..., Any],
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
        One of `strategy_names`, FILE.py:Name, or a function of facts and options.
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
    """Build a sampler as `make_sampler` does, of a strategy that a recipe names."""
    if isinstance(data, EpisodeIndex):
        data = Facts(episodes=data)
    facts = facts_of(data, context_length, kept=None if kept is None or kept.all() else kept)
    if facts.episodes.episodes == 0 or not (kept is None or kept.any()):
        raise InputError("SELECTION", "the table has no episodes to select from")
    return build_sampler(name, facts, options)


def facts_of(
    data: EpisodeData, context_length: int | None, *, kept: BoolArray | None = None
) -> Facts:
    """Return the facts of data that a strategy, or a law of goals, may use."""
    return Facts(
        episodes=data.episodes,
        returns=data.returns,
        terminated=data.terminated,
        column=data.column,
        context_length=context_length,
        kept=kept,
    )


def build_sampler(name: object, facts: Facts, options: Mapping[str, Any]) -> Sampler:
    """Return a sampler of the episodes that are kept."""
    spec, checked = find_strategy(name), resolve_options(name, options)
    mask = None if spec.handles_subset else facts.kept
    subset = facts if mask is None else facts.of_kept()
    if spec.draw.__module__.startswith("gear_offline."):
        result = spec.draw(subset, **checked)
    else:
        with calling_part(STRATEGIES, "drawing", spec.name):
            result, again = (spec.draw(subset, **checked) for _ in range(2))
            if isinstance(result, Sampler):
                check_repeats(result, spec.name)
            else:
                result, again = (np.asarray(weights, np.float64) for weights in (result, again))
                if not np.array_equal(result, again, equal_nan=True):
                    problem = "it gives other weights each time"
                    remedy = "use np.random.default_rng(0)"
                    raise InputError("SELECTION", problem, spec.name, remedy)
    sampler = (
        result
        if isinstance(result, Sampler)
        else CumulativeWeights(subset.episodes, result, where=spec.name)
    )
    if mask is not None:
        sampler = widen_sampler(sampler, np.flatnonzero(mask), facts.episodes)
    padding = sampler.padding or spec.padding
    return sampler.with_facts(name=spec.name, options=checked, padding=padding)


def check_repeats(sampler: Sampler, where: str = "") -> None:
    """Refuse a user's sampler whose draws are no function of (seed, step)."""
    with calling_part(STRATEGIES, "drawing", where):
        draws = [sampler.sample(0, first, 2 - first, 2) for first in (0, 0, 1)]
        pair, again, second = [np.stack([each.episodes, each.starts]) for each in draws]
    lengths, (episodes, starts) = sampler.index.lengths, pair
    is_inside = pair.shape == (2, 2, 2) and pair.min() >= 0 and episodes.max() < len(lengths)
    problems = {
        "draws are no starts inside their episodes, (steps, count)": is_inside
        and bool((starts < lengths[episodes]).all()),
        "it draws other segments each time": np.array_equal(pair, again),
        "draws of a step depend on how many steps are drawn at once": np.array_equal(
            pair[:, -1], second[:, -1]
        ),
    }
    for problem, holds in problems.items():
        if not holds:
            remedy = "draw each step by np.random.default_rng([seed, step])"
            raise InputError("SELECTION", problem, where, remedy)
