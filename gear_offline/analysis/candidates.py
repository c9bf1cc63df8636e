"""The strategies that are compared: the recipe's own one first, then those that were asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gear_offline.analysis.sampling import Strategy
from gear_offline.config.recipe import Recipe
from gear_offline.config.strict_yaml import read_yaml
from gear_offline.errors import InputError
from gear_offline.sampling import parse_options, parse_strategy

DEFAULT = (
    *("uniform_steps", "uniform_episodes", "return_weighted", "top_percent"),
    *("stratified_return", "shuffled_epochs", "min_dt", "d3rlpy"),
)
MOST_TEXT = 24  # characters of an option in a label


def parse_candidates(asked: str | Sequence[Any] | None, recipe: Recipe) -> list[Strategy]:
    """Return what to compare: the recipe's own strategy first, then those named or the usual.

    Parameters
    ----------
    asked
        ``"uniform_steps,top_k:k=50,return_weighted:rule=rank:temperature=2"``, or a list of such
        names and of mappings with ``strategy``, its options and, if wanted, a ``label``; or the
        name of a YAML file that holds such a list.
    """
    items = DEFAULT if asked is None else asked
    if isinstance(items, str) and items.strip().endswith((".yaml", ".yml")):
        if not isinstance(items := read_yaml(Path(items.strip())), list):
            remedy = "write a name or a mapping a line: - top_k:k=50"
            raise _unusable(f"{asked} holds no list", remedy)
    elif isinstance(items, str):
        items = [part for part in items.split(",") if part.strip()]
    if not items:
        raise _unusable("no strategy is named", "leave it out for the usual ones")
    found: dict[tuple[str, str], Strategy] = {}
    for item in ({"strategy": recipe.selection.strategy, **recipe.selection.options}, *items):
        if isinstance(item, str):
            name, options = parse_strategy(item)
        elif isinstance(item, Mapping) and isinstance(item.get("strategy"), str):
            options = dict(item)
            name = options.pop("strategy")
        else:
            what = f"{str(item)[:60]!r} is neither a name nor a mapping with a strategy"
            raise _unusable(what, "write it like {'strategy': 'top_k', 'k': 50}")
        label = options.pop("label", None)
        parse_options(name, options)
        key = name, str(sorted(options.items()))
        if key not in found or label:  # the recipe's own one may be given a label, too
            label = str(label or _label(name, options))
            found[key] = Strategy(label=label, strategy=name, options=options)
    labels = [one.label for one in found.values()]
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise _unusable(f"two strategies are called {twice[0]!r}", "give each a label of its own")
    return list(found.values())


def _label(name: str, options: Mapping[str, Any]) -> str:
    texts = [f"{key}={value}" for key, value in options.items()]
    short = [t if len(t) <= MOST_TEXT else f"{t[: MOST_TEXT - 3]}..." for t in texts]
    return " ".join([name, *short])


def _unusable(what: str, remedy: str) -> InputError:
    return InputError("USAGE", what, "--strategies", remedy)
